"""Conversions, executed from ISA text: against ml_dtypes for fp8, bf8, bf16 and fp4, rational numbers for the rest."""

import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from op_tests.emulator_float_statements import single as fs
from op_tests.emulator_text import LANES, M32, PREFILL, agree, operand_table, pair, run_text, signed
from op_tests.exact_floats import F16, F32, f32_bits

FP8, BF8 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
NARROW = {"fp8": FP8, "bf8": BF8}
LARGEST = {"fp8": 448.0, "bf8": 57344.0}
OVERFLOW = "\t\t.amdhsa_fp16_overflow 1"


def lanes(values):
    """Any number of words as [cases, 64], repeating the first ones."""
    values = np.asarray(values)
    return np.resize(values, (-(-len(values) // LANES), LANES))


def floats():
    """f32 words: integers and halves around every width's limits, edges, random ones."""
    generator = np.random.default_rng(0)
    limits = [2.0**k + d for k in (0, 7, 8, 15, 16, 24, 31, 32, 33) for d in (-1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2.5)]
    some = np.array(
        [*limits, *(-x for x in limits), 0.49999997, 8388607.5, 65504, 65519.9, 65520, 2**-24, 2**-25], np.float32
    )
    edges = np.array(
        [0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 0x00800000], np.uint32
    )
    scattered = (generator.standard_normal(200) * 2.0 ** generator.integers(-30, 34, 200)).astype(np.float32)
    patterns = generator.integers(0, 1 << 32, 100, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([some.view(np.uint32), edges, scattered.view(np.uint32), patterns])


def saturating(bits, how, low, high):
    number = F32.value(bits)
    if number == "nan":
        return 0
    if number == "infinite":
        return (low if bits >> 31 else high) & M32
    return max(low, min(high, how(number))) & M32


def half(bits, *, toward_zero=False):
    """f16 bits of an f32."""
    number, sign = F32.value(bits), bits >> 16 & 0x8000
    if number == "nan":
        return "nan"
    if number == "infinite":
        return sign | 0x7C00
    code = F16.round(abs(number))
    if toward_zero and (code > F16.largest or F16.value(code) > abs(number)):
        code -= 1
    return sign | code


def is_half_nan(bits):
    return bits & 0x7FFF > 0x7E00 - 1


def from_half(bits):
    if bits & 0x7FFF > 0x7C00:
        return "nan"
    return f32_bits(struct.unpack("<e", struct.pack("<H", bits))[0])


def nearest_up(bits):
    """floor(x + 0.5): left open where the sum itself would be rounded."""
    number = F32.value(bits)
    if not isinstance(number, str):
        exact = number + Fraction(1, 2)
        if F32.value(F32.round(abs(exact))) != abs(exact):
            return None
    return saturating(bits, lambda x: math.floor(x + Fraction(1, 2)), -(1 << 31), (1 << 31) - 1)


def double(bits):
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def double_bits(value):
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def from_double(bits):
    value = double(bits)
    sign = bits >> 32 & 0x80000000
    if math.isnan(value):
        return "nan"
    return sign | 0x7F800000 if math.isinf(value) else fs.nearest(Fraction(value), sign)


def double_to_integer(bits, low, high):
    value = double(bits)
    if math.isnan(value):
        return 0
    return max(low, min(high, int(value) if math.isfinite(value) else (high if value > 0 else low))) & M32


I32_RANGE, U32_RANGE = (-(1 << 31), (1 << 31) - 1), (0, M32)

# One 32-bit source, one 32-bit result.
PLAIN = {
    "v_cvt_f32_i32": lambda a: fs.nearest(Fraction(signed(a))),
    "v_cvt_f32_u32": lambda a: fs.nearest(Fraction(a)),
    "v_cvt_i32_f32": lambda a: saturating(a, math.trunc, *I32_RANGE),
    "v_cvt_u32_f32": lambda a: saturating(a, math.trunc, *U32_RANGE),
    "v_cvt_rpi_i32_f32": nearest_up,
    "v_cvt_flr_i32_f32": lambda a: saturating(a, math.floor, *I32_RANGE),
    "v_cvt_f32_f16": lambda a: from_half(a & 0xFFFF),
    "v_cvt_f32_bf16": lambda a: "nan" if fs.is_nan(a << 16 & M32) else a << 16 & M32,
    "v_cvt_f32_ubyte0": lambda a: fs.nearest(Fraction(a & 0xFF)),
    "v_cvt_f32_ubyte1": lambda a: fs.nearest(Fraction(a >> 8 & 0xFF)),
    "v_cvt_f32_ubyte2": lambda a: fs.nearest(Fraction(a >> 16 & 0xFF)),
    "v_cvt_f32_ubyte3": lambda a: fs.nearest(Fraction(a >> 24)),
}
PACKING = {
    "v_cvt_pkrtz_f16_f32": lambda a, b: (half(a, toward_zero=True), half(b, toward_zero=True)),
    "v_cvt_pk_f16_f32": lambda a, b: (half(a), half(b)),
}
WIDE = {
    "v_cvt_f32_f64": (64, 32, from_double),
    "v_cvt_i32_f64": (64, 32, lambda a: double_to_integer(a, *I32_RANGE)),
    "v_cvt_u32_f64": (64, 32, lambda a: double_to_integer(a, *U32_RANGE)),
    "v_cvt_f64_i32": (32, 64, lambda a: double_bits(float(signed(a)))),
    "v_cvt_f64_u32": (32, 64, lambda a: double_bits(float(a))),
    "v_cvt_f64_f32": (
        32,
        64,
        lambda a: "nan" if fs.is_nan(a) else double_bits(struct.unpack("<f", struct.pack("<I", a))[0]),
    ),
}
OTHERS = ("v_cvt_f16_f32", "v_cvt_pk_bf16_f32", "v_cvt_pk_u8_f32")
NARROW_ROWS = (
    *("v_cvt_f32_fp8", "v_cvt_f32_bf8", "v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8", "v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32"),
    *("v_cvt_scalef32_pk_fp8_f32", "v_cvt_scalef32_pk_bf8_f32", "v_cvt_scalef32_pk_fp4_f32"),
    *("v_cvt_scalef32_pk_f32_fp8", "v_cvt_scalef32_pk_f32_bf8", "v_cvt_scalef32_pk_f32_fp4"),
)
ROWS = (*PLAIN, *PACKING, *WIDE, *OTHERS, *NARROW_ROWS)


@pytest.mark.parametrize("mnemonic", PLAIN)
def test_plain(mnemonic):
    if mnemonic in ("v_cvt_f32_f16", "v_cvt_f32_bf16"):
        source = lanes(np.arange(1 << 16, dtype=np.uint32) | np.uint32(0xABCD0000))
    elif mnemonic.startswith("v_cvt_f32"):
        source = lanes(operand_table(1, 500)[0])
    else:
        source = lanes(floats())
    got = run_text(f"    {mnemonic}_e32 v30, v10", ["v30"], vectors={10: source})["v30"]
    want = [PLAIN[mnemonic](a) for a in source.ravel().tolist()]
    # bf16 is widened by shifting, which quiets no NaN.
    agree(mnemonic, got, want, source, nan=fs.is_nan if "bf16" in mnemonic else fs.is_quiet_nan)


@pytest.mark.parametrize("mnemonic", PACKING)
def test_two_floats_to_two_halves(mnemonic):
    a = lanes(floats())
    b = np.roll(a.ravel(), 7).reshape(a.shape)
    got = run_text(f"    {mnemonic} v30, v10, v11", ["v30"], vectors={10: a, 11: b})["v30"]
    low, high = zip(
        *(PACKING[mnemonic](x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)), strict=True
    )
    agree(mnemonic, got & 0xFFFF, low, a, nan=is_half_nan)
    agree(mnemonic, got >> 16, high, b, nan=is_half_nan)


def test_to_half_clears_the_upper_half():
    a = lanes(floats())
    got = run_text("    v_cvt_f16_f32_e32 v30, v10", ["v30"], vectors={10: a})["v30"]
    agree("v_cvt_f16_f32", got, [half(x) for x in a.ravel().tolist()], a, nan=is_half_nan)


def test_to_half_clamps_with_fp16_ovfl():
    a = lanes(np.array([65519.0, 65520.0, 1e30, -1e30, np.inf, -np.inf, 1.0], np.float32).view(np.uint32))
    got = run_text("    v_cvt_f16_f32_e32 v30, v10", ["v30"], vectors={10: a}, directives=OVERFLOW)["v30"]
    assert got[0, :7].tolist() == [0x7BFF, 0x7BFF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x3C00]


def test_two_floats_to_bf16():
    # Every bf16 pattern, with what is cut off just below, at and above the middle.
    top = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    a = lanes(np.concatenate([top | np.uint32(rest) for rest in (0, 0x7FFF, 0x8000, 0x8001)]))
    b = np.roll(a.ravel(), 12345).reshape(a.shape)
    got = run_text("    v_cvt_pk_bf16_f32 v30, v10, v11", ["v30"], vectors={10: a, 11: b})["v30"]
    for result, source in ((got & 0xFFFF, a), (got >> 16, b)):
        value = source.view(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            want = value.astype(ml_dtypes.bfloat16).view(np.uint16)
        number = ~np.isnan(value)
        np.testing.assert_array_equal(result[number], want[number])
        assert (result[~number] & 0x7FFF > 0x7F80).all()


def test_float_to_a_byte_of_a_register():
    a = lanes(
        np.array([0, 1, 2, 127, 128, 200, 254, 255, 256, 1000, -1, -300, np.inf, -np.inf, np.nan], np.float32).view(
            np.uint32
        )
    )
    position = np.arange(LANES, dtype=np.uint32)[None] // 15
    old = lanes(operand_table(1, LANES)[0])
    got = run_text("    v_cvt_pk_u8_f32 v30, v10, v11, v12", ["v30"], vectors={10: a, 11: position, 12: old})["v30"]
    want = []
    for x, p, o in zip(a.ravel().tolist(), position.ravel().tolist(), old.ravel().tolist(), strict=True):
        byte = min(saturating(x, math.trunc, *I32_RANGE), 255) if not x >> 31 else 0
        shift = 8 * (p % 4)
        want.append(o & ~(0xFF << shift) | byte << shift)
    agree("v_cvt_pk_u8_f32", got, want, a, position, old)


@pytest.mark.parametrize("mnemonic", WIDE)
def test_doubles(mnemonic):
    source_bits, result_bits, statement = WIDE[mnemonic]
    if source_bits == 64:
        words = floats()
        with np.errstate(invalid="ignore"):
            values = words.view(np.float32).astype(np.float64)
        more = np.array(
            [
                2.0**31 - 0.5,
                -(2.0**31) - 0.5,
                2.0**32 - 0.5,
                1e300,
                -1e300,
                1e-310,
                1 + 2.0**-24,
                1 + 2.0**-24 + 2.0**-52,
                3.4028235677973366e38,
                3.4028235677973362e38,
            ]
        )
        source = lanes(np.concatenate([values, more, -more]).view(np.uint64))
        vectors = {10: source.astype(np.uint32), 11: (source >> np.uint64(32)).astype(np.uint32)}
    else:
        source = lanes(floats() if mnemonic.endswith("f32") else operand_table(1, 300)[0])
        vectors = {10: source}
    operand = "v[10:11]" if source_bits == 64 else "v10"
    target = "v[30:31]" if result_bits == 64 else "v30"
    got = run_text(f"    {mnemonic}_e32 {target}, {operand}", ["v30", "v31"], vectors=vectors)
    result = pair(got["v30"], got["v31"]) if result_bits == 64 else got["v30"]
    want = [statement(x) for x in source.ravel().tolist()]
    nan = (lambda bits: math.isnan(double(bits))) if result_bits == 64 else fs.is_quiet_nan
    agree(mnemonic, result, want, source, nan=nan)


# -- eight bits and fewer ----------------------------------------------------------------------------------------------

ALL_WORDS = lanes(np.arange(1 << 16, dtype=np.uint32) * np.uint32(0x00010001) ^ np.uint32(0x5A000000))


def byte_of(words, position):
    return (words >> np.uint32(8 * position) & np.uint32(0xFF)).astype(np.uint8)


def same_floats(got, want):
    """Bits of f32 results against float32 values; any NaN is as good as another."""
    got, want = got.view(np.float32), np.asarray(want, np.float32)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


@pytest.mark.parametrize("selection", ["", "BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3"])
@pytest.mark.parametrize("form", NARROW)
def test_one_byte_to_a_float(form, selection):
    text = (
        f"    v_cvt_f32_{form}_sdwa v30, v10 src0_sel:{selection}"
        if selection
        else f"    v_cvt_f32_{form}_e32 v30, v10"
    )
    got = run_text(text, ["v30"], vectors={10: ALL_WORDS})["v30"]
    same_floats(got, byte_of(ALL_WORDS, int(selection[-1:] or 0)).view(NARROW[form]).astype(np.float32))


@pytest.mark.parametrize("selection", ["", "WORD_0", "WORD_1"])
@pytest.mark.parametrize("form", NARROW)
def test_two_bytes_to_two_floats(form, selection):
    suffix = f"_sdwa v[30:31], v10 src0_sel:{selection}" if selection else "_e32 v[30:31], v10"
    got = run_text(f"    v_cvt_pk_f32_{form}{suffix}", ["v30", "v31"], vectors={10: ALL_WORDS})
    first = 2 * int(selection[-1:] or 0)
    for name, position in (("v30", first), ("v31", first + 1)):
        same_floats(got[name], byte_of(ALL_WORDS, position).view(NARROW[form]).astype(np.float32))


def rounding_cases():
    """Every bf16 value, exact and with something below it: every middle of two fp8 or bf8 numbers is among them."""
    top = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    return lanes(np.concatenate([top, top | np.uint32(1), top | np.uint32(0xFFFF)]))


def narrowed(values, form, clamps):
    """Codes of values by ml_dtypes, which rounds once; FP16_OVFL clamps finite numbers, and fp8's infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        code = values.astype(NARROW[form]).view(np.uint8).copy()
        if clamps:
            largest = np.array(LARGEST[form], np.float64).astype(NARROW[form]).view(np.uint8)
            sign = np.where(np.signbit(values), 0x80, 0).astype(np.uint8)
            beyond = ~np.isnan(values) & ~np.isfinite(code.view(NARROW[form]).astype(np.float32))
            if form == "bf8":
                beyond &= np.isfinite(values)
            code[beyond] = largest | sign[beyond]
    return code


def same_codes(got, want, form):
    got = got.astype(np.uint8)
    nan = np.isnan(want.view(NARROW[form]).astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.view(NARROW[form]).astype(np.float32)), nan)
    np.testing.assert_array_equal(got[~nan], want[~nan])


@pytest.mark.parametrize("clamps", [False, True], ids=["", "fp16_ovfl"])
@pytest.mark.parametrize("high", [False, True], ids=["low", "high"])
@pytest.mark.parametrize("form", NARROW)
def test_two_floats_to_bytes(form, high, clamps):
    a = rounding_cases()
    b = np.roll(a.ravel(), 54321).reshape(a.shape)
    text = f"    v_cvt_pk_{form}_f32 v30, v10, v11" + (" op_sel:[0,0,1]" if high else "")
    got = run_text(text, ["v30"], vectors={10: a, 11: b}, directives=OVERFLOW if clamps else "")["v30"]
    shift = 16 if high else 0
    for source, place in ((a, shift), (b, shift + 8)):
        same_codes(got >> place & 0xFF, narrowed(source.view(np.float32), form, clamps), form)
    kept = 0xFFFF << (16 - shift)
    assert (got & kept == PREFILL & kept).all()


def test_fp16_ovfl_can_be_switched_on_by_the_program():
    a = lanes(np.array([500.0, -1e9, 448.0], np.float32).view(np.uint32))
    set_it = "    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {}\n    v_cvt_pk_fp8_f32 v30, v10, v10"
    got = [run_text(set_it.format(bit), ["v30"], vectors={10: a})["v30"][0, :3] & 0x7F for bit in (0, 1)]
    assert [row.tolist() for row in got] == [[0x7F, 0x7F, 0x7E], [0x7E, 0x7E, 0x7E]]


SCALES = (1.0, 2.0, 0.5, 1.75, -3.0, 2.0**20, 2.0**-20, 2.0**100, 2.0**-100, 2.0**-126)


def scale_columns(shape):
    scale = np.resize(np.array(SCALES, np.float32), shape)
    # Only the exponent counts: neither sign nor significand.
    return scale.view(np.uint32), 2.0 ** (np.frexp(scale.astype(np.float64))[1] - 1)


@pytest.mark.parametrize("form", NARROW)
def test_scaled_floats_to_bytes(form):
    generator = np.random.default_rng(3)
    base = (generator.standard_normal((200, LANES)) * 2.0 ** generator.integers(-12, 12, (200, LANES))).astype(
        np.float64
    )
    words, factor = scale_columns(base.shape)
    a = np.clip(base * factor, -3e38, 3e38).astype(np.float32)
    b = np.roll(a, 1, axis=0)
    for high in (0, 1):
        text = f"    v_cvt_scalef32_pk_{form}_f32 v30, v10, v11, v12" + (" op_sel:[0,0,0,1]" if high else "")
        got = run_text(text, ["v30"], vectors={10: a.view(np.uint32), 11: b.view(np.uint32), 12: words})["v30"]
        for source, place in ((a, 16 * high), (b, 16 * high + 8)):
            same_codes(got >> place & 0xFF, narrowed(source.astype(np.float64) / factor, form, False), form)
        kept = 0xFFFF << (16 - 16 * high)
        assert (got & kept == PREFILL & kept).all()


@pytest.mark.parametrize("form", NARROW)
def test_scaled_bytes_to_floats(form):
    words, factor = scale_columns(ALL_WORDS.shape)
    for high in (0, 1):
        text = f"    v_cvt_scalef32_pk_f32_{form} v[30:31], v10, v12" + (" op_sel:[1,0,0]" if high else "")
        got = run_text(text, ["v30", "v31"], vectors={10: ALL_WORDS, 12: words})
        for name, position in (("v30", 2 * high), ("v31", 2 * high + 1)):
            same_floats(got[name], byte_of(ALL_WORDS, position).view(NARROW[form]).astype(np.float64) * factor)


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4(number):
    """Code of the nearest number, ties to the even code; beyond the range the largest."""
    magnitude = min(abs(number), FP4_VALUES[-1])
    distance = [abs(magnitude - value) for value in FP4_VALUES]
    best = min(range(8), key=lambda code: (distance[code], code % 2))
    return best | (8 if math.copysign(1, number) < 0 else 0)


def test_scaled_floats_to_fp4():
    generator = np.random.default_rng(4)
    base = generator.choice([*FP4_VALUES, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.5, 7.0, 100.0], (20, LANES))
    base = base * generator.choice([-1, 1, 1.01, 0.99], base.shape)
    words, factor = scale_columns(base.shape)
    a = (base * factor).astype(np.float32)
    b = np.roll(a, 1, axis=0)
    for part in range(4):
        text = f"    v_cvt_scalef32_pk_fp4_f32 v30, v10, v11, v12 op_sel:[0,0,{part % 2},{part // 2}]"
        got = run_text(text, ["v30"], vectors={10: a.view(np.uint32), 11: b.view(np.uint32), 12: words})["v30"]
        for source, place in ((a, 8 * part), (b, 8 * part + 4)):
            scaled = (source.astype(np.float64) / factor).ravel().tolist()
            agree(
                "v_cvt_scalef32_pk_fp4_f32", got >> np.uint32(place) & np.uint32(0xF), [fp4(x) for x in scaled], source
            )
        kept = M32 ^ 0xFF << 8 * part
        assert (got & kept == PREFILL & kept).all()


def test_scaled_fp4_to_floats():
    source = lanes(np.arange(256, dtype=np.uint32) * np.uint32(0x01010101) ^ np.uint32(0x11335577))
    words, factor = scale_columns(source.shape)
    values = np.array([*FP4_VALUES, *(-x for x in FP4_VALUES)])
    for part in range(4):
        text = f"    v_cvt_scalef32_pk_f32_fp4 v[30:31], v10, v12 op_sel:[{part % 2},{part // 2},0]"
        got = run_text(text, ["v30", "v31"], vectors={10: source, 12: words})
        for name, place in (("v30", 8 * part), ("v31", 8 * part + 4)):
            same_floats(got[name], values[source >> np.uint32(place) & np.uint32(0xF)] * factor)


def test_clamp_and_multiplier_apply_to_a_converted_float():
    a = lanes(np.array([0, 1, 0x3C00, 0x3800, 0xBC00, 0x7E00], np.uint32))
    got = run_text("    v_cvt_f32_f16_e64 v30, v10 clamp", ["v30"], vectors={10: a})["v30"]
    assert got[0, :6].tolist() == [0, 0x33800000, 0x3F800000, 0x3F000000, 0, 0]
    got = run_text("    v_cvt_f32_u32_e64 v30, v10 mul:2", ["v30"], vectors={10: np.full((1, 64), 3, np.uint32)})["v30"]
    assert (got.view(np.float32) == 6).all()


def test_the_upper_half_is_converted_through_sdwa():
    a = lanes(operand_table(1, 256)[0])
    got = run_text(
        "    v_cvt_f32_f16_sdwa v30, v10 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1", ["v30"], vectors={10: a}
    )["v30"]
    agree("v_cvt_f32_f16_sdwa", got, [from_half(x >> 16) for x in a.ravel().tolist()], a, nan=fs.is_quiet_nan)
