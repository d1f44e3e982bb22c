"""Attention over a paged KV cache, written for reading. Slow, and independent of everything else in the package.

It imports nothing of the rest and computes addresses, lengths and fp8 values by formulas of its own, so that it can
be wrong only alone.
"""

from __future__ import annotations

import math

import torch


def e4m3_values(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The value of each of the 256 e4m3 bit patterns (OCP 8-bit floating point specification, 1.0, table 1).

    One sign bit, four exponent bits with bias 7, three mantissa bits; exponent 0 is subnormal; S.1111.111 is NaN;
    there is no infinity.
    """
    values = []
    for bits in range(256):
        sign = -1.0 if bits & 0x80 else 1.0
        exponent, mantissa = (bits >> 3) & 0xF, bits & 0x7
        if exponent == 0xF and mantissa == 0x7:
            values.append(math.nan)
        elif exponent == 0:
            values.append(sign * mantissa / 8 * 2.0**-6)
        else:
            values.append(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(values, dtype=dtype)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte from a tensor's first element to its last, as one row; a view."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    as_bytes = tensor.view(torch.uint8)
    return as_bytes.as_strided((extent if tensor.numel() else 0,), (1,))


def _row(cache: torch.Tensor, flat: torch.Tensor, is_key: bool, page: int, slot: int, head: int) -> torch.Tensor:
    """The bytes of one token of one head, in the order of the head dim: the address formula of each layout, spelled
    out."""
    page_stride = cache.stride(0)
    if cache.dim() == 3:  # [slots, Hkv, D]: the page is the slot
        dim = cache.shape[2]
        start = page * page_stride + head * dim
        return flat[start : start + dim]
    if cache.dim() == 4:  # [pages, page, Hkv, D]
        _, _, heads, dim = cache.shape
        start = page * page_stride + slot * heads * dim + head * dim
        return flat[start : start + dim]
    if is_key:  # [pages, Hkv, D/16, page, 16]: element (t, d) of a head at d/16 * page * 16 + t * 16 + d%16
        _, _, packs, page_size, x = cache.shape
        start = page * page_stride + head * packs * page_size * x + slot * x
        return torch.cat([flat[start + pack * page_size * x :][:x] for pack in range(packs)])
    # [pages, Hkv, page/16, Dv, 16]: element (t, d) of a head at t/16 * Dv * 16 + d * 16 + t%16
    _, _, packs, dim, x = cache.shape
    start = page * page_stride + head * packs * dim * x + (slot // x) * dim * x + slot % x
    return flat[start : start + (dim - 1) * x + 1 : x]


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: list[int],
    page_ids: list[list[int]],
    kv_lens: list[int],
    *,
    q_descale: float = 1.0,
    k_descale: float = 1.0,
    v_descale: float = 1.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed queries over a paged cache, one token at a time.

    Parameters
    ----------
    q : torch.Tensor
        [total_q, Hq, D] float8_e4m3fn.
    k, v : torch.Tensor
        float8_e4m3fn caches in any layout of the package.
    cu_seqlens_q : list of int
        B + 1 row offsets.
    page_ids : list of list of int
        The pages of each request, in order (slots, for a cache of slots).
    kv_lens : list of int
        Length of each request in tokens.
    q_descale, k_descale, v_descale : float
        real = fp8 * descale.
    softmax_scale : float, optional
        None = D ** -0.5.
    causal : bool
        Query i sees keys j <= i + kv_len - q_len; with False, all.
    dtype : torch.dtype
        torch.float64 or torch.float32: every step is done in it.

    Returns
    -------
    out : torch.Tensor
        [total_q, Hq, Dv] of ``dtype``; 0 in rows that see no key, NaN in rows that belong to no request.
    lse : torch.Tensor
        [Hq, total_q] of ``dtype``, natural logarithm; -inf in rows that see no key, NaN in rows that belong to no
        request.

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(1, 1, 16).to(torch.float8_e4m3fn)
    >>> out, lse = paged_attention(one, one, one, [0, 1], [[0]], [1])
    >>> float(out[0, 0, 0]), float(lse[0, 0])
    (1.0, 4.0)
    """
    total_q, q_heads, dim = q.shape
    vectorized = k.dim() == 5
    kv_heads = k.shape[1] if vectorized or k.dim() == 3 else k.shape[2]
    page_size = k.shape[3] if vectorized else (k.shape[1] if k.dim() == 4 else 1)
    dim_v = v.shape[3] if vectorized else v.shape[-1]
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    values = e4m3_values(dtype)
    k_flat, v_flat = _flat_bytes(k), _flat_bytes(v)
    out = torch.full((total_q, q_heads, dim_v), math.nan, dtype=dtype)
    lse = torch.full((q_heads, total_q), math.nan, dtype=dtype)
    for request, kv_len in enumerate(kv_lens):
        keys = torch.empty((kv_len, kv_heads, dim), dtype=dtype)
        vals = torch.empty((kv_len, kv_heads, dim_v), dtype=dtype)
        for token in range(kv_len):
            page, slot = page_ids[request][token // page_size], token % page_size
            for head in range(kv_heads):
                keys[token, head] = values[_row(k, k_flat, True, page, slot, head).long()] * k_descale
                vals[token, head] = values[_row(v, v_flat, False, page, slot, head).long()] * v_descale
        first, last = cu_seqlens_q[request], cu_seqlens_q[request + 1]
        for row in range(first, last):
            seen = min(kv_len, row - first + 1 + kv_len - (last - first)) if causal else kv_len
            if seen <= 0:
                out[row], lse[:, row] = 0.0, -math.inf
                continue
            query = values[q[row].view(torch.uint8).long()] * q_descale
            for head in range(q_heads):
                kv_head = head // (q_heads // kv_heads)
                scores = keys[:seen, kv_head] @ query[head] * scale
                largest = scores.max()
                weights = torch.exp(scores - largest)
                total = weights.sum()
                out[row, head] = weights @ vals[:seen, kv_head] / total
                lse[head, row] = largest + torch.log(total)
    return out, lse
