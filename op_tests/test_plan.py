"""Where a call goes and why: `plan`, `supported`, `preload`, the log, and the batch dispatcher that follows the plan.

Plans are made of metadata alone, so every row is asked twice: with CPU tensors and with tensors that have no memory.
What the machine has (kernels that exist, FlyDSL) is set by the row, so that the table holds on any machine.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aiter_paged_fp8 import (
    Code,
    api,
    flydsl_flash_attn_batch_prefill_func,
    flydsl_flash_attn_paged_prefill_func,
    flydsl_flash_attn_paged_prefill_preload,
    flydsl_flash_attn_paged_prefill_supported,
    plan,
    planner,
    record,
    use_executor,
    use_options,
)
from aiter_paged_fp8.kernels.fmha_gfx950 import traits
from aiter_paged_fp8.runtime import executors, native
from op_tests.cases import (
    EXECUTORS,
    NATIVE_DIMS,
    NATIVE_PAGES,
    Built,
    Case,
    as_meta,
    build,
    compare,
    compare_out,
    named,
    on_served,
    served,
)

Args = dict[str, Any]
BLOCK = Case((7, 0, 2, 3, 4), (129, 64, 0, 65, 2))
CSR = replace(BLOCK, table="csr")
SLOTS = replace(CSR, layout="slots", page=1)
WIDE = replace(BLOCK, dim=192)
FULL = replace(BLOCK, causal=False)
ODD = replace(BLOCK, dim=64, dim_v=64)
PAGES_32 = replace(BLOCK, page=32)
TOO_WIDE = replace(BLOCK, dim=272)
#: For what needs a call, whichever.
FEW = Case((3, 2), (65, 30))
FEW_CSR = replace(FEW, table="csr")

#: The closed list of the contract, written out: a code that is added or renamed shows here.
CODES = {
    "native",
    "forced_dense",
    "arch",
    "non_causal",
    "head_dims",
    "page_size",
    "kernel_absent",
    "flydsl_absent",
    "emulator_device",
    "beyond_fallback",
}


@dataclass(frozen=True)
class Row:
    """What is asked (a case, the executor option, an architecture, the machine's kernels and FlyDSL) and the answer."""

    case: Case
    option: str
    arch: str
    path: str | None
    executor: str | None
    code: str
    word: str
    kernels: bool = True
    flydsl: str | None = "0.5.0"
    device: str = "any"

    def __str__(self) -> str:
        kernels = "" if self.kernels else "-no_kernels"
        return f"{self.case}-{self.option}-{self.arch}{kernels}-flydsl_{self.flydsl}-{self.device}"


def rows() -> Iterator[Row]:
    for (layout, sizes), (dim, dim_v) in product(NATIVE_PAGES.items(), NATIVE_DIMS):
        for page in sizes:
            case = Case((2, 1), (17, 3), layout=layout, page=page, dim=dim, dim_v=dim_v)
            yield Row(case, "auto", "gfx950", "paged", "gpu", "native", "gfx950")
    for arch in ("gfx950:sramecc+:xnack-", "gfx950:xnack-"):
        yield Row(BLOCK, "auto", arch, "paged", "gpu", "native", "gfx950")
    yield Row(BLOCK, "auto", "gfx942:sramecc+:xnack-", "dense", "torch", "arch", "gfx942")
    for case in (BLOCK, SLOTS, WIDE):
        yield Row(case, "gpu", "gfx950", "paged", "gpu", "native", "gfx950")
        for arch in ("gfx950", "gfx942", "cpu"):
            yield Row(case, "emulator", arch, "paged", "emulator", "native", "emulator")
            yield Row(case, "torch", arch, "dense", "torch", "forced_dense", "torch")
        for arch in ("gfx942", "gfx90a", "gfx1250", "sm_90", "cpu"):
            yield Row(case, "auto", arch, "dense", "torch", "arch", arch)
            yield Row(case, "gpu", arch, None, None, "arch", arch)
    for case, code, words in (
        (FULL, "non_causal", ("causal",)),
        (replace(SLOTS, causal=False), "non_causal", ("causal",)),
        (ODD, "head_dims", ("(64, 64)", "(192, 128)")),
        (replace(BLOCK, dim=128, dim_v=192), "head_dims", ("(128, 192)",)),
        (replace(BLOCK, dim=256, dim_v=256), "head_dims", ("(256, 256)",)),
        (replace(SLOTS, dim=16, dim_v=16), "head_dims", ("(16, 16)",)),
        (PAGES_32, "page_size", ("16, 64, 1024", "32")),
        (replace(BLOCK, page=128), "page_size", ("128",)),
        (replace(BLOCK, layout="linear", page=16), "page_size", ("linear pages of 1", "16")),
        (replace(BLOCK, layout="linear", page=64), "page_size", ("64",)),
    ):
        for word in words:
            yield Row(case, "auto", "gfx950", "dense", "torch", code, word)
        yield Row(case, "gpu", "gfx950", None, None, code, words[0])
        yield Row(case, "emulator", "cpu", None, None, code, words[0])
        yield Row(case, "torch", "gfx950", "dense", "torch", "forced_dense", "torch")
    for case in (BLOCK, SLOTS):
        yield Row(case, "auto", "gfx950", "dense", "torch", "kernel_absent", "no native kernel yet", kernels=False)
        yield Row(case, "gpu", "gfx950", None, None, "kernel_absent", "no native kernel yet", kernels=False)
        yield Row(case, "emulator", "cpu", None, None, "kernel_absent", "no native kernel yet", kernels=False)
    for version, word in (
        (None, "pip install"),
        ("0.4.2", "too old"),
        ("0.3.99", "0.5.0 or later"),
        ("0.4", "too old"),
    ):
        yield Row(BLOCK, "auto", "gfx950", "dense", "torch", "flydsl_absent", word, flydsl=version)
        yield Row(BLOCK, "gpu", "gfx950", None, None, "flydsl_absent", word, flydsl=version)
        yield Row(BLOCK, "emulator", "cpu", None, None, "flydsl_absent", word, flydsl=version)
        yield Row(BLOCK, "torch", "gfx950", "dense", "torch", "forced_dense", "torch", flydsl=version)
    for version in ("0.5.0", "0.5.0+rocm7.2", "0.5.1.dev3+gabc", "0.5.1rc1", "0.10.0", "1.0"):
        yield Row(BLOCK, "auto", "gfx950", "paged", "gpu", "native", "gfx950", flydsl=version)
    for case, word in (
        (TOO_WIDE, "D = 272"),
        (replace(BLOCK, dim_v=8), "Dv = 8"),
        (replace(SLOTS, dim=100), "D = 100"),
        (replace(SLOTS, dim_v=257), "Dv = 257"),
    ):
        for option, arch in (("auto", "gfx950"), ("auto", "cpu"), ("torch", "gfx950"), ("torch", "cpu")):
            yield Row(case, option, arch, None, None, "beyond_fallback", word)
        yield Row(case, "auto", "gfx950", None, None, "beyond_fallback", "multiples of 16 up to 256")
        yield Row(case, "gpu", "gfx950", None, None, "head_dims", str((case.dim, case.dim_v)))
    yield Row(BLOCK, "emulator", "gfx950", None, None, "emulator_device", "cuda:0", device="cuda")
    yield Row(BLOCK, "gpu", "gfx950", "paged", "gpu", "native", "gfx950", device="cuda")
    yield Row(BLOCK, "auto", "gfx950", "paged", "gpu", "native", "gfx950", device="cuda")
    yield Row(BLOCK, "auto", "gfx942", "dense", "torch", "arch", "gfx942", device="cuda")
    yield Row(BLOCK, "torch", "gfx950", "dense", "torch", "forced_dense", "torch", device="cuda")


ROWS = list(rows())
Machine = Callable[[bool, "str | None"], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Sets which kernels exist (all that the contract calls native, or none) and which FlyDSL is installed."""

    def caches() -> None:
        planner._decide.cache_clear()
        executors.flydsl_missing.cache_clear()

    def has(kernels: bool, flydsl: str | None) -> None:
        layouts = [("linear", 1), *(("vectorized", page) for page in NATIVE_PAGES["vectorized"])]
        built = [(*layout, *dims) for layout, dims in product(layouts, NATIVE_DIMS)] if kernels else []
        monkeypatch.setattr(traits, "BUILT", frozenset(built))
        monkeypatch.setattr(executors, "flydsl_version", lambda: flydsl)
        caches()

    yield has
    monkeypatch.undo()
    caches()


def on_meta(built: Built) -> Args:
    return {name: as_meta(value) for name, value in named(built).items()}


class OnGpu(torch.Tensor):
    """A tensor that says it is on the first GPU, on a machine without one. Whatever reads it fails."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> OnGpu:
        where = torch.device("cuda:0")
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=where
        )

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> Any:
        raise AssertionError(f"{operation} ran on a tensor of which only metadata may be read")


def on_gpu(built: Built) -> Args:
    arguments = named(built)
    return {name: OnGpu(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_plan(row: Row, machine: Machine) -> None:
    machine(row.kernels, row.flydsl)
    built = build(row.case)
    devices = (on_gpu,) if row.device == "cuda" else (named, on_meta)
    with use_executor(row.option), record() as calls:
        for arguments in (device(built) for device in devices):
            chosen = plan(**arguments, arch=row.arch)
            assert (chosen.path, chosen.executor, str(chosen.code)) == (row.path, row.executor, row.code)
            assert row.word in chosen.reason
            assert bool(chosen) is (row.path is not None)
            support = flydsl_flash_attn_paged_prefill_supported(**arguments, arch=row.arch)
            assert bool(support) is support.supported is (row.path == "paged")
            assert (support.code, support.reason) == (chosen.code, chosen.reason)
            assert chosen == plan(**arguments, arch=row.arch), "a plan that was asked for before is another one"
        assert calls == [], "a plan is not a call"
    assert all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards), "a plan wrote"


def test_every_code_has_its_row() -> None:
    assert {str(code) for code in Code} == CODES
    assert {row.code for row in ROWS} == CODES


@pytest.mark.parametrize("case", [BLOCK, SLOTS, FULL, ODD, PAGES_32, TOO_WIDE], ids=str)
def test_preload_touches_no_buffer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is compiled, and that it is not launched: test_flydsl_paged_compile. Code for hardware would need a linker.
    monkeypatch.setattr(native, "_kernels", {})
    monkeypatch.setattr(native, "_compile", lambda traits: native.Kernel(traits.name, pytest.fail))
    built = build(case)
    with record() as calls:
        for arguments, arch in ((named(built), None), (named(built), "gfx950"), (on_meta(built), "gfx950")):
            chosen = flydsl_flash_attn_paged_prefill_preload(**arguments, arch=arch)
            assert chosen == plan(**arguments, arch=arch)
    assert calls == []
    assert all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards), "preload wrote"


def test_plan_is_a_value() -> None:
    chosen = plan(**named(build(BLOCK)))
    with pytest.raises(FrozenInstanceError):
        chosen.path = "paged"  # type: ignore[misc]
    assert chosen.code in Code
    assert hash(chosen) == hash(plan(**named(build(BLOCK))))


ASKING = [plan, flydsl_flash_attn_paged_prefill_supported, flydsl_flash_attn_paged_prefill_preload]


def test_architecture_of_cpu_tensors() -> None:
    arguments = named(build(BLOCK))
    for ask in ASKING:
        assert ask(**arguments) == ask(**arguments, arch="cpu")


@pytest.mark.parametrize(
    ("hip", "properties", "code", "word"),
    [
        ("7.0", SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-"), "native", "gfx950"),
        ("7.0", SimpleNamespace(gcnArchName="gfx950"), "native", "gfx950"),
        ("7.0", SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"), "arch", "is on gfx942"),
        (None, SimpleNamespace(major=9, minor=0), "arch", "is on sm_90"),
    ],
)
def test_architecture_of_a_gpu(
    hip: str | None, properties: Any, code: str, word: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the device's own, without the feature flags, and is asked for once."""
    machine(True, "0.5.0")
    asked = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or properties)
    arguments = on_gpu(build(BLOCK))
    for _ in range(3):
        chosen = plan(**arguments)
        assert (str(chosen.code), word in chosen.reason) == (code, True)
    assert asked == [torch.device("cuda:0")]


@pytest.mark.parametrize("function", [*ASKING, flydsl_flash_attn_paged_prefill_func])
@pytest.mark.parametrize("name", ["auto", "torch"])
def test_meta_tensors_need_an_architecture(function: Callable[..., Any], name: str) -> None:
    with use_executor(name), pytest.raises(ValueError, match=r"^arch: got None with meta tensors; accepted: .*gfx950"):
        function(**on_meta(build(BLOCK)))


@pytest.mark.parametrize("arch", [950, ["gfx950"], torch.device("cpu"), b"gfx950", True], ids=repr)
@pytest.mark.parametrize("function", ASKING)
def test_an_architecture_is_a_string(function: Callable[..., Any], arch: Any) -> None:
    with pytest.raises(TypeError, match=r"^arch: got .*; accepted: .*gfx950"):
        function(**on_meta(build(BLOCK)), arch=arch)


@pytest.mark.parametrize(
    ("kernels", "flydsl", "word"), [(False, "0.5.0", "no native kernel yet"), (True, None, "pip install")]
)
@pytest.mark.parametrize("name", ["gpu", "emulator"])
def test_executor_says_why_it_can_not_run(
    name: str, kernels: bool, flydsl: str | None, word: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name it never falls to another; left to choose, the same call runs densely."""
    machine(kernels, flydsl)
    monkeypatch.setattr(planner, "device_arch", lambda device: "gfx950")
    built = build(BLOCK)
    with use_executor(name), record() as calls, pytest.raises(RuntimeError, match=word) as caught:
        flydsl_flash_attn_paged_prefill_func(**named(built))
    assert name in str(caught.value)
    assert [(bool(call.plan), call.launches) for call in calls] == [(False, [])]
    assert all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards)
    with record() as calls:
        out, lse = flydsl_flash_attn_paged_prefill_func(**named(built))
    assert [(call.plan.path, call.plan.executor) for call in calls] == [("dense", "torch")]
    assert word in calls[0].plan.reason
    compare(built, out, lse, "torch")


def test_what_must_read_is_refused_under_capture(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback reads lengths, the check reads everything: neither can be recorded, and neither reads a thing."""
    machine(True, "0.5.0")
    monkeypatch.setattr(planner, "device_arch", lambda device: "gfx942")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    arguments = on_gpu(build(BLOCK))
    with pytest.raises(NotImplementedError, match=r"capture.* reads the lengths"):
        flydsl_flash_attn_paged_prefill_func(**arguments)
    with use_options(check_metadata=True), pytest.raises(RuntimeError, match=r"^check_metadata: .*graph capture"):
        flydsl_flash_attn_paged_prefill_func(**arguments)


# The log.


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """A log of a process that has said nothing yet."""
    monkeypatch.setattr(planner, "_logged", set())
    caplog.set_level(logging.DEBUG, logger="aiter_paged_fp8")
    return caplog


def said(log: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in log.records if record.name == "aiter_paged_fp8"]


def test_log_speaks_once_per_code(
    log: pytest.LogCaptureFixture, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(True, "0.5.0")
    arch = "cpu"
    monkeypatch.setattr(planner, "device_arch", lambda device: arch)
    cases = (BLOCK, SLOTS, BLOCK)
    for case in cases:
        flydsl_flash_attn_paged_prefill_func(**named(build(case)))
    ((level, text),) = said(log)
    assert level == "WARNING", "a fallback that nobody asked for"
    for word in ("dense", "torch", "arch", plan(**named(build(BLOCK))).reason):
        assert word in text
    for case in cases:
        with use_executor("torch"):
            flydsl_flash_attn_paged_prefill_func(**named(build(case)))
    assert [level for level, _ in said(log)] == ["WARNING", "INFO"], "a fallback that was asked for is no warning"
    assert "forced_dense" in said(log)[1][1]
    arch = "gfx950"
    planner._decide.cache_clear()
    for case in (FULL, ODD, FULL, PAGES_32):
        flydsl_flash_attn_paged_prefill_func(**named(build(case)))
    texts = [text for _, text in said(log)[2:]]
    assert len(texts) == 3
    for word, text in zip(("non_causal", "head_dims", "page_size"), texts, strict=True):
        assert word in text
    with pytest.raises(NotImplementedError):
        flydsl_flash_attn_paged_prefill_func(**named(build(TOO_WIDE)))
    assert "beyond_fallback" in said(log)[5][1]
    assert len(said(log)) == 6


def test_refused_call_and_plan_do_not_log(log: pytest.LogCaptureFixture) -> None:
    arguments = named(build(BLOCK))
    for ask in ASKING:
        ask(**arguments)
    with pytest.raises(ValueError):
        flydsl_flash_attn_paged_prefill_func(**{**arguments, "seqlen_k": None})
    assert said(log) == []


# The batch dispatcher.

AITER = (
    "(q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
    "softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1), alibi_slopes=None, "
    "deterministic=False, return_lse=False, return_attn_probs=False, out=None, kv_last_page_lens=None, "
    "block_table=None, seqlen_k=None, q_descale=None, k_descale=None, v_descale=None, kv_block_descale=None, "
    "sink_ptr=None, sink_size=0)"
)
PAGED = (
    "(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, *, block_table=None, seqlen_k=None, kv_indptr=None, "
    "kv_page_indices=None, kv_last_page_lens=None, q_descale, k_descale, v_descale, softmax_scale=None, causal=True, "
    "out=None, return_lse=False, lse=None, stream=None)"
)


@pytest.mark.parametrize(
    ("function", "written"),
    [(flydsl_flash_attn_batch_prefill_func, AITER), (flydsl_flash_attn_paged_prefill_func, PAGED)],
    ids=["batch", "paged"],
)
def test_argument_list(function: Callable[..., Any], written: str) -> None:
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=empty)) == written


def batch_args(built: Built, **changes: Any) -> dict[str, Any]:
    values = {**named(built), "kv_indptr": None, "kv_page_indices": None, **built.kwargs, **changes}
    return {name: value for name, value in values.items() if name != "lse"}


@pytest.mark.parametrize(
    "case",
    [
        BLOCK,
        CSR,
        WIDE,
        SLOTS,
        replace(SLOTS, dim=192, dim_v=128),
        replace(SLOTS, table="csr_last"),
        replace(SLOTS, layout="linear"),
        replace(CSR, layout="linear", page=16),
        replace(BLOCK, causal=False),
        replace(SLOTS, causal=False, dim=64, dim_v=32),
    ],
    ids=str,
)
def test_dispatcher_serves_when_forced(case: Case, executor: str) -> None:
    built = build(case)
    if not served(case, executor):
        with use_executor(executor), pytest.raises(RuntimeError, match=executor):
            flydsl_flash_attn_batch_prefill_func(**batch_args(built))
        return
    with use_executor(executor), record() as calls:
        out, lse = flydsl_flash_attn_batch_prefill_func(**batch_args(built))
        assert out is built.out
        alone = flydsl_flash_attn_batch_prefill_func(**batch_args(built, return_lse=False, out=None))
    assert [(call.plan.path, call.plan.executor) for call in calls] == [(calls[0].plan.path, executor)] * 2
    compare(built, out, lse, executor)
    assert torch.equal(alone, out)


@on_served("case", [SLOTS, CSR])
def test_dispatcher_as_its_callers_call(executor: str, case: Case) -> None:
    """SGLang's `nhd` layout (token ids, no last-page lengths) and its `vectorized_5d` (pages, with them): more ids than
    used, numpy bounds, 0-d descales."""
    built = build(replace(case, descales=(1.0, 0.5, 2.0)))
    ids = torch.cat([built.kwargs["kv_page_indices"], torch.full((100,), 2**31 - 1, dtype=torch.int32)])
    with use_executor(executor):
        out = flydsl_flash_attn_batch_prefill_func(
            *built.args[:4],
            built.kwargs["kv_indptr"],
            ids,
            np.int64(7),
            np.int64(129),
            causal=True,
            logits_soft_cap=0.0,
            alibi_slopes=None,
            return_lse=False,
            return_attn_probs=False,
            window_size=(-1, -1),
            sink_ptr=None,
            kv_last_page_lens=built.kwargs.get("kv_last_page_lens"),
            q_descale=torch.tensor(1.0),
            k_descale=torch.tensor(0.5),
            v_descale=torch.tensor(2.0),
        )
    assert isinstance(out, torch.Tensor)
    compare_out(out, built.reference()[0], executor)


@pytest.mark.parametrize("causal", [False, True])
def test_one_query_per_request_makes_causal_nothing(causal: bool, executor: str) -> None:
    """A decode step is native although the caller says causal=False."""
    case = replace(BLOCK, q_lens=(1, 0, 1, 1, 1), causal=True)
    built = build(case)
    with use_executor(executor):
        out, lse = flydsl_flash_attn_batch_prefill_func(**batch_args(built, causal=causal, max_seqlen_q=1))
    compare(built, out, lse, executor)
    built.case = replace(case, causal=False)
    compare(built, out, lse, executor)


def other(name: str, dtype: torch.dtype) -> Callable[[Args], Args]:
    return lambda args: {name: torch.ones(args[name].shape).to(dtype)}


def given(**changes: Any) -> Callable[[Args], Args]:
    return lambda _: changes


#: Each a call that the caller must take to its own backend; without it, a forced executor serves the same call.
FEATURES: list[tuple[str, Case, Callable[[Args], Args]]] = [
    ("dropout", FEW, given(dropout_p=0.1)),
    ("soft cap", FEW, given(logits_soft_cap=30.0)),
    ("soft cap int", FEW, given(logits_soft_cap=1)),
    ("window to the left", FEW, given(window_size=(128, -1))),
    ("window to the right", FEW, given(window_size=(-1, 0))),
    ("window of itself", FEW, given(window_size=(0, 0))),
    ("window as a list", FEW, given(window_size=[127, 0])),
    ("window with sinks", FEW, given(window_size=(-1, -1, 4))),
    ("alibi", FEW, given(alibi_slopes=torch.ones(4))),
    ("attention probabilities", FEW, given(return_attn_probs=True)),
    ("block descale", FEW, given(kv_block_descale=torch.ones(1))),
    ("sink", FEW, given(sink_ptr=torch.zeros(4))),
    ("sink size", FEW, given(sink_size=4)),
    *((f"{name} {dtype}", FEW, other(name, dtype)) for name, dtype in product("qkv", (torch.bfloat16, torch.float16))),
    *((f"{name} fnuz", FEW, other(name, torch.float8_e4m3fnuz)) for name in "qkv"),
    *((f"{name} e5m2", FEW, other(name, torch.float8_e5m2)) for name in "qkv"),
    *((f"{name} bytes", FEW, other(name, torch.uint8)) for name in "qkv"),
    *((f"no {name}", FEW, given(**{name: None})) for name in ("q_descale", "k_descale", "v_descale")),
    ("no descales", FEW, given(q_descale=None, k_descale=None, v_descale=None)),
    ("no last page lengths", FEW_CSR, given(kv_last_page_lens=None)),
    ("no last page lengths, pages of 16", replace(FEW_CSR, page=16), given(kv_last_page_lens=None)),
    ("no last page lengths, linear", replace(FEW_CSR, layout="linear", page=16), given(kv_last_page_lens=None)),
]


@pytest.mark.parametrize(
    ("executor", "case", "ask"),
    [
        pytest.param(executor, case, ask, id=f"{executor}-{name.replace(' ', '_')}")
        for executor in EXECUTORS
        for name, case, ask in FEATURES
        if served(case, executor)
    ],
)
def test_dispatcher_drops_no_feature(executor: str, case: Case, ask: Callable[[Args], Args]) -> None:
    built = build(case)
    arguments = batch_args(built)
    with use_executor(executor), record() as calls:
        assert flydsl_flash_attn_batch_prefill_func(**{**arguments, **ask(arguments)}) is None
        assert calls == [], "a call that is left to the caller is not this package's"
        assert all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards), "it wrote nevertheless"
        assert flydsl_flash_attn_batch_prefill_func(**arguments) is not None
        twins = {key: as_meta(value) for key, value in arguments.items()}
        assert flydsl_flash_attn_batch_prefill_func(**{**twins, **ask(twins)}) is None


#: Ways to say that a feature is off.
OFF: list[Args] = [
    {"dropout_p": 0},
    {"logits_soft_cap": 0},
    {"window_size": [-1, -1]},
    {"window_size": (-1, -1, 0)},
    {"deterministic": True},
    {"sink_size": 0, "sink_ptr": None},
    {"softmax_scale": None},
]


@pytest.mark.parametrize("off", OFF, ids=str)
def test_dispatcher_serves_what_asks_for_no_feature(off: Args, executor: str) -> None:
    built = build(FEW)
    with use_executor(executor):
        out, lse = flydsl_flash_attn_batch_prefill_func(**batch_args(built, **off))
    compare(built, out, lse, executor)


@pytest.mark.parametrize("case", [BLOCK, SLOTS, FULL, ODD, PAGES_32, TOO_WIDE], ids=str)
def test_dispatcher_leaves_what_is_not_native(case: Case, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to choose, it never takes the dense path: the caller's own backend is faster."""
    for kernels, flydsl, arch in ((False, "0.5.0", "gfx950"), (True, None, "gfx950"), (True, "0.5.0", "gfx942")):
        machine(kernels, flydsl)
        monkeypatch.setattr(planner, "device_arch", lambda device, arch=arch: arch)
        built = build(case)
        with record() as calls:
            assert flydsl_flash_attn_batch_prefill_func(**batch_args(built)) is None
        assert calls == []
        assert all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards)


@pytest.mark.parametrize(
    ("case", "changes", "native"),
    [
        (BLOCK, {}, True),
        (WIDE, {}, True),
        (SLOTS, {}, True),
        (BLOCK, {"causal": False}, False),
        (replace(BLOCK, q_lens=(1, 0, 1, 1, 1)), {"causal": False, "max_seqlen_q": 1}, True),
        (replace(BLOCK, q_lens=(1, 0, 1, 1, 1)), {"causal": False, "max_seqlen_q": np.int64(1)}, True),
        (replace(BLOCK, q_lens=(1, 0, 1, 1, 1)), {"causal": False, "max_seqlen_q": 2}, False),
    ],
)
def test_dispatcher_follows_the_plan(
    case: Case, changes: Args, native: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with the kernel: what is native is served, one query per request whatever causal says."""
    machine(True, "0.5.0")
    monkeypatch.setattr(planner, "device_arch", lambda device: "gfx950")
    monkeypatch.setattr(api, "_run", lambda request, chosen, options: chosen)
    chosen = flydsl_flash_attn_batch_prefill_func(**batch_args(build(case), **changes))
    assert (chosen is not None) is native
    assert chosen is None or (chosen.path, chosen.executor) == ("paged", "gpu")


class KernelFault(Exception):
    """What a kernel that fails raises."""


def test_dispatcher_lets_kernel_errors_through(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never retried, never turned into None."""
    from aiter_paged_fp8.fallback import dense
    from aiter_paged_fp8.runtime import native

    tries = []

    def fail(*args: Any) -> None:
        tries.append(args)
        raise KernelFault

    if executor == "torch":
        monkeypatch.setattr(dense, "attend", fail)
    else:
        monkeypatch.setattr(native, "kernel", lambda *_: (native.Kernel("fails", fail), False))
    with use_executor(executor), pytest.raises(KernelFault):
        flydsl_flash_attn_batch_prefill_func(**batch_args(build(BLOCK)))
    assert len(tries) == 1
