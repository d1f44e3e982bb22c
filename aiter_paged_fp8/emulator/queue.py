"""Streams and graphs: work that is put off and runs over what memory holds by then.

    with stream() as s:            with graph() as g:
        launch(...)                    launch(...)
    s.synchronize()                g.replay(); g.replay()

Work is anything that touches memory: launches, copies, fills. Outside of both it runs at once. Buffers that nobody owns
any more when their work runs are poisoned first and are no legal addresses: mistakes of order and lifetime show.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .memory import Memory, Region

# What a freed buffer holds: a NaN as float32, bfloat16, half and fp8.
POISON_BYTE = 0xFF


@dataclass
class Work:
    """One thing to do in order.

    Attributes
    ----------
    name : str
        Kernel, or what else it is.
    run : callable
        Does it.
    memory : Memory, optional
        Tensors it may touch; those whose owners are gone are poisoned before it runs.
    """

    name: str
    run: Callable[[], None]
    memory: Memory | None = None

    def execute(self) -> None:
        """Poison what was freed, then do it."""
        if self.memory is not None:
            poison_freed(self.memory)
        self.run()


def poison_freed(memory: Memory) -> None:
    """Take regions whose owners are gone out of a memory and fill them with poison."""
    for region in [region for region in memory.regions if region.alive is not None and not region.alive()]:
        memory.regions.remove(region)
        memory.freed.append(region)
        _poison(region, memory)


def _poison(freed: Region, memory: Memory) -> None:
    """Fill a freed buffer, except for bytes that a tensor still in use shares with it."""
    mask = np.ones(freed.extent, np.bool_)
    for region in memory.regions:
        low, high = max(region.address, freed.address), min(region.end, freed.end)
        if low < high:
            mask[low - freed.address : high - freed.address] = False
    if freed.writable:
        freed.bytes[mask] = POISON_BYTE


class Event:
    """A place in a stream that another stream can wait for."""

    def __init__(self, stream: Stream, position: int) -> None:
        self.stream = stream
        self.position = position


@dataclass
class Stream:
    """Work in order of submission, run by ``synchronize``."""

    name: str = "stream"
    waiting: list[Work] = field(default_factory=list)
    done: int = 0

    def submit(self, work: Work) -> None:
        """Put work at the end."""
        self.waiting.append(work)

    def record(self) -> Event:
        """Mark what has been submitted so far."""
        return Event(self, self.done + len(self.waiting))

    def wait(self, event: Event) -> None:
        """Let what is submitted from here on come after an event of another stream."""
        self.submit(Work("wait", lambda: event.stream.run_until(event.position)))

    def run_until(self, position: int) -> None:
        """Run until so many works are done."""
        while self.waiting and self.done < position:
            work = self.waiting.pop(0)
            self.done += 1
            work.execute()

    def synchronize(self) -> None:
        """Run everything submitted so far; what a work raises leaves the works behind it waiting."""
        self.run_until(self.done + len(self.waiting))


@dataclass
class Graph:
    """Recorded work; every replay runs it over the then-current contents of memory."""

    works: list[Work] = field(default_factory=list)

    def submit(self, work: Work) -> None:
        """Record work; nothing runs."""
        self.works.append(work)

    def replay(self) -> None:
        """Put all of it on the current stream, or run it."""
        for work in self.works:
            submit(work)


_local = threading.local()


def current() -> Stream | Graph | None:
    """The innermost stream or graph of this thread."""
    stack = getattr(_local, "stack", None)
    return stack[-1] if stack else None


def capturing() -> bool:
    """Whether work is being recorded rather than run."""
    return isinstance(current(), Graph)


def submit(work: Work) -> None:
    """Hand work to the current stream or graph; without one it runs at once."""
    queue = current()
    if queue is None:
        work.execute()
    else:
        queue.submit(work)


@contextlib.contextmanager
def _entered(queue: Stream | Graph) -> Iterator[None]:
    stack = _local.__dict__.setdefault("stack", [])
    stack.append(queue)
    try:
        yield
    finally:
        stack.pop()


@contextlib.contextmanager
def stream(queue: Stream | None = None) -> Iterator[Stream]:
    """Queue what is submitted inside; it runs at ``synchronize()``, not at the end of the block."""
    queue = queue if queue is not None else Stream()
    with _entered(queue):
        yield queue


@contextlib.contextmanager
def graph() -> Iterator[Graph]:
    """Record what is submitted inside."""
    queue = Graph()
    with _entered(queue):
        yield queue
