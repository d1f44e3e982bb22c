"""Global memory: registered tensors, each with its own extent, are the only legal addresses.

The bytes are the caller's own (host addresses stand for device addresses), so nothing is copied in or out.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import MemoryFault

if TYPE_CHECKING:
    from .operation import Operation
    from .state import Group

# One access as parts: (region, byte offsets [waves, workgroups, 64], active lanes). Inactive lanes hold offset 0.
Part = tuple["Region", np.ndarray, np.ndarray]
Access = list[Part]


def sparse_zeros(count: int, dtype: Any) -> np.ndarray:
    """Zeros that cost memory only where they are touched, however many there are."""
    size = max(count * np.dtype(dtype).itemsize, 1)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype, count=count)


# A region's cache lines are counted in blocks of so many, so that a tensor of many GiB costs what is touched.
LINE_BLOCK_BITS = 12


class Touched:
    """Which of many places were touched."""

    def __init__(self, count: int) -> None:
        self.places = sparse_zeros(count, np.bool_)
        self.blocks = np.zeros((count >> LINE_BLOCK_BITS) + 1, np.bool_)

    def mark(self, places: np.ndarray) -> None:
        """Note places."""
        self.places[places] = True
        self.blocks[places >> LINE_BLOCK_BITS] = True

    def mark_few(self, places: np.ndarray) -> None:
        """Note different places in ascending order."""
        self.places[places] = True
        first, last = int(places[0]) >> LINE_BLOCK_BITS, int(places[-1]) >> LINE_BLOCK_BITS
        if last - first <= len(places):
            # A block that is looked at in vain does no harm.
            self.blocks[first : last + 1] = True
        else:
            self.blocks[places >> LINE_BLOCK_BITS] = True

    def count(self) -> int:
        """How many were noted."""
        size = 1 << LINE_BLOCK_BITS
        return sum(
            int(np.count_nonzero(self.places[block * size : (block + 1) * size]))
            for block in np.flatnonzero(self.blocks).tolist()
        )


class Spread:
    """Offsets of all lanes of a group, as a register holds them, from that of its first lane, and what follows."""

    __slots__ = ("highest", "lines", "lowest", "offsets")

    def __init__(self, offsets: np.ndarray) -> None:
        self.offsets = offsets.astype(np.int64) - int(offsets.flat[0])
        self.lowest, self.highest = int(self.offsets.min()), int(self.offsets.max())
        # Cache lines by where the offsets start within a line, and by the size of the access.
        self.lines: dict[tuple[int, int], np.ndarray] = {}


class Region:
    """A registered tensor: ``extent`` bytes from ``address``.

    Parameters
    ----------
    name : str
        What reports call it.
    address : int
        First byte.
    extent : int
        Bytes that the tensor's elements span; never its storage's.
    writable : bool
        Whether stores are legal.
    keepalive : object
        Held as long as the region.
    """

    def __init__(self, name: str, address: int, extent: int, *, writable: bool = True, keepalive: Any = None) -> None:
        self.name = name
        self.address = address
        self.extent = extent
        self.writable = writable
        self.keepalive = keepalive
        buffer: Any = (ctypes.c_uint8 * extent).from_address(address) if extent else b""
        self.bytes = np.frombuffer(buffer, np.uint8)
        self.words = self.bytes[: extent & ~3].view(np.uint32) if address % 4 == 0 else None
        # Complex numbers serve as 16-byte items: take copies their bits as they are.
        self.quads = self.bytes[: extent & ~15].view(np.complex128) if address % 16 == 0 else None
        self.halves = self.bytes[: extent & ~1].view(np.uint16) if address % 2 == 0 else None
        # Says whether anybody still owns the buffer; None: not known, so it counts as owned.
        self.alive: Callable[[], bool] | None = None
        self.forget()

    def forget(self) -> None:
        """Start a launch: drop what its checks and counts keep, made on first use."""
        # Who wrote each granule, and which cache lines were touched.
        self.writers: np.ndarray | None = None
        self.writer_granule = 4
        self.lines_read: Touched | None = None
        self.lines_written: Touched | None = None

    @property
    def end(self) -> int:
        """First byte behind."""
        return self.address + self.extent

    def __repr__(self) -> str:
        return f"{self.name} [{self.address:#x}, {self.end:#x})"

    def load_words(self, offsets: np.ndarray, count: int) -> list[np.ndarray]:
        """Gather ``count`` consecutive dwords from each byte offset."""
        low = int(np.bitwise_or.reduce(offsets, axis=None))
        if count == 4 and self.quads is not None and not low & 15:
            items = self.quads.take(offsets >> 4).view(np.uint32).reshape(*offsets.shape, 4)
            return [items[..., k] for k in range(4)]
        if self.words is not None and not low & 3:
            index = offsets >> 2
            return [self.words.take(index if k == 0 else index + k) for k in range(count)]
        return [self.load_small(offsets + 4 * k, 4) for k in range(count)]

    def load_small(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Gather little-endian values of 1, 2 or 4 bytes at any alignment, zero-extended."""
        value = self.bytes.take(offsets).astype(np.uint32)
        for k in range(1, size):
            value |= self.bytes.take(offsets + k).astype(np.uint32) << np.uint32(8 * k)
        return value

    def store_words(self, offsets: np.ndarray, data: list[np.ndarray], mask: np.ndarray) -> None:
        """Scatter consecutive dwords to each byte offset of the active lanes; a higher lane wins a collision."""
        at = offsets[mask]
        if self.words is not None and not int(np.bitwise_or.reduce(at)) & 3:
            at >>= 2
            for k, value in enumerate(data):
                self.words[at + k] = np.broadcast_to(value, mask.shape)[mask]
            return
        for k, value in enumerate(data):
            self.store_small(offsets + 4 * k, value, mask, 4)

    def store_small(self, offsets: np.ndarray, data: np.ndarray, mask: np.ndarray, size: int) -> None:
        """Scatter the low ``size`` bytes of each active lane."""
        at = offsets[mask]
        values = np.broadcast_to(data, mask.shape)[mask]
        for k in range(size):
            self.bytes[at + k] = (values >> np.uint32(8 * k)).astype(np.uint8)


