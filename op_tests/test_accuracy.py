"""How close results come to a float64 reference, and that a NaN reaches exactly what may see it.

Lengths are drawn so that each case has a tile edge, a page edge and an empty request. The fallback is also run with
small tiles, where edges are cheap to meet, and its float32 result is compared before rounding.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from aiter_paged_fp8.fallback.dense import CPU, Tiling, attend
from aiter_paged_fp8.request import describe
from op_tests import cases
from op_tests.cases import E4M3, NAN_BYTE, Built, Case, build, check, fresh_seed, on_served, run, token

#: Tiles of 32 keys and 8 rows, blocks of a few tokens; 48 keys, which no page of 64 divides; one row at a time.
SMALL = {
    "32x8": Tiling(keys=32, rows=8, scores=256, state=8192),
    "48x12": Tiling(keys=48, rows=12, scores=2 * 12 * 48, state=3 * 48 * 128),
    "16x1": Tiling(keys=16, rows=1, scores=16, state=1),
}
LAYOUT_PAGES = [
    ("slots", 1),
    ("linear", 1),
    ("linear", 5),
    ("linear", 16),
    ("linear", 64),
    ("vectorized", 16),
    ("vectorized", 48),
    ("vectorized", 64),
    ("vectorized", 128),
    ("vectorized", 1024),
]
HEADS = [(4, 2), (6, 3), (3, 3), (8, 1), (5, 1), (2, 1)]


def attend_float32(built: Built, tiling: Tiling | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The fallback's result before it is rounded to bf16, and its LSE."""
    request = describe(*built.args, **built.kwargs)
    out = torch.full(built.out.shape, math.nan, dtype=torch.float32)
    lse = torch.full(built.lse.shape, math.nan, dtype=torch.float32)
    attend(request, out, lse, tiling)
    return out, lse


def assert_float32(out: torch.Tensor, lse: torch.Tensor, expected: torch.Tensor, expected_lse: torch.Tensor) -> None:
    """Relative L2 1e-5, rows without a key exactly, LSE within its gate, rows that belong to nobody unwritten (NaN)."""
    assert torch.equal(out.isnan(), expected.isnan())
    out, expected = out.double().nan_to_num(0.0), expected.nan_to_num(0.0)
    assert float((out - expected).norm()) <= 1e-5 * float(expected.norm())
    assert torch.equal(out == 0, expected == 0)
    cases.compare_lse(lse, expected_lse, "torch")


