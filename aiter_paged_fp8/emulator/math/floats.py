"""f32 arithmetic: single-rounded FMA, minima and maxima, division helpers, classes, output modifiers.

All functions round to nearest even; a kernel that sets another rounding mode is the machine's to refuse. `denorm` is
the two-bit field of MODE (3.5): bit 0 lets subnormal inputs through, bit 1 subnormal results; what is not let through
becomes a zero of the same sign. 3, the default here, is what compilers set on this target.

NaN (9.2.3, and the functional examples of chapter 12): an instruction that computes returns its first NaN operand made
quiet, and 0xffc00000 where it makes one itself. x86 does the same for two operands and other hosts do not, so results
that contain a NaN go through `settle_nan`.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aiter_paged_fp8.emulator.math import U32, Bool

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
QUIET = np.uint32(0x00400000)
DEFAULT_NAN = np.uint32(0xFFC00000)
SMALLEST_NORMAL = np.uint32(0x00800000)
ONE = np.uint32(0x3F800000)
ZERO = np.uint32(0)

# A decorator: overflow, NaN and the rest are results here, not events.
_quietly = np.errstate(all="ignore")


def as_f32(bits: U32) -> F32:
    return bits.view(np.float32)


def as_bits(value: F32) -> U32:
    return value.view(np.uint32)


def is_nan(bits: U32) -> Bool:
    return (bits & MAGNITUDE) > INFINITY


def is_signalling(bits: U32) -> Bool:
    return is_nan(bits) & ((bits & QUIET) == 0)


def flush(bits: U32) -> U32:
    """Subnormals become zeros of their sign."""
    return select((bits & INFINITY) == 0, bits & SIGN, bits)


def select(condition: Bool, yes: U32, no: U32) -> U32:
    """numpy.where for registers, at a third of its cost where neighbouring lanes differ."""
    mask = np.negative(condition.view(np.int8)).astype(np.int32).view(np.uint32)
    return no ^ ((yes ^ no) & mask)


def _flush_in(denorm: int, *operands: U32) -> tuple[U32, ...]:
    return operands if denorm & 1 else tuple(flush(s) for s in operands)


def _flush_out(denorm: int, result: U32) -> U32:
    return result if denorm & 2 else flush(result)


def settle_nan(result: U32, *operands: U32) -> U32:
    """Give every NaN of a result the bits that its operands imply."""
    nan = as_f32(result) != as_f32(result)
    if not nan.any():
        return result
    settled = np.full(result.shape, DEFAULT_NAN)
    for operand in reversed(operands):
        settled = select(is_nan(operand), operand | QUIET, settled)
    return select(nan, settled, result)


@_quietly
def add_f32(s0: U32, s1: U32, *, denorm: int = 3) -> U32:
    """V_ADD_F32, either half of V_PK_ADD_F32."""
    s0, s1 = _flush_in(denorm, s0, s1)
    result = as_bits(as_f32(s0) + as_f32(s1))
    return _flush_out(denorm, settle_nan(result, s0, s1))


def sub_f32(s0: U32, s1: U32, *, denorm: int = 3) -> U32:
    """V_SUB_F32; V_SUBREV_F32 with its operands exchanged. Adds the negated operand, so a NaN there changes sign."""
    return add_f32(s0, s1 ^ SIGN, denorm=denorm)


@_quietly
def mul_f32(s0: U32, s1: U32, *, denorm: int = 3) -> U32:
    """V_MUL_F32, either half of V_PK_MUL_F32."""
    s0, s1 = _flush_in(denorm, s0, s1)
    result = as_bits(as_f32(s0) * as_f32(s1))
    return _flush_out(denorm, settle_nan(result, s0, s1))


def mul_legacy_f32(s0: U32, s1: U32, *, denorm: int = 3) -> U32:
    """V_MUL_LEGACY_F32: +0 where either operand is a zero, whatever the other."""
    s0, s1 = _flush_in(denorm, s0, s1)
    zero = ((s0 & MAGNITUDE) == 0) | ((s1 & MAGNITUDE) == 0)
    return select(zero, ZERO, mul_f32(s0, s1, denorm=denorm))


# The f64 bits that rounding to f32 drops, for a normal result, and their pattern at the midpoint of two floats.
_DROPPED = np.uint64((1 << 29) - 1)
_MIDPOINT = np.uint64(1 << 28)


@_quietly
def fma_f32(s0: U32, s1: U32, s2: U32, *, denorm: int = 3) -> U32:
    """V_FMA_F32 and its relatives: s0 * s1 + s2, rounded once.

    The product of two floats is exact in f64, so only the sum's rounding to f64 can lead the second rounding, to f32,
    astray, and only where it lands on a midpoint of two floats or where the result is subnormal (its midpoints lie
    elsewhere). There, few in practice, the f64 sum is first rounded to odd.
    """
    s0, s1, s2 = _flush_in(denorm, s0, s1, s2)
    product = as_f32(s0).astype(np.float64) * as_f32(s1).astype(np.float64)
    addend = as_f32(s2).astype(np.float64)
    total = product + addend
    result = as_bits(total.astype(np.float32))
    # Subnormals and zeros wrap around and NaNs are above infinity, so one comparison finds both.
    special = bool(((result & MAGNITUDE) - (SMALLEST_NORMAL + np.uint32(1)) > INFINITY - SMALLEST_NORMAL).any())
    doubtful = (total.view(np.uint64) & _DROPPED) == _MIDPOINT
    if special:
        doubtful |= ((result & MAGNITUDE) <= SMALLEST_NORMAL) & (total != 0)
    if doubtful.any():
        product, addend = np.broadcast_arrays(product, addend)
        odd = round_to_odd_sum(product[doubtful], addend[doubtful])
        result[doubtful] = as_bits(odd.astype(np.float32))
    if special:
        result = settle_nan(result, s0, s1, s2)
    return _flush_out(denorm, result)


def round_to_odd_sum(a: F64, b: F64) -> F64:
    """a + b rounded to odd: an inexact sum keeps the neighbour whose last bit is set.

    Rounding that to a format at least two bits shorter gives the correctly rounded sum.
    """
    total = a + b
    # The classic two-sum: error is exactly what the rounding of `total` left out.
    rest = total - a
    error = (a - (total - rest)) + (b - rest)
    away = (error > 0) == (total > 0)
    bits = total.view(np.uint64)
    even = (bits & np.uint64(1)) == 0
    step = np.where(away, np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF))
    # The comparisons with a NaN error, from infinities, are false and leave the sum alone.
    inexact = (error > 0) | (error < 0)
    return np.where(inexact & even, bits + step, bits).view(np.float64)


@_quietly
def _choose(s0: U32, s1: U32, *, largest: bool, ieee: bool) -> U32:
    """V_MIN_F32 and V_MAX_F32 to the letter, for operands among which are NaNs or zeros."""
    a, b = as_f32(s0), as_f32(s1)
    best = np.maximum(a, b) if largest else np.minimum(a, b)
    # Equal operands differ at most in the sign of a zero, and -0 counts as the smaller one.
    chosen = select(a == b, s0 & s1 if largest else s0 | s1, as_bits(best))
    if not (best != best).any():
        return chosen
    chosen = select(is_nan(s1), s0, chosen)
    chosen = select(is_nan(s0), s1, chosen)
    if ieee:
        chosen = select(is_signalling(s1), s1 | QUIET, chosen)
        chosen = select(is_signalling(s0), s0 | QUIET, chosen)
    return chosen


def _any_special(result: U32) -> bool:
    """Is a zero or a NaN among the results, so that numpy's own minimum and maximum do not do?"""
    magnitude = result & MAGNITUDE
    return bool(((magnitude - np.uint32(1)) >= INFINITY).any())


