"""Formats of 8, 6 and 4 bits to and from f32, f16 and bf16 (7.3).

Going down, a f32 is first collapsed to 14 bits that decide its rounding to any format with at most three mantissa bits:
sign, exponent, the top three mantissa bits, a rounding bit, and one bit that tells whether anything is left. One table
per format over those 14 bits then does all the rest, saturation and NaN included. Going up is a table over all codes.

Rounding is to nearest even. The instructions with stochastic rounding are not here.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np
from numpy.typing import NDArray

from aiter_paged_fp8.emulator.math import U32
from aiter_paged_fp8.emulator.math.conversion import (
    cvt_bf16_f32,
    cvt_f16_f32,
    cvt_f32_bf16,
    cvt_f32_f16,
    high,
    low,
    pack,
)
from aiter_paged_fp8.emulator.math.floats import INFINITY, MAGNITUDE, QUIET, SIGN, as_bits, as_f32, flush, select
from aiter_paged_fp8.emulator.math.lanes import pack_elements, unpack_elements

_quietly = np.errstate(all="ignore")


class Top(Enum):
    """What the highest exponent means."""

    IEEE = "infinity and NaNs"
    ONE_NAN = "numbers, all ones a NaN"
    NUMBERS = "numbers"


@dataclass(frozen=True)
class Narrow:
    """A format of at most 8 bits (table 30).

    Parameters
    ----------
    name : str
    exponent, mantissa : int
        Widths in bits.
    bias : int
    top : Top
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    top: Top

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity(self) -> int:
        """Code of infinity, of a NaN where there is none, and of nothing where all codes are numbers."""
        if self.top is Top.IEEE:
            return ((1 << self.exponent) - 1) << self.mantissa
        return self.sign - 1 if self.top is Top.ONE_NAN else self.sign

    @property
    def largest(self) -> int:
        """Code of the largest number."""
        return self.infinity - 1

    @property
    def nan(self) -> int:
        """Code that a NaN converts to; a format without NaNs gives its largest number."""
        return self.largest if self.top is Top.NUMBERS else self.sign - 1


FP8 = Narrow("fp8", 4, 3, 7, Top.ONE_NAN)
BF8 = Narrow("bf8", 5, 2, 15, Top.IEEE)
FP6 = Narrow("fp6", 2, 3, 1, Top.NUMBERS)
BF6 = Narrow("bf6", 3, 2, 3, Top.NUMBERS)
FP4 = Narrow("fp4", 2, 1, 1, Top.NUMBERS)


@cache
def decode_table(form: Narrow) -> U32:
    """f32 bits of every code; NaNs are quiet and keep sign and payload."""
    code = np.arange(1 << form.bits)
    magnitude = code & (form.sign - 1)
    field, fraction = magnitude >> form.mantissa, magnitude & ((1 << form.mantissa) - 1)
    whole = fraction + np.where(field > 0, 1 << form.mantissa, 0)
    number = np.ldexp(whole.astype(np.float64), np.maximum(field, 1) - form.bias - form.mantissa)
    bits = as_bits(number.astype(np.float32))
    if form.top is not Top.NUMBERS:
        nan = INFINITY | QUIET | (fraction << (23 - form.mantissa)).astype(np.uint32)
        bits = np.where(magnitude > form.largest, nan, bits)
        if form.top is Top.IEEE:
            bits[magnitude == form.infinity] = INFINITY
    bits |= np.where(code & form.sign, SIGN, np.uint32(0))
    bits.setflags(write=False)
    return bits


def decode(code: NDArray[np.unsignedinteger], form: Narrow) -> U32:
    """f32 bits of codes in the low bits of an unsigned array."""
    return np.take(decode_table(form), code & code.dtype.type((1 << form.bits) - 1))


# Where the collapsed form of an f32 ends: three mantissa bits and a rounding bit are kept, 19 become one.
_REST_BITS = np.uint32(19)
_REST = np.uint32((1 << 19) - 1)


@cache
@_quietly
def _encode_table(form: Narrow, overflow_clamps: bool) -> NDArray[np.uint8]:
    """Code for every collapsed f32."""
    collapsed = np.arange(1 << 14, dtype=np.uint32)
    # Any value with these top bits and something, or nothing, below.
    value = (collapsed >> np.uint32(1) << _REST_BITS) | (collapsed & np.uint32(1))
    magnitude = as_f32(value & MAGNITUDE).astype(np.float64)

    smallest_normal = 2.0 ** (1 - form.bias)
    exponent = np.frexp(np.maximum(magnitude, smallest_normal))[1] - 1
    steps = np.rint(np.ldexp(magnitude, form.mantissa - exponent))
    code = ((exponent + form.bias - 1) << form.mantissa) + np.minimum(steps, 4.0 * form.sign).astype(np.int64)

    clamps = overflow_clamps or form.top is Top.NUMBERS
    overflow = form.largest if clamps else form.infinity
    code = np.where((code > form.largest) & np.isfinite(magnitude), overflow, code)
    # FP16_OVFL leaves a true infinity alone where the format has one.
    code[np.isinf(magnitude)] = form.infinity if form.top is Top.IEEE else overflow
    code[np.isnan(magnitude)] = form.nan
    code |= np.where(value & SIGN, form.sign, 0)
    table = code.astype(np.uint8)
    table.setflags(write=False)
    return table


