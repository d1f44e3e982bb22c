"""Half precision and 16-bit integers, plain and packed, and dot products (manual, VOP2, VOP3 and VOP3P).

Plain 16-bit results clear the upper half of the register on this target. Packed ones compute both halves; op_sel and
op_sel_hi choose the source's half for either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..math import conversion, floats, halves
from ..operation import Environment, Operation, Unimplemented, instruction
from ..state import Group
from ..syntax import Constant, Instruction, Operand, Register
from .arithmetic import denormals, ieee
from .operands import Getter, vector_source, want_register, write_vector
from .valu import DPP_MODIFIERS, SDWA_MODIFIERS, bare, output_modifiers, source, valu

FAMILY = "half"
U32 = np.uint32
LOW = U32(0xFFFF)
Array = Any


def _signed(value: Array) -> Array:
    return np.asarray(value & LOW).astype(np.uint16).view(np.int16).astype(np.int32)


def _denormals(env: Environment) -> int:
    """MODE's denormal field for 16 and 64 bits."""
    return env.program.metadata.directives.get("float_denorm_mode_16_64", 3)


def _clamps(env: Environment) -> bool:
    return bool(env.program.metadata.directives.get("fp16_overflow", 0))


def _mode(env: Environment, function: Callable[..., Array], kind: str) -> Callable[..., Array]:
    """Bind MODE: "a" arithmetic, "m" minimum and maximum, "" nothing."""
    function = bare(function)
    if kind == "a":
        return partial(function, overflow_clamps=_clamps(env), denorm=_denormals(env))
    if kind == "m":
        return partial(function, ieee=ieee(env), denorm=_denormals(env))
    return function


# function of 16-bit sources, letters, what of MODE it depends on
PLAIN: dict[str, tuple[Callable[..., Array], str, str]] = {
    "v_add_f16": (halves.add_f16, "hh", "a"),
    "v_sub_f16": (halves.sub_f16, "hh", "a"),
    "v_subrev_f16": (lambda a, b, **mode: halves.sub_f16(b, a, **mode), "hh", "a"),
    "v_mul_f16": (halves.mul_f16, "hh", "a"),
    "v_fma_f16": (halves.fma_f16, "hhh", "a"),
    "v_min_f16": (halves.min_f16, "hh", "m"),
    "v_max_f16": (halves.max_f16, "hh", "m"),
    "v_exp_f16": (halves.exp_f16, "h", ""),
    "v_log_f16": (halves.log_f16, "h", ""),
    "v_rcp_f16": (halves.rcp_f16, "h", ""),
    "v_sqrt_f16": (halves.sqrt_f16, "h", ""),
    "v_rsq_f16": (halves.rsq_f16, "h", ""),
    "v_add_u16": (lambda a, b: a + b, "ww", ""),
    "v_sub_u16": (lambda a, b: a - b, "ww", ""),
    "v_subrev_u16": (lambda a, b: b - a, "ww", ""),
    "v_mul_lo_u16": (lambda a, b: a * b, "ww", ""),
    "v_min_u16": (np.minimum, "ww", ""),
    "v_max_u16": (np.maximum, "ww", ""),
    "v_min_i16": (lambda a, b: np.minimum(_signed(a), _signed(b)).view(U32), "ww", ""),
    "v_max_i16": (lambda a, b: np.maximum(_signed(a), _signed(b)).view(U32), "ww", ""),
    "v_lshlrev_b16": (lambda a, b: b << (a & U32(15)), "ww", ""),
    "v_lshrrev_b16": (lambda a, b: b >> (a & U32(15)), "ww", ""),
    "v_ashrrev_i16": (lambda a, b: (_signed(b) >> _signed(a & U32(15))).view(U32), "ww", ""),
    "v_mad_u16": (lambda a, b, c: a * b + c, "www", ""),
}


