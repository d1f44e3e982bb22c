"""When the native kernel is compiled: once for each specialisation, by whoever comes first, and never while what
varies from call to call varies."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiter_paged_fp8 import (
    Call,
    flydsl_flash_attn_paged_prefill_func,
    flydsl_flash_attn_paged_prefill_preload,
    record,
    use_options,
)
from aiter_paged_fp8.kernels.fmha_gfx950.traits import Traits
from aiter_paged_fp8.runtime import native as runtime
from op_tests import cases, native_cases
from op_tests.cases import Built, Case, build, compare, named
from op_tests.native_cases import SPECIALISATIONS, kernel_name


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Traits]:
    """A process that has compiled nothing yet; lists what is compiled, in order. Real compiles, counted."""
    seen: list[Traits] = []
    compile_now = runtime._compile

    def counted(traits: Traits) -> Any:
        seen.append(traits)
        return compile_now(traits)

    monkeypatch.setattr(runtime, "_kernels", {})
    monkeypatch.setattr(runtime, "_compile", counted)
    return seen


def call(built: Built, **changes: Any) -> Call:
    """One call on the emulator, compared with the reference."""
    with use_options(executor="emulator"), record() as calls:
        out, lse = flydsl_flash_attn_paged_prefill_func(
            *built.args, **{**built.kwargs, "out": built.out, "lse": built.lse, "return_lse": True, **changes}
        )
    compare(built, out, lse, "emulator")
    return calls[0]


def test_what_varies_from_call_to_call_rebuilds_nothing(compiles: list[Traits]) -> None:
    plain = Case([3, 5], [70, 129], heads=4, kv_heads=2)
    first = call(build(plain))
    assert [launch.compiled for launch in first.launches] == [True]
    assert compiles == [Traits("vectorized", 64, 128, 128, "block", True)]

    varied: dict[str, tuple[Case, Callable[[Built], None] | None]] = {
        "the same": (plain, None),
        "lengths": (Case([300, 1], [400, 7], heads=4, kv_heads=2), None),
        "batch": (Case([1] * 5, [9] * 5, heads=4, kv_heads=2), None),
        "heads": (Case([3, 5], [70, 129], heads=6, kv_heads=1), None),
        "KV heads": (Case([3, 5], [70, 129], heads=8, kv_heads=8), None),
        "descales": (Case([3, 5], [70, 129], descales=(-0.3, 0.7, 0.1)), None),
        "softmax scale": (Case([3, 5], [70, 129], softmax_scale=0.2), None),
        "pages": (Case([3, 5], [70, 129], spare_pages=40), None),
        "page strides": (Case([3, 5], [70, 129], interleaved=True), None),
        "storage offsets": (plain, native_cases.one_allocation),
        "strides of q": (plain, native_cases.strided_q),
        "strides of tables": (plain, native_cases.strided_metadata),
        "table widths": (plain, native_cases.oversized_table),
        "maxima": (plain, native_cases.larger_maxima),
        "offsets of rows": (Case([3, 5], [70, 129], cu_start=9), None),
        "empty requests": (Case([3, 0], [0, 129]), None),
    }
    for what, (case, change) in varied.items():
        built = build(case)
        if change is not None:
            change(built)
        (launch,) = call(built).launches
        assert not launch.compiled, what
        assert launch.instructions, what
    assert len(compiles) == 1


def test_each_specialisation_is_compiled_once(compiles: list[Traits]) -> None:
    for turn in range(2):
        for table, lse in SPECIALISATIONS:
            built = build(Case([2], [65], heads=2, kv_heads=1, table=table))
            results = {"return_lse": True, "lse": built.lse} if lse else {}
            with use_options(executor="emulator"), record() as calls:
                flydsl_flash_attn_paged_prefill_func(*built.args, **built.kwargs, out=built.out, **results)
            (launch,) = calls[0].launches
            assert launch.compiled == (turn == 0)
            assert launch.kernel == kernel_name(table, lse)
    assert compiles == [Traits("vectorized", 64, 128, 128, table, lse) for table, lse in SPECIALISATIONS]


def test_threads_that_need_one_kernel_compile_it_once(compiles: list[Traits]) -> None:
    count = 3
    ready = threading.Barrier(count)
    builts = [build(Case([2], [65 + number], heads=2, kv_heads=1, seed=number)) for number in range(count)]
    calls: list[Call | BaseException | None] = [None] * count

    def work(number: int) -> None:
        try:
            ready.wait(60)
            calls[number] = call(builts[number])
        except BaseException as error:
            calls[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    finished = [found for found in calls if isinstance(found, Call)]
    assert len(finished) == count, calls
    launches = [found.launches[0] for found in finished]
    assert sorted(launch.compiled for launch in launches) == [False] * (count - 1) + [True]
    assert all(launch.instructions for launch in launches)
    assert len(compiles) == 1


#: Run as a program of its own, since two threads that wait for each other can't be stopped.
_TWO_THREADS = """
import threading
from aiter_paged_fp8.runtime import emulated
from op_tests.cases import Case, build, run

