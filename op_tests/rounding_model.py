"""Paged attention in float64 with the one rounding that the native kernel is meant to make: P to e4m3.

Written from the kernel's description, not from its code. Per row of queries, keys in tiles of 128 from the first key:

* scores s are exact; ``c = softmax_scale * q_descale * k_descale * log2(e)``, whose sign goes to the scores;
* the row's reference m starts at a power of two below every score, and moves to a tile's maximum only where that is
  more than ``threshold / c`` above it; then what was summed so far is multiplied by ``2 ** (c * (old - new))``;
* ``P = 2 ** (c * (s - m) + lift)`` is rounded to e4m3 for the product with V, and both are summed;
* O is divided by the sum of the rounded P, and LSE comes from the other one.

What the kernel does in float32 beside that (its sums, products and exponentials, and the rounding of O to bf16) is
within the gate of the comparison, 0.004 relative L2; a wrong lift, threshold, tile or rescale is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from aiter_paged_fp8.reference import e4m3_values
from op_tests.cases import Built, token

TILE, THRESHOLD, LARGEST = 128, 4, 448.0
LIFT = math.log2(LARGEST / 2**THRESHOLD)


@dataclass
class Modelled:
    """Results, and what happened on the way.

    Attributes
    ----------
    out, lse : torch.Tensor
        As the kernel's, in float64; rows that belong to no request are NaN.
    rescales : torch.Tensor
        [Hq, total_q]: how often a row's reference moved after its first tile.
    last : torch.Tensor
        [Hq, total_q]: the last tile at which it moved; -1 for rows without keys.
    highest : float
        Largest P before rounding.
    """

    dim: int
    out: torch.Tensor
    lse: torch.Tensor
    rescales: torch.Tensor
    last: torch.Tensor
    highest: float = 0.0


def round_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 value of numbers in [0, 464], ties to even: three bits after the leading one, least exponent -6."""
    _, exponent = torch.frexp(values)
    step = torch.ldexp(torch.ones_like(values), exponent.clamp(min=-5) - 4)
    return torch.round(values / step) * step


def tokens_of(built: Built, name: str, request: int) -> torch.Tensor:
    """K or V of a request in float64: [kv_len, Hkv, dim]."""
    case = built.case
    dim = case.dim if name == "k" else case.dim_v
    length = case.kv_lens[request]
    values = e4m3_values()
    rows = [values[token(built, name, request, index).reshape(case.kv_heads, dim).long()] for index in range(length)]
    return torch.stack(rows) if rows else torch.zeros((0, case.kv_heads, dim), dtype=torch.float64)


@dataclass(frozen=True)
class Rule:
    """How P is formed: the kernel's numbers; others tell how far a wrong one would be. Without ``rounded``, plain
    attention by the same steps."""

    rounded: bool = True
    lift: float = LIFT
    threshold: float = THRESHOLD
    tile: int = TILE


KERNEL = Rule()


def modelled(built: Built, rule: Rule = KERNEL) -> Modelled:
    """The model of a case's call."""
    case = built.case
    scales = [float(built.kwargs[name]) for name in ("q_descale", "k_descale", "v_descale")]
    softmax_scale = built.kwargs.get("softmax_scale") or case.dim**-0.5
    factor = softmax_scale * scales[0] * scales[1] * math.log2(math.e)
    total_q, heads = built.q.shape[:2]
    group = heads // case.kv_heads
    result = Modelled(
        case.dim,
        torch.full((total_q, heads, case.dim_v), math.nan, dtype=torch.float64),
        torch.full((heads, total_q), math.nan, dtype=torch.float64),
        torch.zeros((heads, total_q), dtype=torch.int64),
        torch.full((heads, total_q), -1, dtype=torch.int64),
    )
    values = e4m3_values()
    for request, kv_len in enumerate(case.kv_lens):
        first, last = built.cu[request], built.cu[request + 1]
        keys, vals = (tokens_of(built, name, request) for name in ("k", "v"))
        # Keys that each row sees.
        seen = (torch.arange(last - first) + 1 + kv_len - (last - first)).clamp(0, kv_len)
        for head in range(heads):
            query = values[built.q[first:last, head].view(torch.uint8).long()]
            scores = math.copysign(1.0, factor) * (query @ keys[:, head // group].T)
            scores[torch.arange(kv_len) >= seen[:, None]] = -math.inf
            where = head, slice(first, last)
            _attend(result, where, scores, vals[:, head // group] * scales[2], abs(factor), rule)
    return result


def _attend(
    result: Modelled, where: tuple[int, slice], scores: torch.Tensor, vals: torch.Tensor, c: float, rule: Rule
) -> None:
    """All rows of one head of one request; keys that a row does not see have a score of -inf."""
    head, rows = where
    count = scores.shape[0]
    floor = -(2.0 ** math.ceil(math.log2(result.dim * LARGEST * LARGEST)))
    reference = torch.full((count,), floor, dtype=torch.float64)
    total, multiplied = torch.zeros(2, count, dtype=torch.float64)
    out = torch.zeros((count, vals.shape[1]), dtype=torch.float64)
    for number, start in enumerate(range(0, scores.shape[1], rule.tile)):
        part = scores[:, start : start + rule.tile]
        highest = part.max(1).values
        moved = highest > reference + rule.threshold / c
        new = torch.where(moved, highest, reference)
        shrink = torch.exp2(c * (reference - new))
        total, multiplied, out = total * shrink, multiplied * shrink, out * shrink[:, None]
        result.rescales[head, rows] += (moved & (number > 0)).long()
        result.last[head, rows] = torch.where(moved, number, result.last[head, rows])
        reference = new
        p = torch.exp2(c * (part - reference[:, None]) + rule.lift)
        result.highest = max(result.highest, float(p.max()) if p.numel() else 0.0)
        total = total + p.sum(1)
        factors = round_e4m3(p) if rule.rounded else p
        multiplied = multiplied + factors.sum(1)
        out = out + factors @ vals[start : start + rule.tile]
    blind = total == 0
    result.out[rows, head] = torch.where(blind[:, None], 0.0, out / multiplied[:, None])
    result.lse[head, rows] = (c * reference + torch.log2(total) - rule.lift) * math.log(2)
    result.lse[head, rows] = torch.where(blind, -math.inf, result.lse[head, rows])
