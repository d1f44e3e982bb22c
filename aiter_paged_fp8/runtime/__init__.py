"""Compiled kernels meet what runs them: FlyDSL's launches, on hardware or on the emulator.

Names are loaded on first use: a call that takes the dense fallback pays for neither the emulator nor FlyDSL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["EmulatorSession", "emulated"]

if TYPE_CHECKING:
    from .takeover import EmulatorSession, emulated


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import takeover

    return getattr(takeover, name)
