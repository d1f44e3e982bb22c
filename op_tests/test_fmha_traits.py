"""The numbers of the native kernel, on the host alone: operand orders, LDS addresses, exponents, query tiles.

The lane maps of the matrix unit and the layouts of the caches are spelled out here once more, from the instruction
calculator and the contract, so that traits can't be wrong in the same way.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from aiter_paged_fp8.kernels.fmha_gfx950 import traits as numbers
from aiter_paged_fp8.kernels.fmha_gfx950.traits import (
    Traits,
    accumulator_row,
    group_reciprocal,
    operand_k,
    positions_per_tile,
    strip_order,
    workgroup_id,
)
from aiter_paged_fp8.layouts import Vectorized
from aiter_paged_fp8.reference import e4m3_values

TRAITS = Traits("vectorized", 64, 128, 128, "block", True)
LANE = np.arange(64)
#: Lanes that ds_read_b128 serves in one phase, 256 bytes of 64 banks.
PHASES = [
    [*range(4), *range(12, 16), *range(20, 28)],
    [*range(4, 12), *range(16, 20), *range(28, 32)],
    [*range(32, 36), *range(44, 48), *range(52, 60)],
    [*range(36, 44), *range(48, 52), *range(60, 64)],
]
STRIPS, DIM_STEPS, KEY_STEPS, DIM_STRIPS, PACKS = 4, 2, 2, 4, 2


# -- the matrix unit, by its lane maps ------------------------------------------------------------------------------


def product_row(lane: int, register: int) -> int:
    """Row of a 32x32 result; its column is lane % 32."""
    return 8 * (register // 4) + 4 * (lane // 32) + register % 4


def depth(lane: int, byte: int) -> int:
    """Depth of an fp8 operand's byte; its row or column is lane % 32."""
    return 16 * (lane // 32) + 32 * (byte // 16) + byte % 16


def mfma(a: np.ndarray, b: np.ndarray, addend: np.ndarray) -> np.ndarray:
    """32x32x64: operands [64 lanes, 32 values], result [64 lanes, 16 registers]."""
    first, second = np.full((32, 64), np.nan), np.full((64, 32), np.nan)
    for lane in range(64):
        for byte in range(32):
            first[lane % 32, depth(lane, byte)] = a[lane, byte]
            second[depth(lane, byte), lane % 32] = b[lane, byte]
    whole = first @ second
    registers = [[whole[product_row(lane, r), lane % 32] for r in range(16)] for lane in range(64)]
    return addend + np.array(registers)


def test_rows_and_depths_are_those_of_the_matrix_unit() -> None:
    assert all(accumulator_row(lane // 32, r) == product_row(lane, r) for lane in range(64) for r in range(16))
    assert all(operand_k(lane // 32, byte) == depth(lane, byte) for lane in range(64) for byte in range(32))
    assert sorted(operand_k(half, byte) for half in range(2) for byte in range(32)) == list(range(64))


def test_strip_order_is_the_inverse_of_the_result_rows() -> None:
    assert [strip_order(accumulator_row(half, r)) for half in range(2) for r in range(16)] == list(range(32))
    assert sorted(strip_order(row) for row in range(32)) == list(range(32))
    # One formula for ints and for the kernel's lane numbers.
    assert list(strip_order(np.arange(32))) == [strip_order(row) for row in range(32)]


# -- a tile in LDS --------------------------------------------------------------------------------------------------


def k_place(key: int, dim: int) -> int:
    """Byte of K in a tile of two pages [D/16, 64, 16]."""
    return key // 64 * (64 * 128) + dim // 16 * (64 * 16) + key % 64 * 16 + dim % 16


def v_place(key: int, dim: int) -> int:
    """Byte of V in a tile of two pages [4, Dv, 16]."""
    return key // 64 * (64 * 128) + key % 64 // 16 * (128 * 16) + dim * 16 + key % 16


def staged(matrix: np.ndarray, place: object) -> np.ndarray:
    """LDS of one tile: [keys, dims] at the places of its pages."""
    lds = np.full(TRAITS.k_tile_bytes, np.nan)
    for key in range(128):
        for dim in range(128):
            lds[place(key, dim)] = matrix[key, dim]  # type: ignore[operator]
    assert not np.isnan(lds).any()
    return lds


def read(lds: np.ndarray, base: int, lane_offsets: np.ndarray) -> np.ndarray:
    """What ds_read_b128 gives: [64 lanes, 16 bytes]."""
    return lds[base + lane_offsets[:, None] + np.arange(16)]


def k_lanes() -> np.ndarray:
    return np.array([TRAITS.k_lane_offset(lane // 32, lane % 32) for lane in range(64)])


def v_lanes() -> np.ndarray:
    return np.array([TRAITS.v_lane_offset(lane // 32, lane % 32) for lane in range(64)])


def k_reads() -> list[tuple[int, int, int]]:
    return [(strip, step, pack) for strip in range(STRIPS) for step in range(DIM_STEPS) for pack in range(PACKS)]


def v_reads() -> list[tuple[int, int, int]]:
    return [(step, strip, pack) for step in range(KEY_STEPS) for strip in range(DIM_STRIPS) for pack in range(PACKS)]


def test_both_products_by_the_lane_maps() -> None:
    # Small integers: every sum is exact, so that one wrong place shows.
    rng = np.random.default_rng(20260)
    q, k, v = (rng.integers(-8, 9, size).astype(float) for size in ((32, 128), (128, 128), (128, 128)))
    k_lds, v_lds = staged(k, k_place), staged(v, v_place)
    scores = []
    for strip in range(STRIPS):
        total = np.zeros((64, 16))
        for step in range(DIM_STEPS):
            keys = [read(k_lds, TRAITS.k_offset(strip, step, pack), k_lanes()) for pack in range(PACKS)]
            queries = [[q[lane % 32, 64 * step + depth(lane, byte)] for byte in range(32)] for lane in range(64)]
            total = mfma(np.concatenate(keys, 1), np.array(queries), total)
        scores.append(total)
    exact = q @ k.T
    for lane in range(64):
        for strip in range(STRIPS):
            for register in range(16):
                # Register r of half h is the key 16 h + r of its strip.
                key = 32 * strip + 16 * (lane // 32) + register
                assert scores[strip][lane, register] == exact[lane % 32, key]
                assert TRAITS.tile_key(strip, register) + 16 * (lane // 32) == key

    for strip in range(DIM_STRIPS):
        total = np.zeros((64, 16))
        for step in range(KEY_STEPS):
            values = [read(v_lds, TRAITS.v_offset(step, strip, pack), v_lanes()) for pack in range(PACKS)]
            # P as it lies: the registers of two strips, one after the other.
            held = np.concatenate([scores[2 * step], scores[2 * step + 1]], 1)
            total = mfma(np.concatenate(values, 1), held, total)
        expected = (exact @ v)[:, 32 * strip : 32 * strip + 32]
        got = [[total[lane, r] for lane in (row, row + 32) for r in range(16)] for row in range(32)]
        assert np.array_equal(np.array(got), expected)


def test_offsets_are_the_addresses_of_the_layout() -> None:
    pages = Vectorized(None, None, 2, 64, 1, 128, 128, 8192, 8192)  # type: ignore[arg-type]
    lanes, places = k_lanes(), []
    for strip, step, pack in k_reads():
        for lane in range(64):
            key = 32 * strip + strip_order(lane % 32)
            for byte in range(16):
                dim = 64 * step + 32 * pack + 16 * (lane // 32) + byte
                places.append(TRAITS.k_offset(strip, step, pack) + int(lanes[lane]) + byte)
                assert places[-1] == pages.k_offset(key // 64, key % 64, 0, dim) == k_place(key, dim)
    assert sorted(places) == list(range(TRAITS.k_tile_bytes)), "K is not read exactly once"
    lanes, places = v_lanes(), []
    for step, strip, pack in v_reads():
        for lane in range(64):
            dim = 32 * strip + strip_order(lane % 32)
            for byte in range(16):
                key = 64 * step + 32 * pack + 16 * (lane // 32) + byte
                places.append(TRAITS.v_offset(step, strip, pack) + int(lanes[lane]) + byte)
                assert places[-1] == pages.v_offset(key // 64, key % 64, 0, dim) == v_place(key, dim)
    assert sorted(places) == list(range(TRAITS.v_tile_bytes)), "V is not read exactly once"


def test_reads_are_free_of_bank_conflicts() -> None:
    assert sorted(lane for phase in PHASES for lane in phase) == list(range(64))
    reads = [TRAITS.k_offset(*where) + k_lanes() for where in k_reads()]
    reads += [TRAITS.v_offset(*where) + v_lanes() for where in v_reads()]
    for addresses in reads:
        assert not (addresses % 16).any()
        for phase in PHASES:
            slots = addresses[phase] // 16 % 16
            assert len(set(slots.tolist())) == 16, "two lanes of a phase read one bank"


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_lds_is_two_tiles_of_k_and_three_of_v() -> None:
    assert TRAITS.k_tile_bytes == TRAITS.v_tile_bytes == 128 * 128
    assert TRAITS.lds_bytes == 5 * 128 * 128 <= 163_840
    # A slot's number is a mask in K's ring, and each wave loads whole instructions of a page.
    assert TRAITS.k_slots & (TRAITS.k_slots - 1) == 0
    assert TRAITS.dma_bytes == 1024
    assert TRAITS.k_page_bytes % (TRAITS.waves * TRAITS.dma_bytes) == 0


def test_a_ring_beyond_the_lds_is_refused() -> None:
    class Deep(Traits):
        v_slots = 8

    class Deeper(Traits):
        v_slots = 9

    assert Deep("vectorized", 64, 128, 128, "block", True).lds_bytes == 163_840
    with pytest.raises(ValueError, match="163840"):
        Deeper("vectorized", 64, 128, 128, "block", True)


def test_registers_leave_room_for_two_waves_a_simd() -> None:
    assert TRAITS.waves == 8
    assert TRAITS.threads == 512
    assert TRAITS.tile_rows == 256
    assert TRAITS.registers == 512 // 2


@pytest.mark.parametrize("threshold", [1, 2, 3, 4])
def test_lift_and_threshold_end_at_the_largest_e4m3_value(threshold: int) -> None:
    traits = Traits("vectorized", 64, 128, 128, "csr", False, threshold=threshold)
    assert 2.0**traits.lift * 2**threshold == pytest.approx(448, rel=1e-15)
    assert traits.lift + traits.threshold <= math.log2(448)
    nearest = min(e4m3_values().nan_to_num(0.0).tolist(), key=lambda value: abs(value - 2.0**traits.lift))
    assert 2.0**traits.lift == pytest.approx(nearest, rel=1e-15), "a uniform row would be rounded"


@pytest.mark.parametrize("threshold", [5, 8, 0, -1, 3.5, None])
def test_other_thresholds_are_refused(threshold: object) -> None:
    with pytest.raises(ValueError, match="threshold"):
        Traits("vectorized", 64, 128, 128, "block", True, threshold=threshold)  # type: ignore[arg-type]


def test_a_lift_beyond_the_threshold_is_refused() -> None:
    # Lift 8 with threshold 4 saturates: the rule must hold for the sum, not only for the threshold.
    class Lifted(Traits):
        lift = 8.0  # type: ignore[assignment]

    with pytest.raises(ValueError, match="lift"):
        Lifted("vectorized", 64, 128, 128, "block", True)


def test_floor_lies_below_every_dot_product() -> None:
    least = -128 * 448.0 * 448.0
    assert 4 * least < TRAITS.floor < least
    assert float(np.float32(TRAITS.floor)) == TRAITS.floor
    assert math.isfinite(TRAITS.floor)


# -- what is compiled in ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"layout": "linear", "page": 1},
        {"page": 16},
        {"page": 1024},
        {"head_dim": 192},
        {"head_dim_v": 192},
        {"table": "slots"},
    ],
    ids=str,
)
def test_what_does_not_exist_is_refused(changed: dict[str, object]) -> None:
    plain: dict[str, object] = {"layout": "vectorized", "page": 64, "head_dim": 128, "head_dim_v": 128}
    with pytest.raises(ValueError, match="accepted"):
        Traits(**{**plain, "table": "block", "lse": True, **changed})  # type: ignore[arg-type]


def test_each_specialisation_has_a_name_of_its_own() -> None:
    every = [
        Traits("vectorized", 64, 128, 128, table, lse, packed_f32=packed, threshold=threshold)
        for table in ("block", "csr")
        for lse in (False, True)
        for packed in (False, True)
        for threshold in (3, 4)
    ]
    assert len(set(every)) == len(every)
    assert len({traits.name for traits in every if not traits.packed_f32 and traits.threshold == 4}) == 4
    assert all(traits.name.isidentifier() for traits in every)


# -- query tiles ------------------------------------------------------------------------------------------------------


def test_reciprocal_divides_every_row_exactly() -> None:
    rows = np.arange(TRAITS.tile_rows, dtype=np.int64)
    for group in range(1, TRAITS.tile_rows + 1):
        products = rows * group_reciprocal(TRAITS, group)
        assert products.max() < 2**31, "beyond the kernel's 32-bit product"
        assert np.array_equal(products >> 16, rows // group), group


def test_positions_are_as_many_as_fit() -> None:
    for group in range(1, TRAITS.tile_rows + 1):
        positions = positions_per_tile(TRAITS, group)
        assert positions >= 1
        assert positions * group <= TRAITS.tile_rows < (positions + 1) * group


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 24, 3, 6, 12])
@pytest.mark.parametrize(("ranks", "requests"), [(1, 1), (5, 1), (1, 7), (4, 3)])
def test_workgroup_ids(ranks: int, requests: int, heads: int) -> None:
    ids = {
        (rank, request, head): workgroup_id(rank, request, head, requests, heads)
        for rank in range(ranks)
        for request in range(requests)
        for head in range(heads)
    }
    assert sorted(ids.values()) == list(range(ranks * requests * heads)), "not a bijection"
    # HIP numbers workgroups x fastest, then y, then z, of a grid (heads, requests, ranks).
    assert all(number == head + heads * (request + requests * rank) for (rank, request, head), number in ids.items())
    share = math.gcd(heads, numbers.XCDS)
    for head in range(heads):
        met = {number % share for (_, _, other), number in ids.items() if other == head}
        assert len(met) == 1, "one KV head's workgroups lie on XCDs that do not share its pages"
    # Rank 0 is a request's last query tile, which sees most keys: all tiles of a rank before those of the next.
    for rank in range(1, ranks):
        before = [number for (other, _, _), number in ids.items() if other < rank]
        assert max(before) < min(number for (other, _, _), number in ids.items() if other == rank)


def test_every_xcd_has_its_share_of_every_request() -> None:
    for heads in (8, 16):
        for request in range(3):
            xcds = [workgroup_id(0, request, head, 3, heads) % 8 for head in range(heads)]
            assert sorted(xcds) == sorted(list(range(8)) * (heads // 8))
