"""A decoded instruction, and the table that decoders are registered in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .lanewise import Lanewise, separable
from .state import SCALAR_ID
from .syntax import Instruction, Register

if TYPE_CHECKING:
    from .program import Program
    from .state import Group


class Unimplemented(Exception):
    """A decoder met an operand or modifier that it does not implement; collected into one load-time error."""


class Operation:
    """One instruction, decoded once.

    Attributes
    ----------
    run : callable
        ``run(group)`` executes it for a group of waves. None: go on with the next instruction. An int: all waves
        continue there. A ``Control``: the machine decides.
    kind : str
        Class for counts: "valu", "trans", "salu", "mfma", "lds", "vmem", "smem", "branch", "wait", "barrier", "other".
    reads, writes : frozenset of int
        Register ids.
    vreads : frozenset of int
        Vector rows among ``reads``.
    sinks : frozenset of int
        Vector and scalar ids whose content leaves the wave: addresses, stored data, branch conditions.
    lanewise : tuple of Lanewise
        The results of an instruction that does nothing but compute them, lane by lane; empty for all others.
    moves : callable, optional
        How an exchange or DPP moves a source between lanes; undefined bits move likewise.
    """

    __slots__ = (
        "aux",
        "index",
        "instruction",
        "kind",
        "lanewise",
        "moves",
        "passes",
        "reads",
        "regs",
        "run",
        "sinks",
        "writes",
    )

    def __init__(
        self,
        instruction: Instruction,
        kind: str,
        run: Callable[[Group], Any],
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        sinks: Iterable[int] = (),
        moves: Callable[..., Any] | None = None,
        aux: Any = None,
        lanewise: tuple[Lanewise, ...] = (),
    ) -> None:
        self.instruction = instruction
        self.index = instruction.index
        self.kind = kind
        self.run = run
        self.reads = frozenset(reads)
        self.writes = frozenset(writes)
        self.regs = self.reads | self.writes
        self.sinks = frozenset(sinks)
        self.moves = moves
        self.aux = aux
        self.lanewise = lanewise if separable(lanewise) else ()

    def __repr__(self) -> str:
        return f"<line {self.instruction.line}: {self.instruction.text}>"


@dataclass
class Environment:
    """What decoders know of the program around an instruction."""

    program: Program
    agpr_base: int

    def row(self, register: Register) -> int:
        """First vector row of a VGPR or AGPR operand."""
        return register.index + (self.agpr_base if register.file == "a" else 0)

    def ids(self, *operands: Any) -> set[int]:
        """Register ids of operands; what is no register has none."""
        found: set[int] = set()
        for operand in operands:
            if isinstance(operand, Register):
                first = SCALAR_ID + operand.index if operand.file == "s" else self.row(operand)
                found.update(range(first, first + operand.count))
        return found


Decoder = Callable[[Instruction, Environment], Operation]


@dataclass(frozen=True)
class Entry:
    """One implemented mnemonic."""

    mnemonic: str
    family: str
    section: str
    decode: Decoder
    modifiers: frozenset[str]


TABLE: dict[str, Entry] = {}


def instruction(
    *mnemonics: str, family: str, section: str, modifiers: Iterable[str] = ()
) -> Callable[[Decoder], Decoder]:
    """Register a decoder for mnemonics.

    Parameters
    ----------
    mnemonics : str
        Without encoding suffix.
    family : str
        Module of the instruction.
    section : str
        Where the CDNA4 manual describes it.
    modifiers : iterable of str
        Modifiers that the decoder handles; any other one is a load-time error.
    """

    def register(decode: Decoder) -> Decoder:
        for mnemonic in mnemonics:
            if mnemonic in TABLE:
                raise ValueError(f"{mnemonic} is registered twice")
            TABLE[mnemonic] = Entry(mnemonic, family, section, decode, frozenset(modifiers))
        return decode

    return register


def decode(ins: Instruction, environment: Environment) -> Operation:
    """Decode one instruction, or raise Unimplemented."""
    entry = TABLE.get(ins.mnemonic)
    if entry is None:
        raise Unimplemented("unknown mnemonic")
    foreign = [name for name in ins.modifiers if name not in entry.modifiers]
    if foreign:
        raise Unimplemented(f"modifier {', '.join(foreign)}")
    return entry.decode(ins, environment)
