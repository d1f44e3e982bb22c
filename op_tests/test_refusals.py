"""Every refusal of the contract, in one table: the argument bent, the type of the exception, and words of its message.

Each row runs through the public function on CPU tensors, through `plan` on meta tensors, and through the batch
dispatcher where that has the argument. A message names the argument, what came and what is accepted; outputs, and the
memory around them, keep their poison.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from aiter_paged_fp8 import (
    flydsl_flash_attn_batch_prefill_func,
    flydsl_flash_attn_paged_prefill_func,
    plan,
    record,
    use_executor,
)
from op_tests.cases import E4M3, EXECUTORS, Built, Case, as_meta, build, named

Args = dict[str, Any]
I32, F32, BF16 = torch.int32, torch.float32, torch.bfloat16
POISON = 0xA5
#: D differs from Dv, so that a check of the wrong one can't pass; a page edge, and a request without queries and keys.
VECTORIZED = Case((2, 0, 3), (17, 0, 49), dim=192, dim_v=128, page=16)
BASES = {
    "block": VECTORIZED,
    "csr": replace(VECTORIZED, table="csr"),
    "slots": replace(VECTORIZED, layout="slots", page=1, table="csr"),
    "linear": replace(VECTORIZED, layout="linear", page=4, table="csr"),
}


class Change(dict[str, Any]):
    """Several arguments at once, where bending one alone does not show the fault."""


@dataclass(frozen=True)
class Elsewhere:
    """A tensor that is to lie on another device than the rest of the call."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Row:
    """One refusal.

    ``bend`` takes the valid arguments and returns the argument's bad value, or a `Change`. ``batch`` says what the
    batch dispatcher does: "refuses" like the others, "none" where it leaves the call to its caller, "" where it does
    not have the argument.
    """

    name: str
    came: str
    bend: Callable[[Args], Any]
    error: type[Exception]
    words: tuple[str, ...]
    base: str = "block"
    batch: str = "refuses"

    def __str__(self) -> str:
        return f"{self.name}-{self.came}".replace(" ", "_")