inside, release = threading.Event(), threading.Event()

def in_session():
    with emulated():
        inside.set()
        release.wait(20)
        run(build(Case([2], [65], heads=2, kv_heads=1)), "emulator")
    print("in a session: done", flush=True)

def alone():
    inside.wait(60)
    threading.Timer(0.5, release.set).start()
    run(build(Case([2], [66], heads=2, kv_heads=1)), "emulator")
    print("alone: done", flush=True)

for target in (in_session, alone):
    threading.Thread(target=target, daemon=True).start()
for thread in threading.enumerate():
    if thread is not threading.current_thread() and not isinstance(thread, threading.Timer):
        thread.join()
"""


def test_a_session_and_another_thread_do_not_wait_for_each_other() -> None:
    # One thread is inside an emulator session when it needs the kernel that another one is about to compile.
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TWO_THREADS],
            capture_output=True,
            text=True,
            timeout=90,
            cwd=Path(__file__).parents[1],
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"the two threads wait for each other; output so far: {error.stdout!r}")
    assert done.returncode == 0, done.stderr
    assert "in a session: done" in done.stdout
    assert "alone: done" in done.stdout


@pytest.mark.parametrize("table", ["block", "csr"])
def test_preload_compiles_and_launches_nothing(compiles: list[Traits], table: str) -> None:
    built = build(Case([3, 5], [70, 129], heads=4, kv_heads=2, table=table))
    with use_options(executor="emulator"), record() as calls:
        chosen = flydsl_flash_attn_paged_prefill_preload(
            *built.args, **built.kwargs, out=built.out, lse=built.lse, return_lse=True
        )
    assert (chosen.path, chosen.executor) == ("paged", "emulator")
    assert compiles == [Traits("vectorized", 64, 128, 128, table, True)]
    assert calls == [], "a preload is not a call"
    assert all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards), "a preload wrote"
    (launch,) = call(built).launches
    assert not launch.compiled
    assert len(compiles) == 1


def test_preload_of_meta_tensors(compiles: list[Traits]) -> None:
    built = build(Case([3, 5], [70, 129], heads=4, kv_heads=2))
    meta = {name: cases.as_meta(value) for name, value in named(built).items()}
    with use_options(executor="emulator"):
        assert flydsl_flash_attn_paged_prefill_preload(**meta, arch="gfx950").path == "paged"
    assert len(compiles) == 1
    (launch,) = call(built).launches
    assert not launch.compiled, "the exact specialisation was not what preload had compiled"


def test_preload_of_an_absent_kernel_compiles_nothing(compiles: list[Traits]) -> None:
    built = build(Case([3], [70], page=16))
    with use_options(executor="emulator"):
        assert not flydsl_flash_attn_paged_prefill_preload(*built.args, **built.kwargs)
    assert compiles == []


def test_a_failed_compile_leaves_nothing_behind(compiles: list[Traits], monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(Case([2], [65], heads=2, kv_heads=1))
    with monkeypatch.context() as broken:

        def fail(traits: Traits) -> Any:
            raise OSError("no space left")

        broken.setattr(runtime, "_compile", fail)
        with pytest.raises(OSError, match="no space"):
            call(built)
    assert all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards)
    assert call(built).launches[0].compiled
    assert len(compiles) == 1
