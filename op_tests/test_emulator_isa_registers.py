"""Which registers each instruction reads and writes: the checks for data on its way and undefined bits rely on it.

The registers are taken from the assembly text by rules of the assembly language, so that an operand that a decoder
forgets is noticed.
"""

import re

import pytest

from aiter_paged_fp8.emulator import Program, load
from aiter_paged_fp8.emulator.state import SCALAR_ID, SCC_ID
from op_tests.emulator_kernels import isa_text
from op_tests.test_emulator_isa_compare import ROWS as COMPARES
from op_tests.test_emulator_isa_control import BRANCHES
from op_tests.test_emulator_isa_conversion import ROWS as CONVERSIONS
from op_tests.test_emulator_isa_conversion import WIDE as DOUBLES
from op_tests.test_emulator_isa_coverage import TABLES
from op_tests.test_emulator_isa_float import ARITHMETIC, FUNCTIONS
from op_tests.test_emulator_isa_float import source_count as float_sources
from op_tests.test_emulator_isa_half import ATOMICS, FLOAT_ATOMICS
from op_tests.test_emulator_isa_half import ROWS as HALF_ROWS
from op_tests.test_emulator_isa_half import arity as half_sources
from op_tests.test_emulator_isa_lds import NARROW_READS, NARROW_WRITES, READS, TRANSPOSED, WRITES
from op_tests.test_emulator_isa_matrix import DENSE, MIXED, SCALED
from op_tests.test_emulator_isa_memory import (
    BUFFER_LOADS,
    BUFFER_STORES,
    LOADS,
    NARROW_LOADS,
    NARROW_STORES,
    SCALAR,
    STORES,
    TO_LDS,
)
from op_tests.test_emulator_isa_scalar import COMPARE, COMPARE_IMMEDIATE, IMMEDIATE, MODIFYING, ONE, SAVEEXEC, TWO, WIDE
from op_tests.test_emulator_isa_vector import CARRY_ROWS, LANE_ROWS, MAD_ROWS, ROWS32, WIDE_ROWS, source_count

SPECIAL = {"vcc": (106, 2), "exec": (126, 2), "m0": (124, 1)}
EXEC = {SCALAR_ID + 126, SCALAR_ID + 127}


def block(first, count, file="v"):
    return f"{file}[{first}:{first + count - 1}]" if count > 1 else f"{file}{first}"


def matrix_sample(mnemonic):
    if mnemonic in DENSE:
        rows, depth, blocks, kind, _ = DENSE[mnemonic]
        bits = {"f32": 32, "f16": 16, "bf16": 16}.get(kind, 8)
        count, result = rows * depth * blocks * bits // 2048, rows * rows * blocks // 64
    else:
        rows, _ = (MIXED | SCALED)[mnemonic]
        count, result = 8, rows * rows // 64
    scales = ", v90, v91 op_sel_hi:[0,0,0]" if mnemonic in SCALED else ""
    return f"{block(10, result)}, {block(50, count)}, {block(60, count)}, {block(100, result)}{scales}"


def words_of(mnemonic):
    return int(mnemonic.rsplit("dword", 1)[1][1:] or 1)