@_quietly
def _extreme(operands: tuple[U32, ...], *, largest: bool, ieee: bool, denorm: int) -> U32:
    operands = _flush_in(denorm, *operands)
    plain = np.maximum if largest else np.minimum
    best = as_f32(operands[0])
    for operand in operands[1:]:
        best = plain(best, as_f32(operand))
    result = as_bits(best)
    if _any_special(result):
        result = operands[0]
        for operand in operands[1:]:
            result = _choose(result, operand, largest=largest, ieee=ieee)
    return _flush_out(denorm, result)


def min_f32(s0: U32, s1: U32, *, ieee: bool = True, denorm: int = 3) -> U32:
    """V_MIN_F32: a NaN loses against a number; with MODE.IEEE a signalling one wins and becomes quiet."""
    return _extreme((s0, s1), largest=False, ieee=ieee, denorm=denorm)


def max_f32(s0: U32, s1: U32, *, ieee: bool = True, denorm: int = 3) -> U32:
    """V_MAX_F32: a NaN loses against a number; with MODE.IEEE a signalling one wins and becomes quiet."""
    return _extreme((s0, s1), largest=True, ieee=ieee, denorm=denorm)


def min3_f32(s0: U32, s1: U32, s2: U32, *, ieee: bool = True, denorm: int = 3) -> U32:
    """V_MIN3_F32."""
    return _extreme((s0, s1, s2), largest=False, ieee=ieee, denorm=denorm)


def max3_f32(s0: U32, s1: U32, s2: U32, *, ieee: bool = True, denorm: int = 3) -> U32:
    """V_MAX3_F32."""
    return _extreme((s0, s1, s2), largest=True, ieee=ieee, denorm=denorm)


