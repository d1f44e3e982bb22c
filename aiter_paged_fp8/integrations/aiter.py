"""Integration with AITER, only where it is asked for.

``install()`` makes ``from aiter.ops.flydsl import flydsl_flash_attn_paged_prefill_func`` work.
``install(dispatch=True)`` also goes in front of ``mha_batch_prefill_func``, in every module that holds it: a call that
the native kernel serves is taken, every other one reaches the original with exactly the arguments that came in.
``uninstall()`` takes all of it back, and ``status()`` says what was replaced, what not, and why.

Importing this module imports no AITER and changes nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from ..api import flydsl_flash_attn_paged_prefill_func
from ._dispatch import in_front_of, without_original
from ._probe import Found, Kind, is_shim, make_module, probe, survive, version

__all__ = ["Status", "install", "status", "uninstall"]

logger = logging.getLogger("aiter_paged_fp8")

_EXPORT = flydsl_flash_attn_paged_prefill_func.__name__
_BATCH = without_original.__name__
_ABSENT = object()


@dataclass(frozen=True)
class Status:
    """What the integration has done in this process.

    Attributes
    ----------
    mode : {"export", "dispatch"} or None
        None where nothing is installed.
    aiter : str or None
        What was found under that name: ``installed``; ``absent`` or ``unusable``, where a shim stands in for it.
    version : str or None
        AITER's version, where its metadata has one.
    replaced : tuple of str
        Bindings that hold this package's functions now, ``module.name`` each.
    created : tuple of str
        Modules that AITER lacked.
    skipped : dict
        What was not replaced, with the reason.
    """

    mode: str | None
    aiter: str | None = None
    version: str | None = None
    replaced: tuple[str, ...] = ()
    created: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def shim(self) -> bool:
        """Whether the modules under AITER's name are this package's own."""
        return self.mode is not None and self.aiter != Kind.INSTALLED.value

    def __str__(self) -> str:
        if self.mode is None:
            lines = ["not installed"]
        else:
            lines = [f"{self.mode} into AITER ({self.aiter}{f', {self.version}' if self.version else ''})"]
        lines += [f"  replaced {name}" for name in self.replaced]
        lines += [f"  created {name}" for name in self.created]
        lines += [f"  not {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


class _Binding(NamedTuple):
    """One name that was set in one module, and what it held before."""

    module: ModuleType
    name: str
    ours: Any
    previous: Any


class _State:
    """What has to be undone. One for the process, guarded by `_lock`."""

    def __init__(self) -> None:
        self.found: Found | None = None
        self.dispatching = False
        #: Pairs of our function and the original that it stands in front of; several where AITER was reloaded.
        self.fronts: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
        self.bindings: list[_Binding] = []
        self.modules: list[tuple[str, ModuleType, Any]] = []
        self.skipped: dict[str, str] = {}


_lock = threading.RLock()
_state = _State()


def _is_dispatching() -> bool:
    return _state.dispatching


def install(dispatch: bool = False) -> Status:
    """Export into AITER and, if asked, go in front of its batch prefill.

    Parameters
    ----------
    dispatch : bool
        False exports ``aiter.ops.flydsl.flydsl_flash_attn_paged_prefill_func``, in a new module where AITER has none
        that imports. True also replaces ``mha_batch_prefill_func`` in ``aiter.ops.mha``, in ``aiter`` and in each
        loaded module that has it as a global, under whatever name.

    Returns
    -------
    Status
        As `status` gives it.

    Raises
    ------
    RuntimeError
        Where ``aiter`` is not AMD's AITER but another package of that name.
    TypeError
        For a ``dispatch`` that is not True or False.

    Notes
    -----
    Installing again changes nothing, but for modules that were loaded or reloaded in between; a first
    ``install(dispatch=True)`` after an ``install()`` adds the dispatch, and the reverse takes nothing away.

    Without a usable AITER, a shim takes its name: modules marked ``__aiter_paged_fp8_shim__`` that hold these
    functions and nothing else. In it ``mha_batch_prefill_func`` raises NotImplementedError, naming the feature, where
    it would have handed a call back.
    """
    if not isinstance(dispatch, bool):
        raise TypeError(f"dispatch: got {dispatch!r}; accepted: True or False")
    with _lock:
        if _state.found is None:
            found = probe()
            if found.kind is Kind.FOREIGN:
                raise RuntimeError(
                    f"aiter: got another package of that name at {found.where} ({found.reason}); accepted: AMD's AITER "
                    "(distribution amd-aiter), or none"
                )
            _state.found = found
            if found.kind is not Kind.INSTALLED:
                logger.warning("AITER is %s (%s): a shim of aiter_paged_fp8 takes its name", found.kind, found.reason)
                _state.skipped["aiter"] = found.reason
        if _state.found.kind is Kind.INSTALLED:
            _export()
            if dispatch:
                _dispatch()
        else:
            _shim(dispatch)
        _state.dispatching |= dispatch
        current = status()
    logger.info("%s", current)
    return current


def uninstall() -> Status:
    """Put back everything that `install` replaced, and remove what it created.

    A binding that somebody else has set since then is left alone and named in the result. Functions that were
    imported from here keep working; one that stood in front of an original passes every call on to it.

    Returns
    -------
    Status
        With no mode; what could not be put back is in ``skipped``.
    """
    global _state
    with _lock:
        left: dict[str, str] = {}
        for ours, original in _state.fronts:
            for _, namespace, name in _holders(ours):
                namespace[name] = original
        for binding in reversed(_state.bindings):
            namespace = vars(binding.module)
            if namespace.get(binding.name, _ABSENT) is not binding.ours:
                left[f"{binding.module.__name__}.{binding.name}"] = "set by somebody else since"
            elif binding.previous is _ABSENT:
                del namespace[binding.name]
            else:
                namespace[binding.name] = binding.previous
        for name, module, previous in reversed(_state.modules):
            if sys.modules.get(name) is not module:
                left[name] = "replaced by somebody else since"
            elif previous is _ABSENT:
                del sys.modules[name]
            else:
                sys.modules[name] = previous
        _state = _State()
        return Status(None, skipped=left)


def status() -> Status:
    """What is replaced at this moment, what not, and why. Changes nothing and imports nothing."""
    with _lock:
        if _state.found is None:
            return Status(None)
        replaced = [
            f"{binding.module.__name__}.{binding.name}"
            for binding in _state.bindings
            if binding.name in (_EXPORT, _BATCH) and vars(binding.module).get(binding.name) is binding.ours
        ]
        skipped = dict(_state.skipped)
        for ours, original in _state.fronts:
            replaced += [f"{module}.{name}" for module, _, name in _holders(ours)]
            for module, _, name in _holders(original):
                skipped[f"{module}.{name}"] = "holds the original since it was set or loaded after the last install"
        return Status(
            mode="dispatch" if _state.dispatching else "export",
            aiter=str(_state.found.kind),
            version=version() if _state.found.kind is Kind.INSTALLED else None,
            replaced=tuple(replaced),
            created=tuple(name for name, _, _ in _state.modules),
            skipped=skipped,
        )


def _holders(value: object) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every global of every loaded module that is this very object: module name, namespace, name.

    Namespaces are taken without asking the module, since a lazily loaded one would load itself when asked.
    """
    seen: set[int] = set()
    for module_name, module in list(sys.modules.items()):
        if not issubclass(type(module), ModuleType):
            continue
        namespace = object.__getattribute__(module, "__dict__")
        if id(namespace) in seen:
            continue
        seen.add(id(namespace))
        for name, held in list(namespace.items()):
            if held is value:
                yield module_name, namespace, name


