"""Options of a call, and the record of what calls did.

Both are held in context variables: they hold for the thread (or asyncio task) that set them and for no other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .planner import Plan

#: Every executor that can be asked for. ``auto`` takes the native kernel where it applies and the dense fallback
#: elsewhere.
EXECUTORS = ("auto", "gpu", "emulator", "triton", "torch")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Options:
    """What a caller may choose about how a call is run; never about what it computes.

    Parameters
    ----------
    executor : {"auto", "gpu", "emulator", "triton", "torch"}
        Who runs the call. Anything but ``auto`` is binding: a call that it can't serve raises RuntimeError.
    check_metadata : bool
        Read lengths, page ids and descales before the call and refuse wild ones. Costs a device read.
    cache_dir : pathlib.Path
        Where compiled kernels are kept.

    Raises
    ------
    ValueError, TypeError
        For a value that is none of these; the message names the option.
    """

    executor: str
    check_metadata: bool
    cache_dir: Path

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise ValueError(f"executor: got {self.executor!r}; accepted: one of {', '.join(EXECUTORS)}")
        if not isinstance(self.check_metadata, bool):
            raise TypeError(f"check_metadata: got {self.check_metadata!r}; accepted: True or False")
        if not isinstance(self.cache_dir, Path):
            raise TypeError(f"cache_dir: got {self.cache_dir!r}; accepted: a path")


def _flag(name: str, default: str) -> bool:
    text = os.environ.get(name, default).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{name}: got {text!r}; accepted: one of {', '.join(_TRUE + _FALSE[:-1])}")


def _choice(name: str, default: str) -> str:
    text = os.environ.get(name) or default
    if text not in EXECUTORS:
        raise ValueError(f"{name}: got {text!r}; accepted: one of {', '.join(EXECUTORS)}")
    return text


def _from_environment() -> Options:
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Options(
        executor=_choice("AITER_PAGED_FP8_EXECUTOR", "auto"),
        check_metadata=_flag("AITER_PAGED_FP8_CHECK", "0"),
        cache_dir=Path(os.environ.get("AITER_PAGED_FP8_CACHE_DIR") or os.path.join(cache_home, "aiter_paged_fp8")),
    )


# Read once, here: a variable that changes later changes nothing, and no kernel is traced under a moving environment.
_options: ContextVar[Options] = ContextVar("aiter_paged_fp8_options", default=_from_environment())  # noqa: B039

current_options = _options.get


@contextmanager
def use_options(
    *, executor: str | None = None, check_metadata: bool | None = None, cache_dir: str | PathLike[str] | None = None
) -> Iterator[Options]:
    """Set options for the calls of a ``with`` block, in this thread.

    Parameters
    ----------
    executor, check_metadata, cache_dir
        As in `Options`; None keeps what holds outside of the block.

    Examples
    --------
    >>> from aiter_paged_fp8 import use_options
    >>> with use_options(executor="torch", check_metadata=True) as options:
    ...     options.executor
    'torch'
    """
    changes: dict[str, object] = {}
    if executor is not None:
        changes["executor"] = executor
    if check_metadata is not None:
        changes["check_metadata"] = check_metadata
    if cache_dir is not None:
        changes["cache_dir"] = Path(cache_dir) if isinstance(cache_dir, str | PathLike) else cache_dir
    options = replace(_options.get(), **changes)  # type: ignore[arg-type]
    token = _options.set(options)
    try:
        yield options
    finally:
        _options.reset(token)


@contextmanager
def use_executor(name: str) -> Iterator[Options]:
    """Short for ``use_options(executor=name)``."""
    with use_options(executor=name) as options:
        yield options


@dataclass
class Launch:
    """One kernel launch: its name, whether it was compiled for this call, and the instructions executed where
    emulated (on a stream or in a graph: None until it has run, then of all its runs)."""

    kernel: str
    compiled: bool
    instructions: int | None = None


@dataclass
class Call:
    """One public call: where it went and why, and what was launched for it (empty for the torch fallback)."""

    plan: Plan
    launches: list[Launch] = field(default_factory=list)


_calls: ContextVar[list[Call] | None] = ContextVar("aiter_paged_fp8_calls", default=None)

current_calls = _calls.get


@contextmanager
def record() -> Iterator[list[Call]]:
    """Collect the calls that this thread makes within the block.

    Returns
    -------
    list of Call
        Grows while the block runs. Where records are nested, the innermost one collects.

    Examples
    --------
    >>> from aiter_paged_fp8 import record
    >>> with record() as calls:
    ...     pass
    >>> calls
    []
    """
    calls: list[Call] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)
