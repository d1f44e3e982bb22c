"""What the hardware has put into registers when a wave starts (manual, "Initial wave state"; LLVM's AMDGPU ABI)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from .errors import ProgramError
from .isa.scalar import MODE_FP16_OVFL, MODE_ROW
from .memory import Region
from .state import LANES, SCALAR_ID
from .syntax import EXEC_HI, EXEC_LO

if TYPE_CHECKING:
    from .machine import Machine

# User SGPRs in the order in which the ABI packs them: directive of the descriptor, registers.
USER_SGPRS = (
    ("private_segment_buffer", 4),
    ("dispatch_ptr", 2),
    ("queue_ptr", 2),
    ("kernarg_segment_ptr", 2),
    ("dispatch_id", 2),
    ("flat_scratch_init", 2),
    ("private_segment_size", 1),
)
SUPPORTED = frozenset({"dispatch_ptr", "kernarg_segment_ptr", "dispatch_id", "private_segment_size"})
DISPATCH_PACKET_BYTES = 64


def _dispatch_packet(machine: Machine) -> bytes:
    """The AQL packet that dispatch_ptr points to: only its sizes are of use to a kernel."""
    launch = machine.launch
    threads = [count * size for count, size in zip(launch.grid, launch.block, strict=True)]
    packet = struct.pack("<HH3HH3I", 0, 3, *launch.block, 0, *threads)
    return packet.ljust(DISPATCH_PACKET_BYTES, b"\0")


def initial_state(machine: Machine, first: int, count: int) -> set[int]:
    """Fill the registers of a batch; return the ids of those that are defined.

    Parameters
    ----------
    first, count : int
        Workgroups of the batch, in launch order (x fastest).
    """
    directives = machine.program.metadata.directives
    scalar, vector = machine.files.scalar, machine.files.vector
    defined: set[int] = set()

    def put(row: int, value: int | np.ndarray) -> None:
        scalar[row] = value
        defined.add(SCALAR_ID + row)

    row = 0
    for name, size in USER_SGPRS:
        if not directives.get(f"user_sgpr_{name}", 0):
            continue
        if name not in SUPPORTED:
            raise ProgramError(f"kernel {machine.program.name} wants the user SGPRs {name}, which are not modelled")
        value = 0
        if name == "kernarg_segment_ptr":
            value = machine.kernarg.address
        elif name == "dispatch_ptr":
            packet = np.frombuffer(bytearray(_dispatch_packet(machine)), np.uint8)
            region = Region("the dispatch packet", packet.ctypes.data, packet.size, writable=False, keepalive=packet)
            machine.own.append(region)
            machine.memory.regions.append(region)
            value = packet.ctypes.data
        for k in range(size):
            put(row + k, value >> (32 * k) & 0xFFFFFFFF)
        row += size
    preload = directives.get("user_sgpr_kernarg_preload_length", 0)
    offset = directives.get("user_sgpr_kernarg_preload_offset", 0)
    words = np.frombuffer(machine.launch.kernarg.ljust(4 * (offset + preload), b"\0"), np.uint32)
    for k in range(preload):
        put(row + k, int(words[offset + k]))
    row = max(row + preload, directives.get("user_sgpr_count", 0))

    linear = np.arange(first, first + count, dtype=np.uint32)
    gx, gy, _ = machine.launch.grid
    ids: dict[str, np.ndarray] = {"x": linear % gx, "y": linear // gx % gy, "z": linear // (gx * gy)}
    for axis, identity in ids.items():
        if directives.get(f"system_sgpr_workgroup_id_{axis}", 0):
            put(row, identity.astype(np.uint32)[None, :])
            row += 1
    if directives.get("system_sgpr_workgroup_info", 0):
        raise ProgramError(f"kernel {machine.program.name} wants workgroup_info, which is not modelled")

    bx, by, _ = machine.launch.block
    thread = np.arange(machine.waves * LANES, dtype=np.uint32).reshape(machine.waves, LANES)
    # Packed work-item ids: 10 bits each in v0.
    packed = thread % bx | (thread // bx % by) << np.uint32(10) | (thread // (bx * by)) << np.uint32(20)
    vector[0] = packed[:, None, :]
    defined.add(0)

    active = thread < machine.threads
    bits = np.packbits(active, axis=-1, bitorder="little").view(np.uint32)
    put(MODE_ROW, directives.get("fp16_overflow", 0) << MODE_FP16_OVFL)
    put(EXEC_LO, bits[:, 0][:, None])
    put(EXEC_HI, bits[:, 1][:, None])
    return defined
