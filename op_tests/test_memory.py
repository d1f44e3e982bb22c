"""The fallback's memory and work: bounded however large the cache and however long the request.

Peak memory is ru_maxrss of a fresh process, in which a long request revisits a few pages of a cache of 16 GiB: the
cache is mapped and sparse, so only what the call itself takes can move the peak. ``python -m op_tests.test_memory
EXECUTOR SCENARIO ...`` prints a measurement a line.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, use_options
from aiter_paged_fp8.fallback import dense
from aiter_paged_fp8.request import describe
from op_tests import cases
from op_tests.cases import E4M3, Case, build, run, sparse_bytes

MIB = 2**20
#: What a call may take beside its output.
BOUND = 256 * MIB
#: Held by the measured process before the call. It is not the call's, so it may not count.
BALLAST = 300 * MIB
#: Taken after the call, to see that the peak still moves when something takes too much.
EXCESS = 400 * MIB

DENSE = [executor for executor in cases.EXECUTORS if cases.PATHS[executor] == "dense"]


@dataclass(frozen=True)
class Scenario:
    """A call on a cache of 16 GiB. By default one whose K and V would take GiBs as dense float32, its scores of one
    head 256 MiB."""

    layout: str
    page: int
    q_len: int = 32
    kv_len: int = 512 * 1024
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    dim_v: int = 128
    cache_bytes: int = 16 * 2**30
    table: str = "block"
    gpu_tiles: bool = False


SCENARIOS = {
    "slots": Scenario("slots", 1, table="csr"),
    "linear": Scenario("linear", 64, q_len=4),
    "vectorized": Scenario("vectorized", 64, q_len=4, table="csr"),
    "vectorized-1024": Scenario("vectorized", 1024, q_len=4),
    # Many rows, heads and dims over few keys: all of q and of the output in float32 would be above the bound.
    "wide": Scenario("vectorized", 16, q_len=2048, kv_len=100, heads=64, kv_heads=64, dim=256, dim_v=256),
    # The tiles of a GPU, on this machine: the bound is the same.
    "gpu-tiles": Scenario("linear", 64, q_len=512, kv_len=2048, heads=32, kv_heads=32, gpu_tiles=True),
}
LONG = [name for name, scenario in SCENARIOS.items() if scenario.kv_len > 100_000]


def peak() -> int:
    """Highest resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_and_virtual() -> tuple[int, int]:
    """Memory of this process now, in bytes (Linux)."""
    virtual, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(resident) * resource.getpagesize(), int(virtual) * resource.getpagesize()


