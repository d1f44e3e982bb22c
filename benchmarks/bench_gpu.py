"""Paged FP8 prefill on one GPU, against the peers that are installed: `python -m benchmarks.bench_gpu [--json FILE]`.

Every implementation computes the same shapes from the same values; launches alternate, so that a clock that falls under
load falls for all. Times are medians of CUDA events; TFLOP/s count unmasked (query, key) pairs, 2 (D + Dv) operations a
pair and query head; the error is the relative L2 distance from float32 attention over a sample of rows. Who the peers
are: peers.py. At the end: the ratios that this package is held to, as far as their rows were measured.

A few shapes and contestants in one short run: `--shapes 1,4 --only "ours,FA3 fp8 page,vLLM"`. Which kernel breaks the
device: `--serial`, where each runs alone, launches wait for the one before, and the name is printed before the launch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, plan
from benchmarks import peers
from benchmarks.peers import SHAPES, Call, Shape, Values, noted

Make = Callable[[Values], Call]
# A result farther from float32 than this is wrong (P in e4m3 gives 0.026, unlifted up to 0.06) and counts in no ratio.
WRONG = 0.15


class BrokenDevice(RuntimeError):
    """The device answers nothing any more; the message says after whose launch."""


def ours(values: Values, layout: str, page: int, **kwargs: Any) -> Call:
    """This package, through its public function."""
    k, v, table = values.vectorized(page) if layout == "vectorized" else values.linear(page)
    if page == 1:
        k, v = k.squeeze(1), v.squeeze(1)
    shape, one = values.shape, values.one
    arguments = (values.q, k, v, values.cu_q, max(shape.q_lens), max(shape.kv_lens))
    kwargs |= {"block_table": table, "seqlen_k": values.lens, "q_descale": one, "k_descale": one, "v_descale": one}

    def call() -> torch.Tensor:
        result = flydsl_flash_attn_paged_prefill_func(*arguments, out=values.out, **kwargs)
        assert isinstance(result, torch.Tensor)
        return result

    return noted(call, str(plan(*arguments, **kwargs).executor))


def unsplit(values: Values, layout: str, page: int) -> Call:
    """Keys of short queries in one part; only where they would be cut."""
    from aiter_paged_fp8.fallback import triton_fmha

    if sum(values.shape.q_lens) * values.shape.heads > 4096:
        raise NotImplementedError("rows alone fill the device")
    call = ours(values, layout, page)

    def whole() -> torch.Tensor:
        parts = triton_fmha.parts
        triton_fmha.parts = lambda *arguments: 1
        try:
            return call()
        finally:
            triton_fmha.parts = parts

    return noted(whole, call.where)  # type: ignore[attr-defined]


CONTESTANTS: dict[str, Make] = {
    "ours page 64": lambda values: ours(values, "vectorized", 64),
    "ours page 16": lambda values: ours(values, "vectorized", 16),
    "ours page 1": lambda values: ours(values, "linear", 1),
    "ours page 64, no split": lambda values: unsplit(values, "vectorized", 64),
    "FA3 fp8 page 64": lambda values: peers.flash3(values, 64),
    "FA3 fp8 page 16": lambda values: peers.flash3(values, 16),
    "FA3 fp8 page 1": lambda values: peers.flash3(values, 1),
    "FA3 fp8 dense": lambda values: peers.flash3(values, None),
    "FlashInfer fa3 fp8 page 64": lambda values: peers.flashinfer(values, 64),
    "FlashInfer fa3 fp8 page 16": lambda values: peers.flashinfer(values, 16),
    "FlashInfer fa3 fp8 page 1": lambda values: peers.flashinfer(values, 1),
    "FlashInfer fmha_v2 fp8 page 64": lambda values: peers.fmha_v2(values, 64),
    "FlashInfer fmha_v2 fp8 page 16": lambda values: peers.fmha_v2(values, 16),
    "vLLM Triton fp8 page 64": lambda values: peers.vllm(values, 64),
    "vLLM Triton fp8 page 16": lambda values: peers.vllm(values, 16),
    "AITER fp8 page 64": lambda values: peers.aiter(values, 64),
    "SDPA bf16 dense": peers.sdpa,
}


def choose(only: str | None) -> dict[str, Make]:
    """The contestants that a term of ``only`` names: its whole name, or else a part of it, in whatever case."""
    if not only:
        return CONTESTANTS
    chosen: set[str] = set()
    for term in (part.strip().lower() for part in only.split(",")):
        exact = {name for name in CONTESTANTS if name.lower() == term}
        found = exact or {name for name in CONTESTANTS if term in name.lower()}
        if not found:
            raise SystemExit(f"no contestant is called {term!r}: {', '.join(CONTESTANTS)}")
        chosen |= found
    return {name: make for name, make in CONTESTANTS.items() if name in chosen}


@dataclass
class Row:
    """One line of the table."""

    shape: str
    dims: str
    name: str
    milliseconds: float = math.nan
    tflops: float = math.nan
    error: float = math.nan
    note: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        """Measured, and right."""
        return self.tflops > 0 and self.error < WRONG


def check_device(name: str, shape: Shape, cause: BaseException | None = None) -> None:
    """Whether the device still answers; whose fault it is where not."""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        said = str(cause or error).strip().splitlines()
        raise BrokenDevice(f"{name} broke the device at {shape}: {said[0][:200] if said else ''}") from error


def once(name: str, call: Call, shape: Shape, busy: bool) -> float:
    """Milliseconds of one launch; with ``busy`` the queue is kept so before, or the host's own time is measured too."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    try:
        if busy:
            torch.cuda._sleep(2_000_000)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))
    except Exception as error:
        check_device(name, shape, error)
        raise