class Index:
    """Something with ``__index__`` that is no int."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


def give(value: Any) -> Callable[[Args], Any]:
    return lambda _: value


def change(**values: Any) -> Callable[[Args], Any]:
    return lambda _: Change(values)


def zeros(*shape: int, dtype: torch.dtype = E4M3) -> Callable[[Args], Any]:
    return lambda _: torch.zeros(shape, dtype=torch.uint8 if dtype is E4M3 else dtype).view(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((math.prod(shape) * dtype.itemsize,), POISON, dtype=torch.uint8).view(dtype).view(shape)


def systematic() -> Iterator[Row]:
    """What every tensor argument refuses: other types, other dtypes, another device, another rank, gradient."""
    fp8 = (
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.uint8,
        torch.int8,
        BF16,
        torch.float16,
        F32,
    )
    ints = (torch.int64, torch.int16, torch.uint8, torch.bool, F32)
    scales = (torch.float64, torch.float16, BF16, E4M3, torch.int32)
    outs = (torch.float16, F32, torch.float64, E4M3)
    lses = (BF16, torch.float16, torch.float64)
    arguments: list[tuple[str, str, torch.dtype, tuple[torch.dtype, ...]]] = [
        *((name, "block", E4M3, fp8) for name in ("q", "k", "v")),
        *((name, "block", I32, ints) for name in ("cu_seqlens_q", "block_table", "seqlen_k")),
        *((name, "csr", I32, ints) for name in ("kv_indptr", "kv_page_indices", "kv_last_page_lens")),
        *((name, "block", F32, scales) for name in ("q_descale", "k_descale", "v_descale")),
        ("out", "block", BF16, outs),
        ("lse", "block", F32, lses),
    ]
    for name, base, dtype, others in arguments:
        has = "" if name == "lse" else "refuses"
        cache = name in ("q", "k", "v")
        for other in others:
            # The dispatcher leaves what is not fp8 to its caller.
            batch = "none" if cache else has

            def cast(args: Args, name: str = name, other: torch.dtype = other) -> torch.Tensor:
                shape = args[name].shape
                return poisoned(*shape, dtype=other) if name in ("out", "lse") else torch.ones(shape).to(other)

            yield Row(name, str(other).removeprefix("torch."), cast, TypeError, (str(other), str(dtype)), base, batch)
        yield Row(name, "a list", give([1, 2]), TypeError, ("list", "a tensor"), base, has)
        # A numpy array has a dtype, and it isn't fp8.
        array = give(np.zeros(3, np.float32))
        yield Row(name, "an ndarray", array, TypeError, ("ndarray", "a tensor"), base, "none" if cache else has)
        # A pool of slots without last-page lengths: there the dispatcher looks at the page size first.
        yield Row(name, "a string", give("fp8"), TypeError, ("str", "a tensor"), "slots" if cache else base, has)
        if dtype is not I32:
            yield Row(
                name, "requires grad", grad(name), NotImplementedError, ("requires_grad", "no backward"), base, has
            )
        if name in ("q", "k", "v", "cu_seqlens_q"):
            yield Row(name, "None", give(None), TypeError, ("NoneType", "a tensor"), "slots" if cache else base, has)
        elif name.endswith("descale"):
            yield Row(name, "None", give(None), TypeError, ("NoneType", "a tensor"), base, "none")
        if name != "q":  # q says where the call is, so that a lone q elsewhere shows in the tensor that is checked next
            yield Row(name, "elsewhere", elsewhere(name), ValueError, ("meta", "cpu", "device"), base, has)
    yield Row("k", "q elsewhere", elsewhere("q"), ValueError, ("meta", "cpu", "device"))


def grad(name: str) -> Callable[[Args], Any]:
    return lambda args: args[name].detach().requires_grad_()


def elsewhere(name: str) -> Callable[[Args], Any]:
    return lambda args: Change({name: Elsewhere(args[name])})


def queries() -> Iterator[Row]:
    ranks = {"1-D": (960,), "2-D": (5, 768), "4-D": (1, 5, 4, 192), "no heads": (5, 0, 192), "no dims": (5, 4, 0)}
    for came, shape in ranks.items():
        yield Row("q", came, zeros(*shape), ValueError, (str(list(shape)), "[total_q, Hq, D]"))
    yield Row(
        "k", "heads that do not divide q's", change(q=zeros(5, 3, 192)({})), ValueError, ("2 KV heads", "q's 3 heads")
    )
    yield Row("k", "head dim other than q's", change(q=zeros(5, 4, 128)({})), ValueError, ("192", "q's head dim, 128"))
    for came, shape in {"0-d": (), "2-D": (2, 2), "empty": (0,)}.items():
        yield Row("cu_seqlens_q", came, zeros(*shape, dtype=I32), ValueError, (str(list(shape)), "[B + 1]"))
    tokens = "1-D with at least one"
    yield Row("cu_seqlens_q", "a column", lambda a: a["cu_seqlens_q"][:, None], ValueError, ("[4, 1]", tokens))
    for name in ("max_seqlen_q", "max_seqlen_k"):
        wrong: dict[str, Any] = {
            "None": None,
            "True": True,
            "False": False,
            "a numpy bool": np.True_,
            "a float": 3.0,
            "a numpy float": np.float64(49),
            "a fraction": Fraction(49, 1),
            "a complex": 49 + 0j,
            "a string": "49",
            "a 0-d tensor": torch.tensor(49),
            "a tensor of one": torch.tensor([49], dtype=I32),
            "a list": [49],
            "an array of one": np.array([49]),
            "an array of floats": np.array(49.0),
        }
        for came, value in wrong.items():
            yield Row(name, came, give(value), TypeError, ("an integer",))
        for came, value in {"-1": -1, "numpy -1": np.int64(-1), "an index of -1": Index(-1)}.items():
            yield Row(name, came, give(value), ValueError, ("-1", "an integer >= 0"))


def caches() -> Iterator[Row]:
    """Valid ones: K [9, 2, 12, 16, 16], V [9, 2, 1, 128, 16]; slots [69, 2, 192 or 128]; [21, 4, 2, 192 or 128]."""
    for came, shape in {"1-D": (64,), "2-D": (9, 384), "6-D": (9, 2, 12, 16, 16, 1)}.items():
        words = (str(list(shape)), "[slots, Hkv, D]", "[pages, page, Hkv, D]", "[pages, Hkv, D/16, page, 16]")
        yield Row("k", came, zeros(*shape), ValueError, words)
    yield Row(
        "k", "packs of 8", zeros(9, 2, 24, 16, 8), ValueError, ("[9, 2, 24, 16, 8]", "16 fp8 elements", "vectorized")
    )
    yield Row("k", "packs of 32", zeros(9, 2, 6, 16, 32), ValueError, ("[9, 2, 6, 16, 32]", "16 fp8 elements"))
    yield Row("k", "pages of 8", zeros(9, 2, 12, 8, 16), ValueError, ("8 tokens", "multiples of 16"))
    yield Row("k", "pages of 24", zeros(9, 2, 12, 24, 16), ValueError, ("24 tokens", "multiples of 16"))
    yield Row("k", "another head dim", zeros(9, 2, 8, 16, 16), ValueError, ("128", "q's head dim, 192"))
    for heads in (0, 3):
        both = change(k=zeros(9, heads, 12, 16, 16)({}), v=zeros(9, heads, 1, 128, 16)({}))
        yield Row("k", f"{heads} KV heads", both, ValueError, (f"{heads} KV heads", "q's 4 heads"))
    for came, shape, word in (
        ("2-D", (9, 256), "5 dims"),
        ("slots beside vectorized K", (9, 2, 128), "5 dims"),
        ("linear beside vectorized K", (9, 16, 2, 128), "5 dims"),
        ("a page fewer", (8, 2, 1, 128, 16), "9 pages"),
        ("a page more", (10, 2, 1, 128, 16), "9 pages"),
        ("one head", (9, 1, 1, 128, 16), "2 heads"),
        ("pages of 32", (9, 2, 2, 128, 16), "16 tokens"),
        ("packs of 8", (9, 2, 2, 128, 8), "k's layout"),
        ("no dims", (9, 2, 1, 0, 16), "at least 1"),
        ("the layout of K", (9, 2, 8, 16, 16), "k's layout"),
    ):
        yield Row("v", came, zeros(*shape), ValueError, (str(list(shape)), word))
    for base, came, shape, word in (
        ("slots", "a slot fewer", (68, 2, 128), "69 pages"),
        ("slots", "one head of slots", (69, 1, 128), "2 heads"),
        ("slots", "pages beside slots of K", (69, 1, 2, 128), "3 dims"),
        ("linear", "pages of 2", (21, 2, 2, 128), "4 tokens"),
        ("linear", "one head of pages", (21, 4, 1, 128), "2 heads"),
        ("linear", "slots beside pages of K", (21, 2, 128), "4 dims"),
        ("linear", "a linear page fewer", (20, 4, 2, 128), "21 pages"),
    ):
        yield Row("v", came, zeros(*shape), ValueError, (str(list(shape)), word), base)
    yield Row("k", "another head dim of slots", zeros(69, 2, 128), ValueError, ("128", "q's head dim, 192"), "slots")
    yield Row(
        "k", "another head dim of pages", zeros(21, 4, 2, 128), ValueError, ("128", "q's head dim, 192"), "linear"
    )
    empty = change(k=zeros(21, 0, 2, 192)({}), v=zeros(21, 0, 2, 128)({}))
    yield Row("v", "pages of no token", empty, ValueError, ("at least 1 token",), "linear")
    yield from strides()


def strides() -> Iterator[Row]:
    """Caches that would have to be copied."""
    for name in ("k", "v"):
        dim = {"k": 192, "v": 128}[name]
        for base, came, bend, words in (
            (
                "slots",
                "rows with gaps",
                lambda c: room(c, -1, 256)[..., : c.shape[-1]],
                ("stride 256 in dim 1", str(dim)),
            ),
            (
                "slots",
                "every second dim",
                lambda c: room(c, -1, 2 * c.shape[-1])[..., ::2],
                ("stride 2 in dim 2", "1 there"),
            ),
            (
                "slots",
                "heads first",
                lambda c: c.transpose(0, 1).contiguous().transpose(0, 1),
                (f"stride {69 * dim} in dim 1",),
            ),
            ("slots", "one head for all", lambda c: c[:, :1].expand(-1, 2, -1), ("stride 0 in dim 1",)),
            ("linear", "heads before tokens", lambda c: c.transpose(1, 2).contiguous().transpose(1, 2), ("in dim 2",)),
            ("linear", "tokens with gaps", lambda c: room(c, 2, 3)[:, :, :2], (f"stride {3 * dim} in dim 1",)),
            ("linear", "every second token", lambda c: room(c, 1, 8)[:, ::2], (f"stride {4 * dim} in dim 1",)),
            ("block", "packs with gaps", lambda c: room(c, -1, 32)[..., :16], ("stride 32 in dim 3", "16 there")),
            (
                "block",
                "packs swapped",
                lambda c: c.transpose(3, 4).contiguous().transpose(3, 4),
                ("in dim 4", "1 there"),
            ),
            ("block", "heads with gaps", lambda c: room(c, 1, 4)[:, ::2], (f"stride {32 * dim} in dim 1",)),
        ):

            def bent(args: Args, name: str = name, bend: Callable[[torch.Tensor], torch.Tensor] = bend) -> torch.Tensor:
                return bend(args[name].view(torch.uint8)).view(E4M3)

            yield Row(name, came, bent, NotImplementedError, (*words, "never copied"), base)


def room(cache: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A larger allocation, one of whose dims has another size."""
    shape = list(cache.shape)
    shape[dim] = size
    return cache.new_zeros(shape)


