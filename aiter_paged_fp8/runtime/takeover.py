"""Sessions in which FlyDSL launches run on the emulator.

with emulated() as session:
    axpy(a, b, c, 2.0, 1024)
print(session.launches[-1].counts.instructions)
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..emulator import HazardError, Launch, Machine, Memory, Options, Program, Region, Result, Work, load_text, submit
from ..emulator.queue import current
from . import flydsl_private


def tensor_extent(tensor: Any) -> int:
    """Bytes from a tensor's first element to the end of its last one: of the view, never of its storage."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def owner_alive(alias: Any) -> Callable[[], bool] | None:
    """Whether a storage has an owner beside our alias of it: a temporary that its caller dropped has none."""
    import torch

    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or not isinstance(alias, torch.Tensor):
        return None

    def alive() -> bool:
        storage = alias.untyped_storage()
        # Our alias holds the storage once, and asking for it does so once more.
        return int(count(storage._cdata)) > 2

    return alive


@dataclass(frozen=True)
class _Reachable:
    """What `EmulatorSession.reaching` was given."""

    inputs: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)
    held: tuple[Any, ...] = ()
    ran: Callable[[Result], None] | None = None


class EmulatorSession(flydsl_private.Receiver):
    """Runs FlyDSL launches of its thread on the emulator.

    Parameters
    ----------
    options : Options
        Memory timing, wave schedule, checks.
    cache_dir : path, optional
        Disk cache for compiled ISA; never one that hardware builds use. None: no disk cache.

    Attributes
    ----------
    launches : list of Result
        One per launch, in order: kernel, grid, counts, reports.
    memory : Memory
        Tensors registered for the whole session, for kernels that take bare addresses.
    """

    def __init__(self, options: Options | None = None, *, cache_dir: str | Path | None = None) -> None:
        self.options = options or Options()
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self.launches: list[Result] = []
        self.memory = Memory()
        self.launching = True
        self._read_only: set[int] = set()
        self._arguments: list[tuple[str, Any]] = []
        self._reachable: _Reachable = _Reachable()
        self._error: BaseException | None = None

    def register(self, tensor: Any, name: str = "tensor", *, writable: bool = True) -> Region:
        """Make a tensor legal to access in every launch: for kernels that take bare addresses."""
        return self.memory.register(name, tensor.data_ptr(), tensor_extent(tensor), writable=writable, keepalive=tensor)

    def read_only(self, *tensors: Any) -> None:
        """Make stores to these tensor arguments a fault."""
        self._read_only.update(tensor.data_ptr() for tensor in tensors)

    @contextlib.contextmanager
    def compile_only(self) -> Iterator[None]:
        """Let ``flyc.compile`` compile without launching."""
        self.launching = False
        try:
            yield
        finally:
            self.launching = True

    @contextlib.contextmanager
    def reaching(
        self,
        inputs: Mapping[str, Any],
        results: Mapping[str, Any],
        *,
        held: Sequence[Any] = (),
        ran: Callable[[Result], None] | None = None,
    ) -> Iterator[None]:
        """Make tensors legal to access in the launches of a block, for kernels that take bare addresses.

        Parameters
        ----------
        inputs, results : mapping of str to tensor
            Only to be read, and to be written as well.
        held : sequence of tensor
            Those among them that nobody else owns, kept until the launch has run.
        ran : callable, optional
            Called with the result of each launch once it has run, which on a stream is later.
        """
        before, self._reachable = self._reachable, _Reachable(inputs, results, tuple(held), ran)
        try:
            yield
        finally:
            self._reachable = before

    # -- what FlyDSL's host code calls --------------------------------------------------------------------------

    def begin_call(self, arguments: list[tuple[str, Any]]) -> None:
        """Remember the tensors of a call."""
        self._arguments = arguments
        self._error = None

    def end_call(self) -> None:
        """Raise what went wrong in a callback, which can't raise through host code."""
        self._arguments = []
        error, self._error = self._error, None
        if error is not None:
            raise error

    def launch(
        self, isa: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], lds: int, parameters: list[int]
    ) -> None:
        """Run one kernel; an error is kept until host code has returned."""
        if self._error is not None:
            return
        try:
            self._run(isa, kernel, grid, block, lds, parameters)
        except BaseException as error:
            self._error = error

    def _run(
        self, isa: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], lds: int, parameters: list[int]
    ) -> None:
        loaded = load_text(isa, kernel)
        memory = Memory()
        memory.regions.extend(self.memory.regions)
        reachable = self._reachable
        legal = [(name, tensor, tensor.data_ptr() not in self._read_only) for name, tensor in self._arguments]
        legal += [(name, tensor, False) for name, tensor in reachable.inputs.items()]
        legal += [(name, tensor, True) for name, tensor in reachable.results.items()]
        for name, tensor, writable in legal:
            address = tensor.data_ptr()
            # The alias keeps the bytes in place; whether the caller still holds them is asked when the kernel runs.
            region = memory.register(
                name,
                address,
                tensor_extent(tensor),
                writable=writable,
                keepalive=tensor.detach() if hasattr(tensor, "detach") else tensor,
            )
            if current() is not None:
                region.alive = owner_alive(region.keepalive)
        where = Launch(
            loaded,
            (grid[0], grid[1], grid[2]),
            (block[0], block[1], block[2]),
            pack_kernarg(loaded.program, parameters, grid, block),
            lds,
        )

        # Not the whole of what was reachable: on a stream, a buffer that its owner drops must be seen to be free.
        ran, held = reachable.ran, reachable.held

        def run() -> None:
            assert held is not None
            try:
                result = Machine(where, memory, self.options).run()
            except HazardError as error:
                self.launches.append(error.details["result"])
                raise
            self.launches.append(result)
            if ran is not None:
                ran(result)

        submit(Work(kernel, run, memory))


