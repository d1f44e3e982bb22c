"""Vector compares, executed from ISA text, against scalar Python."""

import math
import struct

import numpy as np
import pytest

from op_tests.emulator_text import LANES, M64, agree, operand_table, pair, run_text, signed

CASES = 8
INTEGER_NAMES = [
    "v_cmp_f_i32",
    "v_cmp_lt_i32",
    "v_cmp_eq_i32",
    "v_cmp_le_i32",
    "v_cmp_gt_i32",
    "v_cmp_ne_i32",
    "v_cmp_ge_i32",
    "v_cmp_t_i32",
    "v_cmp_f_u32",
    "v_cmp_lt_u32",
    "v_cmp_eq_u32",
    "v_cmp_le_u32",
    "v_cmp_gt_u32",
    "v_cmp_ne_u32",
    "v_cmp_ge_u32",
    "v_cmp_t_u32",
    "v_cmp_f_i64",
    "v_cmp_lt_i64",
    "v_cmp_eq_i64",
    "v_cmp_le_i64",
    "v_cmp_gt_i64",
    "v_cmp_ne_i64",
    "v_cmp_ge_i64",
    "v_cmp_t_i64",
    "v_cmp_f_u64",
    "v_cmp_lt_u64",
    "v_cmp_eq_u64",
    "v_cmp_le_u64",
    "v_cmp_gt_u64",
    "v_cmp_ne_u64",
    "v_cmp_ge_u64",
    "v_cmp_t_u64",
    "v_cmpx_f_i32",
    "v_cmpx_lt_i32",
    "v_cmpx_eq_i32",
    "v_cmpx_le_i32",
    "v_cmpx_gt_i32",
    "v_cmpx_ne_i32",
    "v_cmpx_ge_i32",
    "v_cmpx_t_i32",
    "v_cmpx_f_u32",
    "v_cmpx_lt_u32",
    "v_cmpx_eq_u32",
    "v_cmpx_le_u32",
    "v_cmpx_gt_u32",
    "v_cmpx_ne_u32",
    "v_cmpx_ge_u32",
    "v_cmpx_t_u32",
    "v_cmpx_f_i64",
    "v_cmpx_lt_i64",
    "v_cmpx_eq_i64",
    "v_cmpx_le_i64",
    "v_cmpx_gt_i64",
    "v_cmpx_ne_i64",
    "v_cmpx_ge_i64",
    "v_cmpx_t_i64",
    "v_cmpx_f_u64",
    "v_cmpx_lt_u64",
    "v_cmpx_eq_u64",
    "v_cmpx_le_u64",
    "v_cmpx_gt_u64",
    "v_cmpx_ne_u64",
    "v_cmpx_ge_u64",
    "v_cmpx_t_u64",
]
FLOAT_NAMES = [
    "v_cmp_f_f32",
    "v_cmp_lt_f32",
    "v_cmp_eq_f32",
    "v_cmp_le_f32",
    "v_cmp_gt_f32",
    "v_cmp_lg_f32",
    "v_cmp_ge_f32",
    "v_cmp_o_f32",
    "v_cmp_u_f32",
    "v_cmp_nge_f32",
    "v_cmp_nlg_f32",
    "v_cmp_ngt_f32",
    "v_cmp_nle_f32",
    "v_cmp_neq_f32",
    "v_cmp_nlt_f32",
    "v_cmp_tru_f32",
    "v_cmpx_f_f32",
    "v_cmpx_lt_f32",
    "v_cmpx_eq_f32",
    "v_cmpx_le_f32",
    "v_cmpx_gt_f32",
    "v_cmpx_lg_f32",
    "v_cmpx_ge_f32",
    "v_cmpx_o_f32",
    "v_cmpx_u_f32",
    "v_cmpx_nge_f32",
    "v_cmpx_nlg_f32",
    "v_cmpx_ngt_f32",
    "v_cmpx_nle_f32",
    "v_cmpx_neq_f32",
    "v_cmpx_nlt_f32",
    "v_cmpx_tru_f32",
]
ROWS = (*INTEGER_NAMES, *FLOAT_NAMES)

