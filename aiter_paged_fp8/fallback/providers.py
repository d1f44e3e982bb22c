"""The table of dense providers, in the order in which plan tries them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import triton_fmha

if TYPE_CHECKING:
    import torch

    from ..options import Launch
    from ..planner import Facts
    from ..request import Request

#: Head dims of all providers: whole packs, up to what the contract asks of the fallback.
DIM_STEP, MAX_DIM = 16, 256


@dataclass(frozen=True)
class Provider:
    """One implementation of dense FP8 attention.

    Attributes
    ----------
    name : str
        The executor's name in a Plan.
    refusal : callable
        (facts, architecture, whether it was asked for by name) -> why it can't serve (a phrase), or None. Reads
        metadata only.
    run : callable
        (request, out, lse, launches) -> None; writes the rows that the call owns, and notes launches of compiled
        kernels in the list, where there is one.
    preload : callable or None
        request -> None; compiles what the call needs.
    expected : callable
        (facts, architecture) -> whether a call there counts on this provider, so that a plan which passes it over says
        why.
    """

    name: str
    refusal: Callable[[Facts, str, bool], str | None]
    run: Callable[[Request, torch.Tensor, torch.Tensor | None, list[Launch] | None], None]
    preload: Callable[[Request], None] | None = None
    expected: Callable[[Facts, str], bool] = lambda facts, arch: False


def _beyond(facts: Facts) -> str | None:
    for name, dim in (("D", facts.head_dim), ("Dv", facts.head_dim_v)):
        if dim % DIM_STEP or dim > MAX_DIM:
            return f"head dims are multiples of {DIM_STEP} up to {MAX_DIM}, the call has {name} = {dim}"
    return None


def _torch_refusal(facts: Facts, arch: str, forced: bool) -> str | None:
    return _beyond(facts)


def _torch_run(
    request: Request, out: torch.Tensor, lse: torch.Tensor | None, launches: list[Launch] | None = None
) -> None:
    from .dense import attend

    attend(request, out, lse)


def _triton_refusal(facts: Facts, arch: str, forced: bool) -> str | None:
    return _beyond(facts) or triton_fmha.refusal(facts, arch, forced)


PROVIDERS: list[Provider] = [
    Provider("triton", _triton_refusal, triton_fmha.attend, triton_fmha.preload, triton_fmha.expected),
    Provider("torch", _torch_refusal, _torch_run),
]

NAMES = tuple(provider.name for provider in PROVIDERS)


def by_name(name: str | None) -> Provider:
    """The provider that a Plan names."""
    for provider in PROVIDERS:
        if provider.name == name:
            return provider
    raise KeyError(name)
