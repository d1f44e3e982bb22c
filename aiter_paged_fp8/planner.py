"""Where a valid call goes, and why: decided from metadata alone, logged once per process and code."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .fallback import providers
from .kernels.fmha_gfx950 import traits
from .options import Options
from .request import Request
from .runtime import executors

logger = logging.getLogger("aiter_paged_fp8")


class Code(str, Enum):
    """Why a call goes where it goes: the whole list."""

    NATIVE = "native"
    FORCED_DENSE = "forced_dense"
    ARCH = "arch"
    NON_CAUSAL = "non_causal"
    HEAD_DIMS = "head_dims"
    PAGE_SIZE = "page_size"
    KERNEL_ABSENT = "kernel_absent"
    FLYDSL_ABSENT = "flydsl_absent"
    EMULATOR_DEVICE = "emulator_device"
    BEYOND_FALLBACK = "beyond_fallback"

    def __str__(self) -> str:
        return self.value

    # Enum's own hash is a Python function that every call's log check would pay for.
    __hash__ = str.__hash__


class Facts(NamedTuple):
    """All that a plan depends on, besides executor and architecture."""

    layout: str
    page: int
    head_dim: int
    head_dim_v: int
    causal: bool
    device: torch.device


@dataclass(frozen=True)
class Plan:
    """Where a call goes. Truthy when it can run.

    Attributes
    ----------
    path : {"paged", "dense"} or None
        The native paged kernel, the dense fallback, or nowhere.
    executor : {"gpu", "emulator", "triton", "torch"} or None
        Who runs it.
    code : Code
        The reason, from a closed list.
    reason : str
        The reason as a sentence.
    """

    path: str | None
    executor: str | None
    code: Code
    reason: str

    def __bool__(self) -> bool:
        return self.path is not None


def device_arch(device: torch.device) -> str:
    """Architecture of a device: ``gfx950``, ``sm_90``, ``cpu``.

    Raises
    ------
    ValueError
        For a meta device, which has none.
    """
    if device.type == "meta":
        raise ValueError(
            "arch: got None with meta tensors; accepted: an architecture such as 'gfx950', since they have no device"
        )
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _native_refusal(facts: Facts) -> tuple[Code, str] | None:
    """Why the native kernel does not serve a call, whatever the machine; None where it does."""
    if not facts.causal:
        return Code.NON_CAUSAL, "the native kernel is causal, the call is not"
    dims = (facts.head_dim, facts.head_dim_v)
    if dims not in traits.HEAD_DIMS:
        return Code.HEAD_DIMS, f"the native kernel serves (D, Dv) in {list(traits.HEAD_DIMS)}, the call has {dims}"
    pages = traits.PAGES[facts.layout]
    if facts.page not in pages:
        native = ", ".join(map(str, pages))
        return Code.PAGE_SIZE, f"the native kernel serves {facts.layout} pages of {native}, the call has {facts.page}"
    if (facts.layout, facts.page, *dims) not in traits.BUILT:
        kernel = f"{facts.layout} pages of {facts.page} with (D, Dv) = {dims}"
        return Code.KERNEL_ABSENT, f"this version has no native kernel yet for {kernel}"
    return None


def _wrong_machine(facts: Facts, name: str, arch: str) -> tuple[Code, str] | None:
    if name == "gpu" and arch != traits.ARCH:
        return Code.ARCH, f"the native kernel runs on {traits.ARCH}, the call is on {arch}"
    if name == "emulator" and facts.device.type not in ("cpu", "meta"):
        return Code.EMULATOR_DEVICE, f"the emulator takes CPU tensors, the call has tensors on {facts.device}"
    return None


def _native(facts: Facts, name: str, arch: str) -> Plan:
    """The native path on executor ``name``, or the reason against it."""
    refusal = _wrong_machine(facts, name, arch) or _native_refusal(facts)
    if refusal is None and (missing := executors.flydsl_missing()):
        refusal = Code.FLYDSL_ABSENT, missing
    if refusal is not None:
        return Plan(None, None, *refusal)
    return Plan("paged", name, Code.NATIVE, f"native kernel for {traits.ARCH} on executor {name}")


def _dense(facts: Facts, arch: str, code: Code, reason: str) -> Plan:
    """The first provider that serves a call unasked."""
    refusals: list[str] = []
    for provider in providers.PROVIDERS:
        refusal = provider.refusal(facts, arch, False)
        if refusal is None:
            return Plan("dense", provider.name, code, reason)
        refusals.append(f"{provider.name}: {refusal}")
        if provider.expected(facts, arch):
            reason = f"{reason}; {refusals[-1]}"
    return Plan(None, None, Code.BEYOND_FALLBACK, f"beyond the dense fallback: {'; '.join(refusals)}")


def _forced_dense(facts: Facts, arch: str, name: str) -> Plan:
    """The dense path on the provider that was asked for, or the reason against it."""
    refusal = providers.by_name(name).refusal(facts, arch, True)
    if refusal is None:
        return Plan("dense", name, Code.FORCED_DENSE, f"executor {name} was asked for")
    return Plan(None, None, Code.BEYOND_FALLBACK, f"beyond the dense fallback: {name}: {refusal}")


# Serving engines make the same few calls again and again; and a device keeps its architecture while the process lives.
@lru_cache(maxsize=4096)
def _decide(plain_facts: tuple[Any, ...], executor: str, arch: str | None) -> Plan:
    facts = Facts(*plain_facts)
    arch = arch or device_arch(facts.device)
    if executor in providers.NAMES:
        return _forced_dense(facts, arch, executor)
    if executor != "auto":
        return _native(facts, executor, arch)
    native = _native(facts, "gpu", arch)
    return native or _dense(facts, arch, native.code, native.reason)


def decide(request: Request, options: Options, arch: str | None = None) -> Plan:
    """Choose path and executor of a call.

    Parameters
    ----------
    request : Request
    options : Options
        Its executor binds; ``auto`` chooses.
    arch : str, optional
        Architecture to plan for; None takes q's device.

    Returns
    -------
    Plan
        Falsy where the call can't run under these options.
    """
    if arch is not None:
        if not isinstance(arch, str):
            raise TypeError(f"arch: got {arch!r}; accepted: an architecture such as '{traits.ARCH}'")
        arch = arch.split(":")[0]
    _, _, _, page, _, head_dim, head_dim_v, _, _ = cache = request.cache
    facts = (cache.name, page, head_dim, head_dim_v, request.causal, request.device)
    return _decide(facts, options.executor, arch)


_logged: set[Code] = set()


def log_once(chosen: Plan) -> None:
    """Say where a call goes, once per process and code; a fallback that nobody asked for is a warning."""
    if chosen.code in _logged:
        return
    _logged.add(chosen.code)
    wanted = chosen.code in (Code.NATIVE, Code.FORCED_DENSE)
    level = logging.INFO if wanted else logging.WARNING
    logger.log(level, "%s path on %s (%s): %s", chosen.path or "no", chosen.executor, chosen.code, chosen.reason)
