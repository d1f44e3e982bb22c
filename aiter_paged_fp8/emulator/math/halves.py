"""f16 arithmetic, and products of f16 and bf16 pairs summed in f32.

An f16 is in the low half of a lane; what is above it is ignored, and zero in results. Packed instructions call these
functions once per half. `denorm` is MODE's double/half field, to nearest even the only rounding.

Sums and products are taken in f32, which has more than twice the bits of an f16, so that rounding twice is rounding
once. For the same reason fused ones are taken in f64, where the sum of an f16 and a product of two is exact unless the
product is too small to matter.
"""

from collections.abc import Callable

import numpy as np

from aiter_paged_fp8.emulator.math import U32, Bool
from aiter_paged_fp8.emulator.math.conversion import cvt_f16_f32, cvt_f32_bf16, cvt_f32_f16, flush_f16, high, low
from aiter_paged_fp8.emulator.math.floats import (
    DEFAULT_NAN,
    Comparison,
    add_f32,
    as_f32,
    compare_values,
    fma_f32,
    is_nan,
    max_f32,
    min_f32,
    mul_f32,
    select,
    sub_f32,
)

_quietly = np.errstate(all="ignore")

_F16_QUIET = np.uint32(0x0200)
_F16_NAN = np.uint32(0x7E00)


def _binary(operation: Callable[[U32, U32], U32], s0: U32, s1: U32, overflow_clamps: bool, denorm: int) -> U32:
    wide = operation(cvt_f32_f16(s0, denorm=denorm), cvt_f32_f16(s1, denorm=denorm))
    return cvt_f16_f32(wide, overflow_clamps=overflow_clamps, denorm=denorm)


def add_f16(s0: U32, s1: U32, *, overflow_clamps: bool = False, denorm: int = 3) -> U32:
    """V_ADD_F16, either half of V_PK_ADD_F16."""
    return _binary(add_f32, s0, s1, overflow_clamps, denorm)


def sub_f16(s0: U32, s1: U32, *, overflow_clamps: bool = False, denorm: int = 3) -> U32:
    """V_SUB_F16."""
    return _binary(sub_f32, s0, s1, overflow_clamps, denorm)


def mul_f16(s0: U32, s1: U32, *, overflow_clamps: bool = False, denorm: int = 3) -> U32:
    """V_MUL_F16, either half of V_PK_MUL_F16."""
    return _binary(mul_f32, s0, s1, overflow_clamps, denorm)


@_quietly
def fma_f16(s0: U32, s1: U32, s2: U32, *, overflow_clamps: bool = False, denorm: int = 3) -> U32:
    """V_FMA_F16, either half of V_PK_FMA_F16: rounded once."""
    a, b, c = (cvt_f32_f16(s, denorm=denorm) for s in (s0, s1, s2))
    product = as_f32(a).astype(np.float64) * as_f32(b)
    total = product + as_f32(c)
    half = total.astype(np.float16).view(np.uint16).astype(np.uint32)
    # NaNs, and the clamping of overflows, by way of f32.
    special = (half & np.uint32(0x7C00)) == np.uint32(0x7C00)
    if special.any():
        wide = fma_f32(a, b, c)
        half = select(special, cvt_f16_f32(wide, overflow_clamps=overflow_clamps), half)
    return half if denorm & 2 else flush_f16(half)


def _widen(value: U32) -> U32:
    """f16 to f32 that leaves a signalling NaN signalling."""
    half = low(value)
    wide = cvt_f32_f16(half)
    quieted = is_nan(wide) & ((half & _F16_QUIET) == 0)
    return wide & ~(quieted.astype(np.uint32) << np.uint32(22))


