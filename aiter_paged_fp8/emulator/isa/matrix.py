"""Matrix multiply-add (manual, chapter 7): the products are ``math.mfma``'s; here are operands and modifiers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..math import mfma
from ..operation import Environment, Operation, Unimplemented, instruction
from ..state import LANES, Group
from ..syntax import Constant, Instruction, Operand
from .operands import constant32, vector_source, want_register

FAMILY = "matrix"
U32 = np.uint32


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


def _addend(env: Environment, operand: Operand, count: int) -> Any:
    if isinstance(operand, Constant):
        constant = np.asarray(constant32(operand, "u32"))
        return lambda g: constant
    row = env.row(want_register(operand, "va", count))
    return lambda g: _block(g, row, count)


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
    if scaled:
        # A missing op_sel_hi means ones, as for every instruction of this encoding.
        low, high = ins.bits("op_sel", (0, 0, 0)), ins.bits("op_sel_hi", (1, 1, 1))
        select_a, select_b = low[0] | high[0] << 1, low[1] | high[1] << 1
        scales = [vector_source(env, ins.operands[position], "u32") for position in (4, 5)]
    elif "op_sel" in ins.modifiers or "op_sel_hi" in ins.modifiers or len(ins.operands) != 4:
        raise Unimplemented("op_sel or scales of an unscaled product")

    def run(g: Group) -> None:
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
