"""Pages to dense float32 pieces, a bounded number of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..layouts import PACK, Cache


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a request: whole pages [first, last), or slots [low, high) of one page."""

    start: int
    stop: int
    first: int
    last: int
    low: int
    high: int


def pieces(kv_len: int, page: int, tokens: int) -> Iterator[Piece]:
    """Cut a request of ``kv_len`` tokens into pieces of about ``tokens``, each whole pages or a part of one page.

    Parts of a page start and end at multiples of a pack, so that they exist in every layout; ``stop`` alone knows the
    length.
    """
    if page < tokens:
        step = tokens // page
        for first in range(0, -(-kv_len // page), step):
            last = min(first + step, -(-kv_len // page))
            yield Piece(first * page, min(last * page, kv_len), first, last, 0, page)
        return
    step = max(tokens // PACK * PACK, PACK)
    for start in range(0, kv_len, page):
        for low in range(0, min(page, kv_len - start), step):
            high = min(low + step, page)
            yield Piece(start + low, min(start + high, kv_len), start // page, start // page + 1, low, high)


def gather(
    cache: Cache, page_ids: torch.Tensor, piece: Piece, heads: slice, k_out: torch.Tensor, v_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather and convert one piece; ids outside of the cache are clamped into it.

    Parameters
    ----------
    cache : Cache
    page_ids : torch.Tensor
        [pages of the request] int32.
    piece : Piece
    heads : slice
        KV heads to gather.
    k_out, v_out : torch.Tensor
        Flat float32 workspaces.

    Returns
    -------
    k, v : torch.Tensor
        [heads, tokens, D] and [heads, tokens, Dv] float32, views of the workspaces, tokens up to the request's length
        only.
    """
    ids = page_ids[piece.first : piece.last].clamp(0, cache.pages - 1)
    slots = slice(piece.low, piece.high)
    k = _dense(cache.k_part(heads, slots), ids, cache.k_by_head, cache.head_dim, k_out)
    v = _dense(cache.v_part(heads, slots), ids, cache.v_by_head, cache.head_dim_v, v_out)
    tokens = piece.stop - piece.start
    return k[:, :tokens], v[:, :tokens]


def _dense(
    part: torch.Tensor,
    ids: torch.Tensor,
    by_head: Callable[[torch.Tensor], torch.Tensor],
    dim: int,
    workspace: torch.Tensor,
) -> torch.Tensor:
    # Bytes are gathered, since float8 tensors can't be indexed on every device.
    ordered = by_head(part.view(torch.uint8).index_select(0, ids))
    dense = workspace[: ordered.numel()]
    torch.index_select(float_values(part.dtype, part.device), 0, _positions(ordered), out=dense)
    return dense.view(ordered.shape[0], -1, dim)


def dequantise(tensor: torch.Tensor) -> torch.Tensor:
    """A float8 tensor as contiguous float32, by a table of the 256 values: three times as fast as a conversion on
    CPU."""
    positions = _positions(tensor.view(torch.uint8))
    return float_values(tensor.dtype, tensor.device).index_select(0, positions).view(tensor.shape)


def _positions(raw: torch.Tensor) -> torch.Tensor:
    return raw.to(torch.int32, memory_format=torch.contiguous_format).view(-1)


@lru_cache(maxsize=16)
def float_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """float32 value of each of the 256 bit patterns."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).to(device)
