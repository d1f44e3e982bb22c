"""Scalar arithmetic, logic, moves and compares (manual, "Scalar ALU operations")."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..operation import Environment, Operation, Unimplemented, instruction
from ..state import SCALAR_ID, SCC_ID, Group
from ..syntax import EXEC_HI, EXEC_LO, Constant, Instruction, Name
from .operands import Getter, scalar_source, scalar_wide_source, want_register

FAMILY = "scalar"
U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64
# Row of the scalar file that holds the MODE register; 125 is no operand on this target.
MODE_ROW = 125
MODE_FP16_OVFL = 23

Array = Any


def _signed(value: Array) -> Array:
    return np.asarray(value).view(I32)


def _signed64(value: Array) -> Array:
    return np.asarray(value).view(I64)


def _wide(value: Array) -> Array:
    return np.asarray(value).astype(U64)


def _operation(
    ins: Instruction,
    env: Environment,
    compute: Callable[[Group], Array],
    *,
    width: int,
    scc_read: bool = False,
    scc_write: bool = False,
    target_read: bool = False,
    sources: tuple[Any, ...] | None = None,
) -> Operation:
    """Build an operation that writes ``compute(g)`` to the first operand."""
    target = want_register(ins.operands[0], "s", width)
    row = target.index
    execs = row <= EXEC_HI and row + width > EXEC_LO

    if width == 1:

        def run(g: Group) -> None:
            g.s[row][...] = compute(g)
            if execs:
                g.refresh_exec()
    else:

        def run(g: Group) -> None:
            g.set_wide(row, np.asarray(compute(g)))

    reads = env.ids(*(ins.operands[1:] if sources is None else sources))
    writes = env.ids(target)
    if scc_read:
        reads.add(SCC_ID)
    if scc_write:
        writes.add(SCC_ID)
    if target_read:
        reads |= env.ids(target)
    return Operation(ins, "salu", run, reads=reads, writes=writes)


# -- two sources ------------------------------------------------------------------------------------------------------
# Each gives the result and what SCC becomes (None: unchanged).

Pair = tuple[Array, Array]


def _nonzero(value: Array) -> Pair:
    return value, value != 0


def s_add_u32(g: Group, a: Array, b: Array) -> Pair:
    """SCC = carry out."""
    result = a + b
    return result, result < a


def s_addc_u32(g: Group, a: Array, b: Array) -> Pair:
    """With carry in from SCC; SCC = carry out."""
    result = _wide(a) + b + g.scc
    return result.astype(U32), result > 0xFFFFFFFF


def s_sub_u32(g: Group, a: Array, b: Array) -> Pair:
    """SCC = borrow out."""
    return a - b, np.asarray(b) > a


def s_subb_u32(g: Group, a: Array, b: Array) -> Pair:
    """With borrow in from SCC; SCC = borrow out."""
    subtrahend = _wide(b) + g.scc
    return (_wide(a) - subtrahend).astype(U32), subtrahend > a


def s_add_i32(g: Group, a: Array, b: Array) -> Pair:
    """SCC = signed overflow."""
    result = a + b
    return result, ((a ^ result) & (b ^ result)) >> U32(31) != 0


def s_sub_i32(g: Group, a: Array, b: Array) -> Pair:
    """SCC = signed overflow."""
    result = a - b
    return result, ((a ^ b) & (a ^ result)) >> U32(31) != 0


def s_absdiff_i32(g: Group, a: Array, b: Array) -> Pair:
    """Difference in 32 bits, negated where negative (the manual's examples show the wrap)."""
    difference = np.asarray(a - b)
    return _nonzero(np.where(_signed(difference) < 0, U32(0) - difference, difference))


def _minmax(pick: Callable[[Array, Array], Array], signed: bool) -> Callable[..., Pair]:
    def compute(g: Group, a: Array, b: Array) -> Pair:
        x, y = (_signed(a), _signed(b)) if signed else (np.asarray(a), np.asarray(b))
        result = pick(x, y)
        strict = x < y if pick is np.minimum else x > y
        return result.view(U32), strict

    return compute


def _shifted_add(shift: int) -> Callable[..., Pair]:
    def compute(g: Group, a: Array, b: Array) -> Pair:
        result = (_wide(a) << U64(shift)) + b
        return result.astype(U32), result > 0xFFFFFFFF

    return compute


def _bfe(a: Array, b: Array, bits: int, signed: bool) -> Array:
    mask = U32(31) if bits == 32 else U32(63)
    offset = np.asarray(b & mask).astype(U64)
    width = np.minimum(np.asarray(b >> U32(16) & U32(0x7F)).astype(U64), bits)
    if not signed:
        value = _wide(a) >> offset
        return np.where(width >= 64, value, value & ((U64(1) << np.minimum(width, 63)) - U64(1)))
    wide = _signed(a).astype(I64) if bits == 32 else _signed64(a)
    # Beyond the top of the source the field is filled with its sign.
    value = wide >> offset.astype(I64)
    left = np.maximum(64 - width.astype(I64), 0)
    return np.where(width == 0, 0, (value << np.minimum(left, 63)) >> np.minimum(left, 63)).view(U64)


def _ignore_scc(function: Callable[[Array, Array], Array]) -> Callable[..., Pair]:
    return lambda g, a, b: (function(a, b), None)


def _logic(function: Callable[[Array, Array], Array]) -> Callable[..., Pair]:
    return lambda g, a, b: _nonzero(function(a, b))


TWO_SOURCES: dict[str, Callable[..., Pair]] = {
    "s_add_u32": s_add_u32,
    "s_addc_u32": s_addc_u32,
    "s_sub_u32": s_sub_u32,
    "s_subb_u32": s_subb_u32,
    "s_add_i32": s_add_i32,
    "s_sub_i32": s_sub_i32,
    "s_absdiff_i32": s_absdiff_i32,
    "s_min_i32": _minmax(np.minimum, True),
    "s_max_i32": _minmax(np.maximum, True),
    "s_min_u32": _minmax(np.minimum, False),
    "s_max_u32": _minmax(np.maximum, False),
    "s_mul_i32": _ignore_scc(lambda a, b: a * b),
    "s_mul_hi_u32": _ignore_scc(lambda a, b: (_wide(a) * b >> U64(32)).astype(U32)),
    "s_mul_hi_i32": _ignore_scc(lambda a, b: ((_signed(a).astype(I64) * _signed(b)) >> I64(32)).astype(I32).view(U32)),
    "s_lshl1_add_u32": _shifted_add(1),
    "s_lshl2_add_u32": _shifted_add(2),
    "s_lshl3_add_u32": _shifted_add(3),
    "s_lshl4_add_u32": _shifted_add(4),
    "s_lshl_b32": _logic(lambda a, b: a << (b & U32(31))),
    "s_lshr_b32": _logic(lambda a, b: a >> (b & U32(31))),
    "s_ashr_i32": _logic(lambda a, b: (_signed(a) >> _signed(b & U32(31))).view(U32)),
    "s_and_b32": _logic(lambda a, b: a & b),
    "s_or_b32": _logic(lambda a, b: a | b),
    "s_xor_b32": _logic(lambda a, b: a ^ b),
    "s_andn2_b32": _logic(lambda a, b: a & ~b),
    "s_orn2_b32": _logic(lambda a, b: a | ~b),
    "s_nand_b32": _logic(lambda a, b: ~(a & b)),
    "s_nor_b32": _logic(lambda a, b: ~(a | b)),
    "s_xnor_b32": _logic(lambda a, b: ~(a ^ b)),
    "s_bfe_u32": _logic(lambda a, b: _bfe(a, b, 32, False).astype(U32)),
    "s_bfe_i32": _logic(lambda a, b: _bfe(a, b, 32, True).astype(U32)),
    "s_bfm_b32": _ignore_scc(lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31))),
    "s_pack_ll_b32_b16": _ignore_scc(lambda a, b: (a & U32(0xFFFF)) | b << U32(16)),
    "s_pack_lh_b32_b16": _ignore_scc(lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000))),
    "s_pack_hh_b32_b16": _ignore_scc(lambda a, b: a >> U32(16) | (b & U32(0xFFFF0000))),
}
READS_SCC = frozenset({"s_addc_u32", "s_subb_u32"})
KEEPS_SCC = frozenset(
    {"s_mul_i32", "s_mul_hi_u32", "s_mul_hi_i32", "s_bfm_b32", "s_pack_ll_b32_b16", "s_pack_lh_b32_b16"}
    | {"s_pack_hh_b32_b16"}
)