def encode(value: U32, form: Narrow, *, overflow_clamps: bool = False) -> NDArray[np.uint8]:
    """Codes of f32 values, to nearest even.

    Parameters
    ----------
    value : ndarray of uint32
        f32 bits.
    form : Narrow
    overflow_clamps : bool
        MODE.FP16_OVFL: what exceeds the range after rounding becomes the largest number instead of NaN (fp8) or
        infinity (bf8). fp6, bf6 and fp4 always clamp.
    """
    value = np.asarray(value)
    rest = value & _REST
    rest += _REST
    rest >>= _REST_BITS
    collapsed = value >> _REST_BITS
    collapsed <<= np.uint32(1)
    collapsed |= rest
    return _encode_table(form, overflow_clamps).take(collapsed)


def _insert(old: U32, new: U32, shift: int, width: int) -> U32:
    keep = np.uint32(0xFFFFFFFF ^ (((1 << width) - 1) << shift))
    return (old & keep) | (new << np.uint32(shift))


def _encode_pair(s0: U32, s1: U32, form: Narrow, overflow_clamps: bool) -> U32:
    first, second = (encode(s, form, overflow_clamps=overflow_clamps).astype(np.uint32) for s in (s0, s1))
    return first | (second << np.uint32(form.bits))


def cvt_pk_narrow_f32(
    s0: U32, s1: U32, old: U32, *, form: Narrow, word: int, overflow_clamps: bool = False, denorm: int = 3
) -> U32:
    """V_CVT_PK_FP8_F32 and V_CVT_PK_BF8_F32: two values into half `word` (op_sel[3]) of the destination."""
    if not denorm & 1:
        s0, s1 = flush(s0), flush(s1)
    shape = np.broadcast(s0, s1, old).shape
    pairs = np.empty((*shape, 2), np.uint32)
    pairs[..., 0] = s0
    pairs[..., 1] = s1
    codes = encode(pairs, form, overflow_clamps=overflow_clamps).view(np.uint16)
    result = np.empty((*shape, 1), np.uint32)
    result[..., 0] = old
    result.view(np.uint16)[..., word] = codes[..., 0]
    return result[..., 0]


def cvt_f32_narrow(source: U32, *, form: Narrow, byte: int = 0) -> U32:
    """V_CVT_F32_FP8 and V_CVT_F32_BF8: one byte, chosen by SDWA or op_sel."""
    return decode((source >> np.uint32(8 * byte)) & np.uint32(0xFF), form)


def cvt_pk_f32_narrow(source: U32, *, form: Narrow, word: int = 0) -> tuple[U32, U32]:
    """V_CVT_PK_F32_FP8 and V_CVT_PK_F32_BF8: low and high register of the result."""
    return cvt_f32_narrow(source, form=form, byte=2 * word), cvt_f32_narrow(source, form=form, byte=2 * word + 1)


# Scaled conversions. The scale is the exponent field of a float: E8M0 with bias 127, all ones a NaN.
_SCALE_BIAS = 127
_SCALE_NAN = 255


@cache
def scale_table() -> NDArray[np.float64]:
    """Power of two of every E8M0 code."""
    table = np.ldexp(1.0, np.arange(256) - _SCALE_BIAS)
    table[_SCALE_NAN] = np.nan
    table.setflags(write=False)
    return table


def scale_exponent(scale: U32) -> U32:
    """Exponent field of the scale operand; its sign and mantissa do not matter."""
    return (np.asarray(scale) >> np.uint32(23)) & np.uint32(0xFF)


@_quietly
def scaled_up(value: U32, scale: U32) -> U32:
    """f32 bits times 2**(exponent of scale - 127): what conversions from narrow formats do, exact for their values."""
    factor = scale_table()[scale_exponent(scale)].astype(np.float32)
    return as_bits(as_f32(np.asarray(value)) * factor)


@_quietly
def scaled_down(value: U32, scale: U32, *, denorm: int = 3) -> U32:
    """f32 bits times 2**(127 - exponent of scale): what conversions to narrow formats do before they round.

    A product beyond f32 stays finite, so that it counts as an overflow and not as an infinity. One below loses bits,
    all of them far below the smallest number of any narrow format.
    """
    value = np.asarray(value)
    if not denorm & 1:
        value = flush(value)
    factor = (1.0 / scale_table()[scale_exponent(scale)]).astype(np.float32)
    result = as_bits(as_f32(value) * factor)
    escaped = ((result & MAGNITUDE) == INFINITY) & ((value & MAGNITUDE) < INFINITY)
    if escaped.any():
        result = select(escaped, result - np.uint32(1), result)
    return result


