"""Vector ALU: float arithmetic (manual, "Vector ALU operations"); its NaN and denormal rules are ``math.floats``'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..math import division, floats, functions
from ..operation import Environment, Operation, Unimplemented, instruction
from ..state import Group
from ..syntax import Constant, Instruction
from .operands import mask_source, want_register, write_vector
from .valu import FLOAT_MODIFIERS, source, valu

FAMILY = "arithmetic"
U32 = np.uint32
ZERO = np.float32(0)
# Elements from which on an operation costs more than its call.
MANY = 4096
Array = Any


def denormals(env: Environment) -> int:
    """MODE's denormal field for f32, as the kernel's descriptor sets it."""
    return env.program.metadata.directives.get("float_denorm_mode_32", 3)


def ieee(env: Environment) -> bool:
    """MODE.IEEE: minimum and maximum quiet a signalling NaN."""
    return bool(env.program.metadata.directives.get("ieee_mode", 1))


def holds_nan(values: Array) -> bool:
    """Whether any element is a NaN: their squares' sum is one then alone, and costs a third of a maximum."""
    total = np.vdot(values, values)
    return bool(total != total)


def holds_zero(values: Array) -> bool:
    """Whether any element is a zero of either sign."""
    # Counting floats takes one call, and time for each of them.
    found = values if values.size < MANY else values != ZERO
    return bool(np.count_nonzero(found) != values.size)


def quick(operate: np.ufunc, exact: Callable[..., Array]) -> Callable[..., Array]:
    """An f32 operation by the host's own, whose result is right unless it holds a NaN; then by ``exact``."""

    def compute(a: Array, b: Array) -> Array:
        result = operate(a.view(np.float32), b.view(np.float32))
        return exact(a, b) if holds_nan(result) else result.view(U32)

    return compute


QUICK: dict[str, Callable[..., Array]] = {
    "add": quick(np.add, floats.add_f32),
    "sub": quick(np.subtract, floats.sub_f32),
    "mul": quick(np.multiply, floats.mul_f32),
}


def quick_extreme(pick: np.ufunc, exact: Callable[..., Array]) -> Callable[..., Array]:
    """Minimum or maximum by the host's own, whose result is right unless it holds a NaN or a zero (of which sign?)."""

    def compute(*operands: Array) -> Array:
        result = pick(operands[0].view(np.float32), operands[1].view(np.float32))
        for operand in operands[2:]:
            pick(result, operand.view(np.float32), out=result)
        if not holds_nan(result) and not holds_zero(result):
            return result.view(U32)
        return exact(*operands)

    return compute


# Of a double's bits, those that rounding to float drops, and their pattern halfway between two floats.
DROPPED, HALFWAY = np.uint64((1 << 29) - 1), np.uint64(1 << 28)
TINY = np.float32(2.0**-126)
# One in so many results: fewer ties are looked at by themselves.
FEW_TIES = 64


def quick_fma(a: Array, b: Array, c: Array) -> Array:
    """Single-rounded a * b + c.

    The product is exact in double. Rounding twice is right unless the double was rounded to lie halfway between two
    floats, or the result is subnormal, where halves lie elsewhere; those cases and NaNs go to the exact function.
    """
    product = np.multiply(a.view(np.float32), b.view(np.float32), dtype=np.float64)
    addend = c.view(np.float32)
    total = np.asarray(np.add(product, addend))
    result = total.astype(np.float32)
    lowest = np.minimum.reduce(np.abs(result), axis=None)
    # Also what has been rounded up to the smallest normal number.
    if lowest <= TINY:
        size = np.abs(total)
        if np.count_nonzero((size <= TINY) & (size > 0)):
            return floats.fma_f32(a, b, c)
        lowest = np.minimum.reduce(size, axis=None)
    if lowest != lowest:
        return floats.fma_f32(a, b, c)
    halfway = total.view(np.uint64) & DROPPED == HALFWAY
    ties = np.count_nonzero(halfway)
    if ties:
        if ties * FEW_TIES < halfway.size:
            at = np.nonzero(halfway)
            total, product, addend = (np.broadcast_to(part, result.shape)[at] for part in (total, product, addend))
            halfway = halfway[at]
        # What the sum in double left out, exactly: only then does a tie break the wrong way.
        rest = total - product
        error = product - (total - rest)
        error += addend - rest
        if np.count_nonzero(halfway & (error != 0)):
            return floats.fma_f32(a, b, c)
    return result.view(U32)