class Memory:
    """The address space of a launch."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.freed: list[Region] = []

    def register(self, name: str, address: int, extent: int, *, writable: bool = True, keepalive: Any = None) -> Region:
        """Make a tensor legal to access. Tensors may overlap (views of one allocation)."""
        region = Region(name, address, extent, writable=writable, keepalive=keepalive)
        self.regions.append(region)
        return region

    def register_array(self, name: str, array: np.ndarray, *, writable: bool = True) -> Region:
        """Register a numpy array by its own bounds."""
        low, high = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)
        return self.register(name, int(low), int(high - low), writable=writable, keepalive=array)

    def find(self, address: int, size: int) -> Region | None:
        """Region that holds all of ``[address, address + size)``."""
        for region in self.regions:
            if region.address <= address and address + size <= region.end:
                return region
        return None

    def nearest(self, address: int) -> Region | None:
        """Region whose edge is nearest to an address."""
        return min(
            self.regions,
            key=lambda region: max(region.address - address, address - region.end + 1, 0),
            default=None,
        )

    def resolve(
        self, op: Operation, group: Group, addresses: np.ndarray, mask: np.ndarray, size: int, *, write: bool
    ) -> Access:
        """Find the regions of an access, or raise the fault that names the first lane outside all of them.

        Parameters
        ----------
        addresses : numpy.ndarray
            uint64 ``[waves, workgroups, 64]``.
        mask : numpy.ndarray
            Active lanes.
        size : int
            Bytes per lane.
        """
        full = group.full and mask is group.exec
        hint = op.aux
        if isinstance(hint, Region) and hint in self.regions and hint.extent >= size:
            offsets = self._inside(hint, addresses, mask, size, full)
            if offsets is not None:
                return [(hint, offsets, mask)] if not write or hint.writable else self._write_fault(op, group, hint)
        for region in self.regions:
            if region.extent < size or region is hint:
                continue
            offsets = self._inside(region, addresses, mask, size, full)
            if offsets is not None:
                op.aux = region
                return (
                    [(region, offsets, mask)] if not write or region.writable else self._write_fault(op, group, region)
                )
        return self._scattered(op, group, addresses, mask, size, write)

    @staticmethod
    def _inside(region: Region, addresses: np.ndarray, mask: np.ndarray, size: int, full: bool) -> np.ndarray | None:
        offsets = addresses - np.uint64(region.address)
        if not full:
            offsets *= mask
        if int(offsets.max()) > region.extent - size:
            return None
        return offsets.view(np.int64)

    def _scattered(
        self, op: Operation, group: Group, addresses: np.ndarray, mask: np.ndarray, size: int, write: bool
    ) -> Access:
        left = mask.copy()
        parts: Access = []
        for region in self.regions:
            if region.extent < size:
                continue
            offsets = addresses - np.uint64(region.address)
            here = left & (offsets <= np.uint64(region.extent - size))
            if here.any():
                if write and not region.writable:
                    self._write_fault(op, group, region)
                parts.append((region, (offsets * here).view(np.int64), here))
                left &= ~here
        if left.any():
            wave, workgroup, lane = (int(axis[0]) for axis in np.nonzero(left))
            address = int(addresses[wave, workgroup, lane])
            self.fault(op, group, wave, workgroup, lane, address, size, write)
        return parts

    def fault(
        self, op: Operation, group: Group, wave: int, workgroup: int, lane: int, address: int, size: int, write: bool
    ) -> None:
        """Raise the fault of one lane; wave and workgroup count within the group."""
        near = self.nearest(address)
        hint = "no tensor is registered"
        for region in self.freed:
            if region.address <= address < region.end:
                hint = f"the buffer {region!r} was freed"
                near = region
                break
        else:
            if near is not None:
                beyond = address + size - near.end if address >= near.address else near.address - address
                side = "past the end of" if address >= near.address else "before the start of"
                hint = f"{beyond} bytes {side} the nearest tensor, {near!r}"
        what = f"{'writes' if write else 'reads'} {size} bytes at {address:#x}: {hint}"
        name = None if near is None else near.name
        raise group.machine.lane_fault(op, group, (wave, workgroup, lane), address, size, what, name)

    @staticmethod
    def _write_fault(op: Operation, group: Group, region: Region) -> Access:
        machine = group.machine
        raise MemoryFault(
            f"kernel {machine.program.name}, {machine.program.describe(op.index)}: writes to {region!r}, which was "
            f"registered as read-only",
            kernel=machine.program.name,
            line=op.instruction.line,
            text=op.instruction.text,
            nearest=region.name,
        )


def load_words(access: Access, count: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Gather dwords of an access that may span several regions."""
    if len(access) == 1:
        region, offsets, _ = access[0]
        return region.load_words(offsets, count)
    result = [np.zeros(shape, np.uint32) for _ in range(count)]
    for region, offsets, mask in access:
        for target, value in zip(result, region.load_words(offsets, count), strict=True):
            np.copyto(target, value, where=mask)
    return result


def load_small(access: Access, size: int, shape: tuple[int, ...]) -> np.ndarray:
    """Gather 1- or 2-byte values of an access that may span several regions."""
    if len(access) == 1:
        region, offsets, _ = access[0]
        return region.load_small(offsets, size)
    result = np.zeros(shape, np.uint32)
    for region, offsets, mask in access:
        np.copyto(result, region.load_small(offsets, size), where=mask)
    return result
