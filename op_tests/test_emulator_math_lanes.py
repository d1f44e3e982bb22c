"""Which lane each lane of a wave hears: held against the manual's tables, written out lane by lane."""

import numpy as np
import pytest

from aiter_paged_fp8.emulator.math import lanes

RNG = np.random.default_rng(7)


def words(*shape: int) -> np.ndarray:
    return RNG.integers(0, 2**32, shape, dtype=np.uint32)


def masks(*shape: int) -> np.ndarray:
    return RNG.random(shape) < 0.7


def dpp_by_the_table(ctrl: int, n: int) -> int | None:
    """Table 94, one lane at a time; None where there is no source lane."""
    row, low = n & ~15, n & 15
    if ctrl < 0x100:
        return (n & 0x3C) + (ctrl >> (2 * (n % 4)) & 3)
    count = ctrl & 15
    kind = ctrl & 0x1F0
    if kind == 0x100:
        return n + count if low < 16 - count else None
    if kind == 0x110:
        return n - count if low >= count else None
    if kind == 0x120:
        return n - count if low >= count else n + 16 - count
    if kind == 0x150:
        return row + count
    return {
        0x130: n + 1 if n < 63 else None,
        0x134: n + 1 if n < 63 else 0,
        0x138: n - 1 if n > 0 else None,
        0x13C: n - 1 if n > 0 else 63,
        0x140: row + 15 - low,
        0x141: (n & ~7) + 7 - (n & 7),
        0x142: (n & 0x30) - 1 if n > 15 else None,
        0x143: (n & 0x20) - 1 if n > 31 else None,
    }[ctrl]


LEGAL = [
    *range(0x100),
    *(base + count for base in (0x100, 0x110, 0x120) for count in range(1, 16)),
    *(0x130, 0x134, 0x138, 0x13C, 0x140, 0x141, 0x142, 0x143),
    *range(0x150, 0x160),
]


def test_every_dpp_control_reads_the_lane_of_the_table() -> None:
    for ctrl in LEGAL:
        source, valid = lanes.dpp_source(ctrl)
        got = [int(s) if v else None for s, v in zip(source, valid, strict=True)]
        assert got == [dpp_by_the_table(ctrl, n) for n in range(64)], hex(ctrl)


@pytest.mark.parametrize("ctrl", [0x100, 0x110, 0x120, 0x131, 0x144, 0x160, 0x1FF])
def test_reserved_dpp_controls_are_refused(ctrl: int) -> None:
    with pytest.raises(ValueError, match="reserved"):
        lanes.dpp_source(ctrl)


