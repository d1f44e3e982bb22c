"""The Triton provider: in Triton's interpreter on CPU with small tiles, as compiled where there is a GPU.

Tests marked ``gpu`` are collected on a GPU only. Triton is a dependency of these tests: where it is absent they fail.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton  # noqa: F401

from aiter_paged_fp8 import (
    flydsl_flash_attn_paged_prefill_func,
    flydsl_flash_attn_paged_prefill_preload,
    plan,
    record,
    use_executor,
)
from aiter_paged_fp8.fallback import triton_fmha
from op_tests import cases
from op_tests.cases import E4M3, NAN_BYTE, Built, Case, build, compare, fresh_seed, run, submit, token

ON_GPU = torch.cuda.is_available()
SMALL = triton_fmha.Tiles(16, 32, 4, 2)
LAYOUTS = [("slots", 1), ("linear", 5), ("linear", 16), ("vectorized", 16), ("vectorized", 48), ("vectorized", 64)]
DIMS = [(128, 128), (192, 128), (192, 192), (64, 64), (256, 256), (80, 144)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for each operation: small tiles show every edge at small lengths."""
    if not ON_GPU:
        monkeypatch.setattr(triton_fmha, "tiles", lambda *arguments: SMALL)


def small(case: Case) -> Case:
    return case if ON_GPU else replace(case, heads=2, kv_heads=1)


@pytest.mark.parametrize(("table", "causal"), [("block", True), ("csr", True), ("csr_last", False)])
@pytest.mark.parametrize(("layout", "page"), LAYOUTS)
def test_layouts_and_tables(layout: str, page: int, table: str, causal: bool) -> None:
    # A tail of NaN in every page, pages of one pool in two caches, rows that belong to nobody, an empty request; keys
    # that all rows of a tile see, in a whole tile and beside one, and rows of two tiles.
    case = Case(
        [5, 0, 9], [41, 33, 30], dim=64, dim_v=32, layout=layout, page=page, table=table, interleaved=True,
        causal=causal, cu_start=2, descales=(0.5, -1.5, 2.0), seed=fresh_seed(),
    )  # fmt: skip
    built = build(small(case))
    compare(built, *run(built, "triton"), "triton")


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    built = build(small(Case([5, 18], [70, 18], dim=dims[0], dim_v=dims[1], seed=fresh_seed())))
    compare(built, *run(built, "triton"), "triton")


@pytest.mark.parametrize("parts", [2, 5])
def test_keys_in_parts_and_their_merge(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # With 5 parts some have no key; the last request has none at all, and the one before more rows than keys.
    monkeypatch.setattr(triton_fmha, "parts", lambda *arguments: parts)
    built = build(small(Case([5, 0, 3, 2], [100, 7, 2, 0], dim=64, dim_v=80, cu_start=1, seed=fresh_seed())))
    (out, lse), calls = submit(built, "triton")
    compare(built, out, lse, "triton")
    assert [launch.kernel for launch in calls[0].launches] == ["triton_attend", "triton_combine"]


@pytest.mark.skipif(ON_GPU, reason="there the other kernel is there, and its rows are compared as well")
def test_tiles_whose_rows_all_see_many_keys_are_left_to_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, many, programs = triton_fmha._launches, 64, 3

    def short_only(*arguments: Any) -> Any:
        for launch in whole(*arguments):
            grid = programs * launch.values["batch"] * launch.constants["HKV"]
            yield launch._replace(
                grid=(grid,),
                values=launch.values | {"per_request": programs},
                constants=launch.constants | {"LONG": many, "BN": 32},
            )

    monkeypatch.setattr(triton_fmha, "_launches", short_only)
    # More rows than keys; some tiles left; a tile on the edge; nothing but short rows, and no key.
    q_lens, kv_lens = [80, 40, 9, 20, 3], [70, 90, 72, 20, 0]
    case = Case(q_lens, kv_lens, dim=64, dim_v=32, page=16, heads=2, kv_heads=1, seed=fresh_seed())
    built = build(case)
    out, lse = run(built, "triton")
    expected, expected_lse = built.reference()
    tokens = SMALL.rows // 2
    left = torch.zeros(len(out), dtype=torch.bool)
    for start, q_len, kv_len in zip(built.cu, q_lens, kv_lens, strict=False):
        for first in range(0, q_len, tokens):
            left[start + first : start + min(first + tokens, q_len)] = min(kv_len, first + kv_len - q_len + 1) >= many
    assert 0 < int(left.sum()) < len(out)
    cases.compare_out(out[~left], expected[~left], "triton")
    cases.compare_lse(lse[:, ~left], expected_lse[:, ~left], "triton")
    assert bool((out[left].view(torch.uint8) == 0xA5).all())


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize(("layout", "page"), [("slots", 1), ("vectorized", 16)])
def test_a_nan_reaches_the_rows_that_see_it_and_no_other(layout: str, page: int, which: str) -> None:
    built = build(small(Case([20, 3], [60, 40], dim=64, dim_v=32, layout=layout, page=page, seed=fresh_seed())))
    # On the diagonal, the last row's own key, and one that all rows of the second request see.
    for request, index in [(0, 47), (0, 59), (1, 31)]:
        row = token(built, which, request, index)[0]
        (row[0] if row.dim() == 2 else row)[9] = NAN_BYTE
    expected, expected_lse = built.reference()
    assert 0 < int(expected.isnan().sum()) < expected.numel()
    out, lse = run(built, "triton")
    cases.compare_out(out, expected, "triton")
    cases.compare_lse(lse, expected_lse, "triton")


def test_more_queries_than_keys() -> None:
    built = build(small(Case([30], [13], dim=64, dim_v=32, seed=fresh_seed())))
    out, lse = run(built, "triton")
    compare(built, out, lse, "triton")
    assert bool((out[:17] == 0).all())
    assert bool((lse[:, :17] == -math.inf).all())


def test_the_diagonal_knows_the_float64_scale() -> None:
    ordinary = small(
        Case((3,), (9,), dim=64, dim_v=32, descales=(1.0, 1.0, 1.0), softmax_scale=1e-2, seed=fresh_seed())
    )
    extreme = replace(ordinary, descales=(1e-20, 1e-20, 1.0), softmax_scale=1e38)
    (out, lse), (same_out, same_lse) = run(build(ordinary), "triton"), run(build(extreme), "triton")
    assert torch.allclose(out.float(), same_out.float(), rtol=2**-7, atol=1e-5)
    assert torch.allclose(lse, same_lse, rtol=1e-5, atol=1e-5)


def test_plan_and_reasons() -> None:
    built = build(small(Case([2], [20], seed=1)))
    args = [value.cuda() if ON_GPU and isinstance(value, torch.Tensor) else value for value in built.args]
    kwargs = {
        name: value.cuda() if ON_GPU and isinstance(value, torch.Tensor) else value
        for name, value in built.kwargs.items()
    }
    chosen = plan(*args, **kwargs)
    assert (chosen.path, chosen.executor) == ("dense", "triton" if ON_GPU else "torch")
    with use_executor("triton"):
        assert plan(*args, **kwargs).executor == "triton"


def test_why_triton_is_passed_over_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(Case([2], [20], seed=1))
    args = [cases.as_meta(value) for value in built.args]
    kwargs = {name: cases.as_meta(value) for name, value in built.kwargs.items()}
    monkeypatch.setattr(triton_fmha, "missing", lambda: "Triton is not installed (pip install triton)")
    from aiter_paged_fp8 import planner

    planner._decide.cache_clear()
    try:
        chosen = plan(*args, arch="sm_90", **kwargs)
        assert chosen.executor == "torch"
        assert "triton: Triton is not installed" in chosen.reason
        assert "Triton" not in plan(*args, arch="gfx942", **kwargs).reason
        with use_executor("triton"):
            chosen = plan(*args, arch="sm_90", **kwargs)
        assert not chosen
        assert "Triton is not installed" in chosen.reason
    finally:
        planner._decide.cache_clear()


def gpu_call(built: Built) -> tuple[list[Any], dict[str, Any]]:
    def there(value: Any) -> Any:
        return value.cuda() if isinstance(value, torch.Tensor) else value

    return [there(value) for value in built.args], {name: there(value) for name, value in built.kwargs.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "page"), [("slots", 1), ("vectorized", 16), ("vectorized", 64)])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
