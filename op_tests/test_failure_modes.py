"""Faults that users of public paged and batch prefill kernels reported, each as the smallest input that shows it here.

One test a kind, on the public function and on every executor that has a kernel for the row's layout. Pools of many GiB
are virtual memory, of which a test touches a few pages.

How vectorized pages of 64 with (D, Dv) = (128, 128), which the native kernel has, express each kind:

    int32 slot arithmetic        pages on both sides of page 131 072 = slot 8 388 608, where K passes 2**31 bytes
    > 4 GiB pool                 a request on the topmost pages of a pool over 4 GiB
    descriptor edges             pools of 2**31 bytes, a page less and a page more, requests on the last pages;
                                 caches that end with their mapping
    base address carry           K, V or both across a multiple of 2**32
    page table past its end      ids that end with their mapping, 128 to 256 keys and 160 pages (full: 192)
    unsupported shape            D 64: refused by name, or dense
    token ids for page ids       the same tokens as slots, on an executor that has slots
    one head dim for K and V     not expressible: D = Dv; refused
    GQA mapping                  V constant per KV head, six pairs of heads
    scales ignored               each descale alone
    NaN tail                     as it is, a length a request
    q_len > kv_len               as it is
    padding in the softmax sum   as it is
    padding of a partial page    lengths 1..15 mod 16 at each 16 keys of the page, tails NaN and 448
    odd or empty page count      as it is
    empty KV                     as it is, both tables
    wrong stream, stale replay   the emulator's graphs; more of it in test_streams
    LSE layout                   as it is
    lazy rescale                 steps from tile to tile of 128 keys, and every fourth tile
    last page length             65, 2**31 - 1 and negative ones
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, record, use_options
from op_tests import cases
from op_tests.cases import (
    E4M3,
    MAX_BYTE,
    NAN_BYTE,
    Built,
    Case,
    at_end_of_memory,
    build,
    check,
    on_served,
    run,
    sparse_bytes,
    token,
)
from op_tests.conftest import FULL

GIB = 2**30
UNIT = (1.0, 1.0, 1.0)
#: Every layout with the page sizes that its native kernel and its fallback have.
LAYOUT_PAGES = [
    ("slots", 1),
    ("linear", 1),
    ("linear", 16),
    ("linear", 64),
    *[("vectorized", n) for n in (16, 64, 1024)],
]
NATIVE_LAYOUT_PAGES = [("slots", 1), ("linear", 1), ("vectorized", 16), ("vectorized", 64), ("vectorized", 1024)]


def with_table(built: Built, page_ids: list[list[int]], wild: int) -> Built:
    """The same call with other page ids."""
    tables = ("block_table", "seqlen_k", "kv_indptr", "kv_page_indices", "kv_last_page_lens")
    kept = {name: value for name, value in built.kwargs.items() if name not in tables}
    return replace(built, page_ids=page_ids, kwargs={**cases.table_args(built.case, page_ids, wild), **kept})


def relocate(built: Built, first: int, pages: int, pools: tuple[torch.Tensor, torch.Tensor] | None = None) -> Built:
    """The same call on caches of ``pages`` pages: its own from page ``first`` on, all others untouched.

    ``pools`` are byte tensors to place the caches at the start of, instead of new ones.
    """
    old_ids = [page for ids in built.page_ids for page in ids]
    assert first + len(old_ids) <= pages
    caches = []
    for i, small in enumerate(built.args[1:3]):
        size = pages * small[0].numel()
        pool = sparse_bytes(size) if pools is None else pools[i]
        large = pool[:size].view(pages, *small.shape[1:])
        for new, old in enumerate(old_ids, start=first):
            large[new] = small[old].view(torch.uint8)
        caches.append(large.view(E4M3))
    new_ids, at = [], first
    for ids in built.page_ids:
        new_ids.append(list(range(at, at + len(ids))))
        at += len(ids)
    moved = with_table(built, new_ids, wild=pages + 7)
    return replace(moved, args=(built.q, *caches, *built.args[3:]))


@pytest.mark.parametrize("table", ["block", "csr"])
@on_served("layout,page", [("slots", 1), ("linear", 1), ("vectorized", 64)])
def test_int32_slot_arithmetic(executor: str, layout: str, page: int, table: str) -> None:
    # 256 bytes a slot: slot 8 388 608 starts 2**31 bytes from the start of K. One request ends before it, one
    # straddles it, one follows.
    edge = 8_388_608 // page
    case = Case([9, 70, 5], [20, 80, 40], layout=layout, page=page, table=table, dim=128, dim_v=128)
    before = 60 if page == 1 else 2
    built = relocate(build(case), first=edge - before, pages=edge + 90 // page + 1)
    assert built.args[1].stride(0) * edge == 2**31
    assert max(built.page_ids[0]) < edge == max(built.page_ids[1]) - (39 if page == 1 else 0)
    assert min(built.page_ids[2]) > edge
    check(built, executor)


@on_served("layout,page", NATIVE_LAYOUT_PAGES)
def test_pool_above_4_gib(executor: str, layout: str, page: int) -> None:
    case = Case([70], [130], layout=layout, page=page)
    small = build(case)
    used = len(small.page_ids[0])
    above = -(-4 * GIB // small.args[1][0].numel()) + 5
    built = relocate(small, first=above, pages=above + used)
    for cache in built.args[1:3]:
        assert cache.numel() > 4 * GIB
    assert check(built, executor) is not None, "must be served, not refused"


@pytest.mark.parametrize("extra", [-1, 0, 1], ids=["under", "at", "over"])
@on_served("layout,page", [("vectorized", 16), ("linear", 16), ("vectorized", 64)])
def test_descriptor_edge_at_2_gib(executor: str, layout: str, page: int, extra: int) -> None:
    case = Case([40], [77], layout=layout, page=page)
    small = build(case)
    pages = 2**31 // small.args[1][0].numel() + extra
    built = relocate(small, first=pages - len(small.page_ids[0]), pages=pages)
    assert built.args[1].numel() == 2**31 + extra * small.args[1][0].numel()
    check(built, executor)


@on_served(
    "layout,page,kv_len",
    [
        ("vectorized", 16, 250),
        ("vectorized", 64, 512),
        ("vectorized", 64, 500),
        ("vectorized", 1024, 1024),
        ("vectorized", 1024, 1000),
        ("linear", 1, 130),
        ("linear", 64, 500),
        ("linear", 1024, 1024),
    ],
)
def test_last_page_of_the_allocation(executor: str, layout: str, page: int, kv_len: int) -> None:
    # The caches end where their mapping ends, so a descriptor or a piece that is one page too long faults.
    small = build(Case([33], [kv_len], layout=layout, page=page, kv_heads=1, spare_pages=0))
    built = relocate(small, first=0, pages=len(small.page_ids[0]))
    caches = [at_end_of_memory(cache.view(torch.uint8)).view(E4M3) for cache in built.args[1:3]]
    check(replace(built, args=(built.q, *caches, *built.args[3:])), executor)


@pytest.mark.parametrize("which", ["k", "v", "both"])
@on_served("layout,page", NATIVE_LAYOUT_PAGES)
def test_base_address_carry(executor: str, layout: str, page: int, which: str) -> None:
    small = build(Case([20], [100], layout=layout, page=page, spare_pages=0))
    pages = len(small.page_ids[0])
    size = pages * small.args[1][0].numel()
    pools, views = [], []
    for name in ("k", "v"):
        # The address crosses a multiple of 2**32 in the middle of the cache: adding an offset to its low half carries.
        pool = sparse_bytes(4 * GIB + 2 * size if name == which or which == "both" else size)
        offset = (-pool.data_ptr() - size // 2) % (4 * GIB) // 16 * 16 if pool.numel() > size else 0
        pools.append(pool)
        views.append(pool[offset : offset + size])
    built = relocate(small, first=0, pages=pages, pools=(views[0], views[1]))
    for name, cache in zip(("k", "v"), built.args[1:3], strict=True):
        if which in (name, "both"):
            low = cache.data_ptr() % 2**32
            assert cache.storage_offset() > 0
            assert low < 2**32 < low + size
    check(built, executor)


@on_served(
    "layout,page,kv_lens",
    [
        ("slots", 1, [128, 256, 384]),
        ("slots", 1, [160, 192]),
        ("linear", 1, [192, 160]),
        ("vectorized", 16, [128, 640]),
        ("vectorized", 16, [192 * 16]),
        ("vectorized", 16, [5, 160 * 16]),
        ("vectorized", 64, [256, 128]),
        ("vectorized", 64, [192 * 64] if FULL else [160 * 64]),
        ("vectorized", 1024, [1024, 2048]),
        ("linear", 64, [128, 384]),
    ],
)
@pytest.mark.grows
def test_page_table_read_past_its_end(executor: str, layout: str, page: int, kv_lens: list[int]) -> None:
    # Exactly as many ids as used, and the ids end where their mapping ends.
    case = Case([3] * len(kv_lens), kv_lens, heads=2, kv_heads=1, layout=layout, page=page, table="csr_last")
    built = build(case)
    ids = torch.tensor([number for row in built.page_ids for number in row], dtype=torch.int32)
    indptr = built.kwargs["kv_indptr"] - 1  # cases.table_args begins at 1
    last = built.kwargs["kv_last_page_lens"]
    assert int(indptr[-1]) == ids.numel()
    ends = {"kv_indptr": indptr, "kv_page_indices": ids, "kv_last_page_lens": last}
    built.kwargs.update({name: at_end_of_memory(value) for name, value in ends.items()})
    check(built, executor)


@pytest.mark.parametrize("counts", [[1], [3], [5], [1, 3, 5, 0], [3, 5, 0], [5, 1, 0], [0]], ids=str)
@on_served("layout,page", [("slots", 1), ("vectorized", 16), ("vectorized", 64), ("linear", 64)])
def test_odd_or_empty_page_count(executor: str, layout: str, page: int, counts: list[int]) -> None:
    kv_lens = [max(count * page - page // 3, 0) for count in counts]
    built = build(Case([4] * len(counts), kv_lens, layout=layout, page=page, table="block"))
    width = -(-max(kv_lens) // page)
    assert width == max(counts)
    # Each row ends where its request ends, or holds wild ids from there on; the table and the lengths end with their
    # mappings.
    for name, value in (
        ("block_table", built.kwargs["block_table"][:, :width]),
        ("seqlen_k", built.kwargs["seqlen_k"]),
    ):
        built.kwargs[name] = at_end_of_memory(value)
    assert built.kwargs["block_table"].shape == (len(counts), width)
    check(built, executor)


@pytest.mark.parametrize(("layout", "page"), NATIVE_LAYOUT_PAGES)
def test_unsupported_shape_head_dim_64(executor: str, layout: str, page: int) -> None:
    built = build(Case([5, 3], [40, 17], dim=64, dim_v=64, layout=layout, page=page))
    if cases.served(built.case, executor):
        check(built, executor)
    else:
        with pytest.raises(RuntimeError, match=r"128, 128.*192, 128.*192, 192.*64, 64"):
            run(built, executor)
    # Without a forced executor it falls back, here and on the native architecture, and says which dims exist.
    kwargs = {**built.kwargs, "out": built.out, "lse": built.lse, "return_lse": True}
    built.poison()
    with use_options(executor="auto"), record() as calls:
        out, lse = flydsl_flash_attn_paged_prefill_func(*built.args, **kwargs)
    cases.compare(built, out, lse, "torch")
    assert calls[0].plan.path == "dense"
    from aiter_paged_fp8 import plan

    with use_options(executor="auto"):
        chosen = plan(*built.args, **kwargs, arch="gfx950")
    assert (chosen.path, str(chosen.code)) == ("dense", "head_dims")
    for words in ("(128, 128)", "(192, 128)", "(192, 192)", "(64, 64)"):
        assert words in chosen.reason


@on_served("layout,page", [("linear", 64), ("vectorized", 64)])
def test_token_ids_taken_for_page_ids(executor: str, layout: str, page: int) -> None:
    paged = build(Case([30, 7], [200, 64], layout=layout, page=page, table="csr_last"))
    by_page = check(paged, executor)
    assert by_page is not None
    slots = slots_of(paged)
    assert slots.args[1].shape[0] == 64 * paged.args[1].shape[0], "slots != pages"
    # Both calls write the same tensors, hence the copies.
    by_page = by_page[0].clone(), by_page[1].clone()
    paged.poison()
    # Where an executor has no kernel for slots, the dense path says what the tokens give.
    by_slot = check(slots, executor if cases.served(slots.case, executor) else "torch")
    assert by_slot is not None
    cases.compare_out(by_page[0], by_slot[0].double(), executor)
    cases.compare_lse(by_page[1], by_slot[1].double(), executor)


def slots_of(paged: Built) -> Built:
    """The same tokens as a pool of slots with token ids."""
    k, v = (cache.view(torch.uint8) for cache in paged.args[1:3])
    if paged.case.layout == "vectorized":
        k = k.permute(0, 3, 1, 2, 4).reshape(k.shape[0], k.shape[3], k.shape[1], -1)
        v = v.permute(0, 2, 4, 1, 3).reshape(v.shape[0], -1, v.shape[1], v.shape[3])
    pools = [cache.reshape(-1, *cache.shape[2:]).view(E4M3) for cache in (k, v)]
    size = paged.case.page
    ids = [
        [row[position // size] * size + position % size for position in range(length)]
        for row, length in zip(paged.page_ids, paged.case.kv_lens, strict=True)
    ]
    case = replace(paged.case, layout="slots", page=1, table="csr")
    slots = with_table(replace(paged, case=case), ids, wild=pools[0].shape[0] + 7)
    return replace(slots, args=(paged.q, *pools, *paged.args[3:]))


@on_served(
    "layout,page,dims,table",
    [
        (*where, *what)
        for where in LAYOUT_PAGES
        for what in [((192, 128), "block"), ((192, 128), "csr"), ((128, 192), "csr"), ((64, 256), "block")]
    ],
)
def test_one_head_dim_assumed_for_k_and_v(
    executor: str, layout: str, page: int, dims: tuple[int, int], table: str
) -> None:
    dim, dim_v = dims
    check(build(Case([20, 5], [70, 33], layout=layout, page=page, table=table, dim=dim, dim_v=dim_v)), executor)


@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (8, 4), (8, 8), (6, 3), (5, 1)], ids=str)
@on_served("layout,page", NATIVE_LAYOUT_PAGES)
def test_gqa_mapping(executor: str, layout: str, page: int, heads: tuple[int, int]) -> None:
    query_heads, kv_heads = heads
    case = Case([6, 3], [50, 20], heads=query_heads, kv_heads=kv_heads, layout=layout, page=page, descales=UNIT)
    built = build(case)
    # KV head h holds 1 + h/4 in every element of V: exact in e4m3 and in bf16, at least 9 % apart.
    values = (1 + torch.arange(kv_heads) / 4).to(E4M3).view(torch.uint8)[:, None]
    for request, length in enumerate(case.kv_lens):
        for index in range(length):
            token(built, "v", request, index).copy_(values.expand(-1, case.dim_v))
    out, lse = run(built, executor)
    expected = (1 + torch.arange(query_heads) // (query_heads // kv_heads) / 4)[None, :, None].expand(out.shape)
    error = (out.float() - expected).abs() / expected
    assert float(error.max()) <= (0.0 if executor == "torch" else 0.04)
    cases.compare(built, out, lse, executor)  # K differs between heads, so LSE shows the mapping of K


@on_served("layout,page", [("slots", 1), ("vectorized", 64)])
def test_scales_ignored(executor: str, layout: str, page: int) -> None:
    case = Case([20, 5], [70, 33], layout=layout, page=page, descales=(0.5, 0.75, 1.5))
    built = build(case)
    base_out, base_lse = (tensor.clone() for tensor in run(built, executor))

    def with_descale(name: str, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        built.poison()
        changed = replace(built, kwargs={**built.kwargs, name: built.kwargs[name] * factor})
        out, lse = run(changed, executor)
        cases.compare(changed, out, lse, executor)
        return out.clone(), lse.clone()

    by_q, by_k = with_descale("q_descale", 2.0), with_descale("k_descale", 2.0)
    for out, lse in (by_q, by_k, with_descale("q_descale", 0.7), with_descale("k_descale", 0.7)):
        assert not torch.equal(lse, base_lse)
        assert not torch.equal(out, base_out)
    # Twice q and twice k are the same scores, by a power of two, so to the last bit.
    assert torch.equal(by_q[0], by_k[0])
    assert torch.equal(by_q[1], by_k[1])
    # v is exactly linear, and no part of the softmax.
    for factor in (2.0, -0.25):
        out, lse = with_descale("v_descale", factor)
        assert torch.equal(out, base_out * factor)
        assert torch.equal(lse, base_lse)
    with_descale("v_descale", 0.7)


TAIL_LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025]


@on_served("layout,page", LAYOUT_PAGES)
def test_nan_tail_reaches_output(executor: str, layout: str, page: int) -> None:
    table = "csr" if page in (1, 64) else "block"
    case = Case([2] * 13, TAIL_LENGTHS, heads=2, kv_heads=1, layout=layout, page=page, table=table, tail_byte=NAN_BYTE)
    result = check(build(case), executor)
    if result is not None:
        # Request 0 has one key for two queries: its first row sees none, and gives 0 and -inf.
        assert not bool(result[0].isnan().any() | result[1].isnan().any())


@pytest.mark.parametrize("tail_byte", [NAN_BYTE, MAX_BYTE], ids=["nan", "448"])
@on_served("page,dims", [(16, (128, 128)), (16, (192, 128)), (16, (192, 192)), (64, (128, 128))])
def test_padded_tokens_of_a_partial_page(executor: str, page: int, dims: tuple[int, int], tail_byte: int) -> None:
    # Lengths 1..15 modulo 16 at each of the four places of 16 keys in a 64-key tile: the first tile, and a later one
    # now and then.
    lengths = [64 * (extra % 4 == place) + 16 * place + extra for place in range(4) for extra in range(1, 16)]
    assert len({length % 64 for length in lengths}) == 60
    dim, dim_v = dims
    case = Case([1] * 60, lengths, heads=2, kv_heads=1, page=page, dim=dim, dim_v=dim_v, tail_byte=tail_byte)
    assert check(build(case), executor) is not None


@on_served("layout,page", LAYOUT_PAGES)
def test_q_len_above_kv_len(executor: str, layout: str, page: int) -> None:
    built = build(Case([300], [129], layout=layout, page=page))
    result = check(built, executor)
    if result is not None:
        out, lse = result
        assert bool((out[:171] == 0).all())
        assert bool((lse[:, :171] == -math.inf).all())
        assert bool((out[171:] != 0).any(-1).all())
        assert bool(lse[:, 171:].isfinite().all())


@on_served("layout,page,causal", [(*where, causal) for where in LAYOUT_PAGES for causal in (True, False)])
def test_padding_enters_the_softmax_sum(executor: str, layout: str, page: int, causal: bool) -> None:
    case = Case([1] * 13, TAIL_LENGTHS, heads=2, kv_heads=1, layout=layout, page=page, causal=causal, descales=UNIT)
    built = build(case)
    built.q.view(torch.uint8).zero_()
    one = torch.ones(case.dim_v).to(E4M3).view(torch.uint8)
    for request, length in enumerate(TAIL_LENGTHS):
        for index in range(length):
            token(built, "v", request, index).copy_(one)
    out, lse = run(built, executor)
    assert bool((out == 1).all()), "out is not exactly 1"
    expected = torch.tensor([math.log(length) for length in TAIL_LENGTHS], dtype=torch.float64)
    assert bool(((lse.double() - expected).abs() <= 2e-6 * expected.clamp(min=1.0)).all())
    built.check_canaries()


@pytest.mark.parametrize("kv_lens", [[0, 65], [65, 0], [0], [0, 0, 1]], ids=str)
@pytest.mark.parametrize("table", ["block", "csr"])
@on_served("layout,page", NATIVE_LAYOUT_PAGES)
def test_empty_kv(executor: str, layout: str, page: int, table: str, kv_lens: list[int]) -> None:
    built = build(Case([3] * len(kv_lens), kv_lens, layout=layout, page=page, table=table))
    # What a caller's buffers hold from an earlier use; the canaries around them stay.
    built.out.fill_(math.nan)
    built.lse.fill_(math.nan)
    out, lse = run(built, executor)
    cases.compare(built, out, lse, executor)
    for request, length in enumerate(kv_lens):
        rows = slice(3 * request, 3 * request + 3)
        if length == 0:
            assert bool((out[rows] == 0).all())
            assert bool((lse[:, rows] == -math.inf).all())


@pytest.mark.parametrize("given", [True, False], ids=["given", "allocated"])
@pytest.mark.parametrize("q_lens", [[5, 6], [1]], ids=str)
def test_lse_layout(executor: str, q_lens: list[int], given: bool) -> None:
    built = build(Case(q_lens, [40, 9][: len(q_lens)], heads=4, kv_heads=2))
    total_q = sum(q_lens)
    assert total_q != 4
    out, lse = run(built, executor) if given else run(built, executor, out=None, lse=None)
    assert lse.shape == (4, total_q)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert (lse is built.lse, out is built.out) == (given, given)
    cases.compare(built, out, lse, executor)


@on_served("layout,page,tile", [("slots", 1, 64), ("slots", 1, 128), ("vectorized", 64, 128), ("vectorized", 64, 512)])
def test_lazy_rescale_with_a_non_monotonic_maximum(executor: str, layout: str, page: int, tile: int) -> None:
    # Tiles of keys along one direction, by turns near, far, opposite, the far ones out of bounds in the end. A lazy
    # rescale waits for at most 4 in base 2, so jumps of 8 and more go through both branches, up and down. Half of the
    # rows look the other way and see the negative of it.
    gains = [0.25, 1.75, -1.5, 0.5, 4.5, -4.5, 0.25]
    length = tile * len(gains) - 5
    case = Case([72], [length], heads=2, kv_heads=1, layout=layout, page=page, descales=UNIT)
    built = build(case)
    generator = torch.Generator().manual_seed(case.seed)
    direction = torch.where(torch.rand(case.dim, generator=generator) < 0.5, -1.0, 1.0)
    sign = torch.where(torch.arange(72) % 2 == 0, 1.0, -1.0)[:, None, None]
    noise = 0.25 * torch.randn(72, 2, case.dim, generator=generator)
    built.q.copy_((sign * direction + noise).to(E4M3))
    for index in range(length):
        key = gains[index // tile] * direction + 0.5 * torch.randn(case.dim, generator=generator)
        place = token(built, "k", 0, index)
        place.copy_(key.to(E4M3).view(torch.uint8).view(place.shape))
        # Positive values: with scores this large no float32 sum could resolve the remainder where signed values cancel.
        value = 0.5 + 1.5 * torch.rand(case.dim_v, generator=generator)
        token(built, "v", 0, index).copy_(value.to(E4M3).view(torch.uint8))
    # The step in base 2 from tile to tile: gain * D * D**-0.5 * log2(e).
    steps = [abs(b - a) * math.sqrt(case.dim) / math.log(2) for a, b in pairwise(gains)]
    assert min(steps) > 8
    assert check(built, executor) is not None


@on_served("layout,page", [("linear", 16), ("vectorized", 16), ("vectorized", 64)])
def test_last_page_length_above_page_size(executor: str, layout: str, page: int) -> None:
    # Documented: one outside [0, page] counts as its nearest bound. Nothing behind the last page may be read: ids and
    # caches end there.
    counts = [2, 1, 3, 2, 0]
    lasts, lengths = [page + 1, 2**31 - 1, -1, -(2**31), 99], [2 * page, page, 2 * page, page, 0]
    small = build(
        Case([4] * 5, [page * count for count in counts], layout=layout, page=page, table="csr", spare_pages=0)
    )
    for request, length in enumerate(lengths):  # tokens that a negative length takes away must not show
        for index in range(length, page * counts[request]):
            token(small, "k", request, index).fill_(NAN_BYTE)
            token(small, "v", request, index).fill_(NAN_BYTE)
    caches = [at_end_of_memory(cache.view(torch.uint8)).view(E4M3) for cache in small.args[1:3]]
    ids = at_end_of_memory(small.kwargs["kv_page_indices"][1:-1])
    table = {"kv_page_indices": ids, "kv_indptr": small.kwargs["kv_indptr"] - 1}
    table["kv_last_page_lens"] = torch.tensor(lasts, dtype=torch.int32)
    built = replace(
        small,
        case=replace(small.case, kv_lens=lengths),
        args=(small.q, *caches, *small.args[3:]),
        kwargs={**small.kwargs, **table},
    )
    check(built, executor)


def capture(executor: str, call: Callable[[Any], None]) -> Callable[[], None]:
    """Record ``call(stream)`` on a side stream; returns what replays it and waits."""
    if executor == "emulator":
        from aiter_paged_fp8 import emulator

        with emulator.graph() as graph:
            call(None)
        return graph.replay
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call(stream)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
@pytest.mark.parametrize("executor", cases.CAPTURING)
def test_wrong_stream_or_stale_replay(executor: str, strided: bool) -> None:
    # The recorded call must read lengths, ids, descales and q at replay, and write then too.
    # Tails are finite here: in the changed order of pages they are tokens like others.
    built = build(Case([6, 3], [100, 70], table="block", tail_byte=0x34))
    if strided:  # its copy must be recorded as well
        q = torch.empty(built.q.shape[0], built.q.shape[1], 2, built.q.shape[2], dtype=torch.uint8).view(E4M3)[:, :, 0]
        built = replace(built, args=(q.copy_(built.q), *built.args[1:]))
    run(built, executor)  # compiles, so that nothing but the launch is left to record

    def call(stream: Any) -> None:
        cases.submit(built, executor, stream=stream)

    replay = capture(executor, call)
    changed = replace(built, case=replace(built.case, kv_lens=[37, 70]), page_ids=built.page_ids[::-1])
    changed.page_ids[0], changed.page_ids[1] = built.page_ids[0][::-1], built.page_ids[1][::-1]
    for state in (built, changed):
        for row, ids in enumerate(state.page_ids):
            built.kwargs["block_table"][row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        built.kwargs["seqlen_k"].copy_(torch.tensor(state.case.kv_lens, dtype=torch.int32))
        if state is changed:
            built.kwargs["v_descale"].fill_(0.75)
            built.q.copy_((-built.q.float()).to(E4M3))
        built.poison()
        replay()
        for name, tensor in (("out", built.out), ("lse", built.lse)):
            assert not bool((tensor.view(torch.uint8) == 0xA5).all()), f"{name} was not written at replay"
        cases.compare(state, built.out, built.lse, executor)
