"""Integer vector instructions, executed from ISA text, against scalar Python."""

import itertools

import numpy as np
import pytest

from op_tests.emulator_text import LANES, M32, M64, PREFILL, agree, operand_table, pair, run_text, signed

CASES = 10
S = signed


def u24(value):
    return value & 0xFFFFFF


def s24(value):
    return signed(value, 24)


def position(value, wanted, *, high=False):
    order = range(31, -1, -1) if high else range(32)
    for count, bit in enumerate(order):
        if value >> bit & 1 == wanted:
            return count
    return M32


def ones(value):
    return bin(value).count("1")


def median(a, b, c):
    return sorted((a, b, c))[1]


def extract(value, offset, width, sign):
    offset, width = offset % 32, width % 32
    taken = (S(value) if sign else value) >> offset & (1 << width) - 1
    return S(taken, width) if sign and width else taken


def permute(high, low, selector):
    """V_PERM_B32: bytes 0-3 are the second source's, 4-7 the first's; from 8 on signs and constants."""
    source = (high << 32 | low).to_bytes(8, "little")
    result = []
    for pick in selector.to_bytes(4, "little"):
        if pick < 8:
            result.append(source[pick])
        elif pick < 12:
            # Sign of the bytes 1, 3, 5, 7.
            result.append(0xFF if source[2 * (pick - 8) + 1] & 0x80 else 0)
        else:
            result.append(0 if pick == 12 else 0xFF)
    return int.from_bytes(bytes(result), "little")


# Sources are 32 bits each; results are taken modulo 2**32.
ROWS32 = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32": lambda a: position(a, 1, high=True),
    "v_ffbl_b32": lambda a: position(a, 1),
    "v_ffbh_i32": lambda a: position(a, 1 - (a >> 31), high=True),
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << a % 32,
    "v_lshrrev_b32": lambda a, b: b >> a % 32,
    "v_ashrrev_i32": lambda a, b: S(b) >> a % 32,
    "v_min_u32": min,
    "v_max_u32": max,
    "v_min_i32": lambda a, b: min(S(a), S(b)),
    "v_max_i32": lambda a, b: max(S(a), S(b)),
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: S(a) * S(b) >> 32,
    "v_mul_u32_u24": lambda a, b: u24(a) * u24(b),
    "v_mul_i32_i24": lambda a, b: s24(a) * s24(b),
    "v_bfm_b32": lambda a, b: ((1 << a % 32) - 1) << b % 32,
    "v_bcnt_u32_b32": lambda a, b: ones(a) + b,
    "v_mad_u32_u24": lambda a, b, c: u24(a) * u24(b) + c,
    "v_mad_i32_i24": lambda a, b, c: s24(a) * s24(b) + c,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << b % 32) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << c % 32,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_lshl_or_b32": lambda a, b, c: a << b % 32 | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_bfe_u32": lambda a, b, c: extract(a, b, c, False),
    "v_bfe_i32": lambda a, b, c: extract(a, b, c, True),
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> c % 32,
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c % 4),
    "v_perm_b32": permute,
    "v_min3_u32": min,
    "v_max3_u32": max,
    "v_med3_u32": median,
    "v_min3_i32": lambda a, b, c: min(S(a), S(b), S(c)),
    "v_max3_i32": lambda a, b, c: max(S(a), S(b), S(c)),
    "v_med3_i32": lambda a, b, c: median(S(a), S(b), S(c)),
}
# Depend on the lane too.
LANE_ROWS = {
    "v_mbcnt_lo_u32_b32": lambda a, b, lane: ones(a & (1 << min(lane, 32)) - 1) + b,
    "v_mbcnt_hi_u32_b32": lambda a, b, lane: ones(a & (1 << max(lane - 32, 0)) - 1) + b,
}
# "w": 64 bits.
WIDE_ROWS = {
    "v_mov_b64": ("w", lambda a: a),
    "v_lshl_add_u64": ("wnw", lambda a, b, c: (a << b % 8) + c),
    "v_lshlrev_b64": ("nw", lambda a, b: b << a % 64),
    "v_lshrrev_b64": ("nw", lambda a, b: b >> a % 64),
    "v_ashrrev_i64": ("nw", lambda a, b: S(b, 64) >> a % 64),
}
# (a, b, carry in) -> sum, carry out
CARRY_ROWS = {
    "v_add_co_u32": (False, lambda a, b, c: (a + b, a + b > M32)),
    "v_sub_co_u32": (False, lambda a, b, c: (a - b, b > a)),
    "v_subrev_co_u32": (False, lambda a, b, c: (b - a, a > b)),
    "v_addc_co_u32": (True, lambda a, b, c: (a + b + c, a + b + c > M32)),
    "v_subb_co_u32": (True, lambda a, b, c: (a - b - c, b + c > a)),
    "v_subbrev_co_u32": (True, lambda a, b, c: (b - a - c, a + c > b)),
}
# (a, b, c) with a 64-bit c -> exact sum, bits, whether signed
MAD_ROWS = {
    "v_mad_u64_u32": lambda a, b, c: (a * b + c, a * b + c > M64),
    "v_mad_i64_i32": lambda a, b, c: (S(a) * S(b) + S(c, 64), not -(1 << 63) <= S(a) * S(b) + S(c, 64) < 1 << 63),
}
SELECT_ROWS = ("v_cndmask_b32", "v_bitop3_b32")
ROWS = (*ROWS32, *LANE_ROWS, *WIDE_ROWS, *CARRY_ROWS, *MAD_ROWS, *SELECT_ROWS)