def test_long_requests(layout: str, page: int, dims: tuple[int, int]) -> None:
    # Long enough for the kernel of whole tiles, and for parts of keys where rows are few.
    for q_lens in ([300, 70, 1], [9, 1, 2]):
        case = Case(q_lens, [700, 1300, 515], dim=dims[0], dim_v=dims[1], layout=layout, page=page, seed=fresh_seed())
        built = build(case)
        compare(built, *run(built, "triton"), "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 3000], ids=["parts", "whole"])
def test_graph_replay_follows_lengths_and_tables(rows: int) -> None:
    built = build(Case([rows, 7], [4096, 300], heads=8, kv_heads=1, spare_pages=70, seed=fresh_seed()))
    args, kwargs = gpu_call(built)
    out = torch.empty(built.out.shape, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(built.lse.shape, dtype=torch.float32, device="cuda")

    def call() -> None:
        flydsl_flash_attn_paged_prefill_func(*args, **kwargs, out=out, lse=lse, return_lse=True)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    for lens in ([4096, 300], [4001, 1], [rows + 100, 64]):
        kwargs["seqlen_k"].copy_(torch.tensor(lens, dtype=torch.int32))
        kwargs["block_table"].copy_(kwargs["block_table"].flip(1) % kwargs["block_table"].max().clamp(max=60))
        args[0].copy_((args[0].float() * 0.75).to(E4M3))
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        with use_executor("torch"):
            expected, expected_lse = flydsl_flash_attn_paged_prefill_func(*args, **kwargs, return_lse=True)
        cases.compare_out(out.cpu(), expected.cpu().double(), "triton")
        cases.compare_lse(lse.cpu(), expected_lse.cpu().double(), "triton")


@pytest.mark.gpu
def test_nothing_compiles_as_lengths_change_or_under_capture() -> None:
    built = build(Case([40, 7], [300, 200], heads=8, kv_heads=1, seed=fresh_seed()))
    args, kwargs = gpu_call(built)
    flydsl_flash_attn_paged_prefill_preload(*args, **kwargs)
    compiled = 0
    for lens, most in (([300, 200], 300), ([1, 16], 17), ([64, 250], 251), ([128, 112], 128)):
        kwargs["seqlen_k"].copy_(torch.tensor(lens, dtype=torch.int32))
        with record() as calls:
            flydsl_flash_attn_paged_prefill_func(*args[:5], most, **kwargs)
        compiled += sum(launch.compiled for launch in calls[0].launches)
    # The first call with one part of keys has a kernel of its own, as preload's has with several.
    assert compiled <= 2
    with record() as calls:
        flydsl_flash_attn_paged_prefill_func(*args[:5], 290, **kwargs)
    assert not any(launch.compiled for launch in calls[0].launches)
    triton_fmha._ready.clear()
    with pytest.raises(RuntimeError, match="not compiled yet"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flydsl_flash_attn_paged_prefill_func(*args[:5], 290, **kwargs)
