"""Matrix multiply-add (manual, chapter 7): the products are ``math.mfma``'s; here are operands and modifiers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..math import mfma
from ..operation import Environment, Operation, Unimplemented, instruction
from ..state import LANES, Group
from ..syntax import Constant, Instruction, Name, Operand
from .operands import Getter, constant32, vector_source, want_register

FAMILY = "matrix"
U32 = np.uint32
# Operands of so many waves, as float32, fit a host core's second-level cache.
CACHED_WAVES = 64
# Instructions of these classes write no register but what they name, at once.
IMMEDIATE = ("valu", "trans", "salu", "mfma", "other")

# An operand of all waves as `mfma.operand_axes`, of the first wave of each workgroup, and pairs that must be equal for
# that one to stand for all.
Views = tuple[np.ndarray, "np.ndarray | None", tuple[tuple[np.ndarray, np.ndarray], ...]]


class Factor:
    """An A or B operand: where it stands, and whether its values are those of a neighbouring product.

    Attributes
    ----------
    reuse : bool
        A product before has decoded the same registers and nothing has written them since.
    keep : bool
        A product behind will find them unchanged.
    """

    __slots__ = ("count", "element", "keep", "key", "reuse", "row", "shape")

    def __init__(self, row: int, count: int, shape: mfma.Shape, element: mfma.Element) -> None:
        self.row, self.count, self.shape, self.element = row, count, shape, element
        self.key = (row, count, shape, element.name)
        self.reuse = self.keep = False

    def views(self, g: Group) -> Views:
        """Where a group finds the operand: all waves', one wave's where it may do for all, and what to compare."""
        operand = _registers(g)[:, :, self.row : self.row + self.count]
        every = mfma.operand_axes(operand, self.shape, self.element)
        if self.shape.blocks > 1 or operand.shape[1] == 1:
            return every, None, ()
        one = mfma.operand_axes(operand[:, :1], self.shape, self.element)
        # Most operands that differ do so in their first register.
        first = operand[:, :, :1]
        return every, one, ((first[:, 1:], first[:, :1]), (operand[:, 1:], operand[:, :1]))

    def values(self, views: Views) -> np.ndarray:
        """Matrices ``[workgroups, waves, blocks, M, K]``; of one wave where a workgroup's waves hold the same."""
        every, one, pairs = views
        if one is not None and all(_equal(*pair) for pair in pairs):
            every = one
        return mfma.axes_matrix(every, self.shape, self.element)


def _equal(values: np.ndarray, to: np.ndarray) -> bool:
    same = values == to
    return int(np.count_nonzero(same)) == same.size


def share_operands(operations: list[Operation]) -> None:
    """Note which products of a straight piece of code read operands that a product before has decoded."""
    entered = {op.instruction.target for op in operations}
    known: dict[Any, Factor] = {}
    for op in operations:
        if op.index in entered or op.kind not in IMMEDIATE:
            known.clear()
        if op.kind == "mfma" and op.aux is not None:
            for factor in op.aux:
                before = known.get(factor.key)
                if before is not None:
                    factor.reuse = before.keep = True
                known[factor.key] = factor
        for key in [key for key in known if not op.writes.isdisjoint(range(key[0], key[0] + key[1]))]:
            del known[key]


def _mnemonics() -> list[str]:
    found = []
    for (result, types), shapes in mfma._VARIANTS.items():
        for shape in shapes:
            name = f"v_mfma_{result}_{shape}_{types}"
            # bf16 forms with the operand layout of f16 carry a suffix.
            found.append(f"{name}_1k" if types == "bf16" and not _is_wide(shape) else name)
            if types == "f8f6f4":
                found.append(f"v_mfma_scale_{result}_{shape}_{types}")
    return found


def _is_wide(shape: str) -> bool:
    return shape in ("16x16x32", "32x32x16")


def _block(g: Group, row: int, count: int) -> np.ndarray:
    """Consecutive registers as ``[waves, registers, 64]``."""
    w, h = g.rect.slices
    registers = g.machine.files.vector[row : row + count, w, h]
    return registers.transpose(1, 2, 0, 3).reshape(g.waves, count, LANES)


def _put_block(g: Group, row: int, count: int, value: np.ndarray) -> None:
    w, h = g.rect.slices
    shaped = value.reshape(*g.shape, count, LANES).transpose(2, 0, 1, 3)
    g.machine.files.vector[row : row + count, w, h] = shaped