@instruction(*TWO_SOURCES, family=FAMILY, section="SOP2 instructions")
def two_sources(ins: Instruction, env: Environment) -> Operation:
    """32-bit operations of two sources."""
    function = TWO_SOURCES[ins.mnemonic]
    a, b = scalar_source(ins.operands[1]), scalar_source(ins.operands[2])
    scc_write = ins.mnemonic not in KEEPS_SCC

    def compute(g: Group) -> Array:
        result, scc = function(g, a(g), b(g))
        if scc_write:
            g.scc[...] = scc
        return result

    return _operation(ins, env, compute, width=1, scc_read=ins.mnemonic in READS_SCC, scc_write=scc_write)


# The second source of a shift or bit-field extract is 32 bits wide.
WIDE: dict[str, tuple[Callable[[Array, Array], Array], bool]] = {
    "s_and_b64": (lambda a, b: a & b, True),
    "s_or_b64": (lambda a, b: a | b, True),
    "s_xor_b64": (lambda a, b: a ^ b, True),
    "s_andn2_b64": (lambda a, b: a & ~b, True),
    "s_orn2_b64": (lambda a, b: a | ~b, True),
    "s_nand_b64": (lambda a, b: ~(a & b), True),
    "s_nor_b64": (lambda a, b: ~(a | b), True),
    "s_xnor_b64": (lambda a, b: ~(a ^ b), True),
    "s_lshl_b64": (lambda a, b: a << _wide(b & U32(63)), False),
    "s_lshr_b64": (lambda a, b: a >> _wide(b & U32(63)), False),
    "s_ashr_i64": (lambda a, b: (_signed64(a) >> (b & U32(63)).astype(I64)).view(U64), False),
    "s_bfe_u64": (lambda a, b: _bfe(a, b, 64, False), False),
    "s_bfe_i64": (lambda a, b: _bfe(a, b, 64, True), False),
}