def _pick(choose: Callable[..., U32], s0: U32, s1: U32, ieee: bool, denorm: int) -> U32:
    if not denorm & 1:
        s0, s1 = flush_f16(low(s0)), flush_f16(low(s1))
    wide = choose(_widen(s0), _widen(s1), ieee=ieee)
    half = cvt_f16_f32(wide)
    # What was chosen without being touched keeps its bits.
    signalling = is_nan(wide) & ((wide >> np.uint32(13)) & _F16_QUIET == 0)
    half = half & ~(signalling.astype(np.uint32) << np.uint32(9))
    return half if denorm & 2 else flush_f16(half)


def min_f16(s0: U32, s1: U32, *, ieee: bool = True, denorm: int = 3) -> U32:
    """V_MIN_F16, with the rules of V_MIN_F32."""
    return _pick(min_f32, s0, s1, ieee, denorm)


def max_f16(s0: U32, s1: U32, *, ieee: bool = True, denorm: int = 3) -> U32:
    """V_MAX_F16, with the rules of V_MAX_F32."""
    return _pick(max_f32, s0, s1, ieee, denorm)


def cmp_f16(how: Comparison, s0: U32, s1: U32, *, denorm: int = 3) -> Bool:
    """V_CMP_*_F16: one condition bit per lane."""
    return compare_values(how, as_f32(cvt_f32_f16(s0, denorm=denorm)), as_f32(cvt_f32_f16(s1, denorm=denorm)))


def _function(function: Callable[[np.ndarray], np.ndarray], value: U32) -> U32:
    """A function of one f16, evaluated in f64; f16 subnormals are always supported."""
    wide = cvt_f32_f16(value)
    with np.errstate(all="ignore"):
        half = function(as_f32(wide).astype(np.float64)).astype(np.float16).view(np.uint16).astype(np.uint32)
    nan = (half & np.uint32(0x7FFF)) > np.uint32(0x7C00)
    if nan.any():
        own = (DEFAULT_NAN >> np.uint32(16)) & np.uint32(0x8000) | _F16_NAN
        half = select(nan, select(is_nan(wide), low(value) | _F16_QUIET, own), half)
    return half


def exp_f16(value: U32) -> U32:
    """V_EXP_F16: 2**x."""
    return _function(np.exp2, value)


def log_f16(value: U32) -> U32:
    """V_LOG_F16: log2."""
    return _function(np.log2, value)


def rcp_f16(value: U32) -> U32:
    """V_RCP_F16."""
    return _function(np.reciprocal, value)


def sqrt_f16(value: U32) -> U32:
    """V_SQRT_F16."""
    return _function(np.sqrt, value)


def rsq_f16(value: U32) -> U32:
    """V_RSQ_F16."""
    return _function(lambda wide: 1.0 / np.sqrt(wide), value)


# The dot products flush subnormals whatever the MODE (6.4).
_FLUSH = 0


def _dot2(s0: U32, s1: U32, start: U32 | None, widen: Callable[[U32], U32]) -> U32:
    """Products of the low and of the high halves, added one after the other."""
    a, b = (widen(half(s0)) for half in (low, high)), (widen(half(s1)) for half in (low, high))
    total = start
    for x, y in zip(a, b, strict=True):
        total = mul_f32(x, y, denorm=_FLUSH) if total is None else fma_f32(x, y, total, denorm=_FLUSH)
    assert total is not None
    return total


def dot2_f32_bf16(s0: U32, s1: U32, s2: U32) -> U32:
    """V_DOT2_F32_BF16: the sum of both products, then the third operand."""
    return add_f32(_dot2(s0, s1, None, cvt_f32_bf16), s2, denorm=_FLUSH)


def dot2c_f32_bf16(s0: U32, s1: U32, d: U32) -> U32:
    """V_DOT2C_F32_BF16: the accumulator, then the low product, then the high one."""
    return _dot2(s0, s1, d, cvt_f32_bf16)


def dot2_f32_f16(s0: U32, s1: U32, s2: U32) -> U32:
    """V_DOT2_F32_F16 and V_DOT2C_F32_F16: the third operand, then the low product, then the high one."""
    return _dot2(s0, s1, s2, lambda half: cvt_f32_f16(half, denorm=_FLUSH))
