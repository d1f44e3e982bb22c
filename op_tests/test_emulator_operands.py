"""Vector instructions from assembly text to register: operand order, widths, modifiers, EXEC.

Held against Python integers and ml_dtypes. The arithmetic of single values has its own tests (test_emulator_math_*).
"""

import math
import struct

import ml_dtypes
import numpy as np
import pytest

from op_tests.emulator_kernels import Kernel

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
RNG = np.random.default_rng(9)
EDGES = np.array([0, 1, 31, 0x7F, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, M32], np.uint32)


def lanes():
    values = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    return np.where(RNG.random(64) < 0.4, RNG.choice(EDGES, 64), values).astype(np.uint32)


def floats(spread=4.0):
    values = (RNG.standard_normal(64) * np.exp2(RNG.uniform(-spread, spread, 64))).astype(np.float32)
    return values.view(np.uint32)


def run(lines, *sources, results=1):
    """Run lines on v2.. (one register per source); return v10.. (or the pair of s[20:21] in all lanes)."""
    body = ["v_lshlrev_b32_e32 v1, 2, v0"]
    for k in range(len(sources) + 1):
        body.append(f"s_load_dwordx2 s[{4 + 2 * k}:{5 + 2 * k}], s[0:1], {8 * k:#x}")
    body.append("s_waitcnt lgkmcnt(0)")
    body += [f"global_load_dword v{2 + k}, v1, s[{6 + 2 * k}:{7 + 2 * k}]" for k in range(len(sources))]
    body += [f"v_mov_b32_e32 v{10 + k}, 0x55" for k in range(results)]
    body.append("s_waitcnt vmcnt(0)")
    body += [lines, "s_mov_b64 exec, -1", "s_nop 15"]
    body += [f"global_store_dword v1, v{10 + k}, s[4:5] offset:{256 * k}" for k in range(results)]
    body.append("s_endpgm")
    target = np.zeros(64 * results, np.uint32)
    Kernel("\n".join(body)).run(target, *[np.ascontiguousarray(source) for source in sources])
    out = target.reshape(results, 64)
    return out[0] if results == 1 else out


def signed(value, bits=32):
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def signed24(value):
    return signed(value & 0xFFFFFF, 24)


def median(a, b, c):
    return sorted((a, b, c))[1]


def byte_of(selector, a, b):
    """One byte of V_PERM_B32: 0-3 from the second source, 4-7 from the first."""
    if selector >= 13:
        return 0xFF
    if selector == 12:
        return 0
    if selector >= 8:
        word = (b, b, a, a)[selector - 8]
        return 0xFF if word >> (15 if selector % 2 == 0 else 31) & 1 else 0
    return (a << 32 | b) >> (8 * selector) & 0xFF