@instruction(*WIDE, family=FAMILY, section="SOP2 instructions")
def two_sources_wide(ins: Instruction, env: Environment) -> Operation:
    """64-bit operations of two sources; SCC = result is not zero."""
    function, both_wide = WIDE[ins.mnemonic]
    a = scalar_wide_source(ins.operands[1])
    b = (scalar_wide_source if both_wide else scalar_source)(ins.operands[2])

    def compute(g: Group) -> Array:
        result = function(a(g), b(g))
        g.scc[...] = result != 0
        return result

    return _operation(ins, env, compute, width=2, scc_write=True)


@instruction("s_bfm_b64", family=FAMILY, section="S_BFM_B64")
def s_bfm_b64(ins: Instruction, env: Environment) -> Operation:
    """Mask of a width at an offset."""
    a, b = scalar_source(ins.operands[1]), scalar_source(ins.operands[2])

    def compute(g: Group) -> Array:
        return ((U64(1) << _wide(a(g) & U32(63))) - U64(1)) << _wide(b(g) & U32(63))

    return _operation(ins, env, compute, width=2)


@instruction("s_cselect_b32", "s_cselect_b64", family=FAMILY, section="S_CSELECT_B32, S_CSELECT_B64")
def s_cselect(ins: Instruction, env: Environment) -> Operation:
    """First source where SCC is set, else the second."""
    wide = ins.mnemonic.endswith("64")
    source = scalar_wide_source if wide else scalar_source
    a, b = source(ins.operands[1]), source(ins.operands[2])
    return _operation(ins, env, lambda g: np.where(g.scc, a(g), b(g)), width=2 if wide else 1, scc_read=True)


# -- one source -------------------------------------------------------------------------------------------------------


def _reverse(value: Array, bits: int) -> Array:
    value = _wide(value)
    for shift, mask in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
        value = (value >> U64(shift)) & U64(mask) | (value & U64(mask)) << U64(shift)
    value = np.asarray(value).byteswap()
    return value >> U64(64 - bits)


