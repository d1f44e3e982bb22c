"""The machine: runs a decoded program over a grid, all waves that stand at the same program counter together."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import threadpoolctl

from .blocks import SHORTEST, Block
from .counts import Counter, Counts
from .errors import MachineFault, MemoryFault
from .hazards import HazardChecks
from .lds import Lds
from .loader import LoadedProgram
from .memory import Memory, Region
from .operation import Operation
from .options import Options
from .pending import Pending
from .program import Program
from .reports import Report, Reports
from .schedule import Scheduler, rectangles
from .setup import initial_state
from .state import LANES, Files, Group, Rect

Triple = tuple[int, int, int]

# What an operation returns when the machine has to act.
END, BARRIER = object(), object()

# Largest values of the counters (manual, "S_WAITCNT"): issue stalls there, which retires the oldest.
VM_LIMIT, LGKM_LIMIT = 63, 15

KERNARG_GRANULE = 64


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let glibc keep the pages of freed arrays: handing back and clearing those of every result takes half the time."""
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, 1 << 28)
        library.mallopt(mmap_threshold, 1 << 25)


@lru_cache(maxsize=1)
def _thread_pools() -> threadpoolctl.ThreadpoolController:
    return threadpoolctl.ThreadpoolController()


def one_blas_thread() -> contextlib.AbstractContextManager[object]:
    """Keep numpy's BLAS to one thread: waking a second one for each small product takes three times as long."""
    limited: contextlib.AbstractContextManager[object] = _thread_pools().limit(limits=1, user_api="blas")
    return limited


@lru_cache(maxsize=1)
def touch_blas_buffer() -> None:
    """Have BLAS write all of the buffer that it packs operands into.

    Its kernels prefetch beyond what is packed. Until the pages there have been written once, small products take twice
    as long (OpenBLAS 0.3.31 on Zen).
    """
    square = np.ones((256, 256), np.float32)
    np.matmul(square, square)


@dataclass
class Launch:
    """One launch: what to run on what.

    Attributes
    ----------
    grid : tuple of int
        Workgroups in x, y, z.
    block : tuple of int
        Threads of a workgroup in x, y, z.
    kernarg : bytes
        Content of the kernarg segment.
    dynamic_lds : int
        LDS bytes beyond the program's static ones.
    """

    program: LoadedProgram
    grid: Triple
    block: Triple
    kernarg: bytes
    dynamic_lds: int = 0


@dataclass
class Result:
    """What came out of a launch, beside the bytes in memory."""

    kernel: str
    grid: Triple
    block: Triple
    counts: Counts
    reports: list[Report]
    trace: dict[tuple[int, int], list[int]] | None = None
    program: Program | None = None


