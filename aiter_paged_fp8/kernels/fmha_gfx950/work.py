"""Which rows and which keys a workgroup has.

Everything read from device memory is clamped here, so that whatever it holds, what is derived from it stays inside q,
inside the page table and inside the caches.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx

from . import intrinsics as gpu
from .traits import STRIP, Traits


class Work:
    """The query tile of a workgroup, and where its request's pages are listed.

    Attributes
    ----------
    head, first_row, count
        KV head, row of q where the tile's first position lies, and number of positions (0 or less: no work).
    keys, tiles, full
        Keys that the last position sees, tiles of keys that hold them, and leading tiles that every position sees
        wholly, without the last tile of all, which ends the pipeline.
    page_ids, listed
        Address of the request's page ids, and how many of them may be read.
    """

    def __init__(self, traits: Traits, args: Any) -> None:
        self.traits, self.args = traits, args
        self.head = fx.Int32(fx.block_idx.x)
        request = fx.Int32(fx.block_idx.y)
        rank = fx.Int32(fx.block_idx.z)
        zero = fx.Int32(0)

        offsets = gpu.buffer(args.cu_seqlens_q, fx.Int32, fx.Int64(args.requests + 1) * 4)
        start = gpu.clamp(fx.rocdl.s_buffer_load(offsets, request), zero, args.total_q)
        stop = gpu.clamp(fx.rocdl.s_buffer_load(offsets, request + 1), zero, args.total_q)
        q_len = stop - start
        # Tiles are counted from the end of the request, so that the longest comes first without a division.
        end = q_len - rank * args.positions
        begin = fx.arith.max(end - args.positions, zero)
        self.count = end - begin
        self.first_row = start + begin

        kv_len = self._kv_length(request)
        #: Last key that the tile's first position sees; position p sees p keys more.
        self.first_limit = kv_len - q_len + begin
        self.keys = fx.arith.max(kv_len - q_len + end, zero)
        tile = traits.tile_keys
        self.tiles = gpu.divide(self.keys + (tile - 1), tile)
        self.full = fx.arith.min(gpu.divide(fx.arith.max(self.first_limit + 1, zero), tile), self.tiles - 1)
        self._place_rows()

    def _kv_length(self, request: Any) -> Any:
        """Length in tokens: what the table says, at most what it can hold and ``max_seqlen_k``."""
        args, page, zero = self.args, self.traits.page, fx.Int32(0)
        if self.traits.table == "block":
            lengths = gpu.buffer(args.lengths, fx.Int32, fx.Int64(args.requests) * 4)
            self.page_ids = args.table + fx.Int64(request) * args.table_stride * 4
            self.listed = args.table_entries
            length = fx.rocdl.s_buffer_load(lengths, request)
        else:
            indptr = gpu.buffer(args.lengths, fx.Int32, fx.Int64(args.requests + 1) * 4)
            start = gpu.clamp(fx.rocdl.s_buffer_load(indptr, request), zero, args.table_entries)
            stop = gpu.clamp(fx.rocdl.s_buffer_load(indptr, request + 1), start, args.table_entries)
            self.page_ids = args.table + fx.Int64(start) * 4
            self.listed = stop - start
            lasts = gpu.buffer(args.last_page_lens, fx.Int32, fx.Int64(args.requests) * 4)
            last = gpu.clamp(fx.rocdl.s_buffer_load(lasts, request), zero, fx.Int32(page))
            # No pages, no tokens: the clamp below sees to it.
            length = self._capacity(self.listed - 1) + last
        length = fx.arith.min(length, self._capacity(self.listed), args.max_seqlen_k)
        # A cache without pages holds nothing, whatever the lengths say.
        return fx.arith.max((args.pages > 0).select(length, zero), zero)

    def _capacity(self, pages: Any) -> Any:
        """Tokens of so many pages, as far as int32 counts."""
        page = self.traits.page
        return fx.arith.min(pages, fx.Int32((2**31 - 1) // page)) * page

    def _place_rows(self) -> None:
        """This lane's row: query head `member` of the group, at position `position` of the tile."""
        args = self.args
        self.wave, self.lane = gpu.wave_and_lane()
        self.half, self.row_in_strip = gpu.divide(self.lane, STRIP), self.lane & (STRIP - 1)
        row = self.wave * STRIP + self.row_in_strip
        self.position = (row * args.reciprocal) >> 16
        self.member = row - self.position * args.group
        #: Last key that this lane's query sees. Rows beyond the tile see what its last one sees; nobody reads them.
        self.limit = self.first_limit + fx.arith.min(self.position, self.count - 1)

    def rows(self, address: Any, kind: Any, dim: int) -> tuple[Any, Any]:
        """Buffer of a [total_q, heads, dim] tensor from this tile's first to its last element, and this lane's offset.

        Lanes without a row have offsets beyond the buffer's end.
        """
        args = self.args
        size = kind.width // 8
        first = (fx.Int64(self.first_row) * fx.Int64(args.heads) + fx.Int64(self.head * args.group)) * (dim * size)
        elements = ((self.count - 1) * args.heads + args.group) * dim
        offset = (self.position * args.heads + self.member) * dim
        return gpu.buffer(address + first, kind, fx.Int64(elements) * size), offset
