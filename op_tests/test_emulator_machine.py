"""Programs, waves and queues: what loads, who runs when, what is counted."""

import json

import flydsl.compiler as flyc
import flydsl.expr as fx
import numpy as np
import pytest
import torch

from aiter_paged_fp8.emulator import (
    MachineFault,
    MemoryFault,
    Program,
    ProgramError,
    UnimplementedInstruction,
    graph,
    isa_coverage,
    load,
    stream,
    submit,
)
from aiter_paged_fp8.emulator.banks import conflict_cycles
from aiter_paged_fp8.emulator.queue import Work
from op_tests.emulator_flydsl import emulating
from op_tests.emulator_kernels import Kernel, isa_text

STORE_ID = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    s_lshl_b32 s3, s2, {shift}
    v_add_u32_e32 v1, s3, v1
    {body}
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[4:5]
    s_endpgm
"""


def test_everything_that_is_not_implemented_is_named_at_load_time():
    text = isa_text("s_nop 0\n v_frobnicate_b32 v0, v1\n s_add_u32 s0, s1, s2 sparkle\n s_endpgm", 1)
    with pytest.raises(UnimplementedInstruction) as error:
        load(Program.parse(text))
    assert [line for line, _, _ in error.value.problems] == [4, 5]
    message = str(error.value)
    assert "line 4: v_frobnicate_b32 v0, v1" in message
    assert "modifier sparkle" in message


@pytest.mark.parametrize(
    ("change", "words_"),
    [
        (("gfx950", "gfx942"), "not for gfx950"),
        ((".wavefront_size: 64", ".wavefront_size: 32"), "wavefront size 32"),
        (("s_branch .LA", "s_branch .LB"), "unknown label"),
        ((".amdgpu_metadata\n", ".amdgpu_nothing\n"), "no .amdgpu_metadata"),
    ],
)
def test_programs_that_make_no_sense_are_refused(change, words_):
    text = isa_text("s_branch .LA\n.LA:\n s_endpgm", 1)
    with pytest.raises(ProgramError, match=words_):
        Program.parse(text.replace(*change))


def test_kernel_names_are_not_identities():
    first, second = (Program.parse(isa_text(f"s_nop {n}\n s_endpgm", 1)) for n in (0, 1))
    assert first.name == second.name
    assert load(first) is not load(second)
    assert load(first) is load(Program.parse(isa_text("s_nop 0\n s_endpgm", 1)))


def test_a_program_states_its_resources():
    metadata = Program.parse(isa_text("v_mov_b32_e32 v7, 0\n s_endpgm", 2, lds=512)).metadata
    assert (metadata.lds_size, metadata.kernarg_size, len(metadata.arguments)) == (512, 16, 2)
    assert metadata.directives["user_sgpr_count"] == 2


def test_numbered_local_labels():
    kernel = Kernel(
        STORE_ID.format(
            shift=8,
            body="s_cmp_eq_u32 s2, 0\n s_cbranch_scc1 1f\n v_mov_b32_e32 v2, 5\n s_branch 2f\n1:\n"
            "v_mov_b32_e32 v2, 9\n2:",
        ),
        grid=2,
    )
    target = np.zeros(128, np.uint32)
    kernel.run(target)
    assert target.reshape(2, 64)[:, 0].tolist() == [9, 5]


@pytest.mark.parametrize("schedule", ["lockstep", "skewed", "skewed-reverse", "seeded"])
@pytest.mark.parametrize("max_waves", [2, 6, 256])
def test_loops_of_different_length_part_and_meet(schedule, max_waves):
    """Lane, wave and workgroup decide how often a loop runs."""
    body = """
    v_and_b32_e32 v3, 63, v0
    v_lshrrev_b32_e32 v4, 6, v0
    v_add_u32_e32 v3, v3, v4
    v_add_u32_e32 v3, s2, v3
    v_mov_b32_e32 v2, 0
    s_mov_b64 s[10:11], exec
