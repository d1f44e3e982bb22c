"""Loading: decode every instruction of a program once, or refuse the whole program."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import lru_cache

from .blocks import Blocks
from .errors import UnimplementedInstruction
from .lint import Lint
from .operation import TABLE, Entry, Environment, Operation, Unimplemented, decode
from .program import Program
from .reports import Report, Reports

FAMILIES = (
    "control",
    "scalar",
    "vector",
    "arithmetic",
    "conversion",
    "packed",
    "matrix",
    "crosslane",
    "lds",
    "smem",
    "vmem",
    "buffer",
    "half",
    "atomics",
)


def load_table() -> dict[str, Entry]:
    """Import every instruction family; return the table of implemented mnemonics."""
    for family in FAMILIES:
        importlib.import_module(f"{__package__}.isa.{family}")
    return dict(TABLE)


@dataclass
class LoadedProgram:
    """A program whose instructions are decoded."""

    program: Program
    environment: Environment
    operations: list[Operation]
    store_granule: int = 4
    blocks: Blocks = field(init=False)
    _wait_states: list[Report] | None = None

    def __post_init__(self) -> None:
        self.blocks = Blocks(self.operations)

    def wait_states(self) -> list[Report]:
        """Findings of the static lint, made once."""
        if self._wait_states is None:
            reports = Reports(self.program)
            Lint(self).run(reports)
            self._wait_states = reports.items
        return self._wait_states


def _store_granule(program: Program) -> int:
    """Bytes of the narrowest store, at most a dword."""
    names = {instruction.mnemonic for instruction in program.instructions}
    if any("_store_byte" in name for name in names):
        return 1
    return 2 if any("_store_short" in name for name in names) else 4


_loaded: dict[str, LoadedProgram] = {}


def load(program: Program) -> LoadedProgram:
    """Decode a program; every instruction that is not implemented is named in one error.

    Kernel names are not unique, so the cache is keyed on the text's digest.
    """
    known = _loaded.get(program.digest)
    if known is not None:
        return known
    load_table()
    environment = Environment(program, agpr_base=program.vgprs)
    operations: list[Operation] = []
    problems: list[tuple[int, str, str]] = []
    for instruction in program.instructions:
        try:
            operations.append(decode(instruction, environment))
        except Unimplemented as error:
            problems.append((instruction.line, instruction.text, str(error)))
        except (IndexError, ValueError, AssertionError) as error:
            problems.append((instruction.line, instruction.text, f"its operands: {error or 'not as expected'}"))
    if not program.instructions or not program.instructions[-1].mnemonic.startswith(("s_endpgm", "s_branch")):
        last = program.instructions[-1] if program.instructions else None
        problems.append((last.line if last else 0, last.text if last else "", "the text ends without s_endpgm"))
    if problems:
        raise UnimplementedInstruction(program.name, problems)
    importlib.import_module(f"{__package__}.isa.matrix").share_operands(operations)
    loaded = LoadedProgram(program, environment, operations, store_granule=_store_granule(program))
    _loaded[program.digest] = loaded
    return loaded


@lru_cache(maxsize=256)
def load_text(text: str, kernel: str | None = None) -> LoadedProgram:
    """Parse and decode one kernel of an ISA text, once for every text that is still in use."""
    return load(Program.parse(text, kernel))
