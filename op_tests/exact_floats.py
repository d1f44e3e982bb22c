"""Floating point by rational numbers: what the emulator's arithmetic is held against.

Nothing here uses the hardware's float arithmetic beyond reading a value, so that it can't share a mistake with numpy.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from fractions import Fraction

INFINITE = "infinite"
NAN = "nan"


@dataclass(frozen=True)
class Format:
    """A binary format with subnormals.

    Parameters
    ----------
    exponent, mantissa : int
        Widths in bits.
    bias : int
    top : str
        What the highest exponent means: ``ieee`` infinities and NaNs, ``nan`` all ones is not a number, the rest are,
        ``finite`` all patterns are numbers.
    """

    exponent: int
    mantissa: int
    bias: int
    top: str = "ieee"

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent + self.mantissa)

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def largest(self) -> int:
        return {"ieee": self.infinity - 1, "nan": self.sign_bit - 2, "finite": self.sign_bit - 1}[self.top]

    def value(self, bits: int) -> Fraction | str:
        """The number that the bits stand for, sign of a zero apart."""
        magnitude = bits & (self.sign_bit - 1)
        if magnitude > self.largest:
            return INFINITE if self.top == "ieee" and magnitude == self.infinity else NAN
        field, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        scale = max(field, 1) - self.bias - self.mantissa
        whole = fraction + (1 << self.mantissa if field else 0)
        number = Fraction(whole << scale) if scale >= 0 else Fraction(whole, 1 << -scale)
        return -number if bits & self.sign_bit else number

    def round(self, number: Fraction) -> int:
        """Magnitude bits nearest to a non-negative number, ties to even; beyond `largest` what follows it."""
        top, bottom = number.numerator, number.denominator
        if top == 0:
            return 0
        exponent = top.bit_length() - bottom.bit_length()
        if (top << max(-exponent, 0)) < (bottom << max(exponent, 0)):
            exponent -= 1
        exponent = max(exponent, 1 - self.bias)
        step = exponent - self.mantissa
        top, bottom = top << max(-step, 0), bottom << max(step, 0)
        steps, rest = divmod(top, bottom)
        if 2 * rest > bottom or (2 * rest == bottom and steps & 1):
            steps += 1
        return min(((exponent + self.bias - 1) << self.mantissa) + steps, self.largest + 1)


F32 = Format(8, 23, 127)
F16 = Format(5, 10, 15)
BF16 = Format(8, 7, 127)
E4M3 = Format(4, 3, 7, "nan")
E5M2 = Format(5, 2, 15)
E2M3 = Format(2, 3, 1, "finite")
E3M2 = Format(3, 2, 3, "finite")
E2M1 = Format(2, 1, 1, "finite")


def f32_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def f32_value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]
