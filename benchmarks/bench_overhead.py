"""Host overhead of a call: everything but the compute.

The dense provider is replaced by one that does nothing; what is left is validation, plan, and bookkeeping, with
outputs given. Prints microseconds per call (best of several rounds) and the part that the caller's own keyword call
of an empty function with the same signature takes.

    python -m benchmarks.bench_overhead
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from aiter_paged_fp8 import (
    flydsl_flash_attn_batch_prefill_func,
    flydsl_flash_attn_paged_prefill_func,
    use_executor,
)
from aiter_paged_fp8.fallback import providers
from aiter_paged_fp8.integrations import _dispatch

TARGET_CALL_US, TARGET_DISPATCH_US, TARGET_BACK_US = 20.0, 30.0, 30.0
ROUNDS, CALLS = 15, 4000


def _best(function: Callable[[], Any]) -> float:
    """Microseconds a call, in the best round: the machine is shared, and interference only ever adds."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return best * 1e6


def _answer(is_native: bool, index: int) -> bool:
    return is_native


def _handed_back() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A function with AITER's argument list that does nothing, and the integration's function in front of it."""

    def original(**arguments: Any) -> None:
        return None

    vars(original)["__signature__"] = inspect.signature(flydsl_flash_attn_batch_prefill_func)
    return original, _dispatch.in_front_of(original, lambda: True)


def main() -> None:
    """Print overheads against their targets."""
    torch_provider = providers.by_name("torch")
    place = providers.PROVIDERS.index(torch_provider)
    providers.PROVIDERS[place] = replace(torch_provider, run=lambda *_: None)
    fp8, i32 = torch.float8_e4m3fn, torch.int32
    q = torch.zeros(256, 16, 128).to(fp8)
    k, v = torch.zeros(64, 2, 8, 64, 16).to(fp8), torch.zeros(64, 2, 4, 128, 16).to(fp8)
    out = torch.empty(256, 16, 128, dtype=torch.bfloat16)
    cu, ids = torch.tensor([0, 128, 256], dtype=i32), torch.arange(64, dtype=i32)
    indptr, last = torch.tensor([0, 32, 64], dtype=i32), torch.tensor([64, 64], dtype=i32)
    table, lens = ids.view(2, 32), torch.tensor([2048, 2048], dtype=i32)
    one = torch.ones(1)
    call, dispatch = flydsl_flash_attn_paged_prefill_func, flydsl_flash_attn_batch_prefill_func
    rows: list[tuple[str, Callable[[], Any], float]] = [
        (
            "public function, block table",
            lambda: call(
                q, k, v, cu, 128, 2048, block_table=table, seqlen_k=lens,
                q_descale=one, k_descale=one, v_descale=one, out=out,
            ),
            TARGET_CALL_US,
        ),
        (
            "public function, CSR",
            lambda: call(
                q, k, v, cu, 128, 2048, kv_indptr=indptr, kv_page_indices=ids, kv_last_page_lens=last,
                q_descale=one, k_descale=one, v_descale=one, out=out,
            ),
            TARGET_CALL_US,
        ),
        (
            "batch dispatcher, served",
            lambda: dispatch(
                q, k, v, cu, indptr, ids, 128, 2048, causal=True, kv_last_page_lens=last,
                q_descale=one, k_descale=one, v_descale=one, out=out,
            ),
            TARGET_DISPATCH_US,
        ),
        (
            "batch dispatcher, handed back",
            lambda: dispatch(q, k, v, cu, indptr, ids, 128, 2048, logits_soft_cap=30.0, causal=True),
            TARGET_DISPATCH_US,
        ),
    ]  # fmt: skip
    original, replaced = _handed_back()
    print("host overhead, microseconds a call")
    for name, function, target in rows:
        with use_executor("torch"):
            print(f"  {name:<30} {_best(function):6.1f}   (target {target:.0f})")
    print("beyond the original, of a call that goes back to it from aiter_paged_fp8.integrations.aiter")
    batch: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "kv_indptr": indptr, "kv_page_indices": ids}
    batch |= {"max_seqlen_q": 128, "max_seqlen_k": 2048, "causal": True, "kv_last_page_lens": last}
    batch |= {"q_descale": one, "k_descale": one, "v_descale": one, "out": out}
    own = _best(partial(original, **batch))
    feature = {**batch, "logits_soft_cap": 30.0}
    for name, is_native, arguments in (
        ("another machine", False, batch),
        ("gfx950, a feature", True, feature),
        ("gfx950, a shape not native", True, batch),
    ):
        vars(_dispatch)["is_native_machine"] = partial(_answer, is_native)
        beyond = _best(partial(replaced, **arguments)) - own
        print(f"  {name:<30} {beyond:6.1f}   (target {TARGET_BACK_US:.0f})")


if __name__ == "__main__":
    main()