INTEGER = {
    "v_mov_b32_e32 v10, v2": lambda a: a,
    "v_not_b32_e32 v10, v2": lambda a: ~a,
    "v_bfrev_b32_e32 v10, v2": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32_e32 v10, v2": lambda a: 32 - a.bit_length() if a else M32,
    "v_ffbl_b32_e32 v10, v2": lambda a: (a & -a).bit_length() - 1 if a else M32,
    "v_add_u32_e32 v10, v2, v3": lambda a, b: a + b,
    "v_sub_u32_e32 v10, v2, v3": lambda a, b: a - b,
    "v_subrev_u32_e32 v10, v2, v3": lambda a, b: b - a,
    "v_and_b32_e32 v10, v2, v3": lambda a, b: a & b,
    "v_or_b32_e32 v10, v2, v3": lambda a, b: a | b,
    "v_xor_b32_e32 v10, v2, v3": lambda a, b: a ^ b,
    "v_xnor_b32_e32 v10, v2, v3": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32_e32 v10, v2, v3": lambda a, b: b << (a & 31),
    "v_lshrrev_b32_e32 v10, v2, v3": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32_e32 v10, v2, v3": lambda a, b: signed(b) >> (a & 31),
    "v_min_u32_e32 v10, v2, v3": min,
    "v_max_u32_e32 v10, v2, v3": max,
    "v_min_i32_e32 v10, v2, v3": lambda a, b: min(signed(a), signed(b)),
    "v_max_i32_e32 v10, v2, v3": lambda a, b: max(signed(a), signed(b)),
    "v_mul_lo_u32 v10, v2, v3": lambda a, b: a * b,
    "v_mul_hi_u32 v10, v2, v3": lambda a, b: a * b >> 32,
    "v_mul_hi_i32 v10, v2, v3": lambda a, b: signed(a) * signed(b) >> 32,
    "v_mul_u32_u24_e32 v10, v2, v3": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_i32_i24_e32 v10, v2, v3": lambda a, b: signed24(a) * signed24(b),
    "v_bfm_b32 v10, v2, v3": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_bcnt_u32_b32 v10, v2, v3": lambda a, b: a.bit_count() + b,
    "v_mad_u32_u24 v10, v2, v3, v4": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24 v10, v2, v3, v4": lambda a, b, c: signed24(a) * signed24(b) + c,
    "v_add3_u32 v10, v2, v3, v4": lambda a, b, c: a + b + c,
    "v_lshl_add_u32 v10, v2, v3, v4": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32 v10, v2, v3, v4": lambda a, b, c: (a + b & M32) << (c & 31),
    "v_xad_u32 v10, v2, v3, v4": lambda a, b, c: (a ^ b) + c,
    "v_lshl_or_b32 v10, v2, v3, v4": lambda a, b, c: a << (b & 31) | c,
    "v_and_or_b32 v10, v2, v3, v4": lambda a, b, c: a & b | c,
    "v_or3_b32 v10, v2, v3, v4": lambda a, b, c: a | b | c,
    "v_bfe_u32 v10, v2, v3, v4": lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1,
    "v_bfi_b32 v10, v2, v3, v4": lambda a, b, c: a & b | ~a & c,
    "v_alignbit_b32 v10, v2, v3, v4": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32 v10, v2, v3, v4": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_min3_u32 v10, v2, v3, v4": min,
    "v_max3_u32 v10, v2, v3, v4": max,
    "v_min3_i32 v10, v2, v3, v4": lambda a, b, c: min(signed(a), signed(b), signed(c)),
    "v_max3_i32 v10, v2, v3, v4": lambda a, b, c: max(signed(a), signed(b), signed(c)),
    "v_med3_u32 v10, v2, v3, v4": median,
    "v_med3_i32 v10, v2, v3, v4": lambda a, b, c: median(signed(a), signed(b), signed(c)),
    "v_perm_b32 v10, v2, v3, v4": lambda a, b, c: sum(byte_of(c >> 8 * k & 0xFF, a, b) << 8 * k for k in range(4)),
    "v_bitop3_b32 v10, v2, v3, v4 bitop3:0x36": lambda a, b, c: sum(
        (0x36 >> ((a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1)) & 1) << k for k in range(32)
    ),
    "v_add_u32_e32 v10, 0x12345, v2": lambda a: a + 0x12345,
    "v_sub_u32_e32 v10, -16, v2": lambda a: -16 - a,
    "s_mov_b32 s20, 0x89abcdef\n v_xor_b32_e32 v10, s20, v2": lambda a: a ^ 0x89ABCDEF,
    "v_and_b32_sdwa v10, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1": lambda a, b: (
        ((a & b >> 16) & 0xFFFF) << 16
    ),
    "v_and_b32_sdwa v10, v2, v3 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3": lambda a, b: (
        0x55 | ((a >> 24 & b) & 0xFF) << 8
    ),
    "v_add_u32_sdwa v10, sext(v2), v3 dst_sel:DWORD src0_sel:BYTE_2 src1_sel:WORD_0": lambda a, b: (
        signed(a >> 16 & 0xFF, 8) + (b & 0xFFFF)
    ),
}


