"""Matrix instructions, executed from ISA text: operands taken apart lane by lane by the documented layouts, multiplied
in double precision, results looked up by the documented layout of D.
"""

import ml_dtypes
import numpy as np
import pytest

from op_tests.emulator_kernels import Kernel
from op_tests.emulator_text import LANES, PREFILL, run_text

CASES = 2
# Bits of an element and its type.
TYPES = {
    "f32": (32, np.float32),
    "f16": (16, np.float16),
    "bf16": (16, ml_dtypes.bfloat16),
    "i8": (8, np.int8),
    "fp8": (8, ml_dtypes.float8_e4m3fn),
    "bf8": (8, ml_dtypes.float8_e5m2),
    "fp6": (6, ml_dtypes.float6_e2m3fn),
    "bf6": (6, ml_dtypes.float6_e3m2fn),
    "fp4": (4, ml_dtypes.float4_e2m1fn),
}
# CBSZ and BLGP of the f8f6f4 forms.
FORMATS = ("fp8", "bf8", "fp6", "bf6", "fp4")
# Mnemonic: M = N, K, blocks, types of A and B.
DENSE = {
    "v_mfma_f32_32x32x1_2b_f32": (32, 1, 2, "f32", "f32"),
    "v_mfma_f32_16x16x1_4b_f32": (16, 1, 4, "f32", "f32"),
    "v_mfma_f32_4x4x1_16b_f32": (4, 1, 16, "f32", "f32"),
    "v_mfma_f32_32x32x2_f32": (32, 2, 1, "f32", "f32"),
    "v_mfma_f32_16x16x4_f32": (16, 4, 1, "f32", "f32"),
    "v_mfma_f32_32x32x4_2b_f16": (32, 4, 2, "f16", "f16"),
    "v_mfma_f32_16x16x4_4b_f16": (16, 4, 4, "f16", "f16"),
    "v_mfma_f32_4x4x4_16b_f16": (4, 4, 16, "f16", "f16"),
    "v_mfma_f32_32x32x8_f16": (32, 8, 1, "f16", "f16"),
    "v_mfma_f32_16x16x16_f16": (16, 16, 1, "f16", "f16"),
    "v_mfma_f32_32x32x16_f16": (32, 16, 1, "f16", "f16"),
    "v_mfma_f32_16x16x32_f16": (16, 32, 1, "f16", "f16"),
    "v_mfma_f32_32x32x4_2b_bf16_1k": (32, 4, 2, "bf16", "bf16"),
    "v_mfma_f32_16x16x4_4b_bf16_1k": (16, 4, 4, "bf16", "bf16"),
    "v_mfma_f32_4x4x4_16b_bf16_1k": (4, 4, 16, "bf16", "bf16"),
    "v_mfma_f32_32x32x8_bf16_1k": (32, 8, 1, "bf16", "bf16"),
    "v_mfma_f32_16x16x16_bf16_1k": (16, 16, 1, "bf16", "bf16"),
    "v_mfma_f32_32x32x16_bf16": (32, 16, 1, "bf16", "bf16"),
    "v_mfma_f32_16x16x32_bf16": (16, 32, 1, "bf16", "bf16"),
    "v_mfma_i32_32x32x4_2b_i8": (32, 4, 2, "i8", "i8"),
    "v_mfma_i32_16x16x4_4b_i8": (16, 4, 4, "i8", "i8"),
    "v_mfma_i32_4x4x4_16b_i8": (4, 4, 16, "i8", "i8"),
    "v_mfma_i32_32x32x16_i8": (32, 16, 1, "i8", "i8"),
    "v_mfma_i32_16x16x32_i8": (16, 32, 1, "i8", "i8"),
    "v_mfma_i32_32x32x32_i8": (32, 32, 1, "i8", "i8"),
    "v_mfma_i32_16x16x64_i8": (16, 64, 1, "i8", "i8"),
    "v_mfma_f32_32x32x16_fp8_fp8": (32, 16, 1, "fp8", "fp8"),
    "v_mfma_f32_32x32x16_fp8_bf8": (32, 16, 1, "fp8", "bf8"),
    "v_mfma_f32_32x32x16_bf8_fp8": (32, 16, 1, "bf8", "fp8"),
    "v_mfma_f32_32x32x16_bf8_bf8": (32, 16, 1, "bf8", "bf8"),
    "v_mfma_f32_16x16x32_fp8_fp8": (16, 32, 1, "fp8", "fp8"),
    "v_mfma_f32_16x16x32_fp8_bf8": (16, 32, 1, "fp8", "bf8"),
    "v_mfma_f32_16x16x32_bf8_fp8": (16, 32, 1, "bf8", "fp8"),
    "v_mfma_f32_16x16x32_bf8_bf8": (16, 32, 1, "bf8", "bf8"),
}
MIXED = {"v_mfma_f32_32x32x64_f8f6f4": (32, 64), "v_mfma_f32_16x16x128_f8f6f4": (16, 128)}
SCALED = {"v_mfma_scale_f32_32x32x64_f8f6f4": (32, 64), "v_mfma_scale_f32_16x16x128_f8f6f4": (16, 128)}
ROWS = (*DENSE, *MIXED, *SCALED)


