"""Which ``aiter`` this process has, found out without being ended by it."""

from __future__ import annotations

import sys
from enum import Enum
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

#: Set on every module that this package makes under AITER's name.
SHIM_MARK = "__aiter_paged_fp8_shim__"


class Kind(str, Enum):
    """What was found under the name ``aiter``."""

    INSTALLED = "installed"
    ABSENT = "absent"
    UNUSABLE = "unusable"
    FOREIGN = "foreign"

    def __str__(self) -> str:
        return self.value


class Found(NamedTuple):
    """What `probe` found, where, and why it can't be used."""

    kind: Kind
    where: str = ""
    reason: str = ""


def survive(name: str) -> tuple[ModuleType | None, str]:
    """Import a module of AITER, or say why not.

    Importing AITER compiles, runs ROCm's tools and reads files: without hipconfig it raises RuntimeError, without a
    working hipcc SystemExit, and its age decides over the rest. None of these may end a process that has other
    attention backends.
    """
    try:
        return import_module(name), ""
    except (Exception, SystemExit) as error:
        return None, f"importing {name} raised {type(error).__name__}: {error}"


def is_shim(module: object) -> bool:
    """Whether this package made the module."""
    return isinstance(module, ModuleType) and SHIM_MARK in vars(module)


def make_module(name: str, doc: str) -> ModuleType:
    """A module under AITER's name, marked as this package's.

    It has a spec, since `importlib.util.find_spec` raises for a loaded module without one.
    """
    module = ModuleType(name, doc)
    module.__spec__ = ModuleSpec(name, None, origin="aiter_paged_fp8", is_package=True)
    module.__path__ = []
    vars(module)[SHIM_MARK] = True
    return module


def version() -> str | None:
    """Version of the installed AITER, from its metadata; old source builds call their distribution ``aiter``."""
    for distribution in ("amd-aiter", "aiter"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _folders() -> tuple[list[str] | None, str]:
    """Folders of the package ``aiter`` and where it comes from, importing nothing; None where there is none."""
    loaded = sys.modules.get("aiter")
    if loaded is not None:
        paths = list(getattr(loaded, "__path__", []))
        return paths, getattr(loaded, "__file__", None) or (paths[0] if paths else "a module without a file")
    try:
        spec = find_spec("aiter")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None, ""
    paths = list(spec.submodule_search_locations or [])
    return paths, spec.origin or (paths[0] if paths else "an unknown place")


def probe() -> Found:
    """Look for AITER and import it.

    The name alone says nothing: PyPI has an unrelated package ``aiter`` (tools for asynchronous iteration), and a
    folder of that name on the path is a package to Python as well. AITER is what has ``aiter.ops``; anything else is
    not even imported.
    """
    folders, where = _folders()
    if folders is None:
        return Found(Kind.ABSENT, reason="no package aiter is installed")
    has_ops = "aiter.ops" in sys.modules or any((Path(folder) / "ops").is_dir() for folder in folders)
    if not has_ops:
        return Found(Kind.FOREIGN, where, "it has no aiter.ops")
    module, reason = survive("aiter")
    if module is None:
        return Found(Kind.UNUSABLE, where, reason)
    return Found(Kind.INSTALLED, where)
