"""Scalar instructions, executed from ISA text, against scalar Python."""

import numpy as np
import pytest

from op_tests.emulator_text import M32, M64, PREFILL, agree, operand_table, pair, run_text, signed

CASES = 600


def low(value):
    return value & M32


def trunc(value, bits):
    return value & ((1 << bits) - 1)


def nonzero(value, bits=32):
    value = trunc(value, bits)
    return value, int(value != 0)


def overflow(value):
    return low(value), int(not -(1 << 31) <= value < 1 << 31)


def carry(value):
    return low(value), int(value > M32)


def smaller(a, b):
    return (a, 1) if a < b else (b, 0)


def larger(a, b):
    return (a, 1) if a > b else (b, 0)


def absdiff(a, b):
    # The manual subtracts and negates in 32 bits.
    difference = signed(signed(a) - signed(b))
    return nonzero(-difference if difference < 0 else difference)


def field(value, control, bits, sign):
    offset, width = control & (bits - 1), control >> 16 & 0x7F
    taken = signed(value, bits) >> offset if sign else value >> offset
    if width == 0:
        return nonzero(0, bits)
    taken = trunc(taken, width)
    return nonzero(signed(taken, width) if sign else taken, bits)


S = signed

# Two 32-bit sources: (a, b, scc) -> result, new scc (None: kept).
TWO = {
    "s_add_u32": lambda a, b, c: carry(a + b),
    "s_addc_u32": lambda a, b, c: carry(a + b + c),
    "s_sub_u32": lambda a, b, c: (low(a - b), int(b > a)),
    "s_subb_u32": lambda a, b, c: (low(a - b - c), int(b + c > a)),
    "s_add_i32": lambda a, b, c: overflow(S(a) + S(b)),
    "s_sub_i32": lambda a, b, c: overflow(S(a) - S(b)),
    "s_absdiff_i32": lambda a, b, c: absdiff(a, b),
    "s_min_i32": lambda a, b, c: tuple(map(low, smaller(S(a), S(b)))),
    "s_max_i32": lambda a, b, c: tuple(map(low, larger(S(a), S(b)))),
    "s_min_u32": lambda a, b, c: smaller(a, b),
    "s_max_u32": lambda a, b, c: larger(a, b),
    "s_mul_i32": lambda a, b, c: (low(a * b), None),
    "s_mul_hi_u32": lambda a, b, c: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b, c: (low(S(a) * S(b) >> 32), None),
    "s_lshl1_add_u32": lambda a, b, c: carry((a << 1) + b),
    "s_lshl2_add_u32": lambda a, b, c: carry((a << 2) + b),
    "s_lshl3_add_u32": lambda a, b, c: carry((a << 3) + b),
    "s_lshl4_add_u32": lambda a, b, c: carry((a << 4) + b),
    "s_lshl_b32": lambda a, b, c: nonzero(a << b % 32),
    "s_lshr_b32": lambda a, b, c: nonzero(a >> b % 32),
    "s_ashr_i32": lambda a, b, c: nonzero(S(a) >> b % 32),
    "s_and_b32": lambda a, b, c: nonzero(a & b),
    "s_or_b32": lambda a, b, c: nonzero(a | b),
    "s_xor_b32": lambda a, b, c: nonzero(a ^ b),
    "s_andn2_b32": lambda a, b, c: nonzero(a & ~b),
    "s_orn2_b32": lambda a, b, c: nonzero(a | ~b),
    "s_nand_b32": lambda a, b, c: nonzero(~(a & b)),
    "s_nor_b32": lambda a, b, c: nonzero(~(a | b)),
    "s_xnor_b32": lambda a, b, c: nonzero(~(a ^ b)),
    "s_bfe_u32": lambda a, b, c: field(a, b, 32, False),
    "s_bfe_i32": lambda a, b, c: field(a, b, 32, True),
    "s_bfm_b32": lambda a, b, c: (low(((1 << a % 32) - 1) << b % 32), None),
    "s_pack_ll_b32_b16": lambda a, b, c: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": lambda a, b, c: (a & 0xFFFF | (b >> 16) << 16, None),
    "s_pack_hh_b32_b16": lambda a, b, c: (a >> 16 | (b >> 16) << 16, None),
    "s_cselect_b32": lambda a, b, c: (a if c else b, None),
}
# The same with 64-bit results; "w" a pair, "n" one register.
WIDE = {
    "s_and_b64": ("ww", lambda a, b, c: nonzero(a & b, 64)),
    "s_or_b64": ("ww", lambda a, b, c: nonzero(a | b, 64)),
    "s_xor_b64": ("ww", lambda a, b, c: nonzero(a ^ b, 64)),
    "s_andn2_b64": ("ww", lambda a, b, c: nonzero(a & ~b, 64)),
    "s_orn2_b64": ("ww", lambda a, b, c: nonzero(a | ~b, 64)),
    "s_nand_b64": ("ww", lambda a, b, c: nonzero(~(a & b), 64)),
    "s_nor_b64": ("ww", lambda a, b, c: nonzero(~(a | b), 64)),
    "s_xnor_b64": ("ww", lambda a, b, c: nonzero(~(a ^ b), 64)),
    "s_lshl_b64": ("wn", lambda a, b, c: nonzero(a << b % 64, 64)),
    "s_lshr_b64": ("wn", lambda a, b, c: nonzero(a >> b % 64, 64)),
    "s_ashr_i64": ("wn", lambda a, b, c: nonzero(S(a, 64) >> b % 64, 64)),
    "s_bfe_u64": ("wn", lambda a, b, c: field(a, b, 64, False)),
    "s_bfe_i64": ("wn", lambda a, b, c: field(a, b, 64, True)),
    "s_bfm_b64": ("nn", lambda a, b, c: (trunc(((1 << a % 64) - 1) << b % 64, 64), None)),
    "s_cselect_b64": ("ww", lambda a, b, c: (a if c else b, None)),
}