def alternate(calls: dict[str, Call], seconds: float, shape: Shape) -> Iterator[tuple[str, float]]:
    """Milliseconds of each call, launches alternating until ``seconds`` are spent in each on average.

    Every other round goes backwards: nobody always follows the one that leaves the chip hot, or cool.
    """
    spent, rounds = 0.0, 0
    while rounds < 6 or (spent < seconds * 1e3 * len(calls) and rounds < 200):
        for name, call in list(calls.items())[:: -1 if rounds % 2 else 1]:
            took = once(name, call, shape, True)
            spent += took
            yield name, took
        rounds += 1


def one_by_one(calls: dict[str, Call], seconds: float, shape: Shape) -> Iterator[tuple[str, float]]:
    """The same of each call alone; before its first launch its name is printed, in case it never returns."""
    for name, call in calls.items():
        print(f"# {shape.name} {shape.dim}/{shape.dim_v} {name}: timed", file=sys.stderr, flush=True)
        spent, rounds = 0.0, 0
        while rounds < 5 or (spent < seconds * 1e3 and rounds < 200):
            took = once(name, call, shape, False)
            check_device(name, shape)
            spent += took
            rounds += 1
            yield name, took


def measure(shape: Shape, seconds: float, chosen: dict[str, Make], serial: bool, rows: list[Row]) -> None:
    """Append the rows of one shape: every contestant is checked first, then they run in turn."""
    started = time.monotonic()
    values = Values(shape)
    picked, expected = values.reference()
    check_device("the reference", shape)
    calls: dict[str, Call] = {}
    mine: dict[str, Row] = {}
    for name, make in chosen.items():
        row = mine[name] = Row(shape.name, f"{shape.dim}/{shape.dim_v}", name)
        rows.append(row)
        if serial:
            print(f"# {shape.name} {row.dims} {name}: checked", file=sys.stderr, flush=True)
        try:
            call = make(values)
            values.out.fill_(math.nan)
            result = call()[picked].float()
            call()
            check_device(name, shape)
            row.error = float((result - expected).norm() / expected.norm())
            row.note = getattr(call, "where", "")
            calls[name] = call
        except BrokenDevice:
            row.note = "broke the device"
            raise
        except Exception as error:  # a peer that refuses is a line of the table, not the end of it
            row.note = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:90] if str(error) else ''}"
            check_device(name, shape, error)
    ready = time.monotonic()
    try:
        for name, took in (one_by_one if serial else alternate)(calls, seconds, shape):
            mine[name].times.append(took)
    finally:
        for row in mine.values():
            if row.times:
                row.milliseconds = sorted(row.times)[len(row.times) // 2]
                row.tflops = shape.flops() / row.milliseconds / 1e9
    taken = f"{ready - started:.1f} s to make and check, {time.monotonic() - ready:.1f} s timed"
    print(f"# {shape.name} {shape.dim}/{shape.dim_v}: {taken}", file=sys.stderr, flush=True)


def show(rows: list[Row]) -> None:
    """Print one shape's rows; the ratio is to the fastest paged fp8 peer's rate."""
    best = max((row.tflops for row in rows if paged_peer(row)), default=math.nan)
    for row in rows:
        if row.tflops > 0:
            ratio = f"{row.tflops / best:6.2f}" if best > 0 else "     -"
            wrong = "" if row.error < WRONG else "WRONG "
            print(
                f"{row.shape:8} {row.dims:8} {row.name:30} {row.milliseconds:9.4f} ms {row.tflops:7.1f} TFLOP/s "
                f"error {row.error:.4f} {ratio} {wrong}{row.note}"
            )
        else:
            print(f"{row.shape:8} {row.dims:8} {row.name:30} not measured: {row.note}")
    sys.stdout.flush()


def paged_peer(row: Row) -> bool:
    """Another implementation that reads fp8 pages, and was right."""
    return row.counts and "fp8 page" in row.name


def goals(rows: list[Row]) -> Iterator[str]:
    """Each ratio that is asked for, with what was asked, where both of its rows were measured and right."""
    found = {(row.shape, row.dims, row.name): row for row in rows if row.counts}

    def line(what: str, top: Row | None, bottom: Row | None, asked: float, more: str = "") -> Iterator[str]:
        if top and bottom:
            ratio = top.tflops / bottom.tflops
            met = "met" if ratio >= asked or (more and top.tflops >= 550) else "MISSED"
            rates = f"{top.tflops:.0f} to {bottom.tflops:.0f} TFLOP/s, {bottom.name}"
            yield f"{what}: {ratio:.2f}x, asked {asked}x{more}: {met} ({rates})"

    def name(group: tuple[str, str], contestant: str) -> Row | None:
        return found.get((*group, contestant))

    large, latent = ("16K/32K", "128/128"), ("16K/32K", "192/128")
    ragged, short = ("ragged", "128/128"), ("70/16K", "192/128")
    mine = name(large, "ours page 64")
    rivals = (row for row in rows if (row.shape, row.dims) == large and paged_peer(row))
    best = max(rivals, key=lambda row: row.tflops, default=None)
    yield from line("page 64 against the best paged fp8 peer (aim 1.0x)", mine, best, 0.85)
    yield from line("page 64 against vLLM's Triton", mine, name(large, "vLLM Triton fp8 page 64"), 8)
    yield from line("192/128 against FA3", name(latent, "ours page 64"), name(latent, "FA3 fp8 page 64"), 0.95)
    yield from line("page 16 against our page 64", name(large, "ours page 16"), mine, 0.9)
    single = name(large, "ours page 1")
    yield from line("page 1 against FA3", single, name(large, "FA3 fp8 page 1"), 0.7, " or 550 TFLOP/s")
    yield from line("ragged against FA3", name(ragged, "ours page 64"), name(ragged, "FA3 fp8 page 64"), 0.85)
    yield from line("short: split", name(short, "ours page 64"), name(short, "ours page 64, no split"), 4)


def plain(value: Any) -> Any:
    """A number as the file holds it: four digits, null where nothing was measured."""
    if not isinstance(value, float):
        return value
    return round(value, 4) if math.isfinite(value) else None


def places(text: str) -> list[int]:
    """Shapes by their places in SHAPES, comma between."""
    chosen = [int(part) for part in text.split(",")]
    if not all(0 <= place < len(SHAPES) for place in chosen):
        raise argparse.ArgumentTypeError(f"places are 0 to {len(SHAPES) - 1}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the rows there")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each contestant at each shape")
    shapes = "; ".join(f"{at}: {shape.name} {shape.dim}/{shape.dim_v}" for at, shape in enumerate(SHAPES))
    parser.add_argument("--shapes", type=places, default=list(range(len(SHAPES))), help=f"these only: {shapes}")
    parser.add_argument("--only", help="contestants whose names contain one of these, comma between")
    parser.add_argument("--serial", action="store_true", help="one contestant at a time, every launch waited for")
    options = parser.parse_args()
    chosen = choose(options.only)
    if options.serial:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # read when the device is first used, which is below
    import triton

    properties = torch.cuda.get_device_properties(0)
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"
    print(f"{properties.name}, {versions}; ratio: to the fastest paged fp8 peer of the shape", flush=True)
    table: list[Row] = []
    broken: Exception | None = None
    for place in options.shapes:
        before = len(table)
        try:
            measure(SHAPES[place], options.seconds, chosen, options.serial, table)
        except Exception as error:  # what was measured until then is still shown
            broken = error
        show(table[before:])
        if broken:
            break
    for line in goals(table):
        print(line)
    if options.json:
        with open(options.json, "w") as file:
            data = [{key: plain(value) for key, value in vars(row).items() if key != "times"} for row in table]
            json.dump({"device": properties.name, "versions": versions, "rows": data}, file, indent=1)
    if isinstance(broken, BrokenDevice):
        raise SystemExit(str(broken))
    if broken:
        raise broken


if __name__ == "__main__":
    main()
