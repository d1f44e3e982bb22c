"""Register files of a batch of workgroups, and groups of waves that stand at the same program counter.

Waves of a batch form a rectangle ``[waves of a workgroup, workgroups]``. A group is a sub-rectangle, so that every
register of it is a view, never a copy: half of each workgroup's waves, or all waves of some workgroups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .syntax import EXEC_HI, EXEC_LO

if TYPE_CHECKING:
    from .machine import Machine
    from .pending import Pending

LANES = 64
# Scalar rows: s0-s105, VCC, TTMP, M0, EXEC by their operand encodings.
SCALAR_ROWS = 128
# Register ids, for reads, writes and hazards: vector rows count from 0, scalars from here.
SCALAR_ID = 1024
SCC_ID = SCALAR_ID + SCALAR_ROWS


def register_name(identity: int, agpr_base: int) -> str:
    """Name of a register id as assembly writes it."""
    if identity == SCC_ID:
        return "scc"
    if identity >= SCALAR_ID:
        index = identity - SCALAR_ID
        return {106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi"}.get(index, f"s{index}")
    return f"v{identity}" if identity < agpr_base else f"a{identity - agpr_base}"


class Views(dict[int, Any]):
    """Views of one register file, made when first asked for."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[int], np.ndarray]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, index: int) -> np.ndarray:
        view = self[index] = self.make(index)
        return view


