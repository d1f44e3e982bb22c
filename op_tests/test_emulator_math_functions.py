"""Functions of one float: within the manual's ulp of the exact value, special cases as it prints them."""

import math
from fractions import Fraction

import numpy as np
import pytest

from aiter_paged_fp8.emulator.math import functions
from op_tests.exact_floats import F32, f32_bits, f32_value

RNG = np.random.default_rng(17)
SIGN, NAN, INF, ONE = 0x80000000, 0xFFC00000, 0x7F800000, 0x3F800000


def call(name: str, *bits: int) -> list[int]:
    return getattr(functions, name)(np.array(bits, np.uint32)).tolist()


# The manual's functional examples, operand and result.
EXAMPLES = {
    "exp_f32": {0xFF800000: 0, SIGN: ONE, INF: INF, 0: ONE},
    "log_f32": {0xFF800000: NAN, 0xBF800000: NAN, SIGN: 0xFF800000, 0: 0xFF800000, ONE: 0, INF: INF},
    "rcp_f32": {0xFF800000: SIGN, 0xC0000000: 0xBF000000, SIGN: 0xFF800000, 0: INF, INF: 0},
    "rsq_f32": {0xFF800000: NAN, SIGN: 0xFF800000, 0: INF, 0x40800000: 0x3F000000, INF: 0},
    "sqrt_f32": {0xFF800000: NAN, SIGN: SIGN, 0: 0, 0x40800000: 0x40000000, INF: INF},
    "sin_f32": {0xFF800000: NAN, 0xFF7FFFFF: 0, SIGN: SIGN, 0x3E800000: ONE, INF: NAN},
    "cos_f32": {0xFF800000: NAN, 0xFF7FFFFF: ONE, SIGN: ONE, 0x3E800000: 0, INF: NAN},
}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_of_the_manual(name: str) -> None:
    assert call(name, *EXAMPLES[name]) == list(EXAMPLES[name].values())
    # NaN operands come back quiet.
    assert call(name, 0x7F800001, 0xFFC00010) == [0x7FC00001, 0xFFC00010]


def test_subnormals_are_flushed_on_both_sides() -> None:
    assert call("rcp_f32", 1, 0x807FFFFF) == [INF, 0xFF800000]
    assert call("rcp_f32", f32_bits(2.0**127), f32_bits(-(2.0**126))) == [0, f32_bits(-(2.0**-126))]
    assert call("log_f32", 0x007FFFFF) == [0xFF800000]
    assert call("rsq_f32", 0x007FFFFF) == [INF]
    assert call("sqrt_f32", 0x007FFFFF, 0x80000001) == [0, SIGN]
    assert call("exp_f32", f32_bits(-126.0), f32_bits(-126.5), f32_bits(-200.0)) == [0x00800000, 0, 0]
    assert call("exp_f32", f32_bits(127.5), f32_bits(128.0), 1) == [f32_bits(2.0**127.5), INF, ONE]


def check_ulp(name: str, values: np.ndarray, exact: object, ulp: float) -> None:
    got = getattr(functions, name)(values.astype(np.float32).view(np.uint32)).view(np.float32)
    for x, y in zip(values.astype(np.float32).tolist(), got.tolist(), strict=True):
        want = exact(x)
        step = 2.0 ** (max(math.frexp(want)[1] - 1, -126) - 23)
        assert abs(y - want) <= ulp * step, (name, x, y, want)


def test_accuracy() -> None:
    spread = np.exp2(RNG.uniform(-120, 120, 3000))
    # Half an ulp and a hair: rounded once from a double.
    check_ulp("exp_f32", RNG.uniform(-125.9, 127.9, 4000), lambda x: 2.0**x, 0.5001)
    check_ulp("exp_f32", RNG.normal(size=4000) * 1e-3, lambda x: 2.0**x, 0.5001)
    check_ulp("log_f32", spread, math.log2, 0.5001)
    check_ulp("rcp_f32", spread, lambda x: 1 / x, 0.5001)
    check_ulp("sqrt_f32", spread, math.sqrt, 0.5001)
    check_ulp("rsq_f32", spread, lambda x: 1 / math.sqrt(x), 0.5001)


def test_sine_and_cosine_of_turns() -> None:
    for eighths in range(-40, 41):
        angle = f32_bits(eighths / 8)
        sine, cosine = (f32_value(call(f"{f}_f32", angle)[0]) for f in ("sin", "cos"))
        assert abs(sine - math.sin(math.pi * (eighths % 8) / 4)) < 1e-7
        assert abs(cosine - math.cos(math.pi * (eighths % 8) / 4)) < 1e-7


def test_rounding_to_integers() -> None:
    halves = np.arange(-20, 21).astype(np.float32) / 2
    values = np.concatenate([halves, np.float32(RNG.normal(size=500) * 2.0 ** RNG.integers(-30, 40, 500))])
    bits = values.view(np.uint32)
    rounders = {"trunc_f32": math.trunc, "ceil_f32": math.ceil, "floor_f32": math.floor, "rndne_f32": round}
    for name, rounder in rounders.items():
        for x, y in zip(bits.tolist(), call(name, *bits.tolist()), strict=True):
            want = rounder(F32.value(x))
            # A zero that comes out of a negative number keeps its sign.
            assert y == F32.round(Fraction(abs(want))) | x & SIGN, (name, hex(x))
    assert call("floor_f32", 0x7F800001, INF) == [0x7FC00001, INF]


def test_fraction_is_below_one_even_for_tiny_negatives() -> None:
    assert call("fract_f32", f32_bits(-1.25), f32_bits(2.5), 0x80000001, 0x33000000 | SIGN) == [
        f32_bits(0.75), f32_bits(0.5), 0x3F7FFFFF, 0x3F7FFFFF,
    ]  # fmt: skip
    assert call("fract_f32", INF, SIGN) == [NAN, 0]


def test_significand_and_exponent() -> None:
    bits = [ONE, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, f32_bits(-0.3), f32_bits(96.0)]
    for x, mantissa, exponent in zip(
        bits, call("frexp_mant_f32", *bits), call("frexp_exp_i32_f32", *bits), strict=True
    ):
        want = math.frexp(f32_value(x))
        assert (f32_value(mantissa), np.uint32(exponent).view(np.int32)) == want
    assert call("frexp_exp_i32_f32", 0, INF, 0x7FC00000) == [0, 0, 0]
    assert call("frexp_mant_f32", SIGN, 0xFF800000, 0x7F800001) == [SIGN, 0xFF800000, 0x7F800001]
