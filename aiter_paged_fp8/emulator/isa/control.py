"""Program flow: branches, barriers, waits, end, and hints (manual, "Program flow control" and "SOPP instructions")."""

from __future__ import annotations

import re

import numpy as np

from ..machine import BARRIER, END, LGKM_LIMIT, VM_LIMIT
from ..operation import Environment, Operation, Unimplemented, instruction
from ..state import SCALAR_ID, SCC_ID, Group
from ..syntax import EXEC_HI, EXEC_LO, VCC_HI, VCC_LO, Constant, Instruction

FAMILY = "control"


@instruction("s_endpgm", family=FAMILY, section="S_ENDPGM")
def s_endpgm(ins: Instruction, env: Environment) -> Operation:
    """End the wave."""
    return Operation(ins, "branch", lambda g: END)


@instruction("s_barrier", family=FAMILY, section="S_BARRIER")
def s_barrier(ins: Instruction, env: Environment) -> Operation:
    """Rendezvous of the workgroup's waves; waits for no counter. Ended waves no longer count."""
    return Operation(ins, "barrier", lambda g: BARRIER)


@instruction("s_branch", family=FAMILY, section="S_BRANCH")
def s_branch(ins: Instruction, env: Environment) -> Operation:
    """Jump."""
    target = ins.target
    return Operation(ins, "branch", lambda g: target)


def _conditional(ins: Instruction, condition: np.ndarray) -> int | np.ndarray | None:
    """All waves one way, or the bools of those that jump."""
    if condition.all():
        return ins.target
    return condition if condition.any() else None


@instruction("s_cbranch_scc0", "s_cbranch_scc1", family=FAMILY, section="S_CBRANCH_SCC0, S_CBRANCH_SCC1")
def s_cbranch_scc(ins: Instruction, env: Environment) -> Operation:
    """Jump on the scalar condition code."""
    if ins.mnemonic.endswith("1"):
        return Operation(ins, "branch", lambda g: _conditional(ins, g.scc), reads=[SCC_ID], sinks=[SCC_ID])
    return Operation(ins, "branch", lambda g: _conditional(ins, ~g.scc), reads=[SCC_ID], sinks=[SCC_ID])


@instruction(
    "s_cbranch_vccz",
    "s_cbranch_vccnz",
    "s_cbranch_execz",
    "s_cbranch_execnz",
    family=FAMILY,
    section="S_CBRANCH_VCCZ, S_CBRANCH_VCCNZ, S_CBRANCH_EXECZ, S_CBRANCH_EXECNZ",
)
def s_cbranch_mask(ins: Instruction, env: Environment) -> Operation:
    """Jump on VCC or EXEC being zero or not."""
    low, high = (EXEC_LO, EXEC_HI) if "exec" in ins.mnemonic else (VCC_LO, VCC_HI)
    ids = [SCALAR_ID + low, SCALAR_ID + high]
    zero = ins.mnemonic.endswith("nz") is False

    def run(g: Group) -> int | np.ndarray | None:
        return _conditional(ins, ((g.s[low] | g.s[high]) == 0) == zero)

    return Operation(ins, "branch", run, reads=ids, sinks=ids)


@instruction("s_waitcnt", family=FAMILY, section="S_WAITCNT")
def s_waitcnt(ins: Instruction, env: Environment) -> Operation:
    """Wait until at most so many memory operations are outstanding. expcnt has nothing to count here."""
    limits = {}
    for word in re.split(r"[\s&,]+", ins.raw.strip()):
        match = re.fullmatch(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", word)
        if match:
            limits[match.group(1)] = int(match.group(2))
        elif re.fullmatch(r"0x[0-9a-fA-F]+|\d+", word):
            # The immediate: vmcnt [3:0] and [15:14], expcnt [6:4], lgkmcnt [11:8].
            value = int(word, 0)
            limits = {"vmcnt": value & 15 | value >> 14 << 4, "lgkmcnt": value >> 8 & 15}
        else:
            raise Unimplemented(f"wait for {word!r}")
    vm, lgkm = limits.get("vmcnt", VM_LIMIT), limits.get("lgkmcnt", LGKM_LIMIT)

    def run(g: Group) -> None:
        if len(g.vm) > vm:
            g.machine.retire(g, g.vm, vm)
        if len(g.lgkm) > lgkm:
            g.machine.retire(g, g.lgkm, lgkm)

    return Operation(ins, "wait", run, aux=(vm, lgkm))


@instruction(
    "s_nop",
    "s_sleep",
    "s_setprio",
    "s_sethalt",
    "s_inst_prefetch",
    "s_dcache_wb",
    "s_icache_inv",
    "s_dcache_inv",
    "s_ttracedata",
    "s_incperflevel",
    "s_decperflevel",
    "s_wakeup",
    "buffer_wbl2",
    "buffer_inv",
    family=FAMILY,
    section="S_NOP, S_SLEEP, S_SETPRIO and cache control",
    modifiers=["sc0", "sc1", "nt"],
)
def no_effect(ins: Instruction, env: Environment) -> Operation:
    """Timing, priority and cache control: nothing that the emulated memory could show."""
    for operand in ins.operands:
        if not isinstance(operand, Constant):
            raise Unimplemented("operand that is no constant")
        if ins.mnemonic == "s_sethalt" and operand.value:
            raise Unimplemented("a halt: the wave would stop for good")
    return Operation(ins, "other", lambda g: None)
