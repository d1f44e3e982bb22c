"""Packed instructions on two 32-bit floats (manual, "VOP3P instructions"): op_sel and op_sel_hi choose the dwords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..lanewise import Lanewise, Source
from ..math import floats
from ..operation import Environment, Operation, Unimplemented, instruction
from ..state import Group
from ..syntax import Constant, Instruction, Register
from .arithmetic import FAST, denormals
from .operands import SIGN32, Getter, want_register, write_vector
from .valu import bare

FAMILY = "packed"
U32 = np.uint32

PACKED: dict[str, tuple[Callable[..., Any], int]] = {
    "v_pk_add_f32": (floats.add_f32, 2),
    "v_pk_mul_f32": (floats.mul_f32, 2),
    "v_pk_fma_f32": (floats.fma_f32, 3),
}


def _dword(env: Environment, operand: Any, which: int, negate: bool) -> Getter:
    """One dword of a source, its sign flipped where neg_lo or neg_hi says so."""
    if isinstance(operand, Constant):
        if operand.value != 0:
            raise Unimplemented("a constant other than 0 in a packed instruction")
        constant = U32(0x80000000 if negate else 0)
        return lambda g: constant
    register = want_register(operand, "vas", 2)
    if register.file == "s":
        row = register.index + which
        if negate:
            return lambda g: g.sb[row] ^ SIGN32
        return lambda g: g.sb[row]
    row = env.row(register) + which
    if negate:
        return lambda g: g.v[row] ^ SIGN32
    return lambda g: g.v[row]


@instruction(
    *PACKED,
    family=FAMILY,
    section="V_PK_ADD_F32, V_PK_MUL_F32, V_PK_FMA_F32",
    modifiers=["op_sel", "op_sel_hi", "neg_lo", "neg_hi"],
)
def packed_f32(ins: Instruction, env: Environment) -> Operation:
    """Two independent f32 operations."""
    function, count = PACKED[ins.mnemonic]
    function = bare(function)
    row = env.row(want_register(ins.operands[0], "va", 2))
    mode = denormals(env)
    if mode == 3:
        function = FAST[PACKED[ins.mnemonic][0]]
    low = ins.bits("op_sel", (0,) * count)
    high = ins.bits("op_sel_hi", (1,) * count)
    neg = [ins.bits("neg_lo", (0,) * count), ins.bits("neg_hi", (0,) * count)]
    operands = ins.operands[1 : 1 + count]
    getters = [
        [_dword(env, operand, picks[k], bool(neg[part][k])) for k, operand in enumerate(operands)]
        for part, picks in enumerate((low, high))
    ]
    kwargs = {} if mode == 3 else {"denorm": mode}

    def run(g: Group) -> None:
        first = function(*[get(g) for get in getters[0]], **kwargs)
        second = function(*[get(g) for get in getters[1]], **kwargs)
        write_vector(g, row, first)
        write_vector(g, row + 1, second)

    used: set[int] = set()
    for part in (low, high):
        for pick, operand in zip(part, operands, strict=False):
            if isinstance(operand, Register):
                used |= env.ids(Register(operand.file, operand.index + pick))
    lanewise: tuple[Lanewise, ...] = ()
    if mode == 3:
        lanewise = tuple(
            Lanewise(
                function,
                tuple(_source(env, operand, picks[k], bool(neg[part][k])) for k, operand in enumerate(operands)),
                row + part,
            )
            for part, picks in enumerate((low, high))
        )
    return Operation(ins, "valu", run, reads=used, writes=env.ids(ins.operands[0]), lanewise=lanewise)


def _source(env: Environment, operand: Any, which: int, negate: bool) -> Source:
    if isinstance(operand, Register):
        scalar = operand.file == "s"
        return Source("s" if scalar else "v", (operand.index if scalar else env.row(operand)) + which, negate)
    # The only constant is 0.
    return Source("c", int(SIGN32) if negate else 0)


@instruction("v_pk_mov_b32", family=FAMILY, section="V_PK_MOV_B32", modifiers=["op_sel", "op_sel_hi"])
def v_pk_mov_b32(ins: Instruction, env: Environment) -> Operation:
    """Low result from the first source, high result from the second; op_sel picks the dword of each."""
    row = env.row(want_register(ins.operands[0], "va", 2))
    picks = ins.bits("op_sel", (0, 0))
    getters = [_dword(env, operand, picks[k], False) for k, operand in enumerate(ins.operands[1:3])]

    def run(g: Group) -> None:
        first = np.array(getters[0](g))
        second = np.array(getters[1](g))
        write_vector(g, row, first)
        write_vector(g, row + 1, second)

    used: set[int] = set()
    for pick, operand in zip(picks, ins.operands[1:3], strict=True):
        if isinstance(operand, Register):
            used |= env.ids(Register(operand.file, operand.index + pick))
    return Operation(ins, "valu", run, reads=used, writes=env.ids(ins.operands[0]))
