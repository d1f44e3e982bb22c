"""Matrix instructions: operands laid out element by element as the documents say, products exact or bounded."""

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest

from aiter_paged_fp8.emulator.math import mfma

RNG = np.random.default_rng(29)
WAVES = 3
DTYPES: dict[str, tuple[int, type]] = {
    "fp8": (8, ml_dtypes.float8_e4m3fn),
    "bf8": (8, ml_dtypes.float8_e5m2),
    "fp6": (6, ml_dtypes.float6_e2m3fn),
    "bf6": (6, ml_dtypes.float6_e3m2fn),
    "fp4": (4, ml_dtypes.float4_e2m1fn),
    "bf16": (16, ml_dtypes.bfloat16),
    "f16": (16, np.float16),
    "f32": (32, np.float32),
    "i8": (8, np.int8),
}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32}
Position = tuple[int, int, int]


def k_of_f8f6f4(rows: int, eight_bits: bool) -> Callable[[int, int], int]:
    """k of item t of a lane: 32x32x64 and 16x16x128."""
    if not eight_bits:
        return lambda lane, t: 32 * (lane // rows) + t
    if rows == 32:
        return lambda lane, t: 16 * (lane // 32) + 32 * (t // 16) + t % 16
    return lambda lane, t: 16 * (lane // 16) + 64 * (t // 16) + t % 16


def positions(rows: int, depth: int, blocks: int, f8f6f4_bits: int | None) -> Iterator[tuple[Position, int, int]]:
    """Every element (block, row, k) of A with its item and lane."""
    if f8f6f4_bits is not None:
        k_of = k_of_f8f6f4(rows, f8f6f4_bits == 8)
        for lane in range(64):
            for t in range(rows * depth // 64):
                yield (0, lane % rows, k_of(lane, t)), t, lane
        return
    # The manual's general input layout.
    k_l = depth // (64 // (rows * blocks))
    for b in range(blocks):
        for i in range(rows):
            for k in range(depth):
                yield (b, i, k), k % k_l, i + rows * (b + blocks * (k // k_l))


def result_position(rows: int, blocks: int, register: int, lane: int) -> Position:
    """Block, row and column of a result register."""
    if (rows, blocks) == (32, 1):
        return 0, 8 * (register // 4) + 4 * (lane // 32) + register % 4, lane % 32
    if (rows, blocks) == (16, 1):
        return 0, register + 4 * (lane // 16), lane % 16
    # The manual's general output layout, searched backwards.
    h = 4
    b_i = -(-64 // (rows * rows // h))
    m_i = 64 // b_i // rows
    g = rows // (h * m_i)
    for b in range(blocks):
        for i in range(rows):
            item = i % h + h * (i // (h * m_i) + g * (b // b_i))
            first = rows * (i // h % m_i + m_i * (b % b_i))
            if item == register and first <= lane < first + rows:
                return b, i, lane - first
    raise AssertionError("no element there")


def pack(codes: np.ndarray, rows: int, depth: int, blocks: int, bits: int, f8f6f4: bool) -> np.ndarray:
    """Registers [waves, n, 64] of the codes [waves, blocks, rows, depth]."""
    registers = rows * depth * blocks // 64 * bits // 32
    lanes = np.zeros((WAVES, 64), object)
    for (b, i, k), t, lane in positions(rows, depth, blocks, bits if f8f6f4 else None):
        for wave in range(WAVES):
            lanes[wave, lane] |= int(codes[wave, b, i, k]) << bits * t
    return np.stack([((lanes >> 32 * n) & 0xFFFFFFFF).astype(np.uint32) for n in range(registers)], axis=1)


def operand(name: str, shape: tuple[int, int, int], small: bool, f8f6f4: bool) -> tuple[np.ndarray, np.ndarray]:
    """Registers and values, [waves, blocks, rows, depth], of a random operand; small values make sums exact."""
    bits, dtype = DTYPES[name]
    rows, depth, blocks = shape
    full = (WAVES, blocks, rows, depth)
    if name == "i8":
        values = RNG.integers(-128, 128, full).astype(np.int8)
    elif small:
        values = RNG.choice(np.array([-4, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4]), full).astype(dtype)
    else:
        values = RNG.normal(size=full).astype(dtype)
    codes = values.view(UNSIGNED.get(bits, np.uint8))
    return pack(codes, *shape, bits, f8f6f4), values.astype(np.float64)


def accumulator(rows: int, blocks: int, integer: bool) -> tuple[np.ndarray, np.ndarray]:
    """Registers and matrices, [waves, blocks, rows, rows], of a random C."""
    registers = rows * rows * blocks // 64
    if integer:
        c = RNG.integers(-(2**31), 2**31, (WAVES, registers, 64)).astype(np.int32)
    else:
        c = (RNG.integers(-64, 64, (WAVES, registers, 64)) / 8).astype(np.float32)
    return c.view(np.uint32), unpack(c, rows, blocks)


def unpack(c: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    matrix = np.full((WAVES, blocks, rows, rows), np.nan)
    for register in range(c.shape[1]):
        for lane in range(64):
            block, row, column = result_position(rows, blocks, register, lane)
            matrix[:, block, row, column] = c[:, register, lane]
    assert not np.isnan(matrix).any()
    return matrix


ORDINARY = [
    *(f"v_mfma_f32_{s}_f32" for s in ("32x32x1_2b", "16x16x1_4b", "4x4x1_16b", "32x32x2", "16x16x4")),
    *(
        f"v_mfma_f32_{s}_{t}"
        for t in ("f16", "bf16")
        for s in ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x8", "16x16x16", "16x16x32", "32x32x16")
    ),
    *(f"v_mfma_f32_{s}_{a}_{b}" for s in ("16x16x32", "32x32x16") for a in ("fp8", "bf8") for b in ("fp8", "bf8")),
    *(
        f"v_mfma_i32_{s}_i8"
        for s in ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x16", "16x16x32", "16x16x64", "32x32x32")
    ),
]


@pytest.mark.parametrize("mnemonic", ORDINARY)
def test_layouts_and_products(mnemonic: str) -> None:
    instruction = mfma.parse(mnemonic)
    fields = mnemonic.split("_")
    rows, _, depth = map(int, fields[3].split("x"))
    blocks = int(fields[4][:-1]) if fields[4][0].isdigit() else 1
    shape = (rows, depth, blocks)
    assert (instruction.shape.rows, instruction.shape.depth, instruction.shape.blocks) == shape
    names = [field for field in fields[4:] if field in DTYPES]
    a_name, b_name = names[0], names[-1]
    assert (instruction.a, instruction.b) == (a_name, b_name)

    a, left = operand(a_name, shape, True, False)
    b, right = operand(b_name, shape, True, False)
    c, addend = accumulator(rows, blocks, a_name == "i8")
    got = mfma.mfma(a, b, c, shape=instruction.shape, a_type=a_name, b_type=b_name)
    want = np.einsum("wbik,wbjk->wbij", left, right) + addend
    if a_name == "i8":
        wrapped = (want.astype(np.int64) + 2**31) % 2**32 - 2**31
        assert (unpack(got.view(np.int32), rows, blocks) == wrapped).all()
    else:
        assert (unpack(got.view(np.float32), rows, blocks) == want).all()


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("a_name", mfma.F8F6F4_FORMATS)
@pytest.mark.parametrize("b_name", mfma.F8F6F4_FORMATS)
def test_f8f6f4_in_all_combinations_of_formats(rows: int, a_name: str, b_name: str) -> None:
    depth = 2048 // rows
    instruction = mfma.parse(f"v_mfma_f32_{rows}x{rows}x{depth}_f8f6f4")
    shape = (rows, depth, 1)
    a, left = operand(a_name, shape, True, True)
    b, right = operand(b_name, shape, True, True)
    c, addend = accumulator(rows, 1, False)
    got = mfma.mfma(a, b, c, shape=instruction.shape, a_type=a_name, b_type=b_name)
    want = np.einsum("wbik,wbjk->wbij", left, right) + addend
    assert (unpack(got.view(np.float32), rows, 1) == want).all()
    # A's and B's order of k is checked on its own: exchanged in both it would cancel.
    assert (mfma.operand_matrix(a, instruction.shape, mfma.ELEMENTS[a_name]) == left).all()


def test_format_numbers_of_f8f6f4() -> None:
    assert mfma.F8F6F4_FORMATS == ("fp8", "bf8", "fp6", "bf6", "fp4")


@pytest.mark.parametrize(
    "mnemonic", ["v_mfma_f32_32x32x64_f8f6f4", "v_mfma_f32_32x32x16_bf16", "v_mfma_f32_16x16x4_f32"]
)
def test_sums_are_accurate_to_f32(mnemonic: str) -> None:
    instruction = mfma.parse(mnemonic)
    s = instruction.shape
    name = instruction.a or "fp8"
    f8f6f4 = instruction.a is None
    a, left = operand(name, (s.rows, s.depth, 1), False, f8f6f4)
    b, right = operand(name, (s.rows, s.depth, 1), False, f8f6f4)
    c, addend = accumulator(s.rows, 1, False)
    got = unpack(mfma.mfma(a, b, c, shape=s, a_type=name, b_type=name).view(np.float32), s.rows, 1)
    want = np.einsum("wbik,wbjk->wbij", left, right) + addend
    size = np.einsum("wbik,wbjk->wbij", abs(left), abs(right)) + abs(addend)
    assert (abs(got - want) <= size * 2.0**-22).all()


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize(("a_name", "b_name"), [("fp8", "fp8"), ("bf8", "fp4"), ("fp6", "bf6")])
def test_block_scales_of_each_lane(rows: int, a_name: str, b_name: str) -> None:
    depth = 2048 // rows
    shape = mfma.parse(f"v_mfma_scale_f32_{rows}x{rows}x{depth}_f8f6f4").shape
    a, left = operand(a_name, (rows, depth, 1), True, True)
    b, right = operand(b_name, (rows, depth, 1), True, True)
    c, addend = accumulator(rows, 1, False)
    scales = RNG.integers(124, 131, (2, WAVES, 64, 4), dtype=np.uint8)
    registers = scales.view(np.uint32)[..., 0]
    for select_a, select_b in ((0, 0), (1, 3), (2, 0)):
        got = mfma.mfma_scale(
            a, b, c, *registers, shape=shape, a_type=a_name, b_type=b_name, select_a=select_a, select_b=select_b
        )
        sides = []
        for matrix, scale, select in ((left, scales[0], select_a), (right, scales[1], select_b)):
            scaled = matrix.copy()
            for lane in range(64):
                block = slice(32 * (lane // rows), 32 * (lane // rows) + 32)
                scaled[:, 0, lane % rows, block] *= 2.0 ** (scale[:, lane, select].astype(int) - 127)[:, None]
            sides.append(scaled)
        want = np.einsum("wbik,wbjk->wbij", *sides) + addend
        assert (unpack(got.view(np.float32), rows, 1) == want).all()


def test_unit_scales_change_nothing_and_extreme_ones_cancel() -> None:
    shape = mfma.Shape(32, 64)
    a, _ = operand("fp8", (32, 64, 1), True, True)
    b, _ = operand("fp8", (32, 64, 1), True, True)
    c, _ = accumulator(32, 1, False)
    types = {"shape": shape, "a_type": "fp8", "b_type": "fp8"}
    plain = mfma.mfma(a, b, c, **types)
    unit, up, down, nan = (np.uint32(code * 0x01010101) for code in (127, 254, 0, 255))
    assert (mfma.mfma_scale(a, b, c, unit, unit, **types) == plain).all()
    assert (mfma.mfma_scale(a, b, c, up, down, **types) == plain).all()
    assert np.isnan(mfma.mfma_scale(a, b, c, unit, nan, **types).view(np.float32)).all()


def test_a_nan_or_infinity_spoils_its_row_only() -> None:
    shape = mfma.Shape(32, 64)
    a, _ = operand("fp8", (32, 64, 1), True, True)
    b, _ = operand("fp8", (32, 64, 1), True, True)
    c = np.zeros((WAVES, 16, 64), np.uint32)
    a[0, 0, 5] = a[0, 0, 5] & 0xFFFFFF00 | 0x7F
    got = mfma.mfma(a, b, c, shape=shape, a_type="fp8", b_type="fp8").view(np.float32)
    bad = {(r, lane) for r in range(16) for lane in range(64) if result_position(32, 1, r, lane)[1] == 5}
    assert {(int(r), int(lane)) for r, lane in zip(*np.nonzero(np.isnan(got[0])), strict=True)} == bad
    assert not np.isnan(got[1:]).any()


def test_broadcast_modifiers_pick_lanes() -> None:
    registers = np.broadcast_to(np.arange(64, dtype=np.uint32), (1, 2, 64))
    lane = np.arange(64)
    assert (mfma.broadcast_a(registers, 2, 3)[0, 1] == lane % 16 + 48).all()
    assert (mfma.broadcast_a(registers, 0, 0)[0, 1] == lane).all()
    tables = [lane, lane % 32, lane % 32 + 32, (lane + 16) % 64, *(lane % 16 + 16 * n for n in range(4))]
    for blgp, want in enumerate(tables):
        assert (mfma.broadcast_b(registers, blgp)[0, 0] == want).all()


def test_constant_accumulators_broadcast() -> None:
    shape = mfma.Shape(32, 16)
    a, _ = operand("bf16", (32, 16, 1), True, False)
    zero = mfma.mfma(a, a, np.uint32(0), shape=shape, a_type="bf16", b_type="bf16")
    full = mfma.mfma(a, a, np.zeros((WAVES, 16, 64), np.uint32), shape=shape, a_type="bf16", b_type="bf16")
    assert (zero == full).all()


def test_strided_views_with_any_leading_axes() -> None:
    shape = mfma.Shape(32, 64)
    a, _ = operand("fp8", (32, 64, 1), True, True)
    c, _ = accumulator(32, 1, False)
    scale = RNG.integers(120, 130, (WAVES, 64)).astype(np.uint32)
    types = {"shape": shape, "a_type": "fp8", "b_type": "fp8"}
    # Registers first, as a register file has them, and two axes of waves.
    file = np.zeros((30, WAVES, 2, 64), np.uint32)
    file[3:11] = a.transpose(1, 0, 2)[:, :, None]
    file[11:27] = c.transpose(1, 0, 2)[:, :, None]
    operand_view, addend = np.moveaxis(file[3:11], 0, -2), np.moveaxis(file[11:27], 0, -2)
    got = mfma.mfma(operand_view, operand_view, addend, **types)
    assert (got == mfma.mfma(a, a, c, **types)[:, None]).all()
    scaled = mfma.mfma_scale(operand_view, operand_view, addend, scale[:, None], scale[:, None], **types)
    assert (scaled == mfma.mfma_scale(a, a, c, scale, scale, **types)[:, None]).all()


def test_result_matrix_reads_what_the_instruction_wrote() -> None:
    for shape in (mfma.Shape(32, 64), mfma.Shape(16, 128), mfma.Shape(4, 4, 16), mfma.Shape(16, 4, 4)):
        c, matrix = accumulator(shape.rows, shape.blocks, False)
        assert (mfma.result_matrix(c, shape).view(np.float32) == matrix).all()


@pytest.mark.parametrize(
    "mnemonic",
    ["v_mfma_f32_32x32x64_bf16", "v_mfma_f64_16x16x4_f64", "v_mfma_f32_16x16x64_f8f6f4", "v_mfma_f32_32x32x32_i8"],
)
def test_unknown_instructions_are_refused_by_name(mnemonic: str) -> None:
    with pytest.raises(ValueError, match=mnemonic):
        mfma.parse(mnemonic)
