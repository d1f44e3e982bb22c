"""Bits that nobody has written: how they spread through registers and LDS, and where they reach a result.

A register that the compiler leaves undefined may be read harmlessly (half of it replaced, a lane never used), so a read
alone is no fault. Undefined bits are followed through moves, logic, shifts and packing bit by bit, through arithmetic
lane by lane, and reported where they leave the wave: in a stored value, an address or a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .math import bits, lanes
from .operation import Operation
from .state import SCALAR_ID, SCC_ID, Group, lane_masks, pack_lanes, register_name
from .syntax import EXEC_LO, Constant, Operand, Register

if TYPE_CHECKING:
    from .machine import Machine

U32 = np.uint32
ALL = U32(0xFFFFFFFF)


class Unwritten:
    """Undefined bits of one register: ``mask`` per lane (vector) or per wave (scalar); None: every bit everywhere."""

    __slots__ = ("mask", "origin")

    def __init__(self, mask: np.ndarray | None, origin: int | None) -> None:
        self.mask = mask
        self.origin = origin


class UndefinedCheck:
    """Follows undefined bits through the instructions of one batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.agpr_base = machine.loaded.environment.agpr_base

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def begin(self, whole: Group, defined: set[int]) -> None:
        """At the start everything is undefined but what the hardware has written."""
        used: set[int] = set()
        for op in self.machine.operations:
            used |= op.regs
        always = {SCALAR_ID + EXEC_LO, SCALAR_ID + EXEC_LO + 1}
        whole.undefined.update({register: Unwritten(None, None) for register in used - defined - always})

    @staticmethod
    def cut(group: Group, part: Group) -> None:
        """Hand on to a part of a group."""
        index = part.rect.within(group.rect)
        for register, item in group.undefined.items():
            if item.mask is None:
                part.undefined[register] = item
            else:
                mask = item.mask[index]
                if mask.any():
                    part.undefined[register] = Unwritten(mask, item.origin)

    def join(self, a: Group, b: Group, joined: Group, axis: int) -> None:
        """Join two groups' knowledge."""
        for register in a.undefined.keys() | b.undefined.keys():
            x, y = a.undefined.get(register), b.undefined.get(register)
            if x is not None and y is not None and x.mask is None and y.mask is None:
                joined.undefined[register] = x
                continue
            masks = [self.full_mask(group, register) for group in (a, b)]
            origin = (x or y).origin  # type: ignore[union-attr]
            joined.undefined[register] = Unwritten(np.concatenate(masks, axis=axis), origin)

    def full_mask(self, group: Group, register: int) -> np.ndarray:
        """Undefined bits of a register as an array."""
        shape = group.shape if register >= SCALAR_ID else (*group.shape, 64)
        item = group.undefined.get(register)
        if item is None:
            return np.zeros(shape, U32)
        return np.full(shape, ALL) if item.mask is None else item.mask

    def put(self, group: Group, register: int, mask: Any, origin: int | None) -> None:
        """Set the undefined bits that a write leaves: those of ``mask`` in active lanes, the old ones elsewhere."""
        if register >= SCALAR_ID:
            mask = np.broadcast_to(mask, group.shape)
        else:
            mask = np.broadcast_to(mask, (*group.shape, 64))
            if not group.full:
                mask = np.where(group.exec, mask, self.full_mask(group, register))
        if mask.any():
            group.undefined[register] = Unwritten(np.array(mask), origin)
        else:
            group.undefined.pop(register, None)

    # -- stepping -----------------------------------------------------------------------------------------------

    def step(self, group: Group, op: Operation) -> None:
        """An instruction that touches registers with undefined bits is about to run."""
        undefined = group.undefined
        bad = [register for register in op.reads if register in undefined]
        if not bad:
            for register in op.writes:
                if register in undefined:
                    if group.full or register >= SCALAR_ID:
                        del undefined[register]
                    else:
                        self.put(group, register, U32(0), undefined[register].origin)
            return
        for register in bad:
            if register in op.sinks and self._reaches(group, register):
                self.report(group, op, register)
        rule = RULES.get(op.instruction.mnemonic)
        origin = next((undefined[register].origin for register in bad), None)
        if origin is None:
            origin = op.index
        encoding = op.instruction.encoding
        if encoding.endswith("dpp") and op.moves is not None:
            self._dpp(group, op, bad, origin)
            return
        if rule is not None and not encoding.endswith(("sdwa", "dpp")) and rule(self, group, op, origin):
            return
        self._default(group, op, bad, origin)

    def _reaches(self, group: Group, register: int) -> bool:
        item = group.undefined[register]
        if register >= SCALAR_ID:
            return item.mask is None or bool(item.mask.any())
        if item.mask is None:
            return group.any_active
        return bool((item.mask != 0)[group.exec].any())

    def report(self, group: Group, op: Operation, register: int) -> None:
        """Note that undefined bits leave the wave."""
        item = group.undefined[register]
        where = ""
        if register < SCALAR_ID:
            live = group.exec if item.mask is None else group.exec & (item.mask != 0)
            wave, workgroup, lane = (int(axis[0]) for axis in np.nonzero(live))
            where = f": {self.machine.locate(group, wave, workgroup)}, lane {lane}"
        name = register_name(register, self.agpr_base)
        role = {"branch": "branches on", "lds": "uses", "vmem": "stores or addresses by"}.get(op.kind, "uses")
        origin = item.origin
        tail = "bits that nobody has written" + (", first read by" if origin not in (None, op.index) else "")
        self.machine.reports.add(
            "undefined",
            f"{role} {name}, which holds undefined {tail}{where if origin in (None, op.index) else ''}",
            op.index,
            None if origin == op.index else origin,
            register=name,
        )

    def _dpp(self, group: Group, op: Operation, bad: list[int], origin: int) -> None:
        """The first source comes from other lanes; lanes that are not written keep what they hold."""
        ins, env = op.instruction, self.machine.loaded.environment
        moved, target = ins.operands[1], ins.operands[0]
        assert isinstance(target, Register)
        assert op.moves is not None
        row = env.row(target)
        mask = np.broadcast_to(_mask_of(self, group, moved), group.exec.shape)
        mask, written = op.moves(mask, group.exec)
        if ins.mnemonic != "v_mov_b32":
            # The destination counts as read because of the lanes it keeps; only sums in place compute with it.
            accumulates = ins.mnemonic.startswith(("v_fmac", "v_mac", "v_dot"))
            skip = env.ids(moved) - env.ids(*ins.operands[2:]) | (
                set() if accumulates else {row} - env.ids(*ins.operands[2:])
            )
            spread = mask != 0
            for register in bad:
                if register not in skip:
                    other = self.full_mask(group, register) != 0
                    spread = spread | (other[..., None] if register >= SCALAR_ID else other)
            mask = np.where(spread, ALL, U32(0))
        self.put(group, row, np.where(written, mask, self.full_mask(group, row)), origin)

    def _default(self, group: Group, op: Operation, bad: list[int], origin: int) -> None:
        """Arithmetic: a lane with an undefined bit in a source has an undefined result."""
        if op.kind in ("vmem", "smem", "lds"):
            # Loaded data is what memory holds; what LDS holds is noted by the access itself.
            for register in op.writes:
                self.put(group, register, U32(0), None)
            return
        spread: Any = np.zeros((*group.shape, 1), np.bool_)
        for register in bad:
            mask = self.full_mask(group, register) != 0
            spread = spread | (mask[..., None] if register >= SCALAR_ID else mask)
        if op.kind == "mfma":
            # A row or column of the product reads many lanes.
            spread = spread.any(axis=-1, keepdims=True)
        lane_mask = np.where(spread, ALL, U32(0))
        any_lane = np.where((spread & group.exec).any(axis=-1) if spread.shape[-1] > 1 else spread[..., 0], ALL, U32(0))
        for register in op.writes:
            if register in (SCALAR_ID + EXEC_LO, SCALAR_ID + EXEC_LO + 1):
                continue
            if register >= SCALAR_ID:
                self.put(group, register, any_lane, origin)
            else:
                self.put(group, register, lane_mask, origin)