def position(value, bits, wanted, *, high=False):
    order = range(bits - 1, -1, -1) if high else range(bits)
    for count, bit in enumerate(order):
        if value >> bit & 1 == wanted:
            return count
    return M32


def sign_run(value, bits):
    """Where, from the top, the first bit stands that differs from the sign."""
    return position(value, bits, 1 - (value >> (bits - 1)), high=True)


def ones(value):
    return bin(value).count("1")


# One source: width of source and result in bits, (value) -> result, new scc.
ONE = {
    "s_mov_b32": (32, 32, lambda a: (a, None)),
    "s_mov_b64": (64, 64, lambda a: (a, None)),
    "s_not_b32": (32, 32, lambda a: nonzero(~a)),
    "s_not_b64": (64, 64, lambda a: nonzero(~a, 64)),
    "s_brev_b32": (32, 32, lambda a: (int(f"{a:032b}"[::-1], 2), None)),
    "s_brev_b64": (64, 64, lambda a: (int(f"{a:064b}"[::-1], 2), None)),
    "s_bcnt0_i32_b32": (32, 32, lambda a: nonzero(32 - ones(a))),
    "s_bcnt1_i32_b32": (32, 32, lambda a: nonzero(ones(a))),
    "s_bcnt0_i32_b64": (64, 32, lambda a: nonzero(64 - ones(a))),
    "s_bcnt1_i32_b64": (64, 32, lambda a: nonzero(ones(a))),
    "s_ff0_i32_b32": (32, 32, lambda a: (position(a, 32, 0), None)),
    "s_ff1_i32_b32": (32, 32, lambda a: (position(a, 32, 1), None)),
    "s_ff0_i32_b64": (64, 32, lambda a: (position(a, 64, 0), None)),
    "s_ff1_i32_b64": (64, 32, lambda a: (position(a, 64, 1), None)),
    "s_flbit_i32_b32": (32, 32, lambda a: (position(a, 32, 1, high=True), None)),
    "s_flbit_i32_b64": (64, 32, lambda a: (position(a, 64, 1, high=True), None)),
    "s_flbit_i32": (32, 32, lambda a: (sign_run(a, 32), None)),
    "s_flbit_i32_i64": (64, 32, lambda a: (sign_run(a, 64), None)),
    "s_sext_i32_i8": (32, 32, lambda a: (low(S(a, 8)), None)),
    "s_sext_i32_i16": (32, 32, lambda a: (low(S(a, 16)), None)),
    "s_abs_i32": (32, 32, lambda a: nonzero(abs(S(a)))),
}
# The destination takes part: (old, a, scc) -> new, scc.
MODIFYING = {
    "s_bitset0_b32": (32, lambda d, a, c: (d & ~(1 << a % 32), None)),
    "s_bitset1_b32": (32, lambda d, a, c: (d | 1 << a % 32, None)),
    "s_cmov_b32": (32, lambda d, a, c: (a if c else d, None)),
    "s_cmov_b64": (64, lambda d, a, c: (a if c else d, None)),
}
IMMEDIATE = {
    "s_movk_i32": lambda d, k, c: (low(k), None),
    "s_cmovk_i32": lambda d, k, c: (low(k) if c else d, None),
    "s_addk_i32": lambda d, k, c: overflow(S(d) + k),
    "s_mulk_i32": lambda d, k, c: (low(d * k), None),
}
IMMEDIATES = (0, 1, -1, 5, 0x7FFF, -0x8000, 300, -300)
SAVEEXEC = {
    "s_and_saveexec_b64": lambda s, e: s & e,
    "s_or_saveexec_b64": lambda s, e: s | e,
    "s_xor_saveexec_b64": lambda s, e: s ^ e,
    "s_andn2_saveexec_b64": lambda s, e: s & ~e,
    "s_orn2_saveexec_b64": lambda s, e: s | ~e,
    "s_nand_saveexec_b64": lambda s, e: ~(s & e),
    "s_nor_saveexec_b64": lambda s, e: ~(s | e),
    "s_xnor_saveexec_b64": lambda s, e: ~(s ^ e),
    "s_andn1_saveexec_b64": lambda s, e: ~s & e,
    "s_orn1_saveexec_b64": lambda s, e: ~s | e,
}
COMPARE = {
    "s_cmp_eq_i32": lambda a, b: S(a) == S(b),
    "s_cmp_lg_i32": lambda a, b: S(a) != S(b),
    "s_cmp_gt_i32": lambda a, b: S(a) > S(b),
    "s_cmp_ge_i32": lambda a, b: S(a) >= S(b),
    "s_cmp_lt_i32": lambda a, b: S(a) < S(b),
    "s_cmp_le_i32": lambda a, b: S(a) <= S(b),
    "s_cmp_eq_u32": lambda a, b: a == b,
    "s_cmp_lg_u32": lambda a, b: a != b,
    "s_cmp_gt_u32": lambda a, b: a > b,
    "s_cmp_ge_u32": lambda a, b: a >= b,
    "s_cmp_lt_u32": lambda a, b: a < b,
    "s_cmp_le_u32": lambda a, b: a <= b,
    "s_cmp_eq_u64": lambda a, b: a == b,
    "s_cmp_lg_u64": lambda a, b: a != b,
    "s_bitcmp0_b32": lambda a, b: not a >> b % 32 & 1,
    "s_bitcmp1_b32": lambda a, b: a >> b % 32 & 1,
    "s_bitcmp0_b64": lambda a, b: not a >> b % 64 & 1,
    "s_bitcmp1_b64": lambda a, b: a >> b % 64 & 1,
}
COMPARE_IMMEDIATE = {
    "s_cmpk_eq_i32": lambda a, k: S(a) == S(k, 16),
    "s_cmpk_lg_i32": lambda a, k: S(a) != S(k, 16),
    "s_cmpk_gt_i32": lambda a, k: S(a) > S(k, 16),
    "s_cmpk_ge_i32": lambda a, k: S(a) >= S(k, 16),
    "s_cmpk_lt_i32": lambda a, k: S(a) < S(k, 16),
    "s_cmpk_le_i32": lambda a, k: S(a) <= S(k, 16),
    "s_cmpk_eq_u32": lambda a, k: a == k & 0xFFFF,
    "s_cmpk_lg_u32": lambda a, k: a != k & 0xFFFF,
    "s_cmpk_gt_u32": lambda a, k: a > k & 0xFFFF,
    "s_cmpk_ge_u32": lambda a, k: a >= k & 0xFFFF,
    "s_cmpk_lt_u32": lambda a, k: a < k & 0xFFFF,
    "s_cmpk_le_u32": lambda a, k: a <= k & 0xFFFF,
}
HARDWARE = ("s_setreg_imm32_b32", "s_setreg_b32", "s_getreg_b32")
ROWS = (
    *TWO,
    *WIDE,
    *ONE,
    *MODIFYING,
    *IMMEDIATE,
    *SAVEEXEC,
    *COMPARE,
    *COMPARE_IMMEDIATE,
    *HARDWARE,
)


