"""Where others call the package: AITER, SGLang, vLLM. See docs/integrations.md.

Nothing here changes another package unless it is asked to: by `aiter_paged_fp8.integrations.aiter.install`, or by the
environment variable that `install_from_environment` reads.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .aiter import Status

#: ``export`` or ``dispatch``, as the modes of `aiter_paged_fp8.integrations.aiter.install`; unset for nothing.
VARIABLE = "AITER_PAGED_FP8_INSTALL"
MODES = ("export", "dispatch")


def install_from_environment() -> Status | None:
    """Install the integration with AITER if, and only if, ``AITER_PAGED_FP8_INSTALL`` asks for it.

    The entry point that vLLM (``vllm.general_plugins``) and SGLang (``sglang.srt.plugins``) call in each of their
    processes. Without the variable it imports nothing and changes nothing. Programs that load no plugins call it in
    one line: ``import aiter_paged_fp8.integrations as i; i.install_from_environment()``.

    Returns
    -------
    Status or None
        What was done; None without the variable.

    Raises
    ------
    ValueError
        For any other value of the variable.
    RuntimeError
        Where ``aiter`` is another project's package; see `aiter_paged_fp8.integrations.aiter.install`.
    """
    mode = os.environ.get(VARIABLE, "").strip()
    if not mode:
        return None
    if mode not in MODES:
        raise ValueError(f"{VARIABLE}: got {mode!r}; accepted: one of {', '.join(MODES)}, or unset")
    from .aiter import install

    return install(dispatch=mode == "dispatch")
