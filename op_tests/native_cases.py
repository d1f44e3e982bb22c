"""Runs of the native kernel on the emulator, shared by the tests of that kernel.

Whatever the emulator notices (races, missing waits, undefined values, faults) fails the test that ran into it, and
each run asserts that the native kernel did the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, record, use_options
from aiter_paged_fp8.emulator import Options, Result
from aiter_paged_fp8.runtime import emulated
from op_tests.cases import E4M3, NAN_BYTE, Built, Case, token

#: Memory as late as the waits allow; at once; late with each wave running ahead of the next, in either order; and
#: LDS-DMA late while LDS itself hurries.
MODES = {
    "latest": Options(memory="latest"),
    "earliest": Options(memory="earliest"),
    "skewed": Options(memory="latest", schedule="skewed"),
    "skewed-reverse": Options(memory="latest", schedule="skewed-reverse"),
    "latest-vmem": Options(memory="latest-vmem", schedule="skewed"),
}
#: All specialisations of the one shape that exists: (table, lse).
SPECIALISATIONS = (("block", True), ("csr", True), ("block", False), ("csr", False))


class Ran(NamedTuple):
    """Results of a call, and the launch behind it."""

    out: torch.Tensor
    lse: torch.Tensor | None
    launch: Result


def kernel_name(table: str, lse: bool) -> str:
    """Name that a launch records."""
    return f"paged_prefill_vectorized64_d128_128_{'block' if table == 'block' else 'csr'}{'_lse' if lse else ''}"


def run_native(built: Built, mode: str = "latest", **changes: Any) -> Ran:
    """Call the public function on the emulator in one mode; one launch of the expected kernel, and no report.

    Parameters
    ----------
    changes
        Keyword arguments of the call. ``out``, ``lse`` and ``return_lse`` default to the case's own outputs.
    """
    kwargs = {"out": built.out, "lse": built.lse, "return_lse": True, **built.kwargs, **changes}
    if not kwargs["return_lse"]:
        kwargs["lse"] = None
    with emulated(MODES[mode]) as session, use_options(executor="emulator"), record() as calls:
        result = flydsl_flash_attn_paged_prefill_func(*built.args, **kwargs)
    (call,) = calls
    assert (call.plan.path, call.plan.executor, call.plan.code) == ("paged", "emulator", "native")
    (note,), (launch,) = call.launches, session.launches
    assert note.kernel == kernel_name(built.case.table, kwargs["return_lse"])
    assert note.instructions is not None
    assert note.instructions == launch.counts.instructions > 0
    assert launch.reports == [], [report.message for report in launch.reports]
    out, lse = result if kwargs["return_lse"] else (result, None)
    for given, got in ((kwargs["out"], out), (kwargs["lse"], lse)):
        assert given is None or got is given, "a preallocated result was not the one returned"
    return Ran(out, lse, launch)


# -- changes of a case's tensors: what a `Case` cannot say -----------------------------------------------------------

Change = Callable[[Built], None]


def put(built: Built, **named: torch.Tensor | int) -> None:
    """Replace arguments of the call by name."""
    names = ("q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")
    built.args = tuple(named.pop(name, old) for name, old in zip(names, built.args, strict=True))
    assert all(name in built.kwargs for name in named), named
    built.kwargs.update(named)


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a stride of 2, other numbers between."""
    wide = torch.full((*tensor.shape, 2), -7, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def strided_q(built: Built) -> None:
    """Q as the first heads of a fused tensor whose other heads are NaN."""
    q = built.q
    fused = torch.full((q.shape[0], q.shape[1] + 3, q.shape[2]), NAN_BYTE, dtype=torch.uint8)
    fused[:, 1:-2] = q.view(torch.uint8)
    put(built, q=fused.view(E4M3)[:, 1:-2])
    assert not built.q.is_contiguous()


def strided_metadata(built: Built) -> None:
    """Offsets, lengths and page tables with a stride."""
    names = ("block_table", "seqlen_k", "kv_indptr", "kv_page_indices", "kv_last_page_lens")
    put(built, cu_seqlens_q=every_second(built.args[3]))
    put(built, **{name: every_second(built.kwargs[name]) for name in names if name in built.kwargs})


def wide_table_rows(built: Built) -> None:
    """A block table that is the left part of a wider one: rows are packed, their stride is not their length."""
    table = built.kwargs["block_table"]
    wide = torch.full((table.shape[0], table.shape[1] + 5), 2**31 - 1, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    put(built, block_table=wide[:, : table.shape[1]])


def oversized_table(built: Built) -> None:
    """Many more entries than pages, all of them wild."""
    wild = torch.tensor([-1, 2**31 - 1, -(2**31)] * 40, dtype=torch.int32)
    if "block_table" in built.kwargs:
        table = built.kwargs["block_table"]
        put(built, block_table=torch.cat([table, wild.repeat(table.shape[0], 1)], 1))
    else:
        put(built, kv_page_indices=torch.cat([built.kwargs["kv_page_indices"], wild]))


def exact_table(built: Built) -> None:
    """A table without an entry to spare; the emulator faults any read outside it."""
    if "block_table" in built.kwargs:
        pages = max(len(ids) for ids in built.page_ids)
        put(built, block_table=built.kwargs["block_table"][:, :pages].contiguous())
    else:
        indptr = built.kwargs["kv_indptr"] - 1
        put(built, kv_indptr=indptr, kv_page_indices=built.kwargs["kv_page_indices"][1:-1].contiguous())


def one_allocation(built: Built) -> None:
    """K and V as the views of one allocation [pages, 2, ...] at a storage offset, as serving engines keep them."""
    k, v = (cache.view(torch.uint8) for cache in built.args[1:3])
    pages, offset = k.shape[0], 48
    page_bytes = k[0].numel()
    whole = torch.full((offset + pages * 2 * page_bytes,), built.case.tail_byte, dtype=torch.uint8)
    both = whole[offset:].view(pages, 2, page_bytes)
    both[:, 0], both[:, 1] = k.reshape(pages, -1), v.reshape(pages, -1)
    caches = [
        both.as_strided(cache.shape, (2 * page_bytes, *cache.contiguous().stride()[1:]), offset + at * page_bytes)
        for at, cache in enumerate((k, v))
    ]
    put(built, k=caches[0].view(E4M3), v=caches[1].view(E4M3))
    assert built.args[1].storage_offset() == offset
    assert built.args[1].stride(0) == 2 * page_bytes


def v_page_gap(built: Built) -> None:
    """V's stride between pages differs from K's."""
    v = built.args[2].view(torch.uint8)
    apart = torch.full((v.shape[0], 3, *v.shape[1:]), built.case.tail_byte, dtype=torch.uint8)
    apart[:, 1] = v
    put(built, v=apart.view(E4M3)[:, 1])


def larger_maxima(built: Built) -> None:
    """max_seqlen_* as the engines give them: far above the longest length."""
    change: dict[str, Any] = {"max_seqlen_q": built.args[4] + 700, "max_seqlen_k": built.args[5] + 40_000}
    if "block_table" in built.kwargs:
        table = built.kwargs["block_table"]
        more = torch.full((table.shape[0], 700), 2**31 - 1, dtype=torch.int32)
        change["block_table"] = torch.cat([table, more], 1)
    put(built, **change)


def lengths_above_the_maximum(built: Built) -> None:
    """Lengths beyond max_seqlen_k count as max_seqlen_k, which the case's lengths are."""
    assert set(built.case.kv_lens) == {built.args[5]}
    put(built, seqlen_k=built.kwargs["seqlen_k"] + torch.tensor([1, 77], dtype=torch.int32))


def views_of_descales(built: Built) -> None:
    """Descales as 0-d and as elements inside other tensors, at a 4-byte alignment."""
    names = ("q_descale", "k_descale", "v_descale")
    together = torch.tensor([9e9, *[float(built.kwargs[name]) for name in names], 9e9])
    put(built, q_descale=together[1], k_descale=together[2:3], v_descale=together[3].view(1, 1))


def shared_pages(built: Built) -> None:
    """The second request has the first one's pages, table and all."""
    first, second = built.page_ids
    assert len(first) == len(second)
    built.page_ids[1] = first
    if "block_table" in built.kwargs:
        built.kwargs["block_table"][1] = built.kwargs["block_table"][0]
    else:
        start = int(built.kwargs["kv_indptr"][1])
        ids = built.kwargs["kv_page_indices"]
        ids[start : start + len(first)] = torch.tensor(first, dtype=torch.int32)


@dataclass(frozen=True)
class Poison:
    """NaN at tokens that are used: (cache, request, token, KV head, dim or None for all dims, byte)."""

    cache: str
    request: int
    index: int
    head: int = 0
    dim: int | None = None
    byte: int = NAN_BYTE

    def __call__(self, built: Built) -> None:
        assert self.index < built.case.kv_lens[self.request]
        where = token(built, self.cache, self.request, self.index)[self.head]
        if self.dim is None:
            where[...] = self.byte
        elif where.dim() == 2:
            where[self.dim // 16, self.dim % 16] = self.byte
        else:
            where[self.dim] = self.byte


@dataclass(frozen=True)
class PoisonQuery:
    """NaN in one element of Q."""

    row: int
    head: int
    dim: int

    def __call__(self, built: Built) -> None:
        built.q.view(torch.uint8)[self.row, self.head, self.dim] = NAN_BYTE


def huge_unseen_tokens(built: Built) -> None:
    """448 in K and V of the last token, which only the last row sees."""
    for request, length in enumerate(built.case.kv_lens):
        for cache in ("k", "v"):
            token(built, cache, request, length - 1)[...] = 0x7E


def expect_rows_of_nan(case: Case, built: Built, request: int, index: int) -> tuple[list[int], list[int]]:
    """Rows of q that see a token of a request, and all other rows of requests."""
    first, last = built.cu[request], built.cu[request + 1]
    kv_len = case.kv_lens[request]
    seeing = [row for row in range(first, last) if index <= row - first + kv_len - (last - first)]
    return seeing, [row for row in range(built.cu[0], built.cu[-1]) if row not in seeing]