def tables() -> Iterator[Row]:
    """Three requests, 49 keys at most: 4 pages of 16."""
    for came, shape in {
        "1-D": (12,),
        "3-D": (3, 4, 1),
        "2 rows": (2, 4),
        "4 rows": (4, 4),
        "too narrow": (3, 3),
    }.items():
        words = (str(list(shape)), "[3, >= 4]", "max_seqlen_k 49", "page 16")
        yield Row("block_table", came, zeros(*shape, dtype=I32), ValueError, words)
    narrow = change(max_seqlen_k=97)
    yield Row(
        "block_table", "too narrow for max_seqlen_k", narrow, ValueError, ("[3, 6]", "[3, >= 7]", "max_seqlen_k 97")
    )
    yield Row("seqlen_k", "missing", give(None), ValueError, ("None", "together with block_table"))
    for came, shape in {"0-d": (), "2-D": (3, 1), "B + 1": (4,), "B - 1": (2,)}.items():
        yield Row("seqlen_k", came, zeros(*shape, dtype=I32), ValueError, (str(list(shape)), "[3]"))
    none = dict.fromkeys(("block_table", "seqlen_k", "kv_indptr", "kv_page_indices", "kv_last_page_lens"))
    lens = torch.ones(3, dtype=I32)
    yield Row("block_table", "no table", change(**none), ValueError, ("neither", "kv_indptr", "seqlen_k"), batch="none")
    yield Row("block_table", "no table of slots", change(**none), ValueError, ("neither",), "slots")
    yield Row("block_table", "missing", give(None), ValueError, ("None", "seqlen_k"), batch="none")
    last_alone = change(**{**none, "kv_last_page_lens": lens})
    yield Row("block_table", "last page lengths alone", last_alone, ValueError, ("neither", "kv_indptr"))
    yield Row("block_table", "seqlen_k beside CSR", change(seqlen_k=lens), ValueError, ("None", "seqlen_k"), "csr")
    for base in ("csr", "slots"):
        yield Row("kv_indptr", f"missing, {base}", give(None), ValueError, ("None", "kv_page_indices"), base)
        yield Row("kv_page_indices", f"missing, {base}", give(None), ValueError, ("None", "kv_indptr"), base)
    for came, shape in {"0-d": (), "2-D": (4, 1), "B": (3,), "B + 2": (5,)}.items():
        yield Row(
            "kv_indptr", came, zeros(*shape, dtype=I32), ValueError, (str(list(shape)), "[4]", "cu_seqlens_q"), "csr"
        )
    for came, shape in {"0-d": (), "2-D": (9, 1)}.items():
        yield Row("kv_page_indices", came, zeros(*shape, dtype=I32), ValueError, (str(list(shape)), "1-D"), "csr")
    for came, shape in {"0-d": (), "2-D": (3, 1), "B + 1": (4,), "B - 1": (2,)}.items():
        words = (str(list(shape)), "[3]")
        yield Row("kv_last_page_lens", came, zeros(*shape, dtype=I32), ValueError, words, "csr")
    yield Row("kv_last_page_lens", "B + 1 at page 1", zeros(4, dtype=I32), ValueError, ("[4]", "[3]"), "slots")
    for base, page in (("csr", 16), ("linear", 4)):
        words = ("None", f"pages of {page}", "page 1 only")
        yield Row("kv_last_page_lens", f"missing, {base}", give(None), ValueError, words, base, "none")


