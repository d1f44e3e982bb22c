"""The dense fallback on CPU against torch's scaled_dot_product_attention over the same values, already dequantised
and dense.

Ours starts from fp8 pages: gather and dequantisation are included. The peer starts from contiguous K and V in float32
or bfloat16 (made outside of the timing) and takes the fastest of: grouped or repeated heads, V padded to D or not.
Its causal mask is an additive one, made outside of the timing as well; one request at a time, since it has no ragged
form on CPU. Rounds of both sides alternate. Ratios below 1 mean that the fallback is faster.

    python -m benchmarks.bench_fallback [--rounds N] [--threads N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func

HEADS, KV_HEADS = 16, 2
SHAPES = {
    "1 x (1024, 4096)": ((1024,), (4096,)),
    "8 ragged": ((1, 512, 64, 300, 17, 128, 33, 256), (4096, 1024, 2048, 3000, 513, 129, 4000, 777)),
}
DIMS = ((128, 128), (192, 128))
PAGES = (1, 16, 64, 1024)
E4M3 = torch.float8_e4m3fn


def _ours(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], dims: tuple[int, int], page: int
) -> tuple[Callable[[], Any], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """A call over scattered pages, and the dense float32 (q, k, v) of each request in it."""
    dim, dim_v = dims
    counts = [-(-length // page) for length in kv_lens]
    pages = sum(counts)
    if page == 1:
        k, v = (torch.randn(pages, KV_HEADS, d).to(E4M3) for d in dims)
    else:
        k = torch.randn(pages, KV_HEADS, dim // 16, page, 16).to(E4M3)
        v = torch.randn(pages, KV_HEADS, page // 16, dim_v, 16).to(E4M3)
    q = torch.randn(sum(q_lens), HEADS, dim).to(E4M3)
    ids = torch.randperm(pages).int()
    cu = [0, *accumulate(q_lens)]
    dense = []
    for b, part in enumerate(ids.long().split(counts)):
        kd, vd = k[part], v[part]
        if page > 1:
            kd, vd = kd.permute(0, 3, 1, 2, 4), vd.permute(0, 2, 4, 1, 3)
        kd = kd.float().reshape(-1, KV_HEADS, dim)[: kv_lens[b]].transpose(0, 1)
        vd = vd.float().reshape(-1, KV_HEADS, dim_v)[: kv_lens[b]].transpose(0, 1)
        qd = q[cu[b] : cu[b + 1]].float().transpose(0, 1)
        dense.append((qd[None].contiguous(), kd[None].contiguous(), vd[None].contiguous()))
    one = torch.ones(1)
    args = (q, k, v, torch.tensor(cu, dtype=torch.int32), max(q_lens), max(kv_lens))
    kwargs: dict[str, Any] = {
        "kv_indptr": torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        "kv_page_indices": ids,
        "kv_last_page_lens": torch.tensor([(n - 1) % page + 1 for n in kv_lens], dtype=torch.int32),
        "q_descale": one,
        "k_descale": one,
        "v_descale": one,
        "out": torch.empty(sum(q_lens), HEADS, dim_v, dtype=torch.bfloat16),
    }
    return lambda: flydsl_flash_attn_paged_prefill_func(*args, **kwargs), dense


def _peers(dense: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> dict[str, Callable[[], Any]]:
    """Every way to hand the requests to scaled_dot_product_attention."""
    peers: dict[str, Callable[[], Any]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for grouped in (True, False):
            for padded in (False, True):
                calls = []
                for q, k, v in dense:
                    if padded and q.shape[-1] == v.shape[-1]:
                        break
                    value = F.pad(v, (0, q.shape[-1] - v.shape[-1])) if padded else v
                    rows, keys = q.shape[2], k.shape[2]
                    hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
                    mask = torch.zeros(rows, keys, dtype=dtype).masked_fill_(hidden, float("-inf"))
                    repeat = 1 if grouped else HEADS // KV_HEADS
                    kk, vv = k.repeat_interleave(repeat, 1).to(dtype), value.repeat_interleave(repeat, 1).to(dtype)
                    calls.append((q.to(dtype), kk, vv, mask, grouped))
                if calls:
                    name = f"{str(dtype)[6:]}, {'grouped' if grouped else 'repeated'} heads"
                    name += ", V padded" if padded else ""
                    peers[name] = partial(_attend_all, calls)
    return peers


def _attend_all(calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool]]) -> None:
    for q, k, v, mask, grouped in calls:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    """Print one line per shape, dims and page: milliseconds of both sides and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, best of {options.rounds} alternating rounds")
    print(f"{'requests (q, kv)':<18} {'D/Dv':<8} {'page':<5} {'ours ms':>8} {'peer ms':>8} {'ratio':>6}  fastest peer")
    for shape, (q_lens, kv_lens) in SHAPES.items():
        for dims in DIMS:
            fastest = ""
            for page in PAGES:
                ours, dense = _ours(q_lens, kv_lens, dims, page)
                peers = _peers(dense)
                if not fastest:
                    first = {name: min(_seconds(peer), _seconds(peer)) for name, peer in peers.items()}
                    fastest = min(first, key=first.__getitem__)
                best = {"ours": float("inf"), "peer": float("inf")}
                ours()
                for _ in range(options.rounds):
                    best["ours"] = min(best["ours"], _seconds(ours))
                    best["peer"] = min(best["peer"], _seconds(peers[fastest]))
                mine, other = best["ours"] * 1e3, best["peer"] * 1e3
                row = f"{shape:<18} {dims[0]}/{dims[1]:<4} {page:<5} {mine:8.1f} {other:8.1f} {mine / other:6.2f}"
                print(f"{row}  {fastest}", flush=True)


if __name__ == "__main__":
    main()