def columns(count):
    return operand_table(count, CASES)


def old_scc():
    return np.arange(CASES, dtype=np.uint32) // 3 % 2


def held_against(mnemonic, got, scc, want, before, *sources):
    values, flags = zip(*want, strict=True)
    agree(mnemonic, got, values, *sources, before)
    wanted = [int(b) if flag is None else flag for flag, b in zip(flags, before, strict=True)]
    agree(f"scc after {mnemonic}", scc, wanted, *sources, before)


@pytest.mark.parametrize("mnemonic", TWO)
def test_two_sources_of_32_bits(mnemonic):
    a, b = columns(2)
    scc = old_scc()
    got = run_text(f"    {mnemonic} s30, s20, s21", ["s30", "scc"], scalars={20: a, 21: b, "scc": scc})
    want = [TWO[mnemonic](*case) for case in zip(a.tolist(), b.tolist(), scc.tolist(), strict=True)]
    held_against(mnemonic, got["s30"], got["scc"], want, scc, a, b)


@pytest.mark.parametrize("mnemonic", WIDE)
def test_two_sources_with_a_result_of_64_bits(mnemonic):
    kinds, statement = WIDE[mnemonic]
    words = columns(4)
    words[3][: CASES // 4] = words[1][: CASES // 4]
    sources = [pair(words[k], words[k + 1]) if kind == "w" else words[k] for k, kind in zip((0, 2), kinds, strict=True)]
    names = ["s[20:21]" if kinds[0] == "w" else "s20", "s[22:23]" if kinds[1] == "w" else "s22"]
    scc = old_scc()
    got = run_text(
        f"    {mnemonic} s[30:31], {names[0]}, {names[1]}",
        ["s30", "s31", "scc"],
        scalars={20: sources[0], 22: sources[1], "scc": scc},
    )
    want = [statement(*case) for case in zip(sources[0].tolist(), sources[1].tolist(), scc.tolist(), strict=True)]
    held_against(mnemonic, pair(got["s30"], got["s31"]), got["scc"], want, scc, *sources)


@pytest.mark.parametrize("mnemonic", ONE)
def test_one_source(mnemonic):
    width, result, statement = ONE[mnemonic]
    a, b = columns(2)
    b[::3], b[1::3] = 0, M32
    source = pair(a, b) if width == 64 else a
    if width == 64:
        source[:4] = (0, M64, 1 << 63, 1 << 32)
    scc = old_scc()
    text = f"    {mnemonic} {'s[30:31]' if result == 64 else 's30'}, {'s[20:21]' if width == 64 else 's20'}"
    got = run_text(text, ["s30", "s31", "scc"], scalars={20: source, "scc": scc})
    value = pair(got["s30"], got["s31"]) if result == 64 else got["s30"]
    held_against(mnemonic, value, got["scc"], [statement(x) for x in source.tolist()], scc, source)
    if result == 32:
        assert (got["s31"] == PREFILL).all()


@pytest.mark.parametrize("mnemonic", MODIFYING)
def test_the_destination_takes_part(mnemonic):
    width, statement = MODIFYING[mnemonic]
    a, b, c, d = columns(4)
    scc = old_scc()
    source, old = (pair(a, b), pair(c, d)) if width == 64 else (a, c)
    names = ("s[30:31]", "s[20:21]") if width == 64 else ("s30", "s20")
    got = run_text(
        f"    {mnemonic} {names[0]}, {names[1]}", ["s30", "s31", "scc"], scalars={20: source, 30: old, "scc": scc}
    )
    value = pair(got["s30"], got["s31"]) if width == 64 else got["s30"]
    want = [statement(*case) for case in zip(old.tolist(), source.tolist(), scc.tolist(), strict=True)]
    held_against(mnemonic, value, got["scc"], want, scc, old, source)


@pytest.mark.parametrize("immediate", IMMEDIATES)
@pytest.mark.parametrize("mnemonic", IMMEDIATE)
def test_a_16_bit_immediate_is_sign_extended(mnemonic, immediate):
    (a,) = columns(1)
    scc = old_scc()
    for written in (str(immediate), hex(immediate & 0xFFFF)):
        got = run_text(f"    {mnemonic} s30, {written}", ["s30", "scc"], scalars={30: a, "scc": scc})
        want = [IMMEDIATE[mnemonic](x, immediate, c) for x, c in zip(a.tolist(), scc.tolist(), strict=True)]
        held_against(mnemonic, got["s30"], got["scc"], want, scc, a)


@pytest.mark.parametrize("mnemonic", SAVEEXEC)
def test_saveexec_saves_then_combines(mnemonic):
    words = columns(4)
    source, execs = pair(words[0], words[1]), pair(words[2], words[3])
    source[:3], execs[:3] = (0, M64, 0), (0, M64, M64)
    got = run_text(
        f"    {mnemonic} s[30:31], s[20:21]", ["s30", "s31", "exec", "scc"], scalars={20: source, "exec": execs}
    )
    want = [trunc(SAVEEXEC[mnemonic](s, e), 64) for s, e in zip(source.tolist(), execs.tolist(), strict=True)]
    agree(mnemonic, got["exec"], want, source, execs)
    agree(f"scc after {mnemonic}", got["scc"], [int(value != 0) for value in want], source, execs)
    np.testing.assert_array_equal(pair(got["s30"], got["s31"]), execs)


@pytest.mark.parametrize("mnemonic", COMPARE)
def test_compares(mnemonic):
    words = columns(4)
    words[3][::2], words[2][::4] = words[1][::2], words[0][::4]
    if mnemonic.endswith("64"):
        second = words[2] if "bit" in mnemonic else pair(words[2], words[3])
        sources = (pair(words[0], words[1]), second)
        text = f"    {mnemonic} s[20:21], {'s22' if 'bit' in mnemonic else 's[22:23]'}"
    else:
        sources = words[0], words[2]
        text = f"    {mnemonic} s20, s22"
    got = run_text(text, ["scc"], scalars={20: sources[0], 22: sources[1], "scc": old_scc()})
    want = [int(COMPARE[mnemonic](a, b)) for a, b in zip(*(s.tolist() for s in sources), strict=True)]
    assert len(set(want)) == 2
    agree(mnemonic, got["scc"], want, *sources)


@pytest.mark.parametrize("immediate", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
@pytest.mark.parametrize("mnemonic", COMPARE_IMMEDIATE)
def test_compares_with_an_immediate(mnemonic, immediate):
    (a,) = columns(1)
    got = run_text(f"    {mnemonic} s20, {immediate:#x}", ["scc"], scalars={20: a, "scc": old_scc()})
    agree(mnemonic, got["scc"], [int(COMPARE_IMMEDIATE[mnemonic](x, immediate)) for x in a.tolist()], a)


@pytest.mark.parametrize(
    ("text", "value"),
    [("64", 64), ("-16", 0xFFFFFFF0), ("0x12345678", 0x12345678), ("1.0", 0x3F800000), ("-4.0", 0xC0800000)],
)
def test_constants(text, value):
    assert run_text(f"    s_mov_b32 s30, {text}", ["s30"])["s30"] == value
    assert run_text(f"    s_and_b32 s30, s20, {text}", ["s30"], scalars={20: np.array([M32])})["s30"] == value


def test_a_literal_of_a_64_bit_operation_is_sign_extended():
    got = run_text("    s_mov_b64 s[30:31], 0x80000000\n    s_or_b64 s[32:33], s[20:21], -1", ["s30", "s31", "s33"],
                   scalars={20: np.array([1], np.uint64)})  # fmt: skip
    assert (got["s30"], got["s31"], got["s33"]) == (0x80000000, M32, M32)


@pytest.mark.parametrize(
    "write", ["s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {}", "s_setreg_b32 hwreg(HW_REG_MODE, 23, 1), s20"]
)
def test_mode_is_written_and_read_back(write):
    for bit in (0, 1):
        got = run_text(
            f"    {write.format(bit)}\n    s_getreg_b32 s30, hwreg(HW_REG_MODE, 23, 1)\n"
            "    s_getreg_b32 s31, hwreg(HW_REG_MODE)",
            ["s30", "s31"],
            scalars={20: np.array([bit | 2], np.uint32)},
        )
        assert (got["s30"], got["s31"] >> 23 & 1) == (bit, bit)


def test_writing_exec_takes_effect_at_once():
    got = run_text("    s_mov_b32 exec_lo, 5\n    s_mov_b32 exec_hi, 0\n    v_mov_b32_e32 v30, 1", ["v30", "exec"])
    assert got["exec"] == 5
    np.testing.assert_array_equal(got["v30"][0], [1 if lane in (0, 2) else PREFILL for lane in range(64)])
