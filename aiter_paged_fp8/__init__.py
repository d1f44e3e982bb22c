"""FP8 attention over paged KV caches.

The public names are loaded on first use, so that importing the package costs next to nothing and brings in neither
FlyDSL nor Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Here, since environment variables are read when the package is imported, not when a function is first used.
from . import options as _options  # noqa: F401

__version__ = "0.1.0"

_HOMES = {
    "flydsl_flash_attn_paged_prefill_func": "api",
    "flydsl_flash_attn_paged_prefill_supported": "api",
    "flydsl_flash_attn_paged_prefill_preload": "api",
    "flydsl_flash_attn_batch_prefill_func": "api",
    "plan": "api",
    "Support": "api",
    "Plan": "planner",
    "Code": "planner",
    "record": "options",
    "Call": "options",
    "Launch": "options",
    "Options": "options",
    "use_options": "options",
    "use_executor": "options",
}

__all__ = [
    "Call",
    "Code",
    "Launch",
    "Options",
    "Plan",
    "Support",
    "__version__",
    "flydsl_flash_attn_batch_prefill_func",
    "flydsl_flash_attn_paged_prefill_func",
    "flydsl_flash_attn_paged_prefill_preload",
    "flydsl_flash_attn_paged_prefill_supported",
    "plan",
    "record",
    "use_executor",
    "use_options",
]

if TYPE_CHECKING:
    from .api import (
        Support,
        flydsl_flash_attn_batch_prefill_func,
        flydsl_flash_attn_paged_prefill_func,
        flydsl_flash_attn_paged_prefill_preload,
        flydsl_flash_attn_paged_prefill_supported,
        plan,
    )
    from .options import Call, Launch, Options, record, use_executor, use_options
    from .planner import Code, Plan


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
