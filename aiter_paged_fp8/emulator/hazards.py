"""Checks and counts while the machine runs: one place that instructions and the machine talk to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .lds_check import LdsCheck
from .memory import Access, Region, Spread, Touched, sparse_zeros
from .operation import Operation
from .pending import Pending
from .state import Group, register_name
from .undefined import UndefinedCheck

if TYPE_CHECKING:
    from .machine import Machine

CACHE_LINE = 128


class HazardChecks:
    """The checks of one batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        enabled = machine.options.checks
        self.check_flight = enabled.in_flight
        self.check_globals = enabled.global_races
        self.check_undefined = enabled.undefined
        self.unwritten = UndefinedCheck(machine)
        self.lds = LdsCheck(machine, self.unwritten)

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
            self.lds.races.waited(group, event)

    def barrier(self, workgroups: np.ndarray) -> None:
        """Workgroups passed a barrier."""
        if self.lds.races.open:
            self.lds.races.barrier(workgroups)

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

    # -- global memory ------------------------------------------------------------------------------------------

    def global_read(self, group: Group, op: Operation, access: Access, size: int) -> None:
        """Count bytes and cache lines that are loaded."""
        for region, offsets, mask in access:
            self._count(region, "read", offsets, mask, size, group.full and mask is group.exec)

    def spread_read(self, region: Region, spread: Spread, start: int, size: int) -> None:
        """The same for all lanes of a group that read where ``spread`` says from ``start`` on."""
        self.machine.counter.bytes["global read"] += spread.offsets.size * size
        if region.lines_read is None:
            region.lines_read = Touched(region.extent // CACHE_LINE + 2)
        start += region.address % CACHE_LINE
        rest = start % CACHE_LINE
        ends = size if _may_straddle(region, size) else 1
        lines = spread.lines.get((rest, ends))
        if lines is None:
            first = spread.offsets + rest
            places = first >> 7
            if ends > 1:
                places = np.concatenate((places, first + (ends - 1) >> 7))
            lines = spread.lines[rest, ends] = np.unique(places)
        region.lines_read.mark_few(lines + start // CACHE_LINE)

    def _count(self, region: Region, how: str, offsets: np.ndarray, mask: np.ndarray, size: int, full: bool) -> None:
        count = mask.size if full else int(np.count_nonzero(mask))
        self.machine.counter.bytes["global read" if how == "read" else "global written"] += count * size
        lines = region.lines_read if how == "read" else region.lines_written
        if lines is None:
            lines = Touched(region.extent // CACHE_LINE + 2)
            if how == "read":
                region.lines_read = lines
            else:
                region.lines_written = lines
        at = (offsets + region.address % CACHE_LINE) >> 7
        lines.mark(at if full else at[mask])
        if _may_straddle(region, size):
            end = (offsets + (region.address % CACHE_LINE + size - 1)) >> 7
            lines.mark(end if full else end[mask])

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
        granule = min(low & -low, self.machine.loaded.store_granule)
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


def _may_straddle(region: Region, size: int) -> bool:
    """Whether naturally aligned offsets may lead to accesses of two cache lines."""
    return bool((region.address | size) & (size - 1) or size & (size - 1))
