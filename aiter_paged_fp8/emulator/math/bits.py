"""Integer and bit-field instructions that are more than one numpy operator."""

import numpy as np
from numpy.typing import NDArray

from aiter_paged_fp8.emulator.math import LANES, U32, U64

_BYTES = tuple(np.uint32(8 * n) for n in range(4))
_FF = np.uint32(0xFF)
_FFFF = np.uint32(0xFFFF)
_ONE = np.uint32(1)
_NONE_FOUND = np.uint32(0xFFFFFFFF)


def _count(value: U32) -> U32:
    """Shift counts and field widths use the low five bits of their operand."""
    return value & np.uint32(31)


def _signed(value: U32) -> NDArray[np.int32]:
    return np.asarray(value).view(np.int32)


def perm_b32(s0: U32, s1: U32, selector: U32) -> U32:
    """V_PERM_B32: each byte of the result is any byte of {s0, s1}, a replicated sign, or padding.

    Byte numbers 0-3 are those of `s1`, 4-7 those of `s0`. Selectors 8-11 give the sign of byte 1, 3, 5, 7; 12 gives
    0x00, anything above 0xff.
    """
    selector = np.asarray(selector)
    anyone = selector.flat[0]
    if (selector == anyone).all():
        return _perm_uniform(s0, s1, int(anyone))
    s0, s1, selector = np.broadcast_arrays(s0, s1, selector)
    # Thirteen candidates per lane, the last being the all-ones padding.
    table = np.empty((*s0.shape, 14), np.uint8)
    table[..., 0:4] = np.ascontiguousarray(s1)[..., None].view(np.uint8)
    table[..., 4:8] = np.ascontiguousarray(s0)[..., None].view(np.uint8)
    table[..., 8:12] = np.where(table[..., 1:8:2] & 0x80, 0xFF, 0)
    table[..., 12] = 0
    table[..., 13] = 0xFF
    wanted = np.minimum(np.ascontiguousarray(selector)[..., None].view(np.uint8), 13)
    return np.take_along_axis(table, wanted.astype(np.intp), axis=-1).view(np.uint32)[..., 0]


def _perm_uniform(s0: U32, s1: U32, selector: int) -> U32:
    """V_PERM_B32 whose selector is the same for all lanes, as it nearly always is: a few shifts instead of a gather."""
    result: U32 = np.zeros(np.broadcast_shapes(np.shape(s0), np.shape(s1)), np.uint32)
    for n in range(4):
        select = (selector >> (8 * n)) & 0xFF
        if select >= 13:
            result = result | np.uint32(0xFF << (8 * n))
        elif select < 8:
            source = s0 if select >= 4 else s1
            result = result | (((source >> np.uint32(8 * (select % 4))) & _FF) << np.uint32(8 * n))
        elif select < 12:
            byte = 2 * (select - 8) + 1
            source = s0 if byte >= 4 else s1
            sign = (source >> np.uint32(8 * (byte % 4) + 7)) & _ONE
            result = result | ((sign * _FF) << np.uint32(8 * n))
    return result


def bitop3_b32(s0: U32, s1: U32, s2: U32, table: int) -> U32:
    """V_BITOP3_B32: bit i of the result is bit ``4*s0[i] + 2*s1[i] + s2[i]`` of the 8-bit truth table."""

    def pick(low: int, s: U32) -> U32 | None:
        """The function of one variable whose values at 0 and 1 are the two lowest bits of `low`; None is constant 0."""
        return (None, ~s, s, np.uint32(0xFFFFFFFF))[low & 3]

    def choose(s: U32, one: U32 | None, zero: U32 | None) -> U32 | None:
        if one is None:
            return None if zero is None else ~s & zero
        return s & one if zero is None else (s & one) | (~s & zero)

    halves = [choose(s1, pick(t >> 2, s2), pick(t, s2)) for t in (table, table >> 4)]
    result = choose(s0, halves[1], halves[0])
    shape = np.broadcast_shapes(np.shape(s0), np.shape(s1), np.shape(s2))
    return np.zeros(shape, np.uint32) if result is None else np.broadcast_to(result, shape)


def bfe_u32(value: U32, offset: U32, width: U32) -> U32:
    """V_BFE_U32; a width of 0 gives 0."""
    return (value >> _count(offset)) & ((_ONE << _count(width)) - _ONE)


