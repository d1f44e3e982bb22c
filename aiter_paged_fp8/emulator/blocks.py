"""Straight pieces of a program, rearranged so that alike independent instructions run as one array operation.

A block holds instructions that touch registers alone, none of them EXEC. Their order within it cannot be told from its
results, as long as each reads what it would have read: so they are put in an order of their own, as batches. The
machine takes a block whole where no check has anything to say about it: all lanes active, no register on its way, none
of those that it reads undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .lanewise import Batch
from .operation import Operation
from .state import SCALAR_ID, Group
from .syntax import EXEC_HI, EXEC_LO, Name

Step = tuple[Callable[[Group], Any], Operation]

EXEC_IDS = frozenset({SCALAR_ID + EXEC_LO, SCALAR_ID + EXEC_HI})
# Kinds of instructions that do no more than their reads and writes tell.
PLAIN_KINDS = frozenset({"valu", "trans", "salu", "mfma"})
# Shorter pieces gain nothing.
SHORTEST = 3


class Block:
    """Instructions ``[start, end)``, ready to run in any group.

    Attributes
    ----------
    registers : frozenset of int
        Everything that is read or written.
    needs : frozenset of int
        What is read before the block itself has written it.
    writes : frozenset of int
    """

    __slots__ = ("_operations", "_steps", "end", "needs", "number", "registers", "start", "writes")

    def __init__(self, operations: Sequence[Operation], start: int, end: int, number: int) -> None:
        self.start, self.end, self.number = start, end, number
        mine = operations[start:end]
        needs: set[int] = set()
        writes: set[int] = set()
        for op in mine:
            needs |= op.reads - writes
            writes |= op.writes
        self.needs, self.writes = frozenset(needs), frozenset(writes)
        self.registers = self.needs | self.writes
        self._operations: Sequence[Operation] = mine
        self._steps: list[Step] | None = None

    @property
    def steps(self) -> list[Step]:
        """(run, operation): what to call one after the other, and one of the operations that it executes.

        Arranged when it is first run: many blocks are only asked for.
        """
        if self._steps is None:
            self._steps = _schedule([op for op in self._operations if op.kind in PLAIN_KINDS])
        return self._steps


def _movable(op: Operation) -> bool:
    """Whether reads and writes say all about an instruction that its order depends on."""
    if op.kind == "other":
        return True
    # Names stand for what has no register id: SCC as an operand, MODE.
    hidden = any(isinstance(operand, Name) for operand in op.instruction.operands)
    return op.kind in PLAIN_KINDS and not hidden and EXEC_IDS.isdisjoint(op.writes)


class Blocks:
    """The blocks of a program, made when they are first met."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        entered = {op.instruction.target for op in operations}
        # Where the straight piece that an instruction belongs to ends.
        self.ends = [0] * len(operations)
        end = len(operations)
        for index in range(len(operations) - 1, -1, -1):
            if not _movable(operations[index]):
                end = index
            self.ends[index] = max(end, index)
            if index in entered:
                end = index
        self.found: dict[tuple[int, int], Block] = {}
        self.all: list[Block] = []

    def at(self, group: Group, pc: int) -> Block | None:
        """The block that a group at ``pc`` may take whole; None where it must go step by step."""
        end = self.ends[pc]
        if end - pc < SHORTEST or not group.full:
            return None
        block = self.found.get((pc, end)) or self._make(pc, end)
        busy, undefined = group.busy, group.undefined
        if (not busy or busy.keys().isdisjoint(block.registers)) and (
            not undefined or undefined.keys().isdisjoint(block.needs)
        ):
            return block
        end = self._first_touched(group, pc, end)
        if end - pc < SHORTEST:
            return None
        return self.found.get((pc, end)) or self._make(pc, end)

    def _make(self, start: int, end: int) -> Block:
        block = self.found[start, end] = Block(self.operations, start, end, len(self.all))
        self.all.append(block)
        return block

    def _first_touched(self, group: Group, pc: int, end: int) -> int:
        """The first instruction that touches a register on its way or reads an undefined one."""
        busy = group.busy.keys()
        undefined = set(group.undefined)
        for index in range(pc, end):
            op = self.operations[index]
            if not busy.isdisjoint(op.regs) or not undefined.isdisjoint(op.reads):
                return index
            undefined -= op.writes
        return end


def _schedule(operations: Sequence[Operation]) -> list[Step]:
    """An order in which alike instructions come together, each behind those that it depends on."""
    count = len(operations)
    behind: list[set[int]] = [set() for _ in range(count)]
    missing = [0] * count
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    product = -1
    for k, op in enumerate(operations):
        before = {writer[register] for register in op.regs if register in writer}
        for register in op.writes:
            before.update(readers.get(register, ()))
        if op.kind == "mfma":
            # Products hand decoded operands to the next one.
            before.add(product)
            product = k
        before -= {k, -1}
        for other in before:
            behind[other].add(k)
        missing[k] = len(before)
        for register in op.reads:
            readers.setdefault(register, []).append(k)
        for register in op.writes:
            writer[register] = k
            readers[register] = []
    kinds: list[Hashable] = [_kind(op) for op in operations]
    left: dict[Hashable, int] = {}
    for kind in kinds:
        left[kind] = left.get(kind, 0) + 1
    ready: dict[Hashable, list[int]] = {}
    for k in range(count):
        if not missing[k]:
            ready.setdefault(kinds[k], []).append(k)
    steps: list[Step] = []
    while ready:
        # What can be complete goes first: it may let others be so.
        kind = max(ready, key=lambda kind: len(ready[kind]) / left[kind])
        chosen = ready.pop(kind)
        left[kind] -= len(chosen)
        steps.append(_step([operations[k] for k in chosen]))
        for k in chosen:
            for other in behind[k]:
                missing[other] -= 1
                if not missing[other]:
                    ready.setdefault(kinds[other], []).append(other)
    return steps


def _kind(op: Operation) -> Hashable:
    if op.lanewise:
        first = op.lanewise[0].kind
        if all(part.kind == first for part in op.lanewise[1:]):
            return op.kind, first
    return op.index


def _step(operations: list[Operation]) -> Step:
    first = operations[0]
    if len(operations) == 1 and len(first.lanewise) <= 1:
        return first.run, first
    if len(operations) == 1 and not isinstance(_kind(first), tuple):
        return first.run, first
    return Batch(operations).run, first