def samples():
    """One line of each instruction: mnemonic -> operands."""
    lines = {}
    for name, statement in ROWS32.items():
        count = 3 if "3_" in name and statement in (min, max) else source_count(statement)
        lines[name] = "v10, " + ", ".join(f"v{20 + 10 * k}" for k in range(count))
    lines |= dict.fromkeys(LANE_ROWS, "v10, v20, v30")
    for name, (kinds, _) in WIDE_ROWS.items():
        lines[name] = "v[10:11], " + ", ".join(
            block(20 + 10 * k, 2 if kind == "w" else 1) for k, kind in enumerate(kinds)
        )
    lines |= {name: "v10, s[20:21], v20, v30" + (", s[30:31]" if row[0] else "") for name, row in CARRY_ROWS.items()}
    lines |= dict.fromkeys(MAD_ROWS, "v[10:11], s[20:21], v20, s31, v[30:31]")
    lines |= {"v_cndmask_b32": "v10, v20, v30, s[20:21]", "v_bitop3_b32": "v10, v20, s30, v40 bitop3:0x96"}
    lines |= {name: "s[20:21], " + ("v[20:21], v[30:31]" if name.endswith("64") else "v20, s30") for name in COMPARES}
    for name, statement in ARITHMETIC.items():
        lines[name] = "v10, " + ", ".join(f"v{20 + 10 * k}" for k in range(float_sources(statement)))
    lines |= dict.fromkeys(FUNCTIONS, "v10, v20")
    lines |= {"v_fmac_f32": "v10, v20, v30", "v_fmamk_f32": "v10, v20, 0x41000000, v30", "v_ldexp_f32": "v10, v20, v30"}
    lines |= {"v_fmaak_f32": "v10, v20, v30, 0x41000000", "v_div_scale_f32": "v10, s[20:21], v20, v30, v40"}
    lines |= {"v_div_fmas_f32": "v10, v20, v30, v40", "v_div_fixup_f32": "v10, v20, v30, v40"}
    lines |= {"v_pk_add_f32": "v[10:11], v[20:21], s[30:31]", "v_pk_mul_f32": "v[10:11], v[20:21], v[30:31]"}
    lines |= {
        "v_pk_fma_f32": "v[10:11], v[20:21], v[30:31], v[40:41]",
        "v_pk_mov_b32": "v[10:11], v[20:21], v[30:31] op_sel:[1,0]",
    }
    for name in CONVERSIONS:
        if name in DOUBLES:
            source, result, _ = DOUBLES[name]
            lines[name] = f"{block(10, result // 32)}, {block(20, source // 32)}"
        elif name.startswith("v_cvt_scalef32_pk_f32"):
            lines[name] = "v[10:11], v20, v30"
        elif name.startswith("v_cvt_scalef32"):
            lines[name] = "v10, v20, v30, v40"
        elif name in ("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8"):
            lines[name] = "v[10:11], v20"
        elif name == "v_cvt_pk_u8_f32":
            lines[name] = "v10, v20, v30, v40"
        else:
            lines[name] = "v10, v20, v30" if "_pk" in name else "v10, v20"
    lines |= {name: matrix_sample(name) for name in (*DENSE, *MIXED, *SCALED)}
    lines |= {"v_readfirstlane_b32": "s20, v20", "v_readlane_b32": "s20, v20, s30", "v_writelane_b32": "v10, s20, s30"}
    lines |= dict.fromkeys(("v_permlane16_swap_b32", "v_permlane32_swap_b32"), "v10, v20")
    lines |= {"v_accvgpr_read_b32": "v10, a20", "v_accvgpr_write_b32": "a10, v20", "v_accvgpr_mov_b32": "a10, a20"}
    lines |= dict.fromkeys(NARROW_READS, "v10, v20 offset:4") | dict.fromkeys(NARROW_WRITES, "v10, v20 offset:4")
    for name, (size, unit) in READS.items():
        lines[name] = f"{block(10, size // 4 * (2 if unit else 1))}, v20"
    for name, (size, unit) in WRITES.items():
        lines[name] = f"v10, {block(20, size // 4)}" + (f", {block(30, size // 4)}" if unit else "")
    lines |= {name: f"{block(10, 3 if bits == 6 else 2)}, v20" for name, bits in TRANSPOSED.items()}
    lines |= {
        "ds_bpermute_b32": "v10, v20, v30",
        "ds_permute_b32": "v10, v20, v30",
        "ds_swizzle_b32": "v10, v20 offset:swizzle(SWAP,1)",
    }
    lines |= {name: f"{block(10, words_of(name))}, v20, s[20:21]" for name in LOADS}
    lines |= {name: f"v[10:11], {block(20, words_of(name))}, off" for name in STORES}
    lines |= {name: f"{block(10, words_of(name))}, v20, s[20:23], s30 offen" for name in BUFFER_LOADS}
    lines |= {name: f"{block(10, words_of(name))}, v[20:21], s[20:23], s30 idxen offen" for name in BUFFER_STORES}
    for name in NARROW_LOADS:
        lines[name] = "v10, v20, s[20:23], 0 offen" if name.startswith("buffer") else "v10, v[20:21], off"
    for name in NARROW_STORES:
        lines[name] = "v10, v20, s[20:23], 0 offen" if name.startswith("buffer") else "v10, v20, s[20:21]"
    lines |= {
        name: f"{block(40, count, 's')}, {'s[20:23]' if 'buffer' in name else 's[20:21]'}, s30"
        for name, count in SCALAR.items()
    }
    lines |= dict.fromkeys(TO_LDS, "v20, s[20:21]")
    lines |= dict.fromkeys(TWO, "s10, s20, s30") | dict.fromkeys(IMMEDIATE, "s10, 5")
    for name, (kinds, _) in WIDE.items():
        lines[name] = "s[10:11], " + ", ".join(
            block(20 + 10 * k, 2 if kind == "w" else 1, "s") for k, kind in enumerate(kinds)
        )
    lines |= {
        name: f"{block(10, result // 32, 's')}, {block(20, source // 32, 's')}"
        for name, (source, result, _) in ONE.items()
    }
    lines |= {
        name: f"{block(10, width // 32, 's')}, {block(20, width // 32, 's')}" for name, (width, _) in MODIFYING.items()
    }
    lines |= dict.fromkeys(SAVEEXEC, "s[10:11], s[20:21]") | dict.fromkeys(COMPARE_IMMEDIATE, "s20, 5")
    for name in COMPARE:
        lines[name] = "s[20:21], s30" if name.startswith("s_bitcmp") else "s[20:21], s[30:31]"
        if name.endswith("32"):
            lines[name] = "s20, s30"
    lines |= dict.fromkeys(BRANCHES, ".Lend")
    for name in HALF_ROWS:
        if name.startswith("v_cmp"):
            lines[name] = "s[20:21], v20, v30"
        elif name.startswith("v_dot2c"):
            lines[name] = "v10, v20, v30"
        elif name in ("v_exp_f16", "v_log_f16", "v_rcp_f16", "v_sqrt_f16", "v_rsq_f16"):
            lines[name] = "v10, v20"
        elif name in (*ATOMICS, *FLOAT_ATOMICS):
            lines[name] = "v10, v20, s[20:21]"
        else:
            three = half_sources(name) == 3 or "dot2" in name
            lines[name] = "v10, v20, v30" + (", v40" if three else "")
    lines |= {"s_setreg_b32": "hwreg(HW_REG_MODE, 23, 1), s20", "s_getreg_b32": "s10, hwreg(HW_REG_MODE, 23, 1)"}
    return lines


