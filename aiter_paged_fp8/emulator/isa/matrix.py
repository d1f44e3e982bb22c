"""Matrix multiply-add (manual, chapter 7): the products are ``math.mfma``'s; here are operands and modifiers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..math import mfma
from ..operation import Environment, Operation, Unimplemented, instruction
from ..state import LANES, Group
from ..syntax import Constant, Instruction, Operand
from .operands import Getter, constant32, vector_source, want_register

FAMILY = "matrix"
U32 = np.uint32
# Operands of so many waves, as float32, fit a host core's second-level cache.
CACHED_WAVES = 32


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


def _slices(g: Group) -> list[np.ndarray]:
    """Views ``[waves, registers, 64]`` of the group's registers, few enough waves at a time for the host's cache."""
    rect, vector = g.rect, g.machine.files.vector
    if rect.g1 - rect.g0 < vector.shape[2]:
        return [vector[:, wave, rect.g0 : rect.g1].swapaxes(0, 1) for wave in range(rect.w0, rect.w1)]
    flat = vector.reshape(len(vector), -1, LANES).swapaxes(0, 1)
    first, last = rect.w0 * vector.shape[2], rect.w1 * vector.shape[2]
    return [flat[start : min(start + CACHED_WAVES, last)] for start in range(first, last, CACHED_WAVES)]


def _addend(env: Environment, operand: Operand, count: int) -> Any:
    if isinstance(operand, Constant):
        constant = np.asarray(constant32(operand, "u32"))
        return lambda g: constant
    row = env.row(want_register(operand, "va", count))
    return lambda g: _block(g, row, count)


def _unit(register: Any, pick: int) -> bool:
    """Whether a block scale is 1 in every lane."""
    return bool(((register >> U32(8 * pick) & U32(0xFF)) == mfma.UNIT_SCALE).all())


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
    a_element, b_element = mfma.ELEMENTS[a_type], mfma.ELEMENTS[b_type]
    direct = parsed.result == "f32" and not (cbsz or blgp)

    def run(g: Group) -> None:
        if direct and (not scaled or all(_unit(get(g), pick) for get, pick in zip(scales, picks, strict=True))):
            # The hot path: every operand is copied once, and the sum goes straight to the registers.
            for registers in _slices(g):
                left = mfma.operand_matrix(registers[:, a_row : a_row + a_count], shape, a_element)
                right = mfma.operand_matrix(registers[:, b_row : b_row + b_count], shape, b_element)
                product = mfma.product_view(np.matmul(left, right.swapaxes(-1, -2)), shape)
                c: Any = constant
                if addend_row is not None:
                    c = mfma.result_view(registers[:, addend_row : addend_row + result_count], shape).view(np.float32)
                target_view = mfma.result_view(registers[:, row : row + result_count], shape).view(np.float32)
                np.add(product, c, out=target_view)
            return
        a, b = _block(g, a_row, a_count), _block(g, b_row, b_count)
        if scaled:
            factors = [np.broadcast_to(get(g), (*g.shape, LANES)).reshape(g.waves, LANES) for get in scales]
            value = mfma.mfma_scale(
                a,
                b,
                addend(g),
                factors[0],
                factors[1],
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

    return Operation(ins, "mfma", run, reads=env.ids(*ins.operands[1:]), writes=env.ids(target))
