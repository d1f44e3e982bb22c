"""Element addresses and views of the cache layouts, against the reference's own reading of the documented shapes.

The reference reads rows of a flat row of bytes by formulas of its own. Given a row whose every element is its own
index, it returns the addresses that it reads, which must be those of `layouts`, for integers and for tensors of them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from aiter_paged_fp8.layouts import PACK, Cache, Linear, Vectorized
from aiter_paged_fp8.reference import _row
from aiter_paged_fp8.request import describe
from op_tests.cases import E4M3, Case, build

PAGES = 3
LAYOUTS = [
    ("slots", 1),
    ("linear", 1),
    ("linear", 5),
    ("linear", 64),
    ("vectorized", 16),
    ("vectorized", 48),
    ("vectorized", 1024),
]
DIMS = [(16, 16), (128, 128), (192, 128), (32, 64)]


def described(layout: str, page: int, dims: tuple[int, int], interleaved: bool) -> Cache:
    """What a call's description says of its cache; no address of the package has been used to build it."""
    case = Case(
        [1], [page], kv_heads=3, heads=3, dim=dims[0], dim_v=dims[1], layout=layout, page=page, interleaved=interleaved
    )
    built = build(case)
    return describe(*built.args, **built.kwargs).cache


own_indices = lru_cache(maxsize=4)(torch.arange)


def addresses(cache: Cache, is_key: bool, page: int, slot: int, head: int) -> torch.Tensor:
    """Where the reference reads a token of a head, in the order of the head dim."""
    tensor = cache.k if is_key else cache.v
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _row(tensor, own_indices(extent), is_key, page, slot, head)