def lane_masks(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Unpack two scalar registers ``[waves, groups]`` to bools ``[waves, groups, 64]``."""
    pair = np.empty((*low.shape, 2), np.uint32)
    pair[..., 0] = low
    pair[..., 1] = high
    return np.unpackbits(pair.view(np.uint8), axis=-1, bitorder="little").view(np.bool_)


def pack_lanes(mask: np.ndarray) -> np.ndarray:
    """Pack bools ``[..., 64]`` to scalar pairs ``[..., 2]``."""
    return np.packbits(mask, axis=-1, bitorder="little").view(np.uint32)


@dataclass(frozen=True)
class Rect:
    """Waves ``[w0, w1)`` of the workgroups ``[g0, g1)`` of a batch."""

    w0: int
    w1: int
    g0: int
    g1: int

    @property
    def slices(self) -> tuple[slice, slice]:
        """Index of the rectangle in an array ``[waves, workgroups, ...]``."""
        return slice(self.w0, self.w1), slice(self.g0, self.g1)

    @property
    def waves(self) -> int:
        """Number of waves."""
        return (self.w1 - self.w0) * (self.g1 - self.g0)

    def within(self, outer: Rect) -> tuple[slice, slice]:
        """Index of this rectangle in an array that covers ``outer``."""
        return (
            slice(self.w0 - outer.w0, self.w1 - outer.w0),
            slice(self.g0 - outer.g0, self.g1 - outer.g0),
        )


class RectViews:
    """Views of the registers of a rectangle of waves, for every group that covers it: see ``Group``."""

    def __init__(self, files: Files, rect: Rect) -> None:
        index = rect.slices
        vector, scalar = files.vector, files.scalar
        whole = (rect.w1 - rect.w0, rect.g1 - rect.g0) == scalar.shape[1:]
        self.registers = vector if whole else vector[:, index[0], index[1]]
        self.scalars = (scalar if whole else scalar[:, index[0], index[1]])[..., None]
        v = self.v = Views(lambda row: vector[row][index])
        self.f = Views(lambda row: v[row].view(np.float32))
        self.i = Views(lambda row: v[row].view(np.int32))
        s = self.s = Views(lambda row: scalar[row][index])
        sb = self.sb = Views(lambda row: s[row][..., None])
        self.sf = Views(lambda row: sb[row].view(np.float32))
        self.si = Views(lambda row: sb[row].view(np.int32))
        self.scc = files.scc[index]
        self.plans: dict[Any, Any] = {}
        self.patterns: dict[Any, Any] = {}


class Group:
    """Waves that stand at one program counter and have the same memory operations on their way.

    Attributes
    ----------
    v, f, i : Views
        Vector registers as uint32, float32 and int32 ``[waves, workgroups, 64]``; AGPRs follow the VGPRs.
    s : Views
        Scalar registers ``[waves, workgroups]``.
    sb, sf, si : Views
        The same, ready to broadcast over lanes ``[waves, workgroups, 1]``, as uint32, float32, int32.
    scc : numpy.ndarray
        Bool ``[waves, workgroups]``.
    exec : numpy.ndarray
        Bool ``[waves, workgroups, 64]``; look at ``full`` first.
    full : bool
        Whether every lane of every wave is active.
    vm, lgkm : list of Pending
        Outstanding memory operations in order of issue.
    busy : dict
        Register id to the outstanding operation that will write it.
    undefined : dict
        Vector row to the bits nobody has written: see ``checks.undefined``.
    registers : numpy.ndarray
        All vector registers ``[rows, waves, workgroups, 64]``.
    scalars : numpy.ndarray
        All scalar registers ``[rows, waves, workgroups, 1]``.
    plans : dict
        Views and places that batches and products have prepared for this rectangle.
    patterns : dict
        Addresses of LDS accesses by the content of their base register: see ``LdsCheck.find``.
    decoded : dict
        Matrix operands as float32 that the next product reads again: see ``isa.matrix.share_operands``.
    """

    __slots__ = (
        "any_active",
        "busy",
        "decoded",
        "exec",
        "f",
        "full",
        "i",
        "lgkm",
        "machine",
        "patterns",
        "pc",
        "plans",
        "reading",
        "rect",
        "registers",
        "resume",
        "s",
        "sb",
        "scalars",
        "scc",
        "sf",
        "shape",
        "si",
        "undefined",
        "v",
        "vm",
        "waves",
    )

    def __init__(self, machine: Machine, rect: Rect, pc: int) -> None:
        self.machine = machine
        self.rect = rect
        self.pc = pc
        self.resume = 0
        files = machine.files
        self.shape = (rect.w1 - rect.w0, rect.g1 - rect.g0)
        self.waves = rect.waves
        views = files.views.get(rect)
        if views is None:
            views = files.views[rect] = RectViews(files, rect)
        self.registers, self.scalars = views.registers, views.scalars
        self.v, self.f, self.i = views.v, views.f, views.i
        self.s, self.sb, self.sf, self.si = views.s, views.sb, views.sf, views.si
        self.plans, self.patterns = views.plans, views.patterns
        self.scc = views.scc
        self.vm: list[Pending] = []
        self.lgkm: list[Pending] = []
        self.busy: dict[int, Pending] = {}
        self.reading: dict[int, Pending] = {}
        self.undefined: dict[int, Any] = {}
        self.decoded: dict[Any, np.ndarray] = {}
        self.refresh_exec()

    def refresh_exec(self) -> None:
        """Read EXEC again after it changed."""
        low, high = self.s[EXEC_LO], self.s[EXEC_HI]
        both = low & high
        self.full = bool((both == 0xFFFFFFFF).all())
        self.any_active = True
        if self.full:
            self.exec = self.machine.all_lanes[: self.shape[0], : self.shape[1]]
        else:
            self.exec = lane_masks(low, high)
            self.any_active = bool(self.exec.any())

    def set_mask(self, row: int, mask: np.ndarray) -> None:
        """Write lane bools to a scalar pair."""
        packed = pack_lanes(mask)
        self.s[row][...] = packed[..., 0]
        self.s[row + 1][...] = packed[..., 1]
        if row == EXEC_LO:
            self.refresh_exec()

    def mask(self, row: int) -> np.ndarray:
        """Lane bools of a scalar pair."""
        if row == EXEC_LO:
            return self.exec
        return lane_masks(self.s[row], self.s[row + 1])

    def wide(self, row: int) -> np.ndarray:
        """Scalar pair as uint64 ``[waves, workgroups]``."""
        return self.s[row] | (self.s[row + 1].astype(np.uint64) << np.uint64(32))

    def set_wide(self, row: int, value: np.ndarray) -> None:
        """Write a scalar pair from uint64."""
        self.s[row][...] = value.astype(np.uint32)
        self.s[row + 1][...] = (value >> np.uint64(32)).astype(np.uint32)
        if row == EXEC_LO:
            self.refresh_exec()

    def vwide(self, row: int) -> np.ndarray:
        """Vector pair as uint64 ``[waves, workgroups, 64]``."""
        value = self.v[row + 1].astype(np.uint64)
        value <<= np.uint64(32)
        value |= self.v[row]
        return value


class Files:
    """Register files of one batch.

    Parameters
    ----------
    vector_rows : int
        VGPRs and AGPRs together.
    waves : int
        Waves of one workgroup.
    workgroups : int
        Workgroups of the batch.
    poison : int
        Bit pattern of a register that nobody has written.
    """

    def __init__(self, vector_rows: int, waves: int, workgroups: int, poison: int) -> None:
        self.vector = np.full((max(vector_rows, 1), waves, workgroups, LANES), poison, np.uint32)
        self.scalar = np.full((SCALAR_ROWS, waves, workgroups), poison, np.uint32)
        self.scc = np.zeros((waves, workgroups), np.bool_)
        # Made when a group first covers a rectangle.
        self.views: dict[Rect, RectViews] = {}
