"""The native kernel through the public function, on the emulator: one table of cases, each with the one thing that it
can break.

Every case runs once with memory as late as the waits allow; some also with memory at once, and a third with waves
running ahead of each other; in `make test-full` all of them in all modes. Whatever the emulator reports is a failure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func, record, use_options
from op_tests import native_cases as native
from op_tests.cases import MAX_BYTE, Built, Case, build, compare, compare_out, fresh_seed, with_seed
from op_tests.conftest import FULL
from op_tests.native_cases import MODES, Change, Poison, PoisonQuery, run_native

pytestmark = pytest.mark.grows


@dataclass(frozen=True)
class Entry:
    """A case, what is changed in its tensors, and which results the caller asks for and brings."""

    case: Case
    changes: tuple[Change, ...] = ()
    lse: bool = True
    preallocated: bool = True

    def __str__(self) -> str:
        return str(self.case)


def entry(breaks: str, q_lens: Sequence[int], kv_lens: Sequence[int], *changes: Change, **more: Any) -> Entry:
    own = {name: more.pop(name) for name in ("lse", "preallocated") if name in more}
    return Entry(Case(tuple(q_lens), tuple(kv_lens), breaks=breaks, **more), changes, **own)


def around(*multiples: int) -> list[int]:
    """One less, the number itself, one more."""
    return [multiple + off for multiple in multiples for off in (-1, 0, 1)]


def gqa(heads: int, kv_heads: int) -> dict[str, int]:
    return {"heads": heads, "kv_heads": kv_heads}


CSR, ONE_HEAD = {"table": "csr"}, gqa(1, 1)

LENGTHS = [
    entry("keys around 32 and 64", [3] * 6, around(32, 64), **gqa(2, 1)),
    entry("keys around 96 128 and 160", [4] * 9, around(96, 128, 160), **gqa(2, 1)),
    entry("keys around 192 256 and 384", [2] * 9, around(192, 256, 384), **gqa(1, 1), **CSR),
    entry("keys around 512 and 640, rings that wrap", [2] * 6, around(512, 640), **ONE_HEAD),
    entry("rows around 32 with one head, a wave without rows", around(32), [200] * 3, **ONE_HEAD),
    entry("rows around 64 and 128 with two heads", around(64, 128), [130] * 6, **gqa(2, 1), **CSR),
    entry("rows around 256 with one head, a second query tile", around(256), around(256), **ONE_HEAD),
    entry("rows around 512, three query tiles", around(512), [512, 513, 514], **ONE_HEAD),
    entry("as many rows as keys around 128", around(128), around(128), **ONE_HEAD),
    entry("a query tile of which every row sees the same last tile", [2], [258], **ONE_HEAD),
    entry("a mask in each of two tiles", [200], [256], **ONE_HEAD),
    entry("masked tiles only, none seen wholly", [100], [100], **ONE_HEAD),
    entry("the first key alone in a tile", [1, 1], [129, 257], **gqa(2, 2)),
    entry("single tokens", [1] * 5, [1, 2, 127, 128, 129]),
    entry("single tokens by csr", [1] * 5, [64, 65, 191, 192, 193], **CSR),
    entry("one key, many rows", [1, 40], [1, 40], **gqa(8, 1)),
    entry("decode lengths among prefills", [1, 130, 1, 7], [300, 140, 5, 7], **CSR),
    entry("more rows than keys", [300], [129], **ONE_HEAD),
    entry("more rows than keys by one, a blind row", [65, 129], [64, 128], **gqa(2, 1)),
    entry("blind query tiles before seeing ones", [600], [40], **ONE_HEAD),
    entry("a blind tile with four heads", [100, 3], [3, 100], **gqa(4, 1), **CSR),
    entry("a request without keys", [5, 4], [0, 65]),
    entry("a request without keys by csr", [5, 4, 3], [65, 0, 0], **CSR),
    entry("a request without rows", [4, 0, 3], [70, 90, 20]),
    entry("requests without rows and keys", [0, 4, 0, 0], [0, 70, 0, 33], **CSR),
    entry("no request with keys", [3, 40], [0, 0]),
    entry("a cache without pages", [3, 2], [0, 0], spare_pages=0, **CSR),
    entry("a batch of many ragged requests", [1, 17, 33, 2, 64, 5, 9, 31], [40, 17, 100, 300, 64, 129, 250, 95], **CSR),
]

HEADS = [
    *(entry(f"{heads} query heads and one KV head", [70, 9], [90, 200], **gqa(heads, 1)) for heads in (1, 2, 4, 8, 16)),
    entry("as many KV heads as query heads", [33], [160], **gqa(8, 8)),
    entry("three query heads to a KV head of two", [90, 4], [120, 130], **gqa(6, 2)),
    entry("three heads, a row count that they don't divide", [86, 85, 1], [86, 200, 1], **gqa(3, 1)),
    entry("five and seven heads leave rows unused", [52], [150], **gqa(35, 5), **CSR),
    entry("seven heads", [40], [150], **gqa(7, 1)),
    entry("128 heads, two positions a tile", [5, 1], [140, 3], **gqa(128, 1)),
    entry("100 heads, two positions and unused rows", [3], [66], **gqa(100, 1), **CSR),
    entry("200 heads, one position and unused rows", [3], [66], **gqa(200, 1)),
    entry("256 heads, one position a tile", [2], [65], **gqa(256, 1)),
    entry("many KV heads", [2], [130], **gqa(24, 12)),
]

INPUTS = [
    entry("strided q", [5, 40], [70, 129], native.strided_q),
    entry("strided q by csr", [5, 40], [70, 129], native.strided_q, **CSR),
    entry("strided offsets and tables", [5, 4, 3], [70, 129, 0], native.strided_metadata),
    entry("strided offsets and tables by csr", [5, 4, 3], [70, 129, 1], native.strided_metadata, **CSR),
    entry("rows of a wider table", [5, 4, 3], [70, 129, 260], native.wide_table_rows),
    entry("an interleaved cache", [5, 40], [70, 129], interleaved=True),
    entry("one allocation at an offset", [5, 40], [70, 200], native.one_allocation),
    entry("one allocation at an offset by csr", [5, 40], [70, 200], native.one_allocation, **CSR),
    entry("strides of K and V pages apart", [5, 40], [70, 200], native.v_page_gap),
    entry("offsets that start at 3", [5, 40], [70, 129], cu_start=3),
    entry("offsets that start at 300 by csr", [5, 4], [70, 0], cu_start=300, **CSR),
    entry("maxima far above the lengths", [5, 40], [70, 129], native.larger_maxima),
    entry("maxima far above the lengths by csr", [5, 4], [70, 129], native.larger_maxima, **CSR),
    entry("lengths above max_seqlen_k", [5, 40], [100, 100], native.lengths_above_the_maximum),
    entry("an oversized table", [5, 40], [70, 129], native.oversized_table),
    entry("an oversized table by csr", [5, 4], [70, 129], native.oversized_table, **CSR),
    entry("an exact table of odd page counts", [5, 4, 3], [60, 190, 320], native.exact_table),
    entry("an exact table of odd counts by csr", [5, 4, 3], [190, 320, 0], native.exact_table, spare_pages=0, **CSR),
    entry("pages shared by requests", [5, 40], [128, 128], native.shared_pages),
    entry("pages shared by requests by csr", [5, 40], [100, 128], native.shared_pages, **CSR),
    entry("a cache of used pages only", [5, 40], [100, 128], spare_pages=0, **CSR),
]

RESULTS = [
    entry("no LSE asked for", [5, 40], [70, 129], lse=False),
    entry("no LSE asked for by csr", [5, 40], [70, 300], lse=False, **CSR),
    entry("no result brought", [5, 40], [70, 129], preallocated=False),
    entry("no result brought, no LSE", [5, 40], [0, 129], lse=False, preallocated=False),
    entry("blind rows without LSE", [40, 3], [7, 0], lse=False, **CSR),
    entry("more heads than rows, the layout of LSE", [2], [70], **gqa(16, 2)),
]

SCALES = [
    entry("a softmax scale of its own", [5, 40], [70, 129], softmax_scale=0.31),
    entry("a softmax scale below the default", [5, 40], [70, 129], softmax_scale=0.003, **CSR),
    entry("a negative q_descale", [5, 40], [70, 300], descales=(-0.5, 1.5, 2.0)),
    entry("a negative k_descale", [5, 40], [70, 129], descales=(0.5, -1.5, 2.0), **CSR),
    entry("negative q_descale and k_descale", [5, 40], [70, 129], descales=(-0.5, -1.5, 2.0)),
    entry("a negative v_descale", [5, 40], [70, 129], descales=(0.5, 1.5, -2.0)),
    entry("a tiny and a huge descale", [5, 40], [70, 129], descales=(1e-30, 1e30, 2.0)),
    entry("a huge and a tiny descale", [5, 40], [70, 129], descales=(3e38, 1e-38, 2.0), **CSR),
    entry("a subnormal descale", [5, 40], [70, 129], descales=(1e-42, 1e38, 2.0), softmax_scale=1e3),
    entry("tiny descales, a huge softmax scale", [5, 40], [70, 129], descales=(1e-19, 1e-18, 2.0), softmax_scale=1e36),
    entry("huge descales, a tiny softmax scale", [5, 40], [70, 129], descales=(1e18, 1e19, 2.0), softmax_scale=1e-38),
    entry("descales whose product is 0", [5, 40], [70, 129], descales=(0.0, 1.0, 2.0)),
    entry("a huge v_descale", [5, 40], [70, 129], descales=(0.5, 1.5, 1e36)),
    entry("descales that are views", [5, 40], [70, 129], native.views_of_descales),
]

NAN = [
    entry("NaN in K of a tile without mask", [20, 3], [300, 70], Poison("k", 0, 5, 1, 77)),
    entry("NaN in K of the first key", [20], [20], Poison("k", 0, 0, 0, 0)),
    entry("NaN in K of a masked tile", [40, 3], [300, 70], Poison("k", 0, 270, 1, 0), **CSR),
    entry("NaN in K of the last key", [40, 3], [128, 70], Poison("k", 0, 127, 0, 127)),
    entry("NaN in all of K of one token", [40], [200], Poison("k", 0, 190, 0), **ONE_HEAD),
    entry("NaN in V of a tile without mask", [20, 3], [300, 70], Poison("v", 0, 5, 1, 77)),
    entry("NaN in V of a masked tile", [40, 3], [300, 70], Poison("v", 0, 270, 1, 0)),
    entry("NaN in V of the last key", [40, 3], [257, 70], Poison("v", 0, 256, 0, 127), **CSR),
    entry("negative NaN in V of a masked tile", [40, 3], [300, 70], Poison("v", 0, 280, 0, 33, 0xFF)),
    entry("NaN in all of V of one token", [40], [200], Poison("v", 0, 190, 0), **ONE_HEAD),
    entry("NaN in V of the first of two masked tiles", [200], [256], Poison("v", 0, 90, 0, 5), **ONE_HEAD),
    entry("NaN in V of the second of two masked tiles", [200], [256], Poison("v", 0, 128, 0, 64), **ONE_HEAD),
    entry(
        "NaN in K and V of different tokens",
        [64],
        [190],
        Poison("k", 0, 150, 0, 3),
        Poison("v", 0, 140, 0, 9),
        Poison("v", 0, 20, 0, 8, 0xFF),
        **ONE_HEAD,
    ),
    entry("NaN in V before a rescale of later tiles", [4], [600], Poison("v", 0, 3, 0, 1), descales=(4.0, 1.5, 2.0)),
    entry("NaN in one query of one head", [20, 3], [300, 70], PoisonQuery(7, 2, 100)),
    entry("NaN in V of a shared page", [9, 3], [128, 128], native.shared_pages, Poison("v", 0, 100, 0, 1)),
]

TAILS = [
    *(
        entry(
            f"a tail of {byte:#04x}{' by csr' if table else ''}",
            [3] * 8,
            [1, 15, 16, 17, 63, 64, 65, 130],
            tail_byte=byte,
            **gqa(2, 1),
            **table,
        )
        for byte, table in ((0x7F, {}), (0x7F, CSR), (0xFF, CSR), (MAX_BYTE, {}), (MAX_BYTE, CSR), (0xFE, {}))
    ),
    entry("a tail of NaN behind large unseen tokens", [40, 3], [129, 65], native.huge_unseen_tokens, **gqa(2, 1)),
]

ENTRIES = [*LENGTHS, *HEADS, *INPUTS, *RESULTS, *SCALES, *NAN, *TAILS]


def seeded_entries() -> list[Any]:
    """(entry, mode): all in "latest", every third skewed, every sixth at once; in full all in all modes."""
    picked = []
    for number, item in enumerate(ENTRIES):
        modes = ["latest", *["skewed"] * (number % 3 == 0), *["earliest"] * (number % 6 == 1)]
        picked += [pytest.param(item, mode, id=f"{item}-{mode}") for mode in (MODES if FULL else modes)]
    return picked


def test_the_table_is_what_it_says() -> None:
    assert len(ENTRIES) >= 60
    texts = [item.case.breaks for item in ENTRIES]
    assert all(texts)
    assert len(set(texts)) == len(texts), "two cases that break the same thing"


@pytest.mark.parametrize(("item", "mode"), seeded_entries())
def test_case(item: Entry, mode: str) -> None:
    built = build(with_seed(item.case, fresh_seed() & 0x7FFFFFFF))
    for change in item.changes:
        change(built)
    brought = {} if item.preallocated else {"out": None, "lse": None}
    out, lse, _ = run_native(built, mode, return_lse=item.lse, **brought)
    check_result(built, out, lse)
    check_rows_of_nan(item, built, out, lse)


def check_result(built: Built, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Results against float64; what was not asked for, and what lies around, unwritten."""
    if lse is not None:
        compare(built, out, lse, "emulator")
        return
    expected, _ = built.reference()
    rows = slice(built.cu[0], built.cu[-1])
    compare_out(out[rows], expected[rows], "emulator")
    built.check_canaries()
    assert bool((built.lse.view(torch.uint8) == 0xA5).all()), "LSE was written without being asked for"


