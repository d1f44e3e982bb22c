"""A gfx950 machine for compiled kernels: executes the assembly that FlyDSL's compiler emits, on numpy alone.

It takes ISA text, a grid and kernel arguments, runs the kernel on the caller's memory, counts what was executed and
reports races, missing waits, undefined values and illegal addresses. It knows nothing of attention, torch or FlyDSL.
"""

from .counts import Counts
from .coverage import Coverage, isa_coverage
from .errors import EmulatorError, MachineFault, MemoryFault, ProgramError, UnimplementedInstruction
from .loader import LoadedProgram, load, load_text
from .machine import Launch, Machine, Result
from .memory import Memory, Region
from .options import Checks, Options
from .program import Program
from .queue import Graph, Stream, Work, graph, stream, submit
from .reports import HazardError, Report

__all__ = [
    "Checks",
    "Counts",
    "Coverage",
    "EmulatorError",
    "Graph",
    "HazardError",
    "Launch",
    "LoadedProgram",
    "Machine",
    "MachineFault",
    "Memory",
    "MemoryFault",
    "Options",
    "Program",
    "ProgramError",
    "Region",
    "Report",
    "Result",
    "Stream",
    "UnimplementedInstruction",
    "Work",
    "graph",
    "isa_coverage",
    "load",
    "load_text",
    "stream",
    "submit",
]
