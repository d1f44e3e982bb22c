"""Resources and counts of compiled kernels, and the emulator's instruction coverage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .emulator import Options, Program, Result, UnimplementedInstruction, isa_coverage, load
from .runtime import emulated
from .runtime.executors import flydsl_missing

#: Elements of the example kernel's run: four workgroups of four waves.
EXAMPLE_SIZE = 1024


def run_example(options: Options | None = None) -> tuple[Result, float]:
    """Compile the example kernel with FlyDSL and run it on CPU tensors in the emulator.

    Returns
    -------
    result : Result
        Counts, reports, and the program that ran.
    error : float
        Largest difference from torch's result; one float32 rounding per product is within it.
    """
    from .kernels.example import axpy

    x, y = torch.randn(EXAMPLE_SIZE), torch.randn(EXAMPLE_SIZE)
    expected = torch.addcmul(y.double(), x.double(), torch.tensor(2.5, dtype=torch.float64))
    with emulated(options) as session:
        axpy(x, y, 2.5, EXAMPLE_SIZE)
    return session.launches[-1], float((y.double() - expected).abs().max())


def resources(program: Program) -> dict[str, Any]:
    """What a kernel takes of a compute unit, from its metadata, and its instructions by mnemonic."""
    metadata = program.metadata
    return {
        "kernel": program.name,
        "target": metadata.target,
        "VGPRs": metadata.vgprs,
        "AGPRs": metadata.agprs,
        "SGPRs": metadata.sgprs,
        "LDS bytes": metadata.lds_size,
        "scratch bytes": metadata.scratch_size,
        "spills": metadata.vgpr_spills + metadata.sgpr_spills,
        "kernarg bytes": metadata.kernarg_size,
        "instructions in the text": len(program.instructions),
        "most frequent": dict(Counter(i.mnemonic for i in program.instructions).most_common(8)),
    }


def _programs(files: Iterable[str]) -> list[Program]:
    return [Program.parse(Path(name).read_text()) for name in files]


def _show(title: str, values: dict[str, Any]) -> None:
    print(title)
    for name, value in values.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"  {name:<26} {shown}")


def inspect_kernels(files: Sequence[str], *, coverage: bool = False, as_json: bool = False) -> int:
    """Print resources (and, for the example kernel, executed counts), or the instruction coverage.

    Parameters
    ----------
    files : sequence of str
        ISA texts; none means the example kernel, compiled and run.
    coverage : bool
        Print every mnemonic: implemented, met in the kernels, named in a test.
    as_json : bool

    Returns
    -------
    int
        Exit status: 1 where a kernel has instructions that the emulator lacks, or where FlyDSL is missing.
    """
    result = None
    if files:
        programs = _programs(files)
    elif missing := flydsl_missing():
        print(f"can't compile the example kernel: {missing}")
        return 1
    else:
        result, _ = run_example()
        programs = [result.program] if result.program else []
    if coverage:
        return _coverage(programs, as_json)
    status, everything = 0, []
    for program in programs:
        entry: dict[str, Any] = {"resources": resources(program)}
        try:
            load(program)
        except UnimplementedInstruction as error:
            entry["the emulator lacks"] = {"instructions": str(error)}
            status = 1
        if result is not None:
            counts = result.counts.as_dict()
            entry["executed"] = {
                key: counts[key]
                for key in (
                    "workgroups",
                    "waves",
                    "instructions",
                    "by_class",
                    "bytes",
                    "lds_conflict_cycles",
                    "cache_lines",
                )
            }
        everything.append(entry)
    if as_json:
        print(json.dumps(everything, indent=1))
        return status
    for entry in everything:
        for title, values in entry.items():
            _show(title, values)
    return status


def _coverage(programs: list[Program], as_json: bool) -> int:
    tests = Path(__file__).parents[1] / "op_tests"
    texts = [path.read_text() for path in tests.glob("*emulator*.py")]
    rows = isa_coverage(programs, texts)
    lacking = [row for row in rows if not row.implemented]
    if as_json:
        print(json.dumps([row.__dict__ for row in rows], indent=1))
        return 1 if lacking else 0
    print(f"{'mnemonic':<36} {'family':<12} {'implemented':<12} {'met':>6} {'tested':<7} manual")
    for row in rows:
        marks = ["yes" if flag else "NO" for flag in (row.implemented, row.tested)]
        print(f"{row.mnemonic:<36} {row.family:<12} {marks[0]:<12} {row.met:>6} {marks[1]:<7} {row.section}")
    tested = sum(row.tested for row in rows)
    met = sum(row.met > 0 for row in rows)
    print(f"{len(rows) - len(lacking)} implemented, {met} met in {len(programs)} kernel(s), {tested} tested")
    if not texts:
        print("the tests are not installed beside the package: nothing counts as tested")
    return 1 if lacking else 0
