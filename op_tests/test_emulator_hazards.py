"""Planted faults: each mutation of a right kernel is reported with both lines.

The kernel itself reports nothing, and with the check switched off the mutation goes unseen.
"""

import numpy as np
import pytest

from aiter_paged_fp8.emulator import Checks, HazardError, MemoryFault
from op_tests.emulator_kernels import Kernel, words

# Each of 4 waves loads 4 bytes per lane to LDS by DMA, then reads what its right neighbour has loaded and stores it.
# s4..s7 input, s8..s11 output; the second half of the kernel repeats it with a second buffer.
DMA_COPY = Kernel(
    """
    s_load_dwordx4 s[12:15], s[0:1], 0x0
    v_lshrrev_b32_e32 v1, 6, v0
    v_and_b32_e32 v2, 63, v0
    v_readfirstlane_b32 s16, v1
    s_waitcnt lgkmcnt(0)
    s_mov_b32 s4, s12
    s_and_b32 s5, s13, 0xffff
    s_movk_i32 s6, 0x800
    s_mov_b32 s7, 0x20000
    s_mov_b32 s8, s14
    s_and_b32 s9, s15, 0xffff
    s_movk_i32 s10, 0x800
    s_mov_b32 s11, 0x20000
    v_lshlrev_b32_e32 v3, 2, v0
    s_lshl_b32 s17, s16, 8
    s_mov_b32 m0, s17
    s_nop 0
    buffer_load_dword v3, s[4:7], 0 offen lds
    s_add_i32 s18, s16, 1
    s_and_b32 s18, s18, 3
    s_lshl_b32 s18, s18, 8
    v_lshlrev_b32_e32 v4, 2, v2
    v_add_u32_e32 v5, s18, v4
    s_waitcnt vmcnt(0)
    s_barrier ; first
    ds_read_b32 v6, v5
    s_waitcnt lgkmcnt(0) ; read
    s_barrier ; second
    s_mov_b32 m0, s17
    v_mov_b32_e32 v7, 0
    buffer_load_dword v3, s[4:7], 0 offen offset:1024 lds
    buffer_store_dword v6, v3, s[8:11], 0 offen
    s_waitcnt vmcnt(0) ; last
    s_barrier ; third
    ds_read_b32 v6, v5 offset:1024
    s_waitcnt lgkmcnt(0)
    buffer_store_dword v6, v3, s[8:11], 0 offen offset:1024
    s_endpgm
    """,
    lds=2048,
    block=256,
)
SCHEDULES = ("lockstep", "skewed", "skewed-reverse")


def copy_inputs():
    return words(512), np.zeros(512, np.uint32)


def expected(source):
    return np.roll(source.reshape(2, 4, 64), -1, axis=1).reshape(-1)


def findings(kernel, kind, **options):
    """Reports of one kind over the three wave orders."""
    found = []
    for schedule in SCHEDULES:
        try:
            found += kernel.run(*copy_inputs(), schedule=schedule, **options).reports
        except MemoryFault as fault:
            found += fault.reports
    return [report for report in found if report.kind == kind]


@pytest.mark.parametrize("memory", ["latest", "earliest", "seeded"])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "seeded"])
def test_the_unmutated_kernel_is_right_and_reports_nothing(memory, schedule):
    for seed in range(4):
        source, target = copy_inputs()
        result = DMA_COPY.run(source, target, memory=memory, schedule=schedule, seed=seed)
        assert result.reports == []
        np.testing.assert_array_equal(target, expected(source))