def _registers(g: Group) -> np.ndarray:
    """The group's vector registers, workgroups first: a view ``[workgroups, waves, registers, 64]``."""
    w, h = g.rect.slices
    return g.machine.files.vector[:, w, h].transpose(2, 1, 0, 3)


class Plan:
    """What a product needs of a group's registers, and a place for it before the addend is added.

    Attributes
    ----------
    left, right : Views
        See ``Factor``.
    scales : list
        Bytes of the block scales.
    units : bytes
        Their content when they were last found to be 1.
    parts : list
        Workgroups at a time: which, their addend and their result.
    """

    __slots__ = ("beside", "left", "parts", "product", "right", "scales", "shown", "units")

    def __init__(self, g: Group, factors: tuple[Factor, Factor], row: int, addend: Any, scales: list[Any]) -> None:
        shape = factors[0].shape
        registers = _registers(g)
        self.left, self.right = (factor.views(g) for factor in factors)
        self.scales = scales
        self.units = b""
        count = shape.result_registers
        target = mfma.result_view(registers[:, :, row : row + count], shape).view(np.float32)
        if isinstance(addend, int):
            addend = mfma.result_view(registers[:, :, addend : addend + count], shape).view(np.float32)
        step = max(1, CACHED_WAVES // g.shape[0])
        self.parts = []
        for start in range(0, g.shape[1], step):
            part = slice(start, start + step)
            self.parts.append((part, addend[part] if np.ndim(addend) else addend, target[part]))
        key = (shape, step)
        if key not in g.plans:
            product = np.empty((min(step, g.shape[1]), g.shape[0], shape.blocks, shape.rows, shape.rows), np.float32)
            # The same place where one product has the columns of all waves side by side.
            beside = product.reshape(len(product), shape.rows, -1, shape.rows) if shape.blocks == 1 else product
            g.plans[key] = (
                product,
                mfma.product_view(product, shape),
                mfma.product_view(beside.swapaxes(1, 2)[:, :, None], shape) if shape.blocks == 1 else None,
            )
        self.product, self.shown, self.beside = g.plans[key]

    def scaled(self) -> bool:
        """Whether a block scale is not 1."""
        if not self.scales:
            return False
        content = b"".join(scale.tobytes() for scale in self.scales)
        if content != self.units:
            if any(np.count_nonzero(scale == mfma.UNIT_SCALE) != scale.size for scale in self.scales):
                return True
            self.units = content
        return False

    def multiply(self, a: np.ndarray, b: np.ndarray) -> None:
        """``D = A * B + C`` for A's rows and B's columns; one wave of either stands for all of its workgroup."""
        for part, addend, target in self.parts:
            left, right = a[part], b[part]
            groups = len(left)
            product, shown = self.product[:groups], self.shown
            if right.shape[1] == 1 and left.shape[1] > 1:
                # All waves multiply by the same columns: one product of many rows.
                rows = left.shape[1] * left.shape[3]
                columns = right[:, 0, 0].swapaxes(-1, -2)
                np.matmul(left.reshape(groups, rows, -1), columns, out=product.reshape(groups, rows, -1))
            elif left.shape[1] == 1 and right.shape[1] > 1:
                # All waves multiply the same rows: one product of many columns.
                every = right.reshape(groups, right.shape[1] * right.shape[3], -1).swapaxes(-1, -2)
                np.matmul(left[:, 0, 0], every, out=product.reshape(groups, left.shape[3], -1))
                shown = self.beside
            else:
                np.matmul(left, right.swapaxes(-1, -2), out=product)
            np.add(shown[:groups], addend, out=target)


def _addend(env: Environment, operand: Operand, count: int) -> Any:
    if isinstance(operand, Constant):
        constant = np.asarray(constant32(operand, "u32"))
        return lambda g: constant
    row = env.row(want_register(operand, "va", count))
    return lambda g: _block(g, row, count)


def _scale_bytes(g: Group, get: Getter, pick: int) -> np.ndarray:
    """One byte of the block scales, a view where they stand in a register."""
    register = np.asarray(get(g))
    return register.reshape(*register.shape, 1).view(np.uint8)[..., pick]


@instruction(
    *_mnemonics(),
    family=FAMILY,
    section="7. Matrix arithmetic",
    modifiers=["cbsz", "blgp", "abid", "op_sel", "op_sel_hi"],
)
def matrix(ins: Instruction, env: Environment) -> Operation:
    """D = A * B + C; EXEC is ignored."""
    parsed = mfma.parse(ins.mnemonic)
    shape = parsed.shape
    cbsz, blgp, abid = (ins.integer(name) for name in ("cbsz", "blgp", "abid"))
    if parsed.a is None:
        if abid or max(cbsz, blgp) >= len(mfma.F8F6F4_FORMATS):
            raise Unimplemented("reserved format or ABID of a f8f6f4 product")
        a_type, b_type = mfma.F8F6F4_FORMATS[cbsz], mfma.F8F6F4_FORMATS[blgp]
        cbsz = blgp = 0
    else:
        assert parsed.b is not None
        a_type, b_type = parsed.a, parsed.b
    a_count = shape.operand_registers(mfma.ELEMENTS[a_type])
    b_count = shape.operand_registers(mfma.ELEMENTS[b_type])
    result_count = shape.result_registers
    target = want_register(ins.operands[0], "va", result_count)
    row = env.row(target)
    a_row, b_row = (
        env.row(want_register(operand, "va", count))
        for operand, count in zip(ins.operands[1:3], (a_count, b_count), strict=True)
    )
    addend = _addend(env, ins.operands[3], result_count)
    scaled = "_scale_" in ins.mnemonic
    scales: list[Getter] = []
    picks: tuple[int, int] = (0, 0)
    if scaled:
        # A missing op_sel_hi means ones, as for every instruction of this encoding.
        low, high = ins.bits("op_sel", (0, 0, 0)), ins.bits("op_sel_hi", (1, 1, 1))
        select_a, select_b = low[0] | high[0] << 1, low[1] | high[1] << 1
        scales = [vector_source(env, ins.operands[position], "u32") for position in (4, 5)]
        picks = (select_a, select_b)
    elif "op_sel" in ins.modifiers or "op_sel_hi" in ins.modifiers or len(ins.operands) != 4:
        raise Unimplemented("op_sel or scales of an unscaled product")

    shared = ins.operands[3]
    constant = constant32(shared, "f32") if isinstance(shared, Constant) else None
    addend_row = None if isinstance(shared, Constant) else env.row(want_register(shared, "va", result_count))
    first = Factor(a_row, a_count, shape, mfma.ELEMENTS[a_type])
    second = Factor(b_row, b_count, shape, mfma.ELEMENTS[b_type])
    direct = parsed.result == "f32" and not (cbsz or blgp)
    if any(isinstance(operand, Name) for operand in ins.operands):
        # A value of its own at each time, not a place to look at.
        direct = False

    def plan_of(g: Group) -> Plan:
        plan = g.plans.get(op)
        if plan is None:
            seen = [_scale_bytes(g, get, pick) for get, pick in zip(scales, picks, strict=True)] if scaled else []
            if scaled and ins.operands[4] == ins.operands[5] and select_a == select_b:
                del seen[1:]
            place = np.asarray(constant) if addend_row is None else addend_row
            plan = g.plans[op] = Plan(g, (first, second), row, place, seen)
        return plan

    def run(g: Group) -> None:
        if direct:
            plan = plan_of(g)
            if not plan.scaled():
                # The hot path: every operand is copied once, and the sum goes straight to the registers.
                decoded = g.decoded
                left = decoded.get(first.key) if first.reuse else None
                if left is None:
                    left = first.values(plan.left)
                right = decoded.get(second.key) if second.reuse else None
                if right is None:
                    right = second.values(plan.right)
                plan.multiply(left, right)
                for factor, values in ((first, left), (second, right)):
                    if factor.keep or factor.reuse:
                        decoded[factor.key] = values
                return
        for factor in (first, second):
            g.decoded.pop(factor.key, None)
        a, b = _block(g, a_row, a_count), _block(g, b_row, b_count)
        if scaled:
            by_lane = [np.broadcast_to(get(g), (*g.shape, LANES)).reshape(g.waves, LANES) for get in scales]
            value = mfma.mfma_scale(
                a,
                b,
                addend(g),
                by_lane[0],
                by_lane[1],
                shape=shape,
                a_type=a_type,
                b_type=b_type,
                select_a=select_a,
                select_b=select_b,
            )
        else:
            if cbsz or blgp:
                a, b = mfma.broadcast_a(a, cbsz, abid), mfma.broadcast_b(b, blgp)
            value = mfma.mfma(a, b, addend(g), shape=shape, a_type=a_type, b_type=b_type)
        _put_block(g, row, result_count, value)

    factors = (first, second)
    op = Operation(ins, "mfma", run, reads=env.ids(*ins.operands[1:]), writes=env.ids(target), aux=factors)
    return op
