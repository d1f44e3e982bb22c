"""What the emulator raises: at load time for a program it cannot run, at run time for a program that is wrong."""

from __future__ import annotations

from typing import Any


class EmulatorError(Exception):
    """Base of every error of the emulator."""


class ProgramError(EmulatorError):
    """The ISA text or its metadata can't be understood."""


class UnimplementedInstruction(ProgramError):
    """The program holds instructions, operands or modifiers that the emulator does not implement.

    Raised once, at load time, for the whole program.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    problems : list of (line, text, reason)
        Every instruction at fault, in program order.
    """

    def __init__(self, kernel: str, problems: list[tuple[int, str, str]]) -> None:
        self.kernel = kernel
        self.problems = problems
        shown = "\n".join(f"  line {line}: {text}    ({reason})" for line, text, reason in problems[:20])
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        super().__init__(f"kernel {kernel}: {len(problems)} instruction(s) not implemented:\n{shown}{more}")


class MachineFault(EmulatorError):
    """The running kernel did what no hardware would survive or what leaves its result undefined.

    Parameters
    ----------
    message : str
        What happened.
    details : dict
        The same as values: kernel, line, text, wave, lane, address and so on, as far as they apply.

    Attributes
    ----------
    reports : list of Report
        What the checks had found until then.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details
        self.reports: list[Any] = []

    def attach(self, reports: list[Any]) -> None:
        """Add what the checks had found before."""
        self.reports = reports
        if reports:
            shown = "\n".join(f"  {report.message}" for report in reports[:5])
            self.args = (f"{self.args[0]}\nfound before it:\n{shown}",)


class MemoryFault(MachineFault):
    """An access outside every registered tensor, to LDS beyond its size, misaligned, or a write to read-only memory."""
