"""Branches, barriers, waits and hints, executed from ISA text; what is not implemented is refused at load time."""

import numpy as np
import pytest

from aiter_paged_fp8.emulator import Checks, MachineFault, Program, UnimplementedInstruction, load
from op_tests.emulator_kernels import Kernel, isa_text, words
from op_tests.emulator_text import LANES, M64, PREFILL, run_text

BRANCHES = {
    "s_cbranch_scc0": lambda scc, vcc, execs: scc == 0,
    "s_cbranch_scc1": lambda scc, vcc, execs: scc == 1,
    "s_cbranch_vccz": lambda scc, vcc, execs: vcc == 0,
    "s_cbranch_vccnz": lambda scc, vcc, execs: vcc != 0,
    "s_cbranch_execz": lambda scc, vcc, execs: execs == 0,
    "s_cbranch_execnz": lambda scc, vcc, execs: execs != 0,
    "s_branch": lambda scc, vcc, execs: True,
}
HINTS = {
    "s_nop": "s_nop 5",
    "s_sleep": "s_sleep 2",
    "s_setprio": "s_setprio 3",
    "s_sethalt": "s_sethalt 0",
    "s_inst_prefetch": "s_inst_prefetch 1",
    "s_dcache_wb": "s_dcache_wb",
    "s_icache_inv": "s_icache_inv",
    "s_dcache_inv": "s_dcache_inv",
    "s_ttracedata": "s_ttracedata",
    "s_incperflevel": "s_incperflevel 1",
    "s_decperflevel": "s_decperflevel 1",
    "s_wakeup": "s_wakeup",
    "buffer_wbl2": "buffer_wbl2 sc1",
    "buffer_inv": "buffer_inv sc0 sc1",
}
SYNCHRONISATION = ("s_barrier", "s_waitcnt", "s_endpgm")
ROWS = (*BRANCHES, *HINTS, *SYNCHRONISATION)


@pytest.mark.parametrize("mnemonic", BRANCHES)
def test_branches_of_workgroups_that_part_and_meet(mnemonic):
    generator = np.random.default_rng(1)
    scc = np.array([0, 1] * 8, np.uint32)
    masks = generator.choice(np.array([0, 1, 1 << 63, M64, 1 << 32], np.uint64), (2, 16))
    masks[:, :4] = 0
    got = run_text(
        f"    {mnemonic} .Ltaken\n    s_bitset1_b32 s30, 0\n    s_branch .Ldone\n.Ltaken:\n    s_bitset1_b32 s30, 1\n"
        ".Ldone:\n"
        "    s_mov_b32 s31, 3",
        ["s30", "s31"],
        scalars={30: np.zeros(16, np.uint32), "scc": scc, "vcc": masks[0], "exec": masks[1]},
    )
    want = [2 if BRANCHES[mnemonic](int(c), int(v), int(e)) else 1 for c, v, e in zip(scc, *masks, strict=True)]
    assert got["s30"].tolist() == want
    assert (got["s31"] == 3).all()