def bfe_i32(value: U32, offset: U32, width: U32) -> U32:
    """V_BFE_I32: the field's highest bit is its sign; a width of 0 gives 0."""
    field = (_signed(value) >> _signed(_count(offset))).view(np.uint32) & ((_ONE << _count(width)) - _ONE)
    sign = np.where(_count(width) == 0, np.uint32(0), _ONE << (_count(width) - _ONE))
    return (field ^ sign) - sign


def bfi_b32(mask: U32, insert: U32, base: U32) -> U32:
    """V_BFI_B32."""
    return (mask & insert) | (~mask & base)


def bfm_b32(width: U32, offset: U32) -> U32:
    """V_BFM_B32."""
    return ((_ONE << _count(width)) - _ONE) << _count(offset)


def alignbit_b32(high: U32, low: U32, shift: U32) -> U32:
    """V_ALIGNBIT_B32."""
    return (_pair(low, high) >> _count(shift).astype(np.uint64)).astype(np.uint32)


def alignbyte_b32(high: U32, low: U32, shift: U32) -> U32:
    """V_ALIGNBYTE_B32."""
    return (_pair(low, high) >> ((shift & np.uint32(3)) * np.uint32(8)).astype(np.uint64)).astype(np.uint32)


def _pair(low: U32, high: U32) -> U64:
    return (np.asarray(high).astype(np.uint64) << np.uint64(32)) | low


def lerp_u8(s0: U32, s1: U32, s2: U32) -> U32:
    """V_LERP_U8: the average of each byte pair; the lowest bit of the third operand's byte makes a half round up."""
    result = np.uint32(0)
    for at in _BYTES:
        total = ((s0 >> at) & _FF) + ((s1 >> at) & _FF) + ((s2 >> at) & _ONE)
        result = result | ((total >> _ONE) << at)
    return result


def _difference(a: U32, b: U32) -> U32:
    return np.maximum(a, b) - np.minimum(a, b)


def sad_u8(s0: U32, s1: U32, s2: U32) -> U32:
    """V_SAD_U8."""
    return sum((_difference((s0 >> at) & _FF, (s1 >> at) & _FF) for at in _BYTES), start=s2)


def sad_hi_u8(s0: U32, s1: U32, s2: U32) -> U32:
    """V_SAD_HI_U8."""
    return (sad_u8(s0, s1, np.uint32(0)) << np.uint32(16)) + s2


def sad_u16(s0: U32, s1: U32, s2: U32) -> U32:
    """V_SAD_U16."""
    sixteen = np.uint32(16)
    return s2 + _difference(s0 & _FFFF, s1 & _FFFF) + _difference(s0 >> sixteen, s1 >> sixteen)


def sad_u32(s0: U32, s1: U32, s2: U32) -> U32:
    """V_SAD_U32."""
    return _difference(s0, s1) + s2


def msad_u8(s0: U32, s1: U32, s2: U32) -> U32:
    """V_MSAD_U8: as V_SAD_U8, bytes whose second operand is zero left out."""
    result = s2
    for at in _BYTES:
        reference = (s1 >> at) & _FF
        result = result + np.where(reference == 0, np.uint32(0), _difference((s0 >> at) & _FF, reference))
    return result


def mbcnt_lo(mask: U32, base: U32) -> U32:
    """V_MBCNT_LO_U32_B32: `base` plus the bits of `mask` below the lane, bits 0-31 of a wave's mask."""
    return base + popcount(mask & _BELOW_LO)


def mbcnt_hi(mask: U32, base: U32) -> U32:
    """V_MBCNT_HI_U32_B32: the same for bits 32-63."""
    return base + popcount(mask & _BELOW_HI)


_BELOW_LO = np.array([((1 << lane) - 1) & 0xFFFFFFFF for lane in range(LANES)], np.uint32)
_BELOW_HI = np.array([((1 << lane) - 1) >> 32 for lane in range(LANES)], np.uint32)


def popcount(value: U32) -> U32:
    """Number of set bits (V_BCNT_U32_B32 without its addend)."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(value).astype(np.uint32)
    # numpy before 2.0
    value = value - ((value >> _ONE) & np.uint32(0x55555555))
    value = (value & np.uint32(0x33333333)) + ((value >> np.uint32(2)) & np.uint32(0x33333333))
    value = (value + (value >> np.uint32(4))) & np.uint32(0x0F0F0F0F)
    return (value * np.uint32(0x01010101)) >> np.uint32(24)


def bfrev_b32(value: U32) -> U32:
    """V_BFREV_B32."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        value = ((value >> np.uint32(shift)) & np.uint32(mask)) | ((value & np.uint32(mask)) << np.uint32(shift))
    return value


