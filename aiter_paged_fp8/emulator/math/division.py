"""The three helpers of the f32 division macro, and the scaling instructions they are built from."""

import numpy as np
from numpy.typing import NDArray

from aiter_paged_fp8.emulator.math import U32, Bool
from aiter_paged_fp8.emulator.math.floats import (
    DEFAULT_NAN,
    INFINITY,
    MAGNITUDE,
    QUIET,
    SIGN,
    as_bits,
    as_f32,
    fma_f32,
    is_nan,
    round_to_odd_sum,
    select,
    settle_nan,
)

_quietly = np.errstate(all="ignore")

# V_DIV_SCALE_F32: exponents this far apart would take the quotient's iteration out of the range; numerators with an
# exponent field at or below the second would leave its residuals subnormal; denominators from the third on have a
# reciprocal that V_RCP_F32 flushes.
_FAR_APART = 96
_TINY_NUMERATOR = 23
_HUGE_DENOMINATOR = 253
# What V_DIV_SCALE_F32 scales by and V_DIV_FMAS_F32 takes back, as a power of two.
_SCALE = 64
# V_DIV_FIXUP_F32: the quotient of exponents this far apart is below half of the smallest subnormal.
_UNDERFLOW = -150


_BIAS = 127


def _exponent(bits: U32) -> NDArray[np.int32]:
    return ((bits & INFINITY) >> np.uint32(23)).astype(np.int32)


@_quietly
def ldexp_f32(value: U32, exponent: U32, *, denorm: int = 3) -> U32:
    """V_LDEXP_F32: value * 2**exponent, the exponent a signed integer, rounded once."""
    power = np.clip(np.asarray(exponent).view(np.int32), -1000, 1000)
    scaled = np.ldexp(as_f32(np.asarray(value)).astype(np.float64), power).astype(np.float32)
    result = settle_nan(as_bits(scaled), value)
    return result if denorm & 2 else select((result & INFINITY) == 0, result & SIGN, result)


@_quietly
def div_scale_f32(s0: U32, s1: U32, s2: U32) -> tuple[U32, Bool]:
    """V_DIV_SCALE_F32: scale `s0`, which is the denominator `s1` or the numerator `s2`.

    The manual's conditions cannot all be meant as printed: no float's reciprocal is a subnormal double, and scaling a
    huge denominator up makes it infinite. What is done here is what makes the division macro come out right and what
    emulators fitted to hardware of the family do: the quotient underflows where the exponents are 96 apart, as
    it overflows; a huge denominator is scaled down.

    Returns
    -------
    result : ndarray of uint32
    vcc : ndarray of bool
        The quotient needs scaling back (V_DIV_FMAS_F32).
    """
    s0, s1, s2 = np.broadcast_arrays(s0, s1, s2)
    bottom, top = _exponent(s1), _exponent(s2)
    is_denominator, is_numerator = as_f32(s0) == as_f32(s1), as_f32(s0) == as_f32(s2)
    zero = ((s1 & MAGNITUDE) == 0) | ((s2 & MAGNITUDE) == 0)
    overflows, underflows = top - bottom >= _FAR_APART, top - bottom <= -_FAR_APART
    huge = bottom >= _HUGE_DENOMINATOR
    tiny = (bottom == 0) | (top <= _TINY_NUMERATOR)

    nothing = np.zeros(s0.shape, np.int32)
    # First match wins.
    shift = np.select(
        [overflows, underflows & huge, underflows, huge, tiny],
        [is_denominator * _SCALE, is_denominator * -_SCALE, is_numerator * _SCALE, nothing - _SCALE, nothing + _SCALE],
        0,
    ).astype(np.int32)
    result = np.where(shift != 0, ldexp_f32(s0, shift.view(np.uint32)), s0)
    return np.where(zero, DEFAULT_NAN, result), overflows | underflows


@_quietly
def div_fmas_f32(s0: U32, s1: U32, s2: U32, vcc: Bool) -> U32:
    """V_DIV_FMAS_F32: FMA, scaled back where `vcc` says that V_DIV_SCALE_F32 scaled, all rounded once.

    The CDNA4 manual multiplies by 2**32, which takes back neither of V_DIV_SCALE_F32's two scalings. As later manuals
    have it, `s2`, the quotient so far, tells them apart: from 2 upwards the denominator was scaled and the quotient is
    too small by 2**64, below that the numerator was.
    """
    result = fma_f32(s0, s1, s2)
    if not vcc.any():
        return result
    power = np.where(vcc, np.where(_exponent(s2) > _BIAS, _SCALE, -_SCALE), 0)
    product = as_f32(s0).astype(np.float64) * as_f32(s1).astype(np.float64)
    total = round_to_odd_sum(product, as_f32(s2).astype(np.float64))
    return settle_nan(as_bits(np.ldexp(total, power).astype(np.float32)), s0, s1, s2)


@_quietly
def div_fixup_f32(s0: U32, s1: U32, s2: U32) -> U32:
    """V_DIV_FIXUP_F32: the quotient `s0` of numerator `s2` and denominator `s1`, special cases put right.

    The manual's condition for an overflow, an exponent of `s1` that only infinities and NaNs have, can't hold where it
    stands; a NaN quotient of two finite operands is what an overflow in the macro leaves.
    """
    s0, s1, s2 = np.broadcast_arrays(s0, s1, s2)
    sign = (s1 ^ s2) & SIGN
    bottom, top = s1 & MAGNITUDE, s2 & MAGNITUDE
    return np.select(
        [
            is_nan(s2),
            is_nan(s1),
            (bottom == 0) & (top == 0) | (bottom == INFINITY) & (top == INFINITY),
            (bottom == 0) | (top == INFINITY),
            (bottom == INFINITY) | (top == 0),
            _exponent(s2) - _exponent(s1) < _UNDERFLOW,
            is_nan(s0),
        ],
        [s2 | QUIET, s1 | QUIET, np.full(s0.shape, DEFAULT_NAN), sign | INFINITY, sign, sign, sign | INFINITY],
        sign | (s0 & MAGNITUDE),
    )