def _first(value: Array, bits: int, *, ones: bool, high: bool) -> Array:
    """Position of the first set (or clear) bit from the low or high end; -1 where there is none."""
    value = _wide(value)
    if not ones:
        value = ~value & U64((1 << bits) - 1)
    if high:
        value = _reverse(value, bits)
    isolated = value & (~value + U64(1))
    position = np.bitwise_count(isolated - U64(1)).astype(I32)
    return np.where(value == 0, I32(-1), position).view(U32)


def _sign_position(value: Array, bits: int) -> Array:
    """Leading bits equal to the sign, beyond it: position of the first one that differs; -1 where there is none."""
    signed = _signed(value).astype(I64) if bits == 32 else _signed64(value)
    magnitude = np.where(signed < 0, ~signed, signed).view(U64)
    return _first(magnitude, bits, ones=True, high=True)


# function, source width, result width, whether SCC becomes result != 0
ONE_SOURCE: dict[str, tuple[Callable[[Array], Array], int, int, bool]] = {
    "s_mov_b32": (lambda a: a, 1, 1, False),
    "s_mov_b64": (lambda a: a, 2, 2, False),
    "s_not_b32": (lambda a: ~a, 1, 1, True),
    "s_not_b64": (lambda a: ~a, 2, 2, True),
    "s_brev_b32": (lambda a: _reverse(a, 32).astype(U32), 1, 1, False),
    "s_brev_b64": (lambda a: _reverse(a, 64), 2, 2, False),
    "s_bcnt0_i32_b32": (lambda a: np.bitwise_count(~np.asarray(a)).astype(U32), 1, 1, True),
    "s_bcnt1_i32_b32": (lambda a: np.bitwise_count(a).astype(U32), 1, 1, True),
    "s_bcnt0_i32_b64": (lambda a: np.bitwise_count(~np.asarray(a)).astype(U32), 2, 1, True),
    "s_bcnt1_i32_b64": (lambda a: np.bitwise_count(a).astype(U32), 2, 1, True),
    "s_ff0_i32_b32": (lambda a: _first(a, 32, ones=False, high=False), 1, 1, False),
    "s_ff1_i32_b32": (lambda a: _first(a, 32, ones=True, high=False), 1, 1, False),
    "s_ff0_i32_b64": (lambda a: _first(a, 64, ones=False, high=False), 2, 1, False),
    "s_ff1_i32_b64": (lambda a: _first(a, 64, ones=True, high=False), 2, 1, False),
    "s_flbit_i32_b32": (lambda a: _first(a, 32, ones=True, high=True), 1, 1, False),
    "s_flbit_i32_b64": (lambda a: _first(a, 64, ones=True, high=True), 2, 1, False),
    "s_flbit_i32": (lambda a: _sign_position(a, 32), 1, 1, False),
    "s_flbit_i32_i64": (lambda a: _sign_position(a, 64), 2, 1, False),
    "s_sext_i32_i8": (lambda a: np.asarray(a).astype(np.int8).astype(I32).view(U32), 1, 1, False),
    "s_sext_i32_i16": (lambda a: np.asarray(a).astype(np.int16).astype(I32).view(U32), 1, 1, False),
    "s_abs_i32": (lambda a: np.where(_signed(a) < 0, U32(0) - a, a), 1, 1, True),
}


@instruction(*ONE_SOURCE, family=FAMILY, section="SOP1 instructions")
def one_source(ins: Instruction, env: Environment) -> Operation:
    """Operations of one source."""
    function, source_width, width, scc_write = ONE_SOURCE[ins.mnemonic]
    a = (scalar_source if source_width == 1 else scalar_wide_source)(ins.operands[1])

    def compute(g: Group) -> Array:
        result = function(a(g))
        if scc_write:
            g.scc[...] = result != 0
        return result

    return _operation(ins, env, compute, width=width, scc_write=scc_write)


SAVEEXEC: dict[str, Callable[[Array, Array], Array]] = {
    "and": lambda s, e: s & e,
    "or": lambda s, e: s | e,
    "xor": lambda s, e: s ^ e,
    "andn2": lambda s, e: s & ~e,
    "orn2": lambda s, e: s | ~e,
    "nand": lambda s, e: ~(s & e),
    "nor": lambda s, e: ~(s | e),
    "xnor": lambda s, e: ~(s ^ e),
    "andn1": lambda s, e: ~s & e,
    "orn1": lambda s, e: ~s | e,
}


