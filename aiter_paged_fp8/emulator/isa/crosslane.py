"""Exchange between lanes of a wave in registers (manual, "V_READLANE_B32", "V_PERMLANE32_SWAP_B32" and others)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..math import lanes
from ..operation import Environment, Operation, instruction
from ..state import Group
from ..syntax import EXEC_HI, EXEC_LO, Constant, Instruction
from .operands import scalar_source, vector_source, want_register

FAMILY = "crosslane"
U32 = np.uint32


@instruction("v_readfirstlane_b32", family=FAMILY, section="V_READFIRSTLANE_B32")
def v_readfirstlane_b32(ins: Instruction, env: Environment) -> Operation:
    """Value of the lowest active lane (lane 0 where none is) to a scalar."""
    target = want_register(ins.operands[0], "s", 1).index
    source = vector_source(env, ins.operands[1], "u32")
    execs = target in (EXEC_LO, EXEC_HI)

    def run(g: Group) -> None:
        value = source(g)
        if value.shape[-1] == 1 or g.full:
            g.s[target][...] = value[..., 0]
        else:
            g.s[target][...] = lanes.read_lane(value, lanes.first_lane(g.exec))
        if execs:
            g.refresh_exec()

    return Operation(ins, "valu", run, reads=env.ids(ins.operands[1]), writes=env.ids(ins.operands[0]))


@instruction("v_readlane_b32", family=FAMILY, section="V_READLANE_B32")
def v_readlane_b32(ins: Instruction, env: Environment) -> Operation:
    """Value of one lane, whatever EXEC, to a scalar."""
    target = want_register(ins.operands[0], "s", 1).index
    row = env.row(want_register(ins.operands[1], "va", 1))
    lane = scalar_source(ins.operands[2])
    fixed = isinstance(ins.operands[2], Constant)

    def run(g: Group) -> None:
        which: Any = lane(g)
        g.s[target][...] = lanes.read_lane(g.v[row], int(which) if fixed else which)

    return Operation(ins, "valu", run, reads=env.ids(*ins.operands[1:]), writes=env.ids(ins.operands[0]))


@instruction("v_writelane_b32", family=FAMILY, section="V_WRITELANE_B32")
def v_writelane_b32(ins: Instruction, env: Environment) -> Operation:
    """Write a scalar to one lane, whatever EXEC."""
    target = want_register(ins.operands[0], "va", 1)
    row = env.row(target)
    value, lane = scalar_source(ins.operands[1]), scalar_source(ins.operands[2])

    def run(g: Group) -> None:
        which = np.broadcast_to(np.asarray(lane(g)), g.shape)
        g.v[row][...] = lanes.write_lane(g.v[row], which, np.broadcast_to(np.asarray(value(g)), g.shape))

    return Operation(ins, "valu", run, reads=env.ids(*ins.operands), writes=env.ids(target))


@instruction(
    "v_permlane16_swap_b32",
    "v_permlane32_swap_b32",
    family=FAMILY,
    section="V_PERMLANE16_SWAP_B32, V_PERMLANE32_SWAP_B32",
    modifiers=["bound_ctrl", "fi"],
)
def v_permlane_swap(ins: Instruction, env: Environment) -> Operation:
    """Odd rows (halves) of the first register change places with even ones of the second; both are written."""
    width = 16 if "16" in ins.mnemonic else 32
    first, second = (env.row(want_register(operand, "v", 1)) for operand in ins.operands)

    def run(g: Group) -> None:
        a, b = lanes.permlane_swap(g.v[first], g.v[second], width)
        g.v[first][...] = a
        g.v[second][...] = b

    ids = env.ids(*ins.operands)
    return Operation(ins, "valu", run, reads=ids, writes=ids)


@instruction(
    "v_accvgpr_read_b32",
    "v_accvgpr_write_b32",
    "v_accvgpr_mov_b32",
    family=FAMILY,
    section="V_ACCVGPR_READ_B32, V_ACCVGPR_WRITE_B32",
)
def v_accvgpr(ins: Instruction, env: Environment) -> Operation:
    """Move between the two halves of the vector register file; EXEC applies as to any move."""
    from .valu import unchanged, valu

    return valu(ins, env, unchanged, "u")
