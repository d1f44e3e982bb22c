"""A register that nobody has written must not get lost on its way: each source of each instruction, left unwritten, is
reported where the result is stored, and nothing is reported where all are written.
"""

import re

import numpy as np
import pytest

from aiter_paged_fp8.emulator.state import SCALAR_ID
from op_tests.emulator_kernels import Kernel, words
from op_tests.test_emulator_isa_control import BRANCHES
from op_tests.test_emulator_isa_lds import READS, TRANSPOSED
from op_tests.test_emulator_isa_registers import NO_RESULT, SAMPLES, registers
from op_tests.test_emulator_isa_scalar import COMPARE, COMPARE_IMMEDIATE, SAVEEXEC

# Vector instructions whose result is a vector register: what is stored after them.
STORED = {
    name: text
    for name, text in SAMPLES.items()
    if name not in (*NO_RESULT, *COMPARE, *COMPARE_IMMEDIATE, *SAVEEXEC, *BRANCHES)
    and re.match(r"v(\d+|\[\d+:\d+\])", text)
    and name.startswith("v_")
}
SCALARS = {
    name: text
    for name, text in SAMPLES.items()
    if name.startswith("s_") and re.match(r"s(\d+|\[\d+:\d+\]), s", text) and name not in (*COMPARE, *SAVEEXEC)
    and "load" not in name
}  # fmt: skip
# Exchanges through LDS and reads of LDS take part as vector instructions do.
EXCHANGES = {name: SAMPLES[name] for name in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32")}
FRAME_VECTORS, FRAME_SCALARS = (0, 1, 2), (4, 5, 6, 7)


def name_of(identity):
    return f"s{identity - SCALAR_ID}" if identity >= SCALAR_ID else f"v{identity}"


def body_of(line, defined, stored):
    """Load every register of `defined`, run the line, store the registers of `stored`."""
    lines = [
        "s_load_dwordx4 s[4:7], s[0:1], 0x0",
        "v_lshlrev_b32_e32 v1, 2, v0",
        "s_waitcnt lgkmcnt(0)",
    ]
    for k, identity in enumerate(sorted(defined)):
        if identity >= SCALAR_ID:
            lines.append(f"s_load_dword {name_of(identity)}, s[4:5], {256 + 4 * (k % 64):#x}")
        else:
            lines.append(f"global_load_dword {name_of(identity)}, v1, s[4:5] offset:{256 * (k % 8)}")
    lines += ["s_waitcnt vmcnt(0) lgkmcnt(0)", *["s_nop 7"] * 3, line, *["s_nop 7"] * 3, "s_waitcnt lgkmcnt(0)"]
    for identity in sorted(stored):
        if identity >= SCALAR_ID:
            lines.append(f"v_mov_b32_e32 v2, {name_of(identity)}")
            lines.append("global_store_dword v1, v2, s[6:7]")
        else:
            lines.append(f"global_store_dword v1, {name_of(identity)}, s[6:7]")
    return "\n".join(f"    {text}" for text in (*lines, "s_endpgm"))


def reports_of(body):
    source = words(1024, 77)
    # Odd words, so that no shift, mask or product makes a source matter less.
    result = Kernel(body).run(source | np.uint32(0x01010101), np.zeros(64, np.uint32))
    return [report for report in result.reports if report.kind == "undefined"]


def operands(mnemonic, text):
    """Ids of the destination and of the sources; carries and masks count as sources only where they are read."""
    pieces = re.split(r",\s*(?![^\[(]*[\])])", text)
    count = (
        2
        if len(pieces) > 1 and pieces[1].startswith("s[") and mnemonic.endswith(("co_u32", "u64_u32", "i64_i32"))
        else 1
    )
    count = 2 if mnemonic == "v_div_scale_f32" else count
    return registers(pieces[0], 0), registers(", ".join(pieces[count:]), 0)


@pytest.mark.parametrize("mnemonic", [name for name, text in STORED.items() if "a20" not in text] + list(EXCHANGES))
def test_an_unwritten_vector_source_is_reported(mnemonic):
    text = (STORED | EXCHANGES)[mnemonic]
    line = f"{mnemonic} {text}"
    target, sources = operands(mnemonic, text)
    # The old content of a destination that is modified in part is a source as well.
    everything = sources | target
    if mnemonic == "v_div_fmas_f32":
        line = f"s_mov_b64 vcc, 0\n    s_nop 4\n    {line}"
    assert reports_of(body_of(line, everything, target)) == []
    for missing in sorted(sources):
        if mnemonic == "v_pk_mov_b32" and missing in (20, 31):
            # op_sel takes the other dword of either source.
            continue
        found = reports_of(body_of(line, everything - {missing}, target))
        assert found, f"{name_of(missing)} of {line}"
        assert all("global_store_dword" in report.message for report in found)


@pytest.mark.parametrize("mnemonic", SCALARS)
def test_an_unwritten_scalar_source_is_reported(mnemonic):
    line = f"s_cmp_eq_u32 0, 1\n    {mnemonic} {SCALARS[mnemonic]}"
    target, sources = operands(mnemonic, SCALARS[mnemonic])
    everything = sources | target
    assert reports_of(body_of(line, everything, target)) == []
    for missing in sorted(sources):
        if mnemonic in ("s_cselect_b32", "s_cselect_b64") and missing < SCALAR_ID + 30:
            # SCC is 0: the first source is not taken.
            continue
        if mnemonic.startswith("s_cmov"):
            continue
        assert reports_of(body_of(line, everything - {missing}, target)), f"{name_of(missing)} of {line}"


@pytest.mark.parametrize("mnemonic", [*READS, *TRANSPOSED])
def test_lds_that_nobody_wrote_is_reported(mnemonic):
    text = SAMPLES[mnemonic]
    target, _ = operands(mnemonic, text)
    line = f"v_mov_b32_e32 v20, 0\n    {mnemonic} {text}"
    for filled in (False, True):
        zero = (
            "v_mov_b32_e32 v3, 0\n    v_mov_b32_e32 v4, 0\n    v_lshlrev_b32_e32 v5, 3, v0\n    ds_write_b64 v5, v[3:4]"
        )
        kernel = Kernel(
            body_of(f"{zero if filled else 's_nop 0'}\n    s_waitcnt lgkmcnt(0)\n    {line}", set(), target), lds=512
        )
        found = kernel.run(words(1024), np.zeros(64, np.uint32)).reports
        assert bool([report for report in found if report.kind == "undefined"]) != filled, [r.message for r in found]


# -- through masks, SCC and lanes ------------------------------------------------------------------------------------

VECTOR_COMPARES = [name for name in SAMPLES if name.startswith("v_cmp_") and not re.match(r"v_cmp_(f|t|tru)_", name)]


@pytest.mark.parametrize("mnemonic", VECTOR_COMPARES)
def test_an_unwritten_source_of_a_vector_compare_is_reported(mnemonic):
    line = f"{mnemonic} {SAMPLES[mnemonic]}\n    s_nop 4\n    v_cndmask_b32_e64 v10, 0, 1, s[20:21]"
    _, sources = operands(mnemonic, SAMPLES[mnemonic])
    assert reports_of(body_of(line, sources, {10})) == []
    for missing in sorted(sources):
        assert reports_of(body_of(line, sources - {missing}, {10})), f"{name_of(missing)} of {mnemonic}"


@pytest.mark.parametrize("mnemonic", [*COMPARE, *COMPARE_IMMEDIATE])
def test_an_unwritten_source_of_a_scalar_compare_is_reported(mnemonic):
    line = f"{mnemonic} {SAMPLES[mnemonic]}\n    s_cselect_b32 s10, 1, 0"
    sources = registers(SAMPLES[mnemonic], 0)
    stored = {SCALAR_ID + 10}
    assert reports_of(body_of(line, sources, stored)) == []
    for missing in sorted(sources):
        assert reports_of(body_of(line, sources - {missing}, stored)), f"{name_of(missing)} of {mnemonic}"


@pytest.mark.parametrize("mnemonic", SAVEEXEC)
def test_an_unwritten_exec_mask_is_reported(mnemonic):
    line = f"{mnemonic} {SAMPLES[mnemonic]}\n    s_mov_b64 exec, -1"
    sources = {SCALAR_ID + 20, SCALAR_ID + 21}
    assert reports_of(body_of(line, sources, set())) == []
    assert reports_of(body_of(line, sources - {SCALAR_ID + 20}, set()))


@pytest.mark.parametrize("text", ["v_readfirstlane_b32 s10, v20", "v_readlane_b32 s10, v20, 5"])
def test_an_unwritten_lane_is_reported_and_the_others_are_not(text):
    stored = {SCALAR_ID + 10}
    assert reports_of(body_of(text, {20}, stored)) == []
    assert reports_of(body_of(text, set(), stored))
    # Only the lane that is read has been written.
    one = "0x1" if "first" in text else "0x20"
    written = f"s_mov_b64 exec, {one}\n    v_mov_b32_e32 v20, 7\n    s_mov_b64 exec, -1\n    s_nop 4\n    {text}"
    assert reports_of(body_of(written, set(), stored)) == []


def test_an_unwritten_lane_moved_by_dpp_is_reported_where_it_arrives():
    written = "s_mov_b64 exec, 0x1\n    v_mov_b32_e32 v20, 7\n    s_mov_b64 exec, -1\n    s_nop 4\n    "
    move = "v_mov_b32_dpp v10, v20 row_newbcast:{} row_mask:0xf bank_mask:0xf"
    keep = "\n    s_nop 1\n    s_mov_b64 exec, 0xffff"
    assert reports_of(body_of(written + move.format(0) + keep, set(), {10})) == []
    assert reports_of(body_of(written + move.format(1) + keep, set(), {10}))


def test_a_lane_written_alone_is_defined_and_its_neighbours_are_not():
    """Scalars are spilled to single lanes of a register that nobody has written."""
    spill = "v_writelane_b32 v20, s6, 3\n    s_nop 4\n    v_readlane_b32 s10, v20, {}"
    assert reports_of(body_of(spill.format(3), set(), {SCALAR_ID + 10})) == []
    assert reports_of(body_of(spill.format(4), set(), {SCALAR_ID + 10}))
