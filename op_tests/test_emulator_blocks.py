"""A kernel gives the same registers, counts and reports whether its straight pieces run whole or step by step.

A trace makes the emulator go step by step; without one it takes what it can as blocks.
"""

import struct

import numpy as np
import pytest

from aiter_paged_fp8.emulator import Checks, Launch, Machine, Memory, Options, Program, load
from op_tests.emulator_kernels import isa_text
from op_tests.emulator_text import random32, run_text

FEW = 14
CASES = 3
VECTORS = [f"v{10 + k}" for k in range(FEW)]
SCALARS = [f"s{20 + k}" for k in range(4)]

TEMPLATES = (
    *("v_mov_b32_e32 {v}, {x}", "v_add_u32_e32 {v}, {x}, {v}", "v_sub_u32_e32 {v}, {x}, {v}"),
    *("v_lshlrev_b32_e32 {v}, 3, {v}", "v_and_b32_e32 {v}, {x}, {v}", "v_perm_b32 {v}, {v}, {v}, {v}"),
    *("v_lshl_add_u32 {v}, {v}, 2, {v}", "v_bitop3_b32 {v}, {v}, {v}, {v} bitop3:0x96", "v_mul_lo_u32 {v}, {v}, {v}"),
    *("v_add_f32_e32 {v}, {x}, {v}", "v_sub_f32_e32 {v}, 1.0, {v}", "v_mul_f32_e64 {v}, {v}, -{v}"),
    *("v_max_f32_e32 {v}, {x}, {v}", "v_max3_f32 {v}, {v}, |{v}|, {v}", "v_min3_f32 {v}, {v}, {v}, -{x}"),
    *("v_fma_f32 {v}, {v}, {x}, -{v}", "v_fma_f32 {v}, {v}, {v}, {v}", "v_fmac_f32_e32 {v}, {x}, {v}"),
    *("v_exp_f32_e32 {v}, {v}", "v_exp_f32_e64 {v}, -{v}", "v_rcp_f32_e32 {v}, {v}", "v_cvt_f32_i32_e32 {v}, {v}"),
    *(
        "v_cvt_pk_fp8_f32 {v}, {v}, {v}",
        "v_cvt_pk_fp8_f32 {v}, {v}, {v} op_sel:[0,0,1]",
        "v_cvt_pk_bf16_f32 {v}, {v}, {v}",
    ),
    *("v_pk_mul_f32 {p}, {p}, {p}", "v_pk_add_f32 {p}, {p}, {p} op_sel:[1,0] op_sel_hi:[0,1]"),
    *("v_pk_fma_f32 {p}, {p}, {q}, {p} op_sel_hi:[1,0,1]", "v_pk_fma_f32 {p}, {p}, {p}, {p} neg_lo:[0,1,0]"),
    *("v_mov_b64_e32 {p}, {p}", "v_mov_b64_e32 {p}, {q}", "v_pk_mul_f32 {p}, {p}, {p} neg_lo:[1,0] neg_hi:[1,0]"),
    *("v_cmp_gt_f32_e32 vcc, {x}, {v}", "v_cndmask_b32_e32 {v}, {x}, {v}, vcc", "v_cmp_lt_u32_e64 s[30:31], {v}, {v}"),
    *(
        "v_cndmask_b32_e64 {v}, {v}, {v}, s[30:31]",
        "v_permlane32_swap_b32_e64 v10, {w}",
        "s_nop 4",
        "v_not_b32_e32 {v}, {v}",
    ),
    *("v_add_u32_dpp {v}, {v}, {v} row_shr:1 row_mask:0xf bank_mask:0xf", "v_mul_f32_e64 {v}, {v}, {v} clamp"),
    *("s_add_i32 {s}, {s}, {s}", "s_lshl_b32 {s}, {s}, 1", "s_cmp_gt_i32 {s}, {s}", "s_cselect_b32 {s}, {s}, {s}"),
    *("s_and_b64 s[30:31], s[30:31], exec", "v_readfirstlane_b32 {s}, {v}", "s_addc_u32 {s}, {s}, {s}"),
    *("s_mov_b32 {s}, {s}", "v_accvgpr_write_b32 a3, {v}", "v_accvgpr_read_b32 {v}, a3"),
)


def random_body(seed: int, length: int) -> str:
    """Instructions on few registers, in runs of one kind, so that much depends on much."""
    generator = np.random.default_rng(seed)

    def any_of(names: list[str]) -> str:
        return names[generator.integers(len(names))]

    pairs = [f"v[{10 + k}:{11 + k}]" for k in range(FEW - 1)]
    lines = []
    while len(lines) < length:
        template = TEMPLATES[generator.integers(len(TEMPLATES))]
        for _ in range(generator.integers(1, 7)):
            text = template
            for place, names in (
                ("{v}", VECTORS),
                ("{x}", [*VECTORS, *SCALARS, "1.0", "-4"]),
                ("{w}", VECTORS[1:]),
                ("{p}", pairs),
                ("{q}", [*pairs, "s[20:21]", "s[22:23]"]),
                ("{s}", SCALARS),
            ):
                while place in text:
                    text = text.replace(place, any_of(names), 1)
            # One scalar and no literal but inline ones may stand in an instruction; these templates keep to that.
            lines.append(f"    {text}")
    return "\n".join(lines)


