"""Block table or CSR: one view of both.

The only device-to-host read of the fallback happens here, in one transfer: query offsets and lengths. Page ids stay
on the device. Whatever these tensors hold, the spans made from them stay inside q, inside the page table, and within
``max_seqlen_k``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class BlockTable(NamedTuple):
    """``block_table`` [B, columns] int32 and ``seqlen_k`` [B] int32."""

    block_table: torch.Tensor
    seqlen_k: torch.Tensor

    def host_parts(self) -> tuple[torch.Tensor, ...]:
        """The 1-D tensors whose contents the host needs."""
        return (self.seqlen_k,)

    def rows(self, parts: Sequence[list[int]], page: int) -> list[tuple[torch.Tensor, int]]:
        """Per request: the page ids that it may use, and its length as stated."""
        return list(zip(self.block_table.unbind(0), parts[0], strict=True))


class Csr(NamedTuple):
    """``kv_indptr`` [B+1] int32, ``kv_page_indices`` 1-D int32, ``kv_last_page_lens`` [B] int32 or None at page 1."""

    kv_indptr: torch.Tensor
    kv_page_indices: torch.Tensor
    kv_last_page_lens: torch.Tensor | None

    def host_parts(self) -> tuple[torch.Tensor, ...]:
        """The 1-D tensors whose contents the host needs."""
        if self.kv_last_page_lens is None:
            return (self.kv_indptr,)
        return (self.kv_indptr, self.kv_last_page_lens)

    def rows(self, parts: Sequence[list[int]], page: int) -> list[tuple[torch.Tensor, int]]:
        """Per request: the page ids that it may use, and its length as stated.

        The length is ``(n - 1) * page + last`` for n pages, 0 for none. A last-page length outside [0, page] counts
        as its nearest bound.
        """
        indptr = parts[0]
        lasts = parts[1] if len(parts) > 1 else [page] * (len(indptr) - 1)
        # A slice stays inside of its tensor whatever its bounds; the length is the span's to bound, by what the slice
        # holds.
        return [
            (self.kv_page_indices[start:stop], (stop - start - 1) * page + max(last, 0))
            for start, stop, last in zip(indptr, indptr[1:], lasts, strict=False)
        ]


Table = BlockTable | Csr


class Span(NamedTuple):
    """One request, clamped: rows [start, start + q_len) of q against the first kv_len tokens of the pages in
    ``page_ids``."""

    start: int
    q_len: int
    kv_len: int
    page_ids: torch.Tensor


def to_host(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Contents of 1-D int32 tensors, in one transfer."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist() if len(tensors) > 1 else tensors[0].tolist()
    lists, at = [], 0
    for tensor in tensors:
        lists.append(flat[at : at + tensor.numel()])
        at += tensor.numel()
    return lists


def spans(
    cu_seqlens_q: torch.Tensor, table: Table, *, total_q: int, page: int, pages: int, max_seqlen_k: int
) -> list[Span]:
    """Every request of a call, clamped to what q, the table and ``max_seqlen_k`` hold.

    Parameters
    ----------
    cu_seqlens_q : torch.Tensor
        [B + 1] int32; offsets outside [0, total_q] count as the nearest bound, a falling pair as an empty request.
    table : BlockTable or Csr
    total_q, page, pages, max_seqlen_k : int
        Rows of q, tokens per page, pages of the cache, and the longest length that counts.

    Returns
    -------
    list of Span
        One per request. Lengths are 0 where the cache has no page at all. Page ids are not clamped: their reader does
        that.
    """
    cu, *parts = to_host((cu_seqlens_q, *table.host_parts()))
    starts = [min(max(offset, 0), total_q) for offset in cu]
    result = []
    for start, stop, (page_ids, length) in zip(starts, starts[1:], table.rows(parts, page), strict=False):
        capacity = page_ids.shape[0] * page if pages else 0
        kv_len = max(0, min(length, max_seqlen_k, capacity))
        result.append(Span(start, max(stop - start, 0), kv_len, page_ids))
    return result
