"""Races in LDS: accesses of different waves without a wait and a barrier between, and LDS-DMA without its wait.

Every LDS access is an *event* that stays open until its wave has waited for it and its workgroup has passed a barrier
after that. A new access is compared with the open events: first by the span of bytes that each wave touches, then,
where spans meet, byte by byte. Waves of a group issue an access together, so one event stands for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .operation import Operation
from .state import Group, Rect

if TYPE_CHECKING:
    from .machine import Machine

# Widest granule in which the bytes of two accesses are compared.
GRANULE = 16


@dataclass(eq=False, slots=True)
class Event:
    """One LDS access of a group.

    Attributes
    ----------
    addresses : numpy.ndarray
        First byte per lane ``[waves, workgroups, 64]``, within the workgroup.
    low, high : numpy.ndarray
        Span per wave of the workgroup, over all workgroups and lanes: ``[waves]``.
    live : numpy.ndarray or None
        Cells not yet separated from other waves; None: all.
    waited : numpy.ndarray or None
        Cells whose wave has waited; None: see ``all_waited``.
    pattern : int or None
        Number of the address pattern, relative to the first lane; None: not comparable.
    passed : bool
        Whether a barrier has been passed since, though too early.
    """

    op: Operation
    rect: Rect
    addresses: np.ndarray
    mask: np.ndarray
    size: int
    write: bool
    dma: bool
    low: np.ndarray
    high: np.ndarray
    start: int
    end: int
    pattern: int | None
    all_waited: bool = False
    live: np.ndarray | None = None
    waited: np.ndarray | None = None
    bits: int = field(default=-1)
    passed: bool = False
    cells: tuple[np.ndarray, np.ndarray] | None = None

    def cell_spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Span of bytes per wave and workgroup: ``[waves, workgroups]``."""
        if self.cells is None:
            low, high = self.addresses, self.addresses
            if not self.mask.all():
                low = np.where(self.mask, low, np.uint32(0xFFFFFFFF))
                high = np.where(self.mask, high, np.uint32(0))
            self.cells = low.min(axis=-1).astype(np.int64), high.max(axis=-1).astype(np.int64) + self.size
        return self.cells

    def lowest_bits(self) -> int:
        """OR of all addresses and the size: its lowest set bit is the alignment."""
        if self.bits < 0:
            self.bits = int(np.bitwise_or.reduce(self.addresses[self.mask], axis=None)) | self.size
        return self.bits