def hidden_arguments(grid: tuple[int, ...], block: tuple[int, ...]) -> dict[str, int]:
    """Values of the arguments that the HIP runtime supplies; what is missing here is zero in our launches."""
    values = {"hidden_grid_dims": max((k + 1 for k in range(3) if grid[k] > 1 or block[k] > 1), default=1)}
    for axis, count, size in zip("xyz", grid, block, strict=True):
        values[f"hidden_block_count_{axis}"] = count
        values[f"hidden_group_size_{axis}"] = size
    return values


def pack_kernarg(program: Program, parameters: list[int], grid: tuple[int, ...], block: tuple[int, ...]) -> bytes:
    """Lay argument values out as the kernel's metadata says.

    Parameters
    ----------
    parameters : list of int
        Address of each argument's value, in order.
    grid, block : tuple of int
        For the hidden arguments.
    """
    metadata = program.metadata
    segment = bytearray(metadata.kernarg_size)
    visible = [argument for argument in metadata.arguments if not argument.hidden]
    if len(visible) != len(parameters):
        raise ValueError(
            f"kernel {program.name} takes {len(visible)} arguments by its metadata, the launch passes {len(parameters)}"
        )
    supplied = hidden_arguments(grid, block)
    for argument in metadata.arguments:
        if argument.hidden:
            value = supplied.get(argument.kind, 0)
            segment[argument.offset : argument.offset + argument.size] = value.to_bytes(argument.size, "little")
    for argument, address in zip(visible, parameters, strict=True):
        segment[argument.offset : argument.offset + argument.size] = ctypes.string_at(address, argument.size)
    return bytes(segment)


@contextlib.contextmanager
def emulated(options: Options | None = None, *, cache_dir: str | Path | None = None) -> Iterator[EmulatorSession]:
    """Run every FlyDSL launch of this thread on the emulator.

    Parameters
    ----------
    options : Options
        Memory timing, wave schedule, checks.
    cache_dir : path, optional
        Disk cache of the emulator's own.
    """
    session = EmulatorSession(options, cache_dir=cache_dir)
    with flydsl_private.receiving(session):
        yield session
