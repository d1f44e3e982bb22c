"""Exchange between lanes, DPP, SDWA, and moves to AGPRs, executed from ISA text, against scalar Python."""

import numpy as np
import pytest

from op_tests.emulator_text import LANES, M64, PREFILL, operand_table, run_text, signed

CASES = 4
SOME_LANES = 0xF0F0_1234_8000_0001
MASKS = {"all lanes": M64, "some lanes": SOME_LANES}
ROWS = (
    *("v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32", "v_permlane16_swap_b32", "v_permlane32_swap_b32"),
    *("v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"),
)


def words(count=1, cases=CASES):
    return [column.reshape(cases, LANES) for column in operand_table(count, cases * LANES, seed=5)]


def exec_of(mask):
    return {"exec": np.array([mask], np.uint64)}


@pytest.mark.parametrize("mask", [M64, SOME_LANES, 1 << 63, 0xFFFF0000_00000000, 0])
def test_readfirstlane_takes_the_lowest_active_lane(mask):
    (a,) = words()
    got = run_text("    v_readfirstlane_b32 s30, v10", ["s30"], vectors={10: a}, scalars=exec_of(mask))["s30"]
    lane = next((lane for lane in range(LANES) if mask >> lane & 1), 0)
    np.testing.assert_array_equal(got, a[:, lane])


@pytest.mark.parametrize("mask", [M64, 1 << 5])
def test_readlane_and_writelane_ignore_exec(mask):
    a, b = words(2)
    which = np.array([0, 1, 63, 64 + 17], np.uint32)
    value = b[:, 0].copy()
    got = run_text(
        "    v_readlane_b32 s30, v10, s20\n    v_readlane_b32 s31, v10, 33\n    s_mov_b32 m0, s20\n    s_nop 4\n"
        "    v_writelane_b32 v11, s21, m0\n    v_writelane_b32 v12, 7, 62",
        ["s30", "s31", "v11", "v12"],
        vectors={10: a, 11: b, 12: a},
        scalars={20: which, 21: value, **exec_of(mask)},
    )
    lanes = which % LANES
    np.testing.assert_array_equal(got["s30"], a[np.arange(CASES), lanes])
    np.testing.assert_array_equal(got["s31"], a[:, 33])
    want = b.copy()
    want[np.arange(CASES), lanes] = value
    np.testing.assert_array_equal(got["v11"], want)
    want = a.copy()
    want[:, 62] = 7
    np.testing.assert_array_equal(got["v12"], want)


@pytest.mark.parametrize("width", [16, 32])
def test_permlane_swap_exchanges_odd_groups_of_one_with_even_groups_of_the_other(width):
    a, b = words(2)
    got = run_text(f"    v_permlane{width}_swap_b32_e32 v10, v11", ["v10", "v11"], vectors={10: a, 11: b})
    first, second = a.copy(), b.copy()
    for low in range(0, LANES, 2 * width):
        for lane in range(low, low + width):
            # Lane of the second register <-> lane + width of the first.
            first[:, lane + width], second[:, lane] = b[:, lane], a[:, lane + width]
    np.testing.assert_array_equal(got["v10"], first)
    np.testing.assert_array_equal(got["v11"], second)


def test_moves_between_the_halves_of_the_register_file():
    a, b = words(2)
    got = run_text(
        "    v_accvgpr_write_b32 a3, v10\n    v_accvgpr_mov_b32 a4, a2\n    v_accvgpr_read_b32 v30, a3\n"
        "    v_accvgpr_write_b32 a5, 1.0\n    v_accvgpr_read_b32 v31, a2",
        ["v30", "v31", "a2", "a3", "a4", "a5", "v10"],
        vectors={10: a, "a2": b},
    )
    for name, want in (("v30", a), ("v31", b), ("a2", b), ("a3", a), ("a4", b), ("v10", a)):
        np.testing.assert_array_equal(got[name], want)
    assert (got["a5"] == 0x3F800000).all()


@pytest.mark.parametrize("text", ["v_accvgpr_write_b32 a3, v10", "v_accvgpr_mov_b32 a3, a2"])
def test_moves_to_agprs_obey_exec(text):
    a, b = words(2)
    got = run_text(f"    {text}", ["a3"], vectors={10: a, "a2": b}, scalars=exec_of(SOME_LANES))["a3"]
    active = np.array([SOME_LANES >> lane & 1 for lane in range(LANES)], bool)
    np.testing.assert_array_equal(got, np.where(active, a if "v10" in text else b, PREFILL))


