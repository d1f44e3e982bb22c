"""What `python -m benchmarks.bench_gpu` measures against: shapes, their values, a call for each peer.

torch's scaled_dot_product_attention (bf16, dense); FlashAttention-3 as packaged in ``tokenspeed-fa3`` (fp8, dense and
paged); FlashInfer's FA3-style prefill and its fmha_v2, vLLM's Triton unified attention as its backend calls it, and
AITER's (fp8, paged). A peer is imported where its call is made; what is missing or refuses raises, and the driver lists
it with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate

import torch

E4M3 = torch.float8_e4m3fn
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """One row group of the table: requests (q_lens, kv_lens) at head counts and dims."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int = 16
    kv_heads: int = 1
    dim: int = 128
    dim_v: int = 128

    def flops(self) -> float:
        """2 (D + Dv) for each unmasked pair and query head (causal, diagonal at the bottom right)."""
        pairs = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            ahead = kv_len - q_len
            # Sum over rows of min(kv_len, row + 1 + ahead), where that is positive.
            first = max(0, -ahead)
            pairs += (q_len - first) * (ahead + 1 + first + kv_len) // 2
        return 2.0 * pairs * self.heads * (self.dim + self.dim_v)


RAGGED_Q = (1024, 513, 300, 65, 17, 2048, 777, 1)
RAGGED_KV = tuple(q + more for q, more in zip(RAGGED_Q, (4096, 0, 513, 2000, 64, 8192, 100, 3000), strict=True))
SHAPES = (
    Shape("4K/8K", (4096,), (8192,)),
    Shape("16K/32K", (16384,), (32768,)),
    Shape("32K/64K", (32768,), (65536,)),
    Shape("4K/8K", (4096,), (8192,), dim=192),
    Shape("16K/32K", (16384,), (32768,), dim=192),
    Shape("16K/32K", (16384,), (32768,), dim=192, dim_v=192),
    Shape("ragged", RAGGED_Q, RAGGED_KV, kv_heads=2),
    Shape("70/16K", (70,), (16384,), heads=12, dim=192),
)


