"""A FlyDSL kernel on CPU tensors runs end to end: FlyDSL's own host launcher, the emulator, counts."""

import subprocess
import sys

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from aiter_paged_fp8.emulator import MemoryFault, Options
from aiter_paged_fp8.runtime import emulated, flydsl_private
from op_tests.emulator_flydsl import emulating

BLOCK = 256


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def add_kernel(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor):
    i = fx.block_idx.x * BLOCK + fx.thread_idx.x
    C[i] = A[i] + B[i]


@flyc.jit
def add(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor, n: fx.Int32, stream: fx.Stream = fx.Stream(None)):
    add_kernel(A, B, C).launch(grid=(n // BLOCK, 1, 1), block=(BLOCK, 1, 1), stream=stream)


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def axpy_kernel(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor, alpha: fx.Float32):
    i = fx.block_idx.x * BLOCK + fx.thread_idx.x
    C[i] = A[i] * alpha + B[i]


@flyc.jit
def axpy(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor, alpha: fx.Float32, n: fx.Int32, stream: fx.Stream = fx.Stream(None)):
    axpy_kernel(A, B, C, alpha).launch(grid=(n // BLOCK, 1, 1), block=(BLOCK, 1, 1), stream=stream)


def operands(n):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=generator), torch.randn(n, generator=generator), torch.full((n,), float("nan"))


@pytest.mark.parametrize("memory", ["latest", "earliest", "seeded"])
def test_vector_add_writes_its_result_and_counts_what_it_did(memory):
    a, b, c = operands(1024)
    with emulating(Options(memory=memory)) as session:
        add(a, b, c, 1024)
    assert torch.equal(c, a + b)
    (launch,) = session.launches
    assert launch.grid == (4, 1, 1)
    assert launch.block == (BLOCK, 1, 1)
    assert launch.counts.waves == 16
    assert launch.counts.by_mnemonic["global_store_dword"] == 16
    assert launch.counts.bytes["global read"] == 2 * 4 * 1024
    assert launch.counts.bytes["global written"] == 4 * 1024
    assert launch.counts.instructions == sum(launch.counts.by_line.values()) == sum(launch.counts.by_class.values())
    assert not launch.reports


def test_scalar_arguments_and_the_grid_come_from_the_host_launcher():
    a, b, c = operands(2048)
    with emulating() as session:
        compiled = flyc.compile(axpy, a, b, c, 2.5, 2048)
        assert len(session.launches) == 1
        c.fill_(0)
        compiled(a, b, c, -3.0, 1024, fx.Stream(None))
    assert session.launches[1].grid == (4, 1, 1)
    assert torch.equal(c[:1024], (a * -3.0 + b)[:1024])
    assert not c[1024:].any()


def test_compile_only_launches_nothing():
    a, b, c = operands(1024)
    with emulating() as session:
        with session.compile_only():
            compiled = flyc.compile(add, a, b, c, 1024)
        assert not session.launches
        assert c.isnan().all()
        compiled(a, b, c, 1024, fx.Stream(None))
    assert torch.equal(c, a + b)


def test_a_view_is_legal_only_to_its_own_end():
    a, b, c = operands(2048)
    with emulating() as session:
        with pytest.raises(MemoryFault) as fault:
            add(a, b[:1000], c, 1024)
        assert not session.launches
    message = str(fault.value)
    assert "add_kernel" in message
    assert "global_load_dword" in message
    assert "B [" in message
    assert fault.value.details["lane"] == 1000 % 64
    assert fault.value.details["wave"] == 1000 % BLOCK // 64
    assert fault.value.details["workgroup"] == (3, 0, 0)
    assert fault.value.details["address"] == b.data_ptr() + 4000
    assert fault.value.details["nearest"] == "B"


def test_stores_to_a_read_only_tensor_are_a_fault():
    a, b, c = operands(1024)
    with emulating() as session:
        session.read_only(c)
        with pytest.raises(MemoryFault, match="read-only"):
            add(a, b, c, 1024)


def test_a_compiled_function_says_where_it_may_be_called():
    a, b, c = operands(1024)
    with emulating():
        compiled = flyc.compile(add, a, b, c, 1024)
    with pytest.raises(RuntimeError, match="compiled for the emulator"):
        compiled(a, b, c, 1024, fx.Stream(None))


def test_disk_cache_is_the_emulators_own(tmp_path, monkeypatch):
    hardware, own = tmp_path / "hardware", tmp_path / "own"
    monkeypatch.setenv("FLYDSL_RUNTIME_CACHE_DIR", str(hardware))
    a, b, c = operands(1024)
    with emulated(cache_dir=own):
        flyc.jit(add.func)(a, b, c, 1024)
    (artifact,) = own.rglob("*.pkl")
    written = artifact.stat().st_mtime_ns
    with emulated(cache_dir=own) as session:
        flyc.jit(add.func)(a, b, c, 1024)
    assert len(session.launches) == 1
    assert artifact.stat().st_mtime_ns == written
    with emulated():
        flyc.jit(add.func)(a, b, c, 1024)
    assert len(list(own.rglob("*.pkl"))) == 1
    assert not hardware.exists()


def test_importing_needs_neither_flydsl_nor_torch():
    code = (
        "import sys, aiter_paged_fp8, aiter_paged_fp8.emulator, aiter_paged_fp8.runtime;"
        "print([m for m in ('flydsl', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("module", "path"), [(module, path) for module, path, _, _ in flydsl_private.NAMES])
def test_each_private_name_of_flydsl_is_there(module, path):
    assert flydsl_private.lookup(module, path) is not None


def test_a_missing_private_name_is_named(monkeypatch):
    flydsl_private.check_names()
    names = (("flydsl.compiler.jit_function", "_no_such_name", None, "testing"),)
    monkeypatch.setattr(flydsl_private, "NAMES", names)
    with pytest.raises(flydsl_private.FlyDSLChanged, match=r"_no_such_name, which testing needs"):
        flydsl_private.check_names()
    names = (("flydsl.compiler.jit_function", "_run_pipeline", ("nonsense",), "testing"),)
    monkeypatch.setattr(flydsl_private, "NAMES", names)
    with pytest.raises(flydsl_private.FlyDSLChanged, match=r"testing needs it to take \('nonsense',\)"):
        flydsl_private.check_names()
