"""Executed counts of the native kernel for one tile of 128 keys and one wave: the budget of its steady loop."""

from __future__ import annotations

import pytest

from aiter_paged_fp8.kernel_counts import LoopCounts, steady_loop_counts, table_of
from op_tests.native_cases import SPECIALISATIONS

VALU_SLOTS = 355
#: Two products of 128 keys x 32 rows x 128 dims, 32x32x64 each: 4 strips of keys x 2 steps, 4 strips of dims x 2 steps.
MFMAS = 16
#: Two more sum P as it is multiplied, 64 keys x 32 rows each, in place of 64 additions; for LSE these are made too.
ROW_SUMS = 2
#: Each takes an operand of two packs from LDS.
READS = 32
#: K and V of 128 keys are 32 KiB: 4 KiB for each of 8 waves, 1 KiB an instruction.
DMAS = 4
BARRIERS = 2


@pytest.fixture(
    scope="module", params=SPECIALISATIONS, ids=lambda value: f"{value[0]}-{'lse' if value[1] else 'no-lse'}"
)
def loops(request: pytest.FixtureRequest) -> list[LoopCounts]:
    found = steady_loop_counts(*request.param)
    print(f"one wave, one tile, {request.param}: early group, late group\n{table_of(found)}")
    return found


def test_budget_of_the_steady_loop(loops: list[LoopCounts]) -> None:
    assert len(loops) == 2
    for loop in loops:
        mfmas = {name: count for name, count in loop.mnemonics.items() if "mfma" in name}
        assert mfmas == {"v_mfma_f32_32x32x64_f8f6f4": MFMAS + ROW_SUMS}
        assert loop.valu_slots <= VALU_SLOTS
        assert loop.mnemonics["ds_read_b128"] == loop.kinds["lds"] == READS
        assert loop.lds_conflict_cycles == 0
        assert loop.mnemonics["buffer_load_dwordx4"] == loop.kinds["vmem"] == DMAS
        assert loop.lds_dma_bytes == DMAS * 1024
        assert loop.mnemonics["s_barrier"] == BARRIERS


def test_slots_are_weighed_as_the_budget_says(loops: list[LoopCounts]) -> None:
    # 4 strips x 16 scores of a lane: an exponential, a multiply-add, a conversion for two, an addition for LSE.
    for loop in loops:
        names = loop.mnemonics
        assert names["v_exp_f32"] == 64
        assert names["v_cvt_pk_fp8_f32"] == 32
        vector = sum(count for name, count in names.items() if name.startswith("v_") and "mfma" not in name)
        assert loop.valu_slots == vector + names["v_exp_f32"] + names.get("v_permlane32_swap_b32", 0)
        assert vector == loop.kinds["valu"] + loop.kinds["trans"]


def test_page_ids_are_scalar_and_looked_up_once(loops: list[LoopCounts]) -> None:
    for loop in loops:
        assert loop.kinds["smem"] == loop.mnemonics["s_buffer_load_dword"] == 2, "one page id for each page of a tile"
        assert not [name for name in loop.mnemonics if name.startswith(("global_", "flat_", "scratch_"))]


def test_counts_do_not_depend_on_where_the_difference_is_taken() -> None:
    few, many = steady_loop_counts(first=3, more=6), steady_loop_counts(first=5, more=12)
    assert few == many
