"""The reference itself: fp8 values, a case computed by hand, torch's own attention in float64, every layout.

Nothing of the package but the reference is used here.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from aiter_paged_fp8 import reference
from aiter_paged_fp8.reference import e4m3_values, paged_attention

E4M3 = torch.float8_e4m3fn


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal with the sign of zero; NaN equals NaN."""
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fp8_values_are_those_of_torch_and_ml_dtypes(dtype: torch.dtype) -> None:
    ours = e4m3_values(dtype)
    assert ours.dtype == dtype
    assert same(ours, torch.arange(256, dtype=torch.uint8).view(E4M3).to(dtype))
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert same(ours, torch.from_numpy(theirs).to(dtype))


def test_fp8_values_by_hand() -> None:
    values = e4m3_values()
    by_hand = {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x39: 1.125, 0x7E: 448.0, 0xB8: -1.0}
    assert {bits: float(values[bits]) for bits in by_hand} == by_hand
    assert values.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_a_case_by_hand() -> None:
    # Slot 2 is token 0, slot 0 is token 1, slot 1 belongs to nobody. With ln 2 as descale the keys are ln 2 and 0 along
    # the only direction that the query has: weights 2 and 1.
    q, k, v = (torch.zeros(rows, 1, 16) for rows in (2, 3, 3))
    q[:, 0, 0] = k[2, 0, 0] = 1.0
    v[2], v[0] = 4.0, 1.0
    k[1] = v[1] = math.nan
    cache = [tensor.to(E4M3) for tensor in (q, k, v)]
    scales = {"k_descale": math.log(2), "softmax_scale": 1.0}
    out, lse = paged_attention(*cache, [0, 2], [[2, 0]], [2], v_descale=0.5, **scales)
    # Row 0 sees token 0 only; row 1 sees both: (2 * 4 + 1 * 1) / 3, halved by the descale.
    assert out[:, 0].flatten().tolist() == pytest.approx([2.0] * 16 + [1.5] * 16)
    assert lse[0].tolist() == pytest.approx([math.log(2), math.log(3)])
    # Not causal, both rows see both. A q_descale of 2 squares the weights: 4 and 1.
    out, lse = paged_attention(*cache, [0, 2], [[2, 0]], [2], q_descale=2.0, causal=False, **scales)
    assert out[:, 0].flatten().tolist() == pytest.approx([17 / 5] * 32)
    assert lse[0].tolist() == pytest.approx([math.log(5)] * 2)