@instruction(*(f"s_{name}_saveexec_b64" for name in SAVEEXEC), family=FAMILY, section="S_AND_SAVEEXEC_B64 and others")
def s_saveexec(ins: Instruction, env: Environment) -> Operation:
    """Save EXEC, then combine it with the source; SCC = EXEC is not zero."""
    function = SAVEEXEC[ins.mnemonic.split("_")[1]]
    target = want_register(ins.operands[0], "s", 2)
    source = scalar_wide_source(ins.operands[1])

    def run(g: Group) -> None:
        old = g.wide(EXEC_LO)
        new = np.asarray(function(source(g), old))
        g.set_wide(target.index, old)
        g.set_wide(EXEC_LO, new)
        g.scc[...] = new != 0

    exec_ids = {SCALAR_ID + EXEC_LO, SCALAR_ID + EXEC_HI}
    return Operation(
        ins,
        "salu",
        run,
        reads=env.ids(ins.operands[1]) | exec_ids,
        writes=env.ids(target) | exec_ids | {SCC_ID},
        sinks=env.ids(ins.operands[1]),
    )


@instruction("s_bitset0_b32", "s_bitset1_b32", family=FAMILY, section="S_BITSET0_B32, S_BITSET1_B32")
def s_bitset(ins: Instruction, env: Environment) -> Operation:
    """Clear or set one bit of the destination."""
    row = want_register(ins.operands[0], "s", 1).index
    source = scalar_source(ins.operands[1])
    one = ins.mnemonic == "s_bitset1_b32"

    def compute(g: Group) -> Array:
        bit = U32(1) << (source(g) & U32(31))
        return g.s[row] | bit if one else g.s[row] & ~bit

    return _operation(ins, env, compute, width=1, target_read=True)


@instruction("s_cmov_b32", "s_cmov_b64", family=FAMILY, section="S_CMOV_B32, S_CMOV_B64")
def s_cmov(ins: Instruction, env: Environment) -> Operation:
    """Move where SCC is set."""
    wide = ins.mnemonic.endswith("64")
    a = (scalar_wide_source if wide else scalar_source)(ins.operands[1])
    row = want_register(ins.operands[0], "s").index

    def compute(g: Group) -> Array:
        return np.where(g.scc, a(g), g.wide(row) if wide else g.s[row])

    return _operation(ins, env, compute, width=2 if wide else 1, scc_read=True, target_read=True)


# -- 16-bit immediates ------------------------------------------------------------------------------------------------


def _immediate16(ins: Instruction, position: int = 1) -> int:
    operand = ins.operands[position]
    if not isinstance(operand, Constant) or not isinstance(operand.value, int):
        raise Unimplemented("a 16-bit immediate is expected")
    value = operand.value & 0xFFFF
    return value - 0x10000 if value & 0x8000 else value


@instruction("s_movk_i32", "s_addk_i32", "s_mulk_i32", "s_cmovk_i32", family=FAMILY, section="SOPK instructions")
def immediate(ins: Instruction, env: Environment) -> Operation:
    """Operations with a sign-extended 16-bit immediate."""
    row = want_register(ins.operands[0], "s", 1).index
    value = U32(_immediate16(ins) & 0xFFFFFFFF)
    if ins.mnemonic == "s_movk_i32":
        return _operation(ins, env, lambda g: value, width=1)
    if ins.mnemonic == "s_mulk_i32":
        return _operation(ins, env, lambda g: g.s[row] * value, width=1, target_read=True)
    if ins.mnemonic == "s_cmovk_i32":
        return _operation(
            ins, env, lambda g: np.where(g.scc, value, g.s[row]), width=1, target_read=True, scc_read=True
        )

    def add(g: Group) -> Array:
        result, scc = s_add_i32(g, g.s[row], value)
        g.scc[...] = scc
        return result

    return _operation(ins, env, add, width=1, target_read=True, scc_write=True)


COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def _compare(ins: Instruction, env: Environment, test: Callable[[Group], Array]) -> Operation:
    def run(g: Group) -> None:
        g.scc[...] = test(g)

    return Operation(ins, "salu", run, reads=env.ids(*ins.operands), writes=[SCC_ID])