SOME_LANES = 0xF0F0_1234_8000_0001


def columns(count):
    table = operand_table(count, CASES * LANES)
    if count == 3:
        table[2][::5] &= 0x0F0F0F0F
    return [column.reshape(CASES, LANES) for column in table]


def is_active(lane):
    return SOME_LANES >> lane & 1


ONE_SOURCE = ("v_mov_b32", "v_not_b32", "v_bfrev_b32", "v_ffbh_u32", "v_ffbl_b32", "v_ffbh_i32")


def source_count(statement):
    return 2 if statement in (min, max) else statement.__code__.co_argcount


@pytest.mark.parametrize("mnemonic", ROWS32)
def test_32_bits(mnemonic):
    statement = ROWS32[mnemonic]
    count = 3 if "3_" in mnemonic and statement in (min, max) else source_count(statement)
    sources = columns(count)
    text = f"    {mnemonic} v30, " + ", ".join(f"v{10 + k}" for k in range(count))
    got = run_text(text, ["v30"], vectors={10 + k: source for k, source in enumerate(sources)})["v30"]
    want = [statement(*case) & M32 for case in zip(*(s.ravel().tolist() for s in sources), strict=True)]
    agree(mnemonic, got, want, *sources)


@pytest.mark.parametrize("mnemonic", ROWS32)
def test_inactive_lanes_keep_their_value(mnemonic):
    statement = ROWS32[mnemonic]
    count = 3 if "3_" in mnemonic and statement in (min, max) else source_count(statement)
    sources = [column[:1] for column in columns(count)]
    text = f"    {mnemonic} v30, " + ", ".join(f"v{10 + k}" for k in range(count))
    vectors = {10 + k: source for k, source in enumerate(sources)}
    got = run_text(text, ["v30"], vectors=vectors, scalars={"exec": np.array([SOME_LANES], np.uint64)})["v30"]
    want = [
        statement(*case) & M32 if is_active(lane) else PREFILL
        for lane, case in enumerate(zip(*(s.ravel().tolist() for s in sources), strict=True))
    ]
    agree(mnemonic, got, want, *sources)


def kinds_of_operands(count):
    """Every order of a scalar, a constant and a vector register, as far as there are sources."""
    return list(itertools.permutations("scv"))[:6] if count == 3 else [("s", "v"), ("v", "s"), ("c", "v"), ("v", "c")]


