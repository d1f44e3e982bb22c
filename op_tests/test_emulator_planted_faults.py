"""Planted faults in a paged kernel: each is reported with its two lines, and only by the check that is there for it.

The kernel is a small copy of what a paged attention kernel does. Four waves of a workgroup take four pages one after
the other: a page id comes by scalar load, the page by loads straight to LDS into one of two buffers while the page
before it is multiplied, each wave reads the quarter that its neighbour has fetched. Unmutated it is right and reports
nothing in every timing and wave order.
"""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from aiter_paged_fp8.emulator import Checks, MemoryFault
from op_tests.emulator_kernels import Kernel

WAVES, LANES, TILES, GROUPS, PAGES = 4, 64, 4, 3, 8
PAGE = 4096
SCHEDULES = ("lockstep", "skewed", "skewed-reverse")

PAGED = Kernel(
    f"""
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_load_dwordx2 s[8:9], s[0:1], 0x10
    v_lshrrev_b32_e32 v1, 6, v0
    v_and_b32_e32 v2, 63, v0
    v_readfirstlane_b32 s16, v1
    s_lshl_b32 s17, s16, 10
    v_lshlrev_b32_e32 v3, 4, v2
    v_add_u32_e32 v3, s17, v3
    s_add_i32 s18, s16, 1
    s_and_b32 s18, s18, 3
    s_lshl_b32 s18, s18, 10
    v_lshlrev_b32_e32 v4, 4, v2
    v_add_u32_e32 v4, s18, v4
    s_lshl_b32 s19, s2, 4
    s_waitcnt lgkmcnt(0) ; arguments
    s_add_u32 s6, s6, s19
    s_addc_u32 s7, s7, 0
    s_mov_b32 s12, s4
    s_and_b32 s13, s5, 0xffff
    s_mov_b32 s14, {PAGES * PAGE:#x}
    s_mov_b32 s15, 0x20000
    v_mov_b32_e32 v8, 0
    v_mov_b32_e32 v9, 0
    v_mov_b32_e32 v10, 0
    v_mov_b32_e32 v11, 0
    s_load_dword s20, s[6:7], 0x0
    s_mov_b32 s21, 0
    s_mov_b32 s22, 0
    s_waitcnt lgkmcnt(0) ; first page
    s_lshl_b32 s20, s20, 12 ; first page
    s_mov_b32 m0, s17
    s_nop 0 ; m0
    buffer_load_dwordx4 v3, s[12:15], s20 offen lds ; first
.Lloop:
    s_add_u32 s21, s21, 1
    s_lshl_b32 s23, s21, 2
    s_cmp_lt_u32 s21, {TILES} ; another page
    s_cbranch_scc0 .Lwait
    s_load_dword s20, s[6:7], s23
.Lwait:
    s_waitcnt vmcnt(0) ; tile
    s_barrier ; tile
    s_cmp_lt_u32 s21, {TILES}
    s_cbranch_scc0 .Lread
    s_waitcnt lgkmcnt(0) ; page
    s_lshl_b32 s20, s20, 12
    s_xor_b32 s24, s22, {PAGE:#x}
    s_add_i32 s24, s24, s17
    s_mov_b32 m0, s24
    s_nop 0
    buffer_load_dwordx4 v3, s[12:15], s20 offen lds ; next
.Lread:
    v_add_u32_e32 v5, s22, v4
    ds_read_b128 v[12:15], v5
    s_xor_b32 s22, s22, {PAGE:#x}
    s_waitcnt lgkmcnt(0) ; operands
    v_mfma_f32_16x16x32_fp8_fp8 v[8:11], v[12:13], v[14:15], v[8:11]
    s_cmp_lt_u32 s21, {TILES}
    s_cbranch_scc1 .Lloop
    s_lshl_b32 s25, s2, 12
    v_lshlrev_b32_e32 v6, 4, v0
    v_add_u32_e32 v6, s25, v6
    s_nop 7 ; result
    s_nop 3
    global_store_dwordx4 v6, v[8:11], s[8:9]
    s_endpgm
    """,
    lds=2 * PAGE,
    block=WAVES * LANES,
    grid=GROUPS,
)