def test_a_loop_runs_as_often_as_each_workgroup_asks():
    counts = np.array([1, 2, 5, 5, 33, 1, 17], np.uint32)
    got = run_text(
        "    s_mov_b32 s30, 0\n    v_mov_b32_e32 v30, 0\n.Lloop:\n    s_add_i32 s30, s30, 1\n"
        "    v_add_u32_e32 v30, s30, v30\n    s_cmp_lt_u32 s30, s20\n    s_cbranch_scc1 .Lloop",
        ["s30", "v30"],
        scalars={20: counts},
    )
    assert got["s30"].tolist() == counts.tolist()
    assert (got["v30"] == (counts * (counts + 1) // 2)[:, None]).all()


def test_local_labels_go_forward_and_backward():
    got = run_text(
        "    s_mov_b32 s30, 0\n1:\n    s_add_i32 s30, s30, 1\n    s_cmp_lt_u32 s30, 4\n    s_cbranch_scc1 1b\n"
        "    s_branch 1f\n    s_mov_b32 s30, 99\n1:\n    s_add_i32 s30, s30, 10",
        ["s30"],
    )
    assert got["s30"] == 14


@pytest.mark.parametrize("schedule", ["lockstep", "skewed", "skewed-reverse", "seeded"])
def test_a_loop_over_lanes_in_a_divergent_wave(schedule):
    # Each lane counts to its own bound; lanes leave one by one.
    bounds = (np.arange(LANES, dtype=np.uint32) * 7 % 13)[None]
    got = run_text(
        "    v_mov_b32_e32 v30, 0\n    s_mov_b64 s[20:21], exec\n.Lloop:\n    v_cmp_lt_u32_e32 vcc, v30, v10\n"
        "    s_and_b64 exec, exec, vcc\n    s_cbranch_execz .Ldone\n    v_add_u32_e32 v30, 1, v30\n"
        "    s_branch .Lloop\n"
        ".Ldone:\n    s_mov_b64 exec, s[20:21]",
        ["v30"],
        vectors={10: bounds},
        schedule=schedule,
    )
    np.testing.assert_array_equal(got["v30"], bounds)


@pytest.mark.parametrize("mnemonic", HINTS)
def test_hints_change_nothing(mnemonic):
    values = words(LANES).reshape(1, LANES)
    got = run_text(
        f"    {HINTS[mnemonic]}",
        ["v10", "v30", "s30", "scc", "vcc", "exec"],
        vectors={10: values},
        scalars={"scc": np.array([1]), "vcc": np.array([7], np.uint64), "exec": np.array([M64 - 5], np.uint64)},
    )
    np.testing.assert_array_equal(got["v10"], values)
    assert (got["v30"] == PREFILL).all()
    assert (got["s30"], got["scc"], got["vcc"], got["exec"]) == (PREFILL, 1, 7, M64 - 5)


def test_a_halt_is_not_passed_over():
    with pytest.raises((UnimplementedInstruction, MachineFault)):
        run_text("    s_sethalt 1", ["s30"])


# -- waits: which loads have come back, memory as late as it may be ----------------------------------------------------

ADDRESS = "    v_lshlrev_b32_e32 v9, 2, v0\n"
ZEROS = "".join(f"    v_mov_b32_e32 v{30 + k}, 0\n" for k in range(4))
LOADS = "".join(f"    global_load_dword v{30 + k}, v9, s[64:65] offset:{256 * k}\n" for k in range(4))


@pytest.mark.parametrize(
    ("wait", "left"),
    [
        ("vmcnt(0)", 0),
        ("vmcnt(1)", 1),
        ("vmcnt(3) lgkmcnt(0)", 3),
        ("vmcnt(2) & lgkmcnt(1)", 2),
        ("vmcnt(0) expcnt(0) lgkmcnt(0)", 0),
        ("lgkmcnt(0)", 4),
        ("0", 0),
        ("0xf71", 1),
        ("0x3f70", 0),
        ("0xcf7f", 4),
        ("0x4f70", 4),
    ],
)
def test_a_wait_lets_the_oldest_loads_through(wait, left):
    memory = words(256).view(np.uint8).copy()
    copies = "\n".join(f"    v_mov_b32_e32 v{40 + k}, v{30 + k}" for k in range(4))
    got = run_text(
        f"{ADDRESS}{ZEROS}    s_nop 1\n{LOADS}    s_waitcnt {wait}\n{copies}",
        [f"v{40 + k}" for k in range(4)],
        buffers=[memory],
        checks=Checks.none(),
    )
    for k in range(4):
        want = memory.view(np.uint32)[LANES * k : LANES * (k + 1)] if k < 4 - left else 0
        np.testing.assert_array_equal(got[f"v{40 + k}"][0], np.broadcast_to(want, LANES))


def test_lds_operations_return_in_order_and_scalar_loads_only_all_together():
    body = (
        f"{ADDRESS}    v_mov_b32_e32 v30, 0\n    v_mov_b32_e32 v31, 0\n    s_mov_b32 s30, 0\n    ds_write_b32 v9, v0\n"
        "    s_waitcnt lgkmcnt(0)\n    ds_read_b32 v30, v9\n    ds_read_b32 v31, v9\n    s_waitcnt lgkmcnt(1)\n"
        "    v_mov_b32_e32 v40, v30\n    v_mov_b32_e32 v41, v31\n    s_waitcnt lgkmcnt(0)\n"
        "    s_load_dword s30, s[64:65], 0x4\n    ds_read_b32 v32, v9\n    s_waitcnt lgkmcnt(1)\n"
        "    s_mov_b32 s31, s30\n"
        "    s_waitcnt lgkmcnt(0)\n    s_mov_b32 s32, s30"
    )
    memory = words(4, start=5).view(np.uint8).copy()
    got = run_text(body, ["v40", "v41", "s31", "s32"], buffers=[memory], lds=256, checks=Checks.none())
    assert (got["v40"][0].tolist(), (got["v41"] == 0).all()) == (list(range(LANES)), True)
    assert (got["s31"], got["s32"]) == (0, memory.view(np.uint32)[1])


# -- barriers ----------------------------------------------------------------------------------------------------------

# Each wave leaves its number in LDS, waits for the others, and stores the sum of all.
RENDEZVOUS = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshrrev_b32_e32 v1, 6, v0
    v_and_b32_e32 v2, 63, v0
    v_lshlrev_b32_e32 v3, 2, v1
    v_readfirstlane_b32 s6, v1
    v_add_u32_e32 v4, 1, v1
    {early}
    v_cmp_eq_u32_e32 vcc, 0, v2
    s_and_saveexec_b64 s[8:9], vcc
    ds_write_b32 v3, v4
    s_mov_b64 exec, s[8:9]
    s_waitcnt lgkmcnt(0)
    s_barrier
    v_lshlrev_b32_e32 v5, 2, v2
    v_mov_b32_e32 v6, 0
    v_cmp_gt_u32_e32 vcc, {waves}, v2
    s_and_saveexec_b64 s[8:9], vcc
    ds_read_b32 v6, v5
    s_mov_b64 exec, s[8:9]
    s_waitcnt lgkmcnt(0)
    v_lshlrev_b32_e32 v7, 2, v0
    v_mov_b32_e32 v8, s2
    v_mul_u32_u24_e32 v8, {bytes}, v8
    v_add_u32_e32 v7, v7, v8
    global_store_dword v7, v6, s[4:5]
.Lend:
    s_endpgm
"""


@pytest.mark.parametrize("schedule", ["lockstep", "skewed", "skewed-reverse", "seeded"])
def test_no_wave_passes_a_barrier_before_all_have_come(schedule):
    kernel = Kernel(RENDEZVOUS.format(early="", waves=5, bytes=320 * 4), lds=64, block=320, grid=3)
    target = np.zeros((3, 5, LANES), np.uint32)
    assert kernel.run(target, schedule=schedule).reports == []
    assert (target[:, :, :5] == np.arange(1, 6)).all()
    assert not target[:, :, 5:].any()


@pytest.mark.parametrize("schedule", ["lockstep", "skewed", "skewed-reverse", "seeded"])
def test_ended_waves_no_longer_count_at_a_barrier(schedule):
    early = "s_cmp_eq_u32 s6, 4\n    s_cbranch_scc1 .Lend"
    kernel = Kernel(RENDEZVOUS.format(early=early, waves=4, bytes=320 * 4), lds=64, block=320, grid=3)
    target = np.zeros((3, 5, LANES), np.uint32)
    assert kernel.run(target, schedule=schedule).reports == []
    assert (target[:, :4, :4] == np.arange(1, 5)).all()
    assert not target[:, 4].any()


def test_an_endless_kernel_is_stopped():
    kernel = Kernel("    s_nop 0\n.Lloop:\n    s_branch .Lloop\n    s_endpgm")
    with pytest.raises(MachineFault, match="max_instructions"):
        kernel.run(max_instructions=1000)


# -- what is not implemented -------------------------------------------------------------------------------------------


def refused(*lines):
    with pytest.raises(UnimplementedInstruction) as error:
        load(Program.parse(isa_text("\n".join(f"    {line}" for line in (*lines, "s_endpgm")), 0)))
    return str(error.value)


def test_every_instruction_that_is_not_implemented_is_named_before_anything_runs():
    message = refused("s_nop 0", "v_no_such_thing v1, v2", "s_nop 0", "image_sample v1, v2, s[0:7]")
    assert "v_no_such_thing v1, v2" in message
    assert "image_sample" in message
    first = isa_text("", 0).split("kernel:")[0].count("\n") + 2
    assert f"line {first + 1}" in message
    assert f"line {first + 3}" in message


@pytest.mark.parametrize(
    "line",
    [
        "v_add_u32_e32 v1, v2, v3 no_such_modifier",
        "buffer_load_dword v1, v2, s[4:7], 0 offen no_such_modifier",
        "v_add_u32_e32 v1, v2",
        "s_load_dwordx4 s[4:5], s[0:1], 0x0",
        "v_mfma_f32_16x16x32_fp8_fp8 v[0:1], v[2:3], v[4:5], 0",
        "s_getreg_b32 s4, hwreg(HW_REG_HW_ID)",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 1",
        "v_pk_add_f32 v[0:1], v[2:3], v[4:5] clamp",
        "buffer_load_dwordx2 v2, s[4:7], 0 offen lds",
    ],
)
def test_operands_and_modifiers_that_are_not_implemented_are_refused(line):
    assert line in refused(line)


def test_a_text_without_an_end_is_refused():
    with pytest.raises(UnimplementedInstruction, match="without s_endpgm"):
        load(Program.parse(isa_text("    s_nop 0", 0)))
