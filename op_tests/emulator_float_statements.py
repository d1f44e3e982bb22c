"""What float instructions give, by rational numbers and scalar Python: bits in, bits out ("nan" for any quiet NaN)."""

from __future__ import annotations

from fractions import Fraction

from exact_floats import F32, INFINITE, NAN

SIGN, INF = 0x80000000, 0x7F800000
Bits = int | str


def is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > INF


def is_quiet_nan(bits: int) -> bool:
    return is_nan(bits) and bool(bits & 0x400000)


def is_signalling(bits: int) -> bool:
    return is_nan(bits) and not bits & 0x400000


def value(bits: int) -> Fraction | str:
    return F32.value(bits)


def sign_of(bits: int) -> int:
    return bits & SIGN


def nearest(number: Fraction, zero_sign: int = 0) -> int:
    """Bits nearest to a number; an exact zero has the given sign, an underflow the number's."""
    if number == 0:
        return zero_sign
    return (SIGN if number < 0 else 0) | F32.round(abs(number))


def fma(a: int, b: int, c: int, power: int = 0) -> Bits:
    """(a * b + c) * 2**power, rounded once."""
    x, y, z = value(a), value(b), value(c)
    if NAN in (x, y, z):
        return "nan"
    sign = sign_of(a) ^ sign_of(b)
    if INFINITE in (x, y):
        if 0 in (x, y) or (z == INFINITE and sign_of(c) != sign):
            return "nan"
        return sign | INF
    if z == INFINITE:
        return c
    zero = sign if sign == sign_of(c) else 0
    return nearest((x * y + z) * Fraction(2) ** power, zero)


def add(a: int, b: int) -> Bits:
    return fma(0x3F800000, a, b)


def mul(a: int, b: int) -> Bits:
    # The addend has the product's sign, so that it does not change that of a zero.
    return fma(a, b, sign_of(a) ^ sign_of(b))


def negated(bits: int) -> int:
    return bits ^ SIGN


def mul_legacy(a: int, b: int) -> Bits:
    return 0 if 0 in (value(a), value(b)) else mul(a, b)


def order(bits: int) -> int:
    """Monotonic in the number, -0 below +0."""
    return bits if bits < SIGN else SIGN - 1 - bits


def _number(a: int, b: int, pick) -> Bits:
    """MODE.IEEE is set: a signalling NaN is returned quiet; else a NaN gives way to the other operand."""
    for bits in (a, b):
        if is_signalling(bits):
            return bits | 0x400000
    if is_nan(a):
        return b
    if is_nan(b):
        return a
    return pick(a, b, key=order)


def minimum_number(a: int, b: int) -> Bits:
    return _number(a, b, min)


def maximum_number(a: int, b: int) -> Bits:
    return _number(a, b, max)


def min3(a: int, b: int, c: int) -> Bits:
    return minimum_number(minimum_number(a, b), c)


def max3(a: int, b: int, c: int) -> Bits:
    return maximum_number(maximum_number(a, b), c)


def median(a: int, b: int, c: int) -> Bits:
    if any(map(is_nan, (a, b, c))):
        return min3(a, b, c)
    return sorted((a, b, c), key=order)[1]


def minimum3(a: int, b: int, c: int) -> Bits:
    return "nan" if any(map(is_nan, (a, b, c))) else min(a, b, c, key=order)


def maximum3(a: int, b: int, c: int) -> Bits:
    return "nan" if any(map(is_nan, (a, b, c))) else max(a, b, c, key=order)


def to_integral(bits: int, how) -> Bits:
    number = value(bits)
    if number == NAN:
        return "nan"
    if number == INFINITE:
        return bits
    return nearest(Fraction(how(number)), sign_of(bits))


def fract(bits: int) -> Bits:
    number = value(bits)
    if isinstance(number, str):
        return "nan"
    return min(nearest(number - number.__floor__()), 0x3F7FFFFF)


def frexp(bits: int) -> tuple[Bits, int]:
    """Significand in [0.5, 1) and exponent."""
    number = value(bits)
    if isinstance(number, str):
        return bits, 0
    if number == 0:
        return bits, 0
    exponent = 0
    while abs(number) >= 1:
        number, exponent = number / 2, exponent + 1
    while abs(number) < Fraction(1, 2):
        number, exponent = number * 2, exponent - 1
    return nearest(number), exponent & 0xFFFFFFFF


def ldexp(bits: int, exponent: int) -> Bits:
    number = value(bits)
    if isinstance(number, str):
        return "nan" if number == NAN else bits
    # Beyond this the result is 0 or infinite whatever the number.
    exponent = max(-400, min(400, exponent))
    return nearest(number * Fraction(2) ** exponent, sign_of(bits))