class RaceCheck:
    """Open LDS events of one batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.open: list[Event] = []
        # Those that write: a read needs no others.
        self.open_writes: list[Event] = []
        self.clean: set[tuple[int | None, ...]] = set()
        self.marks: np.ndarray | None = None

    # -- recording ----------------------------------------------------------------------------------------------

    def access(self, event: Event) -> None:
        """Check an access against the open ones and open it itself."""
        start, end, write = event.start, event.end, event.write
        for other in self.open if write else self.open_writes:
            if start < other.end and other.start < end:
                self._compare(event, other)
        if write and len(event.low) > 1:
            self._compare_waves(event)
        self.open.append(event)
        if write:
            self.open_writes.append(event)

    def waited(self, group: Group, event: Event) -> None:
        """The waves of a group have waited for an event."""
        if event.all_waited:
            return
        if group.rect == event.rect:
            event.all_waited = True
            return
        if event.waited is None:
            event.waited = np.zeros((event.rect.w1 - event.rect.w0, event.rect.g1 - event.rect.g0), np.bool_)
        inner = _intersection(group.rect, event.rect)
        if inner is not None:
            event.waited[inner.within(event.rect)] = True
            event.all_waited = bool(event.waited.all())

    def barrier(self, workgroups: np.ndarray) -> None:
        """Workgroups have passed a barrier: what was waited for before is separated from what follows."""
        everywhere = bool(workgroups.all())
        still = []
        for event in self.open:
            if everywhere and event.all_waited:
                continue
            passed = workgroups[event.rect.g0 : event.rect.g1]
            if passed.any():
                event.passed = True
                done = passed if event.all_waited else (event.waited & passed if event.waited is not None else None)
                if done is not None:
                    if event.live is None:
                        event.live = np.ones((event.rect.w1 - event.rect.w0, len(passed)), np.bool_)
                    event.live &= ~done
                    if not event.live.any():
                        continue
            still.append(event)
        self.open = still
        self.open_writes = [event for event in still if event.write]

    # -- comparing ----------------------------------------------------------------------------------------------

    def _compare(self, new: Event, old: Event) -> None:
        """Report bytes that both touch, unless wait and barrier separate them or the hardware keeps their order."""
        g0, g1 = max(new.rect.g0, old.rect.g0), min(new.rect.g1, old.rect.g1)
        if g0 >= g1:
            return
        key = None
        if new.pattern is not None and old.pattern is not None and old.live is None and old.waited is None:
            # Patterns move as a whole.
            shift = new.start - old.start
            key = (new.op.index, new.pattern, old.op.index, old.pattern, shift, old.all_waited, g0, g1)
            if key in self.clean:
                return
        meet = (new.low[:, None] < old.high[None, :]) & (old.low[None, :] < new.high[:, None])
        new_waves = np.arange(new.rect.w0, new.rect.w1)
        old_waves = np.arange(old.rect.w0, old.rect.w1)
        same = new_waves[:, None] == old_waves[None, :]
        # A wave's own LDS operations keep their order, and so do its DMAs; a DMA and an LDS operation do not.
        if new.dma == old.dma or old.all_waited:
            meet &= ~same
        if max(new.rect.g1 - new.rect.g0, old.rect.g1 - old.rect.g0) > 1 and meet.any():
            # Workgroups may stand at different places of a ring; only within one of them can accesses meet.
            new_low, new_high = (span[:, g0 - new.rect.g0 : g1 - new.rect.g0] for span in new.cell_spans())
            old_low, old_high = (span[:, g0 - old.rect.g0 : g1 - old.rect.g0] for span in old.cell_spans())
            meet &= ((new_low[:, None] < old_high[None]) & (old_low[None] < new_high[:, None])).any(axis=-1)
        found = self._exact(new, old, meet, same, g0, g1) if meet.any() else None
        if found is None:
            if key is not None:
                self.clean.add(key)
            return
        self._report(new, old, *found)

    def _exact(
        self, new: Event, old: Event, meet: np.ndarray, same: np.ndarray, g0: int, g1: int
    ) -> tuple[int, int, int, int, int] | None:
        """First byte that both touch: new wave, old wave, workgroup of the batch, lane, address."""
        bits = new.lowest_bits() | old.lowest_bits() | GRANULE
        granule = bits & -bits
        lds = self.machine.lds
        slots = lds.stride // granule
        count = g1 - g0
        marks = np.zeros(count * slots, np.uint32)
        base = (np.arange(count) * slots)[:, None]
        old_cells = slice(g0 - old.rect.g0, g1 - old.rect.g0)
        new_cells = slice(g0 - new.rect.g0, g1 - new.rect.g0)
        for row in np.flatnonzero(meet.any(axis=0)):
            where = old.mask[row, old_cells]
            if old.live is not None:
                where = where & old.live[row, old_cells][:, None]
            at = (old.addresses[row, old_cells] // np.uint32(granule) + base)[where]
            for step in range(0, old.size, granule):
                marks[at + step // granule] |= np.uint32(1 << int(row))
        for row in np.flatnonzero(meet.any(axis=1)):
            others = sum(1 << int(other) for other in np.flatnonzero(meet[row]))
            at = new.addresses[row, new_cells] // np.uint32(granule) + base
            where = new.mask[row, new_cells]
            for step in range(0, new.size, granule):
                hit = (marks[at + step // granule] & np.uint32(others)) * where
                if old.waited is not None:
                    own = np.flatnonzero(same[row])
                    if own.size:
                        done = old.waited[int(own[0]), old_cells][:, None]
                        hit = np.where(done, hit & ~np.uint32(1 << int(own[0])), hit)
                if hit.any():
                    workgroup, lane = (int(axis[0]) for axis in np.nonzero(hit))
                    other = int(hit[workgroup, lane]) & -int(hit[workgroup, lane])
                    address = int(new.addresses[row, new_cells][workgroup, lane]) + step
                    return (
                        new.rect.w0 + int(row),
                        old.rect.w0 + other.bit_length() - 1,
                        g0 + workgroup,
                        lane,
                        address,
                    )
        return None

    def _compare_waves(self, event: Event) -> None:
        """Report bytes that two waves write by one instruction."""
        order = np.argsort(event.low)
        if (event.high[order][:-1] <= event.low[order][1:]).all():
            return
        key = (event.op.index, event.pattern, None, event.rect.g0, event.rect.g1)
        if event.pattern is not None and key in self.clean:
            return
        meet = (event.low[:, None] < event.high[None, :]) & (event.low[None, :] < event.high[:, None])
        same = np.eye(len(event.low), dtype=np.bool_)
        found = self._exact(event, event, meet & ~same, same, event.rect.g0, event.rect.g1)
        if found is not None:
            self._report(event, event, *found)
        elif event.pattern is not None:
            self.clean.add(key)

    def _report(self, new: Event, old: Event, wave: int, other: int, workgroup: int, lane: int, address: int) -> None:
        machine = self.machine
        verb = "writes" if new.write else "reads"
        past = ("was written" if old.write else "was read") + (" by LDS-DMA" if old.dma else "")
        place = f"byte {address:#x} of LDS"
        group_id = machine.first_workgroup + workgroup
        if wave == other:
            counter = "vmcnt" if old.dma else "lgkmcnt"
            machine.reports.add(
                "in-flight",
                f"{verb} {place} that {past} by the same wave without an s_waitcnt {counter} between: workgroup "
                f"{group_id}, wave {wave}, lane {lane}",
                new.op.index,
                old.op.index,
                topic="lds",
                address=address,
                wave=wave,
                lane=lane,
            )
            return
        if old.all_waited and not old.passed:
            missing = "no s_barrier"
        else:
            missing = "no s_waitcnt before the s_barrier" if old.passed else "no s_waitcnt and s_barrier"
        machine.reports.add(
            "race",
            f"{verb} {place} that {past} by wave {other} with {missing} between: workgroup {group_id}, wave {wave}, "
            f"lane {lane}",
            new.op.index,
            old.op.index,
            topic=f"{verb} {past}",
            address=address,
            wave=wave,
            other_wave=other,
            lane=lane,
        )


def _intersection(a: Rect, b: Rect) -> Rect | None:
    w0, w1 = max(a.w0, b.w0), min(a.w1, b.w1)
    g0, g1 = max(a.g0, b.g0), min(a.g1, b.g1)
    return Rect(w0, w1, g0, g1) if w0 < w1 and g0 < g1 else None
