"""Wild contents of metadata under the native kernel: it touches nothing outside of the tensors, and ends.

The emulator faults on any access outside of a tensor's bytes; tables end where their mappings end, and canaries lie
around the outputs. What is asked of a call is what test_wild_metadata asks of every executor.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from aiter_paged_fp8.emulator import Checks, Options
from aiter_paged_fp8.runtime import emulated
from op_tests.cases import PATHS, fresh_seed
from op_tests.conftest import FULL
from op_tests.test_wild_metadata import EMULATED, LAYOUTS, Call, Wild

pytestmark = pytest.mark.grows

# An example takes a tenth of a second here, and shrinking one minutes: they are drawn evenly, each with a seed of its
# own, rather than by hypothesis, which likes small and empty ones.
EXAMPLES = 50
#: Ten times what the largest call here takes: a kernel that walks on is told from one that ends.
ENDS = Options(max_instructions=200_000, on_report="raise")
BLOCKS = 40 if FULL else 4


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("executor", EMULATED)
def test_native_memory_stays_safe_and_valid_requests_right(executor: str, block: int) -> None:
    compared = 0
    for seed in range(first := fresh_seed(), first + EXAMPLES):
        rng = random.Random(seed)
        wild = native_wild(rng)
        print(f"{seed}: {wild}")
        call = Call(wild, PATHS[executor])
        # Memory faults always; the emulator's other checks for a tenth. Workgroups that write the same rows are no
        # fault: wild offsets give a row to several requests. Skewed waves take four times as long.
        checks = Checks(global_races=False) if seed % 10 == 0 else Checks.none()
        schedule = "skewed" if FULL and seed % 10 == 1 else "lockstep"
        memory: Any = rng.choice(("latest", "earliest"))
        with emulated(replace(ENDS, memory=memory, schedule=schedule, checks=checks)):
            call.run(executor)
        call.assert_safe()
        compared += call.assert_right(executor)
    assert compared > EXAMPLES // 4, "too few requests of a definite result to tell"


@pytest.mark.parametrize("length", [-(2**31), 1 - 2**31, -(2**31) + 140, -1])
@pytest.mark.parametrize("executor", EMULATED)
def test_a_negative_length_under_two_query_tiles(executor: str, length: int) -> None:
    # What lies before the last tile of queries is subtracted from the length: below -2**31 it would turn positive.
    rows = {"total_q": 140, "cu": [0, 140], "max_seqlen_q": 140, "rows": [[1, 0]], "lengths": [length]}
    table = {"max_seqlen_k": 100, "indptr": None, "ids": [], "lasts": None}
    call = Call(Wild("vectorized", 64, 2, interleaved=False, causal=True, **rows, **table), PATHS[executor])  # type: ignore[arg-type]
    with emulated(ENDS):
        call.run(executor)
    call.assert_safe()
    assert bool((call.out == 0).all()), "a length below zero holds no keys"


def native_wild(rng: random.Random) -> Wild:
    """Few rows and mostly one tile of keys, for speed; every number bent now and then."""
    layout, page = rng.choice(LAYOUTS["paged"])
    batch = rng.choice((0, 1, 2, 2, 3, 3, 3, 3)) if rng.random() < 0.5 else rng.choice((1, 2, 3))
    pages = rng.choice((0, 1, 2, 3, 4, 5, 5, 5))
    # One request in some calls has more rows than a workgroup.
    q_lens = [rng.choice((0, 1, 2, 4, rng.randint(1, 9), 130 if rng.random() < 0.2 else 3)) for _ in range(batch)]
    # A cache without pages has no valid length but 0; others are asked of it too.
    most = rng.choice((1, 1, 2, 2, 2, 3)) * page if pages or rng.random() < 0.7 else 0
    lens = [rng.choice((0, rng.randint(0, most), rng.randint(0, most), most)) for _ in range(batch)]
    # One kind of number or all of them, from a single bad one to nothing but bad ones.
    kinds = rng.choice(("none", "cu", "lengths", "ids", "indptr", "lasts", "all", "all"))
    share = rng.choice((0.1, 0.2, 0.4, 1.0))
    ends = (-(2**31), 1 - 2**31, -page, -2, -1, 0, 1, page - 1, page + 1, 2**16, 2**24, 2**25, 2**31 - page, 2**31 - 1)

    def bent(kind: str, number: int) -> int:
        if kinds not in (kind, "all") or rng.random() >= share:
            return number
        return rng.choice(
            (
                rng.choice(ends),
                rng.choice(ends),
                number + rng.choice((-1, 1, 65, -65)),
                rng.randint(-(2**31), 2**31 - 1),
            )
        )

    offsets = list(accumulate(q_lens, initial=rng.randint(0, 2)))
    bounds = [max([0, *lens]), max([0, *lens]), rng.randint(0, most + 3)]
    ids = [[rng.randrange(max(pages, 1)) for _ in range(-(-length // page))] for length in lens]
    rows = indptr = lasts = None
    flat: list[int] = []
    if rng.random() < 0.5:
        most_k = rng.choice(bounds)
        columns = -(-most_k // page) + rng.randint(0, 2)
        rows = [
            [bent("ids", page_id) for page_id in (row + [rng.randrange(max(pages, 1))] * columns)[:columns]]
            for row in ids
        ]
    else:
        # No table bounds this one: a bound may be larger than any counter.
        most_k = rng.choice((*bounds, 2**20, 2**31 - 1, 2**31, 2**40))
        starts = list(accumulate(map(len, ids), initial=rng.randint(0, 2)))
        flat = [bent("ids", page_id) for page_id in [0] * starts[0] + [page_id for row in ids for page_id in row]]
        flat += [bent("ids", -1) for _ in range(rng.randint(0, 2))]
        indptr = [bent("indptr", start) for start in starts]
        lasts = [bent("lasts", (length - 1) % page + 1) for length in lens]
    return Wild(
        layout=layout,
        page=page,
        pages=pages,
        interleaved=rng.random() < 0.5,
        causal=True,
        total_q=offsets[-1] + rng.randint(0, 2),
        max_seqlen_q=max([0, *q_lens]),
        max_seqlen_k=most_k,
        cu=[bent("cu", offset) for offset in offsets],
        rows=rows,
        lengths=[bent("lengths", length) for length in lens] if rows is not None else [],
        indptr=indptr,
        ids=flat,
        lasts=lasts,
    )


def test_the_native_fuzz_reaches_what_it_is_for() -> None:
    """Each number is bent, alone and beside others, in requests that have rows; and most calls have definite ones."""
    seen: dict[str, int] = {}

    def count(what: str) -> None:
        seen[what] = seen.get(what, 0) + 1

    for seed in range(1000):
        wild = native_wild(random.Random(seed))
        table = "block" if wild.rows is not None else "csr"
        for request in range(wild.batch):
            if not wild.clamped_rows(request):
                continue
            names = {offence[0] for offence in wild.offences(request)}
            for name in names:
                count(name)
            if len(names) == 1:
                count(f"only {names.pop()}")
            defined = wild.defined(request)
            if defined is not None and defined[1]:
                count(f"{table} right")
                if wild.max_seqlen_k >= 2**31:
                    count("right under a bound beyond int32")
                if defined[1] > 128:
                    count("two tiles")
            if wild.pages and wild.max_seqlen_k and wild.indptr is not None:
                start, stop = wild.indptr[request : request + 2]
                if start < 0 < stop:
                    count("before the table")
                if 0 <= start <= len(wild.ids) < stop:
                    count("behind the table")
    kinds = ("cu_seqlens_q", "seqlen_k", "block_table", "kv_indptr", "kv_page_indices", "kv_last_page_lens")
    for what in (*kinds, *(f"only {kind}" for kind in kinds)):
        assert seen.get(what, 0) >= 10, what
    for what in ("block right", "csr right", "right under a bound beyond int32", "two tiles"):
        assert seen.get(what, 0) >= 20, what
    for what in ("before the table", "behind the table"):
        assert seen.get(what, 0) >= 10, what
