"""Scalar instructions from assembly text to register, each against a statement in Python integers."""

import struct

import numpy as np
import pytest
from emulator_kernels import Kernel

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
RNG = np.random.default_rng(5)
EDGES = [
    0,
    1,
    2,
    31,
    32,
    33,
    63,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFE,
    M32,
    0x00050003,
    0x00100008,
]
PAIRS = [(a, b) for a in EDGES for b in EDGES]


def signed(value, bits=32):
    return value - (1 << bits) if value >> (bits - 1) else value


def run_all(instruction, width, results, scc_in=0):
    """Run one instruction on every pair; returns (result, scc) as integers. Sources s[8:9], s[10:11], result s[12:13]."""
    body = ["s_load_dwordx2 s[4:5], s[0:1], 0x0", "s_load_dwordx2 s[6:7], s[0:1], 0x8", "s_waitcnt lgkmcnt(0)"]
    body += ["v_lshlrev_b32_e32 v1, 2, v0", "s_lshl_b32 s3, s2, 4", "s_add_u32 s4, s4, s3", "s_addc_u32 s5, s5, 0"]
    body += ["s_load_dwordx4 s[8:11], s[4:5], 0x0", "s_waitcnt lgkmcnt(0)", "s_mov_b32 s12, s8", "s_mov_b32 s13, s9"]
    body += [f"s_cmp_eq_u32 {scc_in}, 1", instruction, "s_cselect_b32 s14, 1, 0"]
    body += ["v_mov_b32_e32 v2, s12", "v_mov_b32_e32 v3, s13", "v_mov_b32_e32 v4, s14"]
    body += ["s_mul_i32 s3, s2, 12", "s_add_u32 s6, s6, s3", "s_addc_u32 s7, s7, 0", "v_mov_b32_e32 v5, 0"]
    body += ["v_cmpx_eq_u32_e64 s[20:21], 0, v0", "global_store_dwordx3 v5, v[2:4], s[6:7]", "s_endpgm"]
    pairs = PAIRS if width == 1 else [(a | b << 32, (b | a << 32)) for a, b in PAIRS]
    source = np.array([[a & M32, a >> 32, b & M32, b >> 32] for a, b in pairs], np.uint32)
    target = np.zeros((len(pairs), 3), np.uint32)
    Kernel("\n".join(body), grid=len(pairs)).run(source, target)
    for (a, b), (low, high, scc) in zip(pairs, target.tolist(), strict=True):
        value = low if results == 1 else low | high << 32
        yield a, b, value, scc


def carry(value):
    return value & M32, int(value > M32)


def overflow(value):
    return value & M32, int(not -(1 << 31) <= value < 1 << 31)


def nonzero(value, mask=M32):
    return value & mask, int(value & mask != 0)


def bfe(value, spec, bits, is_signed):
    offset, width = spec & (bits - 1), min(spec >> 16 & 0x7F, bits)
    if not is_signed:
        return value >> offset & (1 << width) - 1
    field = signed(value, bits) >> offset
    field &= (1 << width) - 1
    return signed(field, width) if width else 0