# -- DPP: the first source comes from another lane ---------------------------------------------------------------------


def within(width, move):
    """Source lane in groups of `width`; None where `move` leaves the group."""

    def source(lane):
        place = move(lane % width)
        return lane - lane % width + place if 0 <= place < width else None

    return source


CONTROLS = {
    "quad_perm:[1,0,3,2]": within(4, lambda n: (1, 0, 3, 2)[n]),
    "quad_perm:[3,3,0,1]": within(4, lambda n: (3, 3, 0, 1)[n]),
    "row_shl:1": within(16, lambda n: n + 1),
    "row_shl:15": within(16, lambda n: n + 15),
    "row_shr:1": within(16, lambda n: n - 1),
    "row_shr:8": within(16, lambda n: n - 8),
    "row_ror:1": within(16, lambda n: (n - 1) % 16),
    "row_ror:12": within(16, lambda n: (n - 12) % 16),
    "wave_shl:1": within(64, lambda n: n + 1),
    "wave_rol:1": within(64, lambda n: (n + 1) % 64),
    "wave_shr:1": within(64, lambda n: n - 1),
    "wave_ror:1": within(64, lambda n: (n - 1) % 64),
    "row_mirror": within(16, lambda n: 15 - n),
    "row_half_mirror": within(8, lambda n: 7 - n),
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane > 15 else None,
    "row_bcast:31": lambda lane: 31 if lane > 31 else None,
    "row_newbcast:0": within(16, lambda n: 0),
    "row_newbcast:13": within(16, lambda n: 13),
}


def dpp(control, source, old, mask, *, row_mask=0xF, bank_mask=0xF, bound=False, combine=lambda moved, lane: moved):
    """One wave's result, lane by lane."""
    result = []
    for lane in range(LANES):
        place = CONTROLS[control](lane)
        readable = place is not None and mask >> place & 1
        enabled = mask >> lane & 1 and row_mask >> lane // 16 & 1 and bank_mask >> lane % 16 // 4 & 1
        if not enabled or not (readable or bound):
            result.append(old[lane])
        else:
            result.append(combine(source[place] if readable else 0, lane))
    return result


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bound", ["", " bound_ctrl:0"])
@pytest.mark.parametrize("control", CONTROLS)
def test_dpp_controls(control, bound, mask):
    a, old = words(2)
    text = f"    v_mov_b32_dpp v30, v10 {control} row_mask:0xf bank_mask:0xf{bound}"
    got = run_text(text, ["v30"], vectors={10: a, 30: old}, scalars=exec_of(MASKS[mask]))["v30"]
    for case in range(CASES):
        want = dpp(control, a[case].tolist(), old[case].tolist(), MASKS[mask], bound=bool(bound))
        assert got[case].tolist() == want


@pytest.mark.parametrize(("row_mask", "bank_mask"), [(0xA, 0xF), (0xC, 0xF), (0xF, 0x5), (0x3, 0x8), (0, 0xF)])
def test_dpp_masks_switch_rows_and_banks_of_the_result_off(row_mask, bank_mask):
    a, b, old = words(3)
    text = f"    v_add_u32_dpp v30, v10, v11 row_ror:4 row_mask:{row_mask:#x} bank_mask:{bank_mask:#x}"
    got = run_text(text.replace("row_ror:4", "row_ror:12"), ["v30"], vectors={10: a, 11: b, 30: old})["v30"]
    for case in range(CASES):
        add = lambda moved, lane, case=case: (moved + int(b[case, lane])) & 0xFFFFFFFF  # noqa: E731
        want = dpp(
            "row_ror:12", a[case].tolist(), old[case].tolist(), M64, row_mask=row_mask, bank_mask=bank_mask, combine=add
        )
        assert got[case].tolist() == want


