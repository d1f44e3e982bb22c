"""The table of dense providers, in the order in which plan tries them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..planner import Facts
    from ..request import Request

#: Head dims of the torch provider: whole packs, up to what the contract asks of the fallback.
DIM_STEP, MAX_DIM = 16, 256


@dataclass(frozen=True)
class Provider:
    """One implementation of dense FP8 attention.

    Attributes
    ----------
    name : str
        The executor's name in a Plan.
    refusal : callable
        Facts -> why it can't serve (a phrase), or None. Reads metadata only.
    run : callable
        (request, out, lse) -> None; writes the rows that the call owns.
    """

    name: str
    refusal: Callable[[Facts], str | None]
    run: Callable[[Request, torch.Tensor, torch.Tensor | None], None]


def _torch_refusal(facts: Facts) -> str | None:
    for name, dim in (("D", facts.head_dim), ("Dv", facts.head_dim_v)):
        if dim % DIM_STEP or dim > MAX_DIM:
            return f"head dims are multiples of {DIM_STEP} up to {MAX_DIM}, the call has {name} = {dim}"
    return None


def _torch_run(request: Request, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    from .dense import attend

    attend(request, out, lse)


PROVIDERS: list[Provider] = [Provider("torch", _torch_refusal, _torch_run)]


def by_name(name: str | None) -> Provider:
    """The provider that a Plan names."""
    for provider in PROVIDERS:
        if provider.name == name:
            return provider
    raise KeyError(name)
