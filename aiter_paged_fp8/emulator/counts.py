"""Counts of what a launch really executed, as a value and as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loader import LoadedProgram


@dataclass
class Counts:
    """Counts of one launch.

    Attributes
    ----------
    instructions : int
        Wave-instructions.
    by_class, by_mnemonic, by_line : dict
        The same, split; lines are those of the ISA text.
    bytes : dict
        Bytes per memory path, active lanes only: "global read", "global written", "lds read", "lds written",
        "lds dma", "scalar read".
    lds_conflict_cycles : int
        LDS cycles beyond those that a conflict-free access of the same width takes.
    lds_conflicts_by_line : dict
    cache_lines : dict
        Distinct 128-byte lines touched per registered tensor: "name read" and "name written".
    seconds : dict
        Wall time of the emulator itself by class, where ``Options.profile`` asked for it.
    """

    kernel: str
    workgroups: int = 0
    waves: int = 0
    instructions: int = 0
    by_class: dict[str, int] = field(default_factory=dict)
    by_mnemonic: dict[str, int] = field(default_factory=dict)
    by_line: dict[int, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    lds_conflict_cycles: int = 0
    lds_conflicts_by_line: dict[int, int] = field(default_factory=dict)
    cache_lines: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def to_json(self, **kwargs: Any) -> str:
        """Return JSON text; keyword arguments go to ``json.dumps``."""
        return json.dumps(self.as_dict(), **kwargs)


class Counter:
    """Collects counts while a launch runs."""

    def __init__(self, loaded: LoadedProgram, *, profile: bool = False) -> None:
        self.loaded = loaded
        self.seconds: list[float] | None = [0.0] * len(loaded.operations) if profile else None
        self.executed = [0] * len(loaded.operations)
        # The same for blocks that were taken whole, by their numbers.
        self.blocks: dict[int, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)
        self.conflicts: dict[int, int] = defaultdict(int)
        self.cache_lines: dict[str, int] = defaultdict(int)

    def finish(self, workgroups: int, waves: int) -> Counts:
        """Sum up."""
        by_class: dict[str, int] = defaultdict(int)
        by_mnemonic: dict[str, int] = defaultdict(int)
        by_line: dict[int, int] = {}
        for number, count in self.blocks.items():
            block = self.loaded.blocks.all[number]
            for index in range(block.start, block.end):
                self.executed[index] += count
        self.blocks.clear()
        for operation, count in zip(self.loaded.operations, self.executed, strict=True):
            if count:
                by_class[operation.kind] += count
                by_mnemonic[operation.instruction.mnemonic] += count
                by_line[operation.instruction.line] = count
        seconds: dict[str, float] = defaultdict(float)
        for operation, spent in zip(self.loaded.operations, self.seconds or (), strict=False):
            if spent:
                seconds[operation.kind] += spent
        return Counts(
            kernel=self.loaded.program.name,
            workgroups=workgroups,
            waves=workgroups * waves,
            instructions=sum(self.executed),
            by_class=dict(sorted(by_class.items())),
            by_mnemonic=dict(sorted(by_mnemonic.items())),
            by_line=by_line,
            bytes=dict(sorted(self.bytes.items())),
            lds_conflict_cycles=sum(self.conflicts.values()),
            lds_conflicts_by_line={
                self.loaded.program.instructions[index].line: cycles for index, cycles in sorted(self.conflicts.items())
            },
            cache_lines=dict(sorted(self.cache_lines.items())),
            seconds=dict(sorted(seconds.items())),
        )
