"""AITER packages made for a test: what the integration looks at, and nothing else of AITER."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path

from aiter_paged_fp8.integrations.aiter import uninstall

#: The argument lists of `aiter.ops.mha.mha_batch_prefill_func`: release 0.1.7, and the main branch of 2026-08.
OLD = """q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1), alibi_slopes=None, deterministic=False,
    return_lse=False, return_attn_probs=False, out=None"""
NEW = (
    OLD
    + """, kv_last_page_lens=None, block_table=None, seqlen_k=None, q_descale=None, k_descale=None,
    v_descale=None, kv_block_descale=None, sink_ptr=None, sink_size=0"""
)

#: The original, recording each call as it came: the function that callers get has AITER's signature, which is why the
#: recording has to be inside of it. A subclass of tuple tells its results from anything else.
_MHA = """
import functools, inspect

class Original(tuple):
    pass

calls = []

def _signature({signature}):
    pass

def mha_batch_prefill_func(*args, **kwargs):
    inspect.signature(_signature).bind(*args, **kwargs)
    calls.append((args, kwargs))
    return Original((args, kwargs))

mha_batch_prefill_func.__signature__ = inspect.signature(_signature)
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files, and an empty ``__init__.py`` into every package folder that has none."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        for parent in path.relative_to(folder).parents:
            init = folder / parent / "__init__.py"
            if parent != Path() and not init.exists():
                init.write_text("")
    return folder


def aiter(folder: Path, signature: str = NEW, flydsl: str | None = "__all__ = ['is_flydsl_available']") -> Path:
    """An AITER that imports: ``aiter``, ``aiter.ops.mha`` and, unless None, ``aiter.ops.flydsl``."""
    files = {
        "aiter/__init__.py": "from .ops.mha import *\nfrom .ops import mha",
        "aiter/ops/mha.py": _MHA.format(signature=signature),
    }
    if flydsl is not None:
        files["aiter/ops/flydsl/__init__.py"] = f"def is_flydsl_available(): return True\n{flydsl}"
    return write(folder, files)


def broken(folder: Path, statement: str) -> Path:
    """An AITER whose import runs one statement half-way, after a part of it has been loaded."""
    return write(
        folder,
        {"aiter/__init__.py": f"from .ops import enum\n{statement}", "aiter/ops/enum.py": "", "aiter/ops/mha.py": ""},
    )


def unrelated(folder: Path) -> Path:
    """What PyPI has under the name ``aiter``: tools for asynchronous iteration. It must not even be imported."""
    return write(folder, {"aiter/__init__.py": "raise AssertionError('imported')", "aiter/join_aiters.py": ""})


def forget() -> None:
    """Uninstall, and drop every module of an AITER (and of a test's engine) from this process."""
    uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] in ("aiter", "engine")]:
        del sys.modules[name]
    importlib.invalidate_caches()
