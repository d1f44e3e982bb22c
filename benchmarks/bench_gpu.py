"""Paged FP8 prefill on one GPU, against the peers that are installed: `python -m benchmarks.bench_gpu [--json FILE]`.

Every implementation computes the same shapes from the same values; launches alternate, so that a clock that falls under
load falls for all. Times are medians of CUDA events; TFLOP/s count unmasked (query, key) pairs, 2 (D + Dv) operations a
pair and query head; the error is the relative L2 distance from float32 attention over a sample of rows.

Peers: torch's scaled_dot_product_attention (bf16, dense); FlashAttention-3 as packaged in ``tokenspeed-fa3`` (fp8,
dense and paged); FlashInfer and AITER (fp8, paged), where they import and take the shape. What is missing or refuses is
listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, plan

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

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda").to(E4M3)

        self.shape = shape
        self.cu = [0, *accumulate(shape.q_lens)]
        self.cu_kv = [0, *accumulate(shape.kv_lens)]
        self.q = draw(self.cu[-1], shape.heads, shape.dim)
        self.k = draw(self.cu_kv[-1], shape.kv_heads, shape.dim)
        self.v = draw(self.cu_kv[-1], shape.kv_heads, shape.dim_v)
        self.cu_q = torch.tensor(self.cu, dtype=torch.int32, device="cuda")
        self.lens = torch.tensor(shape.kv_lens, dtype=torch.int32, device="cuda")
        self.one = torch.ones(1, device="cuda")
        self.out = torch.empty(self.cu[-1], shape.heads, shape.dim_v, dtype=torch.bfloat16, device="cuda")

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
        return table.cuda(), total, torch.cat(page_of).cuda(), torch.cat(slot_of).cuda()

    def linear(self, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K, V [pages, page, Hkv, .] and the block table."""
        table, total, pages, slots = self.pages(page)
        caches = []
        for tokens in (self.k, self.v):
            cache = torch.zeros(total, page, *tokens.shape[1:], dtype=torch.uint8, device="cuda")
            cache[pages, slots] = tokens.view(torch.uint8)
            caches.append(cache.view(E4M3))
        return caches[0], caches[1], table

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
        return picked.cuda(), torch.stack(results)


def ours(values: Values, layout: str, page: int, **kwargs: Any) -> Call:
    """This package, through its public function."""
    k, v, table = values.vectorized(page) if layout == "vectorized" else values.linear(page)
    if page == 1:
        k, v = k.squeeze(1), v.squeeze(1)
    shape, one = values.shape, values.one
    arguments = (values.q, k, v, values.cu_q, max(shape.q_lens), max(shape.kv_lens))
    kwargs |= {"block_table": table, "seqlen_k": values.lens, "q_descale": one, "k_descale": one, "v_descale": one}

    def call() -> torch.Tensor:
        result = flydsl_flash_attn_paged_prefill_func(*arguments, out=values.out, **kwargs)
        assert isinstance(result, torch.Tensor)
        return result

    call.where = str(plan(*arguments, **kwargs).executor)  # type: ignore[attr-defined]
    return call


