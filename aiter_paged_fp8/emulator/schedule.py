"""Which waves run next, where groups part and where they join again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .pending import Pending
from .state import Group, Rect

if TYPE_CHECKING:
    from .machine import Machine

# Instructions between two random changes of wave in the seeded schedule, at most.
SEEDED_QUANTUM = 64
UNLIMITED = 1 << 60


def rectangles(where: np.ndarray, outer: Rect) -> list[Rect]:
    """Cover the true cells of ``[waves, workgroups]`` by disjoint rectangles, in the coordinates of the batch."""
    if where.all():
        return [outer]
    found: list[Rect] = []
    open_runs: dict[tuple[int, int], int] = {}
    rows = where.shape[0]
    for row in range(rows + 1):
        runs = set()
        if row < rows:
            edges = np.flatnonzero(np.diff(np.concatenate(([False], where[row], [False])).astype(np.int8)))
            runs = {(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)}
        for run in [run for run in open_runs if run not in runs]:
            first = open_runs.pop(run)
            found.append(Rect(outer.w0 + first, outer.w0 + row, outer.g0 + run[0], outer.g0 + run[1]))
        for run in runs:
            open_runs.setdefault(run, row)
    return found


class Scheduler:
    """Ready and blocked groups of one batch.

    ``lockstep`` runs the group that is furthest behind, so that parted waves meet again; ``skewed`` lets each wave of a
    workgroup run as far as it can before the next one; ``seeded`` changes at random.
    """

    def __init__(self, machine: Machine, whole: Group) -> None:
        self.machine = machine
        self.groups: list[Group] = []
        self.blocked: list[Group] = []
        self.stops: set[int] = set()
        self.shared = False
        self.budget = UNLIMITED
        self.kind = machine.options.schedule
        self.apart = self.kind != "lockstep"
        if self.apart:
            rect = whole.rect
            for wave in range(rect.w0, rect.w1):
                self.ready(machine.split(whole, Rect(wave, wave + 1, rect.g0, rect.g1), 0))
        else:
            self.ready(whole)

    def ready(self, group: Group) -> None:
        """Queue a group that can go on."""
        self.groups.append(group)

    def block(self, group: Group) -> None:
        """Hold a group at its barrier."""
        self.blocked.append(group)

    def remove(self, group: Group) -> None:
        """Forget a group that ended or was split."""

    def pick(self) -> Group | None:
        """Take the next group to run, joined with those that stand at the same place."""
        groups = self.groups
        if not groups:
            return None
        if len(groups) == 1:
            group = groups.pop()
            self.stops, self.shared = set(), False
        else:
            self._join()
            groups = self.groups
            if self.kind == "seeded":
                chosen = self.machine.random.randrange(len(groups))
            elif self.kind == "skewed":
                chosen = min(range(len(groups)), key=lambda k: (groups[k].rect.w0, groups[k].pc))
            elif self.kind == "skewed-reverse":
                chosen = min(range(len(groups)), key=lambda k: (-groups[k].rect.w0, groups[k].pc))
            else:
                chosen = min(range(len(groups)), key=lambda k: groups[k].pc)
            group = groups.pop(chosen)
            rivals = [other for other in groups if not self.apart or other.rect.w0 == group.rect.w0]
            # One that stands here too and can't be joined to a rectangle is nothing to wait for.
            self.stops = {other.pc for other in rivals if other.pc != group.pc or self._union(group, other) is not None}
            self.shared = bool(rivals)
            if group.pc in self.stops:
                # Another one stands here too but has other operations on their way: they go on step by step, until
                # a wait lets them join.
                self.budget = 1
                return group
        self.budget = self.machine.random.randint(1, SEEDED_QUANTUM) if self.kind == "seeded" else UNLIMITED
        return group

    def _join(self) -> None:
        by_place: dict[int, list[Group]] = {}
        for group in self.groups:
            by_place.setdefault(group.pc, []).append(group)
        if len(by_place) == len(self.groups):
            return
        self.groups = []
        for groups in by_place.values():
            self.groups.extend(self._join_all(groups))

    def _join_all(self, groups: list[Group]) -> list[Group]:
        changed = len(groups) > 1
        while changed:
            changed = False
            for a in range(len(groups)):
                for b in range(len(groups)):
                    joined = self._join_two(groups[a], groups[b]) if a != b else None
                    if joined is not None:
                        groups = [group for k, group in enumerate(groups) if k not in (a, b)]
                        groups.append(joined)
                        changed = len(groups) > 1
                        break
                if changed or len(groups) == 1:
                    break
        return groups

    def _behind(self, p: Rect, q: Rect) -> tuple[int, Rect] | None:
        """Axis and rectangle of q behind p; None where they make none."""
        if (p.w0, p.w1) == (q.w0, q.w1) and p.g1 == q.g0:
            return 1, Rect(p.w0, p.w1, p.g0, q.g1)
        if (p.g0, p.g1) == (q.g0, q.g1) and p.w1 == q.w0 and not self.apart:
            return 0, Rect(p.w0, q.w1, p.g0, p.g1)
        return None

    def _union(self, a: Group, b: Group) -> tuple[int, Rect] | None:
        return self._behind(a.rect, b.rect) or self._behind(b.rect, a.rect)

    def _join_two(self, a: Group, b: Group) -> Group | None:
        """Join b behind a, if they make a rectangle and have the same operations on their way."""
        union = self._behind(a.rect, b.rect)
        if union is None:
            return None
        axis, rect = union
        for left, right in ((a.vm, b.vm), (a.lgkm, b.lgkm)):
            if len(left) != len(right) or not all(x.same_as(y) for x, y in zip(left, right, strict=True)):
                return None
        joined = Group(self.machine, rect, a.pc)
        joined.vm = [Pending.join([x, y], axis) for x, y in zip(a.vm, b.vm, strict=True)]
        joined.lgkm = [Pending.join([x, y], axis) for x, y in zip(a.lgkm, b.lgkm, strict=True)]
        for old, new in zip((*a.vm, *a.lgkm), (*joined.vm, *joined.lgkm), strict=True):
            for register in old.op.writes:
                if a.busy.get(register) is old:
                    joined.busy[register] = new
        self.machine.hazards.join(a, b, joined, axis)
        return joined

    def release_barriers(self) -> None:
        """Let workgroups go on whose waves have all arrived or ended."""
        if not self.blocked:
            return
        machine = self.machine
        arrived = np.asarray((machine.at_barrier | machine.ended).all(axis=0))
        if not arrived.any():
            return
        still: list[Group] = []
        for group in self.blocked:
            here = arrived[group.rect.g0 : group.rect.g1]
            if here.all():
                self._release(group)
            elif here.any():
                both = np.broadcast_to(here, group.shape)
                for rect in rectangles(both, group.rect):
                    self._release(machine.split(group, rect, group.pc))
                still.extend(machine.split(group, rect, group.pc) for rect in rectangles(~both, group.rect))
            else:
                still.append(group)
        self.blocked = still
        machine.hazards.barrier(arrived & machine.at_barrier.any(axis=0))
        machine.at_barrier &= ~arrived

    def _release(self, group: Group) -> None:
        self.ready(group)