@pytest.mark.parametrize("lines", INTEGER)
def test_integer_instructions(lines):
    function = INTEGER[lines]
    count = max(k for k in (1, 2, 3) if k == 1 or f"v{1 + k}" in lines.replace("v10", ""))
    sources = [lanes() for _ in range(count)]
    if "v_perm" in lines:
        sources[2] = RNG.integers(0, 16, (64, 4), dtype=np.uint8).view(np.uint32)[:, 0]
    got = run(lines, *sources)
    for lane in range(64):
        want = function(*[int(source[lane]) for source in sources]) & M32
        assert int(got[lane]) == want, (lane, [hex(int(source[lane])) for source in sources])


def test_mbcnt_counts_mask_bits_below_the_lane():
    mask = 0xF0F0A5A5F00DBEEF
    base = lanes()
    got = run(f"v_mbcnt_lo_u32_b32 v10, {mask & M32:#x}, v2\n v_mbcnt_hi_u32_b32 v10, {mask >> 32:#x}, v10", base)
    for lane in range(64):
        assert got[lane] == (int(base[lane]) + (mask & (1 << lane) - 1).bit_count()) & M32


WIDE = {
    "v_lshlrev_b64 v[10:11], v4, v[2:3]": lambda a, c: a << (c & 63),
    "v_lshrrev_b64 v[10:11], v4, v[2:3]": lambda a, c: a >> (c & 63),
    "v_ashrrev_i64 v[10:11], v4, v[2:3]": lambda a, c: signed(a, 64) >> (c & 63),
    "v_lshl_add_u64 v[10:11], v[2:3], 3, v[2:3]": lambda a, c: (a << 3) + a,
    "v_mov_b64_e32 v[10:11], v[2:3]": lambda a, c: a,
    "v_mad_u64_u32 v[10:11], s[20:21], v2, v4, v[2:3]": lambda a, c: (a & M32) * c + a,
    "v_mad_i64_i32 v[10:11], s[20:21], v2, v4, v[2:3]": lambda a, c: signed(a & M32) * signed(c) + a,
}


@pytest.mark.parametrize("lines", WIDE)
def test_wide_instructions(lines):
    low, high, third = lanes(), lanes(), lanes()
    got = run(lines, low, high, third, results=2)
    for lane in range(64):
        want = WIDE[lines](int(low[lane]) | int(high[lane]) << 32, int(third[lane])) & M64
        assert int(got[0, lane]) | int(got[1, lane]) << 32 == want


@pytest.mark.parametrize("active", [M64, 0x00FF_1234_5678_9ABC])
def test_carries_go_to_the_active_lanes_of_the_mask(active):
    a, b = lanes(), lanes()
    got = run(
        f"s_mov_b32 s20, 0xf0f0f0f0\n s_mov_b32 s21, 0x0ff00ff0\n s_mov_b32 exec_lo, {active & M32:#x}\n"
        f"s_mov_b32 exec_hi, {active >> 32:#x}\n v_addc_co_u32_e64 v10, s[22:23], v2, v3, s[20:21]\n"
        "s_mov_b64 exec, -1\n v_mov_b32_e32 v11, s22\n v_mov_b32_e32 v12, s23",
        a,
        b,
        results=3,
    )
    carry_in, carry_out = 0x0FF00FF0F0F0F0F0, int(got[1, 0]) | int(got[2, 0]) << 32
    for lane in range(64):
        total = int(a[lane]) + int(b[lane]) + (carry_in >> lane & 1)
        live = active >> lane & 1
        assert int(got[0, lane]) == (total & M32 if live else 0x55)
        assert carry_out >> lane & 1 == (total >> 32 if live else 0)


