"""Instructions whose every lane depends on that lane alone, described so that alike ones run as one array operation.

Numpy's cost per call exceeds that of a few waves' lanes many times; kernels apply the same instruction to 16 or 32
registers that do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .state import LANES

if TYPE_CHECKING:
    from .operation import Operation
    from .state import Group

U32 = np.uint32
SIGN, MAGNITUDE = U32(0x80000000), U32(0x7FFFFFFF)

# Lanes that one array operation takes at most: with temporaries in double they still fit a core's second-level cache.
MOST_LANES = 16384


@dataclass(frozen=True)
class Source:
    """One 32-bit source.

    Attributes
    ----------
    file : str
        "v": a vector row; "s": a scalar row; "m": a scalar pair as lane mask; "c": a constant.
    value : int
        The row, or the constant's bits.
    neg, absolute : bool
        The sign is flipped, after it was cleared.
    """

    file: str
    value: int
    neg: bool = False
    absolute: bool = False

    @property
    def kind(self) -> Hashable:
        """What sources must have in common to be taken together."""
        return self.file, self.neg, self.absolute, self.value if self.file == "m" else None


@dataclass(frozen=True)
class Lanewise:
    """One 32-bit result of an instruction, for all lanes.

    Attributes
    ----------
    function : callable
        From the sources to the result's bits. Alike instructions have the same one.
    sources : tuple of Source
    row : int
        Vector row of the result.
    """

    function: Callable[..., Any]
    sources: tuple[Source, ...]
    row: int

    @property
    def kind(self) -> Hashable:
        """What results must have in common to be computed together."""
        return self.function, tuple(source.kind for source in self.sources)


def separable(parts: Sequence[Lanewise]) -> bool:
    """Whether the results of one instruction may be computed one after the other: none is a source of another."""
    return all(
        a is b or not any(source.file == "v" and source.value == a.row for source in b.sources)
        for a in parts
        for b in parts
    ) and len({part.row for part in parts}) == len(parts)


def _pick(rows: Sequence[int]) -> slice | np.ndarray:
    """An index of rows: a slice, whose result is a view, where they are evenly spaced."""
    first, step = rows[0], rows[1] - rows[0] if len(rows) > 1 else 1
    if step > 0 and all(row == first + k * step for k, row in enumerate(rows)):
        return slice(first, rows[-1] + 1, step)
    return np.array(rows)


class Batch:
    """Alike results of instructions that do not depend on each other.

    Parameters
    ----------
    operations : list of Operation
        Instructions with the same kind of ``lanewise`` parts; none reads or writes what another one writes.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = tuple(operations)
        parts = [part for op in operations for part in op.lanewise]
        # In order of the results, sources are most often evenly spaced too.
        self.parts = sorted(parts, key=lambda part: part.row)
        self.function = self.parts[0].function

    def run(self, g: Group) -> None:
        """Execute for a group of which all lanes are active."""
        plan = g.plans.get(self)
        if plan is None:
            plan = g.plans[self] = self._plan(g)
        function = self.function
        for sources, target, rows in plan:
            value = function(*[source if source.__class__ is np.ndarray else source() for source in sources])
            if value.dtype != U32:
                value = value.view(U32)
            if rows is None:
                target[...] = value
            else:
                target[rows] = value

    def _plan(self, g: Group) -> list[tuple[list[Any], np.ndarray, np.ndarray | None]]:
        """Arrays and getters of the sources, and the place of the result, for as many parts at a time as do well."""
        per = max(1, MOST_LANES // (g.waves * LANES))
        plan: list[tuple[list[Any], np.ndarray, np.ndarray | None]] = []
        for start in range(0, len(self.parts), per):
            parts = self.parts[start : start + per]
            sources = [_fetch(g, [part.sources[k] for part in parts]) for k in range(len(parts[0].sources))]
            rows = _pick([part.row for part in parts])
            if isinstance(rows, slice):
                plan.append((sources, g.registers[rows], None))
            else:
                plan.append((sources, g.registers, rows))
        return plan


def _fetch(g: Group, sources: Sequence[Source]) -> Any:
    """The sources at one position as an array that follows the registers, or as a getter of one."""
    first = sources[0]
    values = [source.value for source in sources]
    if len(set(values)) == 1:
        values = values[:1]
    if first.file == "c":
        constants = np.array(values, U32).reshape(-1, 1, 1, 1)
        return _signed(constants, first)
    if first.file == "m":
        return lambda: g.mask(first.value)
    file = g.registers if first.file == "v" else g.scalars
    rows = _pick(values)
    if isinstance(rows, slice):
        array: np.ndarray = file[rows]
        if not (first.neg or first.absolute):
            return array
        return lambda: _signed(array, first)
    if file.flags.c_contiguous:
        return lambda: _signed(file.take(rows, axis=0), first)
    return lambda: _signed(file[rows], first)


def _signed(array: np.ndarray, source: Source) -> np.ndarray:
    if source.absolute:
        array = array & MAGNITUDE
    if source.neg:
        array = array ^ SIGN
    return array
