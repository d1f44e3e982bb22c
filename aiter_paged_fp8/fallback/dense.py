"""Dense FP8 attention in torch: online softmax in float32 over pieces of gathered K and V.

For each request, a block of query rows is kept in float32 with its running maximum, row sum and output (the online
softmax of Milakov and Gimelshein, 2018, in the base-2 domain); K and V pass by in pieces that were gathered and
converted once per block. Neither a request's K and V nor its scores ever exist as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..page_table import Span, spans
from ..request import Request, capturing
from .gather import FP8_SCALE, Piece, Workspace, dequantise, gather, pieces

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@dataclass(frozen=True)
class Tiling:
    """How much is in flight at once.

    Attributes
    ----------
    keys : int
        Tokens of K and V per piece, where a tile has all its rows.
    rows : int
        Query rows (tokens x heads of one KV head) per score tile.
    scores : int
        float32 scores per tile, over all KV heads that share it.
    most_keys : int
        Tokens per piece that all rows of the block see, or where rows are so few that launches would cost more than
        products; 0 = ``keys``.
    state : int
        float32 elements of q and output kept for a block of rows; K and V pieces get as much again.
    """

    keys: int
    rows: int
    scores: int
    state: int
    most_keys: int = 0


# CPU: scores of one head are 512 KiB, so that the passes of softmax find them in the second-level cache; in all under
# 100 MiB.
CPU = Tiling(keys=256, rows=512, scores=2 * 512 * 256, state=8 << 20, most_keys=2048)
# GPU: tiles large enough to fill the device with one matrix product each; in all under 200 MiB.
GPU = Tiling(keys=2048, rows=2048, scores=8 << 20, state=8 << 20)

# A score of at most 2**6 in the base-2 domain needs no maximum: its weight is at most 2**64, a sum over 2**31 keys of
# products with values up to 448 stays under 2**104, and float32 ends at 2**128.
BOUND = 64.0
# Rows (tokens x heads of a KV head) from which looking for the bound is cheaper than the passes that it saves.
BOUND_ROWS = 128
# Rows over all heads for each token of a piece that all rows see: merging stays under 3 % of the products.
ROWS_PER_KEY = 4


@dataclass
class _State:
    """Running state of a block of rows.

    Attributes
    ----------
    shift : torch.Tensor or None
        [heads, rows], what was subtracted from the scores so far (base 2): the running maximum, or None for 0 while
        all scores were bounded.
    total : torch.Tensor
        [heads, rows], row sums.
    output : torch.Tensor
        [heads, rows, Dv], not yet divided by the sums.
    started : bool
        Whether any piece went in.
    """

    shift: torch.Tensor | None
    total: torch.Tensor
    output: torch.Tensor
    started: bool = False


def attend(request: Request, out: torch.Tensor, lse: torch.Tensor | None = None, tiling: Tiling | None = None) -> None:
    """Attend every request of a call and write its rows; rows that belong to no request stay as they are.

    Parameters
    ----------
    request : Request
    out : torch.Tensor
        [total_q, Hq, Dv], any float dtype (float32 shows the result before rounding).
    lse : torch.Tensor, optional
        [Hq, total_q] float32.
    tiling : Tiling, optional
        None takes the device's own.

    Raises
    ------
    NotImplementedError
        Under stream capture: the lengths are read from the device once per call.
    """
    q = request.q
    with _on_stream(request.stream, q.device), torch.inference_mode():
        if capturing(q.device):
            raise NotImplementedError(
                "stream: got a call under stream capture; accepted: calls outside of it, since the dense "
                "fallback reads the lengths from the device once per call"
            )
        work = _Work(request, out, lse, tiling or (CPU if q.device.type == "cpu" else GPU))
        cache = request.cache
        for span in spans(
            request.cu_seqlens_q,
            request.table,
            total_q=q.shape[0],
            page=cache.page,
            pages=cache.pages,
            max_seqlen_k=request.max_seqlen_k,
        ):
            work.attend(span)


def _on_stream(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream) if stream is not None and device.type == "cuda" else nullcontext()


@lru_cache(maxsize=1)
def _fused_cpu() -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """torch's fused attention on CPU with its LSE, where this torch has it in the form that is known here.

    One parallel region for a whole piece, where the tiles below are one for each pass. It takes equal head dims, and
    its masks let a hidden NaN through: it serves what all rows see. A block of keys that are all NaN it takes for
    masked: pieces with NaN in K are not for it.
    """
    fused = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    try:
        one = torch.ones(1, 2, 3, 16)
        out, lse = fused(one, one[:, :, :1], one[:, :, :1], 0.0, False, scale=0.5)  # type: ignore[misc]
        known = bool((out == 1).all()) and lse.shape == (1, 2, 3) and bool((lse == 8).all())
    except (TypeError, RuntimeError, ValueError):
        return None
    return fused if known else None


def _largest_norm(rows: torch.Tensor) -> float:
    """The largest Euclidean norm of a row (NaN if any is NaN): by Cauchy and Schwarz, what bounds a score."""
    return float(torch.linalg.vector_norm(rows, dim=-1).amax())


class _Work:
    """Workspaces and scales of one call."""

    def __init__(self, request: Request, out: torch.Tensor, lse: torch.Tensor | None, tiling: Tiling) -> None:
        cache, scales = request.cache, request.scales
        self.request, self.out, self.lse, self.tiling = request, out, lse, tiling
        self.group = request.q.shape[1] // cache.kv_heads
        # Base 2 throughout: exp2 of (score * log2 e) is exp of the score, and costs one multiplication of q instead
        # of one of the scores. In float64, since the product of two tiny descales and a huge scale may be any number.
        product = scales.q.reshape(()).double() * scales.k.reshape(()).double()
        self.q_scale = (product * (scales.softmax * LOG2_E * FP8_SCALE**2)).float()
        self.v_scale = scales.v.reshape(()) * FP8_SCALE
        keys = max(tiling.keys, tiling.most_keys)
        self.heads = max(1, min(cache.kv_heads, tiling.state // (keys * max(cache.head_dim, cache.head_dim_v))))
        self.space = Workspace(self.heads * keys, cache.head_dim, cache.head_dim_v, self.out.device)
        self.scores = self._space(0)
        equal_dims = cache.head_dim == cache.head_dim_v
        self.fused = _fused_cpu() if equal_dims and self.out.device.type == "cpu" else None
        # Tokens of q per block: as many as the state has room for, but at least one.
        width = self.heads * self.group * (cache.head_dim + cache.head_dim_v)
        self.block = max(1, tiling.state // width)

    def _space(self, elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=torch.float32, device=self.request.q.device)

    def attend(self, span: Span) -> None:
        blind = min(span.q_len, max(0, span.q_len - span.kv_len)) if self.request.causal else 0
        if not span.kv_len:
            blind = span.q_len
        if blind:
            self.out[span.start : span.start + blind].zero_()
            if self.lse is not None:
                self.lse[:, span.start : span.start + blind].fill_(-math.inf)
        for row in range(blind, span.q_len, self.block):
            rows = range(row, min(row + self.block, span.q_len))
            for head in range(0, self.request.cache.kv_heads, self.heads):
                self._block(span, rows, slice(head, min(head + self.heads, self.request.cache.kv_heads)))

    def _block(self, span: Span, rows: range, heads: slice) -> None:
        cache, group = self.request.cache, self.group
        # Key j is seen by row i where j <= i + ahead.
        ahead = span.kv_len - span.q_len if self.request.causal else span.kv_len
        q = self.request.q[span.start + rows.start : span.start + rows.stop, heads.start * group : heads.stop * group]
        count = heads.stop - heads.start
        q = dequantise(q).mul_(self.q_scale).view(len(rows), count, group, -1).transpose(0, 1)
        q = q.reshape(count, len(rows) * group, -1)
        state = _State(None, q.new_zeros(q.shape[:2]), q.new_zeros((*q.shape[:2], cache.head_dim_v)))
        # On other devices reading the bound would stop the queue of launches.
        use_bound = self.fused is None and q.device.type == "cpu" and q.shape[1] >= BOUND_ROWS
        q_norm = _largest_norm(q) if use_bound else math.inf
        few, many = self._keys(count * q.shape[1])
        seen_by_all = min(span.kv_len, rows.start + ahead + 1)
        for piece in pieces(min(span.kv_len, rows.stop + ahead), cache.page, seen_by_all, few, many):
            k, v, k_has_nan = gather(cache, span.page_ids, piece, heads, self.space)
            bounded = state.shift is None and q_norm < math.inf and q_norm * _largest_norm(k) <= BOUND
            if not bounded and state.shift is None:
                state.shift = q.new_full(q.shape[:2], 0.0 if state.started else -math.inf)
            self._piece(q, k, v, state, rows, piece, ahead, self.fused is not None and not k_has_nan)
            state.started = True
        self._store(state, span, rows, heads)

    def _keys(self, rows: int) -> tuple[int, int]:
        """Tokens per piece for a block of that many rows over all heads: on the diagonal, and where all see them."""
        tiling = self.tiling
        few = max(tiling.keys, min(tiling.most_keys, tiling.scores // rows))
        if self.fused is None:
            return few, few
        # Merging costs a pass over the rows for each piece, a long piece falls out of the caches before it is used.
        return tiling.keys, min(tiling.most_keys, max(2 * tiling.keys, rows // ROWS_PER_KEY))

    def _piece(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: _State,
        rows: range,
        piece: Piece,
        ahead: int,
        fuse: bool,
    ) -> None:
        """One piece of keys against all rows of the block, tile by tile."""
        group, tiling = self.group, self.tiling
        tile_rows = max(1, tiling.rows // group)
        tile_heads = max(1, tiling.scores // (tiling.rows * tiling.keys))
        # The first row that sees anything of this piece; rows are in order, so all after it do.
        first = max(rows.start, piece.start - ahead)
        stop = rows.stop
        if fuse and piece.stop - 1 - ahead < rows.stop:
            # From here on rows see all of the piece.
            stop = max(first, piece.stop - 1 - ahead)
            self._whole(q, k, v, state, slice((stop - rows.start) * group, None))
        for row in range(first, stop, tile_rows):
            last = min(row + tile_rows, stop)
            keys = min(piece.stop, last + ahead) - piece.start
            hidden = None
            if piece.start + keys > row + ahead + 1:
                hidden = self._hidden(range(row, last), range(piece.start, piece.start + keys), ahead, q.device)
            part = slice((row - rows.start) * group, (last - rows.start) * group)
            for head in range(0, q.shape[0], tile_heads):
                heads = slice(head, head + tile_heads)
                self._tile(q[heads, part], k[heads, :keys], v[heads, :keys], state, heads, part, hidden)

    def _whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: _State, part: slice) -> None:
        """A piece that the rows see all of: attended by torch, then merged by its LSE as if it were one more key."""
        assert self.fused is not None
        assert state.shift is not None
        # q holds log2 e, torch computes in base e.
        out, lse = self.fused(q[None, :, part], k[None], v[None], 0.0, False, scale=LN_2)
        score = lse[0] * LOG2_E
        shift, total, output = state.shift[:, part], state.total[:, part], state.output[:, part]
        raised = torch.maximum(shift, score)
        kept, fresh = shift.sub_(raised).exp2_(), score.sub_(raised).exp2_()
        total.mul_(kept).add_(fresh)
        if state.started:
            output.mul_(kept.unsqueeze(-1)).addcmul_(out[0], fresh.unsqueeze(-1))
        else:
            output.copy_(out[0]).mul_(fresh.unsqueeze(-1))
        shift.copy_(raised)

    def _hidden(self, rows: range, keys: range, ahead: int, device: torch.device) -> torch.Tensor:
        """[rows x group, keys] bool: what the causal mask hides."""
        row = torch.arange(rows.start, rows.stop, device=device).repeat_interleave(self.group)
        key = torch.arange(keys.start, keys.stop, device=device)
        return key[None, :] > row[:, None] + ahead

    def _tile(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: _State,
        heads: slice,
        part: slice,
        hidden: torch.Tensor | None,
    ) -> None:
        shape = (q.shape[0], q.shape[1], k.shape[1])
        size = math.prod(shape)
        if self.scores.numel() < size:
            self.scores = self._space(size)
        scores = torch.bmm(q, k.transpose(1, 2), out=self.scores[:size].view(shape))
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        total, output = state.total[heads, part], state.output[heads, part]
        if state.shift is None:
            weights = scores.exp2_()
        else:
            # Every row sees the first key of its request, so the maximum is finite (or NaN) from the first piece on.
            shift = state.shift[heads, part]
            raised = torch.maximum(shift, scores.amax(-1))
            weights = scores.sub_(raised.unsqueeze(-1)).exp2_()
            kept = shift.sub_(raised).exp2_()
            total.mul_(kept)
            output.mul_(kept.unsqueeze(-1))
            shift.copy_(raised)
        total.add_(weights.sum(-1))
        if hidden is not None and bool((unusable := v.isnan()).any()):
            # 0 * NaN is NaN: a hidden token's NaN would reach rows that do not see it.
            seen = (~hidden).to(torch.float32).expand(shape)
            output.baddbmm_(weights, v.masked_fill(unusable, 0.0))
            output.masked_fill_(torch.bmm(seen, unusable.to(torch.float32)) > 0, math.nan)
        else:
            output.baddbmm_(weights, v)

    def _store(self, state: _State, span: Span, rows: range, heads: slice) -> None:
        group, count = self.group, heads.stop - heads.start
        place = slice(span.start + rows.start, span.start + rows.stop)
        of_heads = slice(heads.start * group, heads.stop * group)
        result = state.output.mul_((self.v_scale / state.total).unsqueeze(-1))
        target = self.out[place, of_heads].view(len(rows), count, group, -1)
        target.copy_(result.view(count, len(rows), group, -1).transpose(0, 1))
        if self.lse is not None:
            natural = state.total.log2_()
            if state.shift is not None:
                natural.add_(state.shift)
            natural.mul_(LN_2)
            self.lse[of_heads, place].view(count, group, len(rows)).copy_(
                natural.view(count, len(rows), group).transpose(1, 2)
            )