SAMPLES = samples()
# No register operand.
WITHOUT = {name for name in TABLES["test_emulator_isa_control"] if name not in BRANCHES} | {"s_setreg_imm32_b32"}
NO_RESULT = (
    *ATOMICS,
    *FLOAT_ATOMICS,
    *WRITES,
    *NARROW_WRITES,
    *STORES,
    *NARROW_STORES,
    *BUFFER_STORES,
    *TO_LDS,
    *COMPARE,
    *COMPARE_IMMEDIATE,
    *BRANCHES,
)
# The old destination takes part in the result.
MODIFIED = {
    *(
        "v_dot2c_f32_bf16",
        "v_fmac_f32",
        "v_cvt_pk_fp8_f32",
        "v_cvt_pk_bf8_f32",
        "v_permlane16_swap_b32",
        "v_permlane32_swap_b32",
    ),
    *(name for name in CONVERSIONS if re.fullmatch(r"v_cvt_scalef32_pk_(fp8|bf8|fp4)_f32", name)),
    *(name for name in (*NARROW_READS, *NARROW_LOADS) if "d16" in name),
    *("s_cmovk_i32", "s_addk_i32", "s_mulk_i32", *MODIFYING, "v_writelane_b32"),
}
READS_SCC = {"s_addc_u32", "s_subb_u32", "s_cselect_b32", "s_cselect_b64", "s_cmov_b32", "s_cmov_b64", "s_cmovk_i32"}
READS_SCC |= {"s_cbranch_scc0", "s_cbranch_scc1"}
KEEPS_SCC = re.compile(
    r"s_(mul|mov|pack|bfm|cselect|cmov|brev|ff|flbit|sext|bitset|getreg|setreg|load|buffer|cbranch|branch)"
)
IMPLIED = {
    "v_div_fmas_f32": {106, 107},
    "s_cbranch_vccz": {106, 107},
    "s_cbranch_vccnz": {106, 107},
    "s_cbranch_execz": {126, 127},
    "s_cbranch_execnz": {126, 127},
    **{name: {124} for name in TO_LDS},
    **{name: {126, 127} for name in SAVEEXEC},
}


