"""Checks while the machine runs. First form: data in flight; the other checks follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .memory import Access
from .operation import Operation
from .pending import Pending
from .state import Group, register_name

if TYPE_CHECKING:
    from .machine import Machine


class HazardChecks:
    """The checks of one batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.enabled = machine.options.checks

    def begin(self, whole: Group, defined: set[int]) -> None:
        """Start a batch."""

    def cut(self, group: Group, part: Group) -> None:
        """A group splits: hand on what is known of its registers."""

    def join(self, a: Group, b: Group, joined: Group, axis: int) -> None:
        """Two groups join."""

    def publish(self, group: Group, pending: Pending) -> None:
        """A wait has shown that an operation is done."""

    def barrier(self, workgroups: np.ndarray) -> None:
        """Workgroups passed a barrier."""

    def in_flight(self, group: Group, op: Operation) -> None:
        """An instruction touches registers whose data is still on its way."""
        if not self.enabled.in_flight:
            return
        for register in sorted(op.regs & group.busy.keys()):
            pending = group.busy[register]
            if pending.op is op:
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

    def global_read(self, group: Group, op: Operation, access: Access, size: int) -> None:
        """Count bytes that are loaded."""
        lanes = sum(int(np.count_nonzero(mask)) for _, _, mask in access)
        self.machine.counter.bytes["global read"] += lanes * size

    def global_write(self, group: Group, op: Operation, access: Access, size: int) -> None:
        """Count bytes that are stored."""
        lanes = sum(int(np.count_nonzero(mask)) for _, _, mask in access)
        self.machine.counter.bytes["global written"] += lanes * size