# -- rules that know bits ------------------------------------------------------------------------------------------

Rule = Callable[[UndefinedCheck, Group, Operation, int], bool]


def _mask_of(check: UndefinedCheck, group: Group, operand: Operand, part: int = 0) -> np.ndarray:
    if not isinstance(operand, Register):
        return np.zeros((1, 1, 1), U32)
    if operand.file == "s":
        return check.full_mask(group, SCALAR_ID + operand.index + part)[..., None]
    return check.full_mask(group, check.machine.loaded.environment.row(operand) + part)


def _value_of(check: UndefinedCheck, group: Group, operand: Operand) -> np.ndarray:
    if isinstance(operand, Constant):
        return np.asarray(U32(operand.bits32()))
    assert isinstance(operand, Register)
    if operand.file == "s":
        return group.sb[operand.index]
    return group.v[check.machine.loaded.environment.row(operand)]


def _write(check: UndefinedCheck, group: Group, op: Operation, mask: np.ndarray, origin: int, part: int = 0) -> bool:
    target = op.instruction.operands[0]
    assert isinstance(target, Register)
    if target.file == "s":
        check.put(group, SCALAR_ID + target.index + part, mask[..., 0], origin)
        if SCC_ID in op.writes:
            check.put(group, SCC_ID, np.where(mask[..., 0] != 0, ALL, U32(0)), origin)
    else:
        check.put(group, check.machine.loaded.environment.row(target) + part, mask, origin)
    return True


