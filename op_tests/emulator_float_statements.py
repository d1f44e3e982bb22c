"""What float instructions give, by rational numbers and scalar Python: bits in, bits out ("nan" for any quiet NaN)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from op_tests.exact_floats import F16, F32, INFINITE, NAN, Format

Bits = int | str


@dataclass(frozen=True)
class Statements:
    """Operations on one format."""

    format: Format

    @property
    def sign(self) -> int:
        return self.format.sign_bit

    @property
    def infinity(self) -> int:
        return self.format.infinity

    @property
    def quiet(self) -> int:
        return 1 << (self.format.mantissa - 1)

    @property
    def one(self) -> int:
        return self.format.bias << self.format.mantissa

    def value(self, bits: int) -> Fraction | str:
        return self.format.value(bits)

    def is_nan(self, bits: int) -> bool:
        return bits & (self.sign - 1) > self.infinity

    def is_quiet_nan(self, bits: int) -> bool:
        return self.is_nan(bits) and bool(bits & self.quiet)

    def is_signalling(self, bits: int) -> bool:
        return self.is_nan(bits) and not bits & self.quiet

    def negated(self, bits: int) -> int:
        return bits ^ self.sign

    def nearest(self, number: Fraction, zero_sign: int = 0) -> int:
        """Bits nearest to a number; an exact zero has the given sign, an underflow the number's."""
        if number == 0:
            return zero_sign
        return (self.sign if number < 0 else 0) | self.format.round(abs(number))

    def fma(self, a: int, b: int, c: int, power: int = 0) -> Bits:
        """(a * b + c) * 2**power, rounded once."""
        x, y, z = self.value(a), self.value(b), self.value(c)
        if NAN in (x, y, z):
            return "nan"
        sign = (a ^ b) & self.sign
        if INFINITE in (x, y):
            if 0 in (x, y) or (z == INFINITE and c & self.sign != sign):
                return "nan"
            return sign | self.infinity
        if z == INFINITE:
            return c
        zero = sign if sign == c & self.sign else 0
        return self.nearest((x * y + z) * Fraction(2) ** power, zero)

    def add(self, a: int, b: int) -> Bits:
        return self.fma(self.one, a, b)

    def mul(self, a: int, b: int) -> Bits:
        # The addend has the product's sign, so that it does not change that of a zero.
        return self.fma(a, b, (a ^ b) & self.sign)

    def mul_legacy(self, a: int, b: int) -> Bits:
        return 0 if 0 in (self.value(a), self.value(b)) else self.mul(a, b)

    def order(self, bits: int) -> int:
        """Monotonic in the number, -0 below +0."""
        return bits if bits < self.sign else self.sign - 1 - bits

    def _number(self, a: int, b: int, pick: Callable[..., int]) -> int:
        """MODE.IEEE is set: a signalling NaN is returned quiet; else a NaN gives way to the other operand."""
        for bits in (a, b):
            if self.is_signalling(bits):
                return bits | self.quiet
        if self.is_nan(a):
            return b
        if self.is_nan(b):
            return a
        return pick(a, b, key=self.order)

    def minimum_number(self, a: int, b: int) -> int:
        return self._number(a, b, min)

    def maximum_number(self, a: int, b: int) -> int:
        return self._number(a, b, max)

    def min3(self, a: int, b: int, c: int) -> int:
        return self.minimum_number(self.minimum_number(a, b), c)

    def max3(self, a: int, b: int, c: int) -> int:
        return self.maximum_number(self.maximum_number(a, b), c)

    def median(self, a: int, b: int, c: int) -> int:
        if any(map(self.is_nan, (a, b, c))):
            return self.min3(a, b, c)
        return sorted((a, b, c), key=self.order)[1]

    def minimum3(self, a: int, b: int, c: int) -> Bits:
        return "nan" if any(map(self.is_nan, (a, b, c))) else min(a, b, c, key=self.order)

    def maximum3(self, a: int, b: int, c: int) -> Bits:
        return "nan" if any(map(self.is_nan, (a, b, c))) else max(a, b, c, key=self.order)

    def to_integral(self, bits: int, how: Callable[[Fraction], int]) -> Bits:
        number = self.value(bits)
        if number == NAN:
            return "nan"
        if number == INFINITE:
            return bits
        return self.nearest(Fraction(how(number)), bits & self.sign)

    def fract(self, bits: int) -> Bits:
        number = self.value(bits)
        if isinstance(number, str):
            return "nan"
        return min(self.nearest(number - number.__floor__()), self.one - 1)

    def frexp(self, bits: int) -> tuple[int, int]:
        """Significand in [0.5, 1) and exponent."""
        number = self.value(bits)
        if isinstance(number, str) or number == 0:
            return bits, 0
        exponent = 0
        while abs(number) >= 1:
            number, exponent = number / 2, exponent + 1
        while abs(number) < Fraction(1, 2):
            number, exponent = number * 2, exponent - 1
        return self.nearest(number), exponent & 0xFFFFFFFF

    def ldexp(self, bits: int, exponent: int) -> Bits:
        number = self.value(bits)
        if isinstance(number, str):
            return "nan" if number == NAN else bits
        # Beyond this the result is 0 or infinite whatever the number.
        exponent = max(-400, min(400, exponent))
        return self.nearest(number * Fraction(2) ** exponent, bits & self.sign)


single, half = Statements(F32), Statements(F16)