# mnemonic: function of the two sources and SCC to (result, SCC or None where it stays)
TWO = {
    "s_add_u32": lambda a, b, c: carry(a + b),
    "s_addc_u32": lambda a, b, c: carry(a + b + c),
    "s_sub_u32": lambda a, b, c: (a - b & M32, int(b > a)),
    "s_subb_u32": lambda a, b, c: (a - b - c & M32, int(b + c > a)),
    "s_add_i32": lambda a, b, c: overflow(signed(a) + signed(b)),
    "s_sub_i32": lambda a, b, c: overflow(signed(a) - signed(b)),
    "s_absdiff_i32": lambda a, b, c: nonzero(abs(signed(a) - signed(b))),
    "s_min_i32": lambda a, b, c: (min(signed(a), signed(b)) & M32, int(signed(a) < signed(b))),
    "s_max_i32": lambda a, b, c: (max(signed(a), signed(b)) & M32, int(signed(a) > signed(b))),
    "s_min_u32": lambda a, b, c: (min(a, b), int(a < b)),
    "s_max_u32": lambda a, b, c: (max(a, b), int(a > b)),
    "s_mul_i32": lambda a, b, c: (a * b & M32, None),
    "s_mul_hi_u32": lambda a, b, c: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b, c: (signed(a) * signed(b) >> 32 & M32, None),
    "s_lshl1_add_u32": lambda a, b, c: carry((a << 1) + b),
    "s_lshl2_add_u32": lambda a, b, c: carry((a << 2) + b),
    "s_lshl3_add_u32": lambda a, b, c: carry((a << 3) + b),
    "s_lshl4_add_u32": lambda a, b, c: carry((a << 4) + b),
    "s_lshl_b32": lambda a, b, c: nonzero(a << (b & 31)),
    "s_lshr_b32": lambda a, b, c: nonzero(a >> (b & 31)),
    "s_ashr_i32": lambda a, b, c: nonzero(signed(a) >> (b & 31)),
    "s_and_b32": lambda a, b, c: nonzero(a & b),
    "s_or_b32": lambda a, b, c: nonzero(a | b),
    "s_xor_b32": lambda a, b, c: nonzero(a ^ b),
    "s_andn2_b32": lambda a, b, c: nonzero(a & ~b),
    "s_orn2_b32": lambda a, b, c: nonzero(a | ~b),
    "s_nand_b32": lambda a, b, c: nonzero(~(a & b)),
    "s_nor_b32": lambda a, b, c: nonzero(~(a | b)),
    "s_xnor_b32": lambda a, b, c: nonzero(~(a ^ b)),
    "s_bfe_u32": lambda a, b, c: nonzero(bfe(a, b, 32, False)),
    "s_bfe_i32": lambda a, b, c: nonzero(bfe(a, b, 32, True)),
    "s_bfm_b32": lambda a, b, c: (((1 << (a & 31)) - 1) << (b & 31) & M32, None),
    "s_pack_ll_b32_b16": lambda a, b, c: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": lambda a, b, c: (a & 0xFFFF | b & 0xFFFF0000, None),
    "s_pack_hh_b32_b16": lambda a, b, c: (a >> 16 | b & 0xFFFF0000, None),
    "s_cselect_b32": lambda a, b, c: (a if c else b, None),
}


@pytest.mark.parametrize("mnemonic", TWO)
@pytest.mark.parametrize("scc_in", [0, 1])
def test_two_sources(mnemonic, scc_in):
    for a, b, value, scc in run_all(f"{mnemonic} s12, s8, s10", 1, 1, scc_in):
        want, want_scc = TWO[mnemonic](a, b, scc_in)
        assert (value, scc) == (want, scc_in if want_scc is None else want_scc), (hex(a), hex(b))


WIDE = {
    "s_and_b64 s[12:13], s[8:9], s[10:11]": lambda a, b: a & b,
    "s_or_b64 s[12:13], s[8:9], s[10:11]": lambda a, b: a | b,
    "s_xor_b64 s[12:13], s[8:9], s[10:11]": lambda a, b: a ^ b,
    "s_andn2_b64 s[12:13], s[8:9], s[10:11]": lambda a, b: a & ~b,
    "s_orn2_b64 s[12:13], s[8:9], s[10:11]": lambda a, b: a | ~b,
    "s_nand_b64 s[12:13], s[8:9], s[10:11]": lambda a, b: ~(a & b),
    "s_nor_b64 s[12:13], s[8:9], s[10:11]": lambda a, b: ~(a | b),
    "s_xnor_b64 s[12:13], s[8:9], s[10:11]": lambda a, b: ~(a ^ b),
    "s_lshl_b64 s[12:13], s[8:9], s10": lambda a, b: a << (b & 63),
    "s_lshr_b64 s[12:13], s[8:9], s10": lambda a, b: a >> (b & 63),
    "s_ashr_i64 s[12:13], s[8:9], s10": lambda a, b: signed(a, 64) >> (b & 63),
    "s_bfe_u64 s[12:13], s[8:9], s10": lambda a, b: bfe(a, b & M32, 64, False),
    "s_bfe_i64 s[12:13], s[8:9], s10": lambda a, b: bfe(a, b & M32, 64, True),
    "s_not_b64 s[12:13], s[8:9]": lambda a, b: ~a,
}