def numbers() -> Iterator[Row]:
    for name in ("q_descale", "k_descale", "v_descale"):
        for came, shape in {"one a head": (2,), "one a row": (5, 1), "empty": (0,)}.items():
            yield Row(name, came, zeros(*shape, dtype=F32), ValueError, (str(list(shape)), "one element"))
    values: dict[str, Any] = {
        "0": 0,
        "0.0": 0.0,
        "-0.0": -0.0,
        "negative": -0.5,
        "a negative int": -1,
        "nan": math.nan,
        "inf": math.inf,
        "-inf": -math.inf,
        "numpy nan": np.float32(math.nan),
        "numpy inf": np.float64(math.inf),
        "above float32": 3.5e38,
        "below float32": 1e-46,
        "an int above float64": 10**400,
        "a fraction above float64": Fraction(10**400),
    }
    for came, value in values.items():
        yield Row("softmax_scale", came, give(value), ValueError, ("a positive finite number",))
    wrong: dict[str, Any] = {
        "True": True,
        "False": False,
        "a numpy bool": np.True_,
        "a string": "0.1",
        "a complex": 0.1 + 0j,
        "a numpy complex": np.complex64(0.1),
        "a list": [0.1],
        "a 0-d tensor": torch.tensor(0.1),
        "a tensor of one": torch.tensor([0.1]),
        "an array of one": np.array([0.1]),
        "an array of two": np.array([0.1, 0.2]),
    }
    for came, value in wrong.items():
        yield Row("softmax_scale", came, give(value), TypeError, ("a real number",))
    for name in ("causal", "return_lse"):
        flags: dict[str, Any] = {
            "None": None,
            "0": 0,
            "1": 1,
            "a string": "yes",
            "a list": [True],
            "a tensor": torch.tensor(True),
        }
        flags["a tensor of two"] = torch.tensor([True, False])
        for came, value in flags.items():
            # Without return_lse there is no lse to be refused first.
            bend = change(return_lse=value, lse=None) if name == "return_lse" else give(value)
            yield Row(name, came, bend, TypeError, ("True or False",))