def _move(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    return _write(check, group, op, _mask_of(check, group, op.instruction.operands[1]), origin)


def _move_wide(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    for part in (0, 1):
        _write(check, group, op, _mask_of(check, group, op.instruction.operands[1], part), origin, part)
    return True


def _packed_move(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    ins = op.instruction
    low, high = ins.bits("op_sel", (0, 0))[0], ins.bits("op_sel", (0, 0))[1]
    masks = [_mask_of(check, group, ins.operands[1], low), _mask_of(check, group, ins.operands[2], high)]
    for part, mask in enumerate(masks):
        _write(check, group, op, mask, origin, part)
    return True


def _bitwise(combine: Callable[..., np.ndarray]) -> Rule:
    """A rule from masks and values of the sources, in order: ``combine(ua, a, ub, b, ...)``."""

    def rule(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
        sources: list[np.ndarray] = []
        for operand in op.instruction.operands[1:]:
            if not isinstance(operand, (Register, Constant)):
                return False
            sources += [_mask_of(check, group, operand), _value_of(check, group, operand)]
        return _write(check, group, op, combine(*sources), origin)

    return rule


def _and(ua: Any, a: Any, ub: Any, b: Any) -> Any:
    return ua & (ub | b) | ub & (ua | a)


def _or(ua: Any, a: Any, ub: Any, b: Any) -> Any:
    return ua & (ub | ~b) | ub & (ua | ~a)


def _everywhere(condition: Any) -> Any:
    return np.where(condition != 0, ALL, U32(0))


def _shift(left: bool) -> Callable[..., np.ndarray]:
    def combine(ua: Any, a: Any, ub: Any, b: Any) -> Any:
        moved = ub << (a & U32(31)) if left else ub >> (a & U32(31))
        return moved | _everywhere(ua)

    return combine


def _perm(ua: Any, a: Any, ub: Any, b: Any, us: Any, s: Any) -> Any:
    selector = np.broadcast_to(s, np.broadcast_shapes(np.shape(ua), np.shape(ub), np.shape(s)))
    moved = bits.perm_b32(np.broadcast_to(ua, selector.shape), np.broadcast_to(ub, selector.shape), selector)
    for byte in range(4):
        # Selections above 11 are constants.
        constant = (selector >> U32(8 * byte) & U32(0xFF)) > U32(11)
        moved = np.where(constant, moved & ~U32(0xFF << (8 * byte)), moved)
    return moved | _everywhere(us)


def _bfe(ua: Any, a: Any, uo: Any, o: Any, uw: Any, w: Any) -> Any:
    shape = np.broadcast_shapes(np.shape(ua), np.shape(o), np.shape(w))
    field = bits.bfe_u32(*(np.broadcast_to(part, shape) for part in (ua, o, w)))
    return field | _everywhere(uo) | _everywhere(uw)


def _select(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    ins = op.instruction
    mask_operand = ins.operands[3]
    if not isinstance(mask_operand, Register):
        return False
    chosen = group.mask(mask_operand.index)
    row = SCALAR_ID + mask_operand.index
    unknown = lane_masks(check.full_mask(group, row), check.full_mask(group, row + 1))
    mask = np.where(chosen, _mask_of(check, group, ins.operands[2]), _mask_of(check, group, ins.operands[1]))
    return _write(check, group, op, np.where(unknown, ALL, mask), origin)


def _half_pack(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    """Conversions that write one half and keep the other."""
    ins = op.instruction
    selected = ins.bits("op_sel", (0, 0, 0, 0))
    high = bool(selected[-1])
    target = ins.operands[0]
    old = _mask_of(check, group, target)
    fresh = np.zeros((1, 1, 1), np.bool_)
    for operand in ins.operands[1:]:
        fresh = fresh | (_mask_of(check, group, operand) != 0)
    half = np.where(fresh, U32(0xFFFF), U32(0))
    mask = old & U32(0xFFFF) | half << U32(16) if high else old & U32(0xFFFF0000) | half
    return _write(check, group, op, mask, origin)


def _compare(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    """A comparison of an undefined lane leaves that bit of the mask undefined."""
    target = op.instruction.operands[0]
    assert isinstance(target, Register)
    spread = np.zeros((1, 1, 1), np.bool_)
    for operand in op.instruction.operands[1:]:
        if isinstance(operand, Register):
            for part in range(operand.count):
                spread = spread | (_mask_of(check, group, operand, part) != 0)
    packed = pack_lanes(np.ascontiguousarray(np.broadcast_to(spread, group.exec.shape) & group.exec))
    check.put(group, SCALAR_ID + target.index, packed[..., 0], origin)
    check.put(group, SCALAR_ID + target.index + 1, packed[..., 1], origin)
    return True


def _first_lane(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    mask = np.broadcast_to(_mask_of(check, group, op.instruction.operands[1]), group.exec.shape)
    picked = lanes.read_lane(mask, lanes.first_lane(group.exec))
    return _write(check, group, op, picked[..., None], origin)


def _lane_number(group: Group, operand: Operand) -> Any:
    number = operand.bits32() if isinstance(operand, Constant) else group.s[operand.index]  # type: ignore[union-attr]
    return np.broadcast_to(np.asarray(number, np.uint32), group.shape)


def _read_lane(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    source, lane = op.instruction.operands[1:]
    if not isinstance(lane, (Register, Constant)):
        return False
    mask = np.broadcast_to(_mask_of(check, group, source), group.exec.shape)
    picked = lanes.read_lane(mask, _lane_number(group, lane))[..., None]
    return _write(check, group, op, picked | _everywhere(_mask_of(check, group, lane)), origin)


def _write_lane(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    target, value, lane = op.instruction.operands
    if not isinstance(lane, (Register, Constant)):
        return False
    old = np.broadcast_to(_mask_of(check, group, target), group.exec.shape)
    mask = lanes.write_lane(old, _lane_number(group, lane), _mask_of(check, group, value)[..., 0])
    mask = mask | _everywhere(_mask_of(check, group, lane))
    # EXEC is ignored.
    row = check.machine.loaded.environment.row(target)  # type: ignore[arg-type]
    if mask.any():
        group.undefined[row] = Unwritten(mask, origin)
    else:
        group.undefined.pop(row, None)
    return True


def _exchange(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    """Exchanges through LDS: undefined bits go where their lane goes; an undefined address taints what it may reach."""
    *addresses, data = op.instruction.operands[1:]
    mask = np.broadcast_to(_mask_of(check, group, data), group.exec.shape)
    assert op.moves is not None
    moved = op.moves(group.exec, *[_value_of(check, group, operand) for operand in addresses], mask)
    for operand in addresses:
        unknown = (_mask_of(check, group, operand) != 0) & group.exec
        if "bpermute" not in op.instruction.mnemonic:
            # A lane that pushes may push anywhere.
            unknown = unknown.any(axis=-1, keepdims=True)
        moved = moved | _everywhere(unknown)
    return _write(check, group, op, moved, origin)


def _swap(width: int) -> Rule:
    def rule(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
        env = check.machine.loaded.environment
        a, b = op.instruction.operands[:2]
        assert isinstance(a, Register)
        assert isinstance(b, Register)
        first, second = lanes.permlane_swap(_mask_of(check, group, a), _mask_of(check, group, b), width)
        check.put(group, env.row(a), first, origin)
        check.put(group, env.row(b), second, origin)
        return True

    return rule


def _scalar_wide(combine: Callable[..., np.ndarray]) -> Rule:
    def rule(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
        target, *sources = op.instruction.operands
        if not isinstance(target, Register) or not all(isinstance(part, Register) for part in sources):
            return False
        for part in (0, 1):
            arguments: list[np.ndarray] = []
            for operand in sources:
                assert isinstance(operand, Register)
                row = operand.index + part
                arguments += [check.full_mask(group, SCALAR_ID + row), group.s[row]]
            mask = combine(*arguments)
            if target.index != EXEC_LO:
                check.put(group, SCALAR_ID + target.index + part, mask, origin)
        check.put(group, SCC_ID, U32(0), origin)
        return True

    return rule


def _upward(check: UndefinedCheck, group: Group, op: Operation, origin: int) -> bool:
    """64-bit sums and left shifts: the low half of the result depends on the low halves of the sources alone."""
    ins = op.instruction
    target = ins.operands[0]
    assert isinstance(target, Register)
    first = 2 if ins.mnemonic.startswith("v_mad_") else 1
    halves = []
    for part in (0, 1):
        spread: Any = np.zeros((1, 1, 1), np.bool_)
        for operand in ins.operands[first:]:
            if isinstance(operand, Register) and part < operand.count:
                spread = spread | (_mask_of(check, group, operand, part) != 0)
        halves.append(spread)
    low, high = halves[0], halves[0] | halves[1]
    _write(check, group, op, np.where(low, ALL, U32(0)), origin, 0)
    _write(check, group, op, np.where(high, ALL, U32(0)), origin, 1)
    if first == 2:
        carry = ins.operands[1]
        assert isinstance(carry, Register)
        packed = pack_lanes(np.ascontiguousarray(np.broadcast_to(high, group.exec.shape) & group.exec))
        check.put(group, SCALAR_ID + carry.index, packed[..., 0], origin)
        check.put(group, SCALAR_ID + carry.index + 1, packed[..., 1], origin)
    return True


RULES: dict[str, Rule] = {
    **dict.fromkeys(["v_mad_u64_u32", "v_mad_i64_i32", "v_lshl_add_u64", "v_lshlrev_b64"], _upward),
    **dict.fromkeys(
        ["v_mov_b32", "s_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32", "v_not_b32"], _move
    ),
    **dict.fromkeys(["v_mov_b64", "s_mov_b64"], _move_wide),
    "v_pk_mov_b32": _packed_move,
    "v_and_b32": _bitwise(_and),
    "s_and_b32": _bitwise(_and),
    "v_or_b32": _bitwise(_or),
    "s_or_b32": _bitwise(_or),
    "v_xor_b32": _bitwise(lambda ua, a, ub, b: ua | ub),
    "v_lshlrev_b32": _bitwise(_shift(True)),
    "v_lshrrev_b32": _bitwise(_shift(False)),
    "v_lshl_or_b32": _bitwise(
        lambda ua, a, us, s, ub, b: _or(ua << (s & U32(31)) | _everywhere(us), a << (s & U32(31)), ub, b)
    ),
    "v_and_or_b32": _bitwise(lambda ua, a, ub, b, uc, c: _or(_and(ua, a, ub, b), a & b, uc, c)),
    "v_or3_b32": _bitwise(lambda ua, a, ub, b, uc, c: _or(_or(ua, a, ub, b), a | b, uc, c)),
    "v_perm_b32": _bitwise(_perm),
    "v_bfe_u32": _bitwise(_bfe),
    "v_cndmask_b32": _select,
    "v_cvt_pk_fp8_f32": _half_pack,
    "v_cvt_pk_bf8_f32": _half_pack,
    "v_readfirstlane_b32": _first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    **dict.fromkeys(["ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"], _exchange),
    "v_permlane32_swap_b32": _swap(32),
    "v_permlane16_swap_b32": _swap(16),
    "s_and_b64": _scalar_wide(_and),
    "s_or_b64": _scalar_wide(_or),
    "s_xor_b64": _scalar_wide(lambda ua, a, ub, b: ua | ub),
    "s_andn2_b64": _scalar_wide(lambda ua, a, ub, b: _and(ua, a, ub, ~b)),
    **{
        f"v_cmp_{name}_{kind}": _compare
        for name in ("lt", "eq", "le", "gt", "ne", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt")
        for kind in ("i32", "u32", "i64", "u64", "f32")
    },
}
