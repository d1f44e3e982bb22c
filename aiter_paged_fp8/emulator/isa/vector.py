"""Vector ALU: moves, integer and float arithmetic, logic, selects (manual, "Vector ALU operations")."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ..math import bits, floats
from ..operation import Environment, Operation, instruction
from ..state import Group
from ..syntax import Instruction
from .operands import vector_source, want_register, write_vector, write_vector_wide
from .valu import COMMON_MODIFIERS, source, unchanged, valu

FAMILY = "vector"
U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64

Array = Any


def _i32(value: Array) -> Array:
    return value.view(I32)


def _mul24(a: Array, b: Array) -> Array:
    return (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF))


def _mul_signed24(a: Array, b: Array) -> Array:
    return bits.signed_24(a) * bits.signed_24(b)


# Integer instructions of 32 bits: function, letters of the sources.
INTEGER: dict[str, tuple[Callable[..., Array], str]] = {
    "v_mov_b32": (unchanged, "u"),
    "v_not_b32": (lambda a: ~a, "u"),
    "v_bfrev_b32": (bits.bfrev_b32, "u"),
    "v_ffbh_u32": (bits.ffbh_u32, "u"),
    "v_ffbl_b32": (bits.ffbl_b32, "u"),
    "v_ffbh_i32": (bits.ffbh_i32, "u"),
    "v_add_u32": (lambda a, b: a + b, "uu"),
    "v_sub_u32": (lambda a, b: a - b, "uu"),
    "v_subrev_u32": (lambda a, b: b - a, "uu"),
    "v_add_i32": (lambda a, b: a + b, "uu"),
    "v_sub_i32": (lambda a, b: a - b, "uu"),
    "v_and_b32": (lambda a, b: a & b, "uu"),
    "v_or_b32": (lambda a, b: a | b, "uu"),
    "v_xor_b32": (lambda a, b: a ^ b, "uu"),
    "v_xnor_b32": (lambda a, b: ~(a ^ b), "uu"),
    "v_lshlrev_b32": (lambda a, b: b << (a & U32(31)), "uu"),
    "v_lshrrev_b32": (lambda a, b: b >> (a & U32(31)), "uu"),
    "v_ashrrev_i32": (lambda a, b: (_i32(b) >> _i32(a & U32(31))).view(U32), "uu"),
    "v_min_u32": (np.minimum, "uu"),
    "v_max_u32": (np.maximum, "uu"),
    "v_min_i32": (lambda a, b: np.minimum(_i32(a), _i32(b)).view(U32), "uu"),
    "v_max_i32": (lambda a, b: np.maximum(_i32(a), _i32(b)).view(U32), "uu"),
    "v_mul_lo_u32": (lambda a, b: a * b, "uu"),
    "v_mul_hi_u32": (bits.mul_hi_u32, "uu"),
    "v_mul_hi_i32": (bits.mul_hi_i32, "uu"),
    "v_mul_u32_u24": (_mul24, "uu"),
    "v_mul_i32_i24": (_mul_signed24, "uu"),
    "v_bfm_b32": (bits.bfm_b32, "uu"),
    "v_bcnt_u32_b32": (lambda a, b: bits.popcount(a) + b, "uu"),
    "v_mbcnt_lo_u32_b32": (bits.mbcnt_lo, "uu"),
    "v_mbcnt_hi_u32_b32": (bits.mbcnt_hi, "uu"),
    "v_mad_u32_u24": (lambda a, b, c: _mul24(a, b) + c, "uuu"),
    "v_mad_i32_i24": (lambda a, b, c: _mul_signed24(a, b) + c, "uuu"),
    "v_add3_u32": (lambda a, b, c: a + b + c, "uuu"),
    "v_lshl_add_u32": (lambda a, b, c: (a << (b & U32(31))) + c, "uuu"),
    "v_add_lshl_u32": (lambda a, b, c: (a + b) << (c & U32(31)), "uuu"),
    "v_xad_u32": (lambda a, b, c: (a ^ b) + c, "uuu"),
    "v_lshl_or_b32": (lambda a, b, c: a << (b & U32(31)) | c, "uuu"),
    "v_and_or_b32": (lambda a, b, c: a & b | c, "uuu"),
    "v_or3_b32": (lambda a, b, c: a | b | c, "uuu"),
    "v_bfe_u32": (bits.bfe_u32, "uuu"),
    "v_bfe_i32": (bits.bfe_i32, "uuu"),
    "v_bfi_b32": (bits.bfi_b32, "uuu"),
    "v_alignbit_b32": (bits.alignbit_b32, "uuu"),
    "v_alignbyte_b32": (bits.alignbyte_b32, "uuu"),
    "v_perm_b32": (bits.perm_b32, "uuu"),
    "v_min3_u32": (lambda a, b, c: np.minimum(np.minimum(a, b), c), "uuu"),
    "v_max3_u32": (lambda a, b, c: np.maximum(np.maximum(a, b), c), "uuu"),
    "v_min3_i32": (lambda a, b, c: np.minimum(np.minimum(_i32(a), _i32(b)), _i32(c)).view(U32), "uuu"),
    "v_max3_i32": (lambda a, b, c: np.maximum(np.maximum(_i32(a), _i32(b)), _i32(c)).view(U32), "uuu"),
    "v_med3_u32": (lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)), "uuu"),
    "v_med3_i32": (
        lambda a, b, c: np.maximum(
            np.minimum(_i32(a), _i32(b)), np.minimum(np.maximum(_i32(a), _i32(b)), _i32(c))
        ).view(U32),
        "uuu",
    ),
}


@instruction(*INTEGER, family=FAMILY, section="VOP1, VOP2 and VOP3 instructions", modifiers=COMMON_MODIFIERS)
def integer(ins: Instruction, env: Environment) -> Operation:
    """Integer, logic and bit-field instructions on 32 bits."""
    function, kinds = INTEGER[ins.mnemonic]
    return valu(ins, env, function, kinds)


@instruction("v_bitop3_b32", family=FAMILY, section="V_BITOP3_B32", modifiers=["bitop3"])
def v_bitop3_b32(ins: Instruction, env: Environment) -> Operation:
    """Any function of three bits: bit 4*s0 + 2*s1 + s2 of the truth table."""
    return valu(ins, env, _bitop3(ins.integer("bitop3")), "uuu")


@lru_cache(maxsize=256)
def _bitop3(table: int) -> Callable[..., Array]:
    return lambda a, b, c: bits.bitop3_b32(a, b, c, table)


@instruction("v_mov_b64", "v_lshl_add_u64", family=FAMILY, section="V_MOV_B64, V_LSHL_ADD_U64")
def wide(ins: Instruction, env: Environment) -> Operation:
    """64-bit move and shift-and-add (the shift count is 32 bits)."""
    if ins.mnemonic == "v_mov_b64":
        return valu(ins, env, unchanged, "q", result="q")
    return valu(ins, env, lambda a, b, c: (a << np.asarray(b & U32(7)).astype(U64)) + c, "quq", result="q")


WIDE_SHIFTS: dict[str, Callable[..., Array]] = {
    "v_lshlrev_b64": lambda a, b: b << np.asarray(a & U32(63)).astype(U64),
    "v_lshrrev_b64": lambda a, b: b >> np.asarray(a & U32(63)).astype(U64),
    "v_ashrrev_i64": lambda a, b: (b.view(I64) >> np.asarray(a & U32(63)).astype(I64)).view(U64),
}


@instruction(*WIDE_SHIFTS, family=FAMILY, section="V_LSHLREV_B64, V_LSHRREV_B64, V_ASHRREV_I64")
def wide_shift(ins: Instruction, env: Environment) -> Operation:
    """64-bit shifts; the count is the first source."""
    return valu(ins, env, WIDE_SHIFTS[ins.mnemonic], "uq", result="q")


# -- multiply-add to 64 bits, carries ----------------------------------------------------------------------


@instruction(
    "v_mad_u64_u32", "v_mad_i64_i32", family=FAMILY, section="V_MAD_U64_U32, V_MAD_I64_I32", modifiers=["clamp"]
)
def v_mad_64(ins: Instruction, env: Environment) -> Operation:
    """64-bit sum of a 32x32 product and a 64-bit addend; carry or overflow per lane to a scalar pair."""
    target = want_register(ins.operands[0], "v", 2)
    carry = want_register(ins.operands[1], "s", 2)
    kind = "u32" if "u32" in ins.mnemonic else "i32"
    a, b = vector_source(env, ins.operands[2], kind), vector_source(env, ins.operands[3], kind)
    c = source(env, ins, 4, "q")
    row = env.row(target)
    wider: type = U64 if kind == "u32" else I64

    def run(g: Group) -> None:
        product: Array = np.asarray(a(g)).astype(wider) * np.asarray(b(g)).astype(wider)
        addend = c(g)
        product_bits = np.asarray(product).view(U64)
        total = product_bits + addend
        if kind == "u32":
            out = total < product_bits
        else:
            out = ((product_bits ^ total) & (addend ^ total)) >> U64(63) != 0
        active = g.exec
        write_vector_wide(g, row, total)
        g.set_mask(carry.index, np.broadcast_to(out, active.shape) & active)

    return Operation(ins, "valu", run, reads=env.ids(*ins.operands[2:]), writes=env.ids(target, carry))


def _add_carry(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    total = a.astype(U64) + b + c
    return total.astype(U32), total > 0xFFFFFFFF


def _sub_borrow(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    subtrahend = b.astype(U64) + c
    return (a.astype(U64) - subtrahend).astype(U32), subtrahend > a


CARRY: dict[str, tuple[Callable[..., Array], bool, bool]] = {
    # function, operands exchanged, carry in
    "v_add_co_u32": (_add_carry, False, False),
    "v_sub_co_u32": (_sub_borrow, False, False),
    "v_subrev_co_u32": (_sub_borrow, True, False),
    "v_addc_co_u32": (_add_carry, False, True),
    "v_subb_co_u32": (_sub_borrow, False, True),
    "v_subbrev_co_u32": (_sub_borrow, True, True),
}


@instruction(*CARRY, family=FAMILY, section="V_ADD_CO_U32 and others")
def with_carry(ins: Instruction, env: Environment) -> Operation:
    """Add and subtract with carry out, some with carry in, as lane masks."""
    function, exchanged, carry_in = CARRY[ins.mnemonic]
    row = env.row(want_register(ins.operands[0], "v", 1))
    out = want_register(ins.operands[1], "s", 2)
    a, b = vector_source(env, ins.operands[2], "u32"), vector_source(env, ins.operands[3], "u32")
    if exchanged:
        a, b = b, a
    carry = want_register(ins.operands[4], "s", 2).index if carry_in else None

    def run(g: Group) -> None:
        c = g.mask(carry) if carry is not None else False
        value, carried = function(np.asarray(a(g)), np.asarray(b(g)), c)
        active = g.exec
        write_vector(g, row, value)
        g.set_mask(out.index, np.broadcast_to(carried, active.shape) & active)

    return Operation(ins, "valu", run, reads=env.ids(*ins.operands[2:]), writes=env.ids(*ins.operands[:2]))


# -- selects --------------------------------------------------------------------------------------------------------


def _select(a: Array, b: Array, mask: Array) -> Array:
    return np.where(mask, b, a)


@instruction("v_cndmask_b32", family=FAMILY, section="V_CNDMASK_B32", modifiers=COMMON_MODIFIERS)
def v_cndmask_b32(ins: Instruction, env: Environment) -> Operation:
    """Second source where the mask is set, else the first."""
    return valu(ins, env, _select, "ffm")


# -- compares -------------------------------------------------------------------------------------------------------

INTEGER_COMPARE: dict[str, Callable[..., Array]] = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b)), np.bool_),
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "t": lambda a, b: np.ones(np.broadcast_shapes(np.shape(a), np.shape(b)), np.bool_),
}
FLOAT_COMPARE = ("f", "lt", "eq", "le", "gt", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt", "tru")


def _compare(ins: Instruction, env: Environment, test: Callable[..., Array], kinds: str) -> Operation:
    target = want_register(ins.operands[0], "s", 2)
    a, b = source(env, ins, 1, kinds[0]), source(env, ins, 2, kinds[1])
    row = target.index
    exec_too = "_cmpx_" in ins.mnemonic

    def run(g: Group) -> None:
        answer = np.broadcast_to(test(a(g), b(g)), g.exec.shape)
        if not g.full:
            answer = answer & g.exec
        if exec_too:
            g.set_mask(126, answer)
        g.set_mask(row, answer)

    writes = env.ids(target) | ({1024 + 126, 1024 + 127} if exec_too else set())
    return Operation(ins, "valu", run, reads=env.ids(*ins.operands[1:]), writes=writes)


@instruction(
    *(
        f"v_{prefix}_{name}_{kind}"
        for prefix in ("cmp", "cmpx")
        for name in INTEGER_COMPARE
        if name != "lg"
        for kind in ("i32", "u32", "i64", "u64")
    ),
    family=FAMILY,
    section="VOPC instructions",
)
def compare_integer(ins: Instruction, env: Environment) -> Operation:
    """Compare integers; inactive lanes give 0."""
    _, _, name, kind = ins.mnemonic.split("_")
    test = INTEGER_COMPARE[name]
    letters = "uu" if kind.endswith("32") else "qq"
    if kind[0] == "u":
        return _compare(ins, env, test, letters)
    signed: type = I32 if letters == "uu" else I64
    return _compare(ins, env, lambda a, b: test(a.view(signed), b.view(signed)), letters)


@instruction(
    *(f"v_{prefix}_{name}_f32" for prefix in ("cmp", "cmpx") for name in FLOAT_COMPARE),
    family=FAMILY,
    section="VOPC instructions",
)
def compare_float(ins: Instruction, env: Environment) -> Operation:
    """Compare floats; the n-forms are true where a NaN takes part."""
    name = ins.mnemonic.split("_")[2]
    return _compare(ins, env, lambda a, b: floats.cmp_f32(name, a, b), "ff")  # type: ignore[arg-type]
