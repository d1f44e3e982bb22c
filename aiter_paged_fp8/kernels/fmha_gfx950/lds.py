"""K and V pages on their way into LDS: page lookups, one descriptor a page, tails.

A page's part for one KV head is contiguous in both caches of the vectorized layout, and it is kept in LDS as it is:
staging is a straight copy, 1 KiB for each instruction of a wave. A page that holds no key of the tile is an empty
buffer: it is not read, and its place in LDS is filled with zeros.
"""

from typing import Any

import flydsl.expr as fx
from flydsl.expr import range_constexpr

from . import intrinsics as gpu
from .traits import LANES, PACK, Traits
from .work import Work


def storage(traits: Traits) -> Any:
    """LDS of a workgroup."""

    @fx.struct
    class Storage:
        tiles: fx.Array[gpu.Fp8, traits.lds_bytes, LANES * PACK]

    return Storage


class Ring:
    """Tiles of one operand in LDS, from a byte offset on."""

    def __init__(self, pointer: Any, first: int, slots: int, tile_bytes: int) -> None:
        self.pointer, self.first, self.slots, self.tile_bytes = pointer, first, slots, tile_bytes

    def pack(self, offset: Any) -> Any:
        """The pack at a byte offset."""
        return gpu.window(self.pointer, offset + self.first, PACK)

    def slot_of(self, tile: Any) -> Any:
        """Byte offset of a tile's slot."""
        return (tile & (self.slots - 1)) * self.tile_bytes


class Pages:
    """Ids of the request's pages: scalar loads that can't leave the request's part of the table."""

    def __init__(self, traits: Traits, args: Any, work: Work) -> None:
        self.traits, self.args = traits, args
        self.table = gpu.buffer(work.page_ids, fx.Int32, fx.Int64(work.listed) * 4)

    def of_tile(self, tile: Any) -> list[Any]:
        """Page ids of a tile, clamped to the cache."""
        count = self.traits.pages_per_tile
        last = self.args.pages - 1
        return [
            gpu.clamp(fx.rocdl.s_buffer_load(self.table, tile * count + k), fx.Int32(0), last)
            for k in range_constexpr(count)
        ]


class Staging:
    """Loads tiles of K and V into LDS; each wave an eighth of each."""

    def __init__(self, traits: Traits, args: Any, work: Work, k_ring: Ring, v_ring: Ring) -> None:
        self.traits, self.args, self.work = traits, args, work
        self.k_ring, self.v_ring = k_ring, v_ring
        self.used = gpu.divide(work.keys + (traits.page - 1), traits.page)
        self.k_head = args.k + fx.Int64(work.head) * traits.k_page_bytes
        self.v_head = args.v + fx.Int64(work.head) * traits.v_page_bytes
        self.atom = fx.make_copy_atom(fx.rocdl.cdna4.BufferLoadAsyncLDS128b(), gpu.Fp8)

    def load(self, tile: Any, page_ids: list[Any], v_slot: Any) -> None:
        """Issue this wave's loads of a tile.

        Parameters
        ----------
        tile : Int32
        page_ids : list of Int32
            From `Pages.of_tile`.
        v_slot : Int32
            Byte offset of the V ring's slot.
        """
        traits, args = self.traits, self.args
        k_slot = self.k_ring.slot_of(tile)
        for which in range_constexpr(traits.pages_per_tile):
            page = fx.Int64(page_ids[which])
            live = tile * traits.pages_per_tile + which < self.used
            k_page, v_page = self.k_head + page * args.k_page_stride, self.v_head + page * args.v_page_stride
            self._load_page(self.k_ring, k_slot, which, k_page, traits.k_page_bytes, live)
            self._load_page(self.v_ring, v_slot, which, v_page, traits.v_page_bytes, live)

    def _load_page(self, ring: Ring, slot: Any, which: int, address: Any, size: int, live: Any) -> None:
        source = gpu.buffer(address, gpu.Fp8, live.select(fx.Int32(size), fx.Int32(0)))
        for first in range_constexpr(0, size, self.traits.waves * self.traits.dma_bytes):
            piece = self.work.wave * self.traits.dma_bytes + first
            fx.copy_atom_call(
                self.atom,
                gpu.window(source, piece + self.work.lane * PACK, PACK),
                ring.pack(slot + piece + which * size),
            )
