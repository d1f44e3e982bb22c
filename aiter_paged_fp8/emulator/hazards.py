"""Checks and counts while the machine runs: one place that instructions and the machine talk to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .banks import conflict_cycles
from .memory import Access, sparse_zeros
from .operation import Operation
from .pending import Pending
from .races import Event, RaceCheck
from .state import Group, register_name
from .undefined import UndefinedCheck, Unwritten

if TYPE_CHECKING:
    from .machine import Machine

CACHE_LINE = 128
# LDS is known to be written in blocks of this many bytes, so that a fully written buffer costs one comparison.
BLOCK = 256
_ALL_KNOWN = np.uint64(0x0101010101010101)


class Pattern:
    """Addresses of one LDS instruction, relative to the first lane, as it met them last."""

    __slots__ = ("conflicts", "first", "number", "relative", "shape")

    def __init__(self, number: int, relative: np.ndarray, first: int, conflicts: int) -> None:
        self.number = number
        self.relative = relative
        self.first = first
        self.conflicts = conflicts


class HazardChecks:
    """The checks of one batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        enabled = machine.options.checks
        self.check_flight = enabled.in_flight
        self.check_races = enabled.races
        self.check_globals = enabled.global_races
        self.check_undefined = enabled.undefined
        self.races = RaceCheck(machine)
        self.unwritten = UndefinedCheck(machine)
        self.patterns: dict[int, Pattern] = {}
        self.pattern_count = 0
        self.known_reads: set[Any] = set()
        stride, groups = machine.lds.stride, machine.batch
        if self.check_undefined and machine.lds_size:
            self.lds_known = np.zeros((groups, stride), np.bool_)
            self.block_known = np.zeros(-(-stride // BLOCK), np.bool_)

    # -- groups -------------------------------------------------------------------------------------------------

    def begin(self, whole: Group, defined: set[int]) -> None:
        """Start a batch."""
        if self.check_undefined:
            self.unwritten.begin(whole, defined)

    def cut(self, group: Group, part: Group) -> None:
        """A group splits: hand on what is known of its registers."""
        self.unwritten.cut(group, part)

    def join(self, a: Group, b: Group, joined: Group, axis: int) -> None:
        """Two groups join."""
        self.unwritten.join(a, b, joined, axis)

    def publish(self, group: Group, pending: Pending) -> None:
        """A wait has shown that an operation is done."""
        for event in pending.events:
            self.races.waited(group, event)

    def barrier(self, workgroups: np.ndarray) -> None:
        """Workgroups passed a barrier."""
        if self.races.open:
            self.races.barrier(workgroups)

    # -- registers ----------------------------------------------------------------------------------------------

    def in_flight(self, group: Group, op: Operation) -> None:
        """An instruction touches registers whose data is still on its way."""
        if not self.check_flight:
            return
        for register in sorted(op.regs & group.busy.keys()):
            pending = group.busy[register]
            # A second load to the same register comes behind the first one in the same queue.
            if pending.op is op or (register not in op.reads and op.kind == pending.op.kind):
                continue
            verb = "reads" if register in op.reads else "overwrites"
            name = register_name(register, self.machine.loaded.environment.agpr_base)
            counter = "lgkmcnt" if pending in group.lgkm else "vmcnt"
            self.machine.reports.add(
                "in-flight",
                f"{verb} {name} without an s_waitcnt {counter} for the data that is on its way from",
                op.index,
                pending.op.index,
                topic=verb,
                register=name,
            )

    def undefined(self, group: Group, op: Operation) -> None:
        """An instruction touches registers with undefined bits."""
        self.unwritten.step(group, op)

    # -- LDS ----------------------------------------------------------------------------------------------------

    def _pattern(self, group: Group, op: Operation, addresses: np.ndarray) -> Pattern | None:
        """Pattern of an access by all lanes, and whether it is the one met before."""
        if not group.full:
            return None
        first = int(addresses.flat[0])
        relative = addresses - addresses.flat[0]
        known = self.patterns.get(op.index)
        if known is not None and known.relative.shape == relative.shape and (known.relative == relative).all():
            known.first = first
            return known
        self.pattern_count += 1
        pattern = self.patterns[op.index] = Pattern(self.pattern_count, relative, first, -1)
        return pattern

    def lds_access(
        self,
        group: Group,
        op: Operation,
        addresses: np.ndarray,
        size: int,
        *,
        write: bool,
        dma: bool = False,
        atomic: bool = False,
        data: tuple[int, ...] | None = None,
    ) -> tuple[Event, ...]:
        """Count and check an LDS access at its issue.

        Parameters
        ----------
        addresses : numpy.ndarray
            uint32 within the workgroup; inactive lanes hold 0.
        size : int
            Bytes per lane.
        data : tuple of int, optional
            Vector rows that a write stores.

        Returns
        -------
        tuple of Event
            For the pending operation, which publishes them when it has been waited for.
        """
        machine, mask = self.machine, group.exec
        lanes = mask.size if group.full else int(np.count_nonzero(mask))
        path = "lds dma" if dma else ("lds written" if write else "lds read")
        machine.counter.bytes[path] += lanes * size
        pattern = self._pattern(group, op, addresses)
        if not dma and not atomic:
            if pattern is None:
                cycles = conflict_cycles(addresses, mask, max(size // 4, 1), write=write)
            else:
                if pattern.conflicts < 0:
                    pattern.conflicts = conflict_cycles(addresses, mask, max(size // 4, 1), write=write)
                cycles = pattern.conflicts
            if cycles:
                machine.counter.conflicts[op.index] += cycles
        if self.check_undefined and not dma:
            if write:
                self._lds_written(group, addresses, size, data)
            else:
                self._lds_read(group, op, addresses, size, pattern)
        elif self.check_undefined:
            self._lds_written(group, addresses, size, None)
        if not self.check_races:
            return ()
        event = self.races.access(
            group,
            op,
            addresses,
            mask,
            size,
            write=write,
            dma=dma,
            pattern=None if pattern is None else pattern.number,
            atomic=atomic,
        )
        return () if event is None else (event,)

    def _span(self, group: Group, addresses: np.ndarray, size: int) -> tuple[int, int]:
        """Blocks that an access touches."""
        low = int(addresses.min()) if group.full else int(np.where(group.exec, addresses, 0xFFFFFFFF).min())
        return low // BLOCK, (int(addresses.max()) + size - 1) // BLOCK + 1

    def _lds_written(self, group: Group, addresses: np.ndarray, size: int, data: tuple[int, ...] | None) -> None:
        unknown = None
        if data is not None and group.undefined:
            for position, row in enumerate(data):
                if row in group.undefined:
                    unknown = unknown or {}
                    unknown[position] = self.unwritten.full_mask(group, row)
        if not group.any_active:
            return
        first, last = self._span(group, addresses, size)
        if unknown is None and self.block_known[first:last].all():
            return
        if unknown is not None:
            self.known_reads.clear()
        workgroups = np.broadcast_to(np.arange(group.rect.g0, group.rect.g1)[:, None], group.exec.shape)
        mask = group.exec
        rows, at = workgroups[mask], addresses[mask]
        for byte in range(size):
            known: Any = True
            if unknown is not None and byte // 4 in unknown:
                known = ((unknown[byte // 4] >> np.uint32(8 * (byte % 4))) & np.uint32(0xFF))[mask] == 0
            self.lds_known[rows, at + byte] = known
        stop = min(last * BLOCK, self.lds_known.shape[1])
        for block in range(first, last):
            self.block_known[block] = self.lds_known[:, block * BLOCK : min((block + 1) * BLOCK, stop)].all()

    def _lds_read(self, group: Group, op: Operation, addresses: np.ndarray, size: int, pattern: Pattern | None) -> None:
        if not group.any_active:
            return
        first, last = self._span(group, addresses, size)
        if self.block_known[first:last].all():
            return
        key = None if pattern is None else (pattern.number, pattern.first, size, group.rect.g0, group.rect.g1)
        if key in self.known_reads:
            return
        workgroups = np.arange(group.rect.g0, group.rect.g1)[:, None]
        if size in (2, 4, 8, 16) and not int(np.bitwise_or.reduce(addresses, axis=None)) & (size - 1):
            # All bytes of an access at once: true is 1 in each byte.
            item = np.complex128 if size == 16 else f"u{size}"
            places = (addresses + (np.arange(len(self.lds_known)) * self.lds_known.shape[1])[workgroups]) // size
            if size == 16:
                found = self.lds_known.reshape(-1).view(item).take(places).view(np.uint64)
                whole = (found == _ALL_KNOWN).reshape(*places.shape, 2).all(axis=-1)
            else:
                whole = self.lds_known.reshape(-1).view(item).take(places) == _ALL_KNOWN >> np.uint64(64 - 8 * size)
            if (whole | ~group.exec).all():
                if key is not None:
                    self.known_reads.add(key)
                return
        targets = sorted(op.writes)
        for position in range(size):
            known = self.lds_known[workgroups, addresses + position] | ~group.exec
            if known.all():
                continue
            # Transposing reads move bytes between lanes; for them the whole register counts as undefined.
            bits = (
                np.uint32(0xFF << (8 * (position % 4)))
                if "_tr_" not in op.instruction.mnemonic
                else np.uint32(~0 & 0xFFFFFFFF)
            )
            mask = np.where(known, np.uint32(0), bits)
            if "_tr_" in op.instruction.mnemonic:
                mask = np.broadcast_to(np.where(mask.any(axis=-1, keepdims=True), bits, np.uint32(0)), known.shape)
            for target in targets if "_tr_" in op.instruction.mnemonic else targets[position // 4 : position // 4 + 1]:
                old = group.undefined.get(target)
                merged = mask if old is None or old.mask is None else old.mask | mask
                group.undefined[target] = Unwritten(np.array(merged), op.index)

    # -- global memory ------------------------------------------------------------------------------------------

    def global_read(self, group: Group, op: Operation, access: Access, size: int) -> None:
        """Count bytes and cache lines that are loaded."""
        for region, offsets, mask in access:
            self._count(region, "read", offsets, mask, size, group.full and mask is group.exec)

    def _count(self, region: Any, how: str, offsets: np.ndarray, mask: np.ndarray, size: int, full: bool) -> None:
        count = mask.size if full else int(np.count_nonzero(mask))
        self.machine.counter.bytes["global read" if how == "read" else "global written"] += count * size
        lines = getattr(region, f"lines_{'read' if how == 'read' else 'written'}")
        if lines is None:
            lines = sparse_zeros(region.extent // CACHE_LINE + 2, np.bool_)
            setattr(region, f"lines_{'read' if how == 'read' else 'written'}", lines)
        at = (offsets + region.address % CACHE_LINE) >> 7
        lines[at if full else at[mask]] = True
        if (region.address | size) & (size - 1) or size & (size - 1):
            end = (offsets + (region.address % CACHE_LINE + size - 1)) >> 7
            lines[end if full else end[mask]] = True

    def global_write(self, group: Group, op: Operation, access: Access, size: int, *, atomic: bool = False) -> None:
        """Count bytes and cache lines that are stored; report bytes that another workgroup has written."""
        for region, offsets, mask in access:
            self._count(region, "written", offsets, mask, size, group.full and mask is group.exec)
            if self.check_globals and not atomic:
                self._global_race(group, op, region, offsets, mask, size)

    def _global_race(
        self, group: Group, op: Operation, region: Any, offsets: np.ndarray, mask: np.ndarray, size: int
    ) -> None:
        at = offsets[mask]
        if not at.size:
            return
        low = int(np.bitwise_or.reduce(at, axis=None)) | size
        granule = min(low & -low, 4)
        if region.writers is None:
            region.writer_granule = granule
            region.writers = sparse_zeros(region.extent // granule + 1, np.int64)
        elif granule < region.writer_granule:
            region.writers = np.repeat(region.writers, region.writer_granule // granule)
            region.writer_granule = granule
        granule = region.writer_granule
        machine = self.machine
        ids = np.arange(group.rect.g0, group.rect.g1) + machine.first_workgroup
        # Who wrote: workgroup above, instruction below, both counted from one.
        mine = np.broadcast_to((ids + 1)[:, None], mask.shape)[mask]
        stamp = (mine << 32) | (op.index + 1)
        for step in range(0, size, granule):
            place = (at + step) // granule
            before = region.writers[place]
            clash = (before != 0) & (before >> 32 != mine)
            region.writers[place] = stamp
            if not clash.any():
                # Two workgroups of this group may meet each other here.
                clash = region.writers[place] >> 32 != mine
                before = region.writers[place]
            if clash.any():
                position = int(np.flatnonzero(clash)[0])
                other = int(before[position])
                machine.reports.add(
                    "global-race",
                    f"writes byte {int(at[position]) + step:#x} of {region.name} in workgroup "
                    f"{int(mine[position]) - 1}, which workgroup {(other >> 32) - 1} has written too",
                    op.index,
                    (other & 0xFFFFFFFF) - 1,
                    tensor=region.name,
                    offset=int(at[position]) + step,
                )
