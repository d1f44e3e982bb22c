"""From the caches of vLLM and SGLang to the public function, on values: each cache is written the way that its engine
writes it, at byte offsets, and the result is held against attention over the tokens themselves."""

from __future__ import annotations

import ast
import inspect
import math
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, record, use_options
from aiter_paged_fp8.integrations.sglang import nhd_arguments, pages_from_slots, vectorized_5d_arguments
from aiter_paged_fp8.integrations.vllm import paged_prefill_arguments, shuffle_views
from op_tests.cases import E4M3, NAN_BYTE, assert_ran, compare_lse, compare_out, fp8, fresh_seed

Q_LENS, KV_LENS = (3, 1, 5), (70, 1, 150)
HEADS, KV_HEADS, DIM = 4, 2, 128
SCALES = {"q_scale": 0.5, "k_scale": 1.5, "v_scale": 2.0}


class Tokens:
    """Queries, keys and values of a few requests as plain tensors, and what attention over them gives."""

    def __init__(self, dim_v: int = DIM) -> None:
        self.generator = torch.Generator().manual_seed(fresh_seed())
        self.q = fp8((sum(Q_LENS), HEADS, DIM), self.generator)
        self.k = [fp8((length, KV_HEADS, DIM), self.generator) for length in KV_LENS]
        self.v = [fp8((length, KV_HEADS, dim_v), self.generator) for length in KV_LENS]
        self.cu = torch.tensor([0, *accumulate(Q_LENS)], dtype=torch.int32)
        self.scales = {name: torch.tensor(number) for name, number in SCALES.items()}

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention in float64, request by request, causal with the diagonal at the bottom right."""
        outs, lses = [], []
        scale = SCALES["q_scale"] * SCALES["k_scale"] * DIM**-0.5
        for q, k, v in zip(self.q.split(Q_LENS), self.k, self.v, strict=True):
            keys, vals = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
            rows, columns = scores.shape[1:]
            hidden = torch.arange(columns) > torch.arange(rows)[:, None] + columns - rows
            scores = scores.masked_fill(hidden, -math.inf)
            lses.append(scores.logsumexp(-1))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vals) * SCALES["v_scale"])
        return torch.cat(outs), torch.cat(lses, 1)

    def blocks(self, size: int, spare: int = 2) -> tuple[list[list[int]], int]:
        """Scattered pages of each request, and how many there are in all."""
        counts = [-(-length // size) for length in KV_LENS]
        total = sum(counts) + spare
        order = torch.randperm(total, generator=self.generator).tolist()
        stops = list(accumulate(counts))
        return [order[stop - count : stop] for count, stop in zip(counts, stops, strict=True)], total


def check(tokens: Tokens, arguments: dict[str, Any], executor: str) -> torch.Tensor:
    with use_options(executor=executor, check_metadata=True), record() as calls:
        out, lse = flydsl_flash_attn_paged_prefill_func(**arguments, return_lse=True)
    assert_ran(calls, executor)
    expected, expected_lse = tokens.expected()
    compare_out(out, expected, executor)
    compare_lse(lse, expected_lse, executor)
    return out


def vllm_cache(tokens: Tokens, size: int, kv_first: bool) -> tuple[torch.Tensor, list[list[int]]]:
    """vLLM's allocation of one layer, written by the SHUFFLE writer's arithmetic, NaN wherever it writes nothing.

    A block of ``size`` tokens begins at block * stride. In it, element d of a key of head h at place t lies at
    h * D * size + d / 16 * size * 16 + t * 16 + d % 16, that of a value at h * D * size + t / 16 * D * 16 + d * 16 +
    t % 16.
    """
    pages, total = tokens.blocks(size)
    shape = (2, total, size, KV_HEADS, DIM) if kv_first else (total, 2, size, KV_HEADS, DIM)
    cache = torch.full(shape, NAN_BYTE, dtype=torch.uint8)
    flat = cache.view(-1)
    block = size * KV_HEADS * DIM
    stride, v_start = (block, total * block) if kv_first else (2 * block, block)
    for ids, keys, vals in zip(pages, tokens.k, tokens.v, strict=True):
        place = torch.arange(keys.shape[0])[:, None, None]
        start = torch.tensor(ids)[place // size] * stride
        t, h, d = place % size, torch.arange(KV_HEADS)[None, :, None], torch.arange(DIM)
        head = start + h * DIM * size
        flat[head + d // 16 * size * 16 + t * 16 + d % 16] = keys.view(torch.uint8)
        flat[v_start + head + t // 16 * DIM * 16 + d * 16 + t % 16] = vals.view(torch.uint8)
    return cache, pages


@pytest.mark.parametrize("kv_first", [True, False], ids=["kv-blocks", "blocks-kv"])
@pytest.mark.parametrize(("executor", "size"), [("torch", 16), ("torch", 64), ("emulator", 64)])
def test_vllm_shuffle_cache(executor: str, size: int, kv_first: bool) -> None:
    tokens = Tokens()
    cache, pages = vllm_cache(tokens, size, kv_first)
    key_cache, value_cache = cache.unbind(0 if kv_first else 1)
    k, v = shuffle_views(key_cache, value_cache)
    assert (k.shape, v.shape) == (
        (cache.shape[1 - (not kv_first)], KV_HEADS, DIM // 16, size, 16),
        (cache.shape[1 - (not kv_first)], KV_HEADS, size // 16, DIM, 16),
    )
    assert k.data_ptr() == cache.data_ptr(), "a view, as is V at its offset in the same allocation"
    assert v.data_ptr() - k.data_ptr() == value_cache.data_ptr() - key_cache.data_ptr() > 0
    # A table has room for the longest context of the server, and what a request does not use holds anything.
    table = torch.full((len(pages) + 2, 20), 10**9, dtype=torch.int32)
    for row, ids in enumerate(pages):
        table[row + 1, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    out = torch.empty(sum(Q_LENS), HEADS, DIM, dtype=torch.bfloat16)
    arguments = paged_prefill_arguments(
        tokens.q,
        key_cache,
        value_cache,
        query_start_loc=tokens.cu,
        max_query_len=max(Q_LENS),
        block_table=table[1:-1],
        seq_lens=torch.tensor(KV_LENS, dtype=torch.int32),
        max_seq_len=max(KV_LENS),
        scale=DIM**-0.5,
        output=out,
        **tokens.scales,
    )
    assert check(tokens, arguments, executor) is out


def test_vllm_caches_that_are_no_shuffle_cache_are_refused() -> None:
    good = torch.zeros(4, 64, 2, 128, dtype=torch.uint8)
    for k, v, kind, message in (
        (good.view(E4M3).float(), good, TypeError, "key_cache: got torch.float32; accepted: torch.float8_e4m3fn"),
        (good, None, TypeError, "value_cache: got NoneType; accepted: a tensor"),
        (good[0], good, ValueError, r"key_cache: got shape \[64, 2, 128\]; accepted: \[blocks, block_size, Hkv, D\]"),
        (good[:, :24], good, ValueError, r"key_cache: got block_size 24 .*; accepted: multiples of 16"),
        (good, good[..., :120], ValueError, r"value_cache: got D 120 .*; accepted: multiples of 16"),
        (good, good[:, :, :, ::2], ValueError, r"value_cache: got stride 2 in dim 3 .*; accepted: 1 there"),
        (good[:, :32].transpose(1, 2), good, ValueError, r"key_cache: got block_size 2 "),
    ):
        with pytest.raises(kind, match=message):
            shuffle_views(k, v)


def sglang_slots(tokens: Tokens, size: int) -> tuple[list[list[int]], list[list[int]], int]:
    """Pages, and the token slots of each request in SGLang's page-aligned pool."""
    pages, total = tokens.blocks(size)
    slots = [
        [ids[place // size] * size + place % size for place in range(length)]
        for ids, length in zip(pages, KV_LENS, strict=True)
    ]
    return pages, slots, total


def token_csr(slots: list[list[int]], start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's CSR over token slots, in a buffer that is longer than used and holds anything behind."""
    flat = [7] * start + [slot for row in slots for slot in row]
    indptr = torch.tensor(list(accumulate(map(len, slots), initial=start)), dtype=torch.int32)
    return indptr, torch.tensor([*flat, *[10**9] * 50], dtype=torch.int32)


@pytest.mark.parametrize("executor", ["torch"])  # no native kernel for slots yet
@pytest.mark.parametrize("q_form", ["by-head", "flat"])
@pytest.mark.parametrize("size", [1, 64])
def test_sglang_nhd_pool(executor: str, size: int, q_form: str) -> None:
    """Token ids and the 3-D pool, also where the server's pages have 64 tokens."""
    tokens = Tokens()
    _, slots, total = sglang_slots(tokens, size)
    pools = []
    for source in (tokens.k, tokens.v):
        pool = torch.full((total * size, KV_HEADS * DIM), NAN_BYTE, dtype=torch.uint8)
        for rows, values in zip(slots, source, strict=True):
            pool[rows] = values.view(torch.uint8).flatten(1)
        pools.append(pool.view(-1, KV_HEADS, DIM))
    indptr, indices = token_csr(slots)
    arguments = nhd_arguments(
        tokens.q if q_form == "by-head" else tokens.q.flatten(1),
        *pools,
        qo_indptr=tokens.cu,
        kv_indptr=indptr,
        kv_indices=indices,
        max_q_len=max(Q_LENS),
        max_kv_len=max(KV_LENS),
        **tokens.scales,
    )
    assert arguments["k"].data_ptr() == pools[0].data_ptr()
    check(tokens, arguments, executor)


@pytest.mark.parametrize(("executor", "size"), [("torch", 16), ("torch", 64), ("emulator", 64)])
def test_sglang_vectorized_5d_pool(executor: str, size: int) -> None:
    """The pool as [pages, ...] tensors of bytes, written by coordinates; pages from SGLang's own CSR over slots."""
    tokens = Tokens()
    pages, slots, total = sglang_slots(tokens, size)
    k_pool = torch.full((total, KV_HEADS, DIM // 16, size, 16), NAN_BYTE, dtype=torch.uint8)
    v_pool = torch.full((total, KV_HEADS, size // 16, DIM, 16), NAN_BYTE, dtype=torch.uint8)
    for rows, keys, vals in zip(slots, tokens.k, tokens.v, strict=True):
        page, place = torch.tensor(rows) // size, torch.tensor(rows) % size
        k_pool[page, :, :, place] = keys.view(torch.uint8).view(-1, KV_HEADS, DIM // 16, 16)
        v_pool[page, :, place // 16, :, place % 16] = vals.view(torch.uint8)
    indptr, page_ids, last = pages_from_slots(*token_csr(slots, start=3), size)
    assert indptr.tolist() == list(accumulate(map(len, pages), initial=0))
    assert page_ids[: indptr[-1]].tolist() == [page for ids in pages for page in ids]
    assert last.tolist() == [(length - 1) % size + 1 for length in KV_LENS]
    arguments = vectorized_5d_arguments(
        tokens.q.flatten(1),
        k_pool,
        v_pool,
        qo_indptr=tokens.cu,
        kv_indptr=indptr,
        kv_page_indices=page_ids,
        kv_last_page_lens=last,
        max_q_len=max(Q_LENS),
        max_kv_len=max(KV_LENS),
        scaling=DIM**-0.5,
        **tokens.scales,
    )
    assert arguments["v"].data_ptr() == v_pool.data_ptr()
    check(tokens, arguments, executor)


@pytest.mark.parametrize("size", [1, 16, 64, 1024])
def test_pages_from_slots_of_any_lengths(size: int) -> None:
    """Empty requests, full pages and none at all, against lists; the ids fit in the buffer that is allocated."""
    generator = torch.Generator().manual_seed(fresh_seed())
    for batch in (0, 1, 2, 7):
        lengths = torch.randint(0, 3 * size + 2, (batch,), generator=generator).tolist()
        lengths = [length if index % 3 else length // size * size for index, length in enumerate(lengths)]
        pages = [torch.randint(0, 99, (-(-length // size),), generator=generator).tolist() for length in lengths]
        slots = [
            [ids[place // size] * size + place % size for place in range(length)]
            for ids, length in zip(pages, lengths, strict=True)
        ]
        flat = torch.tensor([slot for row in slots for slot in row], dtype=torch.int32)
        cu = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
        indptr, ids, last = pages_from_slots(cu, flat, size)
        assert (indptr.dtype, ids.dtype, last.dtype) == (torch.int32,) * 3
        assert indptr.tolist() == list(accumulate(map(len, pages), initial=0))
        assert ids[: indptr[-1]].tolist() == [page for row in pages for page in row]
        assert ids.shape[0] >= int(indptr[-1])
        assert last.tolist() == [(length - 1) % size + 1 if length else 0 for length in lengths]


def test_sglang_arguments_that_do_not_fit_are_refused() -> None:
    slots, pages = torch.zeros(8, 2, 128, dtype=torch.uint8), torch.zeros(4, 2, 8, 64, 16, dtype=torch.uint8)
    one, i32 = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    rest: dict[str, Any] = {"qo_indptr": i32, "kv_indptr": i32, "max_q_len": 1, "max_kv_len": 1}
    rest |= {"q_scale": one, "k_scale": one, "v_scale": one}
    paged: dict[str, Any] = {**rest, "kv_page_indices": i32, "kv_last_page_lens": i32}
    rest["kv_indices"] = i32
    q = torch.zeros(3, 512).to(E4M3)
    for message, call in (
        (r"k_buffer: got shape .*; accepted: 3 dims", lambda: nhd_arguments(q, pages, slots, **rest)),
        (r"v_buffer: got shape .*; accepted: 5 dims", lambda: vectorized_5d_arguments(q, pages, slots, **paged)),
        (r"q: got shape \[3, 500\]; accepted", lambda: nhd_arguments(q[:, :500], slots, slots, **rest)),
        (r"v_buffer: got torch\.float32", lambda: nhd_arguments(q, slots, slots.float(), **rest)),
        (r"page_size: got 0; accepted", lambda: pages_from_slots(i32, i32, 0)),
        (r"page_size: got True; accepted", lambda: pages_from_slots(i32, i32, True)),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_no_device_memory_is_read() -> None:
    """Everything works on meta tensors, which hold nothing that could be read."""
    cache = torch.empty(2, 9, 64, 2, 128, dtype=torch.uint8, device="meta")
    assert shuffle_views(*cache.unbind(0))[1].shape == (9, 2, 4, 128, 16)
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    indptr, ids, last = pages_from_slots(offsets, torch.empty(640, dtype=torch.int32, device="meta"), 64)
    assert (indptr.shape[0], ids.shape[0], last.shape[0]) == (4, 13, 3)


def test_the_call_sites_in_the_docs_name_arguments_that_exist() -> None:
    """Engines are not here to run them; their calls of this package can be bound."""
    text = (Path(__file__).parents[1] / "docs" / "integrations.md").read_text()
    functions = (nhd_arguments, vectorized_5d_arguments, pages_from_slots, paged_prefill_arguments)
    signatures = {function.__name__: inspect.signature(function) for function in functions}
    seen = set()
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        tree = ast.parse(block)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        names = {call.func.id: [word.arg for word in call.keywords if word.arg] for call in calls}
        for call in calls:
            if call.func.id in signatures:
                seen.add(call.func.id)
                words = [word.arg for word in call.keywords if word.arg]
                if len(words) < len(call.keywords):  # **common
                    words += names["dict"]
                signatures[call.func.id].bind(*call.args, **dict.fromkeys(words))
    assert seen == set(signatures)
