"""Static lint: wait states that the hardware does not insert by itself (manual, 4.5 table 11 and 7.6 table 38).

From each instruction that starts such a dependency, every path is followed as far as the longest wait reaches. An
instruction between counts as one wait state, `s_nop n` as n + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .math import mfma
from .operation import Operation
from .state import SCALAR_ID
from .syntax import EXEC_HI, EXEC_LO, M0, VCC_HI, VCC_LO, Constant, Name, Register

if TYPE_CHECKING:
    from .loader import LoadedProgram
    from .reports import Reports

EXEC_IDS = frozenset({SCALAR_ID + EXEC_LO, SCALAR_ID + EXEC_HI})
VCC_IDS = frozenset({SCALAR_ID + VCC_LO, SCALAR_ID + VCC_HI})
# Waits after a matrix product of 2, 4, 8, 16 passes until its result may be read as A or B or by anything else, and
# until a product that takes it as an overlapping, not identical, C may start.
AFTER_PRODUCT = {2: 5, 4: 8, 8: 12, 16: 20}
BEFORE_OVERLAPPING_ADDEND = {2: 4, 4: 6, 8: 10, 16: 18}
# The same of products of f32 operands, which do not run on the XDL unit.
AFTER_SINGLE_PRODUCT = {2: 4, 4: 6, 8: 10, 16: 18}
BEFORE_OVERLAPPING_SINGLE_ADDEND = {2: 2, 4: 4, 8: 8, 16: 16}
# Until a VALU instruction may overwrite an addend that the product still reads.
BEFORE_ADDEND_IS_OVERWRITTEN = {2: 1, 4: 3, 8: 7, 16: 15}
LONGEST = max(AFTER_PRODUCT.values())
# Operand positions that a mask or carry is read at without delay.
CARRY_WRITERS = (
    "v_add_co",
    "v_addc_co",
    "v_sub_co",
    "v_subb_co",
    "v_subrev_co",
    "v_subbrev_co",
    "v_mad_u64",
    "v_mad_i64",
)
MASK_READERS = ("v_cndmask", "v_addc_co", "v_subb_co", "v_subbrev_co")


@dataclass(frozen=True)
class Rule:
    """What the second instruction must wait for."""

    wait: int
    reason: str


def passes(op: Operation) -> int:
    """Passes of 4 clocks of a matrix product (manual, notes of each instruction; 7.1 for f8f6f4)."""
    ins = op.instruction
    parsed = mfma.parse(ins.mnemonic)
    base = {32: 8, 16: 4, 4: 2}[parsed.shape.rows]
    if parsed.a is None:
        # fp8 or bf8 on either side takes twice as long as fp6 and fp4.
        return 2 * base if min(ins.integer("cbsz"), ins.integer("blgp")) < 2 else base
    doubled = parsed.a == "f32" or parsed.shape.blocks > 1
    return 2 * base if doubled and parsed.shape.rows > 4 else base


def _vector(ids: frozenset[int]) -> frozenset[int]:
    return frozenset(identity for identity in ids if identity < SCALAR_ID)


def _scalar(ids: frozenset[int]) -> frozenset[int]:
    return frozenset(identity for identity in ids if identity >= SCALAR_ID)


class Lint:
    """Finds missing wait states of one program."""

    def __init__(self, loaded: LoadedProgram) -> None:
        self.operations = loaded.operations
        self.environment = loaded.environment

    def run(self, reports: Reports) -> None:
        """Report every missing wait state between two instructions once."""
        for first in self.operations:
            if not self._starts(first):
                continue
            for second, states in self._reach(first):
                for rule in self._rules(first, second):
                    if states < rule.wait:
                        reports.add(
                            "wait-states",
                            f"needs {rule.wait} wait states ({rule.reason}) and has {states} after",
                            second.index,
                            first.index,
                            topic=rule.reason,
                        )

    @staticmethod
    def _starts(op: Operation) -> bool:
        return op.kind in ("valu", "trans", "mfma") or SCALAR_ID + M0 in op.writes or _wide_store(op)

    def _reach(self, first: Operation) -> Iterator[tuple[Operation, int]]:
        """Instructions that may follow, each with the fewest wait states between."""
        best: dict[int, int] = {}
        queue = [(index, 0) for index in self._followers(first)]
        while queue:
            index, states = queue.pop()
            if states >= LONGEST or best.get(index, LONGEST) <= states:
                continue
            best[index] = states
            op = self.operations[index]
            if op.instruction.mnemonic == "s_nop":
                operand = op.instruction.operands[0]
                step = int(operand.value) + 1 if isinstance(operand, Constant) else 1
            else:
                step = 1
            queue.extend((follower, states + step) for follower in self._followers(op))
        for index, states in best.items():
            yield self.operations[index], states

    def _followers(self, op: Operation) -> list[int]:
        ins = op.instruction
        if ins.mnemonic == "s_endpgm":
            return []
        after = [] if ins.target is None else [ins.target]
        if ins.mnemonic != "s_branch":
            after.append(ins.index + 1)
        return [index for index in after if index < len(self.operations)]

    def _rules(self, first: Operation, second: Operation) -> Iterator[Rule]:
        if second.kind == "mfma" or second.kind in ("valu", "trans", "lds", "vmem"):
            if first.kind == "mfma":
                yield from self._after_product(first, second)
            elif first.kind in ("valu", "trans"):
                yield from self._after_valu(first, second)
        m0 = SCALAR_ID + M0
        if m0 in first.writes and first.kind == "salu" and m0 in second.reads and second.kind == "vmem":
            yield Rule(1, "SALU writes M0, then a load to LDS uses it")
        if _wide_store(first) and first.kind == "vmem":
            data = _stored(first, self.environment)
            if second.kind in ("valu", "trans") and data & second.writes:
                yield Rule(2, "VALU writes the data registers of a wide store")

    def _after_product(self, first: Operation, second: Operation) -> Iterator[Rule]:
        result = first.writes
        count = passes(first)
        if second.kind in ("valu", "trans"):
            kept = frozenset(self.environment.ids(first.instruction.operands[3])) - result
            if kept & second.writes:
                wait = BEFORE_ADDEND_IS_OVERWRITTEN[count]
                yield Rule(wait, "VALU overwrites C of a matrix product that still reads it")
        if not result & second.regs:
            return
        single = mfma.parse(first.instruction.mnemonic).a == "f32"
        after = (AFTER_SINGLE_PRODUCT if single else AFTER_PRODUCT)[count]
        overlapping = (BEFORE_OVERLAPPING_SINGLE_ADDEND if single else BEFORE_OVERLAPPING_ADDEND)[count]
        if second.kind == "mfma":
            operands = second.instruction.operands
            factors = frozenset(self.environment.ids(*operands[1:3], *operands[4:]))
            addend = frozenset(self.environment.ids(operands[3]))
            if factors & result:
                yield Rule(after, "a matrix product's result is read as A or B")
            if addend & result and addend != result:
                yield Rule(overlapping, "a matrix product's result overlaps C of the next one")
        elif second.kind in ("valu", "trans"):
            yield Rule(after, "a matrix product's result is read or overwritten by VALU")
        elif result & second.reads:
            yield Rule(after, "a matrix product's result is read by a memory instruction")

    def _after_valu(self, first: Operation, second: Operation) -> Iterator[Rule]:
        vector, scalar = _vector(first.writes), _scalar(first.writes)
        one, two = first.instruction, second.instruction
        valu = second.kind in ("valu", "trans")
        if second.kind == "mfma" and vector & second.reads:
            yield Rule(2, "VALU writes a register that a matrix product reads")
        if "v_cmpx" in one.mnemonic:
            if second.kind == "mfma":
                yield Rule(4, "v_cmpx writes EXEC before a matrix product")
            elif two.mnemonic.startswith(("v_permlane", "v_readlane", "v_readfirstlane", "v_writelane")):
                yield Rule(4, "v_cmpx writes EXEC before an exchange between lanes")
        if valu and "dpp" in two.encoding:
            moved = frozenset(self.environment.ids(two.operands[1]))
            if vector & moved:
                yield Rule(2, "VALU writes a register that DPP moves")
            if EXEC_IDS & scalar:
                yield Rule(5, "VALU writes EXEC before DPP")
        if two.mnemonic.startswith("v_permlane") and vector & second.reads:
            yield Rule(2, "VALU writes a register that v_permlane reads")
        if two.mnemonic in ("v_readlane_b32", "v_readfirstlane_b32") and vector & second.reads:
            yield Rule(1, "VALU writes a register that v_readlane or v_readfirstlane reads")
        if first.kind == "trans" and second.kind == "valu" and vector & second.reads:
            yield Rule(1, "a transcendental result is read by another VALU instruction")
        if _shifts_result(first) and valu and vector & second.reads:
            yield Rule(1, "a result whose place OPSEL or SDWA changed is read")
        if scalar and second.kind == "vmem" and scalar & second.reads:
            yield Rule(5, "VALU writes a scalar register that a memory instruction reads")
        if scalar and valu:
            yield from self._scalar_reads(scalar, second)

    def _scalar_reads(self, scalar: frozenset[int], second: Operation) -> Iterator[Rule]:
        two = second.instruction
        if two.mnemonic == "v_div_fmas_f32" and scalar & VCC_IDS:
            yield Rule(4, "VALU writes VCC before v_div_fmas")
            return
        if two.mnemonic in ("v_readlane_b32", "v_writelane_b32"):
            if frozenset(self.environment.ids(two.operands[-1])) & scalar:
                yield Rule(4, "VALU writes a scalar register that selects a lane")
            return
        # A carry that the instruction writes stands second.
        operands = two.operands[2 if two.mnemonic.startswith(CARRY_WRITERS) else 1 :]
        if two.mnemonic.startswith(MASK_READERS):
            operands = operands[:-1]
        constants = frozenset(
            identity
            for operand in operands
            if isinstance(operand, Register) and operand.file == "s"
            for identity in self.environment.ids(operand)
        )
        if constants & scalar & second.reads:
            yield Rule(2, "VALU writes a scalar register that VALU reads as a constant")


def _wide_store(op: Operation) -> bool:
    """A store of three or four dwords whose data registers stay in use for a while."""
    ins = op.instruction
    if op.kind != "vmem" or "_store_dwordx" not in ins.mnemonic or ins.mnemonic.endswith("x2"):
        return False
    if ins.mnemonic.startswith("buffer_"):
        offset = ins.operands[3] if len(ins.operands) > 3 else None
        return not isinstance(offset, (Register, Name))
    return True


def _stored(op: Operation, environment: object) -> frozenset[int]:
    ins = op.instruction
    data = ins.operands[0 if ins.mnemonic.startswith("buffer_") else 1]
    return frozenset(environment.ids(data))  # type: ignore[attr-defined]


def _shifts_result(op: Operation) -> bool:
    ins = op.instruction
    if ins.encoding == "sdwa":
        return ins.modifiers.get("dst_sel", "DWORD") != "DWORD"
    picks = ins.bits("op_sel", ())
    return len(picks) > 2 and bool(picks[-1]) and ins.mnemonic.startswith("v_cvt")