def unsplit(call: Call, values: Values) -> Call:
    """Keys of short queries in one part; only where they would be cut."""
    from aiter_paged_fp8.fallback import triton_fmha

    if sum(values.shape.q_lens) * values.shape.heads > 4096:
        raise NotImplementedError("rows alone fill the device")

    def whole() -> torch.Tensor:
        parts = triton_fmha.parts
        triton_fmha.parts = lambda *arguments: 1
        try:
            return call()
        finally:
            triton_fmha.parts = parts

    return whole


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
    import flash_attn_interface as fa3

    shape = values.shape
    group_heads, batch = shape.kv_heads, len(shape.q_lens)
    descale = torch.ones(batch, group_heads, device="cuda") if dtype is E4M3 else None
    scales = {"q_descale": descale, "k_descale": descale, "v_descale": descale}
    common = {"causal": True, "softmax_scale": shape.dim**-0.5, **scales}
    q, k, v = (x if dtype is E4M3 else x.to(dtype) for x in (values.q, values.k, values.v))
    first = lambda result: result[0] if isinstance(result, tuple) else result  # noqa: E731
    if page is None:
        cu_k = torch.tensor(values.cu_kv, dtype=torch.int32, device="cuda")
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
    """FlashInfer's paged prefill, fp8, its own choice of backend."""
    import flashinfer as package

    shape = values.shape
    k, v, table = values.linear(page)
    counts = [-(-length // page) for length in shape.kv_lens]
    indptr = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cuda")
    indices = torch.cat([table[row, :count] for row, count in enumerate(counts)])
    last = torch.tensor([(length - 1) % page + 1 for length in shape.kv_lens], dtype=torch.int32, device="cuda")
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        values.cu_q, indptr, indices, last, shape.heads, shape.kv_heads, shape.dim, page,
        head_dim_vo=shape.dim_v, causal=True, q_data_type=E4M3, kv_data_type=E4M3, o_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda: wrapper.run(values.q, (k, v))


def aiter(values: Values, page: int) -> Call:
    """AITER's mha_batch_prefill_func, fp8, vectorized pages."""
    from aiter.ops.mha import mha_batch_prefill_func

    shape, one = values.shape, values.one
    k, v, table = values.vectorized(page)
    counts = [-(-length // page) for length in shape.kv_lens]
    indptr = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cuda")
    indices = torch.cat([table[row, :count] for row, count in enumerate(counts)])
    last = torch.tensor([(length - 1) % page + 1 for length in shape.kv_lens], dtype=torch.int32, device="cuda")
    return lambda: mha_batch_prefill_func(
        values.q, k, v, values.cu_q, indptr, indices, max(shape.q_lens), max(shape.kv_lens), causal=True,
        kv_last_page_lens=last, q_descale=one, k_descale=one, v_descale=one,
    )  # fmt: skip


def contestants() -> Iterator[tuple[str, Callable[[Values], Call]]]:
    """Every column's name and how to make its call."""
    yield "ours page 64", lambda values: ours(values, "vectorized", 64)
    yield "ours page 16", lambda values: ours(values, "vectorized", 16)
    yield "ours page 1", lambda values: ours(values, "linear", 1)
    yield "ours page 64, no split", lambda values: unsplit(ours(values, "vectorized", 64), values)
    yield "FA3 fp8 page 64", lambda values: flash3(values, 64)
    yield "FA3 fp8 page 16", lambda values: flash3(values, 16)
    yield "FA3 fp8 page 1", lambda values: flash3(values, 1)
    yield "FA3 fp8 dense", lambda values: flash3(values, None)
    yield "FlashInfer fp8 page 64", lambda values: flashinfer(values, 64)
    yield "FlashInfer fp8 page 16", lambda values: flashinfer(values, 16)
    yield "AITER fp8 page 64", lambda values: aiter(values, 64)
    yield "SDPA bf16 dense", sdpa


@dataclass
class Row:
    """One line of the table."""

    shape: str
    dims: str
    name: str
    milliseconds: float = math.nan
    tflops: float = math.nan
    error: float = math.nan
    note: str = ""
    times: list[float] = field(default_factory=list)


def alternate(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each call, launches alternating until ``seconds`` are spent in each on average."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    spent, rounds = 0.0, 0
    while rounds < 5 or (spent < seconds * 1e3 * len(calls) and rounds < 200):
        for name, call in calls.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # The queue is kept busy before the first event, so that the host's own time is not measured.
            torch.cuda._sleep(2_000_000)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
            spent += times[name][-1]
        rounds += 1
    return times


def measure(shape: Shape, seconds: float, chosen: list[tuple[str, Callable[[Values], Call]]]) -> list[Row]:
    """All rows of one shape: every contestant is checked first, then they run in turn."""
    values = Values(shape)
    picked, expected = values.reference()
    dims = f"{shape.dim}/{shape.dim_v}"
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    for name, make in chosen:
        row = rows[name] = Row(shape.name, dims, name)
        try:
            call = make(values)
            values.out.fill_(math.nan)
            result = call()[picked].float()
            call()
            torch.cuda.synchronize()
            row.error = float((result - expected).norm() / expected.norm())
            row.note = getattr(call, "where", "")
            calls[name] = call
        except torch.AcceleratorError as error:
            raise RuntimeError(f"{name} broke the device at {shape}") from error
        except Exception as error:  # a peer that refuses is a line of the table, not the end of it
            row.note = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:90] if str(error) else ''}"
    for name, times in alternate(calls, seconds).items():
        row = rows[name]
        row.times = times
        row.milliseconds = sorted(times)[len(times) // 2]
        row.tflops = shape.flops() / row.milliseconds / 1e9
    return list(rows.values())


def show(rows: list[Row]) -> None:
    """Print one shape's rows; the ratio is to the fastest paged fp8 peer's rate."""
    peers = [row.tflops for row in rows if "page" in row.name and "ours" not in row.name and row.tflops > 0]
    best = max(peers, default=math.nan)
    for row in rows:
        ratio = f"{row.tflops / best:6.2f}" if row.tflops > 0 and best > 0 else "     -"
        if row.tflops > 0:
            print(
                f"{row.shape:8} {row.dims:8} {row.name:24} {row.milliseconds:9.4f} ms {row.tflops:7.1f} TFLOP/s "
                f"error {row.error:.4f} {ratio} {row.note}"
            )
        else:
            print(f"{row.shape:8} {row.dims:8} {row.name:24} not measured: {row.note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the rows there")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each contestant at each shape")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="this one only, by its place in SHAPES")
    options = parser.parse_args()
    import triton

    properties = torch.cuda.get_device_properties(0)
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"
    print(f"{properties.name}, {versions}; ratio: to the fastest paged fp8 peer of the shape")
    table = []
    for shape in SHAPES if options.shape is None else (SHAPES[options.shape],):
        rows = measure(shape, options.seconds, list(contestants()))
        show(rows)
        table += rows
    if options.json:
        with open(options.json, "w") as file:
            data = [{key: value for key, value in vars(row).items() if key != "times"} for row in table]
            json.dump({"device": properties.name, "versions": versions, "rows": data}, file, indent=1)


if __name__ == "__main__":
    main()