@pytest.mark.parametrize("interleaved", [False, True], ids=["packed", "interleaved"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize(("layout", "page"), LAYOUTS)
def test_geometry(layout: str, page: int, dims: tuple[int, int], interleaved: bool) -> None:
    cache = described(layout, page, dims, interleaved)
    assert isinstance(cache, Vectorized if layout == "vectorized" else Linear)
    assert cache.name == ("vectorized" if layout == "vectorized" else "linear")
    assert (cache.pages, cache.page, cache.kv_heads) == (4, page, 3)
    assert (cache.head_dim, cache.head_dim_v) == dims
    gap = 2 if interleaved else 1
    assert (cache.k_page_stride, cache.v_page_stride) == (gap * page * 3 * dims[0], gap * page * 3 * dims[1])


@pytest.mark.parametrize("interleaved", [False, True], ids=["packed", "interleaved"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize(("layout", "page"), LAYOUTS)
def test_offsets_are_where_the_reference_reads(
    layout: str, page: int, dims: tuple[int, int], interleaved: bool
) -> None:
    cache = described(layout, page, dims, interleaved)
    slots = sorted({0, 1 % page, 15 % page, 16 % page, 17 % page, page - 1})
    for number, slot, head in product((0, 1, PAGES), slots, (0, 1, 2)):
        for is_key, offset, dim in ((True, cache.k_offset, dims[0]), (False, cache.v_offset, dims[1])):
            expected = addresses(cache, is_key, number, slot, head)
            # All of a token's elements at once, as tensors ...
            assert torch.equal(offset(*map(torch.tensor, (number, slot, head)), torch.arange(dim)), expected)
            # ... and the edges of packs one by one, as integers.
            for element in {0, 1, 15, 16 % dim, 17 % dim, dim - 1}:
                found = offset(number, slot, head, element)
                assert isinstance(found, int)
                assert found == int(expected[element])


@pytest.mark.parametrize(("layout", "page"), LAYOUTS)
def test_offsets_take_whole_index_tensors(layout: str, page: int) -> None:
    cache = described(layout, page, (32, 64), interleaved=True)
    tokens = torch.arange(PAGES * page)[:, None, None]
    heads = torch.arange(3)[None, :, None]
    for is_key, offset, dim in ((True, cache.k_offset, 32), (False, cache.v_offset, 64)):
        found = offset(tokens // page, tokens % page, heads, torch.arange(dim))
        assert found.shape == (PAGES * page, 3, dim)
        assert found.unique().numel() == found.numel(), "two elements at one address"
        for token, head in ((0, 0), (PAGES * page - 1, 2), (page, 1)):
            assert torch.equal(found[token, head], addresses(cache, is_key, token // page, token % page, head))


@pytest.mark.parametrize(("layout", "page"), [("slots", 1), ("linear", 64), ("vectorized", 16), ("vectorized", 1024)])
def test_offsets_beyond_32_bits(layout: str, page: int) -> None:
    cache = described(layout, page, (192, 128), interleaved=False)
    # Page ids arrive as int32; the address is computed in Python's integers or in int64.
    number = 2**33 // (page * 3 * 128)
    for is_key, offset in ((True, cache.k_offset), (False, cache.v_offset)):
        stride = cache.k_page_stride if is_key else cache.v_page_stride
        expected = int(addresses(cache, is_key, 0, page - 1, 2)[-1]) + number * stride
        last = 191 if is_key else 127
        assert offset(number, page - 1, 2, last) == expected > 2**32
        as_tensors = [torch.tensor(index, dtype=torch.int64) for index in (number, page - 1, 2, last)]
        assert int(offset(*as_tensors)) == expected


@pytest.mark.parametrize("interleaved", [False, True], ids=["packed", "interleaved"])
@pytest.mark.parametrize(("layout", "page"), LAYOUTS)
def test_parts_come_in_the_order_head_token_dim(layout: str, page: int, interleaved: bool) -> None:
    cache = described(layout, page, (32, 64), interleaved)
    low, high = (PACK, min(3 * PACK, page)) if page > 2 * PACK else (0, page)
    heads = slice(1, 3)
    for is_key in (True, False):
        part, ordered, dim = (cache.k_part, cache.k_by_head, 32) if is_key else (cache.v_part, cache.v_by_head, 64)
        view = part(heads, slice(low, high))
        whole = cache.k if is_key else cache.v
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), "caches are never copied"
        assert view.shape[0] == cache.pages
        found = ordered(view.view(torch.uint8)).reshape(2, cache.pages, high - low, dim)
        flat: Any = whole.view(torch.uint8)
        flat = flat.as_strided((1 + sum((n - 1) * s for n, s in zip(whole.shape, whole.stride(), strict=True)),), (1,))
        for number, slot, head in product(range(cache.pages), {low, high - 1}, (1, 2)):
            expected = flat[addresses(cache, is_key, number, slot, head)]
            assert torch.equal(found[head - 1, number, slot - low], expected)


def test_addresses_of_a_small_page_by_hand() -> None:
    # Pages of 16 tokens, 2 heads, D 32, Dv 16: K [pages, 2, 2, 16, 16], V [pages, 2, 1, 16, 16], counted on paper.
    k = torch.zeros(4, 2, 2, 16, 16).to(E4M3)
    v = torch.zeros(4, 2, 1, 16, 16).to(E4M3)
    cache = Vectorized(k, v, 4, 16, 2, 32, 16, 1024, 512)
    assert cache.k_offset(1, 3, 1, 20) == 1024 + 512 + 256 + 3 * 16 + 4
    assert cache.v_offset(2, 5, 1, 7) == 2 * 512 + 256 + 7 * 16 + 5
    linear = Linear(torch.zeros(4, 16, 2, 32).to(E4M3), torch.zeros(4, 16, 2, 16).to(E4M3), 4, 16, 2, 32, 16, 1024, 512)
    assert linear.k_offset(1, 3, 1, 20) == 1024 + 3 * 64 + 32 + 20
    assert linear.v_offset(2, 5, 1, 7) == 2 * 512 + 5 * 32 + 16 + 7
