"""Functions of one float: exp2, log2, reciprocals and roots, sine and cosine, rounding to integers, frexp.

The transcendental ones are evaluated in f64 and rounded once, which is within the one ulp that the manual grants (12.8)
but is not, bit for bit, what the hardware's tables give. The f32 ones flush subnormal inputs and results whatever the
MODE; the exact ones, from `floor_f32` on, do not.
"""

import numpy as np
from numpy.typing import NDArray

from aiter_paged_fp8.emulator.math import U32
from aiter_paged_fp8.emulator.math.floats import (
    INFINITY,
    MAGNITUDE,
    SMALLEST_NORMAL,
    as_bits,
    as_f32,
    flush,
    select,
    settle_nan,
)

F64 = NDArray[np.float64]

_quietly = np.errstate(all="ignore")

# V_FRACT_F32: the largest float below 1.
_BELOW_ONE = np.uint32(0x3F7FFFFF)


def _input(value: U32) -> F64:
    return as_f32(flush(np.asarray(value))).astype(np.float64)


def _output(wide: F64, value: U32) -> U32:
    """Round to f32, flush, and give NaNs their bits."""
    result = as_bits(wide.astype(np.float32))
    magnitude = result & MAGNITUDE
    # Zeros wrap around: one comparison for all that needs a second look.
    if np.count_nonzero((magnitude - SMALLEST_NORMAL) > INFINITY - SMALLEST_NORMAL):
        result = settle_nan(flush(result), np.asarray(value))
    return result


@_quietly
def exp_f32(value: U32) -> U32:
    """V_EXP_F32: 2**x."""
    # A subnormal argument gives 1 flushed or not.
    return _output(np.exp2(as_f32(np.asarray(value)).astype(np.float64)), value)


@_quietly
def log_f32(value: U32) -> U32:
    """V_LOG_F32: log2; -infinity for either zero, NaN below."""
    return _output(np.log2(_input(value)), value)


@_quietly
def rcp_f32(value: U32) -> U32:
    """V_RCP_F32 and V_RCP_IFLAG_F32."""
    return _output(1.0 / _input(value), value)


@_quietly
def rsq_f32(value: U32) -> U32:
    """V_RSQ_F32; infinity of the same sign for a zero, NaN below."""
    wide = _input(value)
    return _output(1.0 / np.sqrt(wide), value)


@_quietly
def sqrt_f32(value: U32) -> U32:
    """V_SQRT_F32; -0 for -0, NaN below."""
    return _output(np.sqrt(_input(value)), value)


@_quietly
def _quarters(value: U32) -> tuple[F64, NDArray[np.int64]]:
    """An angle in turns as a rest of at most half a quarter turn, in radians, and a number of quarters modulo 4."""
    quarters = np.fmod(as_f32(np.asarray(value)).astype(np.float64), 1.0) * 4
    nearest = np.rint(quarters)
    return (quarters - nearest) * (np.pi / 2), np.nan_to_num(nearest).astype(np.int64) % 4


def _trigonometric(value: U32, ahead: int) -> U32:
    """Sine of an angle in turns, `ahead` quarter turns on."""
    rest, quarter = _quarters(value)
    quarter = (quarter + ahead) % 4
    wide = np.where(quarter % 2 == 1, np.cos(rest), np.sin(rest))
    wide = np.where(quarter >= 2, -wide, wide)
    return settle_nan(as_bits(wide.astype(np.float32)), np.asarray(value))


def sin_f32(value: U32) -> U32:
    """V_SIN_F32: sine of an angle in turns; multiples of half a turn give +0, -0 gives itself."""
    value = np.asarray(value)
    result = _trigonometric(value, 0)
    return select((result & MAGNITUDE) == 0, select((value & MAGNITUDE) == 0, value, result & MAGNITUDE), result)


def cos_f32(value: U32) -> U32:
    """V_COS_F32: cosine of an angle in turns; odd quarter turns give +0."""
    result = _trigonometric(value, 1)
    return select((result & MAGNITUDE) == 0, result & MAGNITUDE, result)


def _whole(rounder: np.ufunc, value: U32) -> U32:
    value = np.asarray(value)
    with np.errstate(all="ignore"):
        return settle_nan(as_bits(rounder(as_f32(value))), value)


def trunc_f32(value: U32) -> U32:
    """V_TRUNC_F32."""
    return _whole(np.trunc, value)


def ceil_f32(value: U32) -> U32:
    """V_CEIL_F32."""
    return _whole(np.ceil, value)


def floor_f32(value: U32) -> U32:
    """V_FLOOR_F32."""
    return _whole(np.floor, value)


def rndne_f32(value: U32) -> U32:
    """V_RNDNE_F32."""
    return _whole(np.rint, value)


@_quietly
def fract_f32(value: U32) -> U32:
    """V_FRACT_F32: x - floor(x), never above the largest float below 1; NaN for infinities."""
    value = np.asarray(value)
    x = as_f32(value)
    result = as_bits(x - np.floor(x))
    result = select(as_f32(result) >= np.float32(1), _BELOW_ONE, result)
    return settle_nan(result, value)


def frexp_exp_i32_f32(value: U32) -> U32:
    """V_FREXP_EXP_I32_F32: exponent of the significand in [0.5, 1); 0 for infinities and NaNs."""
    value = np.asarray(value)
    finite = (value & MAGNITUDE) < INFINITY
    with np.errstate(all="ignore"):
        exponent = np.frexp(as_f32(value))[1]
    return np.where(finite, exponent, 0).astype(np.int32).view(np.uint32)


def frexp_mant_f32(value: U32) -> U32:
    """V_FREXP_MANT_F32: the significand in [0.5, 1) with its sign; infinities and NaNs as they are."""
    value = np.asarray(value)
    finite = (value & MAGNITUDE) < INFINITY
    with np.errstate(all="ignore"):
        mantissa = as_bits(np.frexp(as_f32(value))[0])
    return np.where(finite, mantissa, value)
