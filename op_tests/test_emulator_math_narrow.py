"""fp8, bf8, fp6, bf6 and fp4 against ml_dtypes and rational numbers, over all codes and all rounding cases."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from aiter_paged_fp8.emulator.math import narrow
from aiter_paged_fp8.emulator.math.narrow import BF6, BF8, FP4, FP6, FP8, Narrow, Wide
from op_tests.exact_floats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, INFINITE, NAN, Format, f32_bits

RNG = np.random.default_rng(23)
FORMS: dict[str, tuple[Narrow, Format, type]] = {
    "fp8": (FP8, E4M3, ml_dtypes.float8_e4m3fn),
    "bf8": (BF8, E5M2, ml_dtypes.float8_e5m2),
    "fp6": (FP6, E2M3, ml_dtypes.float6_e2m3fn),
    "bf6": (BF6, E3M2, ml_dtypes.float6_e3m2fn),
    "fp4": (FP4, E2M1, ml_dtypes.float4_e2m1fn),
}
every_form = pytest.mark.parametrize("name", FORMS)
eight_bits = pytest.mark.parametrize("name", ["fp8", "bf8"])


def all_roundings() -> np.ndarray:
    """Every sign, exponent and top-four mantissa bits of f32, with nothing, something and nearly everything below."""
    top = np.arange(1 << 13, dtype=np.uint32) << np.uint32(19)
    return np.concatenate([top | np.uint32(below) for below in (0, 1, 0x2F1A3, 0x40000, 0x7FFFF)])


def is_nan(bits: np.ndarray) -> np.ndarray:
    return (bits & 0x7FFFFFFF) > 0x7F800000


@every_form
def test_every_code_decodes_to_its_value(name: str) -> None:
    form, reference, dtype = FORMS[name]
    codes = np.arange(1 << form.bits, dtype=np.uint32)
    got = narrow.decode(codes, form)
    for code, bits in enumerate(got.tolist()):
        want = reference.value(code)
        if want == NAN:
            assert F32.value(bits) == NAN
            assert bits & 0x00400000
        else:
            assert F32.value(bits) == want
        assert bits >> 31 == code >> (form.bits - 1)
    with np.errstate(all="ignore"):
        theirs = codes.astype(np.uint8).view(dtype).astype(np.float32)
    assert np.array_equal(got.view(np.float32), theirs, equal_nan=True)


@every_form
def test_rounding_of_every_number_agrees_with_ml_dtypes(name: str) -> None:
    form, reference, dtype = FORMS[name]
    bits = all_roundings()
    # ml_dtypes and the hardware part ways on NaNs of formats without one.
    bits = bits if form.bits == 8 else bits[~is_nan(bits) & ((bits & 0x7FFFFFFF) != 0x7F800000)]
    got = narrow.encode(bits, form)
    with np.errstate(all="ignore"):
        theirs = bits.view(np.float32).astype(dtype).view(np.uint8)
    nan = is_nan(bits)
    assert (got[~nan] == theirs[~nan]).all()
    assert all(reference.value(code) == NAN for code in got[nan].tolist())


@every_form
@pytest.mark.parametrize("overflow_clamps", [False, True])
def test_rounding_by_rational_numbers_and_what_overflows(name: str, overflow_clamps: bool) -> None:
    form, reference, _ = FORMS[name]
    bits = all_roundings()
    values = np.concatenate([RNG.choice(bits, 3000), f32_near_the_top(reference)])
    got = narrow.encode(values, form, overflow_clamps=overflow_clamps)
    for x, code in zip(values.tolist(), got.tolist(), strict=True):
        number, sign = F32.value(x), reference.sign_bit if x >> 31 else 0
        clamps = overflow_clamps or reference.top == "finite"
        if number == NAN:
            assert reference.value(code) == NAN if reference.top != "finite" else code == sign | reference.largest
            continue
        if number == INFINITE:
            # A true infinity survives FP16_OVFL where the format has one.
            want = reference.infinity if reference.top == "ieee" else reference.largest + (not clamps)
        else:
            want = min(reference.round(abs(number)), reference.largest + (not clamps))
        assert code == sign | want, (hex(x), hex(code))


def f32_near_the_top(reference: Format) -> np.ndarray:
    largest = float(reference.value(reference.largest))
    half_step = float(reference.value(reference.largest) - reference.value(reference.largest - 1)) / 2
    edges = [largest, largest + half_step]
    bits = [f32_bits(e) + d for e in edges for d in (-1, 0, 1)] + [0x7F7FFFFF, 0x7F800000, 0x7F800001]
    return np.array(bits + [b | 0x80000000 for b in bits], np.uint32)


@eight_bits
def test_packing_two_values_keeps_the_other_half(name: str) -> None:
    form, _, dtype = FORMS[name]
    a, b = (np.float32(RNG.normal(size=(3, 64)) * 20) for _ in range(2))
    old = RNG.integers(0, 2**32, (3, 64), dtype=np.uint32)
    first, second = (x.astype(dtype).view(np.uint8).astype(np.uint32) for x in (a, b))
    pair = first | second << np.uint32(8)
    arguments = (a.view(np.uint32), b.view(np.uint32), old)
    low = narrow.cvt_pk_narrow_f32(*arguments, form=form, word=0)
    high = narrow.cvt_pk_narrow_f32(*arguments, form=form, word=1)
    assert (low == (old & 0xFFFF0000 | pair)).all()
    assert (high == (old & 0xFFFF | pair << np.uint32(16))).all()


def test_subnormal_inputs_are_flushed_on_demand() -> None:
    # Only a scale brings a subnormal float into the range of fp8.
    tiny, scale = np.array([0x00400000], np.uint32), np.array([1 << 23], np.uint32)
    for denorm, code in ((3, 0x30), (0, 0x00)):
        got = narrow.cvt_scalef32_pk_narrow(tiny, tiny, scale, scale * 0, form=FP8, part=0, denorm=denorm)
        assert got.tolist() == [code | code << 8]
    assert narrow.cvt_pk_narrow_f32(tiny, tiny, tiny * 0, form=FP8, word=0, denorm=0).tolist() == [0]


@eight_bits
def test_bytes_and_words_are_picked_for_decoding(name: str) -> None:
    form, _, dtype = FORMS[name]
    source = RNG.integers(0, 2**32, (2, 64), dtype=np.uint32)
    with np.errstate(all="ignore"):
        values = source[..., None].view(np.uint8).view(dtype).astype(np.float32)
    for byte in range(4):
        got = narrow.cvt_f32_narrow(source, form=form, byte=byte).view(np.float32)
        assert np.array_equal(got, values[..., byte], equal_nan=True)
    for word in range(2):
        pair = narrow.cvt_pk_f32_narrow(source, form=form, word=word)
        for n in range(2):
            assert np.array_equal(pair[n].view(np.float32), values[..., 2 * word + n], equal_nan=True)


def scale_operand(exponents: np.ndarray) -> np.ndarray:
    """A float with these exponents; its sign and mantissa must not matter."""
    noise = RNG.integers(0, 2**32, exponents.shape, dtype=np.uint32) & np.uint32(0x807FFFFF)
    return exponents.astype(np.uint32) << np.uint32(23) | noise


def narrowed(reference: Format, number: Fraction | str, negative: bool, exponent: int, clamps: bool) -> int:
    sign = reference.sign_bit if negative else 0
    clamps = clamps or reference.top == "finite"
    if exponent == 255 or number == NAN:
        return sign | (reference.largest if reference.top == "finite" else reference.sign_bit - 1)
    if number == INFINITE:
        return sign | (reference.infinity if reference.top == "ieee" else reference.largest + (not clamps))
    scaled = abs(number) / Fraction(2) ** (exponent - 127)
    return sign | min(reference.round(scaled), reference.largest + (not clamps))


@pytest.mark.parametrize("overflow_clamps", [False, True])
@pytest.mark.parametrize("name", ["fp8", "bf8", "fp4"])
def test_scaled_conversion_divides_and_rounds_once(name: str, overflow_clamps: bool) -> None:
    form, reference, _ = FORMS[name]
    parts = 32 // (2 * form.bits)
    exponents = RNG.integers(0, 255, 1500)
    # Values that the scale brings near the format's range, and some that it does not.
    spread = RNG.integers(-12, 18, (2, 1500))
    field = np.clip(exponents + np.where(RNG.random((2, 1500)) < 0.9, spread, 60), 0, 254).astype(np.uint32)
    s = RNG.integers(0, 2**32, (2, 1500), dtype=np.uint32) & np.uint32(0x807FFFFF) | field << np.uint32(23)
    s[0, :6] = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7FFFFF]
    exponents[:6] = [127, 127, 127, 0, 0, 60]
    old, scale = RNG.integers(0, 2**32, 1500, dtype=np.uint32), scale_operand(exponents)
    for part in range(parts):
        got = narrow.cvt_scalef32_pk_narrow(
            s[0], s[1], scale, old, form=form, part=part, overflow_clamps=overflow_clamps
        )
        for i in range(part, 1500, parts):
            codes = [
                narrowed(reference, F32.value(int(x)), bool(x >> 31), int(exponents[i]), overflow_clamps)
                for x in s[:, i]
            ]
            if NAN in (reference.value(c) for c in codes):
                continue
            width = 2 * form.bits
            inserted = (codes[0] | codes[1] << form.bits) << width * part
            assert int(got[i]) == int(old[i]) & ~(((1 << width) - 1) << width * part) | inserted
    nan = narrow.cvt_scalef32_pk_narrow(
        *(np.array([v], np.uint32) for v in (f32_bits(1.0), 0, 0x7F800000, 0)), form=form, part=0
    )
    want = reference.largest if reference.top == "finite" else reference.sign_bit - 1
    assert int(nan[0]) & (reference.sign_bit - 1) == want


@pytest.mark.parametrize("wide", list(Wide))
@pytest.mark.parametrize("name", ["fp8", "bf8", "fp4"])
def test_scaled_conversion_from_narrow_multiplies_exactly(name: str, wide: Wide) -> None:
    form, reference, _ = FORMS[name]
    target = {Wide.F32: F32, Wide.F16: F16, Wide.BF16: BF16}[wide]
    source = RNG.integers(0, 2**32, 600, dtype=np.uint32)
    exponents = np.where(RNG.random(600) < 0.5, RNG.integers(100, 150, 600), RNG.integers(0, 255, 600))
    scale = scale_operand(exponents)
    for part in range(32 // (2 * form.bits)):
        got = narrow.cvt_scalef32_pk_from_narrow(source, scale, form=form, wide=wide, part=part)
        for i in range(600):
            halves = [int(g[i]) for g in got] if wide is Wide.F32 else [int(got[0][i]) & 0xFFFF, int(got[0][i]) >> 16]
            for n, result in enumerate(halves):
                code = int(source[i]) >> (2 * part + n) * form.bits & ((1 << form.bits) - 1)
                number = reference.value(code)
                if number == NAN:
                    assert target.value(result) == NAN
                    continue
                sign = target.sign_bit if code & reference.sign_bit else 0
                if number == INFINITE:
                    assert result == sign | target.infinity
                else:
                    assert result == sign | target.round(abs(number) * Fraction(2) ** (int(exponents[i]) - 127))
    if form.bits == 8 and wide is not Wide.BF16:
        for byte in range(4):
            single = narrow.cvt_scalef32_narrow(source, scale, form=form, wide=wide, byte=byte)
            pair = narrow.cvt_scalef32_pk_from_narrow(source, scale, form=form, wide=wide, part=byte // 2)
            packed = pair[byte % 2] if wide is Wide.F32 else pair[0] >> np.uint32(16 * (byte % 2)) & np.uint32(0xFFFF)
            assert (single == packed).all()


@pytest.mark.parametrize("wide", [Wide.F16, Wide.BF16])
@pytest.mark.parametrize("name", ["fp8", "bf8", "fp4"])
def test_scaled_conversion_of_two_halves(name: str, wide: Wide) -> None:
    form, reference, _ = FORMS[name]
    source_format = F16 if wide is Wide.F16 else BF16
    source = RNG.integers(0, 2**32, 800, dtype=np.uint32)
    values = [[source_format.value(int(x) & 0xFFFF), source_format.value(int(x) >> 16)] for x in source]
    exponents = RNG.integers(117, 137, 800)
    got = narrow.cvt_scalef32_pk_narrow_16(
        source, scale_operand(exponents), source * 0, form=form, wide=wide, part=1, overflow_clamps=True
    )
    for i, pair in enumerate(values):
        if NAN in pair:
            continue
        signs = [int(source[i]) >> 15 & 1, int(source[i]) >> 31]
        codes = [narrowed(reference, v, bool(s), int(exponents[i]), True) for v, s in zip(pair, signs, strict=True)]
        assert int(got[i]) == (codes[0] | codes[1] << form.bits) << 2 * form.bits


@pytest.mark.parametrize("name", ["fp6", "bf6"])
def test_thirty_two_six_bit_values_fill_six_registers(name: str) -> None:
    form, reference, _ = FORMS[name]
    values = np.float32(RNG.normal(size=(2, 32, 64)) * 4)
    exponents = RNG.integers(120, 135, (2, 64))
    scale = scale_operand(exponents)
    first, second = values[:, 0::2], values[:, 1::2]
    source = narrow.interleave(first.view(np.uint32), second.view(np.uint32))
    packed = narrow.cvt_scalef32_pk32_narrow(source, scale, form=form, wide=Wide.F32)
    assert packed.shape == (2, 6, 64)
    back = narrow.cvt_scalef32_pk32_from_narrow(packed, scale, form=form, wide=Wide.F32)
    halves = narrow.cvt_scalef32_pk32_from_narrow(packed, scale, form=form, wide=Wide.BF16)
    for lane in (0, 17, 63):
        whole = sum(int(r) << 32 * n for n, r in enumerate(packed[1, :, lane]))
        for n in range(32):
            number, exponent = Fraction(float(values[1, n, lane])), int(exponents[1, lane])
            code = whole >> 6 * n & 63
            assert code == narrowed(reference, number, number < 0, exponent, True)
            want = reference.value(code) * Fraction(2) ** (exponent - 127)
            assert F32.value(int(back[1, n, lane])) == want
            assert BF16.value(int(halves[1, n // 2, lane]) >> 16 * (n % 2) & 0xFFFF) == want
    # The same from halves: bf16 values, so that nothing is lost on the way.
    exact = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    packed_halves = (exact[:, 0::2].view(np.uint32) >> np.uint32(16)) | exact[:, 1::2].view(np.uint32)
    from_halves = narrow.cvt_scalef32_pk32_narrow(packed_halves, scale, form=form, wide=Wide.BF16)
    from_floats = narrow.cvt_scalef32_pk32_narrow(exact.view(np.uint32), scale, form=form, wide=Wide.F32)
    assert (from_halves == from_floats).all()
