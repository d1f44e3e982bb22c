"""Scalar memory reads (manual, "Scalar memory operations"). They return out of order: only lgkmcnt(0) retires them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..memory import Region
from ..operation import Environment, Operation, Unimplemented, instruction
from ..pending import Pending
from ..state import Group
from ..syntax import Constant, Instruction
from .operands import scalar_source, want_register

FAMILY = "smem"
SIZES = {"": 1, "x2": 2, "x4": 4, "x8": 8, "x16": 16}


def _offset(ins: Instruction) -> tuple[Any, int]:
    """Getter of the variable part of the offset, and its constant part."""
    constant = ins.integer("offset")
    operand = ins.operands[2]
    if isinstance(operand, Constant):
        return None, constant + int(operand.value)
    return scalar_source(operand), constant


def read_words(g: Group, op: Operation, addresses: np.ndarray, count: int) -> np.ndarray:
    """Read ``count`` dwords for each wave, as ``[count, waves, workgroups]``."""
    memory = g.machine.memory
    result = np.empty((count, *g.shape), np.uint32)
    unique, inverse = np.unique(addresses, return_inverse=True)
    rows = np.empty((len(unique), count), np.uint32)
    for k, address in enumerate(unique.tolist()):
        region = memory.find(address, 4 * count)
        if region is None:
            wave, workgroup = (int(axis[0]) for axis in np.nonzero(addresses == address))
            memory.fault(op, g, wave, workgroup, 0, address, 4 * count, False)
        assert region is not None
        at = address - region.address
        rows[k] = np.frombuffer(region.bytes[at : at + 4 * count].tobytes(), np.uint32)
    result[...] = np.moveaxis(rows[inverse.reshape(g.shape)], -1, 0)
    return result


@instruction(
    *(f"s_load_dword{suffix}" for suffix in SIZES),
    family=FAMILY,
    section="S_LOAD_DWORD",
    modifiers=["offset", "glc"],
)
def s_load_dword(ins: Instruction, env: Environment) -> Operation:
    """Read consecutive dwords; the two low address bits are ignored."""
    count = SIZES[ins.mnemonic.removeprefix("s_load_dword")]
    target = want_register(ins.operands[0], "s", count)
    base = want_register(ins.operands[1], "s", 2)
    variable, constant = _offset(ins)
    step = np.uint64(constant & 0xFFFFFFFFFFFFFFFF)

    def effect(g: Group, payload: Any) -> None:
        (addresses,) = payload
        values = read_words(g, op, addresses, count)
        for k in range(count):
            g.s[target.index + k][...] = values[k]

    def run(g: Group) -> None:
        addresses = g.wide(base.index) + step
        if variable is not None:
            addresses = addresses + np.asarray(variable(g)).astype(np.uint64)
        addresses = addresses & np.uint64(0xFFFFFFFFFFFFFFFC)
        machine = g.machine
        first = int(addresses.flat[0])
        if machine.memory.find(first, 4 * count) is None or not (addresses == addresses.flat[0]).all():
            read_words(g, op, addresses, count)  # faults belong to the issuing instruction
        machine.counter.bytes["scalar read"] += 4 * count * g.waves
        machine.issue(g, Pending(op, effect, (addresses,), in_order=False), lgkm=True)

    reads = env.ids(*ins.operands[1:])
    op = Operation(ins, "smem", run, reads=reads, writes=env.ids(target), sinks=reads)
    return op


@instruction(
    *(f"s_buffer_load_dword{suffix}" for suffix in SIZES),
    family=FAMILY,
    section="S_BUFFER_LOAD_DWORD",
    modifiers=["offset", "glc"],
)
def s_buffer_load_dword(ins: Instruction, env: Environment) -> Operation:
    """Read consecutive dwords of a buffer; a dword out of the buffer's range reads as 0."""
    count = SIZES[ins.mnemonic.removeprefix("s_buffer_load_dword")]
    target = want_register(ins.operands[0], "s", count)
    resource = want_register(ins.operands[1], "s", 4).index
    variable, constant = _offset(ins)

    def effect(g: Group, payload: Any) -> None:
        base, offsets, records = payload
        values = np.zeros((count, *g.shape), np.uint32)
        for k in range(count):
            inside = offsets + np.uint64(4 * (k + 1)) <= records
            if inside.all():
                values[k] = read_words(g, op, base + offsets + np.uint64(4 * k), 1)[0]
            elif inside.any():
                for wave, workgroup in np.argwhere(inside):
                    address = int(base[wave, workgroup] + offsets[wave, workgroup]) + 4 * k
                    values[k, wave, workgroup] = _one_word(g, op, address, int(wave), int(workgroup))
        for k in range(count):
            g.s[target.index + k][...] = values[k]

    def run(g: Group) -> None:
        base = g.wide(resource) & np.uint64(0xFFFFFFFFFFFF)
        stride = g.s[resource + 1] >> np.uint32(16) & np.uint32(0x3FFF)
        records = g.s[resource + 2].astype(np.uint64) * np.maximum(stride, 1).astype(np.uint64)
        offsets = np.full(g.shape, constant, np.uint64)
        if variable is not None:
            offsets += np.asarray(variable(g)).astype(np.uint64)
        offsets &= np.uint64(0xFFFFFFFFFFFFFFFC)
        machine = g.machine
        machine.counter.bytes["scalar read"] += 4 * count * g.waves
        machine.issue(g, Pending(op, effect, (base, offsets, records), in_order=False), lgkm=True)

    reads = env.ids(*ins.operands[1:])
    op = Operation(ins, "smem", run, reads=reads, writes=env.ids(target), sinks=reads)
    return op


def _one_word(g: Group, op: Operation, address: int, wave: int, workgroup: int) -> int:
    region: Region | None = g.machine.memory.find(address, 4)
    if region is None:
        g.machine.memory.fault(op, g, wave, workgroup, 0, address, 4, False)
        raise Unimplemented("unreachable")
    at = address - region.address
    return int.from_bytes(region.bytes[at : at + 4].tobytes(), "little")
