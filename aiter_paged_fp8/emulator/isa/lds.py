"""LDS reads, writes, transposing reads (manual, "Local data share operations"). Counted in lgkmcnt, in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..lds_check import Pattern
from ..math import lanes
from ..operation import Environment, Operation, Unimplemented, instruction
from ..pending import Pending
from ..state import Group
from ..syntax import Instruction
from .operands import want_register
from .vmem import extend, put_narrow, write_words

FAMILY = "lds"
U32 = np.uint32
WORDS = {"b32": 1, "b64": 2, "b96": 3, "b128": 4}


def _address(g: Group, row: int, offset: Any) -> np.ndarray:
    return g.v[row] + offset if offset else g.v[row].copy()


def _located(g: Group, op: Operation, row: int, offset: Any, size: int, alignment: int) -> tuple[Any, Pattern | None]:
    """Addresses of an access, and their pattern where it is known."""
    pattern = g.machine.hazards.lds.find(g, op, g.v[row], lambda base: base + offset, int(offset), size, alignment)
    return _address(g, row, offset) if pattern is None else pattern.addresses, pattern


@instruction(
    *(f"ds_read_{size}" for size in WORDS), family=FAMILY, section="DS_READ_B32 and others", modifiers=["offset"]
)
def ds_read(ins: Instruction, env: Environment) -> Operation:
    """Read consecutive dwords."""
    count = WORDS[ins.mnemonic.removeprefix("ds_read_")]
    target = want_register(ins.operands[0], "va", count)
    row, address = env.row(target), env.row(want_register(ins.operands[1], "v", 1))
    offset = U32(ins.integer("offset"))

    def effect(g: Group, payload: Any) -> None:
        addresses, places, mask = payload
        if places is None:
            write_words(g, row, g.machine.lds.read(g, addresses, count), mask)
        else:
            g.registers[row : row + count] = g.machine.lds.take(places, count)

    def run(g: Group) -> None:
        machine = g.machine
        where, pattern = _located(g, op, address, offset, 4 * count, 4)
        addresses, events = machine.hazards.lds.access(g, op, where, 4 * count, 4, write=False, pattern=pattern)
        places = None if pattern is None else machine.lds.places(g, pattern, count)
        machine.issue(g, Pending(op, effect, (addresses, places, g.exec), events=events), lgkm=True)

    ids = env.ids(ins.operands[1])
    op = Operation(ins, "lds", run, reads=ids, writes=env.ids(target), sinks=ids)
    return op


NARROW = {
    "u8": (1, False, None),
    "i8": (1, True, None),
    "u16": (2, False, None),
    "i16": (2, True, None),
    "u8_d16": (1, False, "low"),
    "u8_d16_hi": (1, False, "high"),
    "i8_d16": (1, True, "low"),
    "i8_d16_hi": (1, True, "high"),
    "u16_d16": (2, False, "low"),
    "u16_d16_hi": (2, False, "high"),
}


@instruction(
    *(f"ds_read_{size}" for size in NARROW), family=FAMILY, section="DS_READ_U8 and others", modifiers=["offset"]
)
def ds_read_narrow(ins: Instruction, env: Environment) -> Operation:
    """Read a byte or a short."""
    size, signed, half = NARROW[ins.mnemonic.removeprefix("ds_read_")]
    target = want_register(ins.operands[0], "v", 1)
    row, address = env.row(target), env.row(want_register(ins.operands[1], "v", 1))
    offset = U32(ins.integer("offset"))

    def effect(g: Group, payload: Any) -> None:
        addresses, mask = payload
        put_narrow(g, row, extend(g.machine.lds.read_small(g, addresses, size), size, signed), half, mask)

    def run(g: Group) -> None:
        machine = g.machine
        addresses, events = machine.hazards.lds.access(g, op, _address(g, address, offset), size, size, write=False)
        machine.issue(g, Pending(op, effect, (addresses, g.exec), events=events), lgkm=True)

    ids = env.ids(ins.operands[1])
    reads = ids | (env.ids(target) if half else set())
    op = Operation(ins, "lds", run, reads=reads, writes=env.ids(target), sinks=ids)
    return op


@instruction(
    "ds_read2_b32",
    "ds_read2_b64",
    "ds_read2st64_b32",
    "ds_read2st64_b64",
    family=FAMILY,
    section="DS_READ2_B32 and others",
    modifiers=["offset0", "offset1"],
)
def ds_read2(ins: Instruction, env: Environment) -> Operation:
    """Read two places; the offsets count elements, or 64 of them."""
    words = 1 if ins.mnemonic.endswith("b32") else 2
    unit = 4 * words * (64 if "st64" in ins.mnemonic else 1)
    target = want_register(ins.operands[0], "v", 2 * words)
    row, address = env.row(target), env.row(want_register(ins.operands[1], "v", 1))
    offsets = [U32(ins.integer(name) * unit) for name in ("offset0", "offset1")]

    def effect(g: Group, payload: Any) -> None:
        first, second, mask = payload
        write_words(g, row, g.machine.lds.read(g, first, words), mask)
        write_words(g, row + words, g.machine.lds.read(g, second, words), mask)

    def run(g: Group) -> None:
        machine = g.machine
        first, events = machine.hazards.lds.access(g, op, _address(g, address, offsets[0]), 4 * words, 4, write=False)
        second, more = machine.hazards.lds.access(
            g, op, _address(g, address, offsets[1]), 4 * words, 4, write=False, place=1
        )
        machine.issue(g, Pending(op, effect, (first, second, g.exec), events=events + more), lgkm=True)

    ids = env.ids(ins.operands[1])
    op = Operation(ins, "lds", run, reads=ids, writes=env.ids(target), sinks=ids)
    return op


@instruction(
    *(f"ds_write_{size}" for size in WORDS), family=FAMILY, section="DS_WRITE_B32 and others", modifiers=["offset"]
)
def ds_write(ins: Instruction, env: Environment) -> Operation:
    """Write consecutive dwords."""
    count = WORDS[ins.mnemonic.removeprefix("ds_write_")]
    address, data = env.row(want_register(ins.operands[0], "v", 1)), want_register(ins.operands[1], "va", count)
    row, offset = env.row(data), U32(ins.integer("offset"))
    rows = tuple(range(row, row + count))

    def effect(g: Group, payload: Any) -> None:
        addresses, values, mask = payload
        g.machine.lds.write(g, addresses, values, mask)

    def run(g: Group) -> None:
        machine = g.machine
        where, pattern = _located(g, op, address, offset, 4 * count, 4)
        addresses, events = machine.hazards.lds.access(
            g, op, where, 4 * count, 4, write=True, data=rows, pattern=pattern
        )
        values = [g.v[k].copy() for k in rows]
        machine.issue(g, Pending(op, effect, (addresses, values, g.exec), events=events), lgkm=True)

    op = Operation(ins, "lds", run, reads=env.ids(*ins.operands), sinks=env.ids(ins.operands[0]))
    return op


NARROW_WRITES = {"b8": (1, 0), "b16": (2, 0), "b8_d16_hi": (1, 16), "b16_d16_hi": (2, 16)}


@instruction(
    *(f"ds_write_{size}" for size in NARROW_WRITES),
    family=FAMILY,
    section="DS_WRITE_B8 and others",
    modifiers=["offset"],
)
def ds_write_narrow(ins: Instruction, env: Environment) -> Operation:
    """Write a byte or a short."""
    size, shift = NARROW_WRITES[ins.mnemonic.removeprefix("ds_write_")]
    address, row = env.row(want_register(ins.operands[0], "v", 1)), env.row(want_register(ins.operands[1], "va", 1))
    offset = U32(ins.integer("offset"))

    def effect(g: Group, payload: Any) -> None:
        addresses, value, mask = payload
        g.machine.lds.write_small(g, addresses, value, mask, size)

    def run(g: Group) -> None:
        machine = g.machine
        addresses, events = machine.hazards.lds.access(
            g, op, _address(g, address, offset), size, size, write=True, data=(row,)
        )
        machine.issue(g, Pending(op, effect, (addresses, g.v[row] >> U32(shift), g.exec), events=events), lgkm=True)

    op = Operation(ins, "lds", run, reads=env.ids(*ins.operands), sinks=env.ids(ins.operands[0]))
    return op


@instruction(
    "ds_write2_b32",
    "ds_write2_b64",
    "ds_write2st64_b32",
    "ds_write2st64_b64",
    family=FAMILY,
    section="DS_WRITE2_B32 and others",
    modifiers=["offset0", "offset1"],
)
def ds_write2(ins: Instruction, env: Environment) -> Operation:
    """Write two places; the offsets count elements, or 64 of them."""
    words = 1 if ins.mnemonic.endswith("b32") else 2
    unit = 4 * words * (64 if "st64" in ins.mnemonic else 1)
    address = env.row(want_register(ins.operands[0], "v", 1))
    rows = [env.row(want_register(operand, "v", words)) for operand in ins.operands[1:]]
    offsets = [U32(ins.integer(name) * unit) for name in ("offset0", "offset1")]

    def effect(g: Group, payload: Any) -> None:
        places, data, mask = payload
        for place, values in zip(places, data, strict=True):
            g.machine.lds.write(g, place, values, mask)

    def run(g: Group) -> None:
        machine = g.machine
        places = []
        events: tuple[Any, ...] = ()
        for number, row in enumerate(rows):
            where, more = machine.hazards.lds.access(
                g,
                op,
                _address(g, address, offsets[number]),
                4 * words,
                4,
                write=True,
                data=tuple(range(row, row + words)),
                place=number,
            )
            places.append(where)
            events += more
        data = [[g.v[row + k].copy() for k in range(words)] for row in rows]
        machine.issue(g, Pending(op, effect, (places, data, g.exec), events=events), lgkm=True)

    op = Operation(ins, "lds", run, reads=env.ids(*ins.operands), sinks=env.ids(ins.operands[0]))
    return op


TRANSPOSED = {"b64_tr_b4": (2, 4), "b64_tr_b8": (2, 8), "b64_tr_b16": (2, 16), "b96_tr_b6": (3, 6)}


@instruction(
    *(f"ds_read_{name}" for name in TRANSPOSED), family=FAMILY, section="LDS transpose reads", modifiers=["offset"]
)
def ds_read_transposed(ins: Instruction, env: Environment) -> Operation:
    """Each lane fetches a run at its own address, then elements change places within 16 lanes."""
    count, bits = TRANSPOSED[ins.mnemonic.removeprefix("ds_read_")]
    target = want_register(ins.operands[0], "va", count)
    row, address = env.row(target), env.row(want_register(ins.operands[1], "v", 1))
    offset = U32(ins.integer("offset"))

    def effect(g: Group, payload: Any) -> None:
        addresses, places, mask = payload
        if places is not None:
            g.registers[row : row + count] = g.machine.lds.take_transposed(places, bits)
            return
        fetched = np.stack(g.machine.lds.read(g, addresses, count), axis=-2)
        turned = lanes.transpose_read(fetched, bits)
        write_words(g, row, [turned[..., k, :] for k in range(count)], mask)

    def run(g: Group) -> None:
        machine = g.machine
        alignment = 4 if count == 3 else 8
        where, pattern = _located(g, op, address, offset, 4 * count, alignment)
        addresses, events = machine.hazards.lds.access(g, op, where, 4 * count, alignment, write=False, pattern=pattern)
        places = None if pattern is None else machine.lds.transposed_places(g, pattern, bits)
        machine.issue(g, Pending(op, effect, (addresses, places, g.exec), events=events), lgkm=True)

    ids = env.ids(ins.operands[1])
    op = Operation(ins, "lds", run, reads=ids, writes=env.ids(target), sinks=ids)
    return op


# -- exchanges between lanes through the LDS crossbar; no LDS byte is touched ----------------------------------------


def _exchange(ins: Instruction, env: Environment, move: Any, sources: tuple[int, ...]) -> Operation:
    target = want_register(ins.operands[0], "v", 1)
    row = env.row(target)
    rows = [env.row(want_register(ins.operands[position], "v", 1)) for position in sources]

    def effect(g: Group, payload: Any) -> None:
        value, mask = payload
        np.copyto(g.v[row], value, where=mask)

    def run(g: Group) -> None:
        value = move(g.exec, *[g.v[k] for k in rows])
        g.machine.issue(g, Pending(op, effect, (value, g.exec)), lgkm=True)

    op = Operation(ins, "lds", run, reads=env.ids(*ins.operands[1:]), writes=env.ids(target), moves=move)
    return op


@instruction("ds_bpermute_b32", "ds_permute_b32", family=FAMILY, section="DS_BPERMUTE_B32", modifiers=["offset"])
def ds_permute(ins: Instruction, env: Environment) -> Operation:
    """Pull from (bpermute) or push to the lane that a byte address names."""
    function = lanes.ds_bpermute if "bpermute" in ins.mnemonic else lanes.ds_permute
    offset = ins.integer("offset")
    return _exchange(ins, env, lambda mask, a, d: function(a, d, mask, offset), (1, 2))


def swizzle_offset(text: str) -> int:
    """The 16-bit field behind ``offset:swizzle(...)``, or a plain number."""
    if not text.startswith("swizzle("):
        return int(text, 0)
    mode, *parts = [part.strip() for part in text[len("swizzle(") : -1].split(",")]
    if mode == "QUAD_PERM":
        return 0x8000 | sum(int(part, 0) << (2 * k) for k, part in enumerate(parts))
    if mode == "BITMASK_PERM":
        # Five characters from bit 4 down: 0, 1 force the bit, p keeps it, i inverts it.
        keep = force = invert = 0
        for character in parts[0].strip('"'):
            keep, force, invert = keep << 1, force << 1, invert << 1
            keep |= character in "pi"
            force |= character == "1"
            invert |= character == "i"
        return invert << 10 | force << 5 | keep
    if mode == "SWAP":
        return int(parts[0], 0) << 10 | 0x1F
    if mode == "REVERSE":
        return (int(parts[0], 0) - 1) << 10 | 0x1F
    if mode == "BROADCAST":
        size, lane = int(parts[0], 0), int(parts[1], 0)
        return lane << 5 | (0x1F & ~(size - 1))
    raise Unimplemented(f"swizzle mode {mode}")


@instruction("ds_swizzle_b32", family=FAMILY, section="DS_SWIZZLE_B32", modifiers=["offset"])
def ds_swizzle(ins: Instruction, env: Environment) -> Operation:
    """A fixed exchange within 32 lanes."""
    offset = swizzle_offset(str(ins.modifiers.get("offset", "0")))
    return _exchange(ins, env, lambda mask, d: lanes.ds_swizzle(d, mask, offset), (1,))