def arrays(slack=0):
    """Pages, page table, result; with `slack` further elements behind each, as a larger allocation would have."""
    generator = np.random.default_rng(1)
    values = generator.choice([0, 1, -1, 2, -2, 0.5], (PAGES * PAGE)).astype(ml_dtypes.float8_e4m3fn)
    pages = np.concatenate([values.view(np.uint8), np.zeros(slack * PAGE, np.uint8)])
    table = np.concatenate([generator.integers(0, PAGES, GROUPS * TILES), np.zeros(slack, np.int64)]).astype(np.int32)
    result = np.full(GROUPS * WAVES * LANES * 4 + 4 * slack, np.nan, np.float32)
    return pages, table, result


def expected(pages, table):
    """Registers as stored: ``[groups, waves, lanes, 4]``."""
    values = pages.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    want = np.zeros((GROUPS, WAVES, LANES, 4), np.float32)
    for group, wave in np.ndindex(GROUPS, WAVES):
        product = np.zeros((16, 16))
        for page in table[group * TILES : (group + 1) * TILES]:
            start = page * PAGE + (wave + 1) % WAVES * 1024
            rows = values[start : start + 1024].reshape(4, 16, 16)
            # A lane holds 8 k of its row of A, then of its column of B.
            a, b = (rows[:, :, half].transpose(1, 0, 2).reshape(16, 32) for half in (slice(0, 8), slice(8, 16)))
            product += a @ b.T
        for lane in range(LANES):
            want[group, wave, lane] = product[4 * (lane // 16) : 4 * (lane // 16) + 4, lane % 16]
    return want


def test_the_unmutated_kernel_is_right_and_reports_nothing():
    for memory in ("latest", "earliest", "seeded"):
        for schedule in (*SCHEDULES, "seeded"):
            for seed in range(3 if "seeded" in (memory, schedule) else 1):
                pages, table, result = arrays()
                run = PAGED.run(pages, table, result, read_only=(0, 1), memory=memory, schedule=schedule, seed=seed)
                assert run.reports == [], (memory, schedule, seed)
                np.testing.assert_array_equal(result.reshape(GROUPS, WAVES, LANES, 4), expected(pages, table))


NEXT = PAGED.body[PAGED.body.index("    s_waitcnt lgkmcnt(0) ; page") : PAGED.body.index(".Lread:")]
DMA_NEXT, DMA_FIRST, READ = "offen lds ; next", "offen lds ; first", "ds_read_b128"
MULTIPLY, STORE, PAGE_ID = "v_mfma_f32", "global_store_dwordx4", "s_load_dword s20, s[6:7], s23"
OFF_AND_ON = "s_mov_b64 exec, 0xffff\n    {}\n    s_mov_b64 exec, -1"
FIRST_LOAD = "buffer_load_dwordx4 v3, s[12:15], s20 offen lds ; first"


@dataclass(frozen=True)
class Fault:
    """A mutation and what must be said of it.

    Attributes
    ----------
    changes : tuple of (old, new)
        Pieces of text.
    kind : str
        Of the report; "fault" where the run ends with a MemoryFault.
    line, other : str
        Pieces of the two lines; `other` None where there is one only.
    checks : tuple of str
        What has to be switched off for it to go unseen. A memory fault is no check: it goes unseen where the tensors
        are registered with what their allocation has behind them, or the LDS is larger.
    """

    changes: tuple[tuple[str, str], ...]
    kind: str
    line: str
    other: str | None
    checks: tuple[str, ...] = ()
    says: tuple[str, ...] = ()

    def kernel(self):
        kernel = PAGED
        for old, new in self.changes:
            kernel = kernel.mutated(old, new)
        return kernel


FAULTS = {
    "vmcnt wait weakened": Fault(
        (("s_waitcnt vmcnt(0) ; tile", "s_waitcnt vmcnt(1)"),), "race", READ, DMA_FIRST, ("races", "undefined")
    ),
    "LDS wait weakened": Fault(
        (("s_waitcnt lgkmcnt(0) ; operands", "s_waitcnt lgkmcnt(1)"),),
        *("in-flight", MULTIPLY, READ, ("in_flight", "races", "undefined")),
    ),
    "scalar wait dropped": Fault(
        (("s_waitcnt lgkmcnt(0) ; page", "s_nop 0"),), "in-flight", "s_lshl_b32 s20, s20, 12\n", PAGE_ID, ("in_flight",)
    ),
    "barrier dropped": Fault((("s_barrier ; tile", "s_nop 0"),), "race", READ, DMA_NEXT, ("races", "undefined")),
    "staging buffers overlapped": Fault(
        ((f"s_xor_b32 s24, s22, {PAGE:#x}", "s_mov_b32 s24, s22"),), "race", DMA_NEXT, READ, ("races", "undefined")
    ),
    "load to LDS moved before the barrier": Fault(
        (
            (NEXT, ""),
            (
                "    s_load_dword s20, s[6:7], s23\n.Lwait:\n    s_waitcnt vmcnt(0) ; tile\n",
                "    s_load_dword s20, s[6:7], s23\n    s_waitcnt vmcnt(0) ; tile\n"
                f"{NEXT}.Lwait:\n    s_waitcnt vmcnt(1)\n",
            ),
        ),
        *("race", DMA_NEXT, READ, ("races", "undefined")),
    ),
    "memory wait moved behind the barrier": Fault(
        (("s_waitcnt vmcnt(0) ; tile\n    s_barrier ; tile", "s_barrier\n    s_waitcnt vmcnt(0)"),),
        *("race", READ, DMA_FIRST, ("races", "undefined")),
    ),
    "operands overwritten while they are on their way": Fault(
        ((f"s_xor_b32 s22, s22, {PAGE:#x}\n", f"v_mov_b32_e32 v13, 0\n    s_xor_b32 s22, s22, {PAGE:#x}\n"),),
        *("in-flight", "v_mov_b32_e32 v13, 0", READ, ("in_flight",)),
    ),
    "store past the end": Fault(
        (("v[8:11], s[8:9]", "v[8:11], s[8:9] offset:16"),),
        "fault",
        STORE,
        None,
        says=("16 bytes past the end", "arg2"),
    ),
    "descriptor with too large a range": Fault(
        ((f"s_mov_b32 s14, {PAGES * PAGE:#x}", "s_mov_b32 s14, -1"), ("s20, 12 ; first page", "s20, 13")),
        *("fault", DMA_FIRST, None),
        says=("past the end", "arg0"),
    ),
    "page table read one past its end": Fault(
        ((f"s_cmp_lt_u32 s21, {TILES} ; another page", f"s_cmp_lt_u32 s21, {TILES + 1}"),),
        *("fault", PAGE_ID, None),
        says=("4 bytes past the end", "arg1"),
    ),
    "LDS read out of bounds": Fault(
        (("ds_read_b128 v[12:15], v5", f"ds_read_b128 v[12:15], v5 offset:{PAGE}"),),
        *("fault", READ, None, ("undefined", "races")),
        says=(f"{2 * PAGE} bytes of LDS",),
    ),
    "accumulator not initialised": Fault(
        (("v_mov_b32_e32 v9, 0", "s_nop 0"),), "undefined", STORE, MULTIPLY, ("undefined",)
    ),
    "accumulator initialised in some lanes": Fault(
        (("v_mov_b32_e32 v9, 0", OFF_AND_ON.format("v_mov_b32_e32 v9, 0")),),
        *("undefined", STORE, MULTIPLY, ("undefined",)),
    ),
    "LDS partly written": Fault(
        ((FIRST_LOAD, OFF_AND_ON.format(FIRST_LOAD)),), "undefined", STORE, READ, ("undefined",)
    ),
    "wrong M0": Fault(
        (("s_mov_b32 m0, s17", "s_mov_b32 m0, 0"),), "race", DMA_FIRST, DMA_FIRST, ("races", "undefined")
    ),
    "wait state after M0 missing": Fault(
        (("s_nop 0 ; m0", ""),), "wait-states", DMA_FIRST, "s_mov_b32 m0, s17", ("wait_states",)
    ),
    "matrix result stored too early": Fault(
        (("s_nop 7 ; result\n    s_nop 3\n", ""),), "wait-states", STORE, MULTIPLY, ("wait_states",)
    ),
    "two workgroups store to one place": Fault(
        (("s_lshl_b32 s25, s2, 12", "s_mov_b32 s25, 0"),), "global-race", STORE, STORE, ("global_races",)
    ),
}
MISALIGNED = PAGED.mutated("v_lshlrev_b32_e32 v4, 4, v2", "v_mul_u32_u24_e32 v4, 14, v2")


def found(kernel, *, slack=0, **options):
    """Reports and memory faults over the three wave orders."""
    reports, faults = [], []
    for schedule in SCHEDULES:
        try:
            reports += kernel.run(*arrays(slack), read_only=(0, 1), schedule=schedule, **options).reports
        except MemoryFault as fault:
            faults.append(fault)
            reports += fault.reports
    return reports, faults


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported_with_its_lines(name):
    fault = FAULTS[name]
    kernel = fault.kernel()
    reports, faults = found(kernel)
    if fault.kind == "fault":
        assert faults
        first = faults[0]
        assert first.details["line"] == kernel.line_of(fault.line)
        for piece in (*fault.says, "wave", "lane", "workgroup"):
            assert piece in str(first)
        return
    lines = {(report.line, report.other_line): report.message for report in reports if report.kind == fault.kind}
    pair = kernel.line_of(fault.line), kernel.line_of(fault.other)
    assert pair in lines or pair[::-1] in lines, (pair, lines)
    message = lines.get(pair) or lines[pair[::-1]]
    assert f"line {pair[0]}:" in message
    assert f"line {pair[1]}:" in message


@pytest.mark.parametrize("name", FAULTS)
def test_with_its_check_off_it_goes_unseen(name):
    fault = FAULTS[name]
    kernel = fault.kernel()
    if "LDS" in name and fault.kind == "fault":
        kernel = replace(kernel, lds=3 * PAGE)
    reports, faults = found(
        kernel, slack=PAGES if fault.kind == "fault" else 0, checks=Checks(**dict.fromkeys(fault.checks, False))
    )
    assert faults == []
    assert [report.message for report in reports] == []


def test_a_misaligned_lds_access_is_a_fault():
    _, faults = found(MISALIGNED)
    assert len(faults) == len(SCHEDULES)
    assert faults[0].details["line"] == MISALIGNED.line_of(READ)
    assert "must be a multiple of" in str(faults[0])


NUMERICALLY_WRONG = (
    "vmcnt wait weakened",
    "LDS wait weakened",
    "barrier dropped",
    "staging buffers overlapped",
    "load to LDS moved before the barrier",
    "memory wait moved behind the barrier",
    "wrong M0",
)


@pytest.mark.parametrize("name", NUMERICALLY_WRONG)
def test_late_memory_or_a_skewed_order_shows_it_in_the_result(name):
    kernel = FAULTS[name].kernel()
    wrong = []
    for memory in ("latest", "earliest"):
        for schedule in SCHEDULES:
            pages, table, result = arrays()
            kernel.run(pages, table, result, memory=memory, schedule=schedule, checks=Checks.none())
            wrong.append(not np.array_equal(result.reshape(GROUPS, WAVES, LANES, 4), expected(pages, table)))
    assert any(wrong)
