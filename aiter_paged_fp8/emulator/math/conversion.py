"""f32, f16, bf16, f64 and integers into each other.

f16 and bf16 values travel in the low half of a 32-bit lane; what is above them is ignored on the way in and zero on the
way out, so that the machine alone knows about op_sel and SDWA.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from aiter_paged_fp8.emulator.math import U32, U64
from aiter_paged_fp8.emulator.math.floats import INFINITY, MAGNITUDE, QUIET, SIGN, as_bits, as_f32, is_nan, select

_HALF_MASK = np.uint32(0xFFFF)
_SIXTEEN = np.uint32(16)
_F16_INFINITY = np.uint32(0x7C00)
_F16_MAX = np.uint32(0x7BFF)
_F16_QUIET = np.uint32(0x0200)
_BF16_QUIET = np.uint32(0x0040)

_quietly = np.errstate(all="ignore")


def low(bits: U32) -> U32:
    """Bits 15:0."""
    return bits & _HALF_MASK


def high(bits: U32) -> U32:
    """Bits 31:16, moved down."""
    return bits >> _SIXTEEN


def pack(first: U32, second: U32) -> U32:
    """Two 16-bit values into one register, the first in the low half."""
    return first | (second << _SIXTEEN)


@cache
def _f16_table() -> U32:
    """f32 bits of every f16, NaN payloads kept at the top and made quiet."""
    half = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(all="ignore"):
        table = as_bits(half.astype(np.uint16).view(np.float16).astype(np.float32))
    nan = (half & np.uint32(0x7FFF)) > _F16_INFINITY
    payload = ((half & np.uint32(0x8000)) << _SIXTEEN) | INFINITY | QUIET | ((half & np.uint32(0x3FF)) << np.uint32(13))
    return np.where(nan, payload, table)


def flush_f16(bits: U32) -> U32:
    """f16 subnormals become zeros of their sign."""
    return select((bits & _F16_INFINITY) == 0, bits & np.uint32(0x8000), bits)


def cvt_f32_f16(value: U32, *, denorm: int = 3) -> U32:
    """V_CVT_F32_F16: exact; subnormal inputs are subject to the double/half denormal mode."""
    half = value & _HALF_MASK
    return np.take(_f16_table(), half if denorm & 1 else flush_f16(half))


@_quietly
def cvt_f16_f32(value: U32, *, overflow_clamps: bool = False, denorm: int = 3) -> U32:
    """V_CVT_F16_F32, either half of V_CVT_PK_F16_F32: to nearest even.

    Parameters
    ----------
    overflow_clamps : bool
        MODE.FP16_OVFL: a finite value beyond the range becomes the largest finite one; infinities stay.
    denorm : int
        The double/half denormal mode, applied to the result.
    """
    value = np.asarray(value)
    half = as_f32(value).astype(np.float16).view(np.uint16).astype(np.uint32)
    nan = is_nan(value)
    if nan.any():
        payload = ((value >> _SIXTEEN) & np.uint32(0x8000)) | _F16_INFINITY | _F16_QUIET
        half = select(nan, payload | ((value >> np.uint32(13)) & np.uint32(0x3FF)), half)
    if overflow_clamps:
        overflow = ((half & np.uint32(0x7FFF)) == _F16_INFINITY) & ((value & MAGNITUDE) != INFINITY)
        half = select(overflow, (half & np.uint32(0x8000)) | _F16_MAX, half)
    return half if denorm & 2 else flush_f16(half)


def cvt_pkrtz_f16_f32(s0: U32, s1: U32) -> U32:
    """V_CVT_PKRTZ_F16_F32: toward zero, so that finite values never become infinite."""
    return pack(_toward_zero(np.asarray(s0)), _toward_zero(np.asarray(s1)))


def _toward_zero(value: U32) -> U32:
    half = cvt_f16_f32(value)
    back = cvt_f32_f16(half)
    # Magnitudes of one sign order like integers; NaNs compare as they like, and are put back.
    too_far = ((back & MAGNITUDE) > (value & MAGNITUDE)) & ~is_nan(value)
    return half - too_far.astype(np.uint32)


def cvt_f32_bf16(value: U32) -> U32:
    """V_CVT_F32_BF16."""
    return value << _SIXTEEN


def cvt_bf16_f32(value: U32) -> U32:
    """One half of V_CVT_PK_BF16_F32: to nearest even; a NaN is made quiet and keeps the top of its payload."""
    value = np.asarray(value)
    rounded = (value + np.uint32(0x7FFF) + ((value >> _SIXTEEN) & np.uint32(1))) >> _SIXTEEN
    nan = as_f32(value) != as_f32(value)
    if nan.any():
        rounded = select(nan, (value >> _SIXTEEN) | _BF16_QUIET, rounded)
    return rounded


def cvt_pk_bf16_f32(s0: U32, s1: U32) -> U32:
    """V_CVT_PK_BF16_F32."""
    return pack(cvt_bf16_f32(s0), cvt_bf16_f32(s1))


def cvt_pk_f16_f32(s0: U32, s1: U32, *, overflow_clamps: bool = False, denorm: int = 3) -> U32:
    """V_CVT_PK_F16_F32."""
    first, second = (cvt_f16_f32(s, overflow_clamps=overflow_clamps, denorm=denorm) for s in (s0, s1))
    return pack(first, second)


def cvt_f32_i32(value: U32) -> U32:
    """V_CVT_F32_I32, to nearest even."""
    return as_bits(np.asarray(value).view(np.int32).astype(np.float32))


def cvt_f32_u32(value: U32) -> U32:
    """V_CVT_F32_U32, to nearest even."""
    return as_bits(np.asarray(value).astype(np.float32))


def cvt_f32_ubyte(value: U32, byte: int) -> U32:
    """V_CVT_F32_UBYTE0 to UBYTE3."""
    return cvt_f32_u32((value >> np.uint32(8 * byte)) & np.uint32(0xFF))


def cvt_i32_f32(value: U32) -> U32:
    """V_CVT_I32_F32: toward zero, saturating; NaN gives 0."""
    return _saturate(as_f32(np.asarray(value)), signed=True)


def cvt_u32_f32(value: U32) -> U32:
    """V_CVT_U32_F32: toward zero, saturating, negative values to 0; NaN gives 0."""
    return _saturate(as_f32(np.asarray(value)), signed=False)


@_quietly
def cvt_rpi_i32_f32(value: U32) -> U32:
    """V_CVT_RPI_I32_F32: to nearest, halves upwards."""
    wide = as_f32(np.asarray(value)).astype(np.float64)
    return _saturate(np.floor(wide + 0.5), signed=True)


@_quietly
def cvt_flr_i32_f32(value: U32) -> U32:
    """V_CVT_FLR_I32_F32: downwards."""
    return _saturate(np.floor(as_f32(np.asarray(value))), signed=True)


@_quietly
def _saturate(value: NDArray[np.floating], *, signed: bool) -> U32:
    """Toward zero into 32 bits. f64 holds both limits exactly, so clipping there never overshoots."""
    lower, upper = (-(2.0**31), 2.0**31 - 1) if signed else (0.0, 2.0**32 - 1)
    wide = np.clip(value.astype(np.float64), lower, upper)
    nan = wide != wide
    if nan.any():
        wide = np.where(nan, 0.0, wide)
    return wide.astype(np.int64).astype(np.uint32)


def cvt_pk_u8_f32(value: U32, byte: U32, base: U32) -> U32:
    """V_CVT_PK_U8_F32: saturating, into the byte of `base` that `byte` names."""
    small = np.minimum(cvt_u32_f32(value), np.uint32(255))
    shift = (byte & np.uint32(3)) * np.uint32(8)
    return (base & ~(np.uint32(0xFF) << shift)) | (small << shift)


def cvt_f64_f32(value: U32) -> U64:
    """V_CVT_F64_F32: exact; a NaN keeps its payload at the top and becomes quiet."""
    value = np.asarray(value)
    wide = _to_f64(value)
    nan = is_nan(value)
    if nan.any():
        bits = value.astype(np.uint64)
        payload = ((bits & np.uint64(0x80000000)) << np.uint64(32)) | np.uint64(0x7FF8000000000000)
        wide = np.where(nan, payload | ((bits & np.uint64(0x7FFFFF)) << np.uint64(29)), wide)
    return wide


@_quietly
def _to_f64(value: U32) -> U64:
    return as_f32(value).astype(np.float64).view(np.uint64)


@_quietly
def cvt_f32_f64(value: U64) -> U32:
    """V_CVT_F32_F64, to nearest even."""
    value = np.asarray(value)
    narrow = as_bits(value.view(np.float64).astype(np.float32))
    nan = (value & np.uint64(0x7FFFFFFFFFFFFFFF)) > np.uint64(0x7FF0000000000000)
    if nan.any():
        top = (value >> np.uint64(29)).astype(np.uint32) & np.uint32(0x7FFFFF)
        narrow = np.where(nan, ((value >> np.uint64(32)).astype(np.uint32) & SIGN) | INFINITY | QUIET | top, narrow)
    return narrow


def cvt_i32_f64(value: U64) -> U32:
    """V_CVT_I32_F64: toward zero, saturating; NaN gives 0."""
    return _saturate(np.asarray(value).view(np.float64), signed=True)


def cvt_u32_f64(value: U64) -> U32:
    """V_CVT_U32_F64: toward zero, saturating; NaN gives 0."""
    return _saturate(np.asarray(value).view(np.float64), signed=False)


def cvt_f64_i32(value: U32) -> U64:
    """V_CVT_F64_I32: exact."""
    return np.asarray(value).view(np.int32).astype(np.float64).view(np.uint64)


def cvt_f64_u32(value: U32) -> U64:
    """V_CVT_F64_U32: exact."""
    return np.asarray(value).astype(np.float64).view(np.uint64)


def cvt_f16_u16(value: U32) -> U32:
    """V_CVT_F16_U16, to nearest even."""
    return cvt_f16_f32(cvt_f32_u32(value & _HALF_MASK))


def cvt_f16_i16(value: U32) -> U32:
    """V_CVT_F16_I16, to nearest even."""
    return cvt_f16_f32(cvt_f32_i32(_extend(value)))


def cvt_u16_f16(value: U32) -> U32:
    """V_CVT_U16_F16: toward zero, saturating; NaN gives 0."""
    return np.minimum(cvt_u32_f32(cvt_f32_f16(value)), _HALF_MASK)


def cvt_i16_f16(value: U32) -> U32:
    """V_CVT_I16_F16: toward zero, saturating; NaN gives 0."""
    whole = cvt_i32_f32(cvt_f32_f16(value)).view(np.int32)
    return np.clip(whole, -0x8000, 0x7FFF).view(np.uint32) & _HALF_MASK


def _extend(value: U32) -> U32:
    return ((value << _SIXTEEN).view(np.int32) >> np.int32(16)).view(np.uint32)
