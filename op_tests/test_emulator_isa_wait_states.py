"""Wait states that a program must insert: the manual's tables 11 and 38, as pairs of instructions and a number."""

import pytest

from aiter_paged_fp8.emulator import Program, load
from op_tests.emulator_kernels import isa_text

# First instruction, second instruction, states between them.
PAIRS = {
    "register moved by DPP": ("v_mov_b32_e32 v8, v0", "v_mov_b32_dpp v9, v8 row_shr:1 row_mask:0xf bank_mask:0xf", 2),
    "DPP reads another register": (
        "v_mov_b32_e32 v7, v0",
        "v_add_u32_dpp v9, v8, v7 row_shr:1 row_mask:0xf bank_mask:0xf",
        0,
    ),
    "EXEC before DPP": (
        "v_cmpx_lt_u32_e64 s[4:5], v0, v1",
        "v_mov_b32_dpp v9, v8 row_shr:1 row_mask:0xf bank_mask:0xf",
        5,
    ),
    "M0 before a buffer load to LDS": ("s_mov_b32 m0, 0", "buffer_load_dword v3, s[8:11], 0 offen lds", 1),
    "M0 before a global load to LDS": ("s_mov_b32 m0, 0", "global_load_lds_dwordx4 v3, s[8:9]", 1),
    "mask used as a constant": ("v_cmp_lt_u32_e64 s[4:5], v0, v1", "v_add_u32_e32 v2, s4, v1", 2),
    "mask used as a mask": ("v_cmp_lt_u32_e64 s[4:5], v0, v1", "v_cndmask_b32_e64 v2, v0, v1, s[4:5]", 0),
    "carry used as a carry": ("v_add_co_u32_e32 v2, vcc, v0, v1", "v_addc_co_u32_e32 v3, vcc, v0, v1, vcc", 0),
    "lane value used as a constant": ("v_readfirstlane_b32 s4, v0", "v_mul_lo_u32 v2, s4, v1", 2),
    "lane value selects a lane": ("v_readfirstlane_b32 s4, v0", "v_readlane_b32 s5, v1, s4", 4),
    "lane value selects where to write": ("v_readfirstlane_b32 s4, v0", "v_writelane_b32 v1, s6, s4", 4),
    "lane value used by the scalar unit": ("v_readfirstlane_b32 s4, v0", "s_add_i32 s5, s4, 1", 0),
    "lane value in an address": ("v_readfirstlane_b32 s4, v0", "global_load_dword v2, v1, s[4:5]", 5),
    "lane value in a resource": ("v_readfirstlane_b32 s10, v0", "buffer_load_dword v2, v1, s[8:11], 0 offen", 5),
    "EXEC before a lane is read": ("v_cmpx_lt_u32_e64 s[4:5], v0, v1", "v_readfirstlane_b32 s6, v2", 4),
    "EXEC before permlane": ("v_cmpx_lt_u32_e64 s[4:5], v0, v1", "v_permlane32_swap_b32_e32 v2, v3", 4),
    "EXEC before another instruction": ("v_cmpx_lt_u32_e64 s[4:5], v0, v1", "v_mov_b32_e32 v2, v3", 0),
    "EXEC before a product": (
        *("v_cmpx_lt_u32_e64 s[4:5], v0, v1", "v_mfma_f32_16x16x32_fp8_fp8 v[12:15], v[8:9], v[10:11], 0", 4),
    ),
    "register before readlane": ("v_mov_b32_e32 v8, v0", "v_readlane_b32 s4, v8, 3", 1),
    "register before readfirstlane": ("v_mov_b32_e32 v8, v0", "v_readfirstlane_b32 s4, v8", 1),
    "register before permlane": ("v_mov_b32_e32 v8, v0", "v_permlane16_swap_b32_e32 v8, v9", 2),
    "exponential": ("v_exp_f32_e32 v8, v0", "v_mul_f32_e32 v9, v8, v8", 1),
    "exponential before another one": ("v_exp_f32_e32 v8, v0", "v_rcp_f32_e32 v9, v8", 0),
    "half written by op_sel": ("v_cvt_pk_fp8_f32 v8, v0, v1 op_sel:[0,0,1]", "v_mov_b32_e32 v9, v8", 1),
    "low half written": ("v_cvt_pk_fp8_f32 v8, v0, v1", "v_mov_b32_e32 v9, v8", 0),
    "byte written by SDWA": (
        *("v_mov_b32_sdwa v8, v0 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD", "v_mov_b32_e32 v9, v8", 1),
    ),
    "VCC before v_div_fmas": ("v_div_scale_f32 v2, vcc, v0, v1, v0", "v_div_fmas_f32 v3, v2, v1, v0", 4),
    "register before a product": (
        "v_mov_b32_e32 v8, v0",
        "v_mfma_f32_16x16x32_fp8_fp8 v[12:15], v[8:9], v[10:11], 0",
        2,
    ),
}
# Passes of 4 clocks: name, C and D registers, A, B registers.
PRODUCTS = {
    2: ("v_mfma_f32_4x4x4_16b_f16", 4, 2),
    4: ("v_mfma_f32_16x16x32_fp8_fp8", 4, 2),
    8: ("v_mfma_f32_32x32x16_bf16", 16, 4),
    16: ("v_mfma_f32_32x32x64_f8f6f4", 16, 8),
}
SINGLE = {
    2: ("v_mfma_f32_4x4x1_16b_f32", 4, 1),
    8: ("v_mfma_f32_16x16x4_f32", 4, 1),
    16: ("v_mfma_f32_32x32x2_f32", 16, 1),
}
AFTER = {2: 5, 4: 8, 8: 12, 16: 20}
BEFORE_OVERLAP = {2: 4, 4: 6, 8: 10, 16: 18}
AFTER_SINGLE = {2: 4, 4: 6, 8: 10, 16: 18}
BEFORE_WRITE = {2: 1, 4: 3, 8: 7, 16: 15}