def registers(seed: int, ordinary: bool) -> tuple[dict, dict]:
    generator = np.random.default_rng(seed)
    vectors = {}
    for k in range(FEW):
        if ordinary:
            value = generator.standard_normal((CASES, 64)).astype(np.float32).view(np.uint32)
        else:
            value = random32(CASES * 64, seed + 100 * k).reshape(CASES, 64)
        vectors[10 + k] = value
    vectors["a3"] = vectors[10]
    scalars = {20 + k: random32(CASES, seed + k) for k in range(4)}
    scalars |= {30: np.full(CASES, 0x123456789ABCDEF0, np.uint64), "vcc": np.full(CASES, 0xF0F0F0F00FF0FF00, np.uint64)}
    scalars["scc"] = np.arange(CASES).astype(np.uint32) & np.uint32(1)
    return vectors, scalars


@pytest.fixture
def blocks_taken(monkeypatch):
    taken = []
    take = Machine._take

    def noted(self, group, block):
        taken.append(block.end - block.start)
        take(self, group, block)

    monkeypatch.setattr(Machine, "_take", noted)
    return taken


@pytest.mark.parametrize("seed", range(24))
def test_whole_and_step_by_step_agree(seed, blocks_taken):
    body = random_body(seed, 90)
    vectors, scalars = registers(seed, ordinary=bool(seed % 2))
    outputs = [*VECTORS, *SCALARS, "a3", "s30", "s31", "vcc", "scc"]
    # Bodies at random keep no wait states.
    checks = Checks(wait_states=False)
    whole = run_text(body, outputs, vectors=vectors, scalars=scalars, checks=checks)
    assert max(blocks_taken) > 60
    before = len(blocks_taken)
    stepped = run_text(body, outputs, vectors=vectors, scalars=scalars, checks=checks, trace=True)
    assert len(blocks_taken) == before
    for name in outputs:
        np.testing.assert_array_equal(whole[name], stepped[name], name)


def test_alike_instructions_run_together():
    lines = [f"    v_fma_f32 v{k}, v{k}, v50, v{k + 1}" for k in range(10, 20)]
    lines[3:3] = ["    v_exp_f32_e32 v30, v40", "    s_add_i32 s3, s3, 1"]
    lines += ["    v_exp_f32_e32 v31, v41", "    s_endpgm"]
    loaded = load(Program.parse(isa_text("\n".join(lines), 1, 0)))
    (block,) = [loaded.blocks._make(0, len(lines) - 1)]
    # Each sum reads what the next one writes, so that they keep their order; the exponentials do not.
    assert len(block.steps) == 10 + 1 + 1
    independent = "\n".join([f"    v_add_f32_e32 v{k}, v50, v{k}" for k in range(10, 20)] + ["    s_endpgm"])
    loaded = load(Program.parse(isa_text(independent, 1, 0)))
    assert len(loaded.blocks._make(0, 10).steps) == 1


PARTLY = """    v_mov_b32_e32 v20, 1
    v_add_u32_e32 v21, v20, v20
    v_add_u32_e32 v22, v20, v20
    v_add_u32_e32 v23, v30, v20
    v_add_u32_e32 v24, v23, v20
    v_add_u32_e32 v25, v20, v20
    v_add_u32_e32 v26, v20, v20
    v_add_u32_e32 v27, v20, v20
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v40, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v41, v40, s[4:5]
    v_add_u32_e32 v28, v20, v20
    v_add_u32_e32 v29, v20, v28
    v_add_u32_e32 v31, v41, v28
    v_add_u32_e32 v32, v31, v28
    v_add_u32_e32 v33, v31, v28
    v_add_u32_e32 v34, v31, v28
    global_store_dword v40, v24, s[4:5]
    global_store_dword v40, v31, s[4:5]
    s_endpgm
"""


@pytest.mark.parametrize("schedule", ["lockstep", "skewed", "seeded"])
def test_reports_and_counts_agree_where_registers_are_undefined_or_on_their_way(schedule, blocks_taken):
    loaded = load(Program.parse(isa_text(PARTLY, 1, 0)))
    results = []
    buffer = np.zeros(512, np.uint32)
    for trace in (False, True):
        buffer[:] = np.arange(512)
        memory = Memory()
        memory.register_array("buffer", buffer)
        launch = Launch(loaded, (2, 1, 1), (128, 1, 1), struct.pack("<Q", buffer.ctypes.data))
        results.append((Machine(launch, memory, Options(trace=trace, schedule=schedule, seed=5)).run(), buffer.copy()))
        assert trace or blocks_taken or schedule == "seeded"
    (whole, first), (stepped, second) = results
    assert [report.message for report in whole.reports] == [report.message for report in stepped.reports]
    assert {report.kind for report in whole.reports} >= {"undefined", "in-flight"}
    assert [report.count for report in whole.reports] == [report.count for report in stepped.reports]
    assert whole.counts == stepped.counts
    np.testing.assert_array_equal(first, second)