@pytest.mark.parametrize(
    ("mnemonic", "function"),
    [
        ("v_sub_co_u32_e32 v10, vcc, v2, v3", lambda a, b, c: a - b),
        ("v_subrev_co_u32_e32 v10, vcc, v2, v3", lambda a, b, c: b - a),
        ("v_subb_co_u32_e32 v10, vcc, v2, v3, vcc", lambda a, b, c: a - b - c),
        ("v_subbrev_co_u32_e32 v10, vcc, v2, v3, vcc", lambda a, b, c: b - a - c),
        ("v_add_co_u32_e32 v10, vcc, v2, v3", lambda a, b, c: a + b),
    ],
)
def test_borrows(mnemonic, function):
    a, b = lanes(), lanes()
    lines = f"s_mov_b32 vcc_lo, 0xf0f0f0f0\n s_mov_b32 vcc_hi, 0xff00ff\n {mnemonic}\n v_cndmask_b32_e64 v11, 0, 1, vcc"
    got = run(lines, a, b, results=2)
    for lane in range(64):
        value = function(int(a[lane]), int(b[lane]), 0x00FF00FFF0F0F0F0 >> lane & 1)
        assert (int(got[0, lane]), int(got[1, lane])) == (value & M32, int(not 0 <= value <= M32))


COMPARES = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "ne": lambda a, b: a != b,
}


@pytest.mark.parametrize("kind", ["i32", "u32", "i64", "u64", "f32"])
@pytest.mark.parametrize("name", COMPARES)
def test_compares_write_a_mask(name, kind):
    a, b, c, d = lanes(), lanes(), lanes(), lanes()
    b = np.where(RNG.random(64) < 0.3, a, b).astype(np.uint32)
    d = np.where(RNG.random(64) < 0.3, c, d).astype(np.uint32)
    if kind == "f32":
        a, b, name_text = floats(), floats(), {"ne": "neq"}.get(name, name)
        a[3] = b[7] = 0x7FC00000
        b[9] = a[9]
        values = [(float(x), float(y)) for x, y in zip(a.view(np.float32), b.view(np.float32), strict=True)]
        operands = "v2, v3"
    elif kind.endswith("32"):
        name_text, operands = name, "v2, v3"
        values = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    else:
        name_text, operands = name, "v[2:3], v[4:5]"
        values = [(int(x) | int(z) << 32, int(y) | int(w) << 32) for x, y, z, w in zip(a, b, c, d, strict=True)]
        a, b, c, d = a, c, b, d
    if kind[0] == "i":
        values = [(signed(x, int(kind[1:])), signed(y, int(kind[1:]))) for x, y in values]
    got = run(f"v_cmp_{name_text}_{kind}_e64 s[20:21], {operands}\n v_cndmask_b32_e64 v10, 0, 1, s[20:21]", a, b, c, d)
    assert got.tolist() == [int(COMPARES[name](x, y)) for x, y in values]


def test_inactive_lanes_compare_as_zero_and_cmpx_writes_exec():
    a = np.arange(64, dtype=np.uint32)
    got = run(
        "s_mov_b64 s[24:25], exec\n s_mov_b32 exec_lo, 0xffff\n s_mov_b32 exec_hi, 0\n"
        "v_cmpx_lt_u32_e64 s[20:21], 3, v2\n v_mov_b32_e32 v10, 1\n s_mov_b64 exec, s[24:25]\n"
        "v_cndmask_b32_e64 v11, 0, 1, s[20:21]",
        a,
        results=2,
    )
    want = (a > 3) & (a < 16)
    assert (got[1] == want).all()
    assert (got[0] == np.where(want, 1, 0x55)).all()


def f32(bits):
    return struct.unpack("<f", struct.pack("<I", int(bits)))[0]


def bits32(value):
    return struct.unpack("<I", struct.pack("<f", np.float32(value)))[0]