def _set(module: ModuleType, name: str, value: Any) -> None:
    """Set a global and remember what it held; nothing where it holds the value already."""
    namespace = vars(module)
    previous = namespace.get(name, _ABSENT)
    if previous is not value:
        _state.bindings.append(_Binding(module, name, value, previous))
        namespace[name] = value


def _create(name: str, doc: str) -> ModuleType:
    """A module of ours under AITER's name, in sys.modules and in its package."""
    module = make_module(name, doc)
    _state.modules.append((name, module, sys.modules.get(name, _ABSENT)))
    sys.modules[name] = module
    package, _, leaf = name.rpartition(".")
    if package:
        _set(sys.modules[package], leaf, module)
    return module


def _export() -> None:
    name = "aiter.ops.flydsl"
    try:
        exists = name in sys.modules or find_spec(name) is not None
    except (ImportError, ValueError):
        exists = False
    module, reason = survive(name) if exists else (None, "this AITER has no such module")
    if module is None:
        _state.skipped[name] = f"{reason}; one was created"
        module = _create(name, f"Made by aiter_paged_fp8, which exports {_EXPORT} here: {reason}.")
    _set(module, _EXPORT, flydsl_flash_attn_paged_prefill_func)
    names = vars(module).get("__all__")
    if names is not None and _EXPORT not in names:
        _set(module, "__all__", type(names)([*names, _EXPORT]))


def _dispatch() -> None:
    name = f"aiter.ops.mha.{_BATCH}"
    module, reason = survive("aiter.ops.mha")
    function = vars(module).get(_BATCH) if module is not None else None
    if function is None:
        _state.skipped[name] = reason or "this AITER has no such function"
        return
    originals = {id(ours): original for ours, original in _state.fronts}
    if id(function) in originals:
        ours, original = function, originals[id(function)]
    else:
        ours, original = in_front_of(function, _is_dispatching), function
        _state.fronts.append((ours, original))
    for _, namespace, held_as in _holders(original):
        namespace[held_as] = ours
    at_top = vars(sys.modules["aiter"]).get(_BATCH)
    if at_top is not ours:
        what = "no such global" if at_top is None else "a function other than that of aiter.ops.mha"
        _state.skipped[f"aiter.{_BATCH}"] = f"it is {what}"


def _shim(dispatch: bool) -> None:
    doc = "A stand-in of aiter_paged_fp8 for AITER, which is not usable here"
    reason = _state.found.reason if _state.found else ""
    for name in ("aiter", "aiter.ops", "aiter.ops.flydsl", *(("aiter.ops.mha",) if dispatch else ())):
        if not is_shim(sys.modules.get(name)):
            _create(name, f"{doc}: {reason}.")
    _set(sys.modules["aiter.ops.flydsl"], _EXPORT, flydsl_flash_attn_paged_prefill_func)
    if dispatch:
        for name in ("aiter.ops.mha", "aiter"):
            _set(sys.modules[name], _BATCH, without_original)