def _reverse(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, b, **mode: function(b, a, **mode)


FAST: dict[Callable[..., Array], Callable[..., Array]] = {
    floats.add_f32: QUICK["add"],
    floats.sub_f32: QUICK["sub"],
    floats.mul_f32: QUICK["mul"],
    floats.fma_f32: quick_fma,
    floats.min_f32: quick_extreme(np.minimum, floats.min_f32),
    floats.max_f32: quick_extreme(np.maximum, floats.max_f32),
    floats.min3_f32: quick_extreme(np.minimum, floats.min3_f32),
    floats.max3_f32: quick_extreme(np.maximum, floats.max3_f32),
}

# function, letters, whether the destination is the last source, takes the denormal mode, takes MODE.IEEE
TWO: dict[str, tuple[Callable[..., Array], str, bool, bool]] = {
    "v_add_f32": (floats.add_f32, "ff", True, False),
    "v_sub_f32": (floats.sub_f32, "ff", True, False),
    "v_subrev_f32": (_reverse(floats.sub_f32), "ff", True, False),
    "v_mul_f32": (floats.mul_f32, "ff", True, False),
    "v_mul_legacy_f32": (floats.mul_legacy_f32, "ff", True, False),
    "v_min_f32": (floats.min_f32, "ff", True, True),
    "v_max_f32": (floats.max_f32, "ff", True, True),
    "v_fma_f32": (floats.fma_f32, "fff", True, False),
    "v_min3_f32": (floats.min3_f32, "fff", True, True),
    "v_max3_f32": (floats.max3_f32, "fff", True, True),
    "v_med3_f32": (floats.med3_f32, "fff", True, True),
    "v_minimum3_f32": (floats.minimum3_f32, "fff", True, False),
    "v_maximum3_f32": (floats.maximum3_f32, "fff", True, False),
    "v_rndne_f32": (functions.rndne_f32, "f", False, False),
    "v_trunc_f32": (functions.trunc_f32, "f", False, False),
    "v_floor_f32": (functions.floor_f32, "f", False, False),
    "v_ceil_f32": (functions.ceil_f32, "f", False, False),
    "v_fract_f32": (functions.fract_f32, "f", False, False),
    "v_frexp_mant_f32": (functions.frexp_mant_f32, "f", False, False),
    "v_div_fixup_f32": (division.div_fixup_f32, "fff", False, False),
}


def _moded(env: Environment, function: Callable[..., Array], denorm: bool, with_ieee: bool) -> Callable[..., Array]:
    mode: dict[str, Any] = {}
    if denormals(env) == 3:
        fast = FAST.get(function)
        if fast is not None and (not with_ieee or ieee(env)):
            return fast
    if denorm and denormals(env) != 3:
        mode["denorm"] = denormals(env)
    if with_ieee and not ieee(env):
        mode["ieee"] = False
    return partial(function, **mode) if mode else function


@instruction(*TWO, family=FAMILY, section="VOP1, VOP2 and VOP3 instructions", modifiers=FLOAT_MODIFIERS)
def arithmetic(ins: Instruction, env: Environment) -> Operation:
    """f32 in, f32 out."""
    function, kinds, denorm, with_ieee = TWO[ins.mnemonic]
    return valu(ins, env, _moded(env, function, denorm, with_ieee), kinds, result="f")


TRANSCENDENTAL: dict[str, Callable[..., Array]] = {
    "v_exp_f32": functions.exp_f32,
    "v_log_f32": functions.log_f32,
    "v_rcp_f32": functions.rcp_f32,
    "v_rcp_iflag_f32": functions.rcp_f32,
    "v_rsq_f32": functions.rsq_f32,
    "v_sqrt_f32": functions.sqrt_f32,
    "v_sin_f32": functions.sin_f32,
    "v_cos_f32": functions.cos_f32,
}


@instruction(*TRANSCENDENTAL, family=FAMILY, section="V_EXP_F32 and others", modifiers=FLOAT_MODIFIERS)
def transcendental(ins: Instruction, env: Environment) -> Operation:
    """Quarter-rate functions of one float; about 1 ulp on hardware, nearest here."""
    return valu(ins, env, TRANSCENDENTAL[ins.mnemonic], "f", result="f", kind="trans")


@instruction("v_fmac_f32", family=FAMILY, section="V_FMAC_F32", modifiers=FLOAT_MODIFIERS)
def v_fmac_f32(ins: Instruction, env: Environment) -> Operation:
    """Multiply-add to the destination, rounded once."""
    return valu(ins, env, _moded(env, floats.fma_f32, True, False), "fff", result="f", target_is_source=True)


@instruction("v_fmamk_f32", "v_fmaak_f32", family=FAMILY, section="V_FMAMK_F32, V_FMAAK_F32")
def v_fma_literal(ins: Instruction, env: Environment) -> Operation:
    """Multiply-add with a literal: FMAMK multiplies by it, FMAAK adds it; the operands stand in source order."""
    literal = ins.operands[2 if ins.mnemonic == "v_fmamk_f32" else 3]
    if not isinstance(literal, Constant):
        raise Unimplemented("a literal is expected")
    function = _moded(env, floats.fma_f32, True, False)
    return valu(ins, env, function, "fff", result="f")


@instruction("v_ldexp_f32", family=FAMILY, section="V_LDEXP_F32", modifiers=FLOAT_MODIFIERS)
def v_ldexp_f32(ins: Instruction, env: Environment) -> Operation:
    """Multiply by a power of two."""
    return valu(ins, env, division.ldexp_f32, "fu", result="f")


@instruction("v_frexp_exp_i32_f32", family=FAMILY, section="V_FREXP_EXP_I32_F32", modifiers=FLOAT_MODIFIERS)
def v_frexp_exp_i32_f32(ins: Instruction, env: Environment) -> Operation:
    """Exponent of a float."""
    return valu(ins, env, functions.frexp_exp_i32_f32, "f")


@instruction("v_div_scale_f32", family=FAMILY, section="V_DIV_SCALE_F32")
def v_div_scale_f32(ins: Instruction, env: Environment) -> Operation:
    """Scale an operand of a division; the lanes that need correction go to a scalar pair."""
    row = env.row(want_register(ins.operands[0], "v", 1))
    out = want_register(ins.operands[1], "s", 2)
    getters = [source(env, ins, position, "f") for position in (2, 3, 4)]

    def run(g: Group) -> None:
        a, b, c = np.broadcast_arrays(*[get(g) for get in getters])
        value, flag = division.div_scale_f32(a, b, c)
        active = g.exec
        write_vector(g, row, value)
        g.set_mask(out.index, np.broadcast_to(flag, active.shape) & active)

    return Operation(ins, "valu", run, reads=env.ids(*ins.operands[2:]), writes=env.ids(*ins.operands[:2]))


@instruction("v_div_fmas_f32", family=FAMILY, section="V_DIV_FMAS_F32", modifiers=FLOAT_MODIFIERS)
def v_div_fmas_f32(ins: Instruction, env: Environment) -> Operation:
    """Multiply-add that undoes V_DIV_SCALE's scaling where VCC says so."""
    vcc = want_vcc()
    mask = mask_source(vcc)
    row = env.row(want_register(ins.operands[0], "v", 1))
    getters = [source(env, ins, position, "f") for position in (1, 2, 3)]

    def run(g: Group) -> None:
        a, b, c = np.broadcast_arrays(*[get(g) for get in getters])
        write_vector(g, row, division.div_fmas_f32(a, b, c, np.broadcast_to(mask(g), np.shape(a))))

    return Operation(ins, "valu", run, reads=env.ids(*ins.operands[1:], vcc), writes=env.ids(ins.operands[0]))


def want_vcc() -> Any:
    """VCC as an implied operand."""
    from ..syntax import VCC_LO, Register

    return Register("s", VCC_LO, 2)
