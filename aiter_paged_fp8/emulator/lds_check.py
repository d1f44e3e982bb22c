"""What happens at the issue of an LDS access: bounds, counts, bank conflicts, undefined bytes, races.

Kernels touch LDS in few patterns, moved as a whole from one buffer to the next. An instruction's pattern is kept, so
that a repeated one costs one comparison of addresses and everything else is arithmetic on a handful of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .banks import conflict_cycles
from .operation import Operation
from .races import Event, RaceCheck
from .state import Group
from .undefined import UndefinedCheck, Unwritten

if TYPE_CHECKING:
    from .machine import Machine

# Up to so many waves, patterns are found by the content of the base register; so many are kept.
FEW_WAVES, MOST_PATTERNS = 32, 4096
# LDS is known to be written in blocks of this many bytes, so that a fully written buffer costs one comparison.
BLOCK = 256
_ALL_KNOWN = np.uint64(0x0101010101010101)
_ALL_KNOWN_16 = np.ones(16, np.bool_).view(np.complex128)[0]


class Pattern:
    """Addresses of one LDS instruction by all lanes of a group, as it met them last.

    Attributes
    ----------
    number : int
        Distinguishes patterns of all instructions.
    relative : numpy.ndarray
        Addresses minus that of the first lane.
    first : int
        Address of the first lane.
    low, high : numpy.ndarray
        Lowest and highest first byte per wave of the workgroup, when the first lane was at ``origin``.
    bits : int
        OR of all addresses then.
    stop : numpy.ndarray or None
        First byte behind the highest access per wave, where the size of the accesses is known.
    places : dict
        What accesses of these very addresses take from LDS or put there, by kind of access: see ``find``.
    """

    __slots__ = (
        *("addresses", "base", "bits", "conflicts", "end", "first", "high", "low", "number", "origin", "places"),
        *("relative", "start", "stop"),
    )

    def __init__(self, number: int, addresses: np.ndarray) -> None:
        self.number = number
        self.addresses = addresses
        self.first = self.origin = int(addresses.flat[0])
        self.relative = addresses - addresses.flat[0]
        rows = addresses.reshape(len(addresses), -1)
        self.low, self.high = rows.min(axis=1).astype(np.int64), rows.max(axis=1).astype(np.int64)
        self.start, self.end = int(self.low.min()), int(self.high.max())
        self.bits = int(np.bitwise_or.reduce(addresses, axis=None))
        self.conflicts = -1
        self.places: dict[Any, Any] = {}
        self.base = 0
        self.stop: np.ndarray | None = None

    def moved(self, shift: int, size: int, alignment: int, limit: int) -> Pattern | None:
        """The same pattern elsewhere; None where it would not be in bounds and aligned there."""
        inside = self.start + shift >= 0 and self.end + shift + size <= limit
        if not inside or (self.bits | shift) & (max(alignment, 4) - 1):
            return None
        copy = Pattern.__new__(Pattern)
        copy.number, copy.conflicts, copy.relative = self.number, self.conflicts, self.relative
        copy.addresses = self.addresses + np.uint32(shift & 0xFFFFFFFF)
        copy.first = copy.origin = self.first + shift
        copy.low, copy.high = self.low + shift, self.high + shift
        copy.stop = copy.high + size
        copy.start, copy.end = self.start + shift, self.end + shift
        copy.bits = self.bits | shift
        copy.base = self.base + shift
        # Items are at most 16 bytes.
        copy.places = {} if shift & 15 else {unit: places + shift // unit for unit, places in self.places.items()}
        return copy


class LdsCheck:
    """LDS accesses of one batch."""

    def __init__(self, machine: Machine, unwritten: UndefinedCheck) -> None:
        self.machine = machine
        self.unwritten = unwritten
        self.check_races = machine.options.checks.races
        self.check_undefined = machine.options.checks.undefined
        self.races = RaceCheck(machine)
        self.patterns: dict[tuple[int, int, int], Pattern] = {}
        self.pattern_count = 0
        # Accesses of which every byte is known.
        self.known_reads: set[tuple[int, ...]] = set()
        self.known_writes: set[tuple[int, ...]] = set()
        if self.check_undefined and machine.lds_size:
            stride = machine.lds.stride
            self.known = np.zeros((machine.batch, stride), np.bool_)
            self.all_known = False
            self.block_known = np.zeros(-(-stride // BLOCK), np.bool_)

    def find(
        self,
        group: Group,
        op: Operation,
        base: np.ndarray,
        locate: Callable[[np.ndarray], np.ndarray],
        offset: int,
        size: int,
        alignment: int,
        place: int = 0,
    ) -> Pattern | None:
        """Find the pattern of an access by all lanes of a few waves by what its base register holds.

        LDS has few places that a kernel goes to, again and again; where waves are few, telling that this is one of them
        costs less than computing its addresses. None: to be done the long way.

        Parameters
        ----------
        base : numpy.ndarray
            uint32; addresses move with it.
        locate : callable
            From it to the addresses ``[waves, workgroups, 64]``.
        offset : int
            What ``locate`` adds beside what is the same for all instructions of the kind.
        """
        if not group.full or group.waves > FEW_WAVES:
            return None
        key = (op, place, base.tobytes())
        pattern = group.patterns.get(key)
        if pattern is None:
            first = int(base.flat[0])
            kind = (op.instruction.mnemonic, size, (base - base.flat[0]).tobytes())
            like = group.patterns.get(kind)
            if like is not None:
                pattern = like.moved(first + offset - like.base, size, alignment, self.machine.lds.size)
            if pattern is None:
                addresses = locate(base)
                self.machine.lds.check(op, group, addresses, size, alignment)
                if len(group.patterns) > MOST_PATTERNS:
                    group.patterns.clear()
                self.pattern_count += 1
                pattern = group.patterns[kind] = Pattern(self.pattern_count, addresses)
                pattern.base = first + offset
                pattern.stop = pattern.high + size
            group.patterns[key] = pattern
        return pattern

    def access(
        self,
        group: Group,
        op: Operation,
        addresses: np.ndarray,
        size: int,
        alignment: int,
        *,
        write: bool,
        dma: bool = False,
        data: tuple[int, ...] | None = None,
        place: int = 0,
        pattern: Pattern | None = None,
    ) -> tuple[np.ndarray, tuple[Event, ...]]:
        """Check and count an access at its issue.

        Parameters
        ----------
        addresses : numpy.ndarray
            uint32 within the workgroup, offsets included.
        size : int
            Bytes per lane.
        alignment : int
            Addresses must be multiples of it.
        data : tuple of int, optional
            Vector rows that a write stores; None: the data is defined.
        place : int
            Which of an instruction's accesses this is.
        pattern : Pattern, optional
            What ``find`` has found; it is known to be in bounds.

        Returns
        -------
        addresses : numpy.ndarray
            Inactive lanes hold 0.
        events : tuple of Event
            For the pending operation; they are published when it has been waited for.
        """
        if pattern is None:
            pattern = self._pattern(group, op, addresses, size, alignment, place)
        if pattern is None:
            addresses = self.machine.lds.check(op, group, addresses, size, alignment)
        self._count(group, op, addresses, size, pattern, write=write, dma=dma)
        if self.check_undefined:
            if write:
                self._written(group, addresses, size, data, pattern)
            else:
                self._read(group, op, addresses, size, pattern)
        if not self.check_races:
            return addresses, ()
        event = self._event(group, op, addresses, size, pattern, write=write, dma=dma)
        if event is None:
            return addresses, ()
        self.races.access(event)
        return addresses, (event,)

    def _pattern(
        self, group: Group, op: Operation, addresses: np.ndarray, size: int, alignment: int, place: int
    ) -> Pattern | None:
        """The pattern of an access by all lanes, known to be in bounds; None where there is none."""
        if not group.full:
            return None
        first = int(addresses[0, 0, 0])
        # Parts of a workgroup's waves have patterns of their own.
        key = (op.index, place, group.rect.w0)
        known = self.patterns.get(key)
        if known is not None and known.relative.shape == addresses.shape:
            shift = first - known.origin
            if np.array_equal(known.relative, addresses - addresses[0, 0, 0]):
                inside = known.start + shift >= 0 and known.end + shift + size <= self.machine.lds.size
                if inside and not (known.bits | shift) & (alignment - 1):
                    known.first = first
                    return known
        self.machine.lds.check(op, group, addresses, size, alignment)
        self.pattern_count += 1
        pattern = self.patterns[key] = Pattern(self.pattern_count, addresses)
        return pattern

    def _count(
        self,
        group: Group,
        op: Operation,
        addresses: np.ndarray,
        size: int,
        pattern: Pattern | None,
        *,
        write: bool,
        dma: bool,
    ) -> None:
        mask, counter = group.exec, self.machine.counter
        lanes = mask.size if group.full else int(np.count_nonzero(mask))
        counter.bytes["lds dma" if dma else ("lds written" if write else "lds read")] += lanes * size
        if dma:
            return
        cycles = -1 if pattern is None else pattern.conflicts
        if cycles < 0:
            cycles = conflict_cycles(addresses, mask, max(size // 4, 1), write=write)
            if pattern is not None:
                pattern.conflicts = cycles
        if cycles:
            counter.conflicts[op.index] += cycles

    def _event(
        self,
        group: Group,
        op: Operation,
        addresses: np.ndarray,
        size: int,
        pattern: Pattern | None,
        *,
        write: bool,
        dma: bool,
    ) -> Event | None:
        mask = group.exec
        if pattern is not None:
            shift = pattern.first - pattern.origin
            if pattern.stop is not None:
                low, high = pattern.low, pattern.stop
            else:
                low, high = pattern.low + shift, pattern.high + (shift + size)
            start, end = pattern.start + shift, pattern.end + shift + size
        else:
            if not group.any_active:
                return None
            rows = group.shape[0]
            low = np.where(mask, addresses, np.uint32(0xFFFFFFFF)).reshape(rows, -1).min(axis=1).astype(np.int64)
            high = np.where(mask, addresses, np.uint32(0)).reshape(rows, -1).max(axis=1).astype(np.int64) + size
            start, end = int(low.min()), int(high.max())
        return Event(
            op,
            group.rect,
            addresses,
            mask,
            size,
            write,
            dma,
            low,
            high,
            start,
            end,
            None if pattern is None else pattern.number,
        )

    # -- bytes that nobody wrote --------------------------------------------------------------------------------

    def _span(self, group: Group, addresses: np.ndarray, size: int, pattern: Pattern | None) -> tuple[int, int]:
        """Blocks that an access touches."""
        if pattern is not None:
            shift = pattern.first - pattern.origin
            low, high = pattern.start + shift, pattern.end + shift
        else:
            low = int(np.where(group.exec, addresses, np.uint32(0xFFFFFFFF)).min())
            high = int(addresses.max())
        return low // BLOCK, (high + size - 1) // BLOCK + 1

    def _written(
        self, group: Group, addresses: np.ndarray, size: int, data: tuple[int, ...] | None, pattern: Pattern | None
    ) -> None:
        if not group.any_active:
            return
        unknown = {}
        if data is not None and group.undefined:
            unknown = {
                position: self.unwritten.full_mask(group, row)
                for position, row in enumerate(data)
                if row in group.undefined
            }
        if self.all_known and not unknown:
            return
        key = None if pattern is None else (pattern.number, pattern.first, size, group.rect.g0, group.rect.g1)
        if not unknown and key in self.known_writes:
            return
        first, last = self._span(group, addresses, size, pattern)
        if not unknown and self.block_known[first:last].all():
            return
        if unknown:
            self.known_reads.clear()
            self.known_writes.clear()
        elif key is not None:
            self.known_writes.add(key)
        if not unknown and size == 16 and pattern is not None and not (pattern.bits | pattern.first) & 15:
            # A complex number stands for 16 bytes.
            items = self.known.reshape(-1).view(np.complex128)
            items[self.machine.lds.place(group, addresses) >> 4] = _ALL_KNOWN_16
        else:
            mask = group.exec
            workgroups = np.broadcast_to(np.arange(group.rect.g0, group.rect.g1)[:, None], mask.shape)
            rows, at = workgroups[mask], addresses[mask]
            for byte in range(size):
                known: Any = True
                if byte // 4 in unknown:
                    known = ((unknown[byte // 4] >> np.uint32(8 * (byte % 4))) & np.uint32(0xFF))[mask] == 0
                self.known[rows, at + byte] = known
        edge = self.known.shape[1]
        whole = min(last, edge // BLOCK)
        spans = self.known[:, first * BLOCK : whole * BLOCK].reshape(len(self.known), -1, BLOCK)
        self.block_known[first:whole] = spans.all(axis=(0, 2))
        if whole < last:
            self.block_known[whole] = self.known[:, whole * BLOCK :].all()
        self.all_known = bool(self.block_known.all())

    def _read(self, group: Group, op: Operation, addresses: np.ndarray, size: int, pattern: Pattern | None) -> None:
        if not group.any_active:
            return
        if self.all_known:
            return
        key = None if pattern is None else (pattern.number, pattern.first, size, group.rect.g0, group.rect.g1)
        if key in self.known_reads:
            return
        first, last = self._span(group, addresses, size, pattern)
        if self.block_known[first:last].all():
            return
        if self._all_known(group, addresses, size):
            if key is not None:
                self.known_reads.add(key)
            return
        workgroups = np.arange(group.rect.g0, group.rect.g1)[:, None]
        targets = sorted(op.writes)
        # Transposing reads move bytes between lanes; for them whole registers of the wave count as undefined.
        spread = "_tr_" in op.instruction.mnemonic
        for position in range(size):
            known = self.known[workgroups, addresses + position] | ~group.exec
            if known.all():
                continue
            bits = np.uint32(0xFFFFFFFF if spread else 0xFF << (8 * (position % 4)))
            mask = np.where(known, np.uint32(0), bits)
            if spread:
                mask = np.broadcast_to(np.where(mask.any(axis=-1, keepdims=True), bits, np.uint32(0)), known.shape)
            for target in targets if spread else targets[position // 4 : position // 4 + 1]:
                old = group.undefined.get(target)
                merged = mask if old is None or old.mask is None else old.mask | mask
                group.undefined[target] = Unwritten(np.array(merged), op.index)

    def _all_known(self, group: Group, addresses: np.ndarray, size: int) -> bool:
        """Whether every byte of a naturally aligned access is known, whole items at a time."""
        if size not in (2, 4, 8, 16) or int(np.bitwise_or.reduce(addresses, axis=None)) & (size - 1):
            return False
        workgroups = np.arange(group.rect.g0, group.rect.g1, dtype=np.int64)[:, None]
        places = (addresses + workgroups * self.known.shape[1]) // size
        flat = self.known.reshape(-1)
        if size == 16:
            # A complex number is moved bit by bit; true is 1 in each byte.
            found = flat.view(np.complex128).take(places).view(np.uint64)
            whole = (found == _ALL_KNOWN).reshape(*places.shape, 2).all(axis=-1)
        else:
            whole = flat.view(f"u{size}").take(places) == _ALL_KNOWN >> np.uint64(64 - 8 * size)
        return bool((whole | ~group.exec).all())