def outputs() -> Iterator[Row]:
    """Valid ones: out [5, 4, 128], lse [4, 5]."""
    for came, shape in {
        "heads first": (4, 5, 128),
        "D for Dv": (5, 4, 192),
        "a row fewer": (4, 4, 128),
        "a row more": (6, 4, 128),
        "flat heads": (5, 512),
        "one element": (1,),
    }.items():
        yield Row("out", came, give_poisoned(BF16, *shape), ValueError, (str(list(shape)), "[5, 4, 128]", "Dv"))
    for came, shape in {
        "tokens first": (5, 4),
        "1-D": (20,),
        "3-D": (1, 4, 5),
        "a row fewer": (4, 4),
        "one more": (4, 6),
    }.items():
        yield Row(
            "lse", came, give_poisoned(F32, *shape), ValueError, (str(list(shape)), "[4, 5]", "Hq, total_q"), batch=""
        )
    yield Row(
        "out",
        "every second head",
        lambda _: poisoned(5, 8, 128, dtype=BF16)[:, ::2],
        ValueError,
        ("strides", "contiguous"),
    )
    yield Row(
        "out",
        "heads swapped",
        lambda _: poisoned(4, 5, 128, dtype=BF16).transpose(0, 1),
        ValueError,
        ("strides", "contiguous"),
    )
    yield Row(
        "out",
        "one row for all",
        lambda _: poisoned(1, 4, 128, dtype=BF16).expand(5, -1, -1),
        ValueError,
        ("contiguous",),
    )
    yield Row(
        "lse", "transposed", lambda _: poisoned(5, 4, dtype=F32).t(), ValueError, ("strides", "contiguous"), batch=""
    )
    yield Row(
        "lse", "with gaps", lambda _: poisoned(4, 8, dtype=F32)[:, :5], ValueError, ("[8, 1]", "contiguous"), batch=""
    )
    yield Row("lse", "without return_lse", change(return_lse=False), ValueError, ("return_lse",), batch="")
    for came, value in {"a raw handle": 0, "a string": "default", "an object": object(), "a list": []}.items():
        yield Row("stream", came, give(value), TypeError, ("None or a torch stream", type(value).__name__), batch="")
    foreign = torch.Stream(
        stream_id=0, device_index=0, device_type=1
    )  # the default stream of the first GPU, on any machine
    yield Row("stream", "of another device", give(foreign), ValueError, ("cuda:0", "q's device"), batch="")