def block(first, count):
    return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"


def product(entry, d=20, a=50, c=None):
    name, result, count = entry
    source = "0" if c is None else block(c, result)
    return f"{name} {block(d, result)}, {block(a, count)}, {block(60, count)}, {source}"


def wait_states(first, second, states):
    between, left = [], states
    while left:
        step = min(left, 8)
        between.append(f"s_nop {step - 1}")
        left -= step
    body = "\n".join(f"    {line}" for line in (first, *between, second, "s_endpgm"))
    text = isa_text(body, 1)
    lines = text.splitlines()
    numbers = {lines.index(f"    {line}") + 1 for line in (first, second)}
    reports = load(Program.parse(text)).wait_states()
    for report in reports:
        assert report.kind == "wait-states"
        assert {report.line, report.other_line} == numbers
    return [report.message for report in reports]


def needs(first, second, states):
    assert wait_states(first, second, states) == []
    assert wait_states(first, second, max(states, 1)) == []
    if states:
        (message,) = wait_states(first, second, states - 1)
        assert f"needs {states} wait states" in message
        assert wait_states(first, second, 0)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    needs(*PAIRS[name])


@pytest.mark.parametrize("passes", PRODUCTS)
def test_results_of_products(passes):
    first = product(PRODUCTS[passes])
    for second in (
        "v_mov_b32_e32 v2, v21",
        "v_mov_b32_e32 v21, v2",
        "global_store_dword v2, v21, s[4:5]",
        "ds_write_b32 v2, v21",
        product(PRODUCTS[passes], d=80, a=20),
    ):
        needs(first, second, AFTER[passes])


@pytest.mark.parametrize("passes", PRODUCTS)
def test_products_that_accumulate(passes):
    entry = PRODUCTS[passes]
    same = product(entry, d=20, c=20)
    # The very same registers are forwarded by hardware.
    assert wait_states(product(entry), same, 0) == []
    needs(product(entry), product(entry, d=80, c=22), BEFORE_OVERLAP[passes])


@pytest.mark.parametrize("passes", SINGLE)
def test_results_of_single_precision_products(passes):
    needs(product(SINGLE[passes]), "v_mov_b32_e32 v2, v21", AFTER_SINGLE[passes])


@pytest.mark.parametrize("passes", PRODUCTS)
def test_an_addend_is_not_overwritten_while_it_is_read(passes):
    needs(product(PRODUCTS[passes], d=20, c=80), "v_mov_b32_e32 v81, v2", BEFORE_WRITE[passes])


def test_formats_of_four_and_six_bits_take_half_as_long():
    first = "v_mfma_f32_32x32x64_f8f6f4 v[20:35], v[50:53], v[60:63], 0 cbsz:4 blgp:4"
    needs(first, "v_mov_b32_e32 v2, v21", AFTER[8])
    first = "v_mfma_f32_16x16x128_f8f6f4 v[20:23], v[50:55], v[60:63], 0 cbsz:2 blgp:4"
    needs(first, "v_mov_b32_e32 v2, v21", AFTER[4])
    first = "v_mfma_f32_16x16x128_f8f6f4 v[20:23], v[50:57], v[60:63], 0 blgp:4"
    needs(first, "v_mov_b32_e32 v2, v21", AFTER[8])


def test_other_instructions_count_as_wait_states_and_branches_are_followed():
    body = """
    s_cmp_eq_u32 s4, 0
    v_exp_f32_e32 v8, v0
    s_cbranch_scc1 .Lnear
    s_nop 0
.Lnear:
    v_mov_b32_e32 v9, v8
    v_mov_b32_e32 v10, v0
    s_branch .Lfar
    s_nop 7
.Lfar:
    v_mov_b32_dpp v11, v10 row_shr:1 row_mask:0xf bank_mask:0xf
    s_endpgm
    """
    messages = [report.message for report in load(Program.parse(isa_text(body, 1))).wait_states()]
    assert len(messages) == 1
    assert "v_mov_b32_dpp" in messages[0]
    assert "has 1 after" in messages[0]
