"""Matrix instructions (chapter 7): operand layouts and products, all waves at once.

Operand and result are one reshape and one transposition of [registers, lanes] each; every axis of it is a factor of the
formulas below, so that the layouts are stated once.

A, and B with columns for rows. A lane holds row i = lane % M of block b = lane // M % blocks. The lanes that share a
row take turns along k, `run` elements at a time: with g = lane // (M * blocks), element t of a lane is
``k = run * (groups * (t // run) + g) + t % run``. For most formats a lane has one run; of 8-bit elements a run has at
most 16, so that the 32 bytes of a f8f6f4 operand are two (7.1.5.1).

C and D. Groups of four rows, one register each; `M_I` groups stand side by side across the lanes and `B_I` blocks after
those (7.1.4.2): register ``i % 4 + 4 * (i // (4 * M_I) + G * (b // B_I))`` of lane
``j + N * (i // 4 % M_I + M_I * (b % B_I))``.

Products of 16-bit and smaller formats are exact in f32. They are summed along k in f32 in the order of the host's
matrix product, and C is added last: nothing is documented of the hardware's order. With block scales, whose range
exceeds f32, the sum is taken in f64 and rounded once. Integer sums are exact. EXEC and MODE are ignored, as hardware
does.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiter_paged_fp8.emulator.math import LANES, U32
from aiter_paged_fp8.emulator.math.narrow import BF6, BF8, FP4, FP6, FP8, Narrow, decode_table, scale_table

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
A = TypeVar("A", bound=NDArray[Any])

_quietly = np.errstate(all="ignore")

# Rows of D in consecutive registers of a lane (H of 7.1.4.2).
_GROUP_HEIGHT = 4
# Consecutive k of 8-bit elements in a lane.
_LONGEST_RUN_8BIT = 16
# k elements that share a block scale.
SCALE_BLOCK = 32
# E8M0 of 1.0.
UNIT_SCALE = 0x7F


@dataclass(frozen=True)
class Element:
    """Element type of an A or B operand.

    Parameters
    ----------
    bits : int
    decode : callable
        Contiguous registers of one row, [..., n] uint32, to f32 values, [..., n * 32 / bits].
    """

    name: str
    bits: int
    decode: Callable[[U32], F32]


@cache
def _pair_table(form: Narrow) -> NDArray[np.uint64]:
    """Two f32 for every two codes that lie side by side, as one 64-bit word: half the lookups."""
    single = decode_table(form).astype(np.uint64)
    return (single[:, None] << np.uint64(32) | single[None, :]).ravel()


def _look_up_pairs(form: Narrow, pairs: NDArray[np.unsignedinteger]) -> F32:
    found: F32 = _pair_table(form).take(pairs).view(np.float32)
    return found


# Up to so many elements, looking up each beats pairs of them, whose table is as large as a core's second-level cache.
_FEW_ELEMENTS = 4096


def _from_8_bits(form: Narrow) -> Callable[[U32], F32]:
    single = decode_table(form).view(np.float32)

    def decode(words: U32) -> F32:
        codes = words.view(np.uint8)
        return single.take(codes) if codes.size <= _FEW_ELEMENTS else _look_up_pairs(form, words.view(np.uint16))

    return decode


def _from_6_bits(form: Narrow) -> Callable[[U32], F32]:
    def decode(words: U32) -> F32:
        # Three bytes are four elements.
        byte = words.view(np.uint8).reshape(*words.shape[:-1], -1, 3).astype(np.uint16)
        pairs = np.empty((*byte.shape[:-1], 2), np.uint16)
        pairs[..., 0] = byte[..., 0] | (byte[..., 1] & np.uint16(0xF)) << np.uint16(8)
        pairs[..., 1] = byte[..., 1] >> np.uint16(4) | byte[..., 2] << np.uint16(4)
        return _look_up_pairs(form, pairs.reshape(*words.shape[:-1], -1))

    return decode


def _from_4_bits(form: Narrow) -> Callable[[U32], F32]:
    return lambda words: _look_up_pairs(form, words.view(np.uint8))


def _from_bf16(words: U32) -> F32:
    pairs = np.empty((*words.shape, 2), np.uint32)
    np.left_shift(words, np.uint32(16), out=pairs[..., 0])
    np.bitwise_and(words, np.uint32(0xFFFF0000), out=pairs[..., 1])
    return pairs.reshape(*words.shape[:-1], -1).view(np.float32)


ELEMENTS = {
    "fp8": Element("fp8", 8, _from_8_bits(FP8)),
    "bf8": Element("bf8", 8, _from_8_bits(BF8)),
    "fp6": Element("fp6", 6, _from_6_bits(FP6)),
    "bf6": Element("bf6", 6, _from_6_bits(BF6)),
    "fp4": Element("fp4", 4, _from_4_bits(FP4)),
    "bf16": Element("bf16", 16, _from_bf16),
    "f16": Element("f16", 16, lambda words: words.view(np.float16).astype(np.float32)),
    "f32": Element("f32", 32, lambda words: words.view(np.float32)),
    "i8": Element("i8", 8, lambda words: words.view(np.int8).astype(np.float32)),
}
# CBSZ, for A, and BLGP, for B, of the f8f6f4 instructions.
F8F6F4_FORMATS = ("fp8", "bf8", "fp6", "bf6", "fp4")


@dataclass(frozen=True)
class Shape:
    """M x M x K products, `blocks` of them (M and N are equal in all instructions)."""

    rows: int
    depth: int
    blocks: int = 1

    @property
    def groups(self) -> int:
        """Lanes that share a row of A."""
        return LANES // (self.rows * self.blocks)

    @property
    def per_lane(self) -> int:
        """Elements of A in a lane."""
        return self.depth // self.groups

    def run(self, element: Element) -> int:
        """Consecutive k in a lane."""
        return min(self.per_lane, _LONGEST_RUN_8BIT) if element.bits == 8 else self.per_lane

    def operand_registers(self, element: Element) -> int:
        return self.per_lane * element.bits // 32

    @property
    def result_registers(self) -> int:
        return self.rows * self.rows * self.blocks // LANES

    @property
    def result_axes(self) -> tuple[int, int, int, int]:
        """Blocks one after the other, blocks side by side, row groups one after the other, row groups side by side."""
        side_by_side = -(-LANES * _GROUP_HEIGHT // self.rows**2)
        groups_side_by_side = LANES // side_by_side // self.rows
        return (
            self.blocks // side_by_side,
            side_by_side,
            self.rows // (_GROUP_HEIGHT * groups_side_by_side),
            groups_side_by_side,
        )


@dataclass(frozen=True)
class Instruction:
    """What a mnemonic says: result type, shape and, but for f8f6f4, the element types."""

    result: str
    shape: Shape
    a: str | None
    b: str | None


_COMMON_16 = ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x8", "16x16x16", "16x16x32", "32x32x16")
# Table 28 without f64.
_VARIANTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("f32", "f32"): ("32x32x1_2b", "16x16x1_4b", "4x4x1_16b", "32x32x2", "16x16x4"),
    ("f32", "f16"): _COMMON_16,
    ("f32", "bf16"): _COMMON_16,
    **{("f32", f"{a}_{b}"): ("16x16x32", "32x32x16") for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
    ("f32", "f8f6f4"): ("16x16x128", "32x32x64"),
    ("i32", "i8"): ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x16", "16x16x32", "16x16x64", "32x32x32"),
}
_MNEMONIC = re.compile(r"v_mfma_(?:scale_)?(f32|i32)_((\d+)x\d+x(\d+)(?:_(\d+)b)?)_(\w+?)(?:_1k)?")


@cache
def parse(mnemonic: str) -> Instruction:
    """Shape and types of a dense MFMA mnemonic.

    Raises
    ------
    ValueError
        Not an instruction of table 28, or one on f64.
    """
    found = _MNEMONIC.fullmatch(mnemonic)
    if found is None or found[2] not in _VARIANTS.get((found[1], found[6]), ()):
        raise ValueError(f"no such matrix instruction: {mnemonic}")
    shape = Shape(int(found[3]), int(found[4]), int(found[5] or 1))
    types = found[6]
    if types == "f8f6f4":
        return Instruction(found[1], shape, None, None)
    a, _, b = types.partition("_")
    return Instruction(found[1], shape, a, b or a)


def operand_matrix(registers: U32, shape: Shape, element: Element) -> F32:
    """Values of an A operand, or of the transposed B operand.

    Parameters
    ----------
    registers : ndarray of uint32, [..., operand registers, 64]
        May be a strided view: it is copied once.

    Returns
    -------
    ndarray of float32, [..., blocks, M, K]
    """
    return axes_matrix(operand_axes(registers, shape, element), shape, element)


def operand_axes(registers: U32, shape: Shape, element: Element) -> U32:
    """The words of an operand in the order of its matrix, as a view."""
    lead = registers.shape[:-2]
    run = shape.run(element)
    words = run * element.bits // 32
    axes = registers.reshape(*lead, shape.per_lane // run, words, shape.groups, shape.blocks, shape.rows)
    return _permute_tail(axes, (3, 4, 0, 2, 1))


def axes_matrix(axes: U32, shape: Shape, element: Element) -> F32:
    """Values of an operand whose words `operand_axes` has put in order."""
    rows = np.ascontiguousarray(axes)
    return element.decode(rows.reshape(*axes.shape[:-5], shape.blocks, shape.rows, -1))


def _permute_tail(array: A, order: tuple[int, ...]) -> A:
    """Transposition of the last axes alone."""
    first = array.ndim - len(order)
    return array.transpose(*range(first), *(first + n for n in order))


def result_view(registers: A, shape: Shape) -> A:
    """[..., result registers, 64] seen as [..., block, row group, row | block, row group, column]."""
    blocks_after, blocks_beside, groups_after, groups_beside = shape.result_axes
    split = (blocks_after, groups_after, _GROUP_HEIGHT, blocks_beside, groups_beside, shape.rows)
    return registers.reshape(*registers.shape[:-2], *split)  # type: ignore[return-value]


def product_view(product: A, shape: Shape) -> A:
    """[..., blocks, M, N] in the same axes."""
    blocks_after, blocks_beside, groups_after, groups_beside = shape.result_axes
    split = (blocks_after, blocks_beside, groups_after, groups_beside, _GROUP_HEIGHT, shape.rows)
    axes = product.reshape(*product.shape[:-3], *split)
    return _permute_tail(axes, (0, 2, 4, 1, 3, 5))  # type: ignore[return-value]


def result_matrix(registers: U32, shape: Shape) -> U32:
    """C or D registers, [..., registers, 64], as matrices, [..., blocks, M, N]."""
    view = _permute_tail(result_view(registers, shape), (0, 3, 1, 4, 2, 5))
    return view.reshape(*registers.shape[:-2], shape.blocks, shape.rows, shape.rows)


def broadcast_a(registers: U32, cbsz: int, abid: int) -> U32:
    """CBSZ and ABID (7.1.6.1): one of 2**cbsz blocks of lanes speaks for all. Not for f8f6f4."""
    if cbsz == 0:
        return registers
    size = LANES >> cbsz
    return registers[..., np.arange(LANES) % size + size * abid]


def broadcast_b(registers: U32, blgp: int) -> U32:
    """BLGP (table 29): permutation of the lanes of B. Not for f8f6f4."""
    if blgp == 0:
        return registers
    lane = np.arange(LANES)
    if blgp == 3:
        source = (lane + 16) % LANES
    elif blgp < 3:
        source = lane % 32 + 32 * (blgp - 1)
    else:
        source = lane % 16 + 16 * (blgp - 4)
    return registers[..., source]


@_quietly
def mfma(a: U32, b: U32, c: U32, *, shape: Shape, a_type: str, b_type: str) -> U32:
    """A * B + C.

    Parameters
    ----------
    a, b : ndarray of uint32, [..., registers, 64]
        Exactly the registers that shape and element type ask for.
    c : ndarray of uint32
        f32, or i32 for i8 operands; [..., result registers, 64] or anything that broadcasts to it.
    a_type, b_type : str
        Keys of `ELEMENTS`.

    Returns
    -------
    ndarray of uint32, [..., result registers, 64]
    """
    left = operand_matrix(a, shape, ELEMENTS[a_type])
    right = operand_matrix(b, shape, ELEMENTS[b_type])
    product = np.matmul(left, right.swapaxes(-1, -2))
    full = (*a.shape[:-2], shape.result_registers, LANES)
    if a_type == "i8":
        # At most 64 products of 14 bits: f32 holds the sum.
        whole = product_view(product.astype(np.int32), shape).reshape(full)
        return whole.view(np.uint32) + c
    addend = result_view(np.broadcast_to(c.view(np.float32), full), shape)
    return _finish(product_view(product, shape), addend, full)


def _finish(product: NDArray[np.generic], addend: NDArray[np.generic], full: tuple[int, ...]) -> U32:
    total = np.empty(addend.shape, np.float32)
    np.add(product, addend, out=total, casting="same_kind")
    return total.reshape(full).view(np.uint32)


def scale_factors(register: U32, select: int, shape: Shape) -> F64:
    """Block scales of A's rows, or B's columns.

    Parameters
    ----------
    register : ndarray of uint32, [..., 64] or broadcasting to it
    select : int
        Byte of the register: {op_sel_hi, op_sel}.

    Returns
    -------
    ndarray of float64, [..., M, K / 32]
        Lane l scales row l % M in block l // M of 32 k.
    """
    code = (register >> np.uint32(8 * select)) & np.uint32(0xFF)
    by_lane = np.broadcast_to(scale_table()[code], (*np.shape(code)[:-1], LANES))
    return by_lane.reshape(*by_lane.shape[:-1], shape.depth // SCALE_BLOCK, shape.rows).swapaxes(-1, -2)


@_quietly
def mfma_scale(
    a: U32,
    b: U32,
    c: U32,
    scale_a: U32,
    scale_b: U32,
    *,
    shape: Shape,
    a_type: str,
    b_type: str,
    select_a: int = 0,
    select_b: int = 0,
) -> U32:
    """A * B + C, each 32 k of a row of A and of a column of B scaled by a power of two (7.2).

    Parameters
    ----------
    scale_a, scale_b : ndarray of uint32, [..., 64] or broadcasting to it
        E8M0 exponents, one of the four bytes by `select_a` and `select_b`; 0xFF makes the results NaN.
    """
    codes = [(s >> np.uint32(8 * n)) & np.uint32(0xFF) for s, n in ((scale_a, select_a), (scale_b, select_b))]
    if all((code == UNIT_SCALE).all() for code in codes):
        return mfma(a, b, c, shape=shape, a_type=a_type, b_type=b_type)
    sides = []
    for registers, scale, select, name in ((a, scale_a, select_a, a_type), (b, scale_b, select_b, b_type)):
        matrix = operand_matrix(registers, shape, ELEMENTS[name]).astype(np.float64)
        factors = scale_factors(scale, select, shape)[..., None, :, :, None]
        blocked = matrix.reshape(*matrix.shape[:-1], shape.depth // SCALE_BLOCK, SCALE_BLOCK) * factors
        sides.append(blocked.reshape(matrix.shape))
    product = np.matmul(sides[0], sides[1].swapaxes(-1, -2))
    full = (*a.shape[:-2], shape.result_registers, LANES)
    addend = result_view(np.broadcast_to(c.view(np.float32), full), shape)
    return _finish(product_view(product, shape), addend.astype(np.float64), full)
