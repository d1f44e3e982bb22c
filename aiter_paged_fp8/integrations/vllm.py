"""From vLLM's SHUFFLE KV cache to the arguments of `flydsl_flash_attn_paged_prefill_func`.

vLLM allocates the cache of a layer in one piece and hands K and V on as views of it,
``[blocks, block_size, Hkv, D]`` each. With ``VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT=1`` its writer fills the bytes of a
block in the vectorized order all the same, so that the shape says one thing and the bytes another; what is here gives
them the shape that they have. Nothing is copied and no device memory is read.
"""

from __future__ import annotations

from typing import Any

import torch

from ..layouts import PACK
from ._views import as_fp8, packed_in_blocks

__all__ = ["paged_prefill_arguments", "shuffle_views"]


def shuffle_views(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectorized views of a SHUFFLE cache.

    Parameters
    ----------
    key_cache, value_cache : torch.Tensor
        [blocks, block_size, Hkv, D] each, float8_e4m3fn or the bytes of it (uint8): ``kv_cache.unbind(0)`` of vLLM's
        [2, blocks, ...], or ``kv_cache.unbind(1)`` of [blocks, 2, ...]. Packed inside a block; the stride between
        blocks and the storage offset are free.

    Returns
    -------
    k, v : torch.Tensor
        [blocks, Hkv, D/16, block_size, 16] and [blocks, Hkv, block_size/16, D, 16] float8_e4m3fn, views.

    Raises
    ------
    TypeError, ValueError
        Naming the cache, what came and what is accepted.
    """
    views = []
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        cache = as_fp8(name, cache)
        if cache.dim() != 4:
            raise ValueError(f"{name}: got shape {list(cache.shape)}; accepted: [blocks, block_size, Hkv, D]")
        blocks, size, heads, dim = cache.shape
        for what, number in (("block_size", size), ("D", dim)):
            if number % PACK:
                raise ValueError(f"{name}: got {what} {number} in {list(cache.shape)}; accepted: multiples of {PACK}")
        if name == "key_cache":
            shape = (blocks, heads, dim // PACK, size, PACK)
        else:
            shape = (blocks, heads, size // PACK, dim, PACK)
        views.append(packed_in_blocks(name, cache).view(shape))
    k, v = views
    return k, v


def paged_prefill_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    scale: float | None = None,
    causal: bool = True,
    output: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `flydsl_flash_attn_paged_prefill_func`, from the names that vLLM's backends use.

    Parameters
    ----------
    query : torch.Tensor
        [tokens, Hq, D] float8_e4m3fn, of the requests in ``query_start_loc``; vLLM's own is bf16 and is quantised with
        ``q_scale`` before.
    key_cache, value_cache : torch.Tensor
        As for `shuffle_views`.
    query_start_loc : torch.Tensor
        [B + 1] int32 row offsets. It may be a slice of the batch's, and so need not start at 0 if ``query`` is whole.
    block_table, seq_lens : torch.Tensor
        [B, capacity] int32 block ids, of which a request uses the first ones, and [B] int32 lengths in tokens, the new
        ones included.
    max_query_len, max_seq_len : int
        Upper bounds of the lengths.
    q_scale, k_scale, v_scale : torch.Tensor
        Per-tensor descales, float32, one element each. The SHUFFLE writer divides by 1.0, so that K's and V's are 1.0
        with that layout; the scales for each token that vLLM also keeps are not per-tensor and are refused.
    scale : float, optional
        Softmax scale; None = D ** -0.5.
    causal : bool
        As in the public function.
    output : torch.Tensor, optional
        [tokens, Hq, D] bfloat16, to write into.

    Returns
    -------
    dict
        Complete: ``flydsl_flash_attn_paged_prefill_func(**arguments)``.
    """
    k, v = shuffle_views(key_cache, value_cache)
    return {
        "q": query,
        "k": k,
        "v": v,
        "cu_seqlens_q": query_start_loc,
        "max_seqlen_q": max_query_len,
        "max_seqlen_k": max_seq_len,
        "block_table": block_table,
        "seqlen_k": seq_lens,
        "q_descale": q_scale,
        "k_descale": k_scale,
        "v_descale": v_scale,
        "softmax_scale": scale,
        "causal": causal,
        "out": output,
    }
