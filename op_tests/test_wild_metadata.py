"""Wild contents of metadata: numbers may be wrong, memory never.

Whatever stands in offsets, lengths, page ids and last-page lengths, a call ends, reads nothing outside of the cache
(which lies among NaN here; on the emulator any access outside of a tensor is a fault), writes only rows that some
request owns after clamping, and keeps the requests right that are valid themselves. `check_metadata` then refuses
exactly the invalid ones, naming argument, request, position and value.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, record, use_options
from aiter_paged_fp8.page_table import BlockTable, Csr, spans
from aiter_paged_fp8.reference import paged_attention
from op_tests import cases
from op_tests.cases import E4M3, EXECUTORS, NAN_BYTE, NATIVE_BUILT, PATHS, at_end_of_memory, fp8, guarded
from op_tests.conftest import FULL

pytestmark = pytest.mark.grows

INT32 = torch.int32
#: Small dims, for speed, where the executor takes them; those that a kernel exists for elsewhere.
DIMS = {"dense": (32, 16), "paged": (128, 128)}
LAYOUTS = {
    "dense": [("slots", 1), ("linear", 1), ("linear", 3), ("linear", 16), ("vectorized", 16), ("vectorized", 64)],
    "paged": sorted({(layout, page) for layout, page, *dims in NATIVE_BUILT if tuple(dims) == DIMS["paged"]}),
}
#: Few heads where a launch takes most of the time.
HEADS = {"dense": (4, 2), "paged": (2, 1)}
EMULATED = [executor for executor in EXECUTORS if executor == "emulator"]
DENSE = [executor for executor in EXECUTORS if PATHS[executor] == "dense"]
Q_DESCALE, K_DESCALE, V_DESCALE = 0.5, 1.5, 2.0
#: An offence as `check_metadata` names it: argument, request, position, value.
Offence = tuple[str, int, int, int]
MESSAGE = re.compile(r"^(\w+): got (-?\d+)\b.* at position (\d+), for request (\d+)\b")


@dataclass(frozen=True)
class Wild:
    """Metadata of a call, as plain numbers."""

    layout: str
    page: int
    pages: int
    interleaved: bool
    causal: bool
    total_q: int
    max_seqlen_q: int
    max_seqlen_k: int
    cu: list[int]
    #: Block table and lengths, or None for CSR.
    rows: list[list[int]] | None
    lengths: list[int]
    #: CSR, or None for a block table; last-page lengths are optional at page 1.
    indptr: list[int] | None
    ids: list[int]
    lasts: list[int] | None

    @property
    def batch(self) -> int:
        return len(self.cu) - 1

    def alone(self, request: int) -> Wild:
        """The call with this request only."""
        part = replace(self, cu=self.cu[request : request + 2])
        if self.rows is not None:
            return replace(part, rows=[self.rows[request]], lengths=[self.lengths[request]])
        assert self.indptr is not None
        lasts = None if self.lasts is None else [self.lasts[request]]
        return replace(part, indptr=self.indptr[request : request + 2], lasts=lasts)

    def offences(self, request: int) -> set[Offence]:
        """Everything that makes a request invalid; empty for a valid one."""
        start, stop = self.cu[request : request + 2]
        found: set[Offence] = set()
        for position, offset in ((request, start), (request + 1, stop)):
            if not 0 <= offset <= self.total_q:
                found.add(("cu_seqlens_q", request, position, offset))
        if not 0 <= stop - start <= self.max_seqlen_q:
            found.add(("cu_seqlens_q", request, request + 1, stop))
        if self.rows is not None:
            length = self.lengths[request]
            if not 0 <= length <= self.max_seqlen_k:
                return found | {("seqlen_k", request, request, length)}
            used = list(enumerate(self.rows[request][: -(-length // self.page)]))
            name = "block_table"
        else:
            assert self.indptr is not None
            name, (first, last) = "kv_page_indices", self.indptr[request : request + 2]
            if not 0 <= first <= len(self.ids):
                found.add(("kv_indptr", request, request, first))
            if not first <= last <= len(self.ids):
                found.add(("kv_indptr", request, request + 1, last))
            if not 0 <= first <= last <= len(self.ids):
                return found
            length = last - first
            if self.lasts is not None and length:
                if not 1 <= self.lasts[request] <= self.page:
                    found.add(("kv_last_page_lens", request, request, self.lasts[request]))
                length = (length - 1) * self.page + self.lasts[request]
            if length > self.max_seqlen_k:
                # Too many pages: the offset that ends them says so, or the last page's length.
                found.add(("kv_indptr", request, request + 1, last))
            used = list(enumerate(self.ids[first:last], start=first))
        return found | {(name, request, at, page) for at, page in used if not 0 <= page < self.pages}

    def clamped_rows(self, request: int) -> range:
        start, stop = (min(max(offset, 0), self.total_q) for offset in self.cu[request : request + 2])
        return range(start, max(start, stop))

    def defined(self, request: int) -> tuple[list[int], int] | None:
        """Page ids and length where the documentation says what they are, None where anything else is wild.

        Lengths above ``max_seqlen_k`` count as it, last-page lengths outside of a page as its nearest bound.
        """
        start, stop = self.cu[request : request + 2]
        if not (0 <= start <= stop <= self.total_q and stop - start <= self.max_seqlen_q):
            return None
        if self.rows is not None:
            length, ids = self.lengths[request], self.rows[request]
        else:
            assert self.indptr is not None
            first, last = self.indptr[request : request + 2]
            if not 0 <= first <= last <= len(self.ids):
                return None
            ids = self.ids[first:last]
            end = self.page if self.lasts is None else min(max(self.lasts[request], 0), self.page)
            length = (len(ids) - 1) * self.page + end if ids else 0
        if length < 0:
            return None
        length = min(length, self.max_seqlen_k)
        ids = ids[: -(-length // self.page)]
        return (ids, length) if all(0 <= page < self.pages for page in ids) else None


def some(valid: st.SearchStrategy[int]) -> st.SearchStrategy[int]:
    """Mostly what is meant, now and then any int32, with the ends and the neighbours of zero among it."""
    ends = st.sampled_from([-(2**31), -(2**31) + 1, -65, -1, 0, 1, 17, 65, 2**16, 2**24, 2**31 - 64, 2**31 - 1])
    wild = st.one_of(ends, st.integers(-(2**31), 2**31 - 1))
    return st.integers(0, 7).flatmap(lambda die: wild if die == 7 else valid)


@st.composite
def wild_calls(draw: st.DrawFn, path: str) -> Wild:
    layout, page = draw(st.sampled_from(LAYOUTS[path]))
    batch = draw(st.integers(0, 3))
    q_lens = draw(st.lists(st.integers(0, 4), min_size=batch, max_size=batch))
    offsets = list(accumulate(q_lens, initial=draw(st.integers(0, 2))))
    pages = draw(st.integers(0, 5))
    most = 3 * page if page > 1 else 9
    # A cache without pages has no valid length but 0; others are asked of it now and then.
    lens = draw(st.lists(st.integers(0, most if pages or draw(st.booleans()) else 0), min_size=batch, max_size=batch))
    bounds = [st.just(max([0, *lens])), st.integers(0, most + 3)]
    of_rows = draw(st.booleans())
    if not of_rows:  # a block table must have columns for the bound, however large
        bounds.append(st.sampled_from([2**20, 2**31 - 1, 2**31, 2**40]))
    max_seqlen_k = draw(st.one_of(bounds))
    page_id = some(st.integers(0, max(pages - 1, 0)))

    def many(strategy: st.SearchStrategy[int], count: int) -> list[int]:
        return draw(st.lists(strategy, min_size=count, max_size=count))

    rows = indptr = lasts = None
    ids: list[int] = []
    if of_rows:
        columns = -(-max_seqlen_k // page) + draw(st.integers(0, 2))
        rows = [many(page_id, columns) for _ in lens]
    else:
        counts = [-(-length // page) for length in lens]
        starts = list(accumulate(counts, initial=draw(st.integers(0, 2))))
        ids = many(page_id, starts[-1] + draw(st.integers(0, 2)))
        indptr = [draw(some(st.just(start))) for start in starts]
        if page > 1 or draw(st.booleans()):
            lasts = [draw(some(st.just((length - 1) % page + 1))) for length in lens]
    return Wild(
        layout=layout,
        page=page,
        pages=pages,
        interleaved=draw(st.booleans()),
        causal=path == "paged" or draw(st.booleans()),
        total_q=offsets[-1] + draw(st.integers(0, 2)),
        max_seqlen_q=max([0, *q_lens]),
        max_seqlen_k=max_seqlen_k,
        cu=[draw(some(st.just(offset))) for offset in offsets],
        rows=rows,
        lengths=[draw(some(st.just(length))) for length in lens],
        indptr=indptr,
        ids=ids,
        lasts=lasts,
    )


class Call:
    """The tensors of a wild call: caches among NaN, outputs among canaries, tables at the end of their memory."""

    def __init__(self, wild: Wild, path: str) -> None:
        self.wild = wild
        self.heads, self.kv_heads = HEADS[path]
        self.dim, self.dim_v = DIMS[path]
        generator = torch.Generator().manual_seed(0)
        self.q = fp8((wild.total_q, self.heads, self.dim), generator)
        self.k = self._cache(generator, True, self.dim)
        self.v = self._cache(generator, False, self.dim_v)
        self.out, self.out_whole = guarded((wild.total_q, self.heads, self.dim_v), torch.bfloat16)
        self.lse, self.lse_whole = guarded((self.heads, wild.total_q), torch.float32)

    def _cache(self, generator: torch.Generator, is_key: bool, dim: int) -> torch.Tensor:
        wild, heads = self.wild, self.kv_heads
        if wild.layout == "slots":
            inside: tuple[int, ...] = (heads, dim)
        elif wild.layout == "linear":
            inside = (wild.page, heads, dim)
        elif is_key:
            inside = (heads, dim // 16, wild.page, 16)
        else:
            inside = (heads, wild.page // 16, dim, 16)
        # Two pages of NaN on either side; in an interleaved cache one behind every page as well.
        gap = 2 if wild.interleaved else 1
        whole = torch.full((wild.pages + 4, gap, *inside), NAN_BYTE, dtype=torch.uint8)
        cache = whole[2 : wild.pages + 2, 0]
        cache.copy_(fp8((wild.pages, *inside), generator).view(torch.uint8))
        return cache.view(E4M3)

    def poison(self) -> None:
        for whole in (self.out_whole, self.lse_whole):
            whole.view(torch.uint8).fill_(0xA5)

    def untouched(self) -> bool:
        return all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole in (self.out_whole, self.lse_whole))

    def run(self, executor: str, check: bool = False, **descales: float) -> None:
        """Call the public function with this metadata (and other descales) into poisoned outputs."""
        wild = self.wild
        kwargs: dict[str, Any]
        if wild.rows is not None:
            columns = len(wild.rows[0]) if wild.rows else -(-wild.max_seqlen_k // wild.page)
            table = torch.tensor(wild.rows, dtype=INT32).view(wild.batch, columns)
            kwargs = {"block_table": table, "seqlen_k": torch.tensor(wild.lengths, dtype=INT32)}
        else:
            kwargs = {"kv_indptr": torch.tensor(wild.indptr, dtype=INT32)}
            kwargs["kv_page_indices"] = torch.tensor(wild.ids, dtype=INT32)
            if wild.lasts is not None:
                kwargs["kv_last_page_lens"] = torch.tensor(wild.lasts, dtype=INT32)
        kwargs = {name: at_end_of_memory(value) for name, value in kwargs.items()}
        cu = at_end_of_memory(torch.tensor(wild.cu, dtype=INT32))
        scales = {"q_descale": Q_DESCALE, "k_descale": K_DESCALE, "v_descale": V_DESCALE, **descales}
        self.poison()
        with use_options(executor=executor, check_metadata=check), record() as calls:
            flydsl_flash_attn_paged_prefill_func(
                self.q,
                self.k,
                self.v,
                cu,
                wild.max_seqlen_q,
                wild.max_seqlen_k,
                **kwargs,
                **{name: torch.tensor([value]) for name, value in scales.items()},
                causal=wild.causal,
                out=self.out,
                return_lse=True,
                lse=self.lse,
            )
        launched = bool(wild.total_q and wild.batch and wild.max_seqlen_q)
        cases.assert_ran(calls, executor, launched)

    def assert_safe(self) -> None:
        """No NaN came in from outside of the caches, and nothing was written outside of the requests' clamped rows."""
        assert not bool(self.out.isnan().any()), "memory outside of the cache reached out"
        assert not bool(self.lse.isnan().any()), "memory outside of the cache reached lse"
        owned = torch.zeros(self.wild.total_q, dtype=torch.bool)
        for request in range(self.wild.batch):
            rows = self.wild.clamped_rows(request)
            owned[rows.start : rows.stop] = True
        lse_bytes = self.lse.view(torch.uint8).view(self.heads, self.wild.total_q, 4).transpose(0, 1)
        for whole, tensor, by_row in (
            (self.out_whole, self.out, self.out.view(torch.uint8)),
            (self.lse_whole, self.lse, lse_bytes),
        ):
            assert bool((by_row[~owned] == 0xA5).all()), "rows that belong to no request were written"
            pad = (whole.numel() - tensor.numel()) // 2
            for canary in (whole[:pad], whole[whole.numel() - pad :]):
                assert bool((canary.view(torch.uint8) == 0xA5).all()), "memory around an output was written"

    def assert_right(self, executor: str) -> int:
        """Requests that are right by themselves are right; returns how many were compared."""
        wild = self.wild
        rows = [wild.clamped_rows(request) for request in range(wild.batch)]
        compared = 0
        for request in range(wild.batch):
            defined = wild.defined(request)
            mine = set(rows[request])
            others = {row for other in range(wild.batch) if other != request for row in rows[other]}
            if defined is None or not mine or mine & others:
                continue
            ids, length = defined
            expected, expected_lse = paged_attention(
                self.q,
                self.k,
                self.v,
                wild.cu[request : request + 2],
                [ids],
                [length],
                q_descale=Q_DESCALE,
                k_descale=K_DESCALE,
                v_descale=V_DESCALE,
                causal=wild.causal,
            )
            part = slice(rows[request].start, rows[request].stop)
            cases.compare_out(self.out[part], expected[part], executor)
            cases.compare_lse(self.lse[:, part], expected_lse[:, part], executor)
            compared += 1
        return compared


