"""Global memory: loads, stores, atomics (manual, "Flat memory instructions"). Counted in vmcnt, in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..memory import Access, load_small, load_words
from ..operation import Environment, Operation, Unimplemented, instruction
from ..pending import Pending
from ..state import Group
from ..syntax import Instruction, Name
from .operands import Getter, want_register

FAMILY = "vmem"
U32, U64 = np.uint32, np.uint64
CACHE_MODIFIERS = ("sc0", "sc1", "nt")
WORDS = {"": 1, "x2": 2, "x3": 3, "x4": 4}
# Narrow loads: bytes, whether sign-extended, which half is written (None: the whole register).
NARROW_LOADS: dict[str, tuple[int, bool, str | None]] = {
    "ubyte": (1, False, None),
    "sbyte": (1, True, None),
    "ushort": (2, False, None),
    "sshort": (2, True, None),
    "ubyte_d16": (1, False, "low"),
    "ubyte_d16_hi": (1, False, "high"),
    "sbyte_d16": (1, True, "low"),
    "sbyte_d16_hi": (1, True, "high"),
    "short_d16": (2, False, "low"),
    "short_d16_hi": (2, False, "high"),
}
# Narrow stores: bytes, shift of the data.
NARROW_STORES: dict[str, tuple[int, int]] = {
    "byte": (1, 0),
    "short": (2, 0),
    "byte_d16_hi": (1, 16),
    "short_d16_hi": (2, 16),
}


def global_address(ins: Instruction, env: Environment, position: int) -> Getter:
    """64-bit address of each lane: a register pair, or a scalar pair plus a 32-bit offset; the offset is signed."""
    base = ins.operands[position + 1]
    address = want_register(ins.operands[position], "v")
    row = env.row(address)
    offset = U64(ins.integer("offset") & 0xFFFFFFFFFFFFFFFF)
    if isinstance(base, Name) and base.text == "off":
        if address.count != 2:
            raise Unimplemented("an address of two registers is expected")
        if offset:
            return lambda g: g.vwide(row) + offset
        return lambda g: g.vwide(row)
    scalar = want_register(base, "s", 2).index
    return lambda g: g.v[row] + (g.wide(scalar) + offset)[..., None]


def extend(value: Any, size: int, signed: bool) -> Any:
    """Sign-extend a narrow value."""
    if not signed:
        return value
    return value.astype(np.int8 if size == 1 else np.int16).astype(np.int32).view(U32)


def write_words(g: Group, row: int, values: list[Any], mask: np.ndarray) -> None:
    """Write loaded registers to the lanes that were active at issue."""
    for k, value in enumerate(values):
        np.copyto(g.v[row + k], value, where=mask)


def put_narrow(g: Group, row: int, value: Any, half: str | None, mask: np.ndarray) -> None:
    """Write a narrow value to a register or to half of it."""
    if half == "low":
        value = g.v[row] & U32(0xFFFF0000) | value & U32(0xFFFF)
    elif half == "high":
        value = g.v[row] & U32(0xFFFF) | value << U32(16)
    np.copyto(g.v[row], value, where=mask)


@instruction(
    *(f"global_load_dword{suffix}" for suffix in WORDS),
    family=FAMILY,
    section="GLOBAL_LOAD_DWORD",
    modifiers=["offset", *CACHE_MODIFIERS],
)
def global_load_dword(ins: Instruction, env: Environment) -> Operation:
    """Load consecutive dwords."""
    count = WORDS[ins.mnemonic.removeprefix("global_load_dword")]
    target = want_register(ins.operands[0], "va", count)
    row = env.row(target)
    address = global_address(ins, env, 1)

    def effect(g: Group, payload: Any) -> None:
        access, mask = payload
        write_words(g, row, load_words(access, count, mask.shape), mask)

    def run(g: Group) -> None:
        machine, mask = g.machine, g.exec
        access = machine.memory.resolve(op, g, address(g), mask, 4 * count, write=False)
        machine.hazards.global_read(g, op, access, 4 * count)
        machine.issue(g, Pending(op, effect, (access, mask)), lgkm=False)

    reads = env.ids(*ins.operands[1:])
    op = Operation(ins, "vmem", run, reads=reads, writes=env.ids(target), sinks=reads)
    return op


@instruction(
    *(f"global_load_{name}" for name in NARROW_LOADS),
    family=FAMILY,
    section="GLOBAL_LOAD_UBYTE and others",
    modifiers=["offset", *CACHE_MODIFIERS],
)
def global_load_narrow(ins: Instruction, env: Environment) -> Operation:
    """Load a byte or a short."""
    size, signed, half = NARROW_LOADS[ins.mnemonic.removeprefix("global_load_")]
    target = want_register(ins.operands[0], "va", 1)
    row = env.row(target)
    address = global_address(ins, env, 1)

    def effect(g: Group, payload: Any) -> None:
        access, mask = payload
        put_narrow(g, row, extend(load_small(access, size, mask.shape), size, signed), half, mask)

    def run(g: Group) -> None:
        machine, mask = g.machine, g.exec
        access = machine.memory.resolve(op, g, address(g), mask, size, write=False)
        machine.hazards.global_read(g, op, access, size)
        machine.issue(g, Pending(op, effect, (access, mask)), lgkm=False)

    addresses = env.ids(*ins.operands[1:])
    reads = addresses | (env.ids(target) if half else set())
    op = Operation(ins, "vmem", run, reads=reads, writes=env.ids(target), sinks=addresses)
    return op


def store_words(access: Access, data: list[Any]) -> None:
    """Store dwords to every part of an access."""
    for region, offsets, mask in access:
        region.store_words(offsets, data, mask)


@instruction(
    *(f"global_store_dword{suffix}" for suffix in WORDS),
    family=FAMILY,
    section="GLOBAL_STORE_DWORD",
    modifiers=["offset", *CACHE_MODIFIERS],
)
def global_store_dword(ins: Instruction, env: Environment) -> Operation:
    """Store consecutive dwords; the data is read at issue."""
    count = WORDS[ins.mnemonic.removeprefix("global_store_dword")]
    data = want_register(ins.operands[1], "va", count)
    row = env.row(data)
    address = _store_address(ins, env)

    def effect(g: Group, payload: Any) -> None:
        access, values = payload
        store_words(access, values)

    def run(g: Group) -> None:
        machine, mask = g.machine, g.exec
        access = machine.memory.resolve(op, g, address(g), mask, 4 * count, write=True)
        machine.hazards.global_write(g, op, access, 4 * count)
        values = [g.v[row + k].copy() for k in range(count)]
        machine.issue(g, Pending(op, effect, (access, values)), lgkm=False)

    reads = env.ids(*ins.operands)
    op = Operation(ins, "vmem", run, reads=reads, sinks=reads)
    return op


def _store_address(ins: Instruction, env: Environment) -> Getter:
    """Address of a store: the data stands between the address and the scalar base."""
    reordered = Instruction(
        ins.index,
        ins.line,
        ins.text,
        ins.mnemonic,
        ins.encoding,
        (ins.operands[0], ins.operands[2]),
        ins.modifiers,
    )
    return global_address(reordered, env, 0)


@instruction(
    *(f"global_store_{name}" for name in NARROW_STORES),
    family=FAMILY,
    section="GLOBAL_STORE_BYTE and others",
    modifiers=["offset", *CACHE_MODIFIERS],
)
def global_store_narrow(ins: Instruction, env: Environment) -> Operation:
    """Store a byte or a short."""
    size, shift = NARROW_STORES[ins.mnemonic.removeprefix("global_store_")]
    row = env.row(want_register(ins.operands[1], "va", 1))
    address = _store_address(ins, env)

    def effect(g: Group, payload: Any) -> None:
        access, value = payload
        for region, offsets, mask in access:
            region.store_small(offsets, value, mask, size)

    def run(g: Group) -> None:
        machine, mask = g.machine, g.exec
        access = machine.memory.resolve(op, g, address(g), mask, size, write=True)
        machine.hazards.global_write(g, op, access, size)
        machine.issue(g, Pending(op, effect, (access, g.v[row] >> U32(shift))), lgkm=False)

    reads = env.ids(*ins.operands)
    op = Operation(ins, "vmem", run, reads=reads, sinks=reads)
    return op
