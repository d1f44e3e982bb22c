"""How a launch is emulated: timing of memory, order of waves, checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

MemoryMode = Literal["latest", "earliest", "seeded", "latest-vmem"]
Schedule = Literal["lockstep", "skewed", "skewed-reverse", "seeded"]


@dataclass(frozen=True)
class Checks:
    """Which checks run; each can be switched off alone.

    Attributes
    ----------
    in_flight : bool
        A register or LDS byte is used while its data is still on its way.
    races : bool
        LDS bytes shared by waves without a wait and a barrier between.
    global_races : bool
        Global bytes written by two workgroups.
    undefined : bool
        Registers or LDS that nobody wrote reach a store, an address or a branch.
    wait_states : bool
        Static: wait states that the program must insert and does not.
    """

    in_flight: bool = True
    races: bool = True
    global_races: bool = True
    undefined: bool = True
    wait_states: bool = True

    @classmethod
    def none(cls) -> Checks:
        """Every check off; memory faults are still raised."""
        return cls(False, False, False, False, False)


@dataclass(frozen=True)
class Options:
    """How a launch is emulated.

    Attributes
    ----------
    memory : {"latest", "earliest", "seeded", "latest-vmem"}
        When loads, LDS-DMA and LDS operations take effect: as late as the wait counters allow, at once, or at seeded
        moments in between. "latest-vmem": what vmcnt counts (LDS-DMA among it) late and the rest at once, so that LDS
        is read before a DMA that nobody has waited for arrives.
    schedule : {"lockstep", "skewed", "skewed-reverse", "seeded"}
        Order of a workgroup's waves: together; each as far as it gets before the next; random.
    seed : int
        For the seeded modes.
    checks : Checks
    on_report : {"collect", "raise"}
        Whether what the checks find ends the launch with an error after it has run.
    max_waves : int
        Waves that run at once; bounds memory.
    max_instructions : int
        Steps of a batch (instructions of a group of waves) before the kernel counts as endless.
    trace : bool
        Keep the lines that each wave executed.
    profile : bool
        Measure where the emulator's own time goes.
    poison : int
        Pattern of registers and LDS that nobody has written.
    """

    memory: MemoryMode = "latest"
    schedule: Schedule = "lockstep"
    seed: int = 0
    checks: Checks = field(default_factory=Checks)
    on_report: Literal["collect", "raise"] = "collect"
    max_waves: int = 256
    max_instructions: int = 50_000_000
    trace: bool = False
    profile: bool = False
    poison: int = 0xFFF7BAD1
