"""What the checks found: each kind of finding between two lines once, with how often it happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .errors import MachineFault

if TYPE_CHECKING:
    from .program import Program


class HazardError(MachineFault):
    """A launch ran, and the checks found something."""


@dataclass
class Report:
    """One finding.

    Attributes
    ----------
    kind : str
        "in-flight", "race", "global-race", "undefined", "wait-states".
    message : str
        Complete sentence that names kernel, both lines, wave and place.
    line, other_line : int or None
        The instruction at which it was noticed, and the one it conflicts with.
    count : int
        How often it happened.
    """

    kind: str
    message: str
    line: int
    other_line: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    count: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return asdict(self)


class Reports:
    """Findings of one launch, without repetition."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.items: list[Report] = []
        self._known: dict[tuple[str, int, int | None, str], Report] = {}

    def add(
        self, kind: str, message: str, index: int, other: int | None = None, *, topic: str = "", **details: Any
    ) -> None:
        """Note a finding between two instructions; a repetition only counts.

        Parameters
        ----------
        message : str
            What is wrong; kernel and lines are put around it.
        index, other : int
            Instructions.
        topic : str
            Tells findings of one kind between the same lines apart.
        """
        key = (kind, index, other, topic)
        known = self._known.get(key)
        if known is not None:
            known.count += 1
            return
        program = self.program
        text = f"kernel {program.name}: {kind}: {program.describe(index)} {message}"
        if other is not None:
            text += f" ({program.describe(other)})"
        report = Report(
            kind,
            text,
            program.instructions[index].line,
            None if other is None else program.instructions[other].line,
            details,
        )
        self._known[key] = report
        self.items.append(report)

    def extend(self, reports: list[Report]) -> None:
        """Take findings over that were made elsewhere."""
        self.items.extend(replace(report) for report in reports)

    def throw(self, result: Any) -> None:
        """Raise what was found; the launch's result travels in the error's details."""
        shown = "\n".join(f"  {report.message} [{report.count}x]" for report in self.items[:20])
        raise HazardError(f"{len(self.items)} finding(s):\n{shown}", reports=self.items, result=result)
