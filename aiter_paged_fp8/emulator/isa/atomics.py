"""Read-modify-write of global memory (manual, "Flat memory instructions", atomic operations).

Lanes take effect in order of their number. Float additions round each to nearest even; several orders are possible on
hardware, so their sums may differ there in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..math import conversion, floats
from ..operation import Environment, Operation, Unimplemented, instruction
from ..pending import Pending
from ..state import Group
from ..syntax import Instruction
from .operands import want_register
from .vmem import global_address

FAMILY = "atomics"
U32, I32 = np.uint32, np.int32


def _signed(pick: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda old, data: pick(old.view(I32), data.view(I32)).view(U32)


def _packed_bf16(old: Any, data: Any) -> Any:
    low = floats.add_f32(conversion.cvt_f32_bf16(old), conversion.cvt_f32_bf16(data))
    high = floats.add_f32(old & U32(0xFFFF0000), data & U32(0xFFFF0000))
    return conversion.cvt_pk_bf16_f32(low, high)


# Function from what memory holds and the lane's data to what memory holds then.
UPDATES: dict[str, Callable[[Any, Any], Any]] = {
    "swap": lambda old, data: data,
    "add": lambda old, data: old + data,
    "sub": lambda old, data: old - data,
    "and": lambda old, data: old & data,
    "or": lambda old, data: old | data,
    "xor": lambda old, data: old ^ data,
    "umin": np.minimum,
    "umax": np.maximum,
    "smin": _signed(np.minimum),
    "smax": _signed(np.maximum),
    "add_f32": floats.add_f32,
    "pk_add_bf16": _packed_bf16,
}


@instruction(
    *(f"global_atomic_{name}" for name in UPDATES),
    family=FAMILY,
    section="GLOBAL_ATOMIC_ADD and others",
    modifiers=["offset", "sc0", "sc1", "nt"],
)
def global_atomic(ins: Instruction, env: Environment) -> Operation:
    """Update a dword; with sc0 the old value returns."""
    update = UPDATES[ins.mnemonic.removeprefix("global_atomic_")]
    returns = ins.flag("sc0")
    operands = ins.operands[1:] if returns else ins.operands
    if len(operands) != 3:
        raise Unimplemented("operands of an atomic")
    target = want_register(ins.operands[0], "va", 1) if returns else None
    row = env.row(want_register(operands[1], "va", 1))
    place = Instruction(
        ins.index, ins.line, ins.text, ins.mnemonic, ins.encoding, (operands[0], operands[2]), ins.modifiers
    )
    address = global_address(place, env, 0)

    def effect(g: Group, payload: Any) -> None:
        access, data = payload
        before = np.zeros(data.shape, U32)
        for region, offsets, mask in access:
            if region.words is None or int(np.bitwise_or.reduce(offsets, axis=None)) & 3:
                g.machine.fault_alignment(op, 4)
            _update(region.words, offsets >> 2, mask, data, update, before)
        if target is not None:
            active = np.logical_or.reduce([mask for _, _, mask in access])
            np.copyto(g.v[env.row(target)], before, where=active)

    def run(g: Group) -> None:
        machine = g.machine
        access = machine.memory.resolve(op, g, address(g), g.exec, 4, write=True)
        machine.hazards.global_write(g, op, access, 4, atomic=True)
        machine.issue(g, Pending(op, effect, (access, g.v[row].copy())), lgkm=False)

    reads = env.ids(*operands)
    op = Operation(ins, "vmem", run, reads=reads, writes=env.ids(target) if target else (), sinks=reads)
    return op


def _update(
    words: np.ndarray, places: np.ndarray, mask: np.ndarray, data: Any, update: Any, before: np.ndarray
) -> None:
    """Apply lanes that share a place one after the other, the others together."""
    left = mask.copy()
    flat = places.reshape(-1)
    while left.any():
        waiting = np.flatnonzero(left.reshape(-1))
        _, first = np.unique(flat[waiting], return_index=True)
        now = waiting[first]
        at = flat[now]
        old = words[at]
        before.reshape(-1)[now] = old
        words[at] = update(old, data.reshape(-1)[now])
        left.reshape(-1)[now] = False