class Machine:
    """Runs one launch.

    Parameters
    ----------
    launch : Launch
    memory : Memory
        Registered tensors.
    options : Options
    """

    def __init__(self, launch: Launch, memory: Memory, options: Options) -> None:
        self.launch = launch
        self.loaded = launch.program
        self.program = launch.program.program
        self.operations = launch.program.operations
        self.memory = memory
        self.options = options
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        if not 1 <= threads <= 1024:
            raise MachineFault(f"a workgroup of {launch.block} = {threads} threads; 1 to 1024 are possible")
        self.threads = threads
        self.waves = -(-threads // LANES)
        self.workgroups = launch.grid[0] * launch.grid[1] * launch.grid[2]
        self.lds_size = self.program.lds_size + launch.dynamic_lds
        self.reports = Reports(self.program)
        self.counter = Counter(self.loaded, profile=options.profile)
        self.random = random.Random(options.seed)
        self.trace: dict[tuple[int, int], list[int]] | None = {} if options.trace else None
        # By counter: lgkmcnt, vmcnt.
        self.late = {True: options.memory in ("latest", "seeded"), False: options.memory != "earliest"}
        self.seeded_memory = options.memory == "seeded"
        # How early either counter's operations take effect: some seeds let LDS operations hurry and DMA lag behind.
        self.haste = {lgkm: self.random.choice((0.0, 0.5, 1.0)) for lgkm in (False, True)}
        self.first_workgroup = 0
        self.batch = 0

    # -- launching ----------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Run every workgroup, in batches that bound memory."""
        # The runtime allocates whole granules, and compilers read wide scalar loads past the last argument.
        padded = self.launch.kernarg + bytes(-len(self.launch.kernarg) % KERNARG_GRANULE)
        storage = np.empty(len(padded) + KERNARG_GRANULE, np.uint8)
        start = -storage.ctypes.data % KERNARG_GRANULE
        segment = storage[start : start + len(padded)]
        segment[:] = np.frombuffer(padded, np.uint8)
        self.kernarg = Region(
            "the kernarg segment", segment.ctypes.data, len(padded), writable=False, keepalive=segment
        )
        self.own = [self.kernarg]
        self.memory.regions.append(self.kernarg)
        for region in self.memory.regions:
            region.forget()
        keep_freed_memory()
        touch_blas_buffer()
        collecting = gc.isenabled()
        # A collection inside a run costs 0.2 s and finds nothing: a machine's objects die together.
        gc.disable()
        try:
            with np.errstate(all="ignore"), one_blas_thread():
                per_batch = max(1, self.options.max_waves // self.waves)
                for first in range(0, self.workgroups, per_batch):
                    self._run_batch(first, min(per_batch, self.workgroups - first))
        except MachineFault as fault:
            # What the checks found before often explains the fault.
            fault.attach(self.reports.items)
            raise
        finally:
            if collecting:
                gc.enable()
            self.memory.regions[:] = [region for region in self.memory.regions if region not in self.own]
        if self.options.checks.wait_states:
            self.reports.extend(self.loaded.wait_states())
        for region in self.memory.regions:
            for how, lines in (("read", region.lines_read), ("written", region.lines_written)):
                if lines is not None:
                    self.counter.cache_lines[f"{region.name} {how}"] += lines.count()
        result = Result(
            self.program.name,
            self.launch.grid,
            self.launch.block,
            self.counter.finish(self.workgroups, self.waves),
            self.reports.items,
            self.trace,
            self.program,
        )
        if self.options.on_report == "raise" and result.reports:
            self.reports.throw(result)
        return result

    def _run_batch(self, first: int, count: int) -> None:
        self.first_workgroup, self.batch = first, count
        environment = self.loaded.environment
        self.files = Files(
            environment.agpr_base + self.program.agprs, self.waves, count, self.options.poison & 0xFFFFFFFF
        )
        self.all_lanes = np.ones((self.waves, count, LANES), np.bool_)
        self.lds = Lds(self, self.lds_size, count)
        self.hazards = HazardChecks(self)
        self.at_barrier = np.zeros((self.waves, count), np.bool_)
        self.ended = np.zeros((self.waves, count), np.bool_)
        self.executed = 0
        defined = initial_state(self, first, count)
        whole = Group(self, Rect(0, self.waves, 0, count), 0)
        self.hazards.begin(whole, defined)
        scheduler = self.scheduler = Scheduler(self, whole)
        while True:
            group = scheduler.pick()
            if group is None:
                break
            self._advance(group, scheduler)
        if not self.ended.all():
            self._deadlock()

    # -- the loop -----------------------------------------------------------------------------------------------

    def _advance(self, group: Group, scheduler: Scheduler) -> None:
        """Run a group until it blocks, diverges, ends or reaches a place where another one stands."""
        operations, executed = self.operations, self.counter.executed
        hazards, stops, trace, times = self.hazards, scheduler.stops, self.trace, self.counter.seconds
        budget = scheduler.budget
        waves, pc = group.waves, group.pc
        busy, undefined = group.busy, group.undefined
        steps = 0
        # A trace wants every instruction by itself.
        blocks = self.loaded.blocks if trace is None else None
        while True:
            if blocks is not None and group.full and budget - steps >= SHORTEST:
                block = blocks.at(group, pc)
                if block is not None and steps + block.end - pc <= budget and not self._stops_inside(block, stops):
                    self.counter.blocks[block.number] += waves
                    self._take(group, block)
                    steps += block.end - pc
                    pc = block.end
                    if pc in stops or steps >= budget:
                        self._count(steps)
                        group.pc = pc
                        scheduler.ready(group)
                        return
            op = operations[pc]
            executed[pc] += waves
            if busy and not op.regs.isdisjoint(busy):
                hazards.in_flight(group, op)
            if undefined and not op.regs.isdisjoint(undefined):
                hazards.undefined(group, op)
            if trace is not None:
                self._trace(group, pc)
            steps += 1
            if times is None:
                outcome = op.run(group)
            else:
                start = perf_counter()
                outcome = op.run(group)
                times[pc] += perf_counter() - start
            if outcome is None:
                pc += 1
            elif outcome.__class__ is int:
                backward = outcome <= pc
                pc = outcome
                if backward:
                    budget -= steps
                    self._count(steps)
                    steps = 0
                    if scheduler.shared or budget <= 0:
                        group.pc = pc
                        scheduler.ready(group)
                        return
            else:
                group.pc = pc
                self._count(steps)
                self._control(group, outcome, scheduler)
                return
            if pc in stops or steps >= budget:
                self._count(steps)
                group.pc = pc
                scheduler.ready(group)
                return

    @staticmethod
    def _stops_inside(block: Block, stops: set[int]) -> bool:
        return any(block.start < stop < block.end for stop in stops)

    def _take(self, group: Group, block: Block) -> None:
        """Execute a block."""
        times = self.counter.seconds
        if times is None:
            for run, _ in block.steps:
                run(group)
        else:
            for run, op in block.steps:
                start = perf_counter()
                run(group)
                times[op.index] += perf_counter() - start
        undefined = group.undefined
        if undefined and not undefined.keys().isdisjoint(block.writes):
            for register in undefined.keys() & block.writes:
                del undefined[register]

    def _count(self, steps: int) -> None:
        """Count steps of the loop; a kernel that takes too many does not end."""
        self.executed += steps
        if self.executed > self.options.max_instructions:
            raise MachineFault(
                f"kernel {self.program.name}: the waves of one batch have taken {self.executed} steps and have not "
                f"ended; Options.max_instructions bounds them"
            )

    def _control(self, group: Group, outcome: Any, scheduler: Scheduler) -> None:
        if outcome is END:
            self.retire(group, group.vm, 0)
            self.retire(group, group.lgkm, 0)
            self.ended[group.rect.slices] = True
            scheduler.remove(group)
            scheduler.release_barriers()
        elif outcome is BARRIER:
            group.pc += 1
            if group.rect.w1 - group.rect.w0 == self.waves:
                # All waves of these workgroups have arrived together.
                mask = np.zeros(self.batch, np.bool_)
                mask[group.rect.g0 : group.rect.g1] = True
                self.hazards.barrier(mask)
                scheduler.ready(group)
                return
            self.at_barrier[group.rect.slices] = True
            scheduler.block(group)
            scheduler.release_barriers()
        else:
            taken: np.ndarray = outcome
            op = self.operations[group.pc]
            assert op.instruction.target is not None
            for where, pc in ((taken, op.instruction.target), (~taken, group.pc + 1)):
                for rect in rectangles(where, group.rect):
                    scheduler.ready(self.split(group, rect, pc))
            scheduler.remove(group)

    def _trace(self, group: Group, pc: int) -> None:
        assert self.trace is not None
        line = self.program.instructions[pc].line
        for workgroup in range(group.rect.g0, group.rect.g1):
            for wave in range(group.rect.w0, group.rect.w1):
                self.trace.setdefault((self.first_workgroup + workgroup, wave), []).append(line)

    def split(self, group: Group, rect: Rect, pc: int) -> Group:
        """Return the part of a group in a sub-rectangle, as a group of its own."""
        part = Group(self, rect, pc)
        part.vm = [pending.cut(rect, group.rect) for pending in group.vm]
        part.lgkm = [pending.cut(rect, group.rect) for pending in group.lgkm]
        for pending in (*part.vm, *part.lgkm):
            for register in pending.op.writes:
                if register in group.busy and group.busy[register].op is pending.op:
                    part.busy[register] = pending
        self.hazards.cut(group, part)
        return part

    # -- outstanding memory operations --------------------------------------------------------------------------

    def issue(self, group: Group, pending: Pending, *, lgkm: bool) -> None:
        """Put a memory operation on its way."""
        queue = group.lgkm if lgkm else group.vm
        queue.append(pending)
        for register in pending.op.writes:
            group.busy[register] = pending
        if not self.late[lgkm]:
            pending.effect(group, pending.payload)
            pending.done = True
        elif self.seeded_memory and self.haste[lgkm]:
            early = len(queue) if self.haste[lgkm] == 1 else self.random.randint(0, len(queue))
            for waiting in queue[:early]:
                if not waiting.done:
                    waiting.effect(group, waiting.payload)
                    waiting.done = True
        limit = LGKM_LIMIT if lgkm else VM_LIMIT
        if len(queue) > limit:
            self.retire(group, queue, limit)

    def retire(self, group: Group, queue: list[Pending], keep: int) -> None:
        """Let the oldest operations take effect until ``keep`` are left (s_waitcnt)."""
        if len(queue) <= keep:
            return
        if keep and not all(pending.in_order for pending in queue):
            # Scalar loads return out of order: a wait for fewer than all of them says nothing about any, and LDS
            # operations between them are only known to be done when the whole count is zero.
            return
        count = len(queue) - keep
        for pending in queue[:count]:
            if not pending.done:
                pending.effect(group, pending.payload)
                pending.done = True
            if pending.events:
                self.hazards.publish(group, pending)
            for register in pending.op.writes:
                if group.busy.get(register) is pending:
                    del group.busy[register]
        del queue[:count]

    # -- names for reports --------------------------------------------------------------------------------------

    def wave_of(self, group: Group, wave: int) -> int:
        """Wave within its workgroup, of a position in the group."""
        return group.rect.w0 + wave

    def workgroup_of(self, group: Group, workgroup: int) -> Triple:
        """Workgroup id, of a position in the group."""
        linear = self.first_workgroup + group.rect.g0 + workgroup
        gx, gy, _ = self.launch.grid
        return linear % gx, linear // gx % gy, linear // (gx * gy)

    def locate(self, group: Group, wave: int, workgroup: int) -> str:
        """``workgroup (x, y, z), wave n``."""
        return f"workgroup {self.workgroup_of(group, workgroup)}, wave {self.wave_of(group, wave)}"

    def lane_fault(
        self,
        op: Operation,
        group: Group,
        lane: tuple[int, int, int],
        address: int,
        size: int,
        what: str,
        nearest: str | None = None,
    ) -> MemoryFault:
        """The fault of one lane's access; wave and workgroup of ``lane`` count within the group."""
        wave, workgroup, number = lane
        return MemoryFault(
            f"kernel {self.program.name}, {self.program.describe(op.index)}: {self.locate(group, wave, workgroup)}, "
            f"lane {number} {what}",
            kernel=self.program.name,
            line=op.instruction.line,
            text=op.instruction.text,
            wave=self.wave_of(group, wave),
            workgroup=self.workgroup_of(group, workgroup),
            lane=number,
            address=address,
            size=size,
            nearest=nearest,
        )

    def fault_alignment(self, op: Operation, alignment: int) -> None:
        """Raise the fault of an access whose address is no multiple of ``alignment``."""
        raise MemoryFault(
            f"kernel {self.program.name}, {self.program.describe(op.index)}: its address must be a multiple of "
            f"{alignment}",
            kernel=self.program.name,
            line=op.instruction.line,
            text=op.instruction.text,
        )

    def _deadlock(self) -> None:
        waiting = np.argwhere(self.at_barrier & ~self.ended)
        missing = np.argwhere(~self.at_barrier & ~self.ended)
        raise MachineFault(
            f"kernel {self.program.name}: deadlock: {len(waiting)} waves wait at s_barrier for {len(missing)} others"
        )