def registers(text, agpr_base):
    """Ids of the registers in a piece of text."""
    found = set()
    for file, first, low, high in re.findall(r"\b([vsa])(?:(\d+)|\[(\d+):(\d+)\])", text):
        for index in range(int(first or low), int(first or high) + 1):
            found.add(index + (SCALAR_ID if file == "s" else agpr_base if file == "a" else 0))
    return found


def expected(mnemonic, text, agpr_base):
    operands = re.split(r",\s*(?![^\[(]*[\])])", text)
    results = 0 if mnemonic in NO_RESULT or mnemonic == "s_setreg_b32" else 1
    if mnemonic in CARRY_ROWS or mnemonic in MAD_ROWS or mnemonic == "v_div_scale_f32":
        results = 2
    writes = registers(", ".join(operands[:results]), agpr_base)
    reads = registers(", ".join(operands[results:]), agpr_base)
    if mnemonic in MODIFIED:
        reads |= writes
    if "permlane" in mnemonic:
        writes |= reads
    if mnemonic == "v_pk_mov_b32":
        # op_sel:[1,0]: the high dword of the first source, the low one of the second.
        reads = {21, 30}
    reads |= {SCALAR_ID + row for row in IMPLIED.get(mnemonic, ())}
    if mnemonic in READS_SCC:
        reads.add(SCC_ID)
    if mnemonic.startswith("s_") and not KEEPS_SCC.match(mnemonic):
        writes.add(SCC_ID)
    if mnemonic in SAVEEXEC or "cmpx" in mnemonic:
        writes |= EXEC
    return reads, writes


@pytest.fixture(scope="module")
def operations():
    body = "\n".join(f"    {name} {text}" for name, text in SAMPLES.items())
    loaded = load(Program.parse(isa_text(f"{body}\n.Lend:\n    s_endpgm", 0)))
    found = {op.instruction.mnemonic: op for op in loaded.operations}
    return found, loaded.environment.agpr_base


@pytest.mark.parametrize("mnemonic", SAMPLES)
def test_registers(mnemonic, operations):
    found, agpr_base = operations
    op = found[mnemonic]
    reads, writes = expected(mnemonic, SAMPLES[mnemonic], agpr_base)
    assert op.reads == reads
    assert op.writes == writes


def test_every_instruction_with_registers_has_a_sample():
    rows = {mnemonic for table in TABLES.values() for mnemonic in table}
    assert sorted(rows - SAMPLES.keys() - WITHOUT) == []


@pytest.mark.parametrize(
    "mnemonic",
    [name for name in SAMPLES if name in NO_RESULT and name not in COMPARE and name not in COMPARE_IMMEDIATE],
)
def test_what_leaves_the_wave_is_watched_for_undefined_bits(mnemonic, operations):
    found, agpr_base = operations
    reads, _ = expected(mnemonic, SAMPLES[mnemonic], agpr_base)
    address = registers(SAMPLES[mnemonic].split(",")[0], agpr_base) if mnemonic.startswith("ds_write") else reads
    # What is written to LDS stays undefined there until it is read and used.
    assert found[mnemonic].sinks >= address