@instruction(
    *PLAIN, family=FAMILY, section="V_ADD_F16 and others", modifiers=DPP_MODIFIERS | SDWA_MODIFIERS | {"op_sel"}
)
def plain(ins: Instruction, env: Environment) -> Operation:
    """16-bit operations on one half of the sources."""
    function, kinds, mode = PLAIN[ins.mnemonic]
    picks = ins.bits("op_sel", ())
    if picks and picks[-1] and len(picks) == len(kinds) + 1:
        raise Unimplemented("a 16-bit result in the upper half")
    bound = _mode(env, function, mode)
    kind = "trans" if ins.mnemonic.split("_")[1] in ("exp", "log", "rcp", "sqrt", "rsq") else "valu"
    return valu(ins, env, lambda *sources: np.asarray(bound(*sources)) & LOW, kinds, result="z", kind=kind)


PACKED: dict[str, tuple[Callable[..., Array], int, str]] = {
    "v_pk_add_f16": (halves.add_f16, 2, "a"),
    "v_pk_mul_f16": (halves.mul_f16, 2, "a"),
    "v_pk_fma_f16": (halves.fma_f16, 3, "a"),
    "v_pk_min_f16": (halves.min_f16, 2, "m"),
    "v_pk_max_f16": (halves.max_f16, 2, "m"),
    "v_pk_add_u16": (lambda a, b: a + b, 2, ""),
    "v_pk_sub_u16": (lambda a, b: a - b, 2, ""),
    "v_pk_add_i16": (lambda a, b: a + b, 2, ""),
    "v_pk_sub_i16": (lambda a, b: a - b, 2, ""),
    "v_pk_mul_lo_u16": (lambda a, b: a * b, 2, ""),
    "v_pk_mad_u16": (lambda a, b, c: a * b + c, 3, ""),
    "v_pk_min_u16": (np.minimum, 2, ""),
    "v_pk_max_u16": (np.maximum, 2, ""),
    "v_pk_min_i16": (lambda a, b: np.minimum(_signed(a), _signed(b)).view(U32), 2, ""),
    "v_pk_max_i16": (lambda a, b: np.maximum(_signed(a), _signed(b)).view(U32), 2, ""),
    "v_pk_lshlrev_b16": (lambda a, b: b << (a & U32(15)), 2, ""),
    "v_pk_lshrrev_b16": (lambda a, b: b >> (a & U32(15)), 2, ""),
    "v_pk_ashrrev_i16": (lambda a, b: (_signed(b) >> _signed(a & U32(15))).view(U32), 2, ""),
}


def _packed_half(env: Environment, operand: Operand, high: int, negate: bool) -> Getter:
    """One half of a packed source. A constant stands in the low half alone."""
    sign = U32(0x8000 if negate else 0)
    if isinstance(operand, Constant):
        value = U32((0 if high else operand.bits16()) ^ int(sign))
        return lambda g: value
    if isinstance(operand, Register) and (operand.neg or operand.abs):
        raise Unimplemented("neg or abs of a packed source")
    get = vector_source(env, operand, "u32")
    if high:
        return lambda g: (get(g) >> U32(16)) ^ sign
    return lambda g: (get(g) & LOW) ^ sign


@instruction(
    *PACKED,
    family=FAMILY,
    section="V_PK_ADD_F16 and others",
    modifiers=["op_sel", "op_sel_hi", "neg_lo", "neg_hi"],
)
def packed(ins: Instruction, env: Environment) -> Operation:
    """Two 16-bit operations."""
    function, count, mode = PACKED[ins.mnemonic]
    bound = _mode(env, function, mode)
    target = want_register(ins.operands[0], "va", 1)
    row = env.row(target)
    operands = ins.operands[1 : 1 + count]
    halves_of = (
        (ins.bits("op_sel", (0,) * count), ins.bits("neg_lo", (0,) * count)),
        (ins.bits("op_sel_hi", (1,) * count), ins.bits("neg_hi", (0,) * count)),
    )
    getters = [
        [_packed_half(env, operand, picks[k], bool(signs[k])) for k, operand in enumerate(operands)]
        for picks, signs in halves_of
    ]

    def run(g: Group) -> None:
        low, high = (np.asarray(bound(*[get(g) for get in part])) & LOW for part in getters)
        write_vector(g, row, low | high << U32(16))

    return Operation(ins, "valu", run, reads=env.ids(*operands), writes=env.ids(target))