FUZZ = settings(
    max_examples=2000 if FULL else 200,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("executor", DENSE)
@FUZZ
@given(data=st.data())
def test_memory_stays_safe_and_valid_requests_right(executor: str, data: st.DataObject) -> None:
    wild = data.draw(wild_calls(PATHS[executor]))
    call = Call(wild, PATHS[executor])
    call.run(executor)
    call.assert_safe()
    call.assert_right(executor)


@pytest.mark.parametrize("executor", DENSE)
@FUZZ
@given(data=st.data())
def test_check_metadata_refuses_exactly_the_invalid(executor: str, data: st.DataObject) -> None:
    refuses_exactly_the_invalid(executor, data)


# What is refused is refused before an executor has a part in it: a few examples tell that it has none. A failing one
# is not shrunk, which would take minutes.
@pytest.mark.parametrize("executor", EMULATED)
@settings(FUZZ, max_examples=FUZZ.max_examples // 10, phases=[Phase.generate])
@given(data=st.data())
def test_check_metadata_refuses_exactly_the_invalid_natively(executor: str, data: st.DataObject) -> None:
    refuses_exactly_the_invalid(executor, data)


def refuses_exactly_the_invalid(executor: str, data: st.DataObject) -> None:
    wild = data.draw(wild_calls(PATHS[executor]).filter(lambda wild: wild.batch))
    call = Call(wild, PATHS[executor])
    assert_checked(call, executor, wild)
    # One by one, so that a request is not seen only behind an earlier one's offence.
    for request in range(wild.batch):
        alone = Call(wild.alone(request), PATHS[executor])
        assert_checked(alone, executor, alone.wild)


def assert_checked(call: Call, executor: str, wild: Wild) -> None:
    offences = set().union(*(wild.offences(request) for request in range(wild.batch)))
    if not offences:
        call.run(executor, check=True)
        call.assert_safe()
        rows = {row for request in range(wild.batch) for row in wild.clamped_rows(request)}
        assert call.assert_right(executor) or not rows
        return
    with pytest.raises(ValueError) as refused:
        call.run(executor, check=True)
    note(f"message: {refused.value}")
    named = MESSAGE.match(str(refused.value))
    assert named, str(refused.value)
    name, value, position, request = named[1], int(named[2]), int(named[3]), int(named[4])
    assert (name, request, position, value) in offences
    assert call.untouched(), "a refused call wrote"


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=INT32)


#: Offsets of two requests over 6 rows, and the rows that each owns.
SPANS = [
    ([0, 2, 6], [(0, 2), (2, 4)]),
    ([-5, 2, 9], [(0, 2), (2, 4)]),
    ([4, 2, 3], [(4, 0), (2, 1)]),
    ([2**31 - 1, -(2**31), 1], [(6, 0), (0, 1)]),
    ([7, 8, 9], [(6, 0), (6, 0)]),
]


@pytest.mark.parametrize(("cu", "expected"), SPANS, ids=str)
def test_spans_of_wild_offsets(cu: list[int], expected: list[tuple[int, int]]) -> None:
    table = BlockTable(torch.zeros(2, 1, dtype=INT32), int32(3, 3))
    found = spans(int32(*cu), table, total_q=6, page=16, pages=1, max_seqlen_k=16)
    assert [(span.start, span.q_len) for span in found] == expected


#: CSR of one request over 4 ids at pages of 16: offsets, last-page length, bound, pages of the cache, and the length.
LENGTHS = [
    ((0, 2), 5, 64, 9, 21),
    ((0, 2), 16, 64, 9, 32),
    ((0, 2), 17, 64, 9, 32),
    ((0, 2), 2**31 - 1, 64, 9, 32),
    ((0, 2), -1, 64, 9, 16),
    ((0, 2), 5, 20, 9, 20),
    ((0, 2), 5, 64, 0, 0),
    ((2, 2), 5, 64, 9, 0),
    ((2, 2), 2**31 - 1, 64, 9, 0),
    ((3, 1), 5, 64, 9, 0),
    ((0, 4), 16, 64, 9, 64),
    ((4, 2**31 - 1), 5, 64, 9, 0),
]


@pytest.mark.parametrize(("indptr", "last", "most", "pages", "expected"), LENGTHS)
def test_lengths_of_wild_csr(indptr: tuple[int, int], last: int, most: int, pages: int, expected: int) -> None:
    table = Csr(int32(*indptr), int32(5, 6, 7, 8), int32(last))
    (span,) = spans(int32(0, 1), table, total_q=1, page=16, pages=pages, max_seqlen_k=most)
    assert span.kv_len == expected
    assert span.kv_len <= 16 * span.page_ids.numel()
    if expected:
        assert span.page_ids.tolist() == [5, 6, 7, 8][indptr[0] : indptr[1]]


def test_the_length_of_a_block_table_row_is_bounded_by_its_columns() -> None:
    table = BlockTable(torch.zeros(2, 3, dtype=INT32), int32(49, -1))
    found = spans(int32(0, 1, 2), table, total_q=2, page=16, pages=1, max_seqlen_k=1000)
    assert [span.kv_len for span in found] == [48, 0]


VALID = Wild(
    layout="vectorized",
    page=64,
    pages=4,
    interleaved=False,
    causal=True,
    total_q=6,
    max_seqlen_q=4,
    max_seqlen_k=136,
    cu=[0, 2, 6],
    rows=[[0, 1, 9], [2, 3, 1]],
    lengths=[68, 136],
    indptr=None,
    ids=[],
    lasts=None,
)
VALID_CSR = replace(VALID, rows=None, lengths=[], indptr=[1, 3, 6], ids=[99, 0, 1, 2, 3, 1, 99], lasts=[4, 8])


@pytest.mark.parametrize("valid", [VALID, VALID_CSR], ids=["block", "csr"])
def test_check_metadata_passes_a_valid_call(executor: str, valid: Wild) -> None:
    call = Call(valid, PATHS[executor])
    call.run(executor, check=True)
    call.assert_safe()
    assert call.assert_right(executor) == 2


#: What is bent, and how the message must begin.
OFFENCES = {
    "offset below zero": (replace(VALID, cu=[-1, 2, 6]), "cu_seqlens_q: got -1 at position 0, for request 0"),
    "offset above total_q": (replace(VALID, cu=[0, 2, 7]), "cu_seqlens_q: got 7 at position 2, for request 1"),
    "falling offsets": (replace(VALID, cu=[3, 2, 6]), "cu_seqlens_q: got 2 at position 1, for request 0"),
    "more rows than max_seqlen_q": (replace(VALID, cu=[0, 1, 6]), "cu_seqlens_q: got 6 at position 2, for request 1"),
    "length below zero": (replace(VALID, lengths=[68, -1]), "seqlen_k: got -1 at position 1, for request 1"),
    "length above max_seqlen_k": (replace(VALID, lengths=[137, 136]), "seqlen_k: got 137 at position 0, for request 0"),
    "page id": (replace(VALID, rows=[[0, 1, 9], [2, 4, 1]]), "block_table: got 4 at position 1, for request 1"),
    "negative page id": (
        replace(VALID, rows=[[0, -1, 9], [2, 3, 1]]),
        "block_table: got -1 at position 1, for request 0",
    ),
    "start below zero": (replace(VALID_CSR, indptr=[-1, 3, 6]), "kv_indptr: got -1 at position 0, for request 0"),
    "end above numel": (replace(VALID_CSR, indptr=[1, 3, 8]), "kv_indptr: got 8 at position 2, for request 1"),
    "falling indptr": (replace(VALID_CSR, indptr=[1, 0, 3]), "kv_indptr: got 0 at position 1, for request 0"),
    "last of 0": (replace(VALID_CSR, lasts=[0, 8]), "kv_last_page_lens: got 0 at position 0, for request 0"),
    "last above page": (replace(VALID_CSR, lasts=[4, 65]), "kv_last_page_lens: got 65 at position 1, for request 1"),
    "CSR page id": (
        replace(VALID_CSR, ids=[99, 0, 1, 2, 4, 1, 99]),
        "kv_page_indices: got 4 at position 4, for request 1",
    ),
    "CSR length above max_seqlen_k": (
        replace(VALID_CSR, lasts=[4, 9]),
        "kv_indptr: got 6 at position 2, for request 1",
    ),
}


@pytest.mark.parametrize("what", OFFENCES)
def test_check_metadata_names_the_offence(executor: str, what: str) -> None:
    wild, beginning = OFFENCES[what]
    call = Call(wild, PATHS[executor])
    with pytest.raises(ValueError) as refused:
        call.run(executor, check=True)
    assert str(refused.value).startswith(beginning)
    assert call.untouched(), "a refused call wrote"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_check_metadata_names_a_descale_that_is_no_number(executor: str, name: str, value: float) -> None:
    call = Call(VALID, PATHS[executor])
    with pytest.raises(ValueError, match=rf"^{name}: got {value} at position 0\b"):
        call.run(executor, check=True, **{name: value})
    assert call.untouched(), "a refused call wrote"


def test_the_fuzz_reaches_what_it_is_for() -> None:
    """Among the draws are valid calls, calls with compared requests beside invalid ones, and each kind of offence."""
    seen: set[str] = set()

    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(wild=wild_calls("dense"))
    def look(wild: Wild) -> None:
        offences = [wild.offences(request) for request in range(wild.batch)]
        seen.update(offence[0] for found in offences for offence in found)
        if offences and not any(offences):
            seen.add("valid")
        if any(offences) and any(wild.defined(request) and wild.clamped_rows(request) for request in range(wild.batch)):
            seen.add("mixed")
        if any(start > stop for start, stop in pairwise(wild.cu)):
            seen.add("falling offsets")
        if not wild.pages:
            seen.add("no pages")

    look()
    assert seen == {
        *("cu_seqlens_q", "seqlen_k", "block_table", "kv_indptr", "kv_page_indices", "kv_last_page_lens"),
        *("valid", "mixed", "falling offsets", "no pages"),
    }