def test_dpp_moves_only_the_first_source_and_takes_sign_modifiers():
    values = (np.arange(CASES * LANES, dtype=np.float32) - 100).reshape(CASES, LANES)
    other = (values * 0.5 + 3).astype(np.float32)
    got = run_text(
        "    v_sub_f32_dpp v30, -v10, |v11| row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:0",
        ["v30"],
        vectors={10: values.view(np.uint32), 11: other.view(np.uint32)},
    )["v30"].view(np.float32)
    for case, lane in np.ndindex(CASES, LANES):
        moved = values[case, lane - 1] if lane % 16 else 0.0
        assert got[case, lane] == -moved - abs(other[case, lane])


def test_dpp_of_a_select_and_of_a_multiply_add():
    a, b = words(2)
    chosen = 0x5555_0000_FFFF_0F0F
    got = run_text(
        "    v_cndmask_b32_dpp v30, v10, v11, vcc quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf",
        ["v30"],
        vectors={10: a, 11: b},
        scalars={"vcc": np.array([chosen], np.uint64)},
    )["v30"]
    for case, lane in np.ndindex(CASES, LANES):
        assert got[case, lane] == (b[case, lane] if chosen >> lane & 1 else a[case, lane ^ 1])
    x = np.arange(CASES * LANES, dtype=np.float32).reshape(CASES, LANES)
    got = run_text(
        "    v_fmac_f32_dpp v12, v10, v11 row_mirror row_mask:0xf bank_mask:0xf",
        ["v12"],
        vectors={10: x.view(np.uint32), 11: (x + 1).view(np.uint32), 12: (x + 2).view(np.uint32)},
    )["v12"].view(np.float32)
    for case, lane in np.ndindex(CASES, LANES):
        mirrored = lane - lane % 16 + 15 - lane % 16
        assert got[case, lane] == x[case, mirrored] * (x[case, lane] + 1) + x[case, lane] + 2


# -- SDWA: bytes and words of sources and result -----------------------------------------------------------------------

PARTS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}
PARTS["DWORD"] = (0, 32)
UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")


def part(value, selection, sign=False):
    shift, width = PARTS[selection]
    value = value >> shift & (1 << width) - 1
    return signed(value, width) & 0xFFFFFFFF if sign else value


def put(old, value, selection, unused):
    shift, width = PARTS[selection]
    mask = (1 << width) - 1
    if unused == "UNUSED_PRESERVE":
        return old & ~(mask << shift) & 0xFFFFFFFF | (value & mask) << shift
    if unused == "UNUSED_SEXT":
        # The bits above take the sign; those below are 0.
        return (signed(value & mask, width) << shift) & 0xFFFFFFFF
    return (value & mask) << shift


@pytest.mark.parametrize("selection", PARTS)
@pytest.mark.parametrize("sign", [False, True], ids=["", "sext"])
def test_sdwa_sources(selection, sign):
    a, b = words(2)
    for position in (0, 1):
        names = [f"v{10 + k}" if k != position or not sign else f"sext(v{10 + k})" for k in (0, 1)]
        picks = ["DWORD", "DWORD"]
        picks[position] = selection
        text = (
            f"    v_add_u32_sdwa v30, {names[0]}, {names[1]} dst_sel:DWORD dst_unused:UNUSED_PAD "
            f"src0_sel:{picks[0]} src1_sel:{picks[1]}"
        )
        got = run_text(text, ["v30"], vectors={10: a, 11: b})["v30"]
        for case, lane in np.ndindex(CASES, LANES):
            sources = [int(a[case, lane]), int(b[case, lane])]
            sources[position] = part(sources[position], selection, sign)
            assert got[case, lane] == sum(sources) & 0xFFFFFFFF


@pytest.mark.parametrize("unused", UNUSED)
@pytest.mark.parametrize("selection", PARTS)
def test_sdwa_results(selection, unused):
    a, b, old = words(3)
    text = f"    v_or_b32_sdwa v30, v10, v11 dst_sel:{selection} dst_unused:{unused} src0_sel:WORD_1 src1_sel:BYTE_0"
    got = run_text(text, ["v30"], vectors={10: a, 11: b, 30: old}, scalars=exec_of(SOME_LANES))["v30"]
    for case, lane in np.ndindex(CASES, LANES):
        value = part(int(a[case, lane]), "WORD_1") | part(int(b[case, lane]), "BYTE_0")
        want = put(int(old[case, lane]), value, selection, unused) if SOME_LANES >> lane & 1 else old[case, lane]
        assert got[case, lane] == want