FLOAT = {
    "v_add_f32_e32 v10, v2, v3": lambda a, b: a + b,
    "v_sub_f32_e32 v10, v2, v3": lambda a, b: a - b,
    "v_subrev_f32_e32 v10, v2, v3": lambda a, b: b - a,
    "v_mul_f32_e32 v10, v2, v3": lambda a, b: a * b,
    "v_add_f32_e64 v10, v2, -v3": lambda a, b: a - b,
    "v_mul_f32_e64 v10, |v2|, -v3": lambda a, b: abs(a) * -b,
    "v_mul_f32_e64 v10, v2, v3 mul:4": lambda a, b: a * b * 4,
    "v_add_f32_e64 v10, v2, v3 clamp": lambda a, b: min(max(a + b, 0.0), 1.0),
    "v_min_f32_e32 v10, v2, v3": min,
    "v_max_f32_e32 v10, v2, v3": max,
    "v_max3_f32 v10, v2, v3, v4": max,
    "v_min3_f32 v10, v2, v3, v4": min,
    "v_maximum3_f32 v10, v2, v3, v4": max,
    "v_med3_f32 v10, v2, v3, v4": median,
    "v_fma_f32 v10, v2, v3, v4": lambda a, b, c: a * b + c,
    "v_fma_f32 v10, -v2, v3, |v4|": lambda a, b, c: -a * b + abs(c),
    "v_mov_b32_e32 v10, v4\n v_fmac_f32_e32 v10, v2, v3": lambda a, b, c: a * b + c,
    "v_fmamk_f32 v10, v2, 0x40490fdb, v3": lambda a, b: a * f32(0x40490FDB) + b,
    "v_fmaak_f32 v10, v2, v3, 0x40490fdb": lambda a, b: a * b + f32(0x40490FDB),
    "v_add_f32_e32 v10, 2.0, v2": lambda a: 2.0 + a,
    "v_mul_f32_e32 v10, 0x3fb8aa3b, v2": lambda a: f32(0x3FB8AA3B) * a,
    "v_rndne_f32_e32 v10, v2": lambda a: float(np.rint(a)),
    "v_trunc_f32_e32 v10, v2": lambda a: float(np.trunc(a)),
    "v_floor_f32_e32 v10, v2": lambda a: float(np.floor(a)),
    "v_ceil_f32_e32 v10, v2": lambda a: float(np.ceil(a)),
    "v_ldexp_f32 v10, v2, 5": lambda a: a * 32,
}


@pytest.mark.parametrize("lines", FLOAT)
def test_float_instructions(lines):
    function = FLOAT[lines]
    sources = [floats(), floats(), floats()]
    got = run(lines, *sources)
    count = function.__code__.co_argcount if hasattr(function, "__code__") else 2 + ("v4" in lines)
    for lane in range(64):
        values = [f32(source[lane]) for source in sources[:count]]
        # Products of two floats are exact in double, and these sums are too far from a midpoint to round twice.
        assert int(got[lane]) == bits32(function(*values)), (lane, values)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("exp", lambda a: 2.0**a),
        ("rcp", lambda a: 1 / a),
        ("sqrt", lambda a: math.sqrt(a) if a >= 0 else math.nan),
        ("rsq", lambda a: 1 / math.sqrt(a) if a >= 0 else math.nan),
        ("log", lambda a: math.log2(a) if a >= 0 else math.nan),
    ],
)
def test_transcendentals_are_within_an_ulp(name, function):
    source = floats()
    got = run(f"v_{name}_f32_e32 v10, v2", source).view(np.float32)
    for lane in range(64):
        want = function(f32(source[lane]))
        if math.isnan(want):
            assert math.isnan(got[lane])
        else:
            assert abs(float(got[lane]) - want) <= float(np.spacing(np.float32(abs(want))))


def test_packed_floats_choose_their_dwords():
    low, high, c_low, c_high = floats(), floats(), floats(), floats()
    sources = (low, high, c_low, c_high)
    a, b = (
        [(f32(x), f32(y)) for x, y in zip(low, high, strict=True)],
        [(f32(x), f32(y)) for x, y in zip(c_low, c_high, strict=True)],
    )
    for text, function in {
        "v_pk_mul_f32 v[10:11], v[2:3], v[4:5]": lambda x, y: (x[0] * y[0], x[1] * y[1]),
        "v_pk_mul_f32 v[10:11], v[2:3], v[4:5] op_sel_hi:[0,1]": lambda x, y: (x[0] * y[0], x[0] * y[1]),
        "v_pk_mul_f32 v[10:11], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[1,0]": lambda x, y: (x[1] * y[0], x[1] * y[0]),
        "v_pk_add_f32 v[10:11], v[2:3], v[4:5] op_sel_hi:[1,0] neg_lo:[0,1] neg_hi:[0,1]": lambda x, y: (
            x[0] - y[0],
            x[1] - y[0],
        ),
        "v_pk_fma_f32 v[10:11], v[2:3], v[4:5], v[2:3] neg_lo:[0,0,1]": lambda x, y: (
            x[0] * y[0] - x[0],
            x[1] * y[1] + x[1],
        ),
        "v_pk_mov_b32 v[10:11], v[2:3], v[4:5] op_sel:[1,0]": lambda x, y: (x[1], y[0]),
    }.items():
        got = run(text, *sources, results=2)
        for lane in range(64):
            want = function(a[lane], b[lane])
            assert (int(got[0, lane]), int(got[1, lane])) == (bits32(want[0]), bits32(want[1])), text


