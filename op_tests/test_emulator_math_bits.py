"""Integer instructions, lane by lane against the manual's pseudocode in Python integers."""

from collections.abc import Callable

import numpy as np
import pytest

from aiter_paged_fp8.emulator.math import bits

RNG = np.random.default_rng(11)
M32 = 0xFFFFFFFF
EDGES = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, M32, 0x00FF00FF]


def operands(count: int) -> list[np.ndarray]:
    """[5, 64] operands of which a third come from values where something changes."""
    out = []
    for _ in range(count):
        wide = RNG.integers(0, 2**32, (5, 64), dtype=np.uint32)
        edge = RNG.choice(np.array(EDGES, np.uint32), (5, 64))
        out.append(np.where(RNG.random((5, 64)) < 0.35, edge, wide))
    return out


def signed(value: int, width: int = 32) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def clip(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def byte(value: int, n: int) -> int:
    return value >> 8 * n & 0xFF


def perm(a: int, b: int, s: int) -> int:
    data, out = a << 32 | b, 0
    for n in range(4):
        select = byte(s, n)
        if select >= 13:
            picked = 0xFF
        elif select == 12:
            picked = 0
        elif select >= 8:
            picked = 0xFF * (byte(data, 2 * select - 15) >> 7)
        else:
            picked = byte(data, select)
        out |= picked << 8 * n
    return out


def bfe_i(a: int, b: int, c: int) -> int:
    width = c & 31
    return signed(signed(a) >> (b & 31), width) & M32 if width else 0


def leading(a: int) -> int:
    return 32 - a.bit_length() if a else M32


def leading_sign(a: int) -> int:
    for i in range(1, 32):
        if a >> (31 - i) & 1 != a >> 31:
            return i
    return M32


def pack2(low: int, high: int, width: int) -> int:
    mask = (1 << width) - 1
    return (low & mask) | (high & mask) << width


CASES: dict[str, Callable[..., int]] = {
    "perm_b32": perm,
    "bfe_u32": lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1),
    "bfe_i32": bfe_i,
    "bfi_b32": lambda a, b, c: (a & b) | (~a & c & M32),
    "bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31) & M32,
    "alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31) & M32,
    "alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3) & M32,
    "lerp_u8": lambda a, b, c: sum((byte(a, n) + byte(b, n) + (byte(c, n) & 1)) // 2 << 8 * n for n in range(4)),
    "sad_u8": lambda a, b, c: (c + sum(abs(byte(a, n) - byte(b, n)) for n in range(4))) & M32,
    "sad_hi_u8": lambda a, b, c: ((sum(abs(byte(a, n) - byte(b, n)) for n in range(4)) << 16) + c) & M32,
    "sad_u16": lambda a, b, c: (c + abs((a & 0xFFFF) - (b & 0xFFFF)) + abs((a >> 16) - (b >> 16))) & M32,
    "sad_u32": lambda a, b, c: (abs(a - b) + c) & M32,
    "msad_u8": lambda a, b, c: (c + sum(abs(byte(a, n) - byte(b, n)) for n in range(4) if byte(b, n))) & M32,
    "popcount": lambda a: bin(a).count("1"),
    "bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "ffbh_u32": leading,
    "ffbl_b32": lambda a: (a & -a).bit_length() - 1 if a else M32,
    "ffbh_i32": leading_sign,
    "prng_b32": lambda a: (a << 1 & M32) ^ (197 if a >> 31 else 0),
    "ashr_pk_i8_i32": lambda a, b, c: pack2(*(clip(signed(x) >> (c & 31), -128, 127) for x in (a, b)), 8),
    "ashr_pk_u8_i32": lambda a, b, c: pack2(*(clip(signed(x) >> (c & 31), 0, 255) for x in (a, b)), 8),
    "sat_pk_u8_i16": lambda a: pack2(*(clip(signed(x, 16), 0, 255) for x in (a, a >> 16)), 8),
    "cvt_pk_u16_u32": lambda a, b: pack2(min(a, 0xFFFF), min(b, 0xFFFF), 16),
    "cvt_pk_i16_i32": lambda a, b: pack2(*(clip(signed(x), -32768, 32767) for x in (a, b)), 16),
    "mul_hi_u32": lambda a, b: a * b >> 32,
    "mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32 & M32,
    "signed_24": lambda a: signed(a, 24) & M32,
    "add_sat_i32": lambda a, b: clip(signed(a) + signed(b), -(2**31), 2**31 - 1) & M32,
    "sub_sat_i32": lambda a, b: clip(signed(a) - signed(b), -(2**31), 2**31 - 1) & M32,
    "dot4_i32_i8": lambda a, b, c: (c + sum(signed(byte(a, n), 8) * signed(byte(b, n), 8) for n in range(4))) & M32,
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_integer_instruction(name: str) -> None:
    scalar = CASES[name]
    arguments = operands(scalar.__code__.co_argcount)
    if name == "perm_b32":
        arguments[2] = arguments[2] & np.uint32(0x0F0F0F0F)
    got = getattr(bits, name)(*arguments)
    want = [scalar(*(int(v) for v in row)) for row in zip(*(a.ravel() for a in arguments), strict=True)]
    assert got.ravel().tolist() == want


def test_byte_permute_with_one_selector_for_all_lanes() -> None:
    a, b, _ = operands(3)
    for selector in (0x07060302, 0x0C0D0B08, 0x03020706, 0x0A090C01, 0xFF040C00):
        got = bits.perm_b32(a, b, np.uint32(selector))
        assert got.ravel().tolist() == [perm(int(x), int(y), selector) for x, y in zip(a.flat, b.flat, strict=True)]


def test_every_truth_table_of_bitop3() -> None:
    a, b, c = (np.array([[v]], np.uint32) for v in (0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA))
    for table in range(256):
        want = sum((table >> (i % 8) & 1) << i for i in range(32))
        assert int(bits.bitop3_b32(a, b, c, table)[0, 0]) == want, hex(table)


def test_manual_examples_of_first_bit_instructions() -> None:
    def one(name: str, value: int) -> int:
        return int(getattr(bits, name)(np.array([[value]], np.uint32))[0, 0])

    assert [one("ffbh_u32", v) for v in (0, 0x800000FF, 0x100000FF, 0xFFFF, 1)] == [M32, 0, 3, 16, 31]
    assert [one("ffbl_b32", v) for v in (0, 0xFF000001, 0xFF000008, 0xFFFF0000, 1 << 31)] == [M32, 0, 3, 16, 31]
    assert [one("ffbh_i32", v) for v in (0x40000000, 0xFFFFFFFE, M32)] == [1, 31, M32]


def test_lane_number_and_rank_by_mbcnt() -> None:
    ones = np.full((2, 1), M32, np.uint32)
    lane = bits.mbcnt_hi(ones, bits.mbcnt_lo(ones, np.zeros((2, 64), np.uint32)))
    assert lane.tolist() == [list(range(64))] * 2
    mask = 0xA5A5_0FF0_1234_8001
    low, high = np.uint32(mask & M32), np.uint32(mask >> 32)
    rank = bits.mbcnt_hi(high, bits.mbcnt_lo(low, np.uint32(3)))
    assert rank.tolist() == [3 + bin(mask & ((1 << n) - 1)).count("1") for n in range(64)]