class Wide(Enum):
    """The wide side of a scaled conversion: f32 one value to a register, the others two."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"

    def widen(self, value: U32) -> U32:
        """To f32, exactly, from the low half of a register."""
        return value if self is Wide.F32 else cvt_f32_f16(value) if self is Wide.F16 else cvt_f32_bf16(low(value))

    def round(self, value: U32) -> U32:
        """From f32."""
        return value if self is Wide.F32 else cvt_f16_f32(value) if self is Wide.F16 else cvt_bf16_f32(value)


def cvt_scalef32_pk_narrow(
    s0: U32,
    s1: U32,
    scale: U32,
    old: U32,
    *,
    form: Narrow,
    part: int,
    overflow_clamps: bool = False,
    denorm: int = 3,
) -> U32:
    """V_CVT_SCALEF32_PK_{FP8,BF8,FP4}_F32: two values divided by the scale, into part of the destination.

    Parameters
    ----------
    s0, s1, scale : ndarray of uint32
        For the forms from f16 and bf16, widen the two halves of the source first: `cvt_scalef32_pk_narrow_16`.
    old : ndarray of uint32
        The destination before.
    part : int
        Which half of the destination is written for 8-bit formats (op_sel[3]), which byte for fp4 (op_sel[3:2]).
    """
    first, second = (scaled_down(s, scale, denorm=denorm) for s in (s0, s1))
    width = 2 * form.bits
    return _insert(old, _encode_pair(first, second, form, overflow_clamps), width * part, width)


def cvt_scalef32_pk_narrow_16(
    source: U32, scale: U32, old: U32, *, form: Narrow, wide: Wide, part: int, overflow_clamps: bool = False
) -> U32:
    """V_CVT_SCALEF32_PK_{FP8,BF8,FP4}_{F16,BF16}: the two halves of one register."""
    s0, s1 = wide.widen(low(source)), wide.widen(high(source))
    return cvt_scalef32_pk_narrow(s0, s1, scale, old, form=form, part=part, overflow_clamps=overflow_clamps)


def cvt_scalef32_narrow(source: U32, scale: U32, *, form: Narrow, wide: Wide, byte: int = 0) -> U32:
    """V_CVT_SCALEF32_{F32,F16}_{FP8,BF8}: byte (op_sel[1:0]) times the scale; f16 in the low half."""
    return wide.round(scaled_up(cvt_f32_narrow(source, form=form, byte=byte), scale))


def cvt_scalef32_pk_from_narrow(source: U32, scale: U32, *, form: Narrow, wide: Wide, part: int = 0) -> tuple[U32, ...]:
    """V_CVT_SCALEF32_PK_{F32,F16,BF16}_{FP8,BF8,FP4}: two values times the scale.

    Parameters
    ----------
    part : int
        Half of the source for 8-bit formats (op_sel[0]), byte for fp4 (op_sel[1:0]).

    Returns
    -------
    tuple of ndarray of uint32
        Two registers for f32, one with both values for f16 and bf16.
    """
    at = 2 * form.bits * part
    mask = np.uint32((1 << form.bits) - 1)
    codes = ((source >> np.uint32(at + n * form.bits)) & mask for n in (0, 1))
    first, second = (wide.round(scaled_up(decode(code, form), scale)) for code in codes)
    return (first, second) if wide is Wide.F32 else (pack(first, second),)


def cvt_scalef32_pk32_narrow(source: U32, scale: U32, *, form: Narrow, wide: Wide, denorm: int = 3) -> U32:
    """V_CVT_SCALEF32_PK32_{FP6,BF6}_{F16,BF16}, and the 2XPK16 forms from f32 after `interleave`.

    Parameters
    ----------
    source : ndarray of uint32, [..., registers, 64]
        32 registers of f32 or 16 of two halves each.
    scale : ndarray of uint32, [..., 64]

    Returns
    -------
    ndarray of uint32, [..., 6, 64]
    """
    if wide is not Wide.F32:
        halves = np.stack([wide.widen(low(source)), wide.widen(high(source))], axis=-2)
        source = halves.reshape(*source.shape[:-2], 32, source.shape[-1])
    down = scaled_down(source, np.asarray(scale)[..., None, :], denorm=denorm)
    return pack_elements(encode(down, form), form.bits)


def interleave(s0: U32, s1: U32) -> U32:
    """Element order of V_CVT_SCALEF32_2XPK16_*: twice [..., 16, 64] to [..., 32, 64], alternating."""
    return np.stack([s0, s1], axis=-2).reshape(*s0.shape[:-2], 2 * s0.shape[-2], s0.shape[-1])


def cvt_scalef32_pk32_from_narrow(source: U32, scale: U32, *, form: Narrow, wide: Wide) -> U32:
    """V_CVT_SCALEF32_PK32_{F32,F16,BF16}_{FP6,BF6}: [..., 6, 64] to 32 registers of f32 or 16 of two halves each."""
    up = scaled_up(decode(unpack_elements(source, form.bits), form), np.asarray(scale)[..., None, :])
    if wide is Wide.F32:
        return up
    narrow = wide.round(up)
    return pack(narrow[..., 0::2, :], narrow[..., 1::2, :])