def give_poisoned(dtype: torch.dtype, *shape: int) -> Callable[[Args], Any]:
    return lambda _: poisoned(*shape, dtype=dtype)


ROWS = [*systematic(), *queries(), *caches(), *tables(), *numbers(), *outputs()]
BATCH_ROWS = [row for row in ROWS if row.batch]


#: A refused call changes nothing, so that the next row can start from the same tensors.
valid = lru_cache(maxsize=None)(build)


def bent(row: Row, meta: bool) -> tuple[Built, Args]:
    """The arguments of a row, on the CPU or all of them on meta, but for one that is to be elsewhere."""
    built = valid(BASES[row.base])
    built.poison()
    arguments = named(built)
    value = row.bend(arguments)
    arguments.update(value if isinstance(value, Change) else {row.name: value})
    for name, argument in arguments.items():
        if isinstance(argument, Elsewhere):
            arguments[name] = argument.tensor if meta else as_meta(argument.tensor)
        elif meta:
            arguments[name] = as_meta(argument)
    return built, arguments


def for_batch(arguments: Args) -> Args:
    """The same arguments for the dispatcher, which has neither lse nor stream and must be given the CSR arguments."""
    rest = {name: value for name, value in arguments.items() if name not in ("lse", "stream")}
    return {"kv_indptr": None, "kv_page_indices": None, "causal": True, **rest}


def assert_refused(caught: pytest.ExceptionInfo[Exception], row: Row) -> None:
    message = str(caught.value)
    assert caught.type is row.error, message
    assert message.startswith(f"{row.name}: got "), message
    assert "; accepted: " in message, message
    for word in row.words:
        assert word in message, f"{word!r} is missing in: {message}"


def assert_untouched(built: Built, arguments: Args) -> None:
    wholes = [whole.view(torch.uint8) for whole, _ in built._guards]
    for name in ("out", "lse"):
        value = arguments.get(name)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            wholes.append(torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()))
    for whole in wholes:
        assert whole.numel()
        assert bool((whole == POISON).all()), "a refused call wrote"


def on_executors(rows: list[Row]) -> list[tuple[str, Row]]:
    """All rows on the first executor. An argument is refused before any has a part in the call: on the others one row
    for each argument tells that they have none."""
    one_each = list({row.name: row for row in rows}.values())
    return [(executor, row) for executor in EXECUTORS for row in (rows if executor == EXECUTORS[0] else one_each)]


@pytest.mark.parametrize(("executor", "row"), on_executors(ROWS), ids=str)
def test_call_refuses(row: Row, executor: str) -> None:
    built, arguments = bent(row, meta=False)
    with record() as calls, use_executor(executor), pytest.raises(Exception) as caught:
        flydsl_flash_attn_paged_prefill_func(**arguments)
    assert_refused(caught, row)
    assert_untouched(built, arguments)
    assert calls == [], "a refused call has no plan"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_plan_refuses_on_meta_tensors(row: Row) -> None:
    _, arguments = bent(row, meta=True)
    with pytest.raises(Exception) as caught:
        plan(**arguments, arch="gfx950")
    assert_refused(caught, row)


@pytest.mark.parametrize(
    ("executor", "row"), [*on_executors(BATCH_ROWS), *(("meta", row) for row in BATCH_ROWS)], ids=str
)
def test_batch_dispatcher_refuses(row: Row, executor: str) -> None:
    """On the CPU by the executor that is asked for; on meta tensors before anything is asked about the machine."""
    meta = executor == "meta"
    built, arguments = bent(row, meta)
    arguments = for_batch(arguments)
    with use_executor("auto" if meta else executor):
        if row.batch == "none":
            assert flydsl_flash_attn_batch_prefill_func(**arguments) is None
        else:
            with pytest.raises(Exception) as caught:
                flydsl_flash_attn_batch_prefill_func(**arguments)
            assert_refused(caught, row)
    assert_untouched(built, arguments)


@pytest.mark.parametrize("base", BASES)
def test_what_is_bent_was_valid(base: str) -> None:
    """Otherwise a row could be refused for something else than it bends."""
    built = build(BASES[base])
    assert plan(**named(built))
    out, lse = flydsl_flash_attn_paged_prefill_func(**named(built))
    assert not bool((out.view(torch.uint8) == POISON).all(-1).any())
    assert not bool((lse.view(torch.uint8) == POISON).all(-1).any())