def sparse_call(scenario: Scenario) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call on sparse caches; its page table goes over four pages, far apart, again and again."""
    generator = torch.Generator().manual_seed(0)
    heads, page, dim, dim_v = scenario.kv_heads, scenario.page, scenario.dim, scenario.dim_v
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "slots": ((heads, dim), (heads, dim_v)),
        "linear": ((page, heads, dim), (page, heads, dim_v)),
        "vectorized": ((heads, dim // 16, page, 16), (heads, page // 16, dim_v, 16)),
    }
    caches = []
    distinct: list[int] = []
    for shape in shapes[scenario.layout]:
        size = torch.Size(shape).numel()
        pages = scenario.cache_bytes // size
        cache = sparse_bytes(pages * size).view(pages, *shape)
        distinct = [0, pages // 3, pages // 2, pages - 1]
        for where in distinct:
            cache[where] = cases.fp8(shape, generator).view(torch.uint8)
        caches.append(cache.view(E4M3))
    count = -(-scenario.kv_len // page)
    ids = torch.tensor(distinct, dtype=torch.int32).repeat(-(-count // 4))[:count]
    table = {"block_table": ids[None], "seqlen_k": torch.tensor([scenario.kv_len], dtype=torch.int32)}
    if scenario.table == "csr":
        last = torch.tensor([(scenario.kv_len - 1) % page + 1], dtype=torch.int32)
        indptr = torch.tensor([0, count], dtype=torch.int32)
        table = {"kv_indptr": indptr, "kv_page_indices": ids, "kv_last_page_lens": last}
    one = torch.ones(1)
    q = cases.fp8((scenario.q_len, scenario.heads, dim), generator)
    cu = torch.tensor([0, scenario.q_len], dtype=torch.int32)
    kwargs = {**table, "q_descale": one, "k_descale": one, "v_descale": one, "return_lse": True}
    return (q, *caches, cu, scenario.q_len, scenario.kv_len), kwargs


def measure(name: str, executor: str) -> dict[str, Any]:
    """One call in this process, and what it did to the peak."""
    scenario = SCENARIOS[name]
    args, kwargs = sparse_call(scenario)
    ballast = torch.ones(BALLAST, dtype=torch.uint8)
    resident, virtual = resident_and_virtual()
    # Whoever materialises a cache gets an error here instead of taking the machine down.
    resource.setrlimit(resource.RLIMIT_AS, (virtual + 4 * 2**30,) * 2)
    before = peak()
    if scenario.gpu_tiles:
        out = torch.empty(scenario.q_len, scenario.heads, scenario.dim_v, dtype=torch.bfloat16)
        lse = torch.empty(scenario.heads, scenario.q_len)
        dense.attend(describe(*args, **kwargs), out, lse, dense.GPU)
    else:
        with use_options(executor=executor):
            out, lse = flydsl_flash_attn_paged_prefill_func(*args, **kwargs)
    after = peak()
    assert bool(out.isfinite().all())
    output = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    excess = torch.ones(EXCESS, dtype=torch.uint8)
    return {
        "scenario": name,
        "resident": resident,
        "before": before,
        "after": after,
        "output": output,
        "with_excess": peak(),
        "held": int(ballast[-1]) + int(excess[-1]),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("executor", DENSE)
def test_peak_memory(executor: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "op_tests.test_memory", executor, *SCENARIOS],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    assert [seen["scenario"] for seen in measured] == list(SCENARIOS)
    for seen in measured:
        # Controls. The baseline is what the process held right before the call, ballast included, and no older peak
        # hides growth below it; and the peak does move with what is taken.
        assert seen["before"] > BALLAST, seen
        assert seen["before"] - seen["resident"] < 16 * MIB, seen
        assert seen["with_excess"] - seen["before"] > EXCESS - 16 * MIB > BOUND, seen
        assert seen["after"] - seen["before"] <= BOUND + seen["output"], seen


@pytest.mark.parametrize("name", LONG)
def test_a_materialised_request_would_exceed_the_bound(name: str) -> None:
    # What the scenarios are long enough to catch: all of K and V in fp8; K and V of a single head in float32; its
    # scores.
    scenario = SCENARIOS[name]
    group = scenario.heads // scenario.kv_heads
    assert scenario.kv_len * scenario.kv_heads * (scenario.dim + scenario.dim_v) >= BOUND
    assert 4 * scenario.kv_len * (scenario.dim + scenario.dim_v) > BOUND
    assert scenario.q_len < 32 or 4 * scenario.kv_len * scenario.q_len * group >= BOUND
    assert scenario.cache_bytes >= 16 * 2**30


class Operations(TorchDispatchMode):
    """Counts what torch carries out, and the views that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            self.views += 1
        else:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(executor: str, layout: str, page: int, kv_lens: list[int], q_lens: list[int]) -> Operations:
    case = Case(q_lens, kv_lens, heads=2, kv_heads=1, dim=32, dim_v=32, layout=layout, page=page, tail_byte=0)
    built = build(case)
    with Operations() as seen:
        run(built, executor)
    return seen


@pytest.mark.parametrize("executor", DENSE)
@pytest.mark.parametrize("lens", [([1536, 700], [50, 9]), ([2048, 0, 1], [300, 4, 2])], ids=["long", "ragged"])
def test_work_does_not_grow_with_the_page_count(executor: str, lens: tuple[list[int], list[int]]) -> None:
    kv_lens, q_lens = lens
    operations(executor, "linear", 1, [1], [1])  # what only the first call of a process does is not counted
    single = operations(executor, "linear", 1, kv_lens, q_lens)
    assert single.counts.total() > 20
    for layout, page in (
        ("linear", 64),
        ("linear", 16),
        ("linear", 256),
        ("vectorized", 16),
        ("vectorized", 64),
        ("slots", 1),
    ):
        paged = operations(executor, layout, page, kv_lens, q_lens)
        assert paged.counts == single.counts, (layout, page)
        # A part of a page or of a tile is a view more or less, one for each page would be hundreds.
        assert abs(paged.views - single.views) <= 0.1 * single.views, (layout, page)


@pytest.mark.parametrize("executor", DENSE)
@pytest.mark.parametrize(("layout", "page"), [("slots", 1), ("linear", 1), ("vectorized", 16), ("vectorized", 1024)])
def test_work_grows_with_keys_in_large_steps(executor: str, layout: str, page: int) -> None:
    totals = {kv_len: operations(executor, layout, page, [kv_len], [8]).counts.total() for kv_len in (2048, 4096, 8192)}
    steps = totals[4096] - totals[2048], totals[8192] - totals[4096]
    assert steps[1] == 2 * steps[0]
    # Far less than one operation a token.
    assert 0 < steps[0] < 2048 / 8


def measure_apart(name: str, executor: str) -> None:
    """Print a measurement made in a process of its own: the peak of one that was forked begins at what it holds then.
    Print a measurement made in a process of its own: the peak of one that was forked begins at what it holds then."""
    child = os.fork()
    if not child:
        status = 1
        try:
            print(json.dumps(measure(name, executor)), flush=True)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"scenario {name} failed")


if __name__ == "__main__":
    for scenario_name in sys.argv[2:]:
        measure_apart(scenario_name, sys.argv[1])