def check_rows_of_nan(item: Entry, built: Built, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Where a used token is NaN: every row that sees it is NaN in the places it must be; K's NaN reaches LSE, V's does
    not."""
    case = built.case
    group = case.heads // case.kv_heads
    for poison in item.changes:
        if not isinstance(poison, Poison):
            continue
        seeing, others = native.expect_rows_of_nan(case, built, poison.request, poison.index)
        heads = slice(poison.head * group, (poison.head + 1) * group)
        dims = slice(None) if poison.cache == "k" or poison.dim is None else slice(poison.dim, poison.dim + 1)
        assert seeing
        assert bool(out[seeing, heads, dims].isnan().all())
        assert lse is not None
        if poison.cache == "k":
            assert bool(lse[heads, seeing].isnan().all())
        if len([change for change in item.changes if change is not native.shared_pages]) == 1:
            if native.shared_pages not in item.changes:
                assert not bool(out[others].isnan().any())
                assert not bool(lse[:, others].isnan().any())
            if poison.cache == "v":
                assert not bool(lse[:, seeing].isnan().any())
                if poison.dim is not None:
                    assert int(out[seeing, heads].isnan().sum()) == len(seeing) * group


# -- what no case of the table can say --------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["block", "csr"])
@pytest.mark.parametrize("kind", ["no rows", "no requests"])
def test_a_call_without_rows_launches_nothing(kind: str, table: str) -> None:
    lens: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 0), (70, 0)) if kind == "no rows" else ((), ())
    built = build(Case(*lens, table=table, cu_start=2, seed=fresh_seed() & 0xFFFF))
    with use_options(executor="emulator"), record() as calls:
        flydsl_flash_attn_paged_prefill_func(*built.args, **built.kwargs, out=built.out, lse=built.lse, return_lse=True)
    assert calls[0].plan.path == "paged"
    assert calls[0].launches == []
    built.check_canaries()


@pytest.mark.parametrize(("heads", "limit"), [(300, "256"), (257, "256")])
def test_more_heads_than_a_tile_has_rows_are_refused(heads: int, limit: str) -> None:
    built = build(Case([2], [3], heads=heads, kv_heads=1))
    with use_options(executor="emulator"), record() as calls, pytest.raises(NotImplementedError, match=limit) as caught:
        flydsl_flash_attn_paged_prefill_func(*built.args, **built.kwargs, out=built.out, lse=built.lse, return_lse=True)
    assert str(heads) in str(caught.value)
    assert "q" in str(caught.value).split(":")[0]
    assert calls[0].launches == []
    assert all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards), "a refused call wrote"


@pytest.mark.parametrize("mode", list(MODES) if FULL else ["latest", "earliest", "skewed"])
def test_results_do_not_depend_on_timing(mode: str) -> None:
    # Bit for bit: the order of memory and waves may change no result.
    built = build(Case([40, 3], [300, 70], heads=4, kv_heads=1, seed=7))
    out, lse, _ = run_native(built)
    first, first_lse = out.clone(), lse.clone()  # type: ignore[union-attr]
    built.poison()
    out, lse, _ = run_native(built, mode)
    assert torch.equal(out.view(torch.int16), first.view(torch.int16))
    assert torch.equal(lse.view(torch.int32), first_lse.view(torch.int32))  # type: ignore[union-attr]


def test_the_grid_is_the_order_of_traits() -> None:
    # KV heads fastest, then requests, then query tiles as many as max_seqlen_q allows: test_fmha_traits.py has what
    # follows for the XCDs.
    built = build(Case([3, 90, 0], [70, 300, 9], heads=12, kv_heads=3, seed=3))
    out, lse, launch = run_native(built)
    assert launch.grid == (3, 3, 2)
    assert launch.block == (512, 1, 1)
    compare(built, out, lse, "emulator")  # type: ignore[arg-type]


def test_both_tables_give_the_same_bits() -> None:
    results = []
    for table in ("block", "csr"):
        built = build(Case([40, 3, 9], [300, 70, 0], heads=4, kv_heads=2, table=table, seed=11))
        out, lse, _ = run_native(built)
        results.append((out.clone(), lse.clone()))  # type: ignore[union-attr]
    assert torch.equal(results[0][0].view(torch.int16), results[1][0].view(torch.int16))
    assert torch.equal(results[0][1].view(torch.int32), results[1][1].view(torch.int32))


def test_lse_does_not_change_the_output() -> None:
    built = build(Case([40, 3], [300, 70], heads=4, kv_heads=2, seed=12))
    first = run_native(built).out.clone()
    built.poison()
    assert torch.equal(run_native(built, return_lse=False).out.view(torch.int16), first.view(torch.int16))


def test_softmax_sum_has_no_padding() -> None:
    # Q = 0 and V = 1: whatever a tail adds to the sum would show at once.
    lens = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]
    for tail in (0x7F, MAX_BYTE):
        case = Case([1] * len(lens), lens, heads=2, kv_heads=1, descales=(1.0, 1.0, 1.0), tail_byte=tail)
        built = build(case)
        built.q.view(torch.uint8).zero_()
        v = built.args[2].view(torch.uint8)
        for request, length in enumerate(lens):
            for index in range(length):
                native.token(built, "v", request, index).fill_(0x38)
        assert int((v == 0x38).sum()) == sum(lens) * case.dim_v
        out, lse, _ = run_native(built)
        assert bool((out == 1).all())
        expected = torch.tensor(lens, dtype=torch.float64).log()
        assert lse is not None
        assert bool(((lse.double() - expected).abs() <= 2e-6 * expected.clamp(min=1.0)).all())
        assert math.isfinite(float(lse.sum()))


@pytest.mark.parametrize("power", [-130, 118])
def test_v_descale_is_exactly_linear(power: int) -> None:
    # Large V and a descale so small that its product with the inverse sum would have lost most of its bits: a power of
    # two changes no bit but the exponent's.
    results = []
    for scale in (1.0, 2.0**power):
        built = build(Case([5, 40], [70, 300], heads=2, kv_heads=1, descales=(0.5, 1.5, scale), seed=31))
        built.args[2].view(torch.uint8).bitwise_and_(0x07).bitwise_or_(0x78).clamp_(max=MAX_BYTE)
        results.append(run_native(built).out.double())
    plain = results[0] * 2.0**power
    assert float(plain.abs().min()) >= 2.0**-126
    assert torch.equal(results[1], plain)


def test_heads_read_their_own_kv_head() -> None:
    # V constant for each KV head: query head h must read KV head h // (Hq / Hkv).
    case = Case([3], [130], heads=12, kv_heads=4, descales=(1.0, 1.0, 1.0))
    built = build(replace(case, seed=fresh_seed() & 0xFFFF))
    ones = torch.tensor([1.0, 2.0, -3.0, 0.5]).to(torch.float8_e4m3fn).view(torch.uint8)
    for index in range(130):
        native.token(built, "v", 0, index)[...] = ones[:, None]
    out, _, _ = run_native(built)
    expected = torch.tensor([1.0, 2.0, -3.0, 0.5]).repeat_interleave(3)
    assert bool(((out.float() - expected[:, None]).abs() <= 0.04 * expected[:, None].abs()).all())
