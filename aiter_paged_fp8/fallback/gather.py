"""Pages to dense float32 pieces, a bounded number of tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..layouts import PACK, Cache

#: e4m3 has 3 mantissa bits and bias 7, float16 has 10 and bias 15: what a shift by the difference makes of a number is
#: smaller by 2**8, and leaves the upper one of float16's exponent bits unused.
MANTISSA_SHIFT, FP8_SCALE, UNUSED_EXPONENT_BIT = 10 - 3, 2.0 ** (15 - 7), 1 << 14
#: What becomes of e4m3's NaN, S.1111.111.
NAN_AS_HALF = 1.875
#: Pieces are cut at multiples of this many tokens, so that the same tokens give the same bits at smaller page sizes.
COMMON_PAGE = 64


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a request: whole pages [first, last), or slots [low, high) of one page."""

    start: int
    stop: int
    first: int
    last: int
    low: int
    high: int


def pieces(kv_len: int, page: int, large_until: int, small: int, large: int) -> Iterator[Piece]:
    """Cut the first ``kv_len`` tokens of a request into pieces, each whole pages or a part of one page.

    Parameters
    ----------
    kv_len, page : int
        Tokens of the request and of a page.
    large_until : int
        Up to this token pieces have about ``large`` tokens, beyond it at most ``small`` (or one page, if smaller).
    small, large : int
        Tokens of a piece; at least one pack.

    Yields
    ------
    Piece
        Parts of a page start and end at multiples of a pack, so that they exist in every layout; ``stop`` alone knows
        the length.
    """
    at = 0
    while at < kv_len:
        tokens = max(small, min(large, large_until - at))
        if tokens > COMMON_PAGE:
            tokens -= tokens % COMMON_PAGE
        first, low = divmod(at, page)
        if page <= tokens and not low:
            last = min(first + tokens // page, -(-kv_len // page))
            yield Piece(at, min(last * page, kv_len), first, last, 0, page)
            at = last * page
        else:
            high = min(low + max(tokens // PACK * PACK, PACK), page)
            yield Piece(at, min(at + high - low, kv_len), first, first + 1, low, high)
            at += high - low


class Workspace:
    """Memory for one piece, kept for a whole call: fresh memory would cost a page fault for each 4 KiB of each piece.

    Parameters
    ----------
    rows, head_dim, head_dim_v : int
        Heads times tokens, and the head dims.
    """

    def __init__(self, rows: int, head_dim: int, head_dim_v: int, device: torch.device) -> None:
        self.k = torch.empty(rows * head_dim, dtype=torch.float32, device=device)
        self.v = torch.empty(rows * head_dim_v, dtype=torch.float32, device=device)
        self.halves = torch.empty(rows * max(head_dim, head_dim_v), dtype=torch.int16, device=device)


def gather(
    cache: Cache, page_ids: torch.Tensor, piece: Piece, heads: slice, space: Workspace
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Gather and convert one piece; ids outside of the cache are clamped into it.

    Parameters
    ----------
    cache : Cache
    page_ids : torch.Tensor
        [pages of the request] int32.
    piece : Piece
    heads : slice
        KV heads to gather.
    space : Workspace

    Returns
    -------
    k, v : torch.Tensor
        [heads, tokens, D] and [heads, tokens, Dv] float32, views of the workspace, tokens up to the request's length
        only; all values divided by `FP8_SCALE`.
    k_has_nan : bool
        Whether a NaN is in K. Looked for on CPU only, where it costs no wait.
    """
    ids = page_ids[piece.first : piece.last].clamp(0, cache.pages - 1)
    slots = slice(piece.low, piece.high)
    k, k_has_nan = _dense(cache.k_part(heads, slots), ids, cache.k_by_head, cache.head_dim, space.k, space.halves)
    v, _ = _dense(cache.v_part(heads, slots), ids, cache.v_by_head, cache.head_dim_v, space.v, space.halves)
    tokens = piece.stop - piece.start
    k, v = k[:, :tokens], v[:, :tokens]
    # What stands behind the length may be NaN and must not matter, not even for the choice of arithmetic.
    return k, v, k_has_nan and bool(k.isnan().any())


def _dense(
    part: torch.Tensor,
    ids: torch.Tensor,
    by_head: Callable[[torch.Tensor], torch.Tensor],
    dim: int,
    workspace: torch.Tensor,
    halves: torch.Tensor,
) -> tuple[torch.Tensor, bool]:
    # Bytes are gathered, since float8 tensors can't be indexed on every device.
    raw = part.view(torch.uint8).index_select(0, ids)
    ordered = by_head(raw)
    dense = workspace[: raw.numel()]
    has_nan = _convert(ordered, halves[: raw.numel()], dense)
    return dense.view(ordered.shape[0], -1, dim), has_nan


def dequantise(tensor: torch.Tensor) -> torch.Tensor:
    """A float8 tensor as contiguous float32, divided by `FP8_SCALE`."""
    dense = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
    _convert(tensor.view(torch.uint8), torch.empty_like(dense, dtype=torch.int16), dense)
    return dense.view(tensor.shape)


def _convert(raw: torch.Tensor, halves: torch.Tensor, dense: torch.Tensor) -> bool:
    """e4m3 bytes in any order to contiguous float32, divided by `FP8_SCALE`; whether NaN is among them (CPU only).

    An e4m3 number moved to the exponent's place of a float16 is that number over 2**8, subnormals included; CPUs and
    GPUs convert float16 many at a time, float8 one by one. Only NaN, whose pattern is a number there, needs mending.
    """
    halves.view(raw.shape).copy_(raw.view(torch.int8))  # the sign goes to all upper bits
    halves.bitwise_left_shift_(MANTISSA_SHIFT).bitwise_and_(~UNUSED_EXPONENT_BIT)
    dense.copy_(halves.view(torch.float16))
    if raw.is_cpu and int(raw.max()) != 0xFF and int(raw.view(torch.int8).max()) != 0x7F:
        return False
    dense.masked_fill_(dense.abs() == NAN_AS_HALF, math.nan)
    return raw.is_cpu
