"""Everything that a native call does to memory, in the order in which it was asked for.

Two implementations of one small interface: a torch stream on a GPU, and the emulator's queue. What was handed to a
queue is kept alive until it has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..options import Launch


class Queue(Protocol):
    """Where a call's copies and launches go."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a strided tensor, made on the queue."""

    def launch(
        self,
        launch: Callable[[Any], None],
        inputs: dict[str, torch.Tensor],
        results: dict[str, torch.Tensor],
        note: Launch,
    ) -> None:
        """Launch a kernel that reads inputs and writes results: ``launch(stream)``."""


class StreamQueue:
    """A torch stream."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.stream = torch.cuda.current_stream(device) if stream is None else stream

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            # Allocated on the stream, so that its memory is not used again before the stream is done with it.
            return tensor.contiguous()

    def launch(
        self,
        launch: Callable[[Any], None],
        inputs: dict[str, torch.Tensor],
        results: dict[str, torch.Tensor],
        note: Launch,
    ) -> None:
        for tensor in inputs.values():
            tensor.record_stream(self.stream)
        launch(self.stream)


class EmulatorQueue:
    """The emulator: at once, or on its innermost stream or graph."""

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        from ..emulator import Memory, MemoryFault, Work, submit
        from ..emulator.queue import current
        from .takeover import owner_alive, tensor_extent

        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        source, memory = tensor.detach(), Memory()
        region = memory.register("a strided tensor", tensor.data_ptr(), tensor_extent(tensor), keepalive=source)
        if current() is not None:
            region.alive = owner_alive(source)

        def run() -> None:
            if memory.freed:
                raise MemoryFault(f"copy reads the buffer {region!r}, which was freed")
            copy.copy_(source)

        submit(Work("copy", run, memory))
        self.copies.append(copy)
        return copy

    def launch(
        self,
        launch: Callable[[Any], None],
        inputs: dict[str, torch.Tensor],
        results: dict[str, torch.Tensor],
        note: Launch,
    ) -> None:
        from ..emulator import Options, Result
        from . import flydsl_private
        from .takeover import EmulatorSession, emulated

        def ran(result: Result) -> None:
            note.instructions = (note.instructions or 0) + result.counts.instructions

        session = flydsl_private.active()
        if isinstance(session, EmulatorSession):
            with session.reaching(inputs, results, held=self.copies, ran=ran):
                launch(flydsl_private.stream(None))
            return
        with emulated(Options(on_report="raise")) as own, own.reaching(inputs, results, held=self.copies, ran=ran):
            launch(flydsl_private.stream(None))