DOTS: dict[str, Callable[..., Array]] = {
    "v_dot2_f32_f16": halves.dot2_f32_f16,
    "v_dot2_f32_bf16": halves.dot2_f32_bf16,
}


@instruction(*DOTS, family=FAMILY, section="V_DOT2_F32_F16, V_DOT2_F32_BF16")
def dot(ins: Instruction, env: Environment) -> Operation:
    """Two products and a float, summed."""
    return valu(ins, env, DOTS[ins.mnemonic], "uuf", result="f")


@instruction("v_dot2c_f32_bf16", family=FAMILY, section="V_DOT2C_F32_BF16", modifiers=DPP_MODIFIERS)
def dot_accumulate(ins: Instruction, env: Environment) -> Operation:
    """Two products added to the destination."""
    return valu(ins, env, halves.dot2c_f32_bf16, "uuf", result="f", target_is_source=True)


COMPARISONS = ("lt", "eq", "le", "gt", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt")


@instruction(*(f"v_cmp_{name}_f16" for name in COMPARISONS), family=FAMILY, section="VOPC instructions")
def compare(ins: Instruction, env: Environment) -> Operation:
    """Compare halves; inactive lanes give 0."""
    name = ins.mnemonic.split("_")[2]
    target = want_register(ins.operands[0], "s", 2)
    a, b = source(env, ins, 1, "h"), source(env, ins, 2, "h")
    mode = _denormals(env)

    def run(g: Group) -> None:
        answer = np.broadcast_to(halves.cmp_f16(name, a(g), b(g), denorm=mode), g.exec.shape)  # type: ignore[arg-type]
        g.set_mask(target.index, answer & g.exec)

    return Operation(ins, "valu", run, reads=env.ids(*ins.operands[1:]), writes=env.ids(target))


@instruction(
    "v_fma_mix_f32",
    family=FAMILY,
    section="V_FMA_MIX_F32",
    modifiers=["op_sel", "op_sel_hi", "clamp"],
)
def fma_mix(ins: Instruction, env: Environment) -> Operation:
    """Single-rounded multiply-add of floats and halves: op_sel_hi makes a source a half, op_sel picks which one."""
    is_half, high = ins.bits("op_sel_hi", (0, 0, 0)), ins.bits("op_sel", (0, 0, 0))

    def widened(position: int) -> Getter:
        operand = ins.operands[position]
        k = position - 1
        if not is_half[k]:
            return source(env, ins, position, "f")
        if not isinstance(operand, Register):
            raise Unimplemented("a constant half")
        bits = vector_source(env, Register(operand.file, operand.index), "u32")
        shift, absolute, neg = U32(16 if high[k] else 0), operand.abs, operand.neg

        def get(g: Group) -> Array:
            value = conversion.cvt_f32_f16((bits(g) >> shift) & LOW, denorm=_denormals(env))
            if absolute:
                value = value & U32(0x7FFFFFFF)
            return value ^ U32(0x80000000) if neg else value

        return get

    row = env.row(want_register(ins.operands[0], "va", 1))
    getters = [widened(position) for position in (1, 2, 3)]
    mode, finish = denormals(env), output_modifiers(ins, env)

    def run(g: Group) -> None:
        value = floats.fma_f32(*[np.asarray(get(g)) for get in getters], denorm=mode)
        write_vector(g, row, finish(value) if finish is not None else value)

    return Operation(ins, "valu", run, reads=env.ids(*ins.operands[1:]), writes=env.ids(ins.operands[0]))
