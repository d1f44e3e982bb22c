"""LDS of a batch of workgroups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .machine import Machine


class Lds:
    """LDS bytes ``[workgroups, size]``."""

    def __init__(self, machine: Machine, size: int, workgroups: int) -> None:
        self.machine = machine
        self.size = size
        self.bytes = np.zeros((workgroups, size), np.uint8)
