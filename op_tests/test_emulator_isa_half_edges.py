"""Half precision at its edges, executed from ISA text, against rational numbers: subnormals, infinities, NaNs."""

import numpy as np
import pytest

from op_tests.emulator_float_statements import half, single
from op_tests.emulator_text import LANES, agree, run_text
from op_tests.exact_floats import F16, F32

CASES = 8
EDGES = (0, 1, 2, 0x3FF, 0x400, 0x401, 0x3BFF, 0x3C00, 0x3C01, 0x7BFF, 0x7BFE, 0x7C00, 0x7E00, 0x7D01, 0x1400, 0x6800)

ARITHMETIC = {
    "v_add_f16": half.add,
    "v_sub_f16": lambda a, b: half.add(a, half.negated(b)),
    "v_subrev_f16": lambda a, b: half.add(b, half.negated(a)),
    "v_mul_f16": half.mul,
    "v_min_f16": half.minimum_number,
    "v_max_f16": half.maximum_number,
    "v_fma_f16": lambda a, b, c: half.fma(a, b, c),
}
PACKED = {
    "v_pk_add_f16": "v_add_f16",
    "v_pk_mul_f16": "v_mul_f16",
    "v_pk_fma_f16": "v_fma_f16",
    "v_pk_min_f16": "v_min_f16",
    "v_pk_max_f16": "v_max_f16",
}


def operands(count):
    """Registers of two halves: edges of both signs against each other, then any pattern."""
    generator = np.random.default_rng(31)
    edges = np.array([*EDGES, *(x | 0x8000 for x in EDGES)], np.uint16)
    total = 2 * CASES * LANES
    columns = []
    for _ in range(count):
        column = generator.integers(0, 1 << 16, total).astype(np.uint16)
        column[: total // 2] = edges[generator.integers(0, len(edges), total // 2)]
        columns.append(column.view(np.uint32).reshape(CASES, LANES))
    return columns


def sources_of(name):
    return 3 if "fma" in name else 2


def run_one(text, columns):
    return run_text(f"    {text}", ["v30"], vectors={10 + k: column for k, column in enumerate(columns)})["v30"]


def held_against(text, got, statement, columns, shift):
    halves = [column >> np.uint32(shift) & np.uint32(0xFFFF) for column in columns]
    want = [statement(*case) for case in zip(*(x.ravel().tolist() for x in halves), strict=True)]
    agree(text, got, want, *halves, nan=half.is_quiet_nan)


@pytest.mark.parametrize("mnemonic", ARITHMETIC)
def test_plain(mnemonic):
    columns = operands(sources_of(mnemonic))
    text = f"{mnemonic} v30, " + ", ".join(f"v{10 + k}" for k in range(len(columns)))
    held_against(text, run_one(text, columns), ARITHMETIC[mnemonic], columns, 0)


@pytest.mark.parametrize("mnemonic", PACKED)
def test_packed(mnemonic):
    columns = operands(sources_of(mnemonic))
    text = f"{mnemonic} v30, " + ", ".join(f"v{10 + k}" for k in range(len(columns)))
    got = run_one(text, columns)
    held_against(text, got & 0xFFFF, ARITHMETIC[PACKED[mnemonic]], columns, 0)
    held_against(text, got >> 16, ARITHMETIC[PACKED[mnemonic]], columns, 16)


def test_mixed_multiply_add_widens_its_halves_and_rounds_to_single():
    a, b = operands(2)
    generator = np.random.default_rng(32)
    c = generator.standard_normal((CASES, LANES)).astype(np.float32).view(np.uint32)
    got = run_one("v_fma_mix_f32 v30, v10, v11, v12 op_sel:[1,0,0] op_sel_hi:[1,1,0]", [a, b, c])

    def widened(bits):
        value = F16.value(bits)
        sign = (bits & 0x8000) << 16
        if isinstance(value, str):
            return 0x7FC00000 if value == "nan" else sign | 0x7F800000
        return sign | F32.round(abs(value))

    rows = zip((a >> 16).ravel().tolist(), (b & 0xFFFF).ravel().tolist(), c.ravel().tolist(), strict=True)
    want = [single.fma(widened(x), widened(y), z) for x, y, z in rows]
    agree("v_fma_mix_f32", got, want, a, b, c, nan=single.is_quiet_nan)