# name, what is replaced, by what, kind of the report, pieces of text of the two lines
MUTATIONS = {
    "barrier before the read dropped": ("s_barrier ; first", "s_nop 0", "race", "ds_read_b32 v6, v5\n", "offen lds\n"),
    "wait before the barrier dropped": (
        "s_waitcnt vmcnt(0)\n    s_barrier ; first",
        "s_barrier",
        "race",
        "ds_read_b32 v6, v5\n",
        "offen lds\n",
    ),
    "wait moved behind the barrier": (
        "s_waitcnt vmcnt(0)\n    s_barrier ; first",
        "s_barrier\n    s_waitcnt vmcnt(0)",
        "race",
        "ds_read_b32 v6, v5\n",
        "offen lds\n",
    ),
    "last wait weakened": (
        "s_waitcnt vmcnt(0) ; last",
        "s_waitcnt vmcnt(2)",
        "race",
        "ds_read_b32 v6, v5 offset:1024",
        "offset:1024 lds",
    ),
    "second buffer laid over the first": (
        "s_barrier ; second\n    s_mov_b32 m0, s17\n    v_mov_b32_e32 v7, 0\n    buffer_load_dword v3, s[4:7], 0 offen "
        "offset:1024 lds",
        "s_mov_b32 m0, s17\n    v_mov_b32_e32 v7, 0\n    buffer_load_dword v3, s[4:7], 0 offen lds ; over",
        "race",
        "offen lds ; over",
        "ds_read_b32 v6, v5\n",
    ),
    "result used without its wait": (
        "s_waitcnt lgkmcnt(0) ; read\n    s_barrier ; second",
        "v_add_u32_e32 v6, 0, v6\n    s_waitcnt lgkmcnt(0)\n    s_barrier",
        "in-flight",
        "v_add_u32_e32 v6, 0, v6",
        "ds_read_b32 v6, v5\n",
    ),
    "register overwritten while its load is on the way": (
        "s_waitcnt lgkmcnt(0) ; read\n    s_barrier ; second",
        "v_mov_b32_e32 v6, 0\n    s_waitcnt lgkmcnt(0)\n    s_barrier",
        "in-flight",
        "v_mov_b32_e32 v6, 0",
        "ds_read_b32 v6, v5\n",
    ),
    "scalar load used without its wait": (
        "v_readfirstlane_b32 s16, v1\n    s_waitcnt lgkmcnt(0)",
        "v_readfirstlane_b32 s16, v1",
        "in-flight",
        "s_mov_b32 s4, s12",
        "s_load_dwordx4",
    ),
    "partial wait for a scalar load": (
        "v_readfirstlane_b32 s16, v1\n    s_waitcnt lgkmcnt(0)",
        "v_readfirstlane_b32 s16, v1\n    s_load_dword s19, s[0:1], 0x8\n    s_waitcnt lgkmcnt(1)",
        "in-flight",
        "s_mov_b32 s4, s12",
        "s_load_dwordx4",
    ),
    "wrong M0": ("s_mov_b32 m0, s17", "s_mov_b32 m0, 0", "race", "offen lds\n", "offen lds\n"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_is_reported_with_its_two_lines(name):
    old, new, kind, line, other = MUTATIONS[name]
    kernel = DMA_COPY.mutated(old, new)
    lines = {(report.line, report.other_line) for report in findings(kernel, kind)}
    pair = (kernel.line_of(line), kernel.line_of(other))
    assert pair in lines or pair[::-1] in lines, lines
    assert any(str(pair[0]) in report.message and str(pair[1]) in report.message for report in findings(kernel, kind))
    off = Checks(in_flight=False, races=False)
    assert findings(kernel, kind, checks=off) == []


def test_a_planted_fault_ends_the_launch_when_asked_to():
    kernel = DMA_COPY.mutated("s_barrier ; first", "s_nop 0")
    with pytest.raises(HazardError, match="race"):
        kernel.run(*copy_inputs(), on_report="raise")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_dropped_wait_shows_in_the_result_when_memory_is_late(schedule):
    kernel = DMA_COPY.mutated("s_waitcnt lgkmcnt(0) ; read", "s_nop 0").mutated(
        "s_waitcnt vmcnt(0) ; last", "s_waitcnt vmcnt(0)"
    )
    source, target = copy_inputs()
    kernel.run(source, target, schedule=schedule, checks=Checks.none())
    assert not np.array_equal(target, expected(source))
    source, target = copy_inputs()
    kernel.run(source, target, schedule=schedule, memory="earliest", checks=Checks.none())
    np.testing.assert_array_equal(target, expected(source))


def test_a_dma_past_the_lds_is_a_fault():
    kernel = DMA_COPY.mutated("s_lshl_b32 s17, s16, 8", "s_lshl_b32 s17, s16, 10")
    with pytest.raises(MemoryFault, match="of LDS at 0x") as fault:
        kernel.run(*copy_inputs())
    assert fault.value.details["line"] == kernel.line_of("offen lds")
    assert fault.value.details["wave"] == 2


# Each lane stores the sum of a register that nobody wrote in lanes 32 and up.
UNDEFINED = Kernel(
    """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    v_cmp_gt_u32_e32 vcc, 32, v0
    s_and_saveexec_b64 s[6:7], vcc
    v_mov_b32_e32 v2, 7
    s_mov_b64 exec, s[6:7]
    v_add_u32_e32 v3, 1, v2
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v3, s[4:5]
    s_endpgm
    """
)


def test_undefined_lanes_that_are_stored_are_reported():
    target = np.zeros(64, np.uint32)
    (report,) = UNDEFINED.run(target).reports
    assert report.kind == "undefined"
    assert report.line == UNDEFINED.line_of("global_store_dword")
    assert report.other_line == UNDEFINED.line_of("v_add_u32_e32 v3")
    assert UNDEFINED.run(target, checks=Checks(undefined=False)).reports == []


def test_undefined_lanes_that_are_replaced_are_not_reported():
    kernel = UNDEFINED.mutated(
        "v_add_u32_e32 v3, 1, v2",
        "v_cndmask_b32_e32 v3, 0, v2, vcc\n    v_and_b32_e32 v4, 0, v2\n    v_or_b32_e32 v3, v3, v4",
    )
    target = np.zeros(64, np.uint32)
    assert kernel.run(target).reports == []
    np.testing.assert_array_equal(target, np.where(np.arange(64) < 32, 7, 0))


def test_a_half_that_is_replaced_is_not_reported():
    kernel = UNDEFINED.mutated(
        "v_add_u32_e32 v3, 1, v2",
        "v_mov_b32_e32 v4, 1.0\n    v_cvt_pk_fp8_f32 v3, v4, v4\n    v_cvt_pk_fp8_f32 v3, v4, v4 op_sel:[0,0,1]",
    )
    target = np.zeros(64, np.uint32)
    assert kernel.run(target).reports == []
    assert (target == 0x38383838).all()


def test_an_undefined_accumulator_is_reported():
    kernel = UNDEFINED.mutated(
        "v_add_u32_e32 v3, 1, v2",
        "v_mov_b32_e32 v8, 0\n    v_mov_b32_e32 v9, 0\n    s_nop 1\n"
        "    v_mfma_f32_16x16x32_fp8_fp8 v[12:15], v[8:9], v[8:9], v[12:15]\n    s_nop 15\n    v_mov_b32_e32 v3, v13",
    )
    (report,) = kernel.run(np.zeros(64, np.uint32)).reports
    assert report.kind == "undefined"
    assert report.other_line == kernel.line_of("v_mfma_f32")


def test_lds_that_nobody_wrote_is_reported_where_it_is_stored():
    kernel = UNDEFINED.mutated("v_add_u32_e32 v3, 1, v2", "ds_read_b32 v3, v1\n    s_waitcnt lgkmcnt(0)")
    kernel.lds = 256
    (report,) = kernel.run(np.zeros(64, np.uint32)).reports
    assert (report.kind, report.other_line) == ("undefined", kernel.line_of("ds_read_b32"))


def test_an_undefined_branch_condition_is_reported():
    kernel = UNDEFINED.mutated(
        "v_add_u32_e32 v3, 1, v2", "v_mov_b32_e32 v3, 0\n    s_cbranch_scc1 .LA\n.LA:\n    s_nop 0"
    )
    result = kernel.mutated("s_and_saveexec_b64 s[6:7], vcc", "s_mov_b64 s[6:7], exec").run(np.zeros(64, np.uint32))
    assert [report.kind for report in result.reports] == ["undefined"]
    assert "branches on scc" in result.reports[0].message


def test_bytes_written_by_two_workgroups_are_reported():
    kernel = Kernel(UNDEFINED.body.replace("v_add_u32_e32 v3, 1, v2", "v_mov_b32_e32 v3, 1"), grid=3)
    (report,) = kernel.run(np.zeros(64, np.uint32)).reports
    assert report.kind == "global-race"
    assert report.line == report.other_line == kernel.line_of("global_store_dword")
    assert kernel.run(np.zeros(64, np.uint32), checks=Checks(global_races=False)).reports == []
    for waves in (1, 2):
        assert [r.kind for r in kernel.run(np.zeros(64, np.uint32), max_waves=waves).reports] == ["global-race"]


WAIT_STATES = {
    "matrix result read too early": (
        "v_mfma_f32_16x16x32_fp8_fp8 v[12:15], v[8:9], v[8:9], 0\n    s_nop {}\n    v_mov_b32_e32 v3, v13",
        7,
    ),
    "register moved by DPP": ("v_mov_b32_e32 v8, v0\n    s_nop {}\n    v_mov_b32_dpp v3, v8 quad_perm:[1,0,3,2]", 1),
    "scalar from VALU as an address": (
        "v_readfirstlane_b32 s8, v9\n    s_nop {}\n    global_load_dword v9, v1, s[8:9]\n    s_waitcnt vmcnt(0)",
        4,
    ),
    "transcendental result": ("v_exp_f32_e32 v8, v0\n    s_nop {}\n    v_mov_b32_e32 v3, v8", 0),
}


@pytest.mark.parametrize("name", WAIT_STATES)
def test_missing_wait_states_are_reported_from_the_text_alone(name):
    from aiter_paged_fp8.emulator import Program, load
    from op_tests.emulator_kernels import isa_text

    text, enough = WAIT_STATES[name]
    for states in (enough, enough - 1):
        piece = text.format(states) if states >= 0 else text.replace("s_nop {}\n    ", "")
        body = UNDEFINED.body.replace("v_add_u32_e32 v3, 1, v2", piece)
        found = load(Program.parse(isa_text(body, 1))).wait_states()
        assert len(found) == (states < enough), [report.message for report in found]


def test_a_read_that_is_as_late_as_its_dma_hides_the_missing_wait_and_an_early_one_shows_it():
    last = "s_waitcnt vmcnt(0) ; last\n    s_barrier ; third\n    ds_read_b32 v6, v5 offset:1024\n"
    kernel = DMA_COPY.mutated(last, "s_barrier\n    ds_read_b32 v6, v5 offset:1024\n    s_waitcnt vmcnt(0)\n")
    for memory, right in (("earliest", True), ("latest", True), ("latest-vmem", False)):
        source, target = copy_inputs()
        kernel.run(source, target, memory=memory)
        assert np.array_equal(target, expected(source)) == right, memory
    source, target = copy_inputs()
    assert DMA_COPY.run(source, target, memory="latest-vmem").reports == []
    np.testing.assert_array_equal(target, expected(source))
