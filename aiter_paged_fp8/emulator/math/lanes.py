"""Which lane an operand comes from: DPP, lane swaps, LDS permutes and swizzles, transpose reads.

Maps depend only on the instruction's immediate fields, so they are computed once per value and cached; the arrays that
come out of a cache are read-only. Section numbers are those of the CDNA4 ISA manual.
"""

from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiter_paged_fp8.emulator.math import LANES, U32, Bool, Index

# A row is the unit of DPP and of the permlane instructions, a bank is a quarter of it (13.3.3, BANK_MASK).
ROW = 16
BANK = 4
# DS swizzles never cross the halves of a wave (DS_SWIZZLE_B32).
HALF = 32

_LANE = np.arange(LANES)


A = TypeVar("A", bound=NDArray[Any])


def _frozen(array: A) -> A:
    array.setflags(write=False)
    return array


@cache
def dpp_source(ctrl: int) -> tuple[Index, Bool]:
    """Source lane of every lane under a DPP control, and whether there is one (table 94).

    Parameters
    ----------
    ctrl : int
        The 9-bit DPP_CTRL field.

    Returns
    -------
    source : ndarray of intp, [64]
        Where there is no source lane, the lane itself.
    valid : ndarray of bool, [64]

    Raises
    ------
    ValueError
        The control is reserved.
    """
    lane = _LANE
    row, position = lane - lane % ROW, lane % ROW
    amount = ctrl & 0xF
    valid = np.ones(LANES, bool)
    if ctrl <= 0xFF:
        source = lane - lane % 4 + ((ctrl >> (2 * (lane % 4))) & 3)
    elif 0x101 <= ctrl <= 0x10F:
        source, valid = lane + amount, position + amount < ROW
    elif 0x111 <= ctrl <= 0x11F:
        source, valid = lane - amount, position >= amount
    elif 0x121 <= ctrl <= 0x12F:
        source = row + (position - amount) % ROW
    elif ctrl in (0x130, 0x134):
        source, valid = (lane + 1) % LANES, (lane < LANES - 1) | (ctrl == 0x134)
    elif ctrl in (0x138, 0x13C):
        source, valid = (lane - 1) % LANES, (lane > 0) | (ctrl == 0x13C)
    elif ctrl == 0x140:
        source = row + ROW - 1 - position
    elif ctrl == 0x141:
        source = lane - lane % 8 + 7 - lane % 8
    elif ctrl == 0x142:
        source, valid = row - 1, lane >= ROW
    elif ctrl == 0x143:
        source, valid = lane - lane % HALF - 1, lane >= HALF
    elif 0x150 <= ctrl <= 0x15F:
        source = row + amount
    else:
        raise ValueError(f"DPP control {ctrl:#x} is reserved")
    source = np.where(valid, source, lane).astype(np.intp)
    return _frozen(source), _frozen(np.array(valid, bool))


