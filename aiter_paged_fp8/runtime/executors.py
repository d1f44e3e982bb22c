"""Which executors exist, what they can do, and what each needs from the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec

#: The oldest FlyDSL whose stable API has every operation that the kernel uses.
OLDEST_FLYDSL = (0, 5, 0)


@dataclass(frozen=True)
class Executor:
    """One way to run a call.

    Attributes
    ----------
    name, path : str
        As in a Plan.
    captures : bool
        Whether a call can be recorded into a graph and replayed.
    """

    name: str
    path: str
    captures: bool


EXECUTORS = (
    Executor("gpu", "paged", captures=True),
    Executor("emulator", "paged", captures=True),
    Executor("triton", "dense", captures=True),
    Executor("torch", "dense", captures=False),
)


@lru_cache(maxsize=1)
def flydsl_version() -> str | None:
    """Version of the installed FlyDSL, without importing it; None where there is none."""
    if find_spec("flydsl") is None:
        return None
    try:
        return metadata.version("flydsl")
    except metadata.PackageNotFoundError:
        return "unknown"


@lru_cache(maxsize=1)
def flydsl_missing() -> str | None:
    """Why FlyDSL can't serve here; None where it can."""
    found = flydsl_version()
    oldest = ".".join(map(str, OLDEST_FLYDSL))
    if found is None:
        return f"FlyDSL is not installed (pip install 'flydsl>={oldest}')"
    numbers = re.match(r"\d+(\.\d+)*", found)
    if numbers and tuple(map(int, numbers.group().split("."))) < OLDEST_FLYDSL:
        return f"FlyDSL {found} is too old, the kernel needs {oldest} or later"
    return None