@instruction(
    *(f"s_cmp_{name}_{kind}" for name in COMPARE for kind in ("i32", "u32")),
    "s_cmp_eq_u64",
    "s_cmp_lg_u64",
    family=FAMILY,
    section="SOPC instructions",
)
def s_cmp(ins: Instruction, env: Environment) -> Operation:
    """Compare; the answer goes to SCC."""
    _, _, name, kind = ins.mnemonic.split("_")
    function = COMPARE[name]
    source = scalar_wide_source if kind == "u64" else scalar_source
    a, b = source(ins.operands[0]), source(ins.operands[1])
    if kind == "i32":
        return _compare(ins, env, lambda g: function(_signed(a(g)), _signed(b(g))))
    return _compare(ins, env, lambda g: function(a(g), b(g)))


@instruction(
    *(f"s_cmpk_{name}_{kind}" for name in COMPARE for kind in ("i32", "u32")),
    family=FAMILY,
    section="SOPK instructions",
)
def s_cmpk(ins: Instruction, env: Environment) -> Operation:
    """Compare with a 16-bit immediate: sign-extended for i32, zero-extended for u32."""
    _, _, name, kind = ins.mnemonic.split("_")
    function = COMPARE[name]
    a = scalar_source(ins.operands[0])
    if kind == "i32":
        signed = I32(_immediate16(ins))
        return _compare(ins, env, lambda g: function(_signed(a(g)), signed))
    unsigned = U32(_immediate16(ins) & 0xFFFF)
    return _compare(ins, env, lambda g: function(a(g), unsigned))


@instruction(
    "s_bitcmp0_b32",
    "s_bitcmp1_b32",
    "s_bitcmp0_b64",
    "s_bitcmp1_b64",
    family=FAMILY,
    section="S_BITCMP0_B32 and others",
)
def s_bitcmp(ins: Instruction, env: Environment) -> Operation:
    """SCC = the bit is clear (0) or set (1)."""
    wide = ins.mnemonic.endswith("64")
    a: Getter = (scalar_wide_source if wide else scalar_source)(ins.operands[0])
    b = scalar_source(ins.operands[1])
    want = int(ins.mnemonic[8])
    if wide:
        return _compare(ins, env, lambda g: (a(g) >> _wide(b(g) & U32(63)) & U64(1)) == want)
    return _compare(ins, env, lambda g: (a(g) >> (b(g) & U32(31)) & U32(1)) == want)


# -- hardware registers -----------------------------------------------------------------------------------------------


def _hwreg(operand: Any) -> tuple[int, int]:
    """Offset and size of a field of MODE."""
    match = (
        re.fullmatch(r"hwreg\(HW_REG_MODE(?:,\s*(\d+),\s*(\d+))?\)", operand.text)
        if isinstance(operand, Name)
        else None
    )
    if match is None:
        raise Unimplemented(f"hardware register {operand!r}")
    return int(match.group(1) or 0), int(match.group(2) or 32)


@instruction("s_setreg_imm32_b32", "s_setreg_b32", family=FAMILY, section="S_SETREG_B32, S_SETREG_IMM32_B32")
def s_setreg(ins: Instruction, env: Environment) -> Operation:
    """Write MODE.FP16_OVFL; other fields change rounding or denormals in the middle, which is not modelled."""
    offset, size = _hwreg(ins.operands[0])
    if (offset, size) != (MODE_FP16_OVFL, 1):
        raise Unimplemented("only MODE.FP16_OVFL may be written")
    source = scalar_source(ins.operands[1])

    def run(g: Group) -> None:
        mode = g.s[MODE_ROW]
        mode[...] = mode & U32(~(1 << offset) & 0xFFFFFFFF) | (source(g) & U32(1)) << U32(offset)

    return Operation(ins, "salu", run, reads=env.ids(ins.operands[1]))


@instruction("s_getreg_b32", family=FAMILY, section="S_GETREG_B32")
def s_getreg(ins: Instruction, env: Environment) -> Operation:
    """Read a field of MODE."""
    offset, size = _hwreg(ins.operands[1])
    mask = U32((1 << size) - 1)
    return _operation(ins, env, lambda g: g.s[MODE_ROW] >> U32(offset) & mask, width=1, sources=())