INTEGER = {
    "f": lambda a, b: False,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "t": lambda a, b: True,
}


def unordered(a, b):
    return math.isnan(a) or math.isnan(b)


# The n-forms are the negation of the ordered compare, so true where a NaN takes part.
FLOAT = {
    "f": lambda a, b: False,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: not unordered(a, b),
    "u": unordered,
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
    "tru": lambda a, b: True,
}
# Zeros, ones, infinities, quiet and signalling NaNs, subnormals, the ends of the range.
FLOAT_EDGES = np.array(
    [
        *(0, 0x80000000, 0x3F800000, 0xBF800000, 0x3F800001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001),
        *(0xFFC12345, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x40490FDB),
    ],
    np.uint32,
)


def masks(seed):
    return np.random.default_rng(seed).integers(0, 1 << 64, CASES, dtype=np.uint64)


def held_against(mnemonic, statement, text, target, vectors, sources, target_name):
    execs = masks(2)
    execs[:2] = M64, 0
    outputs = ["vcc", "exec"] if target == "vcc" else ["s30", "s31", "exec"]
    got = run_text(text, outputs, vectors=vectors, scalars={"exec": execs})
    want = []
    for case in range(CASES):
        bits = 0
        for lane in range(LANES):
            if int(execs[case]) >> lane & 1:
                bits |= int(bool(statement(*(x[case][lane] for x in sources)))) << lane
        want.append(bits)
    agree(mnemonic, got["vcc"] if target == "vcc" else pair(got["s30"], got["s31"]), want, execs)
    agree(f"exec after {mnemonic}", got["exec"], want if "cmpx" in mnemonic else execs.tolist(), execs)


@pytest.mark.parametrize("target", ["vcc", "s[30:31]"])
@pytest.mark.parametrize("mnemonic", INTEGER_NAMES)
def test_integers(mnemonic, target):
    _, _, name, kind = mnemonic.split("_")
    words = [word.reshape(CASES, LANES) for word in operand_table(4, CASES * LANES)]
    words[1][:, ::3], words[3][:, ::3] = 0, 0
    words[3][:, ::5] = words[1][:, ::5]
    bits = int(kind[1:])
    if bits == 64:
        sources = [pair(words[0], words[1]), pair(words[2], words[3])]
        vectors, names = {10 + k: word for k, word in enumerate(words)}, "v[10:11], v[12:13]"
    else:
        sources = [words[0], words[1]]
        vectors, names = {10: words[0], 11: words[1]}, "v10, v11"
    values = [source.tolist() for source in sources]
    if kind[0] == "i":
        values = [[[signed(x, bits) for x in row] for row in value] for value in values]
    held_against(mnemonic, INTEGER[name], f"    {mnemonic} {target}, {names}", target, vectors, values, target)


@pytest.mark.parametrize("target", ["vcc", "s[30:31]"])
@pytest.mark.parametrize("mnemonic", FLOAT_NAMES)
def test_floats(mnemonic, target):
    name = mnemonic.split("_")[2]
    grid = np.array([(a, b) for a in FLOAT_EDGES for b in FLOAT_EDGES], np.uint32)
    grid = np.resize(grid, (CASES * LANES, 2)).reshape(CASES, LANES, 2)
    a, b = np.ascontiguousarray(grid[..., 0]), np.ascontiguousarray(grid[..., 1])
    values = [[struct.unpack("<64f", row.tobytes()) for row in source] for source in (a, b)]
    held_against(mnemonic, FLOAT[name], f"    {mnemonic} {target}, v10, v11", target, {10: a, 11: b}, values, target)


def test_float_sources_take_sign_modifiers():
    a = np.array([[1.0, -1.0, 2.0, -2.0] * 16], np.float32)
    got = run_text(
        "    v_cmp_lt_f32_e64 vcc, |v10|, -v11",
        ["vcc"],
        vectors={10: a.view(np.uint32), 11: (-1.5 * np.ones((1, 64), np.float32)).view(np.uint32)},
    )
    assert got["vcc"] == int("0011" * 16, 2)
