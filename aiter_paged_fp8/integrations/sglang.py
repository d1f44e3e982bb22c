"""From SGLang's KV pools to the arguments of `flydsl_flash_attn_paged_prefill_func`.

Its AITER backend has two layouts (``SGLANG_AITER_KV_CACHE_LAYOUT``): ``nhd``, a pool of token slots, and
``vectorized_5d``, pages in the vectorized order. Its page tables are CSR over *token* slots in both, also where the
server's page size is 64. Nothing of a pool is copied, and no device memory is read.
"""

from __future__ import annotations

from typing import Any

import torch

from ._views import as_fp8

__all__ = ["nhd_arguments", "pages_from_slots", "vectorized_5d_arguments"]


def nhd_arguments(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    *,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    scaling: float | None = None,
    causal: bool = True,
) -> dict[str, Any]:
    """Keyword arguments of the public function for the ``nhd`` layout.

    Parameters
    ----------
    q : torch.Tensor
        [tokens, Hq, D] or [tokens, Hq * D] float8_e4m3fn.
    k_buffer, v_buffer : torch.Tensor
        [slots, Hkv, D] and [slots, Hkv, Dv], float8_e4m3fn or its bytes: a layer's ``get_kv_buffer``.
    qo_indptr, kv_indptr : torch.Tensor
        [B + 1] int32 offsets of rows and of tokens. SGLang's own are longer; slice them to ``[: B + 1]``.
    kv_indices : torch.Tensor
        1-D int32 token slots; may be longer than used.
    max_q_len, max_kv_len : int
        Upper bounds of the lengths in tokens.
    q_scale, k_scale, v_scale : torch.Tensor
        Per-tensor descales, float32, one element each. SGLang casts q without scaling it and passes K's for Q's.
    scaling : float, optional
        Softmax scale; None = D ** -0.5.
    causal : bool
        As in the public function.

    Returns
    -------
    dict
        Complete: ``flydsl_flash_attn_paged_prefill_func(**arguments)``.
    """
    cache = _cache(k_buffer, v_buffer, 3, "[slots, Hkv, D] (nhd)")
    return {
        **_queries(q, cache[0].shape[2], qo_indptr, max_q_len, max_kv_len, scaling, causal),
        **_named_cache(cache, q_scale, k_scale, v_scale),
        "kv_indptr": kv_indptr,
        "kv_page_indices": kv_indices,
    }


def vectorized_5d_arguments(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    *,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    scaling: float | None = None,
    causal: bool = True,
) -> dict[str, Any]:
    """Keyword arguments of the public function for the ``vectorized_5d`` layout.

    Parameters
    ----------
    k_buffer, v_buffer : torch.Tensor
        [pages, Hkv, D/16, page, 16] and [pages, Hkv, page/16, Dv, 16], float8_e4m3fn or its bytes.
    kv_indptr, kv_page_indices, kv_last_page_lens : torch.Tensor
        CSR over *pages*: [B + 1], 1-D and [B] int32. `pages_from_slots` makes them of SGLang's CSR over token slots.
    q, qo_indptr, max_q_len, max_kv_len, q_scale, k_scale, v_scale, scaling, causal
        As for `nhd_arguments`.

    Returns
    -------
    dict
        Complete: ``flydsl_flash_attn_paged_prefill_func(**arguments)``.
    """
    cache = _cache(k_buffer, v_buffer, 5, "[pages, Hkv, D/16, page, 16] (vectorized_5d)")
    packs, pack = cache[0].shape[2], cache[0].shape[4]
    return {
        **_queries(q, packs * pack, qo_indptr, max_q_len, max_kv_len, scaling, causal),
        **_named_cache(cache, q_scale, k_scale, v_scale),
        "kv_indptr": kv_indptr,
        "kv_page_indices": kv_page_indices,
        "kv_last_page_lens": kv_last_page_lens,
    }


def pages_from_slots(
    kv_indptr: torch.Tensor, kv_indices: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CSR over pages from CSR over token slots, on their device and without reading anything back.

    SGLang allocates whole pages, so that the tokens of a request lie in order inside of each of its pages, and every
    ``page_size``-th one of them names a page.

    Parameters
    ----------
    kv_indptr : torch.Tensor
        [B + 1] int32 offsets into ``kv_indices``; need not start at 0.
    kv_indices : torch.Tensor
        1-D int32 token slots, slot = page * page_size + place; may be longer than used.
    page_size : int
        Tokens in a page.

    Returns
    -------
    kv_indptr, kv_page_indices, kv_last_page_lens : torch.Tensor
        [B + 1], [B + slots // page_size] and [B] int32. What is unused of the page ids holds anything.
    """
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
        raise ValueError(f"page_size: got {page_size!r}; accepted: an integer of at least 1")
    starts = kv_indptr[:-1].long()
    lengths = kv_indptr[1:].long() - starts
    counts = (lengths + page_size - 1) // page_size
    batch, slots = counts.shape[0], kv_indices.shape[0]
    indptr = torch.zeros(batch + 1, dtype=torch.long, device=kv_indptr.device)
    torch.cumsum(counts, 0, out=indptr[1:])
    last = torch.where(lengths > 0, (lengths - 1) % page_size + 1, 0)
    # How many pages there are stands in device memory; what bounds them is known here: the tokens at hand, and one
    # page of each request that is not full.
    position = torch.arange(batch + slots // page_size, device=kv_indptr.device)
    if not batch or not slots:
        return indptr.int(), position.int(), last.int()
    request = torch.searchsorted(indptr, position, right=True).sub_(1).clamp_(max=batch - 1)
    token = starts[request] + (position - indptr[request]) * page_size
    pages = kv_indices[token.clamp_(0, slots - 1)] // page_size
    return indptr.int(), pages.int(), last.int()


def _queries(
    q: torch.Tensor, dim: int, qo_indptr: torch.Tensor, max_q_len: int, max_kv_len: int, scaling: Any, causal: bool
) -> dict[str, Any]:
    """The arguments about queries; q as [tokens, Hq, D] from either form that SGLang's layers have."""
    if isinstance(q, torch.Tensor) and q.dim() == 2:
        if q.shape[1] % dim:
            raise ValueError(f"q: got shape {list(q.shape)}; accepted: [tokens, Hq * {dim}], the pool's head dim")
        q = q.unflatten(1, (q.shape[1] // dim, dim))
    return {
        "q": q,
        "cu_seqlens_q": qo_indptr,
        "max_seqlen_q": max_q_len,
        "max_seqlen_k": max_kv_len,
        "softmax_scale": scaling,
        "causal": causal,
    }


def _cache(k_buffer: torch.Tensor, v_buffer: torch.Tensor, dims: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = as_fp8("k_buffer", k_buffer), as_fp8("v_buffer", v_buffer)
    for name, buffer in (("k_buffer", k), ("v_buffer", v)):
        if buffer.dim() != dims:
            raise ValueError(f"{name}: got shape {list(buffer.shape)}; accepted: {dims} dims, as in {form} for K")
    return k, v


def _named_cache(
    cache: tuple[torch.Tensor, torch.Tensor], q_scale: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> dict[str, Any]:
    return {"k": cache[0], "v": cache[1], "q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
