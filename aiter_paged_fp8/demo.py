"""The main job on a ragged batch: every cache layout, block table and CSR, against the reference."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any

import torch

from . import flydsl_flash_attn_paged_prefill_func, plan, record, use_executor
from .kernels.fmha_gfx950 import traits
from .layouts import PACK
from .reference import paged_attention
from .runtime.executors import flydsl_missing

Q_LENS, KV_LENS = (37, 1, 0, 20, 64), (161, 300, 0, 20, 129)
HEADS, KV_HEADS, DIM = 8, 2, 128
CACHES = (("linear", 1), ("linear", 24), ("vectorized", 16), ("vectorized", 64), ("vectorized", 1024))
# What the demo accepts: bf16 rounding of the output alone is 2e-3.
MAX_ERROR, MAX_LSE_ERROR = 0.004, 1e-4
# The native kernel rounds probabilities to e4m3.
MAX_NATIVE_ERROR = 0.035
# One rounding of a product and one of a sum of float32 numbers below 16.
MAX_KERNEL_ERROR = 2.0**-19


def _caches(layout: str, page: int, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == "vectorized":
        k_shape: tuple[int, ...] = (pages, KV_HEADS, DIM // PACK, page, PACK)
        v_shape: tuple[int, ...] = (pages, KV_HEADS, page // PACK, DIM, PACK)
    elif page == 1:
        k_shape = v_shape = (pages, KV_HEADS, DIM)
    else:
        k_shape = v_shape = (pages, page, KV_HEADS, DIM)
    return torch.randn(k_shape).to(torch.float8_e4m3fn), torch.randn(v_shape).to(torch.float8_e4m3fn)


def _native_kernel(calls: list[tuple[str, Any, dict[str, Any], torch.Tensor, torch.Tensor]]) -> bool:
    """Run calls on the native kernel in the gfx950 emulator, which executes the very code that the GPU would."""
    print("\nthe native kernel, executed by the gfx950 emulator")
    if missing := flydsl_missing():
        print(f"  not run: {missing}")
        return True
    from .emulator import Options
    from .runtime import emulated

    good = True
    for name, args, kwargs, expected, expected_lse in calls:
        start = time.perf_counter()
        with emulated(Options()) as session, use_executor("emulator"), record() as recorded:
            out, lse = flydsl_flash_attn_paged_prefill_func(*args, **kwargs)
        elapsed = time.perf_counter() - start
        error, lse_error, same_blind = _errors(out, lse, expected, expected_lse)
        (result,) = session.launches
        counts = result.counts
        good &= error <= MAX_NATIVE_ERROR and lse_error <= MAX_LSE_ERROR and same_blind and not result.reports
        good &= recorded[0].plan.path == "paged"
        print(
            f"  {name:<12} rel. L2 error {error:.2e}, max LSE error {lse_error:.2e}, {len(result.reports)} races, "
            f"missing waits or undefined values; {elapsed:.1f} s"
        )
        print(
            f"               {counts.workgroups} workgroups of {counts.waves // counts.workgroups} waves executed "
            f"{counts.instructions} wave-instructions: {', '.join(f'{k} {n}' for k, n in counts.by_class.items())}"
        )
        print(
            f"               LDS bank conflict cycles {counts.lds_conflict_cycles}; bytes: "
            f"{', '.join(f'{path} {count}' for path, count in counts.bytes.items())}"
        )
    return good


def _errors(
    out: torch.Tensor, lse: torch.Tensor, expected: torch.Tensor, expected_lse: torch.Tensor
) -> tuple[float, float, bool]:
    """Relative L2 error, largest LSE error, and whether the same rows see no key."""
    seen = expected_lse.isfinite()
    error = float((out.double() - expected).norm() / expected.norm())
    return error, float((lse.double() - expected_lse)[seen].abs().max()), torch.equal(lse.isfinite(), seen)


def _emulated_kernel() -> bool:
    """Run one FlyDSL kernel in the gfx950 emulator; without FlyDSL, say so."""
    print("\na FlyDSL kernel in the gfx950 emulator")
    if missing := flydsl_missing():
        print(f"  not run: {missing}")
        return True
    from .inspection import run_example

    result, error = run_example()
    counts = result.counts
    print(
        f"  {counts.kernel}: {counts.waves} waves executed {counts.instructions} wave-instructions, error {error:.1e}"
    )
    print(f"  counted: {', '.join(f'{kind} {count}' for kind, count in counts.by_class.items())}")
    print(f"  bytes: {', '.join(f'{path} {count}' for path, count in counts.bytes.items())}")
    print(f"  races, missing waits, undefined values: {len(result.reports)}")
    return error <= MAX_KERNEL_ERROR and not result.reports


def demo(seed: int = 0) -> int:
    """Attend one ragged batch over every layout, print plan, error and time; returns 0 if every error is within its
    bound."""
    torch.manual_seed(seed)
    cu = [0, *accumulate(Q_LENS)]
    q = torch.randn(cu[-1], HEADS, DIM).to(torch.float8_e4m3fn)
    scales: dict[str, Any] = {"q_descale": 0.5, "k_descale": 0.25, "v_descale": 2.0}
    print(f"{len(Q_LENS)} requests, query lengths {Q_LENS}, KV lengths {KV_LENS}")
    print(f"{HEADS} heads over {KV_HEADS} KV heads, D = Dv = {DIM}")
    print(f"seed {seed}; errors against float64 attention over the same fp8 values\n")
    print("cache            table        path   executor  rel. L2 error  max LSE error   time")
    reason, good = "", True
    native: list[tuple[str, Any, dict[str, Any], torch.Tensor, torch.Tensor]] = []
    for layout, page in CACHES:
        counts = [-(-length // page) for length in KV_LENS]
        pages = sum(counts) + 2
        k, v = _caches(layout, page, pages)
        ids = torch.randperm(pages)[: sum(counts)].int()
        rows = [row.tolist() for row in ids.split(counts)]
        expected, expected_lse = paged_attention(q, k, v, cu, rows, list(KV_LENS), **scales)
        block_table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for row, row_ids in enumerate(rows):
            block_table[row, : len(row_ids)] = torch.tensor(row_ids, dtype=torch.int32)
        tables: dict[str, dict[str, Any]] = {
            "block table": {"block_table": block_table, "seqlen_k": torch.tensor(KV_LENS, dtype=torch.int32)},
            "CSR": {
                "kv_indptr": torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
                "kv_page_indices": ids,
                "kv_last_page_lens": torch.tensor([(length - 1) % page + 1 for length in KV_LENS], dtype=torch.int32),
            },
        }
        for name, table in tables.items():
            args: Any = (q, k, v, torch.tensor(cu, dtype=torch.int32), max(Q_LENS), max(KV_LENS))
            kwargs: dict[str, Any] = {
                **table,
                **{key: torch.tensor([value]) for key, value in scales.items()},
                "return_lse": True,
            }
            chosen = plan(*args, **kwargs)
            start = time.perf_counter()
            out, lse = flydsl_flash_attn_paged_prefill_func(*args, **kwargs)
            elapsed = time.perf_counter() - start
            error, lse_error, same_blind = _errors(out, lse, expected, expected_lse)
            if (layout, page, DIM, DIM) in traits.BUILT:
                native.append((name, args, kwargs, expected, expected_lse))
            good &= error <= MAX_ERROR and lse_error <= MAX_LSE_ERROR and same_blind
            print(
                f"{layout:>10} {page:<5} {name:<12} {chosen.path:<6} {chosen.executor:<9} "
                f"{error:13.2e} {lse_error:14.2e} {elapsed * 1e3:6.1f} ms"
            )
            reason = f"{chosen.code}: {chosen.reason}"
    print(f"\nwhy this path: {reason}")
    good &= _native_kernel(native)
    good &= _emulated_kernel()
    print(
        "all within bounds"
        if good
        else f"OUT OF BOUNDS: at most {MAX_ERROR} ({MAX_NATIVE_ERROR} native) and {MAX_LSE_ERROR} are accepted"
    )
    return 0 if good else 1