def test_every_argument_has_refusals() -> None:
    assert {row.name for row in ROWS} == set(inspect.signature(flydsl_flash_attn_paged_prefill_func).parameters)
    assert len({(str(row), row.base) for row in ROWS}) == len(ROWS), "two rows of one name"


REQUIRED = [
    name
    for name, parameter in inspect.signature(flydsl_flash_attn_paged_prefill_func).parameters.items()
    if parameter.default is parameter.empty
]


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("function", [flydsl_flash_attn_paged_prefill_func, plan])
def test_required_argument_is_missed_by_name(function: Callable[..., Any], name: str) -> None:
    arguments = named(valid(VECTORIZED))
    del arguments[name]
    with pytest.raises(TypeError, match=f"missing 1 required .*'{name}'"):
        function(**arguments)


# Valid calls that cannot run: what is asked for, the executor, the exception, and words of its message.

SLOTS = Case((2, 0, 3), (17, 0, 49), layout="slots", page=1)
PAGES = Case((2, 0, 3), (17, 0, 49), page=16)
TOO_WIDE = ("multiples of 16 up to 256",)
LIMITS: list[tuple[Case, str, type[Exception], tuple[str, ...]]] = [
    (replace(SLOTS, dim=8), "auto", NotImplementedError, (*TOO_WIDE, "D = 8")),
    (replace(SLOTS, dim=100), "auto", NotImplementedError, (*TOO_WIDE, "D = 100")),
    (replace(SLOTS, dim=272), "auto", NotImplementedError, (*TOO_WIDE, "D = 272")),
    (replace(SLOTS, dim_v=40), "auto", NotImplementedError, (*TOO_WIDE, "Dv = 40")),
    (replace(SLOTS, dim_v=272), "auto", NotImplementedError, (*TOO_WIDE, "Dv = 272")),
    (replace(PAGES, dim=512), "auto", NotImplementedError, (*TOO_WIDE, "D = 512")),
    (replace(PAGES, dim_v=24), "auto", NotImplementedError, (*TOO_WIDE, "Dv = 24")),
    (replace(SLOTS, dim=272), "torch", RuntimeError, ("executor torch", *TOO_WIDE, "D = 272")),
    (PAGES, "gpu", RuntimeError, ("executor gpu", "gfx950", "cpu")),
    (replace(PAGES, causal=False), "emulator", RuntimeError, ("executor emulator", "causal")),
    (replace(PAGES, dim=64, dim_v=64), "emulator", RuntimeError, ("executor emulator", "(64, 64)", "(192, 128)")),
    (replace(PAGES, dim=128, dim_v=192), "emulator", RuntimeError, ("executor emulator", "(128, 192)", "(192, 192)")),
    (replace(PAGES, page=32), "emulator", RuntimeError, ("executor emulator", "16, 64, 1024", "32")),
    (replace(SLOTS, layout="linear", page=16), "emulator", RuntimeError, ("executor emulator", "linear", "16")),
]


@pytest.mark.parametrize("function", ["paged", "batch"])
@pytest.mark.parametrize(("case", "name", "error", "words"), LIMITS, ids=[f"{c}-{n}" for c, n, _, _ in LIMITS])
def test_valid_call_that_can_not_run(
    case: Case, name: str, error: type[Exception], words: tuple[str, ...], function: str
) -> None:
    """It says why, and never falls to an executor that was not asked for."""
    built = build(case)
    arguments = named(built)
    call: Callable[..., Any] = flydsl_flash_attn_paged_prefill_func
    with use_executor(name), record() as calls:
        chosen = plan(**arguments)
        assert not chosen
        assert (chosen.path, chosen.executor) == (None, None)
        if function == "batch":
            call, arguments = flydsl_flash_attn_batch_prefill_func, for_batch(arguments)
        if function == "batch" and name == "auto":
            assert call(**arguments) is None
        else:
            with pytest.raises(Exception) as caught:
                call(**arguments)
            assert caught.type is error
            for word in (*words, chosen.reason):
                assert word in str(caught.value)
            assert [recorded.plan for recorded in calls] == [chosen]
    assert_untouched(built, arguments)