def test_fp8_conversion_writes_one_half_and_saturates_only_when_told():
    a, b = floats(9.0), floats(9.0)
    a[:4] = np.array([449.0, 1e6, -np.inf, 464.0], np.float32).view(np.uint32)
    plain = run("v_cvt_pk_fp8_f32 v10, v2, v3 op_sel:[0,0,1]", a, b)
    mode = run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n v_cvt_pk_fp8_f32 v10, v2, v3", a, b)
    for lane in range(64):
        pair = np.array([f32(a[lane]), f32(b[lane])], np.float32)
        exact = pair.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert int(plain[lane]) == 0x55 | int(exact[0]) << 16 | int(exact[1]) << 24
        clipped = np.clip(pair, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert int(mode[lane]) == int(clipped[0]) | int(clipped[1]) << 8


def test_bf16_and_integer_conversions():
    a, b = floats(), floats()
    got = run("v_cvt_pk_bf16_f32 v10, v2, v3", a, b)
    want = np.stack([a.view(np.float32), b.view(np.float32)], -1).astype(ml_dtypes.bfloat16).view(np.uint16)
    assert (got == want[:, 0] | want[:, 1].astype(np.uint32) << 16).all()
    integers = lanes()
    assert (
        run("v_cvt_f32_i32_e32 v10, v2", integers) == integers.view(np.int32).astype(np.float32).view(np.uint32)
    ).all()
    assert (run("v_cvt_f32_u32_e32 v10, v2", integers) == integers.astype(np.float32).view(np.uint32)).all()
    assert (
        run("v_cvt_f32_ubyte2_e32 v10, v2", integers) == (integers >> 16 & 0xFF).astype(np.float32).view(np.uint32)
    ).all()
    got = run("v_cvt_u32_f32_e32 v10, v2\n v_cvt_i32_f32_e32 v11, v2", a, results=2)
    assert got[0].tolist() == [max(int(f32(x)), 0) for x in a]
    assert got[1].view(np.int32).tolist() == [int(f32(x)) for x in a]


def test_lane_exchanges():
    a, b = lanes(), lanes()
    got = run(
        "v_mov_b32_e32 v10, v2\n v_mov_b32_e32 v11, v3\n s_nop 1\n v_permlane32_swap_b32_e32 v10, v11", a, b, results=2
    )
    assert (got[0] == np.concatenate([a[:32], b[:32]])).all()
    assert (got[1] == np.concatenate([a[32:], b[32:]])).all()
    got = run(
        "v_mov_b32_e32 v10, v2\n v_mov_b32_e32 v11, v3\n s_nop 1\n v_permlane16_swap_b32_e32 v10, v11", a, b, results=2
    )
    x, y = a.reshape(4, 16), b.reshape(4, 16)
    assert (got[0].reshape(4, 16) == np.stack([x[0], y[0], x[2], y[2]])).all()
    assert (got[1].reshape(4, 16) == np.stack([x[1], y[1], x[3], y[3]])).all()
    got = run("v_readlane_b32 s20, v2, 37\n v_mov_b32_e32 v10, s20", a)
    assert (got == a[37]).all()
    got = run("s_mov_b32 exec_lo, 0\n v_readfirstlane_b32 s20, v2\n s_mov_b64 exec, -1\n v_mov_b32_e32 v10, s20", a)
    assert (got == a[32]).all()
    got = run("s_mov_b32 s20, 0x77\n v_writelane_b32 v10, s20, 5", a)
    assert got.tolist() == [0x77 if lane == 5 else 0x55 for lane in range(64)]


DPP = {
    "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf": lambda lane: lane ^ 1,
    "row_shr:4 row_mask:0xf bank_mask:0xf": lambda lane: lane - 4 if lane % 16 >= 4 else None,
    "row_shl:8 row_mask:0xf bank_mask:0x3": lambda lane: lane + 8 if lane % 16 < 8 else None,
    "row_ror:3 row_mask:0xf bank_mask:0xf": lambda lane: lane - lane % 16 + (lane - 3) % 16,
    "row_mirror row_mask:0x5 bank_mask:0xf": lambda lane: lane ^ 15 if lane // 16 % 2 == 0 else None,
    "row_newbcast:6 row_mask:0xf bank_mask:0xf": lambda lane: lane - lane % 16 + 6,
    "row_bcast:15 row_mask:0xa bank_mask:0xf": lambda lane: lane - lane % 16 - 1 if lane // 16 in (1, 3) else None,
}


@pytest.mark.parametrize("control", DPP)
def test_dpp_moves_lanes_and_keeps_what_has_no_source(control):
    a, b = lanes(), lanes()
    got = run(f"s_nop 1\n v_add_u32_dpp v10, v2, v3 {control}", a, b)
    for lane in range(64):
        source = DPP[control](lane)
        want = 0x55 if source is None else (int(a[source]) + int(b[lane])) & M32
        assert int(got[lane]) == want, lane


def test_division_macro():
    a, b = floats(20.0), floats(20.0)
    lines = """
    v_div_scale_f32 v4, s[20:21], v3, v3, v2
    v_rcp_f32_e32 v5, v4
    v_div_scale_f32 v6, vcc, v2, v3, v2
    v_fma_f32 v7, -v4, v5, 1.0
    v_fmac_f32_e32 v5, v7, v5
    v_mul_f32_e32 v7, v6, v5
    v_fma_f32 v8, -v4, v7, v6
    v_fmac_f32_e32 v7, v8, v5
    v_fma_f32 v8, -v4, v7, v6
    s_nop 3
    v_div_fmas_f32 v5, v8, v5, v7
    v_div_fixup_f32 v10, v5, v3, v2
    """
    got = run(lines, a, b)
    assert (got == (a.view(np.float32) / b.view(np.float32)).view(np.uint32)).all()


def test_matrix_products_take_registers_layouts_and_formats():
    """16x16x32: A row lane % 16, k = 8 * (lane // 16) + byte; D row register + 4 * (lane // 16), column lane % 16."""
    registers = [RNG.integers(0, 0x70, (64, 4), dtype=np.uint8).view(np.uint32)[:, 0] for _ in range(4)]
    c = floats(1.0)
    lines = """
    v_mov_b32_e32 v10, v6
    v_mov_b32_e32 v11, v6
    v_mov_b32_e32 v12, v6
    v_mov_b32_e32 v13, v6
    s_nop 1
    v_mfma_f32_16x16x32_fp8_bf8 v[10:13], v[2:3], v[4:5], v[10:13]
    """
    got = run(lines, *registers, c, results=4).view(np.float32)
    a = np.stack([registers[0], registers[1]], -1).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    b = np.stack([registers[2], registers[3]], -1).view(ml_dtypes.float8_e5m2).astype(np.float64)
    rows, columns = np.zeros((16, 32)), np.zeros((32, 16))
    for lane in range(64):
        for byte in range(8):
            rows[lane % 16, 8 * (lane // 16) + byte] = a[lane, byte]
            columns[8 * (lane // 16) + byte, lane % 16] = b[lane, byte]
    product = rows @ columns
    for register in range(4):
        for lane in range(64):
            want = product[register + 4 * (lane // 16), lane % 16] + f32(c[lane])
            assert got[register, lane] == pytest.approx(want, rel=1e-5, abs=1e-5)
