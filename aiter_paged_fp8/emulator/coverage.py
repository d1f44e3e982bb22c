"""Instruction coverage: which mnemonics are implemented, which programs have met, which tests name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .loader import load_table
from .program import Program


@dataclass(frozen=True)
class Coverage:
    """One mnemonic.

    Attributes
    ----------
    family, section : str
        Module, and where the manual describes it; "" where it is not implemented.
    met : int
        How often it stands in the given programs.
    tested : bool
        Whether a given test text names it.
    """

    mnemonic: str
    family: str
    section: str
    implemented: bool
    met: int
    tested: bool


def isa_coverage(programs: Iterable[Program] = (), tests: Iterable[str] = ()) -> list[Coverage]:
    """Coverage of every implemented mnemonic and of every one that the programs hold.

    Parameters
    ----------
    programs : iterable of Program
        Compiled kernels.
    tests : iterable of str
        Texts of test files.
    """
    table = load_table()
    met: dict[str, int] = {}
    for program in programs:
        for instruction in program.instructions:
            met[instruction.mnemonic] = met.get(instruction.mnemonic, 0) + 1
    named = {word for text in tests for word in re.findall(r"\b[a-z]+_[a-z0-9_]+", text)}
    return [
        Coverage(
            mnemonic,
            table[mnemonic].family if mnemonic in table else "",
            table[mnemonic].section if mnemonic in table else "",
            mnemonic in table,
            met.get(mnemonic, 0),
            mnemonic in named,
        )
        for mnemonic in sorted(table.keys() | met.keys())
    ]