@pytest.mark.parametrize("instruction", WIDE)
def test_wide_instructions_set_scc_where_the_result_is_not_zero(instruction):
    for a, b, value, scc in run_all(instruction, 2, 2):
        want = WIDE[instruction](a, b) & M64
        assert (value, scc) == (want, int(want != 0)), (hex(a), hex(b))


def first(bits):
    return bits.index("1") if "1" in bits else M32


def sign_run(value, bits):
    text = f"{value:0{bits}b}"
    other = "0" if text[0] == "1" else "1"
    return text.index(other) if other in text else M32


# instruction, width of the source, of the result, function, whether SCC is written
ONE = [
    ("s_mov_b32 s12, s8", 1, 1, lambda a: a, False),
    ("s_mov_b64 s[12:13], s[8:9]", 2, 2, lambda a: a, False),
    ("s_not_b32 s12, s8", 1, 1, lambda a: ~a & M32, True),
    ("s_brev_b32 s12, s8", 1, 1, lambda a: int(f"{a:032b}"[::-1], 2), False),
    ("s_brev_b64 s[12:13], s[8:9]", 2, 2, lambda a: int(f"{a:064b}"[::-1], 2), False),
    ("s_bcnt0_i32_b32 s12, s8", 1, 1, lambda a: f"{a:032b}".count("0"), True),
    ("s_bcnt1_i32_b32 s12, s8", 1, 1, lambda a: f"{a:032b}".count("1"), True),
    ("s_bcnt0_i32_b64 s12, s[8:9]", 2, 1, lambda a: f"{a:064b}".count("0"), True),
    ("s_bcnt1_i32_b64 s12, s[8:9]", 2, 1, lambda a: f"{a:064b}".count("1"), True),
    ("s_ff1_i32_b32 s12, s8", 1, 1, lambda a: first(f"{a:032b}"[::-1]), False),
    ("s_ff0_i32_b32 s12, s8", 1, 1, lambda a: first(f"{~a & M32:032b}"[::-1]), False),
    ("s_ff1_i32_b64 s12, s[8:9]", 2, 1, lambda a: first(f"{a:064b}"[::-1]), False),
    ("s_ff0_i32_b64 s12, s[8:9]", 2, 1, lambda a: first(f"{~a & M64:064b}"[::-1]), False),
    ("s_flbit_i32_b32 s12, s8", 1, 1, lambda a: first(f"{a:032b}"), False),
    ("s_flbit_i32_b64 s12, s[8:9]", 2, 1, lambda a: first(f"{a:064b}"), False),
    ("s_flbit_i32 s12, s8", 1, 1, lambda a: sign_run(a, 32), False),
    ("s_flbit_i32_i64 s12, s[8:9]", 2, 1, lambda a: sign_run(a, 64), False),
    ("s_sext_i32_i8 s12, s8", 1, 1, lambda a: signed(a & 0xFF, 8) & M32, False),
    ("s_sext_i32_i16 s12, s8", 1, 1, lambda a: signed(a & 0xFFFF, 16) & M32, False),
    ("s_abs_i32 s12, s8", 1, 1, lambda a: abs(signed(a)) & M32, True),
    ("s_bitset0_b32 s12, s8", 1, 1, lambda a: a & ~(1 << (a & 31)), False),
    ("s_bitset1_b32 s12, s8", 1, 1, lambda a: a | 1 << (a & 31), False),
    ("s_movk_i32 s12, 0x8001", 1, 1, lambda a: 0xFFFF8001, False),
    ("s_mulk_i32 s12, 0x8001", 1, 1, lambda a: a * 0xFFFF8001 & M32, False),
    ("s_cmovk_i32 s12, 7", 1, 1, lambda a: 7, False),
    ("s_cmov_b32 s12, 9", 1, 1, lambda a: 9, False),
    ("s_cselect_b64 s[12:13], s[8:9], 0", 2, 2, lambda a: a, False),
    ("s_bfm_b64 s[12:13], s8, 3", 1, 2, lambda a: ((1 << (a & 63)) - 1) << 3 & M64, False),
]