.LA:
    v_add_u32_e32 v2, 3, v2
    v_subrev_u32_e32 v3, 1, v3
    v_cmp_lt_i32_e32 vcc, 0, v3
    s_and_b64 exec, exec, vcc
    s_cbranch_execnz .LA
    s_mov_b64 exec, s[10:11]
    """
    kernel = Kernel(STORE_ID.format(shift=9, body=body), block=128, grid=5)
    target = np.zeros(640, np.uint32)
    result = kernel.run(target, schedule=schedule, max_waves=max_waves, trace=True)
    thread, workgroup = np.arange(128), np.arange(5)[:, None]
    count = np.maximum(thread % 64 + thread // 64 + workgroup, 1)
    assert (target.reshape(5, 128) == 3 * count).all()
    assert result.reports == []
    rounds = count.reshape(5, 2, 64).max(axis=2)
    assert result.counts.by_line[kernel.line_of("v_add_u32_e32 v2, 3, v2")] == rounds.sum()
    line = kernel.line_of("v_add_u32_e32 v2, 3, v2")
    assert {key: lines.count(line) for key, lines in result.trace.items()} == {
        (w, v): rounds[w, v] for w in range(5) for v in range(2)
    }


def test_waves_that_ended_no_longer_count_at_the_barrier():
    body = """
    v_lshrrev_b32_e32 v3, 6, v0
    v_mov_b32_e32 v2, 1
    s_nop 0
    v_readfirstlane_b32 s8, v3
    s_cmp_eq_u32 s8, 2
    s_cbranch_scc1 .LEND
    s_barrier
    """
    text = STORE_ID.format(shift=10, body=body).replace("s_endpgm", ".LEND:\n    s_endpgm")
    for schedule in ("lockstep", "skewed", "skewed-reverse"):
        target = np.zeros(256, np.uint32)
        Kernel(text, block=256).run(target, schedule=schedule)
        assert target.reshape(4, 64)[:, 0].tolist() == [1, 1, 0, 1]


def test_a_kernel_without_end_is_stopped():
    with pytest.raises(MachineFault, match="have not ended"):
        Kernel(".LA:\n s_nop 0\n s_branch .LA\n s_endpgm").run(max_instructions=1000)


def test_workgroup_ids_thread_ids_and_partial_waves():
    kernel = Kernel(STORE_ID.format(shift=9, body="v_lshl_or_b32 v2, s2, 16, v0"), block=100, grid=3)
    target = np.full(384, 9, np.uint32)
    kernel.run(target)
    for workgroup in range(3):
        row = target[128 * workgroup : 128 * workgroup + 128]
        assert row[:100].tolist() == [workgroup << 16 | thread for thread in range(100)]
        assert (row[100:] == 9).all()


def test_counts_as_json():
    kernel = Kernel(STORE_ID.format(shift=8, body="v_mov_b32_e32 v2, 0"), grid=4)
    target = np.zeros(256 + 32, np.uint32)
    aligned = target[-target.ctypes.data % 128 // 4 :][:256]
    counts = json.loads(kernel.run(aligned).counts.to_json())
    assert counts["by_class"] == {"branch": 4, "salu": 4, "smem": 4, "valu": 12, "vmem": 4, "wait": 4}
    assert counts["bytes"] == {"global written": 1024, "scalar read": 32}
    assert counts["cache_lines"] == {"arg0 written": 8}
    assert sum(counts["by_line"].values()) == counts["instructions"] == 32


PHASES_READ_B128 = [
    [*range(4), *range(12, 16), *range(20, 28)],
    [*range(4, 12), *range(16, 20), *range(28, 32)],
    [*range(32, 36), *range(44, 48), *range(52, 60)],
    [*range(36, 44), *range(48, 52), *range(60, 64)],
]


def brute_force(addresses, active, words_, banks, phases):
    cycles = 0
    for wave, live in zip(addresses, active, strict=True):
        for phase in phases:
            touched = {int(wave[lane]) // 4 + k for lane in phase if live[lane] for k in range(words_)}
            per_bank = [sum(1 for word in touched if word % banks == bank) for bank in range(banks)]
            cycles += max(max(per_bank) - 1, 0)
    return cycles


@pytest.mark.parametrize(
    ("words_", "write", "banks", "phases"),
    [
        (4, False, 64, PHASES_READ_B128),
        (2, False, 64, [range(32), range(32, 64)]),
        (1, False, 64, [range(64)]),
        (2, True, 32, [range(k, k + 16) for k in range(0, 64, 16)]),
    ],
)
def test_bank_conflicts_by_phases(words_, write, banks, phases):
    generator = np.random.default_rng(2)
    for pattern in (
        np.tile(np.arange(64) * 4 * words_, (3, 1)),
        np.tile(np.arange(64) * 256, (3, 1)),
        generator.integers(0, 1024, (3, 64)) * 4 * words_,
    ):
        active = generator.random((3, 64)) < 0.8
        for live in (np.ones((3, 64), bool), active):
            want = brute_force(pattern, live, words_, banks, phases)
            assert conflict_cycles(pattern.astype(np.uint32), live, words_, write=write) == want


def test_conflicts_are_counted_by_line():
    body = "v_lshlrev_b32_e32 v3, {}, v0\n v_mov_b32_e32 v4, 0\n ds_write_b32 v3, v4\n ds_read_b32 v2, v3"
    body += "\n s_waitcnt lgkmcnt(0)"
    free = Kernel(STORE_ID.format(shift=8, body=body.format(2)), lds=256).run(np.zeros(64, np.uint32)).counts
    assert free.lds_conflict_cycles == 0
    kernel = Kernel(STORE_ID.format(shift=8, body=body.format(8)), lds=16384)
    counts = kernel.run(np.zeros(64, np.uint32)).counts
    assert counts.lds_conflicts_by_line[kernel.line_of("ds_read_b32")] == 63
    assert counts.bytes["lds read"] == counts.bytes["lds written"] == 256


def test_coverage_says_what_is_implemented_met_and_tested():
    program = Program.parse(isa_text("v_add_u32_e32 v0, v0, v0\n v_unheard_of v0\n s_endpgm", 1))
    found = {entry.mnemonic: entry for entry in isa_coverage([program], ["tests v_add_u32_e32 and v_add_u32"])}
    assert (found["v_add_u32"].implemented, found["v_add_u32"].met, found["v_add_u32"].tested) == (True, 1, True)
    assert (found["v_unheard_of"].implemented, found["v_unheard_of"].met) == (False, 1)
    assert found["v_mfma_f32_32x32x64_f8f6f4"].family == "matrix"


def test_streams_run_in_order_and_only_when_told():
    seen = []
    with stream() as first:
        submit(Work("a", lambda: seen.append("a")))
        event = first.record()
        submit(Work("b", lambda: seen.append("b")))
    assert seen == []
    with stream() as second:
        second.wait(event)
        submit(Work("c", lambda: seen.append("c")))
    second.synchronize()
    assert seen == ["a", "c"]
    first.synchronize()
    assert seen == ["a", "c", "b"]
    submit(Work("d", lambda: seen.append("d")))
    assert seen[-1] == "d"


def test_a_graph_replays_over_what_memory_holds_by_then():
    value, seen = [1], []
    with graph() as recorded:
        submit(Work("read", lambda: seen.append(value[0])))
    assert seen == []
    for number in (5, 6):
        value[0] = number
        recorded.replay()
    assert seen == [5, 6]
    with stream() as queue:
        recorded.replay()
    assert seen == [5, 6]
    queue.synchronize()
    assert seen == [5, 6, 6]


@flyc.kernel(known_block_size=[64, 1, 1])
def double_kernel(A: fx.Tensor, C: fx.Tensor):
    i = fx.block_idx.x * 64 + fx.thread_idx.x
    C[i] = A[i] + A[i]


@flyc.jit
def double(A: fx.Tensor, C: fx.Tensor, n: fx.Int32, stream: fx.Stream = fx.Stream(None)):
    double_kernel(A, C).launch(grid=(n // 64, 1, 1), block=(64, 1, 1), stream=stream)


def test_launches_join_streams_and_graphs():
    a, c = torch.arange(64.0), torch.zeros(64)
    with emulating() as session:
        with stream() as queue:
            double(a, c, 64)
        assert not session.launches
        a += 1
        queue.synchronize()
        assert torch.equal(c, 2 * a)
        with graph() as recorded:
            double(a, c, 64)
        a += 5
        recorded.replay()
        assert torch.equal(c, 2 * a)
    assert len(session.launches) == 2


def test_a_temporary_that_was_freed_before_its_kernel_ran_is_found():
    a, c = torch.arange(64.0), torch.zeros(64)
    with emulating():
        with stream() as queue:
            temporary = a.clone()
            double(temporary, c, 64)
            del temporary
        with pytest.raises(MemoryFault, match=r"the buffer A .* was freed"):
            queue.synchronize()
        with stream() as queue:
            # A view dies, its storage lives on.
            double(a[:], c, 64)
        queue.synchronize()
    assert torch.equal(c, 2 * a)