@_quietly
def med3_f32(s0: U32, s1: U32, s2: U32, *, ieee: bool = True, denorm: int = 3) -> U32:
    """V_MED3_F32: the middle one; with a NaN among the operands, V_MIN3_F32."""
    s0, s1, s2 = _flush_in(denorm, s0, s1, s2)
    top = max3_f32(s0, s1, s2, ieee=ieee)
    without_s0 = as_f32(top) == as_f32(s0)
    without_s1 = as_f32(top) == as_f32(s1)
    a = select(without_s0, s1, s0)
    b = select(without_s0 | without_s1, s2, s1)
    result = max_f32(a, b, ieee=ieee)
    nan = is_nan(s0) | is_nan(s1) | is_nan(s2)
    if nan.any():
        result = select(nan, min3_f32(s0, s1, s2, ieee=ieee), result)
    return _flush_out(denorm, result)


def _propagating(operands: tuple[U32, ...], *, largest: bool, denorm: int) -> U32:
    operands = _flush_in(denorm, *operands)
    result = _extreme(operands, largest=largest, ieee=True, denorm=3)
    nan = is_nan(operands[0])
    for operand in operands[1:]:
        nan = nan | is_nan(operand)
    if nan.any():
        result = settle_nan(select(nan, DEFAULT_NAN, result), *operands)
    return _flush_out(denorm, result)


def minimum3_f32(s0: U32, s1: U32, s2: U32, *, denorm: int = 3) -> U32:
    """V_MINIMUM3_F32: IEEE 754-2019 minimum of three, a NaN operand wins."""
    return _propagating((s0, s1, s2), largest=False, denorm=denorm)


def maximum3_f32(s0: U32, s1: U32, s2: U32, *, denorm: int = 3) -> U32:
    """V_MAXIMUM3_F32: IEEE 754-2019 maximum of three, a NaN operand wins."""
    return _propagating((s0, s1, s2), largest=True, denorm=denorm)


Comparison = Literal["f", "lt", "eq", "le", "gt", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt", "tru"]

_COMPARE: dict[str, Callable[[NDArray[np.floating], NDArray[np.floating]], Bool]] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: ~(a < b),
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "tru": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
}


@_quietly
def compare_values(how: Comparison, a: NDArray[np.floating], b: NDArray[np.floating]) -> Bool:
    """The sixteen float comparisons on numpy floats of any width."""
    return _COMPARE[how](a, b)


def cmp_f32(how: Comparison, s0: U32, s1: U32, *, denorm: int = 3) -> Bool:
    """V_CMP_*_F32: one condition bit per lane.

    Parameters
    ----------
    how : str
        The comparison as the mnemonic spells it, ``lt`` to ``tru``.
    """
    s0, s1 = _flush_in(denorm, s0, s1)
    return compare_values(how, as_f32(s0), as_f32(s1))


def cmp_class_f32(value: U32, mask: U32) -> Bool:
    """V_CMP_CLASS_F32: is the value of one of the kinds that the ten bits of `mask` list?"""
    magnitude, negative = value & MAGNITUDE, (value & SIGN) != 0
    # From the value outwards: the number of class boundaries that the magnitude has passed gives zero, subnormal,
    # normal, infinity; bits 6..9 list them upwards for positive values and 5..2 downwards for negative ones.
    steps = (magnitude > 0).astype(np.uint32)
    steps += magnitude >= SMALLEST_NORMAL
    steps += magnitude >= INFINITY
    bit = select(negative, np.uint32(5) - steps, np.uint32(6) + steps)
    nan = magnitude > INFINITY
    bit = select(nan, select((value & QUIET) != 0, np.uint32(1), np.uint32(0)), bit)
    return ((mask >> bit) & np.uint32(1)).astype(bool)


def clamp_f32(value: U32, *, dx10_clamp: bool = True) -> U32:
    """The CLAMP output modifier (6.5): to [0, 1]; with MODE.DX10_CLAMP a NaN becomes 0."""
    negative = (value & SIGN) != 0
    clamped = select(negative, ZERO, np.minimum(value, ONE))
    return select(is_nan(value), ZERO if dx10_clamp else value, clamped)


@_quietly
def omod_f32(value: U32, omod: int) -> U32:
    """The OMOD output modifier: 0 none, 1 times 2, 2 times 4, 3 halved. Subnormal results are flushed."""
    if omod == 0:
        return value
    factor = np.float32((1.0, 2.0, 4.0, 0.5)[omod])
    scaled = as_bits(as_f32(value) * factor)
    return flush(settle_nan(scaled, value))


def neg(value: U32) -> U32:
    """NEG input modifier."""
    return value ^ SIGN


def absolute(value: U32) -> U32:
    """ABS input modifier; NEG comes after it."""
    return value & MAGNITUDE