@pytest.mark.parametrize(("instruction", "width", "results", "function", "writes"), ONE, ids=[case[0] for case in ONE])
def test_one_source(instruction, width, results, function, writes):
    for a, _, value, scc in run_all(instruction, width, results, scc_in=1):
        want = function(a)
        assert (value, scc) == (want, int(want != 0) if writes else 1), hex(a)


def test_s_addk_i32_reports_overflow():
    for a, _, value, scc in run_all("s_addk_i32 s12, 0xfffe", 1, 1):
        assert (value, scc) == overflow(signed(a) - 2)


COMPARE = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


@pytest.mark.parametrize("name", COMPARE)
def test_compares(name):
    for a, b, _, scc in run_all(f"s_cmp_{name}_i32 s8, s10", 1, 1):
        assert scc == COMPARE[name](signed(a), signed(b))
    for a, b, _, scc in run_all(f"s_cmp_{name}_u32 s8, s10", 1, 1):
        assert scc == COMPARE[name](a, b)
    for a, _, _, scc in run_all(f"s_cmpk_{name}_i32 s8, 0xfffe", 1, 1):
        assert scc == COMPARE[name](signed(a), -2)
    for a, _, _, scc in run_all(f"s_cmpk_{name}_u32 s8, 0xfffe", 1, 1):
        assert scc == COMPARE[name](a, 0xFFFE)
    if name in ("eq", "lg"):
        for a, b, _, scc in run_all(f"s_cmp_{name}_u64 s[8:9], s[10:11]", 2, 1):
            assert scc == COMPARE[name](a, b)


def test_bit_tests():
    for a, b, _, scc in run_all("s_bitcmp1_b32 s8, s10", 1, 1):
        assert scc == a >> (b & 31) & 1
    for a, b, _, scc in run_all("s_bitcmp0_b32 s8, s10", 1, 1):
        assert scc == 1 - (a >> (b & 31) & 1)
    for a, b, _, scc in run_all("s_bitcmp1_b64 s[8:9], s10", 2, 1):
        assert scc == a >> (b & 63) & 1


SAVEEXEC = {
    "and": lambda s, e: s & e,
    "or": lambda s, e: s | e,
    "xor": lambda s, e: s ^ e,
    "andn2": lambda s, e: s & ~e,
    "orn2": lambda s, e: s | ~e,
    "nand": lambda s, e: ~(s & e),
    "nor": lambda s, e: ~(s | e),
    "xnor": lambda s, e: ~(s ^ e),
    "andn1": lambda s, e: ~s & e,
    "orn1": lambda s, e: ~s | e,
}


@pytest.mark.parametrize("name", SAVEEXEC)
def test_saveexec_saves_and_combines(name):
    old, source = 0x0F0F0F0F12345678, 0x00FF00FF9ABCDEF0
    text = f"""
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_mov_b32_e32 v1, 0
    s_mov_b32 exec_lo, {old & M32:#x}
    s_mov_b32 exec_hi, {old >> 32:#x}
    s_mov_b32 s8, {source & M32:#x}
    s_mov_b32 s9, {source >> 32:#x}
    s_{name}_saveexec_b64 s[10:11], s[8:9]
    s_cselect_b32 s14, 1, 0
    s_mov_b64 s[12:13], exec
    s_mov_b64 exec, 1
    v_mov_b32_e32 v2, s10
    v_mov_b32_e32 v3, s11
    v_mov_b32_e32 v4, s12
    v_mov_b32_e32 v5, s13
    v_mov_b32_e32 v6, s14
    s_waitcnt lgkmcnt(0)
    global_store_dwordx4 v1, v[2:5], s[4:5]
    global_store_dword v1, v6, s[4:5] offset:16
    s_endpgm
    """
    target = np.zeros(5, np.uint32)
    Kernel(text).run(target)
    want = SAVEEXEC[name](source, old) & M64
    assert struct.unpack("<QQI", target.tobytes()) == (old, want, int(want != 0))