class Values:
    """Tokens of all requests, drawn once per shape: q [total_q, Hq, D], k and v [total_kv, Hkv, .], all e4m3."""

    def __init__(self, shape: Shape, seed: int = 0, device: str = "cuda") -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device).to(E4M3)

        self.shape, self.device = shape, device
        self.cu = [0, *accumulate(shape.q_lens)]
        self.cu_kv = [0, *accumulate(shape.kv_lens)]
        self.q = draw(self.cu[-1], shape.heads, shape.dim)
        self.k = draw(self.cu_kv[-1], shape.kv_heads, shape.dim)
        self.v = draw(self.cu_kv[-1], shape.kv_heads, shape.dim_v)
        self.cu_q = torch.tensor(self.cu, dtype=torch.int32, device=self.device)
        self.lens = torch.tensor(shape.kv_lens, dtype=torch.int32, device=self.device)
        self.one = torch.ones(1, device=self.device)
        self.out = torch.empty(self.cu[-1], shape.heads, shape.dim_v, dtype=torch.bfloat16, device=self.device)
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def pages(self, page: int) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
        """Block table [B, columns] of scattered pages, their count, and each token's page and slot."""
        counts = [-(-length // page) for length in self.shape.kv_lens]
        total = sum(counts)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        page_of, slot_of, at = [], [], 0
        for row, (count, length) in enumerate(zip(counts, self.shape.kv_lens, strict=True)):
            table[row, :count] = order[at : at + count]
            token = torch.arange(length)
            page_of.append(table[row, token // page].long())
            slot_of.append(token % page)
            at += count
        return table.to(self.device), total, torch.cat(page_of).to(self.device), torch.cat(slot_of).to(self.device)

    def linear(self, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K, V [pages, page, Hkv, .] and the block table, made once: no contestant writes to them."""
        if page in self.made:
            return self.made[page]
        table, total, pages, slots = self.pages(page)
        caches = []
        for tokens in (self.k, self.v):
            cache = torch.zeros(total, page, *tokens.shape[1:], dtype=torch.uint8, device=self.device)
            cache[pages, slots] = tokens.view(torch.uint8)
            caches.append(cache.view(E4M3))
        self.made[page] = caches[0], caches[1], table
        return self.made[page]

    def packed(self, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K and V as views of one tensor [pages, page, Hkv, D + Dv], and the block table."""
        k, v, table = self.linear(page)
        both = torch.cat([k.view(torch.uint8), v.view(torch.uint8)], -1).view(E4M3)
        return both[..., : self.shape.dim], both[..., self.shape.dim :], table

    def csr(self, page: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The block table as bounds and page numbers, and the tokens in each request's last page."""
        counts = [-(-length // page) for length in self.shape.kv_lens]
        indptr = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=self.device)
        indices = torch.cat([table[row, :count] for row, count in enumerate(counts)])
        last = torch.tensor(
            [(length - 1) % page + 1 for length in self.shape.kv_lens], dtype=torch.int32, device=self.device
        )
        return indptr, indices, last

    def vectorized(self, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K [pages, Hkv, D/16, page, 16], V [pages, Hkv, page/16, Dv, 16] and the block table."""
        k, v, table = self.linear(page)
        total, _, heads, dim = k.shape
        packed_k = k.view(torch.uint8).view(total, page, heads, dim // 16, 16).permute(0, 2, 3, 1, 4).contiguous()
        dim_v = v.shape[-1]
        packed_v = v.view(torch.uint8).view(total, page // 16, 16, heads, dim_v).permute(0, 3, 1, 4, 2).contiguous()
        return packed_k.view(E4M3), packed_v.view(E4M3), table

    def reference(self, rows: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of a sample of rows, and attention there in float32."""
        total = self.cu[-1]
        picked = torch.randperm(total, generator=torch.Generator().manual_seed(2))[:rows].sort().values
        group, scale = self.shape.heads // self.shape.kv_heads, self.shape.dim**-0.5
        results = []
        for row in picked.tolist():
            request = next(b for b in range(len(self.shape.q_lens)) if row < self.cu[b + 1])
            q_len, kv_len = self.shape.q_lens[request], self.shape.kv_lens[request]
            seen = row - self.cu[request] + 1 + kv_len - q_len
            part = slice(self.cu_kv[request], self.cu_kv[request] + seen)
            q = self.q[row].float().view(self.shape.kv_heads, group, -1)
            k, v = self.k[part].float().transpose(0, 1), self.v[part].float().transpose(0, 1)
            results.append((torch.softmax(q @ k.transpose(1, 2) * scale, -1) @ v).reshape(self.shape.heads, -1))
        return picked.to(self.device), torch.stack(results)


def noted(call: Call, note: str) -> Call:
    """The call with what its row says beside it."""
    call.where = note  # type: ignore[attr-defined]
    return call


def sdpa(values: Values) -> Call:
    """torch's scaled_dot_product_attention in bf16, dense; one request, equal head dims or not."""
    shape = values.shape
    if len(shape.q_lens) != 1:
        raise NotImplementedError("one request a call")
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = (x.to(torch.bfloat16).transpose(0, 1)[None].contiguous() for x in (values.q, values.k, values.v))
    bias = causal_lower_right(shape.q_lens[0], shape.kv_lens[0])
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, attn_mask=bias, enable_gqa=True)[0].transpose(0, 1)


def flash3(values: Values, page: int | None, dtype: torch.dtype = E4M3) -> Call:
    """FlashAttention-3: dense (page None) or paged."""
    fa3 = import_module("flash_attn_interface")

    shape = values.shape
    group_heads, batch = shape.kv_heads, len(shape.q_lens)
    descale = torch.ones(batch, group_heads, device=values.device) if dtype is E4M3 else None
    scales = {"q_descale": descale, "k_descale": descale, "v_descale": descale}
    common = {"causal": True, "softmax_scale": shape.dim**-0.5, **scales}
    q, k, v = (x if dtype is E4M3 else x.to(dtype) for x in (values.q, values.k, values.v))
    first = lambda result: result[0] if isinstance(result, tuple) else result  # noqa: E731
    if page is None:
        cu_k = torch.tensor(values.cu_kv, dtype=torch.int32, device=values.device)
        bounds = (max(shape.q_lens), max(shape.kv_lens))
        return lambda: first(fa3.flash_attn_varlen_func(q, k, v, values.cu_q, cu_k, *bounds, **common))
    k_pages, v_pages, table = values.linear(page)
    if dtype is not E4M3:
        k_pages, v_pages = k_pages.to(dtype), v_pages.to(dtype)
    return lambda: first(
        fa3.flash_attn_with_kvcache(
            q,
            k_pages,
            v_pages,
            page_table=table,
            cache_seqlens=values.lens,
            cu_seqlens_q=values.cu_q,
            max_seqlen_q=max(shape.q_lens),
            **common,
        )
    )


def flashinfer(values: Values, page: int) -> Call:
    """FlashInfer's FA3-style paged prefill, fp8; its scales are one for each head."""
    package = import_module("flashinfer")

    shape = values.shape
    if shape.dim != shape.dim_v or shape.dim not in (64, 128, 256):
        raise NotImplementedError("in fp8 equal head dims of 64, 128 or 256")
    k, v, table = values.linear(page)
    indptr, indices, last = values.csr(page, table)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=values.device)
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
    wrapper.plan(
        values.cu_q, indptr, indices, last, shape.heads, shape.kv_heads, shape.dim, page,
        head_dim_vo=shape.dim_v, causal=True, q_data_type=E4M3, kv_data_type=E4M3, o_data_type=torch.bfloat16,
    )  # fmt: skip
    scales = [torch.ones(heads, device=values.device) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    return noted(lambda: wrapper.run(values.q, (k, v), *scales), f"flashinfer {package.__version__}")


def fmha_v2(values: Values, page: int) -> Call:
    """FlashInfer's fmha_v2 (from TensorRT-LLM), fp8: K and V of a page lie side by side."""
    package = import_module("flashinfer")

    shape = values.shape
    if shape.dim != shape.dim_v:
        raise NotImplementedError("one head dim for K and V in a pool of pages")
    k, v, table = values.linear(page)
    pool = torch.stack([k.view(torch.uint8), v.view(torch.uint8)], 1).view(E4M3)
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=values.device)
    cu_kv = torch.tensor(values.cu_kv, dtype=torch.int32, device=values.device)
    call = package.trtllm_fmha_v2_prefill
    return noted(
        lambda: call(
            (values.q, pool), "Q_PAGED_KV_NHD", workspace, values.lens, max(shape.q_lens), max(shape.kv_lens),
            bmm1_scale=shape.dim**-0.5, bmm2_scale=1.0, batch_size=len(shape.q_lens), cum_seq_lens_q=values.cu_q,
            cum_seq_lens_kv=cu_kv, block_tables=table, out=values.out, mask_mode="causal",
        ),
        f"flashinfer {package.__version__}",
    )  # fmt: skip


def vllm(values: Values, page: int) -> Call:
    """vLLM's Triton unified attention as its backend calls it for an fp8 cache: q in fp8 too, one scale a tensor.

    Unequal head dims go to the kernel that vLLM has for them. Buffers for its split of keys are left out: it splits for
    at most 8 queries a request.
    """
    shape, one = values.shape, values.one
    if page % 16:
        raise NotImplementedError("vLLM's pages hold a multiple of 16 tokens")
    version = getattr(import_module("vllm"), "__version__", "")
    k, v, table = values.packed(page)
    scales = {"q_descale": one, "k_descale": one, "v_descale": one}
    common = {
        "q": values.q, "k": k, "v": v, "out": values.out, "seqused_k": values.lens, "block_table": table,
        "cu_seqlens_q": values.cu_q, "max_seqlen_q": max(shape.q_lens), "causal": True, "window_size": (-1, -1),
        "softmax_scale": shape.dim**-0.5, "softcap": 0,
    }  # fmt: skip
    if shape.dim == shape.dim_v:
        unified = import_module("vllm.v1.attention.ops.triton_unified_attention")
        modes = import_module("vllm.v1.kv_cache_interface").KVQuantMode
        tensors = len(shape.q_lens), shape.kv_heads
        common |= {"max_seqlen_k": max(shape.kv_lens), "kv_quant_mode": modes.FP8_PER_TENSOR}
        scales |= {"k_descale": one.expand(tensors), "v_descale": one.expand(tensors)}
        attend = unified.unified_attention
    else:
        attend = import_module("vllm.v1.attention.ops.triton_unified_attention_diffkv").unified_attention_diffkv

    def call() -> torch.Tensor:
        attend(**common, **scales)
        return values.out

    return noted(call, f"vLLM {version}, q in fp8")


def aiter(values: Values, page: int) -> Call:
    """AITER's mha_batch_prefill_func, fp8, vectorized pages."""
    attend = import_module("aiter.ops.mha").mha_batch_prefill_func

    shape, one = values.shape, values.one
    k, v, table = values.vectorized(page)
    indptr, indices, last = values.csr(page, table)
    return lambda: attend(
        values.q, k, v, values.cu_q, indptr, indices, max(shape.q_lens), max(shape.kv_lens), causal=True,
        kv_last_page_lens=last, q_descale=one, k_descale=one, v_descale=one,
    )  # fmt: skip
