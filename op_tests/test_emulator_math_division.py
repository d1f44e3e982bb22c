"""The f32 division macro, as compilers emit it, from the emulator's own instructions."""

from fractions import Fraction

import numpy as np

from aiter_paged_fp8.emulator.math import division, floats, functions
from op_tests.exact_floats import F32, INFINITE, NAN

RNG = np.random.default_rng(5)
SIGN, QUIET, DEFAULT_NAN, INFINITY = 0x80000000, 0x00400000, 0xFFC00000, 0x7F800000
ONE = np.uint32(0x3F800000)


def divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """v_div_scale, v_rcp, Newton's steps, v_div_fmas, v_div_fixup."""
    bottom, _ = division.div_scale_f32(denominator, denominator, numerator)
    top, vcc = division.div_scale_f32(numerator, denominator, numerator)
    minus = floats.neg(bottom)
    reciprocal = functions.rcp_f32(bottom)
    reciprocal = floats.fma_f32(floats.fma_f32(minus, reciprocal, ONE), reciprocal, reciprocal)
    quotient = floats.mul_f32(top, reciprocal)
    quotient = floats.fma_f32(floats.fma_f32(minus, quotient, top), reciprocal, quotient)
    rest = floats.fma_f32(minus, quotient, top)
    return division.div_fixup_f32(division.div_fmas_f32(rest, reciprocal, quotient, vcc), denominator, numerator)


def exact_quotient(numerator: int, denominator: int) -> int:
    a, b = F32.value(numerator), F32.value(denominator)
    sign = (numerator ^ denominator) & SIGN
    if NAN in (a, b):
        return (numerator if a == NAN else denominator) | QUIET
    if (a, b) == (INFINITE, INFINITE) or (a, b) == (0, 0):
        return DEFAULT_NAN
    if a == INFINITE or b == 0:
        return sign | INFINITY
    if b == INFINITE or a == 0:
        return sign
    return sign | F32.round(abs(Fraction(a) / b))


def check(numerator: np.ndarray, denominator: np.ndarray) -> None:
    got = divide(numerator, denominator)
    for a, b, q in zip(numerator, denominator, got, strict=True):
        want = exact_quotient(int(a), int(b))
        assert int(q) == want, (hex(a), hex(b), hex(q), hex(want))


def floats_with_exponents(count: int, low: int, high: int) -> np.ndarray:
    mantissa = RNG.integers(0, 1 << 23, count, dtype=np.uint32)
    field = RNG.integers(low, high + 1, count).astype(np.uint32)
    return mantissa | field << np.uint32(23) | RNG.integers(0, 2, count).astype(np.uint32) << np.uint32(31)


def test_ordinary_quotients_are_correctly_rounded() -> None:
    check(floats_with_exponents(4000, 100, 150), floats_with_exponents(4000, 100, 150))


def test_quotients_near_both_ends_of_the_range_are_correctly_rounded() -> None:
    for top in ((0, 3), (20, 26), (120, 130), (250, 254)):
        for bottom in ((0, 3), (120, 130), (250, 254)):
            check(floats_with_exponents(400, *top), floats_with_exponents(400, *bottom))


def test_special_quotients() -> None:
    values = [0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, INFINITY, 0x7FC00001, 0x7F800123]
    values += [v | SIGN for v in values]
    a, b = (g.ravel() for g in np.meshgrid(np.array(values, np.uint32), np.array(values, np.uint32)))
    check(a, b)


def test_ldexp_scales_by_the_power_and_rounds_once() -> None:
    values = np.concatenate([floats_with_exponents(300, 0, 254), np.array([0, SIGN, INFINITY, 0x7F800005], np.uint32)])
    for power in (-300, -149, -60, -1, 0, 1, 60, 149, 300, 1 << 30, -(1 << 31)):
        got = division.ldexp_f32(values, np.array(power, np.int64).astype(np.uint32))
        for bits, result in zip(values, got, strict=True):
            number = F32.value(int(bits))
            if number == NAN:
                want = int(bits) | QUIET
            elif number == INFINITE or number == 0:
                want = int(bits)
            else:
                want = F32.round(abs(number) * Fraction(2) ** max(min(power, 400), -400)) | int(bits) & SIGN
            assert int(result) == want, (hex(bits), power)


def test_only_the_operand_that_needs_it_is_scaled() -> None:
    def scale(which: int, denominator: float, numerator: float) -> tuple[float, bool]:
        d, n = (np.array([v], np.float32).view(np.uint32) for v in (denominator, numerator))
        result, vcc = division.div_scale_f32((d, n)[which], d, n)
        return float(result.view(np.float32)[0]), bool(vcc[0])

    assert scale(0, 3.0, 1.0) == (3.0, False)
    assert scale(0, 2.0**-60, 2.0**50) == (2.0**4, True)
    assert scale(1, 2.0**-60, 2.0**50) == (2.0**50, True)
    assert scale(0, 2.0**-140, 1.0) == (2.0**-76, True)
    assert scale(0, 2.0**-140, 2.0**-60) == (2.0**-76, False)
    # Both the reciprocal and the quotient would vanish: the denominator is scaled down, the quotient later.
    assert scale(0, 2.0**127, 1.0) == (2.0**63, True)
    assert scale(1, 2.0**127, 1.0) == (1.0, True)
    # The quotient is no problem: both are scaled.
    assert scale(0, 2.0**127, 2.0**100) == (2.0**63, False)
    assert scale(1, 2.0**127, 2.0**100) == (2.0**36, False)
    assert scale(1, 2.0**50, 2.0**-60) == (2.0**4, True)
    assert scale(0, 2.0**50, 2.0**-60) == (2.0**50, True)
    assert scale(1, 2.0**-110, 2.0**-110) == (2.0**-46, False)