def ffbh_u32(value: U32) -> U32:
    """V_FFBH_U32: zeros before the first one, from the top; -1 if there is none."""
    # frexp of a 32-bit integer held exactly in a double: its exponent is the bit length.
    length = np.frexp(np.asarray(value).astype(np.float64))[1]
    return np.where(value == 0, _NONE_FOUND, (32 - length).astype(np.uint32))


def ffbl_b32(value: U32) -> U32:
    """V_FFBL_B32: zeros before the first one, from the bottom; -1 if there is none."""
    return np.where(value == 0, _NONE_FOUND, popcount((value & (~value + _ONE)) - _ONE))


def ffbh_i32(value: U32) -> U32:
    """V_FFBH_I32: leading bits that equal the sign; -1 if all do."""
    return ffbh_u32(value ^ (_signed(value) >> np.int32(31)).view(np.uint32))


def prng_b32(value: U32) -> U32:
    """V_PRNG_B32: one step of the linear feedback shift register with polynomial 0xC5."""
    return (value << _ONE) ^ ((value >> np.uint32(31)) * np.uint32(0xC5))


def ashr_pk_i8_i32(s0: U32, s1: U32, shift: U32) -> U32:
    """V_ASHR_PK_I8_I32: result in bits 15:0."""
    return _shift_saturate_pack(s0, s1, shift, -128, 127)


def ashr_pk_u8_i32(s0: U32, s1: U32, shift: U32) -> U32:
    """V_ASHR_PK_U8_I32: result in bits 15:0."""
    return _shift_saturate_pack(s0, s1, shift, 0, 255)


def _shift_saturate_pack(s0: U32, s1: U32, shift: U32, low: int, high: int) -> U32:
    count = _signed(_count(shift))
    first, second = (np.clip(_signed(s) >> count, low, high).view(np.uint32) & _FF for s in (s0, s1))
    return first | (second << np.uint32(8))


def sat_pk_u8_i16(value: U32) -> U32:
    """V_SAT_PK_U8_I16: result in bits 15:0."""
    low, high = _signed(value << np.uint32(16)) >> np.int32(16), _signed(value) >> np.int32(16)
    first, second = (np.clip(half, 0, 255).view(np.uint32) for half in (low, high))
    return first | (second << np.uint32(8))


def cvt_pk_u16_u32(s0: U32, s1: U32) -> U32:
    """V_CVT_PK_U16_U32, saturating."""
    return np.minimum(s0, _FFFF) | (np.minimum(s1, _FFFF) << np.uint32(16))


def cvt_pk_i16_i32(s0: U32, s1: U32) -> U32:
    """V_CVT_PK_I16_I32, saturating."""
    low, high = (np.clip(_signed(s), -0x8000, 0x7FFF).view(np.uint32) & _FFFF for s in (s0, s1))
    return low | (high << np.uint32(16))


def mul_hi_u32(s0: U32, s1: U32) -> U32:
    """V_MUL_HI_U32."""
    return ((np.asarray(s0).astype(np.uint64) * s1) >> np.uint64(32)).astype(np.uint32)


def mul_hi_i32(s0: U32, s1: U32) -> U32:
    """V_MUL_HI_I32."""
    product = _signed(s0).astype(np.int64) * _signed(s1).astype(np.int64)
    return (product >> np.int64(32)).astype(np.uint32)


def signed_24(value: U32) -> U32:
    """Low 24 bits sign-extended: operand of the I24 multiplications."""
    return (_signed(value << np.uint32(8)) >> np.int32(8)).view(np.uint32)


def add_sat_i32(s0: U32, s1: U32) -> U32:
    """V_ADD_I32 with clamp."""
    return _saturate_i32(_signed(s0).astype(np.int64) + _signed(s1))


def sub_sat_i32(s0: U32, s1: U32) -> U32:
    """V_SUB_I32 with clamp."""
    return _saturate_i32(_signed(s0).astype(np.int64) - _signed(s1))


def _saturate_i32(value: NDArray[np.int64]) -> U32:
    return np.clip(value, -0x80000000, 0x7FFFFFFF).astype(np.int32).view(np.uint32)


def dot4_i32_i8(s0: U32, s1: U32, s2: U32) -> U32:
    """V_DOT4_I32_I8: four signed byte products added to the third operand, modulo 2**32."""
    result = np.asarray(s2)
    for at in _BYTES:
        a, b = (_signed((s >> at) << np.uint32(24)) >> np.int32(24) for s in (s0, s1))
        result = result + (a * b).view(np.uint32)
    return result