def place_of_input(rows, blocks, k_of, lane, t):
    """Block, row and k of item t of a lane."""
    return lane // rows % blocks, lane % rows, k_of(lane, t)


def k_map(rows, depth, blocks, bits, mixed):
    per_lane = rows * depth * blocks // LANES
    if mixed and bits == 8 and rows == 32:
        return lambda lane, t: 16 * (lane // 32) + 32 * (t // 16) + t % 16
    if mixed and bits == 8:
        return lambda lane, t: 16 * (lane // 16) + 64 * (t // 16) + t % 16
    # Lanes of one row hold consecutive runs of k.
    return lambda lane, t: per_lane * (lane // (rows * blocks)) + t


def place_of_result(rows, blocks, register, lane):
    """Block, row and column of a result register of a lane."""
    if rows == 32:
        place = register % 16
        return register // 16, 8 * (place // 4) + 4 * (lane // 32) + place % 4, lane % 32
    if rows == 16:
        return register // 4, register % 4 + 4 * (lane // 16), lane % 16
    return lane // 4, register, lane % 4


def registers_of(codes, bits):
    """Codes ``[64, items]`` of one operand, packed from bit 0 up, as ``[registers, 64]``."""
    count = codes.shape[1] * bits // 32
    packed = np.zeros((count, LANES), np.uint32)
    for lane in range(LANES):
        whole = sum(int(code) << (bits * t) for t, code in enumerate(codes[lane]))
        packed[:, lane] = [whole >> (32 * r) & 0xFFFFFFFF for r in range(count)]
    return packed


def value_table(kind):
    bits, dtype = TYPES[kind]
    return np.arange(1 << bits).astype(np.uint8 if bits <= 8 else np.uint16).view(dtype).astype(np.float64)


def random_codes(kind, shape, generator, *, simple):
    """Bit patterns of numbers: small integers and halves, whose sums are exact, or any that is finite."""
    bits, dtype = TYPES[kind]
    if simple or bits == 32:
        values = generator.choice([0, 1, -1, 2, -2, 3, -3, 4, 0.5, -0.5] if kind != "i8" else range(-128, 128), shape)
        if bits == 32 and not simple:
            values = generator.standard_normal(shape)
        code = values.astype(dtype)
        return code.view({8: np.uint8, 16: np.uint16, 32: np.uint32}.get(bits if bits >= 8 else 8)).astype(np.uint32)
    if bits == 16:
        return generator.standard_normal(shape).astype(dtype).view(np.uint16).astype(np.uint32)
    finite = np.flatnonzero(np.isfinite(value_table(kind)))
    return generator.choice(finite, shape).astype(np.uint32)


def decoded(kind, codes):
    bits, dtype = TYPES[kind]
    if bits == 32:
        return codes.astype(np.uint32).view(np.float32).astype(np.float64)
    if bits == 16:
        return codes.astype(np.uint16).view(dtype).astype(np.float64)
    return value_table(kind)[codes]


def operand(kind, rows, depth, blocks, generator, *, simple, mixed=False):
    """Registers ``[registers, cases, 64]`` and matrices ``[cases, blocks, rows, depth]``."""
    bits = TYPES[kind][0]
    per_lane = rows * depth * blocks // LANES
    k_of = k_map(rows, depth, blocks, bits, mixed)
    codes = random_codes(kind, (CASES, LANES, per_lane), generator, simple=simple)
    matrix = np.full((CASES, blocks, rows, depth), np.nan)
    for case in range(CASES):
        values = decoded(kind, codes[case])
        for lane in range(LANES):
            for t in range(per_lane):
                matrix[(case, *place_of_input(rows, blocks, k_of, lane, t))] = values[lane, t]
    assert not np.isnan(matrix).any()
    return np.stack([registers_of(case, bits) for case in codes], axis=1), matrix


def result_of(registers, rows, blocks, dtype):
    """Registers ``[cases, 64]`` each to ``[cases, blocks, rows, rows]``."""
    matrix = np.zeros((CASES, blocks, rows, rows), dtype)
    for r, value in enumerate(registers):
        for lane in range(LANES):
            matrix[(slice(None), *place_of_result(rows, blocks, r, lane))] = value.view(dtype)[:, lane]
    return matrix


def addend(count, integer, generator):
    values = generator.integers(-8, 8, (count, CASES, LANES))
    return values.astype(np.int32).view(np.uint32) if integer else values.astype(np.float32).view(np.uint32)


def block(file, first, count):
    return f"{file}[{first}:{first + count - 1}]" if count > 1 else f"{file}{first}"


def multiply(mnemonic, rows, blocks, a, b, c, *, extra="", tail="", c_text=None, file="v", scalars=None, scales=None):
    """Run one instruction; A in v10, B in v20, C in 30 up of a file, D in 70 up of the same file."""
    vectors = {10 + k: word for k, word in enumerate(a)} | {20 + k: word for k, word in enumerate(b)}
    vectors |= {(f"a{30 + k}" if file == "a" else 30 + k): word for k, word in enumerate(c)}
    for k, word in enumerate(scales or ()):
        vectors[110 + k] = word
    count = rows * rows * blocks // LANES
    source_c = c_text or block(file, 30, count)
    text = (
        f"    {mnemonic} {block(file, 70, count)}, {block('v', 10, len(a))}, {block('v', 20, len(b))}, {source_c}"
        f"{tail}{extra}"
    )
    outputs = [f"{file}{70 + k}" for k in range(count)]
    got = run_text(text, outputs, vectors=vectors, scalars=scalars)
    return [got[name] for name in outputs]


def close(got, a, b, c):
    """Within the rounding of a sum in f32 of any order."""
    want = np.einsum("cbik,cbjk->cbij", a, b) + c
    bound = (np.einsum("cbik,cbjk->cbij", abs(a), abs(b)) + abs(c)) * 2.0**-20
    assert (abs(got - want) <= bound).all()


@pytest.mark.parametrize("mnemonic", DENSE)
@pytest.mark.parametrize("simple", [True, False], ids=["exact", "any"])
def test_products(mnemonic, simple):
    rows, depth, blocks, a_kind, b_kind = DENSE[mnemonic]
    generator = np.random.default_rng(1)
    a, a_matrix = operand(a_kind, rows, depth, blocks, generator, simple=simple)
    b, b_matrix = operand(b_kind, rows, depth, blocks, generator, simple=simple)
    integer = a_kind == "i8"
    c = addend(rows * rows * blocks // LANES, integer, generator)
    dtype = np.int32 if integer else np.float32
    got = result_of(multiply(mnemonic, rows, blocks, a, b, c), rows, blocks, dtype)
    before = result_of(c, rows, blocks, dtype).astype(np.float64)
    if simple or integer:
        np.testing.assert_array_equal(got, np.einsum("cbik,cbjk->cbij", a_matrix, b_matrix) + before)
    else:
        close(got.astype(np.float64), a_matrix, b_matrix, before)


@pytest.mark.parametrize("b_format", range(5), ids=FORMATS)
@pytest.mark.parametrize("a_format", range(5), ids=FORMATS)
@pytest.mark.parametrize("mnemonic", MIXED)
def test_products_of_8_6_and_4_bits(mnemonic, a_format, b_format):
    rows, depth = MIXED[mnemonic]
    generator = np.random.default_rng(2)
    for simple in (True, False):
        a, a_matrix = operand(FORMATS[a_format], rows, depth, 1, generator, simple=simple, mixed=True)
        b, b_matrix = operand(FORMATS[b_format], rows, depth, 1, generator, simple=simple, mixed=True)
        c = addend(rows * rows // LANES, False, generator)
        extra = (f" cbsz:{a_format}" if a_format else "") + (f" blgp:{b_format}" if b_format else "")
        got = result_of(multiply(mnemonic, rows, 1, a, b, c, extra=extra), rows, 1, np.float32).astype(np.float64)
        before = result_of(c, rows, 1, np.float32).astype(np.float64)
        if simple:
            np.testing.assert_array_equal(got, np.einsum("cbik,cbjk->cbij", a_matrix, b_matrix) + before)
        else:
            close(got, a_matrix, b_matrix, before)


@pytest.mark.parametrize("select", range(4))
@pytest.mark.parametrize(("a_format", "b_format"), [(0, 0), (1, 4), (4, 2), (3, 3)])
@pytest.mark.parametrize("mnemonic", SCALED)
def test_block_scales(mnemonic, a_format, b_format, select):
    rows, depth = SCALED[mnemonic]
    generator = np.random.default_rng(3)
    a, a_matrix = operand(FORMATS[a_format], rows, depth, 1, generator, simple=True, mixed=True)
    b, b_matrix = operand(FORMATS[b_format], rows, depth, 1, generator, simple=True, mixed=True)
    # Exponents near the bias, so that the sums stay exact; the other bytes would be noticed.
    codes = generator.integers(125, 130, (2, CASES, LANES, 4)).astype(np.uint8)
    words = codes.view(np.uint32)[..., 0]
    c = addend(rows * rows // LANES, False, generator)
    picks = select, 3 - select
    bits = [f"[{picks[0] & 1},{picks[1] & 1},0]", f"[{picks[0] >> 1},{picks[1] >> 1},0]"]
    extra = f" op_sel:{bits[0]} op_sel_hi:{bits[1]}"
    extra += (f" cbsz:{a_format}" if a_format else "") + (f" blgp:{b_format}" if b_format else "")
    d = multiply(mnemonic, rows, 1, a, b, c, extra=extra, tail=", v110, v111", scales=list(words))
    scaled = []
    for matrix, code, pick in ((a_matrix, codes[0], picks[0]), (b_matrix, codes[1], picks[1])):
        scaled.append(matrix.copy())
        for lane in range(LANES):
            # A lane scales 32 k of its row.
            k = 32 * (lane // rows)
            factor = 2.0 ** (code[:, lane, pick].astype(np.float64) - 127)
            scaled[-1][:, 0, lane % rows, k : k + 32] *= factor[:, None]
    want = np.einsum("cbik,cbjk->cbij", *scaled) + result_of(c, rows, 1, np.float32)
    np.testing.assert_array_equal(result_of(d, rows, 1, np.float32), want)


def test_a_scale_of_all_ones_is_not_a_number():
    a = np.full((8, CASES, LANES), 0x38383838, np.uint32)
    scale = np.full((CASES, LANES), 127, np.uint32)
    scale[0, 3] = 0xFF
    c = np.zeros((16, CASES, LANES), np.uint32)
    d = multiply(
        "v_mfma_scale_f32_32x32x64_f8f6f4", 32, 1, a, a, c,
        extra=" op_sel_hi:[0,0,0]", tail=", v110, v111", scales=[scale, np.full_like(scale, 127)],
    )  # fmt: skip
    matrix = result_of(d, 32, 1, np.float32)
    assert np.isnan(matrix[0, 0, 3]).all()
    rest = np.delete(matrix[0, 0], 3, axis=0)
    assert (rest == 64).all()
    assert (matrix[1] == 64).all()


@pytest.mark.parametrize(
    "mnemonic", ["v_mfma_f32_32x32x16_bf16", "v_mfma_f32_16x16x128_f8f6f4", "v_mfma_f32_4x4x4_16b_f16"]
)
def test_accumulators_in_agprs_and_a_constant_addend(mnemonic):
    mixed = mnemonic in MIXED
    rows, depth, blocks, kind = (*MIXED[mnemonic], 1, "fp8") if mixed else DENSE[mnemonic][:4]
    generator = np.random.default_rng(4)
    a, a_matrix = operand(kind, rows, depth, blocks, generator, simple=True, mixed=mixed)
    b, b_matrix = operand(kind, rows, depth, blocks, generator, simple=True, mixed=mixed)
    c = addend(rows * rows * blocks // LANES, False, generator)
    product = np.einsum("cbik,cbjk->cbij", a_matrix, b_matrix)
    got = result_of(multiply(mnemonic, rows, blocks, a, b, c, file="a"), rows, blocks, np.float32)
    np.testing.assert_array_equal(got, product + result_of(c, rows, blocks, np.float32))
    for constant, value in (("0", 0), ("1.0", 1), ("-4.0", -4)):
        got = result_of(multiply(mnemonic, rows, blocks, a, b, c, c_text=constant), rows, blocks, np.float32)
        np.testing.assert_array_equal(got, product + value)


def test_operands_in_agprs_and_a_product_onto_itself():
    generator = np.random.default_rng(5)
    a, a_matrix = operand("fp8", 16, 32, 1, generator, simple=True)
    b, b_matrix = operand("fp8", 16, 32, 1, generator, simple=True)
    c = addend(4, False, generator)
    vectors = {"a10": a[0], "a11": a[1], 20: b[0], 21: b[1]} | {f"a{30 + k}": word for k, word in enumerate(c)}
    text = "    v_mfma_f32_16x16x32_fp8_fp8 a[30:33], a[10:11], v[20:21], a[30:33]"
    got = run_text(text, [f"a{30 + k}" for k in range(4)], vectors=vectors)
    want = np.einsum("cbik,cbjk->cbij", a_matrix, b_matrix) + result_of(c, 16, 1, np.float32)
    np.testing.assert_array_equal(result_of(list(got.values()), 16, 1, np.float32), want)


def test_exec_is_ignored():
    generator = np.random.default_rng(6)
    a, a_matrix = operand("bf16", 32, 16, 1, generator, simple=True)
    b, b_matrix = operand("bf16", 32, 16, 1, generator, simple=True)
    c = addend(16, False, generator)
    d = multiply("v_mfma_f32_32x32x16_bf16", 32, 1, a, b, c, scalars={"exec": np.array([0x10], np.uint64)})
    assert all((word != PREFILL).all() for word in d)
    want = np.einsum("cbik,cbjk->cbij", a_matrix, b_matrix) + result_of(c, 32, 1, np.float32)
    np.testing.assert_array_equal(result_of(d, 32, 1, np.float32), want)


# 4x4x4 has one block per four lanes, so that every value of the broadcast fields shows.
@pytest.mark.parametrize(("cbsz", "abid"), [(1, 0), (1, 1), (2, 1), (3, 5), (4, 15), (4, 0)])
def test_a_block_of_a_is_broadcast(cbsz, abid):
    a, b = (np.random.default_rng(seed).standard_normal((1, CASES, LANES)).astype(np.float32) for seed in (7, 8))
    d = multiply(
        "v_mfma_f32_4x4x1_16b_f32", 4, 16, a.view(np.uint32), b.view(np.uint32), [], c_text="0",
        extra=f" cbsz:{cbsz} abid:{abid}",
    )  # fmt: skip
    size = 64 >> cbsz
    for case, register, lane in np.ndindex(CASES, 4, LANES):
        source = (4 * (lane // 4) + register) % size + size * abid
        assert d[register].view(np.float32)[case, lane] == a[0, case, source] * b[0, case, lane]


GROUPS = {
    1: lambda lane: lane % 32,
    2: lambda lane: lane % 32 + 32,
    3: lambda lane: (lane + 16) % 64,
    4: lambda lane: lane % 16,
    5: lambda lane: lane % 16 + 16,
    6: lambda lane: lane % 16 + 32,
    7: lambda lane: lane % 16 + 48,
}


@pytest.mark.parametrize("blgp", GROUPS)
def test_lanes_of_b_are_permuted(blgp):
    a, b = (np.random.default_rng(seed).standard_normal((1, CASES, LANES)).astype(np.float32) for seed in (7, 8))
    d = multiply(
        "v_mfma_f32_4x4x1_16b_f32", 4, 16, a.view(np.uint32), b.view(np.uint32), [], c_text="0", extra=f" blgp:{blgp}"
    )
    for case, register, lane in np.ndindex(CASES, 4, LANES):
        assert (
            d[register].view(np.float32)[case, lane]
            == a[0, case, 4 * (lane // 4) + register] * b[0, case, GROUPS[blgp](lane)]
        )


def test_integers_wrap_and_floats_carry_nan_and_infinity():
    a = np.full((4, CASES, LANES), 0x7F7F7F7F, np.uint32)
    c = np.full((4, CASES, LANES), 0x7FFFFFFF, np.uint32)
    d = multiply("v_mfma_i32_16x16x64_i8", 16, 1, a, a, c)
    assert all((word == (0x7FFFFFFF + 64 * 127 * 127) & 0xFFFFFFFF).all() for word in d)
    a = np.full((2, CASES, LANES), 0x7C7C7C7C, np.uint32)
    b = np.full((2, CASES, LANES), 0x3C3C3C3C, np.uint32)
    c = np.zeros((4, CASES, LANES), np.uint32)
    d = multiply("v_mfma_f32_16x16x32_bf8_bf8", 16, 1, a, b, c)
    assert all((word == 0x7F800000).all() for word in d)
    d = multiply("v_mfma_f32_16x16x32_bf8_bf8", 16, 1, a, b, np.full_like(c, 0xFF800000))
    assert all(np.isnan(word.view(np.float32)).all() for word in d)


def test_neighbouring_products_see_an_operand_that_is_written_between_them():
    product = "v_mfma_f32_16x16x32_fp8_fp8 v[{}:{}], v[8:9], v[10:11], 0\n    s_nop 15\n"
    lines = "".join(f"    global_store_dword v1, v{20 + k}, s[6:7] offset:{256 * k}\n" for k in range(12))
    body = f"""
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v8, 0x38383838
    v_mov_b32_e32 v9, 0x38383838
    v_mov_b32_e32 v10, 0x38383838
    v_mov_b32_e32 v11, 0x38383838
    s_nop 15
    {product.format(20, 23)}    {product.format(24, 27)}    v_mov_b32_e32 v8, 0
    s_nop 15
    {product.format(28, 31)}    s_waitcnt lgkmcnt(0)
{lines}    s_endpgm
    """
    target = np.zeros((3, 4, 64), np.float32)
    Kernel(body).run(np.zeros(4, np.float32), target)
    # Ones times ones along 32 k; then one of each lane's two dwords of A is 0.
    assert (target[:2] == 32).all()
    assert (target[2] == 16).all()