@cache
def dpp_write_mask(row_mask: int, bank_mask: int) -> Bool:
    """Lanes that a DPP instruction may write: their row and their bank are both enabled (table 93)."""
    rows = (row_mask >> (_LANE // ROW)) & 1
    banks = (bank_mask >> (_LANE % ROW // BANK)) & 1
    return _frozen((rows & banks).astype(bool))


def dpp_fetch(
    values: U32, exec_mask: Bool, ctrl: int, *, row_mask: int = 0xF, bank_mask: int = 0xF, bound_ctrl: bool = False
) -> tuple[U32, Bool]:
    """First operand of a DPP instruction and the lanes that write its result.

    A lane whose source lane does not exist or is switched off by EXEC reads zero with `bound_ctrl` (the BC bit, written
    ``bound_ctrl:0`` in assembly) and writes nothing without it.

    Parameters
    ----------
    values : ndarray of uint32, [..., 64]
    exec_mask : ndarray of bool, [..., 64]

    Returns
    -------
    operand : ndarray of uint32, [..., 64]
    write : ndarray of bool, [..., 64]
        EXEC, the masks and, without `bound_ctrl`, the source lane's validity.
    """
    source, exists = dpp_source(ctrl)
    readable = exec_mask[..., source] & exists
    operand = np.where(readable, values[..., source], np.uint32(0))
    write = exec_mask & dpp_write_mask(row_mask, bank_mask)
    return operand, write if bound_ctrl else write & readable


def permlane_swap(dst: U32, src: U32, width: int) -> tuple[U32, U32]:
    """V_PERMLANE16_SWAP_B32 and V_PERMLANE32_SWAP_B32: odd groups of `dst` change places with even groups of `src`.

    The manual's pseudocode does not consult EXEC, and neither does this.

    Parameters
    ----------
    dst, src : ndarray of uint32, [..., 64]
        The first and second register of the instruction.
    width : {16, 32}
        Lanes of a group.

    Returns
    -------
    dst, src : ndarray of uint32, [..., 64]
        The registers after the swap.
    """
    if width not in (ROW, HALF):
        raise ValueError(f"no lane swap of width {width}")
    pairs = (*dst.shape[:-1], LANES // (2 * width), 2, width)
    new_dst, new_src = dst.copy(), src.copy()
    new_dst.reshape(pairs)[..., 1, :] = src.reshape(pairs)[..., 0, :]
    new_src.reshape(pairs)[..., 0, :] = dst.reshape(pairs)[..., 1, :]
    return new_dst, new_src


def _permute_lane(address: U32, offset: int) -> Index:
    return ((address + np.uint32(offset)) >> np.uint32(2)).astype(np.intp) % LANES


def ds_bpermute(address: U32, data: U32, exec_mask: Bool, offset: int = 0) -> U32:
    """DS_BPERMUTE_B32: each lane pulls from the lane its byte address names; a disabled one gives it 0."""
    source = _permute_lane(address, offset)
    source, data, live = np.broadcast_arrays(source, data, exec_mask)
    return np.where(np.take_along_axis(live, source, axis=-1), np.take_along_axis(data, source, axis=-1), np.uint32(0))


def ds_permute(address: U32, data: U32, exec_mask: Bool, offset: int = 0) -> U32:
    """DS_PERMUTE_B32: each live lane pushes to the lane that its address names; the highest-numbered sender wins."""
    target = _permute_lane(address, offset)
    target, data, live = np.broadcast_arrays(target, data, exec_mask)
    # The winner by explicit maximum, since numpy leaves the order of repeated assignments open; silent lanes go to a
    # spare slot.
    slot = np.where(live, target, LANES)
    winner = np.full((*slot.shape[:-1], LANES + 1), -1, np.intp)
    flat_winner, flat_slot = winner.reshape(-1, LANES + 1), slot.reshape(-1, LANES)
    wave = np.arange(flat_slot.shape[0])[:, None]
    np.maximum.at(flat_winner, (wave, flat_slot), np.broadcast_to(_LANE, flat_slot.shape))
    sender = winner[..., :LANES]
    pushed = np.take_along_axis(data, np.maximum(sender, 0), axis=-1)
    return np.where(sender >= 0, pushed, np.uint32(0))


@cache
def ds_swizzle_source(offset: int) -> Index:
    """Source lane of every lane under DS_SWIZZLE_B32's 16-bit offset field."""
    lane = _LANE
    half, thread = lane & HALF, lane % HALF
    mask = offset & 0x1F
    if offset >= 0xE000:
        reverse = sum(((thread >> bit) & 1) << (4 - bit) for bit in range(5))
        source = (reverse >> mask.bit_count()) | (thread & mask)
    elif offset >= 0xC000:
        rotate = (offset >> 5) & 0x1F
        turned = thread + (-rotate if offset & 0x400 else rotate)
        source = (thread & mask) | (turned & ~mask & (HALF - 1))
    elif offset & 0x8000:
        source = thread - thread % 4 + ((offset >> (2 * (thread % 4))) & 3)
    else:
        source = ((thread & mask) | ((offset >> 5) & 0x1F)) ^ ((offset >> 10) & 0x1F)
    return _frozen((half | source).astype(np.intp))


def ds_swizzle(data: U32, exec_mask: Bool, offset: int) -> U32:
    """DS_SWIZZLE_B32; a disabled source lane reads as 0."""
    source = ds_swizzle_source(offset)
    return np.where(exec_mask[..., source], data[..., source], np.uint32(0))


def first_lane(exec_mask: Bool) -> Index:
    """Lane that V_READFIRSTLANE_B32 reads in each wave: the lowest enabled one, or 0 where EXEC is empty."""
    return exec_mask.argmax(axis=-1)


def read_lane(values: U32, lane: Index | int) -> U32:
    """V_READLANE_B32: the value of one lane of each wave, the number taken modulo 64.

    Parameters
    ----------
    values : ndarray of uint32, [..., 64]
    lane : int or ndarray, [...]

    Returns
    -------
    ndarray of uint32, [...]
    """
    if isinstance(lane, (int, np.integer)):
        return values[..., int(lane) % LANES]
    return np.take_along_axis(values, (lane % LANES)[..., None].astype(np.intp), axis=-1)[..., 0]


def write_lane(values: U32, lane: Index | int, value: U32) -> U32:
    """V_WRITELANE_B32: a copy of the register with one lane of each wave replaced by that wave's `value`, [...]."""
    wanted = np.asarray(lane)[..., None] % LANES
    return np.where(wanted == _LANE, np.asarray(value)[..., None], values)


@cache
def transpose_read_source(element_bits: int) -> tuple[Index, Index]:
    """Where the elements of a transpose read come from (11.4).

    A group of 16 lanes fetches e rows of 16 elements, a row by 16 / e neighbouring lanes, and lane r of the group gets
    column r: element n of its result is element r % e of what lane ``16 // e * n + r // e`` of the group fetched.

    Parameters
    ----------
    element_bits : {4, 6, 8, 16}

    Returns
    -------
    lane, element : ndarray of intp, [64, e]
        e is 16, 16, 8, 4: what 64 bits hold, 96 bits for 6-bit elements.
    """
    count = _run_bits(element_bits) // element_bits
    position = _LANE[:, None] % ROW
    nth = np.arange(count)
    lane = _LANE[:, None] - position + position // count + ROW // count * nth
    element = np.broadcast_to(position % count, lane.shape).copy()
    return _frozen(lane), _frozen(element)


def _run_bits(element_bits: int) -> int:
    if element_bits not in (4, 6, 8, 16):
        raise ValueError(f"no transpose read of {element_bits}-bit elements")
    return 96 if element_bits == 6 else 64


@cache
def _transpose_take(element_bits: int) -> Index:
    """Index into the elements of a [registers, 64] block, seen as bytes or halves, that transposes it in one take."""
    lane, element = transpose_read_source(element_bits)
    per_register = 32 // element_bits
    # The result's own order: register, lane, element within the register.
    lane, element = (
        a.reshape(LANES, -1, per_register).transpose(1, 0, 2) for a in (np.asarray(lane), np.asarray(element))
    )
    return _frozen((element // per_register * LANES + lane) * per_register + element % per_register)


def transpose_read(data: U32, element_bits: int) -> U32:
    """DS_READ_B64_TR_B4/B8/B16 and DS_READ_B96_TR_B6: exchange of elements after each lane fetched its own run.

    Parameters
    ----------
    data : ndarray of uint32, [..., registers, 64]
        What each lane fetched from its own address: 2 registers, 3 for 6-bit elements.
    element_bits : {4, 6, 8, 16}

    Returns
    -------
    ndarray of uint32, [..., registers, 64]
    """
    registers = _run_bits(element_bits) // 32
    lead = data.shape[:-2]
    block = np.ascontiguousarray(data)
    if element_bits in (8, 16):
        dtype = np.uint8 if element_bits == 8 else np.uint16
        items = block.reshape(*lead, registers * LANES).view(dtype)
        # take, unlike an index expression, lays its result out in the index's order.
        taken = np.take(items, _transpose_take(element_bits), axis=-1)
        return taken.view(np.uint32).reshape(*lead, registers, LANES)
    lane, element = transpose_read_source(element_bits)
    return pack_elements(unpack_elements(block, element_bits)[..., element.T, lane.T], element_bits)


def unpack_elements(registers: U32, element_bits: int) -> NDArray[np.uint8]:
    """Elements of 4, 6 or 8 bits, packed densely from bit 0 upwards across a lane's registers.

    Parameters
    ----------
    registers : ndarray of uint32, [..., registers, 64]

    Returns
    -------
    ndarray of uint8, [..., elements, 64]
    """
    first, shift, straddles = _element_bits(registers.shape[-2], element_bits)
    mask = np.uint32((1 << element_bits) - 1)
    elements = registers[..., first, :] >> shift[:, None]
    if straddles.any():
        upper = registers[..., first[straddles] + 1, :] << (np.uint32(32) - shift[straddles])[:, None]
        elements[..., straddles, :] |= upper
    return (elements & mask).astype(np.uint8)


def pack_elements(elements: NDArray[np.uint8], element_bits: int) -> U32:
    """Inverse of `unpack_elements`: [..., elements, 64] to [..., registers, 64]."""
    count = elements.shape[-2]
    registers = count * element_bits // 32
    first, shift, straddles = _element_bits(registers, element_bits)
    packed = np.zeros((*elements.shape[:-2], registers, elements.shape[-1]), np.uint32)
    wide = elements.astype(np.uint32)
    for n in range(count):
        packed[..., first[n], :] |= wide[..., n, :] << shift[n]
        if straddles[n]:
            packed[..., first[n] + 1, :] |= wide[..., n, :] >> (np.uint32(32) - shift[n])
    return packed


@cache
def _element_bits(registers: int, element_bits: int) -> tuple[Index, U32, Bool]:
    """First register and bit of each densely packed element, and whether it reaches into the next register."""
    start = np.arange(registers * 32 // element_bits) * element_bits
    shift = start % 32
    return start // 32, shift.astype(np.uint32), shift + element_bits > 32
