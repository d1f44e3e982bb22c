"""FlyDSL kernels of the tests, run on the emulator through FlyDSL's own launcher, in several timings and orders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch

from aiter_paged_fp8.emulator import Options
from aiter_paged_fp8.emulator.loader import load_table
from aiter_paged_fp8.runtime import emulated
from aiter_paged_fp8.runtime.takeover import EmulatorSession

# As late as the waits allow, at once, and waves one after the other.
SETTINGS = {
    "latest": Options(memory="latest"),
    "earliest": Options(memory="earliest"),
    "skewed": Options(memory="latest", schedule="skewed"),
}


def emulating(options: Options | None = None) -> AbstractContextManager[EmulatorSession]:
    """An emulator session that compiles each kernel once for all workers of a test run."""
    return emulated(options, cache_dir=os.environ.get("AITER_PAGED_FP8_CACHE_DIR"))


def launcher(kernel: Any, count: int, *, grid: int = 1, block: int = 64) -> Any:
    """A jit function of `count` tensors that launches a kernel."""
    if count == 2:

        @flyc.jit
        def two(A: fx.Tensor, B: fx.Tensor, stream: fx.Stream = fx.Stream(None)):
            kernel(A, B).launch(grid=(grid, 1, 1), block=(block, 1, 1), stream=stream)

        return two
    if count == 3:

        @flyc.jit
        def three(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor, stream: fx.Stream = fx.Stream(None)):
            kernel(A, B, C).launch(grid=(grid, 1, 1), block=(block, 1, 1), stream=stream)

        return three

    @flyc.jit
    def four(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor, D: fx.Tensor, stream: fx.Stream = fx.Stream(None)):
        kernel(A, B, C, D).launch(grid=(grid, 1, 1), block=(block, 1, 1), stream=stream)

    return four


def run_everywhere(
    kernel: Any,
    inputs: Sequence[torch.Tensor],
    output: torch.Tensor,
    check: Callable[[torch.Tensor], None],
    *,
    grid: int = 1,
    block: int = 64,
    uses: Iterable[str] = (),
) -> dict[str, int]:
    """Compile once, run under every setting, check the output each time; no report is allowed.

    Parameters
    ----------
    inputs, output : tensors
        The kernel's arguments in order, the output last; it is filled with ones before each run.
    uses : iterable of str
        Mnemonics that must have been executed, so that the kernel covers what it is there for.

    Returns
    -------
    dict
        Executed instructions by mnemonic.
    """
    launch = launcher(kernel, len(inputs) + 1, grid=grid, block=block)
    compiled = None
    executed: dict[str, int] = {}
    for name, options in SETTINGS.items():
        output.fill_(1)
        with emulating(options) as session:
            session.read_only(*inputs)
            if compiled is None:
                compiled = flyc.compile(launch, *inputs, output)
            else:
                compiled(*inputs, output, fx.Stream(None))
        (result,) = session.launches
        assert result.reports == [], (name, [report.message for report in result.reports])
        check(output)
        executed = dict(result.counts.by_mnemonic)
    missing = [mnemonic for mnemonic in uses if mnemonic not in executed]
    assert not missing, (missing, executed)
    return executed


def families(executed: Iterable[str]) -> set[str]:
    """Instruction families of executed mnemonics."""
    table = load_table()
    return {table[mnemonic].family for mnemonic in executed}
