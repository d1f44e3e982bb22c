"""LDS of a batch of workgroups: bytes, bounds, and access by any width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import MemoryFault
from .math.lanes import transpose_read_source

if TYPE_CHECKING:
    from .lds_check import Pattern
    from .machine import Machine
    from .operation import Operation
    from .state import Group

# Per workgroup (facts of gfx950: 160 KiB).
LDS_LIMIT = 163840
# LDS is allocated in units that keep the widest access of one workgroup inside its own row.
ALLOCATION = 16


class Lds:
    """LDS bytes ``[workgroups, stride]``, one row per workgroup.

    Attributes
    ----------
    size : int
        Bytes of one workgroup.
    base : numpy.ndarray
        Position of each workgroup's row in the flat views, ``[workgroups]``.
    """

    def __init__(self, machine: Machine, size: int, workgroups: int) -> None:
        if size > LDS_LIMIT:
            raise MemoryFault(f"kernel {machine.program.name} asks for {size} bytes of LDS; {LDS_LIMIT} exist")
        self.machine = machine
        self.size = size
        self.stride = max(-(-size // ALLOCATION) * ALLOCATION, ALLOCATION)
        self.flat = np.zeros(workgroups * self.stride, np.uint8)
        poison = np.uint32(machine.options.poison & 0xFFFFFFFF)
        self.words = self.flat.view(np.uint32)
        self.words[:] = poison
        # Complex numbers serve as 8- and 16-byte items: take and assignment copy their bits as they are.
        self.pairs = self.flat.view(np.complex64)
        self.quads = self.flat.view(np.complex128)
        self.halves = self.flat.view(np.uint16)
        self.base = np.arange(workgroups, dtype=np.int64) * self.stride

    def place(self, group: Group, addresses: np.ndarray) -> np.ndarray:
        """Flat byte positions of addresses ``[waves, workgroups, 64]`` of a group."""
        return addresses + self.base[group.rect.g0 : group.rect.g1, None]

    def check(self, op: Operation, group: Group, addresses: np.ndarray, size: int, alignment: int) -> np.ndarray:
        """Check bounds and alignment of the active lanes; return addresses whose inactive lanes are 0.

        Parameters
        ----------
        addresses : numpy.ndarray
            uint32 ``[waves, workgroups, 64]``, offsets included.
        """
        if not group.full:
            addresses = addresses * group.exec
        if addresses.size and int(addresses.max()) > self.size - size:
            self._fault(
                op,
                group,
                addresses > max(self.size - size, 0) if self.size >= size else group.exec,
                addresses,
                size,
                "",
            )
        if alignment > 1 and int(np.bitwise_or.reduce(addresses, axis=None)) & (alignment - 1):
            wrong = (addresses & np.uint32(alignment - 1)) != 0
            self._fault(op, group, wrong, addresses, size, f"it must be a multiple of {alignment}")
        return addresses

    def _fault(
        self, op: Operation, group: Group, wrong: np.ndarray, addresses: np.ndarray, size: int, rule: str
    ) -> None:
        wave, workgroup, lane = (int(axis[0]) for axis in np.nonzero(wrong & group.exec))
        address = int(addresses[wave, workgroup, lane])
        rule = rule or f"the workgroup has {self.size} bytes of LDS"
        what = f"accesses {size} bytes of LDS at {address:#x}: {rule}"
        raise self.machine.lane_fault(op, group, (wave, workgroup, lane), address, size, what)

    def read(self, group: Group, addresses: np.ndarray, count: int) -> list[np.ndarray]:
        """Gather ``count`` dwords from each address."""
        at = self.place(group, addresses)
        low = int(np.bitwise_or.reduce(addresses, axis=None))
        if count == 4 and not low & 15:
            items = self.quads.take(at >> 4).view(np.uint32).reshape(*at.shape, 4)
            return [items[..., k] for k in range(4)]
        if count == 2 and not low & 7:
            items = self.pairs.take(at >> 3).view(np.uint32).reshape(*at.shape, 2)
            return [items[..., 0], items[..., 1]]
        if not low & 3:
            at >>= 2
            return [self.words.take(at + k if k else at) for k in range(count)]
        return [self.read_small(group, addresses + np.uint32(4 * k), 4) for k in range(count)]

    def places(self, group: Group, pattern: Pattern, count: int) -> np.ndarray | None:
        """Which items of ``count`` dwords a pattern names; None where it does not name whole ones."""
        if count == 3 or pattern.bits & (4 * count - 1):
            return None
        found = pattern.places.get(4 * count)
        if found is None:
            found = pattern.places[4 * count] = self.place(group, pattern.addresses) // (4 * count)
        return found

    def transposed_places(self, group: Group, pattern: Pattern, bits: int) -> np.ndarray | None:
        """Which elements a transposing read brings to each lane ``[waves, workgroups, 64, elements]``."""
        if bits not in (8, 16):
            return None
        found = pattern.places.get(bits // 8)
        if found is None:
            lane, element = transpose_read_source(bits)
            base = self.place(group, pattern.addresses) // (bits // 8)
            found = pattern.places[bits // 8] = base[..., lane] + element
        return found

    def take(self, places: np.ndarray, count: int) -> np.ndarray:
        """Items of ``count`` dwords as registers ``[count, waves, workgroups, 64]``."""
        if count == 1:
            return self.words.take(places)[None]
        items = (self.quads if count == 4 else self.pairs).take(places)
        return items.view(np.uint32).reshape(*places.shape, count).transpose(3, 0, 1, 2)

    def take_transposed(self, places: np.ndarray, bits: int) -> np.ndarray:
        """Elements, those of each lane together, as registers."""
        return (self.flat if bits == 8 else self.halves).take(places).view(np.uint32).transpose(3, 0, 1, 2)

    def read_small(self, group: Group, addresses: np.ndarray, size: int) -> np.ndarray:
        """Gather values of 1, 2 or 4 bytes, zero-extended."""
        at = self.place(group, addresses)
        value = self.flat.take(at).astype(np.uint32)
        for k in range(1, size):
            value |= self.flat.take(at + k).astype(np.uint32) << np.uint32(8 * k)
        return value

    def write(self, group: Group, addresses: np.ndarray, data: list[Any], mask: np.ndarray) -> None:
        """Scatter dwords to the address of each active lane; a higher lane wins a collision."""
        at = self.place(group, addresses)
        every = bool(mask.all())
        if not every:
            at = at[mask]
            data = [np.broadcast_to(value, mask.shape)[mask] for value in data]
        if not at.size:
            return
        low = int(np.bitwise_or.reduce(at, axis=None))
        count = len(data)
        if count in (2, 4) and not low & (4 * count - 1):
            items = np.empty((*at.shape, count), np.uint32)
            for k in range(count):
                items[..., k] = data[k]
            if count == 4:
                self.quads[at >> 4] = items.view(np.complex128)[..., 0]
            else:
                self.pairs[at >> 3] = items.view(np.complex64)[..., 0]
        elif not low & 3:
            at >>= 2
            for k, value in enumerate(data):
                self.words[at + k if k else at] = value
        else:
            for k, value in enumerate(data):
                for byte in range(4):
                    self.flat[at + (4 * k + byte)] = (np.asarray(value) >> np.uint32(8 * byte)).astype(np.uint8)

    def write_small(self, group: Group, addresses: np.ndarray, data: Any, mask: np.ndarray, size: int) -> None:
        """Scatter the low 1 or 2 bytes of each active lane."""
        at = self.place(group, addresses)[mask]
        value = np.broadcast_to(data, mask.shape)[mask]
        for byte in range(size):
            self.flat[at + byte] = (value >> np.uint32(8 * byte)).astype(np.uint8)