def laid_out(layout: str, page: int, tokens: torch.Tensor, ids: list[int], pages: int, is_key: bool) -> torch.Tensor:
    """A cache with whole pages of tokens [n, heads, dim] at ``ids``, by reshapes of the documented shapes; NaN around.
    A cache with whole pages of tokens [n, heads, dim] at ``ids``, by reshapes of the documented shapes; NaN around."""
    _, heads, dim = tokens.shape
    by_page = tokens.view(torch.uint8).view(-1, page, heads, dim)
    if layout == "slots":
        by_page = by_page[:, 0]
    elif layout == "vectorized" and is_key:
        by_page = by_page.view(-1, page, heads, dim // 16, 16).permute(0, 2, 3, 1, 4)
    elif layout == "vectorized":
        by_page = by_page.view(-1, page // 16, 16, heads, dim).permute(0, 3, 1, 4, 2)
    # Every second page of an allocation, so that the stride between pages is one of its own.
    cache = torch.full((pages, 2, *by_page.shape[1:]), 0x7F, dtype=torch.uint8)[:, 1]
    cache[torch.tensor(ids)] = by_page
    return cache.view(E4M3)


def drawn_tokens(kv_lens: list[int], page: int, heads: int, dim: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Tokens of each request, up to whole pages; what lies behind a length is NaN."""
    drawn = []
    for length in kv_lens:
        tokens = torch.randn(-(-length // page) * page, heads, dim, generator=generator).to(E4M3)
        tokens.view(torch.uint8)[length:] = 0x7F
        drawn.append(tokens)
    return drawn


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("layout", "page"), [("slots", 1), ("linear", 1), ("linear", 8), ("vectorized", 16), ("vectorized", 32)]
)
def test_agrees_with_torch(layout: str, page: int, causal: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    q_lens, kv_lens, cu = [5, 9, 3, 2], [37, 4, 0, 64], [2, 7, 16, 19, 21]
    heads, kv_heads, dim, dim_v = 6, 2, 32, 48
    counts = [-(-length // page) for length in kv_lens]
    pages = sum(counts) + 3
    flat_ids = torch.randperm(pages, generator=generator).tolist()[: sum(counts)]
    ends = [sum(counts[: request + 1]) for request in range(4)]
    page_ids = [flat_ids[end - count : end] for end, count in zip(ends, counts, strict=True)]
    keys = drawn_tokens(kv_lens, page, kv_heads, dim, generator)
    vals = drawn_tokens(kv_lens, page, kv_heads, dim_v, generator)
    k, v = (
        laid_out(layout, page, torch.cat([t.view(torch.uint8) for t in tokens]).view(E4M3), flat_ids, pages, is_key)
        for tokens, is_key in ((keys, True), (vals, False))
    )
    q = torch.randn(22, heads, dim, generator=generator).to(E4M3)
    scales = {"q_descale": 0.5, "k_descale": 1.25, "v_descale": 3.0, "softmax_scale": 0.2}
    out, lse = paged_attention(q, k, v, cu, page_ids, kv_lens, causal=causal, dtype=dtype, **scales)
    assert out.dtype == lse.dtype == dtype
    assert out.shape == (22, heads, dim_v)
    assert lse.shape == (heads, 22)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        rows = slice(cu[request], cu[request + 1])
        mask = torch.ones(q_len, kv_len, dtype=torch.bool)
        mask = mask.tril(kv_len - q_len) if causal else mask
        seen = mask.any(-1)
        blind = ~seen
        assert bool((out[rows][blind] == 0).all())
        assert bool((lse[:, rows][:, blind] == -math.inf).all())
        if not bool(seen.any()):
            continue
        query = q[rows][seen].double().transpose(0, 1) * 0.5
        key = keys[request][:kv_len].double().transpose(0, 1).repeat_interleave(heads // kv_heads, 0) * 1.25
        value = vals[request][:kv_len].double().transpose(0, 1).repeat_interleave(heads // kv_heads, 0) * 3.0
        attend = torch.nn.functional.scaled_dot_product_attention
        expected = attend(query, key, value, attn_mask=mask[seen], scale=0.2)
        error = (out[rows][seen].double().transpose(0, 1) - expected).abs().max()
        assert float(error) <= tolerance * float(expected.abs().max())
        scores = (query @ key.transpose(1, 2) * 0.2).masked_fill(~mask[seen], -math.inf)
        assert float((lse[:, rows][:, seen].double() - scores.logsumexp(-1)).abs().max()) <= tolerance * 10
    # Rows that belong to no request hold NaN, so that no comparison takes them for a result.
    for rows in (slice(0, 2), slice(21, 22)):
        assert bool(out[rows].isnan().all())
        assert bool(lse[:, rows].isnan().all())


def test_the_default_scale_is_one_over_the_root_of_the_head_dim() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(4, 1, 64, generator=generator).to(E4M3) for _ in range(3))
    given = paged_attention(q, k, v, [0, 4], [[3, 1, 0, 2]], [4], softmax_scale=0.125)
    default = paged_attention(q, k, v, [0, 4], [[3, 1, 0, 2]], [4])
    assert torch.equal(given[0], default[0])
    assert torch.equal(given[1], default[1])


@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_reaches_what_sees_it(which: str) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(6, 2, 16, generator=generator).to(E4M3) for name in "qkv"}
    tensors[which].view(torch.uint8)[4, 1, 3] = 0x7F
    out, lse = paged_attention(tensors["q"], tensors["k"], tensors["v"], [0, 6], [[0, 1, 2, 3, 4, 5]], [6])
    expected = torch.zeros(6, 2, 16, dtype=torch.bool)
    expected[4:, 1, :] = which == "k"
    expected[4:, 1, 3] = True
    assert torch.equal(out.isnan(), expected)
    assert torch.equal(lse.isnan(), expected.all(-1).T)


def test_it_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(reference.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    froms = [(node.level, node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert all(level == 0 for level, _ in froms)
    assert not [name for name in [*names, *(module for _, module in froms)] if "aiter" in str(name)]