def edge(rng: random.Random, step: int, most: int) -> int:
    """A length at an edge of ``step``, or one off."""
    return max(1, step * rng.randint(1, max(1, most // step)) + rng.choice([-1, 0, 1]))


def drawn_lengths(rng: random.Random, tile: int, page: int) -> list[int]:
    """A length at a tile edge, one at a page edge, and an empty one, in any order."""
    lens = [edge(rng, tile, 5 * tile), edge(rng, page, max(2 * page, 80)), 0]
    rng.shuffle(lens)
    return lens


def drawn(rng: random.Random, tile: int, layout: str, page: int, native: bool = False) -> Case:
    """A case with everything that is not given drawn: lengths, table, heads, dims, descales, strides.

    ``native``: with the dims that a native kernel exists for, and causal.
    """
    kv_lens = drawn_lengths(rng, tile, page)
    # Few dims keep the reference quick; every multiple of 16 has its turn in test_every_head_dim.
    dim, dim_v = (
        (128, 128) if native else rng.choice([(16, 16), (128, 128), (192, 128), (32, 96), (112, 64), (256, 16)])
    )
    heads, kv_heads = rng.choice(HEADS)
    return Case(
        [rng.choice((1, 2, 7, 8, 9, 17)) for _ in kv_lens],
        kv_lens,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dim_v=dim_v,
        layout=layout,
        page=page,
        table=rng.choice(["block", "csr", "csr_last"]),
        causal=native or rng.random() < 0.75,
        descales=(rng.uniform(0.25, 1), rng.uniform(0.5, 1), rng.uniform(0.1, 4)),
        softmax_scale=rng.choice([None, rng.uniform(0.02, 0.2)]),
        interleaved=rng.random() < 0.5,
        cu_start=rng.choice([0, 3]),
        seed=rng.getrandbits(31),
    )


@pytest.mark.parametrize("tiling", SMALL)
@pytest.mark.parametrize(("layout", "page"), LAYOUT_PAGES)
def test_float32_of_the_fallback_at_small_tiles(layout: str, page: int, tiling: str) -> None:
    rng = random.Random(fresh_seed())
    built = build(drawn(rng, SMALL[tiling].keys, layout, page if page <= 128 else 64))
    assert_float32(*attend_float32(built, SMALL[tiling]), *built.reference())


@pytest.mark.parametrize("tile", [64, 128])
@on_served("layout,page", LAYOUT_PAGES)
def test_drawn_cases(executor: str, layout: str, page: int, tile: int) -> None:
    rng = random.Random(fresh_seed())
    if executor == "torch" and page > 128:
        page = rng.choice([1024, 512])
    assert check(build(drawn(rng, tile, layout, page, native=executor != "torch")), executor) is not None


def test_drawn_lengths_hold_every_edge() -> None:
    # The drawing itself: over a few draws each kind of edge occurs from both sides and exactly, and an empty request
    # each time.
    rng = random.Random(fresh_seed())
    seen = set()
    for _ in range(200):
        lens = drawn_lengths(rng, tile=48, page=64)
        assert 0 in lens
        for step in (48, 64):
            seen |= {(step, (length + 1) % step) for length in lens if length and (length + 1) % step < 3}
    assert seen == {(step, place) for step in (48, 64) for place in (0, 1, 2)}


#: Every multiple of 16 up to 256 once as D and once as Dv, unequal but for one, with layouts in turn.
EVERY_DIM = [
    (*[("slots", 1), ("vectorized", 16), ("linear", 16), ("vectorized", 64)][step % 4], dims)
    for step, dims in enumerate((16 * (step + 1), 16 * ((7 * step + 3) % 16 + 1)) for step in range(16))
]


@on_served("layout,page,dims", EVERY_DIM)
def test_every_head_dim(executor: str, layout: str, page: int, dims: tuple[int, int]) -> None:
    rng = random.Random(fresh_seed())
    dim, dim_v = dims
    case = Case(
        [5, 2], [70, rng.randint(1, 40)], dim=dim, dim_v=dim_v, layout=layout, page=page, seed=rng.getrandbits(31)
    )
    check(build(case), executor)


@pytest.mark.parametrize("heads", [(1, 1), (16, 2), (128, 1), (7, 7), (12, 4)], ids=str)
def test_head_counts(executor: str, heads: tuple[int, int]) -> None:
    seed = fresh_seed()
    check(build(Case([9, 4], [70, 33], heads=heads[0], kv_heads=heads[1], seed=seed)), executor)


@on_served(
    "layout,page,causal",
    [
        (*where, causal)
        for where in [("slots", 1), ("linear", 64), ("vectorized", 16), ("vectorized", 64), ("vectorized", 1024)]
        for causal in (True, False)
    ],
)
def test_real_tile_size(executor: str, layout: str, page: int, causal: bool) -> None:
    # Keys and rows before, at and after the edges of the fallback's own tiles, which are long where rows are few.
    rng = random.Random(fresh_seed())
    group = 4
    edges = [multiple * CPU.keys + off for multiple in (1, 2, 3) for off in (-1, 0, 1)]
    long_edges = [CPU.most_keys - 1, CPU.most_keys, CPU.most_keys + 1]
    rows = [CPU.rows // group - 1, CPU.rows // group, CPU.rows // group + 1]
    case = Case(
        [rng.choice(rows), 3, rng.choice([1, 2])],
        [rng.choice(edges), 0, rng.choice(long_edges)],
        heads=group,
        kv_heads=1,
        dim_v=128 if page in (1, 64) else 96,
        layout=layout,
        page=page,
        table=rng.choice(["block", "csr"]),
        causal=causal,
        seed=rng.getrandbits(31),
    )
    built = build(case)
    expected, expected_lse = built.reference()
    assert_float32(*attend_float32(built, None), expected, expected_lse)
    out, lse = run(built, executor)
    cases.compare_out(out, expected, executor)
    cases.compare_lse(lse, expected_lse, executor)


@pytest.mark.parametrize("deviation", [0.25, 1.0, 2.0])
@on_served("layout,page", [("slots", 1), ("vectorized", 16), ("vectorized", 64)])
def test_logit_deviation(executor: str, layout: str, page: int, deviation: float) -> None:
    # q and K are standard normal, so with the default softmax scale the logits' deviation is the product of their
    # descales.
    case = Case([24, 5], [200, 70], layout=layout, page=page, descales=(0.5, 2 * deviation, 2.0), seed=fresh_seed())
    built = build(case)
    expected, expected_lse = built.reference()
    assert logit_deviation(built) == pytest.approx(deviation, rel=0.1)
    assert_float32(*attend_float32(built, SMALL["32x8"]), expected, expected_lse)
    check(built, executor)


def logit_deviation(built: Built) -> float:
    """Standard deviation of the logits of the first request's first KV head."""
    case = built.case
    keys = torch.stack([token(built, "k", 0, index)[0].reshape(-1) for index in range(case.kv_lens[0])])
    queries = built.q[: case.q_lens[0], 0].float()
    scores = queries @ keys.view(E4M3).float().T * case.dim**-0.5 * case.descales[0] * case.descales[1]
    return float(scores.std())


@pytest.mark.parametrize("place", ["first", "last"])
@on_served("layout,page", [("slots", 1), ("vectorized", 64)])
def test_attention_sink(executor: str, layout: str, page: int, place: str) -> None:
    # One key takes nearly all weight of every row that sees it, and the rest must still be right in LSE and in the
    # remainder.
    case = Case([40], [200], layout=layout, page=page, descales=(1.0, 1.0, 1.0), seed=fresh_seed())
    built = build(case)
    built.q.copy_((1 + 0.25 * built.q.float()).to(E4M3))
    index = 0 if place == "first" else 170
    sink = token(built, "k", 0, index)
    sink.copy_(torch.full(sink.shape, 1.25).to(E4M3).view(torch.uint8))
    expected, expected_lse = built.reference()
    assert float(expected_lse[:, -1].min()) > 10, "not a sink"
    assert_float32(*attend_float32(built, SMALL["32x8"]), expected, expected_lse)
    check(built, executor)


@pytest.mark.parametrize("which", ["small", "bounded", "grow", "shrink", "grow-nan"])
@on_served(
    "layout,page,dims,causal",
    [
        *(("slots", 1, (128, dim_v), causal) for dim_v in (128, 96) for causal in (True, False)),
        ("vectorized", 64, (128, 128), True),
    ],
)
def test_scores_from_small_to_large(
    executor: str, layout: str, page: int, dims: tuple[int, int], which: str, causal: bool
) -> None:
    # Small scores need no running maximum, so an implementation may go without until large ones come. Large is beyond
    # the range of float32 (base 2: +-134, or +-43 where all are to stay bounded): half of the rows see large keys as
    # all that counts, the other half as nothing beside the small ones.
    where = {"layout": layout, "page": page, "causal": causal, "seed": fresh_seed()}
    case = Case([90], [500], heads=4, kv_heads=2, dim=dims[0], dim_v=dims[1], **where)
    built = build(case)
    generator = torch.Generator().manual_seed(case.seed)
    direction = torch.where(torch.rand(case.dim, generator=generator) < 0.5, -1.0, 1.0)
    sign = torch.where(torch.arange(90) % 2 == 0, 1.0, -1.0)[:, None, None]
    built.q.copy_((sign * direction + 0.25 * built.q.float()).to(E4M3))
    for index in range(500):
        gain = {"small": 0.0, "bounded": 3.5, "shrink": 11.0 * (index < 300)}.get(which, 11.0 * (index >= 300))
        key = gain * direction + 0.5 * torch.randn(2, case.dim, generator=generator)
        place = token(built, "k", 0, index)
        place.copy_(key.to(E4M3).view(torch.uint8).view(place.shape))
        # Positive: what cancels beside scores this large is beyond float32.
        value = 0.5 + torch.rand(2, case.dim_v, generator=generator)
        token(built, "v", 0, index).copy_(value.to(E4M3).view(torch.uint8))
    if which == "grow-nan":
        row = token(built, "k", 0, 450)[1]  # K of the vectorized layout has its dims as [D/16, 16]
        row[(0, 7) if row.dim() == 2 else 7] = NAN_BYTE
        token(built, "v", 0, 470)[0, 9] = NAN_BYTE
    expected, expected_lse = built.reference()
    # Tiles with room for all rows in one block, so that rows at different depths of the diagonal share it.
    for tiling in (None, Tiling(keys=48, rows=100, scores=100 * 48, state=1 << 20)):
        assert_float32(*attend_float32(built, tiling), expected, expected_lse)
    out, lse = run(built, executor)
    cases.compare_out(out, expected, executor)
    cases.compare_lse(lse, expected_lse, executor)


@pytest.mark.parametrize("deviation", [0.25, 1.0, 2.0])
@on_served("layout,page", [("slots", 1), ("vectorized", 64)])
def test_values_of_one(executor: str, layout: str, page: int, deviation: float) -> None:
    case = Case([40], [300], layout=layout, page=page, descales=(1.0, deviation, 1.0), seed=fresh_seed())
    built = build(case)
    one = torch.ones(case.dim_v).to(E4M3).view(torch.uint8)
    for index in range(300):
        token(built, "v", 0, index).copy_(one)
    out, lse = run(built, executor)
    error = float((out.float() - 1).abs().max())
    assert error <= (0.0 if executor == "torch" else 0.04)
    cases.compare_lse(lse, built.reference()[1], executor)
    float32, _ = attend_float32(built, SMALL["48x12"])
    assert float((float32 - 1).abs().max()) <= 2e-6


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize(("layout", "page"), [("slots", 1), ("vectorized", 16), ("linear", 64)])
def test_nan_in_a_used_token(layout: str, page: int, which: str, causal: bool) -> None:
    built, out_nan, lse_nan = with_nan(layout, page, which, causal)
    expected, expected_lse = built.reference()
    assert torch.equal(expected.isnan(), out_nan), "the reference disagrees with this test"
    for tiling in (None, *SMALL.values()):
        out, lse = attend_float32(built, tiling)
        assert torch.equal(out.isnan(), out_nan), tiling
        assert torch.equal(lse.isnan(), lse_nan), tiling
        assert_float32(out, lse, expected, expected_lse)


@pytest.mark.parametrize("which", ["k", "v"])
@on_served(
    "layout,page,causal",
    [
        (*where, causal)
        for where in [("slots", 1), ("vectorized", 16), ("vectorized", 64), ("linear", 64)]
        for causal in (True, False)
    ],
)
def test_nan_in_a_used_token_of_a_call(executor: str, layout: str, page: int, which: str, causal: bool) -> None:
    built, out_nan, lse_nan = with_nan(layout, page, which, causal)
    result = check(built, executor)
    assert result is not None
    assert torch.equal(result[0].isnan(), out_nan)
    assert torch.equal(result[1].isnan(), lse_nan)


def with_nan(layout: str, page: int, which: str, causal: bool) -> tuple[Built, torch.Tensor, torch.Tensor]:
    """A call with NaN in single tokens, and where NaN belongs: rows that see the token, heads that read its KV head."""
    q_lens, kv_lens = [20, 5, 3], [60, 40, 20]
    case = Case(q_lens, kv_lens, heads=6, kv_heads=3, layout=layout, page=page, causal=causal, seed=fresh_seed())
    built = build(case)
    out_nan = torch.zeros(built.out.shape, dtype=torch.bool)
    lse_nan = torch.zeros(built.lse.shape, dtype=torch.bool)
    # Request 0: on the diagonal, at the edge of a tile of 16, 32 and 48, seen by the last row only; request 1: seen by
    # all rows. Request 2 stays clean. Each sign of NaN has its layouts.
    nan_byte = NAN_BYTE | 0x80 if page in (1, 64) else NAN_BYTE
    for request, index, kv_head, element in [(0, 47, 1, 5), (0, 48, 0, 17), (0, 59, 2, 0), (1, 31, 1, 100)]:
        # Head dim elements of a token in order: K of the vectorized layout has them as [D/16, 16].
        row = token(built, which, request, index)[kv_head]
        if row.dim() == 2:
            row[element // 16, element % 16] = nan_byte
        else:
            row[element] = nan_byte
        for i in range(q_lens[request]):
            if causal and index > i + kv_lens[request] - q_lens[request]:
                continue
            position = sum(q_lens[:request]) + i
            for head in (2 * kv_head, 2 * kv_head + 1):
                if which == "k":
                    out_nan[position, head] = True
                    lse_nan[head, position] = True
                else:
                    out_nan[position, head, element] = True
    assert out_nan.any()
    assert not out_nan.all()
    return built, out_nan, lse_nan


def test_tiny_descales_and_a_huge_softmax_scale_give_ordinary_scores(executor: str) -> None:
    ordinary = Case((3, 2), (40, 9), descales=(1.0, 1.0, 1.0), softmax_scale=1e-2, seed=fresh_seed())
    extreme = replace(ordinary, descales=(1e-20, 1e-20, 1.0), softmax_scale=1e38)
    (out, lse), (same_out, same_lse) = run(build(ordinary), executor), run(build(extreme), executor)
    assert torch.allclose(out.float(), same_out.float(), rtol=2**-7, atol=1e-5)
    assert torch.allclose(lse, same_lse, rtol=1e-5, atol=1e-5)