@pytest.mark.parametrize("bound_ctrl", [False, True])
@pytest.mark.parametrize("ctrl", [0xB1, 0x104, 0x118, 0x124, 0x142, 0x143, 0x15A])
def test_dpp_reads_zero_or_writes_nothing_where_no_live_lane_speaks(ctrl: int, bound_ctrl: bool) -> None:
    values, live = words(5, 64), masks(5, 64)
    operand, write = lanes.dpp_fetch(values, live, ctrl, row_mask=0xA, bank_mask=0x7, bound_ctrl=bound_ctrl)
    for wave in range(5):
        for lane in range(64):
            source = dpp_by_the_table(ctrl, lane)
            heard = source is not None and live[wave, source]
            enabled = 0xA >> (lane // 16) & 1 and 0x7 >> (lane % 16 // 4) & 1 and live[wave, lane]
            assert write[wave, lane] == bool(enabled and (heard or bound_ctrl))
            if write[wave, lane]:
                assert operand[wave, lane] == (values[wave, source] if heard else 0)


def test_permlane32_swaps_the_upper_half_of_the_first_register_with_the_lower_half_of_the_second() -> None:
    dst, src = words(3, 64), words(3, 64)
    new_dst, new_src = lanes.permlane_swap(dst, src, 32)
    assert (new_dst == np.concatenate([dst[:, :32], src[:, :32]], axis=1)).all()
    assert (new_src == np.concatenate([dst[:, 32:], src[:, 32:]], axis=1)).all()


def test_permlane16_swaps_odd_rows_of_the_first_register_with_even_rows_of_the_second() -> None:
    dst, src = words(3, 64), words(3, 64)
    want_dst, want_src = dst.copy(), src.copy()
    for wave in range(3):
        for p in range(2):
            for i in range(16):
                a, b = 32 * p + i, 32 * p + 16 + i
                want_src[wave, a], want_dst[wave, b] = dst[wave, b], src[wave, a]
    new_dst, new_src = lanes.permlane_swap(dst, src, 16)
    assert (new_dst == want_dst).all()
    assert (new_src == want_src).all()


def test_bpermute_pulls_and_permute_pushes_with_the_highest_sender_winning() -> None:
    address = RNG.integers(0, 1 << 12, (6, 64), dtype=np.uint32)
    data, live = words(6, 64), masks(6, 64)
    pulled = lanes.ds_bpermute(address, data, live, 12)
    pushed = lanes.ds_permute(address, data, live, 12)
    for wave in range(6):
        inbox = [0] * 64
        for lane in range(64):
            other = (int(address[wave, lane]) + 12) // 4 % 64
            assert pulled[wave, lane] == (data[wave, other] if live[wave, other] else 0)
            if live[wave, lane]:
                inbox[other] = int(data[wave, lane])
        assert pushed[wave].tolist() == inbox


def swizzle_by_the_manual(offset: int, i: int) -> int:
    mask = offset & 31
    if offset >= 0xE000:
        reverse = int(f"{i & 31:05b}"[::-1], 2)
        j = reverse >> bin(mask).count("1") | i & mask
    elif offset >= 0xC000:
        rotate = offset >> 5 & 31
        if offset >> 10 & 1:
            rotate = -rotate
        # The pseudocode's operand is the thread within its half: the manual's examples wrap at 32.
        j = i & mask | (i + rotate) & 31 & ~mask
    elif offset & 0x8000:
        return i & ~3 | offset >> 2 * (i & 3) & 3
    else:
        j = (i & 31 & mask | offset >> 5 & 31) ^ (offset >> 10 & 31)
    return j & 31 | i & 32


def test_ds_swizzle_modes() -> None:
    offsets = [*RNG.integers(0, 1 << 16, 600).tolist(), 0x041F, 0x401F, 0x801B, 0xE000, 0xE010, 0xE01F, 0xC020, 0xC420]
    for offset in offsets:
        assert lanes.ds_swizzle_source(offset).tolist() == [swizzle_by_the_manual(offset, i) for i in range(64)]
    # The manual's printed examples, threads numbered from 1.
    fft = "1 11 9 19 5 15 d 1d 3 13 b 1b 7 17 f 1f 2 12 a 1a 6 16 e 1e 4 14 c 1c 8 18 10 20"
    rotate_right_masked = "1f 2 1 4 3 6 5 8 7 a 9 c b e d 10 f 12 11 14 13 16 15 18 17 1a 19 1c 1b 1e 1d 20"
    for offset, printed in ((0xE000, fft), (0xC421, rotate_right_masked)):
        assert (lanes.ds_swizzle_source(offset)[:32] + 1).tolist() == [int(n, 16) for n in printed.split()]


def test_swizzle_reads_zero_from_disabled_lanes() -> None:
    data, live = words(4, 64), masks(4, 64)
    got = lanes.ds_swizzle(data, live, 0x401F)
    for wave in range(4):
        assert got[wave].tolist() == [int(data[wave, i ^ 16]) if live[wave, i ^ 16] else 0 for i in range(64)]


def test_lane_reads_and_writes() -> None:
    live = np.zeros((3, 64), bool)
    live[0, 5:], live[1, 63] = True, True
    assert lanes.first_lane(live).tolist() == [5, 63, 0]
    values = words(3, 64)
    assert lanes.read_lane(values, 70).tolist() == values[:, 6].tolist()
    assert lanes.read_lane(values, np.array([0, 63, 65])).tolist() == [values[0, 0], values[1, 63], values[2, 1]]
    written = lanes.write_lane(values, 9, np.array([1, 2, 3], np.uint32))
    assert written[:, 9].tolist() == [1, 2, 3]
    assert (np.delete(written, 9, axis=1) == np.delete(values, 9, axis=1)).all()


def bits_of(registers: np.ndarray) -> int:
    return sum(int(r) << 32 * n for n, r in enumerate(registers))


def test_transpose_reads_of_bytes_and_halves() -> None:
    data = words(3, 2, 64)
    b8, b16 = lanes.transpose_read(data, 8), lanes.transpose_read(data, 16)
    for wave in range(3):
        run = [bits_of(data[wave, :, lane]) for lane in range(64)]
        for l in range(64):
            for n in range(8):
                source = 16 * (l // 16) + 2 * n + ((l >> 3) & 1)
                assert bits_of(b8[wave, :, l]) >> 8 * n & 0xFF == run[source] >> 8 * (l & 7) & 0xFF
            for n in range(4):
                source = 16 * (l // 16) + ((l >> 2) & 3) + 4 * n
                assert bits_of(b16[wave, :, l]) >> 16 * n & 0xFFFF == run[source] >> 16 * (l & 3) & 0xFFFF


@pytest.mark.parametrize(("bits", "registers"), [(4, 2), (6, 3)])
def test_transpose_reads_of_sixteen_small_elements_transpose_each_group_of_sixteen_lanes(
    bits: int, registers: int
) -> None:
    data = words(2, registers, 64)
    got = lanes.transpose_read(data, bits)
    mask = (1 << bits) - 1
    for wave in range(2):
        for l in range(64):
            for n in range(16):
                source = bits_of(data[wave, :, l & ~15 | n])
                assert bits_of(got[wave, :, l]) >> bits * n & mask == source >> bits * (l & 15) & mask


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_elements_are_packed_densely_from_bit_zero(bits: int) -> None:
    registers = words(2, 6, 64)
    elements = lanes.unpack_elements(registers, bits)
    whole = bits_of(registers[1, :, 17])
    assert elements[1, :, 17].tolist() == [whole >> at & ((1 << bits) - 1) for at in range(0, 192 - 192 % bits, bits)]
    assert (lanes.pack_elements(elements, bits) == registers).all()