@pytest.mark.parametrize("mnemonic", [name for name in ROWS32 if name not in ONE_SOURCE])
def test_scalar_and_constant_sources(mnemonic):
    statement = ROWS32[mnemonic]
    count = 3 if "3_" in mnemonic and statement in (min, max) else source_count(statement)
    table = columns(3)
    for kinds in kinds_of_operands(count):
        names, values = [], []
        scalar = np.resize(table[0][0], CASES)
        for k, kind in enumerate(kinds):
            names.append({"s": "s20", "c": "-11", "v": f"v{10 + k}"}[kind])
            values.append(
                {"s": np.repeat(scalar, LANES), "c": np.full(CASES * LANES, M32 - 10), "v": table[k].ravel()}[kind]
            )
        text = f"{mnemonic} v30, {', '.join(names)}"
        vectors = {10 + k: table[k] for k, kind in enumerate(kinds) if kind == "v"}
        got = run_text(f"    {text}", ["v30"], vectors=vectors, scalars={20: scalar})["v30"]
        want = [statement(*case) & M32 for case in zip(*(value.tolist() for value in values), strict=True)]
        agree(text, got, want, *values)


def test_the_destination_may_be_a_source():
    a, b = columns(2)
    got = run_text("    v_sub_u32_e32 v10, v11, v10", ["v10"], vectors={10: a, 11: b})["v10"]
    np.testing.assert_array_equal(got, b - a)


@pytest.mark.parametrize("mnemonic", LANE_ROWS)
def test_masked_bit_count(mnemonic):
    a, b = columns(2)
    for mask in (np.array([M64], np.uint64), np.array([SOME_LANES], np.uint64)):
        got = run_text(f"    {mnemonic} v30, v10, v11", ["v30"], vectors={10: a, 11: b}, scalars={"exec": mask})["v30"]
        # EXEC decides which lanes are written, not which are counted.
        want = [
            LANE_ROWS[mnemonic](x, y, k % LANES) & M32 if int(mask[0]) >> k % LANES & 1 else PREFILL
            for k, (x, y) in enumerate(zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))
        ]
        agree(mnemonic, got, want, a, b)


@pytest.mark.parametrize("mnemonic", WIDE_ROWS)
def test_64_bits(mnemonic):
    kinds, statement = WIDE_ROWS[mnemonic]
    words = columns(6)
    sources, names, vectors = [], [], {}
    for k, kind in enumerate(kinds):
        register = 10 + 2 * k
        vectors[register] = words[2 * k]
        if kind == "w":
            vectors[register + 1] = words[2 * k + 1]
            sources.append(pair(words[2 * k], words[2 * k + 1]))
            names.append(f"v[{register}:{register + 1}]")
        else:
            sources.append(words[2 * k])
            names.append(f"v{register}")
    text = f"    {mnemonic} v[30:31], {', '.join(names)}"
    want = [statement(*case) & M64 for case in zip(*(s.ravel().tolist() for s in sources), strict=True)]
    for mask in (M64, SOME_LANES):
        got = run_text(text, ["v30", "v31"], vectors=vectors, scalars={"exec": np.array([mask], np.uint64)})
        old = PREFILL << 32 | PREFILL
        expected = [value if mask >> k % LANES & 1 else old for k, value in enumerate(want)]
        agree(mnemonic, pair(got["v30"], got["v31"]), expected, *sources)


def mask_of(flags):
    """Bools ``[cases, 64]`` to scalar pairs."""
    return [sum(int(flag) << lane for lane, flag in enumerate(row)) for row in flags]


def lane_masks(seed):
    return np.random.default_rng(seed).integers(0, 1 << 64, CASES, dtype=np.uint64)


