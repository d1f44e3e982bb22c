"""Conversions between number formats, over all patterns of the small ones."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from aiter_paged_fp8.emulator.math import conversion
from op_tests.exact_floats import F16, F32, INFINITE, NAN, f32_value

RNG = np.random.default_rng(13)
ALL_HALVES = np.arange(1 << 16, dtype=np.uint32)
SIGN, QUIET = 0x80000000, 0x00400000


def samples() -> np.ndarray:
    """f32 patterns: random bits, values of every magnitude, midpoints of f16 and bf16 and their neighbours."""
    anything = RNG.integers(0, 2**32, 12000, dtype=np.uint32)
    halves = ALL_HALVES[::13] << np.uint32(16)
    ties = np.concatenate([(halves + np.uint32(0x8000)) + np.uint32(d) for d in (0, 1, 0xFFFFFFFF)])
    in_f16 = (ALL_HALVES[::11].astype(np.uint16).view(np.float16).astype(np.float32)).view(np.uint32)
    near_f16 = np.concatenate([in_f16 + np.uint32(0x1000), in_f16 + np.uint32(0xFFF), in_f16 + np.uint32(0x1001)])
    return np.concatenate([anything, ties, near_f16, np.array([0, 1, 0x477FF000, 0x477FEFFF, 0x7F800000], np.uint32)])


def nan(bits: np.ndarray) -> np.ndarray:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def test_every_bf16_widens_to_itself() -> None:
    assert (conversion.cvt_f32_bf16(ALL_HALVES) == ALL_HALVES << np.uint32(16)).all()
    values = ALL_HALVES.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    got = conversion.cvt_f32_bf16(ALL_HALVES).view(np.float32)
    assert np.array_equal(got, values, equal_nan=True)


def test_bf16_rounding_agrees_with_ml_dtypes() -> None:
    bits = samples()
    got = conversion.cvt_bf16_f32(bits)
    with np.errstate(all="ignore"):
        want = bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    number = ~nan(bits)
    assert (got[number] == want[number]).all()
    # A NaN stays one, keeps its sign and top bits and becomes quiet.
    assert (got[~number] == (bits[~number] >> np.uint32(16) | np.uint32(0x40))).all()
    packed = conversion.cvt_pk_bf16_f32(bits[:64], bits[64:128])
    assert (packed == (got[:64] | got[64:128] << np.uint32(16))).all()


def test_every_f16_widens_exactly() -> None:
    got = conversion.cvt_f32_f16(ALL_HALVES)
    for half in range(0, 1 << 16, 5):
        want = F16.value(half)
        if want == NAN:
            assert int(got[half]) == (half & 0x8000) << 16 | 0x7FC00000 | (half & 0x3FF) << 13
        elif want == INFINITE:
            assert int(got[half]) == (half & 0x8000) << 16 | 0x7F800000
        else:
            assert F32.value(int(got[half])) == want
            assert int(got[half]) >> 31 == half >> 15
    flushed = conversion.cvt_f32_f16(ALL_HALVES, denorm=0)
    assert flushed[0x8001] == SIGN
    assert flushed[0x0400] == got[0x0400]


@pytest.mark.parametrize("overflow_clamps", [False, True])
def test_f16_rounding(overflow_clamps: bool) -> None:
    bits = samples()[::3]
    got = conversion.cvt_f16_f32(bits, overflow_clamps=overflow_clamps)
    for x, half in zip(bits.tolist(), got.tolist(), strict=True):
        value, sign = F32.value(x), x >> 16 & 0x8000
        if value == NAN:
            want = sign | 0x7E00 | x >> 13 & 0x3FF
        elif value == INFINITE:
            want = sign | 0x7C00
        else:
            want = sign | min(F16.round(abs(value)), 0x7BFF if overflow_clamps else 0x7C00)
        assert half == want, hex(x)


def test_f16_subnormal_results_can_be_flushed() -> None:
    tiny = np.array([0x33800000, 0xB3800000, 0x38800000], np.uint32)
    assert conversion.cvt_f16_f32(tiny, denorm=1).tolist() == [0, 0x8000, 0x0400]


def test_f16_toward_zero_never_exceeds_its_operand() -> None:
    bits = samples()[::3]
    got = conversion.cvt_pkrtz_f16_f32(bits, bits)
    assert ((got >> np.uint32(16)) == (got & np.uint32(0xFFFF))).all()
    for x, packed in zip(bits.tolist(), got.tolist(), strict=True):
        value, half = F32.value(x), packed & 0xFFFF
        if isinstance(value, str):
            continue
        assert half >> 15 == x >> 31
        below, above = abs(F16.value(half & 0x7FFF)), F16.value((half & 0x7FFF) + 1)
        assert below <= abs(value)
        assert above == INFINITE or abs(value) < above


def test_floats_to_integers_truncate_and_saturate() -> None:
    special = [
        0x4EFFFFFF,
        0x4F000000,
        0x4F7FFFFF,
        0x4F800000,
        0xCF000000,
        0xCF000001,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
    ]
    bits = np.concatenate([samples()[::4], np.array([*special, 0xBF7FFFFF, 0x3F000000, 0xBF000000], np.uint32)])
    bits = np.concatenate([bits, np.float32(RNG.normal(size=2000) * 2.0 ** RNG.integers(-3, 34, 2000)).view(np.uint32)])
    got = {n: getattr(conversion, f"cvt_{n}_f32")(bits).tolist() for n in ("i32", "u32", "rpi_i32", "flr_i32")}
    for i, x in enumerate(bits.tolist()):
        value = F32.value(x)
        if value == NAN:
            want = {"i32": 0, "u32": 0, "rpi_i32": 0, "flr_i32": 0}
        else:
            if value == INFINITE:
                value = Fraction(-(2**80) if x >> 31 else 2**80)
            signed = lambda n: max(-(2**31), min(2**31 - 1, n)) & 0xFFFFFFFF  # noqa: E731
            want = {
                "i32": signed(math.trunc(value)),
                "u32": max(0, min(2**32 - 1, math.trunc(value))),
                "rpi_i32": signed(math.floor(value + Fraction(1, 2))),
                "flr_i32": signed(math.floor(value)),
            }
        for name, result in want.items():
            assert got[name][i] == result, (name, hex(x))


def test_integers_to_floats_round_to_nearest_even() -> None:
    edges = [0, 1, 0xFFFFFF, 0x1000001, 0x1000003, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFF7F, 0xFFFFFF80]
    bits = np.concatenate([RNG.integers(0, 2**32, 3000, dtype=np.uint32), np.array(edges, np.uint32)])
    unsigned, signed = conversion.cvt_f32_u32(bits), conversion.cvt_f32_i32(bits)
    for x, u, s in zip(bits.tolist(), unsigned.tolist(), signed.tolist(), strict=True):
        value = x - (1 << 32) if x >> 31 else x
        assert u == F32.round(Fraction(x))
        assert s == F32.round(Fraction(abs(value))) | (SIGN if value < 0 else 0)
    for byte in range(4):
        got = conversion.cvt_f32_ubyte(bits, byte).view(np.float32)
        assert (got == (bits >> np.uint32(8 * byte) & np.uint32(255)).astype(float)).all()


def test_halves_and_short_integers() -> None:
    unsigned, signed = conversion.cvt_f16_u16(ALL_HALVES), conversion.cvt_f16_i16(ALL_HALVES)
    to_u, to_i = conversion.cvt_u16_f16(ALL_HALVES), conversion.cvt_i16_f16(ALL_HALVES)
    for x in range(0, 1 << 16, 11):
        value = x - (1 << 16) if x >> 15 else x
        assert int(unsigned[x]) == F16.round(Fraction(x))
        assert int(signed[x]) == F16.round(Fraction(abs(value))) | (0x8000 if value < 0 else 0)
        half = F16.value(x)
        if half == NAN:
            half = Fraction(0)
        elif half == INFINITE:
            half = Fraction(-(2**20) if x >> 15 else 2**20)
        assert int(to_u[x]) == max(0, min(0xFFFF, math.trunc(half)))
        assert int(to_i[x]) == max(-0x8000, min(0x7FFF, math.trunc(half))) & 0xFFFF


def test_doubles() -> None:
    bits = samples()
    wide = conversion.cvt_f64_f32(bits)
    number = ~nan(bits)
    assert [float(v) for v in wide[number][:2000].view(np.float64)] == [
        f32_value(b) for b in bits[number][:2000].tolist()
    ]
    assert (conversion.cvt_f32_f64(wide)[number] == bits[number]).all()
    assert (conversion.cvt_f32_f64(wide)[~number] == (bits[~number] | np.uint32(QUIET))).all()
    fine = np.array([1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50, 2.0**-150, 1e300, -3e9, 2.0**32, float("nan")])
    narrow = conversion.cvt_f32_f64(fine.view(np.uint64))
    assert narrow[:4].tolist() == [0x3F800000, 0x3F800001, 0, 0x7F800000]
    assert conversion.cvt_i32_f64(fine.view(np.uint64))[3:].tolist() == [0x7FFFFFFF, SIGN, 0x7FFFFFFF, 0]
    assert conversion.cvt_u32_f64(fine.view(np.uint64))[3:].tolist() == [0xFFFFFFFF, 0, 0xFFFFFFFF, 0]
    assert conversion.cvt_f64_i32(bits[:50]).view(np.float64).tolist() == bits[:50].view(np.int32).tolist()
    assert conversion.cvt_f64_u32(bits[:50]).view(np.float64).tolist() == bits[:50].tolist()


def test_packing_a_float_as_a_byte() -> None:
    value = np.array([300.0, -5.0, 17.9, np.nan], np.float32).view(np.uint32)
    got = conversion.cvt_pk_u8_f32(value, np.array([0, 1, 2, 7], np.uint32), np.uint32(0x11223344))
    assert got.tolist() == [0x112233FF, 0x11220044, 0x11113344, 0x00223344]