@pytest.mark.parametrize("form", ["vcc", "s[30:31]"])
@pytest.mark.parametrize("mnemonic", CARRY_ROWS)
def test_carries(mnemonic, form):
    with_carry, statement = CARRY_ROWS[mnemonic]
    a, b = columns(2)
    carry, execs = lane_masks(3), lane_masks(4)
    execs[0] = M64
    source = "" if not with_carry else ", vcc" if form == "vcc" else ", s[20:21]"
    scalars = {("vcc" if form == "vcc" else 20): carry, "exec": execs}
    outputs = ["v30", "vcc"] if form == "vcc" else ["v30", "s30", "s31"]
    got = run_text(f"    {mnemonic} v30, {form}, v10, v11{source}", outputs, vectors={10: a, 11: b}, scalars=scalars)
    sums, flags = np.empty((CASES, LANES), object), np.zeros((CASES, LANES), bool)
    for case, lane in np.ndindex(CASES, LANES):
        value, out = statement(int(a[case, lane]), int(b[case, lane]), int(carry[case]) >> lane & 1)
        active = int(execs[case]) >> lane & 1
        sums[case, lane], flags[case, lane] = value & M32 if active else PREFILL, out and active
    agree(mnemonic, got["v30"], sums.ravel().tolist(), a, b)
    out = got["vcc"] if form == "vcc" else pair(got["s30"], got["s31"])
    # Inactive lanes give no carry.
    agree(f"carry of {mnemonic}", out, mask_of(flags), carry, execs)


@pytest.mark.parametrize("mnemonic", MAD_ROWS)
def test_multiply_add_to_64_bits(mnemonic):
    a, b, low, high = columns(4)
    c, execs = pair(low, high), lane_masks(5)
    c[0, :4] = M64, 1 << 63, (1 << 63) - 1, 0
    got = run_text(
        f"    {mnemonic} v[30:31], s[30:31], v10, v11, v[12:13]",
        ["v30", "v31", "s30", "s31"],
        vectors={10: a, 11: b, 12: c.astype(np.uint32), 13: (c >> np.uint64(32)).astype(np.uint32)},
        scalars={"exec": execs},
    )
    sums, flags = [], np.zeros((CASES, LANES), bool)
    for case, lane in np.ndindex(CASES, LANES):
        value, out = MAD_ROWS[mnemonic](*(int(x[case, lane]) for x in (a, b, c)))
        active = int(execs[case]) >> lane & 1
        sums.append(value & M64 if active else PREFILL << 32 | PREFILL)
        flags[case, lane] = out and active
    agree(mnemonic, pair(got["v30"], got["v31"]), sums, a, b, c)
    agree(f"carry of {mnemonic}", pair(got["s30"], got["s31"]), mask_of(flags), execs)


@pytest.mark.parametrize("mask", ["vcc", "s[20:21]"])
def test_select_takes_the_second_source_where_the_mask_is_set(mask):
    a, b = columns(2)
    bits = lane_masks(6)
    got = run_text(
        f"    v_cndmask_b32 v30, v10, v11, {mask}",
        ["v30"],
        vectors={10: a, 11: b},
        scalars={"vcc" if mask == "vcc" else 20: bits},
    )["v30"]
    want = [
        y if int(bits[k // LANES]) >> k % LANES & 1 else x
        for k, (x, y) in enumerate(zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))
    ]
    agree("v_cndmask_b32", got, want, a, b)


@pytest.mark.parametrize("table", [0x00, 0x80, 0xFE, 0x96, 0xCA, 0xE8, 0x1B, 0x40, 0x10, 0x04, 0xFF])
def test_bitop3_looks_up_three_bits(table):
    a, b, c = columns(3)
    got = run_text(f"    v_bitop3_b32 v30, v10, v11, v12 bitop3:{table:#x}", ["v30"], vectors={10: a, 11: b, 12: c})

    def statement(x, y, z):
        index = ((x >> bit & 1) * 4 + (y >> bit & 1) * 2 + (z >> bit & 1) for bit in range(32))
        return sum((table >> i & 1) << bit for bit, i in enumerate(index))

    want = [statement(*case) for case in zip(a.ravel().tolist(), b.ravel().tolist(), c.ravel().tolist(), strict=True)]
    agree("v_bitop3_b32", got["v30"], want, a, b, c)


def test_a_carry_may_be_read_at_once():
    # The manual's table of wait states: none for a carry-in. run_text allows no report.
    a, b = columns(2)
    got = run_text(
        "    v_add_co_u32_e32 v30, vcc, v10, v11\n    v_addc_co_u32_e32 v31, vcc, 0, v10, vcc",
        ["v30", "v31"],
        vectors={10: a, 11: b},
    )
    want = [(x + (x + y > M32)) & M32 for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)]
    agree("v_addc_co_u32", got["v31"], want, a, b)
