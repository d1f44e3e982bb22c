"""Every argument form that the contract accepts, against the reference, on each executor and as a plan on meta tensors.

A form changes one thing about a valid call: how a tensor lies in memory, the type of a number, what stands in unused
places. Results are compared with the float64 reference; inputs must come out as they went in.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch

from aiter_paged_fp8 import (
    flydsl_flash_attn_paged_prefill_func,
    plan,
    record,
    use_executor,
)
from op_tests.cases import (
    E4M3,
    NAN_BYTE,
    Built,
    Case,
    as_meta,
    assert_ran,
    build,
    check,
    compare,
    compare_out,
    fresh_seed,
    named,
    on_gpu,
    on_served,
    run,
    served,
)

I32, F32, BF16 = torch.int32, torch.float32, torch.bfloat16
#: A tile edge (128), page edges (64), a request without queries, one without keys, one with more queries than keys.
LENGTHS: tuple[tuple[int, ...], tuple[int, ...]] = ((7, 0, 2, 3, 4), (129, 64, 0, 65, 2))
BLOCK = Case(*LENGTHS)
#: For forms that change a number only.
FEW = Case((3, 2), (65, 30))
CSR = replace(BLOCK, table="csr")
SLOTS = replace(CSR, layout="slots", page=1)
SLOTS_BLOCK = replace(SLOTS, table="block")
WIDE = replace(BLOCK, dim=192, dim_v=128)


class Index:
    """Something with ``__index__`` that is no int."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


class Bound(IntEnum):
    KEYS = 129


@dataclass(frozen=True)
class Form:
    """One accepted form. ``shape`` changes a built case in place; ``given`` is for the call only."""

    name: str
    case: Case
    shape: Callable[[Built], object]
    given: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


POSITIONS = {"q": 0, "k": 1, "v": 2, "cu_seqlens_q": 3, "max_seqlen_q": 4, "max_seqlen_k": 5}


def put(built: Built, name: str, value: Any) -> None:
    """Set an argument, positional or not."""
    if name in POSITIONS:
        arguments = list(built.args)
        arguments[POSITIONS[name]] = value
        built.args = tuple(arguments)
    else:
        built.kwargs[name] = value


def get(built: Built, name: str) -> Any:
    return built.args[POSITIONS[name]] if name in POSITIONS else built.kwargs[name]


def sets(name: str, value: Any) -> Callable[[Built], object]:
    return lambda built: put(built, name, value)


def remake(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Built], object]:
    """Give a tensor another place in memory; what it holds stays the same."""

    def shape(built: Built) -> None:
        old = get(built, name)
        new = make(old)
        assert new.shape == old.shape
        assert torch.equal(raw(new), raw(old))
        put(built, name, new)

    return shape


def both(*shapes: Callable[[Built], object]) -> Callable[[Built], object]:
    def shape(built: Built) -> None:
        for step in shapes:
            step(built)

    return shape


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8) if tensor.dtype is E4M3 else tensor.detach()


def spread(tensor: torch.Tensor, dim: int, step: int = 1, before: int = 0, behind: int = 0) -> torch.Tensor:
    """The same values as a view of a larger, poisoned allocation: every ``step``-th along ``dim``, with rows around."""
    size = tensor.shape[dim]
    shape = list(tensor.shape)
    shape[dim] = before + size * step + behind
    fill = NAN_BYTE if tensor.dtype is E4M3 else -(2**31) if tensor.dtype is I32 else math.nan
    whole = torch.full(shape, fill, dtype=raw(tensor).dtype)
    view = whole.narrow(dim, before, size * step)
    view = view[(slice(None),) * (dim % tensor.dim()) + (slice(None, None, step),)]
    view.copy_(raw(tensor))
    return view.view(tensor.dtype)


def swapped(a: int, b: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: raw(tensor).transpose(a, b).contiguous().transpose(a, b).view(tensor.dtype)


def paged(cache: torch.Tensor, stride: int, offset: int = 0) -> torch.Tensor:
    """A cache whose pages start ``stride`` elements apart, in an allocation of NaN."""
    pages = cache.shape[0]
    whole = torch.full((offset + pages * stride,), NAN_BYTE, dtype=torch.uint8)
    view = whole.as_strided(cache.shape, (stride, *cache.stride()[1:]), offset)
    view.copy_(raw(cache))
    return view.view(E4M3)


def page_bytes(cache: torch.Tensor) -> int:
    return math.prod(cache.shape[1:])


def one_pool(gap: int) -> Callable[[Built], object]:
    """K and V of a page behind each other in one allocation."""

    def shape(built: Built) -> None:
        k, v = get(built, "k"), get(built, "v")
        stride = page_bytes(k) + page_bytes(v) + gap
        whole = torch.full((k.shape[0] * stride + 64,), NAN_BYTE, dtype=torch.uint8)
        for name, cache, offset in (("k", k, 64), ("v", v, 64 + page_bytes(k))):
            view = whole.as_strided(cache.shape, (stride, *cache.stride()[1:]), offset)
            view.copy_(raw(cache))
            put(built, name, view.view(E4M3))

    return shape


def pages(gap_k: int, gap_v: int, offset: int = 0) -> Callable[[Built], object]:
    return both(
        remake("k", lambda k: paged(k, page_bytes(k) + gap_k, offset)),
        remake("v", lambda v: paged(v, page_bytes(v) + gap_v, offset)),
    )


def first_page_for_all(built: Built) -> None:
    for name in ("k", "v"):
        cache = get(built, name)
        page = raw(cache)[built.page_ids[0][0]]  # a whole page of a request: it holds no poison
        put(built, name, page.expand(cache.shape).view(E4M3))


def shared(built: Built) -> None:
    """One request reads another's pages, one of them twice; or its slots, backwards."""
    first = built.page_ids[0]
    built.page_ids[3] = [first[0], first[0]] if built.case.page > 1 else first[64::-1]
    get(built, "block_table")[3, : len(built.page_ids[3])] = torch.tensor(built.page_ids[3], dtype=I32)


def bounded(name: str, limit: int) -> Callable[[Built], object]:
    """A smaller max_seqlen_k: what is longer counts as that, and the table needs no more columns than for it."""

    def shape(built: Built) -> None:
        put(built, "max_seqlen_k", limit)
        built.case = replace(built.case, kv_lens=[min(length, limit) for length in built.case.kv_lens])
        if name == "narrow":
            columns = -(-limit // built.case.page)
            put(built, "block_table", get(built, "block_table")[:, :columns].contiguous())

    return shape


def exact(built: Built) -> None:
    columns = -(-max(built.case.kv_lens) // built.case.page)
    put(built, "block_table", get(built, "block_table")[:, :columns].contiguous())


def exact_ids(built: Built) -> None:
    """CSR without anything around: offsets from 0, exactly the ids used."""
    put(built, "kv_indptr", get(built, "kv_indptr") - 1)
    put(built, "kv_page_indices", get(built, "kv_page_indices")[1:-1].clone())


def dummies(built: Built) -> None:
    """CSR arguments beside a block table are never looked at: nothing here would validate."""
    built.kwargs.update(
        kv_indptr="dummy", kv_page_indices=torch.zeros(2, 2), kv_last_page_lens=torch.zeros(1, device="meta")
    )


def forms() -> Iterator[Form]:
    # How q lies in memory.
    for name, make in {
        "q every second head": lambda q: spread(q, 1, step=2),
        "q every third row": lambda q: spread(q, 0, step=3),
        "q every second dim": lambda q: spread(q, 2, step=2),
        "q part of a fused projection": lambda q: spread(q, 1, before=1, behind=4),
        "q heads first": swapped(0, 1),
        "q dims before heads": swapped(1, 2),
        "q at an odd address": lambda q: spread(q.reshape(-1), 0, before=1).view(q.shape),
    }.items():
        yield Form(name, WIDE, remake("q", make))
    yield Form("q one head for all", BLOCK, lambda b: put(b, "q", b.q[:, :1].expand(-1, 4, -1)))
    # How the caches lie in memory.
    for case in (BLOCK, WIDE, SLOTS, replace(SLOTS, dim=192), replace(CSR, layout="linear", page=16, dim=192)):
        label = f"{case.layout} {case.dim}"
        yield Form(f"K and V in one pool {label}", case, one_pool(0))
        yield Form(f"K and V in one pool with gaps {label}", case, one_pool(48))
        yield Form(f"page strides differ {label}", case, pages(16, 160))
        yield Form(f"only V strided {label}", case, pages(0, 64))
        yield Form(f"only K strided {label}", case, pages(64, 0))
        yield Form(f"storage offset {label}", case, pages(0, 0, 4096 + 16))
    yield Form("interleaved cache", replace(BLOCK, interleaved=True), lambda b: None)
    yield Form("interleaved slots", replace(SLOTS, interleaved=True), lambda b: None)
    yield Form("odd page strides", replace(BLOCK, page=16), pages(1, 3, 5))
    yield Form("one page for all", replace(BLOCK, kv_lens=(64, 64, 0, 64, 2)), first_page_for_all)
    yield Form("pages shared by requests", BLOCK, shared)
    yield Form("slots shared by requests", SLOTS_BLOCK, shared)
    # Rows, bounds.
    yield Form("rows that belong to nobody", replace(BLOCK, cu_start=3), lambda b: None)
    yield Form("rows that belong to nobody, csr", replace(SLOTS, cu_start=130), lambda b: None)
    for name, value in {
        "numpy int32": np.int32(129),
        "numpy uint8": np.uint8(129),
        "numpy int64": np.int64(129),
    }.items():
        yield Form(f"max_seqlen_k {name}", BLOCK, sets("max_seqlen_k", value))
    yield Form("max_seqlen_k with index", BLOCK, sets("max_seqlen_k", Index(129)))
    yield Form("max_seqlen_k of an enum", BLOCK, sets("max_seqlen_k", Bound.KEYS))
    yield Form("max_seqlen_k 0-d array", BLOCK, sets("max_seqlen_k", np.array(129)))
    yield Form("max_seqlen_q numpy int64", BLOCK, sets("max_seqlen_q", np.int64(7)))
    yield Form("max_seqlen_q with index", BLOCK, sets("max_seqlen_q", Index(7)))
    yield Form("max_seqlen_q larger", BLOCK, sets("max_seqlen_q", 100_000))
    yield Form("max_seqlen_k larger", BLOCK, sets("max_seqlen_k", 5 * 64))
    # Bounds are trusted upper bounds: what a 32-bit counter can't hold is none the worse for it.
    for most in (1 << 20, 2**31 - 1, 2**31, 2**40, 2**63):
        yield Form(f"max_seqlen_k {most}, csr", CSR, sets("max_seqlen_k", most))
        yield Form(f"max_seqlen_q {most}", FEW, sets("max_seqlen_q", most))
    for limit in (0, 1, 64, 65, 128):
        yield Form(f"lengths above max_seqlen_k {limit}", BLOCK, bounded("narrow", limit))
        yield Form(f"lengths above max_seqlen_k {limit}, csr", CSR, bounded("", limit))
        yield Form(f"lengths above max_seqlen_k {limit}, slots", SLOTS, bounded("", limit))
    # Tables.
    yield Form("block table exactly wide enough", BLOCK, exact)
    yield Form("block table of slots exactly wide enough", SLOTS_BLOCK, exact)
    yield Form("block table with many more columns", BLOCK, remake_columns(40))
    yield Form("block table and dummy csr", BLOCK, dummies)
    yield Form("block table of slots and dummy csr", SLOTS_BLOCK, dummies)
    yield Form("csr exactly", CSR, exact_ids)
    yield Form("csr of slots exactly", SLOTS, exact_ids)
    yield Form("csr with many more ids", CSR, more_ids(1000))
    yield Form("last page lengths at page 1", replace(SLOTS, table="csr_last"), lambda b: None)
    for name, case in {
        "cu_seqlens_q": BLOCK,
        "block_table": BLOCK,
        "seqlen_k": BLOCK,
        "kv_indptr": CSR,
        "kv_page_indices": CSR,
        "kv_last_page_lens": CSR,
    }.items():
        yield Form(f"{name} every second", case, remake(name, lambda t: spread(t, -1, step=2)))
        yield Form(f"{name} rows of a larger table", case, remake(name, lambda t: spread(t, -1, before=3, behind=5)))
        yield Form(
            f"{name} a column of a table", case, remake(name, lambda t: spread(t.unsqueeze(-1), -1, 2).squeeze(-1))
        )
    yield Form("block_table columns first", BLOCK, remake("block_table", swapped(0, 1)))
    # Numbers.
    for name in ("q_descale", "k_descale", "v_descale"):
        for came, make in {
            "0-d": lambda t: t.reshape(()),
            "1x1": lambda t: t.reshape(1, 1),
            "4-D": lambda t: t.reshape(1, 1, 1, 1),
            "view": lambda t: torch.cat([t * 7, t, t * 9])[1:2],
            "0-d view": lambda t: torch.cat([t * 7, t, t * 9])[1],
            "strided view": lambda t: spread(t, 0, step=3),
            "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
            "other number": lambda t: t * 0.37,
        }.items():
            yield Form(f"{name} {came}", FEW, lambda b, name=name, make=make: put(b, name, make(get(b, name))))
    yield Form("one tensor for all descales", FEW, one_descale)
    yield Form("zero descales", replace(FEW, descales=(0.0, 1.0, 1.0)), lambda b: None)
    yield Form("negative descales", replace(FEW, descales=(-0.5, 1.5, -2.0)), lambda b: None)
    for name, scale in {
        "float": 0.03,
        "int": 1,
        "numpy float32": np.float32(0.03),
        "numpy float64": np.float64(0.03),
        "numpy int": np.int64(1),
        "fraction": Fraction(1, 30),
        "decimal": Decimal("0.03"),
        "least of float32": 2.0**-149,
        "flat": 1e-30,
        "sharp": 0.25,
    }.items():
        # The reference takes the same number as a float.
        yield Form(f"softmax_scale {name}", FEW, sets("softmax_scale", float(scale)), {"softmax_scale": scale})
    yield Form("causal numpy bool", FEW, sets("causal", np.True_))
    yield Form("not causal", replace(FEW, causal=False), lambda b: None)
    yield Form("not causal, slots", replace(SLOTS, causal=False), lambda b: None)
    yield Form("a stream of the CPU", FEW, sets("stream", torch.Stream(device="cpu")))
    # Heads.
    for heads, kv_heads in ((1, 1), (4, 1), (4, 4), (6, 3), (5, 1)):
        yield Form(f"heads {heads} over {kv_heads}", replace(WIDE, heads=heads, kv_heads=kv_heads), lambda b: None)
    # Little or nothing.
    for label, case in {"block": BLOCK, "csr": CSR, "slots": SLOTS}.items():
        for name, q_lens, kv_lens in (
            ("no requests", (), ()),
            ("no queries", (0, 0), (65, 0)),
            ("no keys", (3, 130), (0, 0)),
            ("one of all", (1,), (1,)),
        ):
            few = replace(case, q_lens=q_lens, kv_lens=kv_lens)
            yield Form(f"{name}, {label}", few, lambda b: None)
            yield Form(f"{name}, rows of nobody, {label}", replace(few, cu_start=2), lambda b: None)
        none = replace(case, q_lens=(3, 0), kv_lens=(0, 0), spare_pages=0)
        yield Form(f"a cache of no pages, {label}", none, lambda b: None)
        if label == "block":
            long = both(sets("seqlen_k", torch.tensor([5, 0], dtype=I32)), sets("max_seqlen_k", 5))
            yield Form("a length where the cache has no pages", none, long)
        zero = both(sets("max_seqlen_q", 0), sets("max_seqlen_k", 0))
        yield Form(f"bounds of 0, {label}", replace(case, q_lens=(0, 0), kv_lens=(0, 0)), zero)


def remake_columns(more: int) -> Callable[[Built], object]:
    def shape(built: Built) -> None:
        table = get(built, "block_table")
        wild = torch.full((table.shape[0], more), 2**31 - 1, dtype=I32)
        put(built, "block_table", torch.cat([table, wild], 1))

    return shape


def more_ids(more: int) -> Callable[[Built], object]:
    def shape(built: Built) -> None:
        wild = torch.full((more,), -(2**31), dtype=I32)
        put(built, "kv_page_indices", torch.cat([get(built, "kv_page_indices"), wild]))

    return shape


def one_descale(built: Built) -> None:
    one = torch.tensor(0.75)
    for name in ("q_descale", "k_descale", "v_descale"):
        put(built, name, one)


FORMS = list(forms())


def contents(built: Built) -> dict[str, torch.Tensor]:
    """The bytes that the tensors of a call hold, outputs aside."""
    values = {**named(built), "out": None, "lse": None}
    return {
        name: raw(value).flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and value.device.type == "cpu"
    }


_expected: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}


def remember(built: Built) -> None:
    """Many forms hold the same numbers in other places: the slow reference computes what depends on them once."""
    q, k, v = (raw(tensor).contiguous().numpy().tobytes() for tensor in built.args[:3])
    names = ("q_descale", "k_descale", "v_descale")
    numbers = (*(float(get(built, name)) for name in names), built.kwargs.get("softmax_scale"), built.case.causal)
    shapes = tuple(tuple(tensor.shape) for tensor in built.args[:3])
    plain = repr((shapes, built.cu, built.page_ids, list(built.case.kv_lens), numbers)).encode()
    key = sha256(b"".join((q, k, v, plain))).digest()
    if key not in _expected:
        _expected[key] = built.reference()
    built.reference = lambda dtype=torch.float64: _expected[key]  # type: ignore[method-assign]


@on_served("form", FORMS)
def test_form(form: Form, executor: str) -> None:
    built = build(form.case)
    form.shape(built)
    before = contents(built)
    remember(built)
    if "stream" in built.kwargs and on_gpu(executor):
        with pytest.raises(ValueError, match="stream: got a stream of cpu; accepted: None or a stream of q's device"):
            check(built, executor, **form.given)
        return
    assert check(built, executor, **form.given) is not None
    for name, after in contents(built).items():
        assert torch.equal(after, before[name]), f"the call changed {name}"


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_form_on_meta_tensors(form: Form) -> None:
    """A plan needs no contents: without memory behind the tensors it is the same, whatever machine is planned for."""
    built = build(form.case)
    form.shape(built)
    arguments = {**named(built), **form.given}
    if isinstance(arguments.get("stream"), torch.Stream):
        del arguments["stream"]  # the one form that only holds on the device
    twins = {name: as_meta(value) for name, value in arguments.items()}
    for arch in ("gfx950", "gfx942", "cpu"):
        chosen = plan(**twins, arch=arch)
        assert chosen
        assert chosen == plan(**arguments, arch=arch)


def test_forms_have_names_of_their_own() -> None:
    assert len({str(form) for form in FORMS}) == len(FORMS)


# Every layout, page size and table, with drawn lengths.

NATIVE = [("slots", 1), ("linear", 1), ("vectorized", 16), ("vectorized", 64), ("vectorized", 1024)]
OTHERS = [("linear", 3), ("linear", 16), ("linear", 200), ("vectorized", 32), ("vectorized", 48), ("vectorized", 528)]
DIMS = [(128, 128), (192, 128), (192, 192), (16, 256), (256, 16), (64, 80)]


def draw(layout: str, page: int, table: str, dims: tuple[int, int], causal: bool, generator: random.Random) -> Case:
    """A case with a tile edge, a page edge and an empty request, in an order and with neighbours that nobody chose."""
    edges = [128 * generator.randint(1, 2), page * max(1, generator.randint(1, 200) // page), 0]
    kv_lens = [max(0, edge + generator.choice((-1, 0, 1))) for edge in edges] + [0, generator.randint(1, 300)]
    q_lens = [generator.randint(0, 6) for _ in kv_lens[1:]] + [generator.choice((1, 127, 128, 129))]
    generator.shuffle(kv_lens)
    generator.shuffle(q_lens)
    heads = generator.choice(((2, 1), (2, 2), (3, 1)))
    sizes = {
        "dim": dims[0],
        "dim_v": dims[1],
        "heads": heads[0],
        "kv_heads": heads[1],
        "seed": generator.getrandbits(31),
    }
    place = {"cu_start": generator.choice((0, 5)), "interleaved": generator.random() < 0.3}
    return Case(q_lens, kv_lens, layout=layout, page=page, table=table, causal=causal, **sizes, **place)


@pytest.mark.parametrize("table", ["block", "csr", "csr_last"])
@on_served("layout,page", NATIVE + OTHERS)
def test_layouts_and_tables(layout: str, page: int, table: str, executor: str) -> None:
    generator = random.Random(fresh_seed())
    choices = [
        (dims, causal)
        for dims in DIMS
        for causal in (True, True, False)
        if served(Case((), (), dim=dims[0], dim_v=dims[1], layout=layout, page=page, causal=causal), executor)
    ]
    case = draw(layout, page, table, *generator.choice(choices), generator)
    assert check(build(case), executor) is not None


# Outputs.


@on_served(
    "form", [BLOCK, SLOTS, replace(BLOCK, q_lens=(), kv_lens=()), *(replace(c, cu_start=2) for c in (WIDE, CSR))]
)
def test_outputs_given_or_not(form: Case, executor: str) -> None:
    built = build(form)
    rows = slice(built.cu[0], built.cu[-1])
    given, given_lse = run(built, executor)
    assert given is built.out
    assert given_lse is built.lse
    compare(built, given, given_lse, executor)
    made, made_lse = run(built, executor, out=None, lse=None)
    for tensor, like in ((made, given), (made_lse, given_lse)):
        assert (tensor.shape, tensor.dtype, tensor.device) == (like.shape, like.dtype, like.device)
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert tensor.data_ptr() != like.data_ptr() or not tensor.numel()
    assert torch.equal(made[rows], given[rows])
    assert torch.equal(made_lse[:, rows], given_lse[:, rows])
    with use_executor(executor), record() as calls:
        kwargs = built.kwargs
        plain = flydsl_flash_attn_paged_prefill_func(*built.args, **kwargs)
        assert isinstance(plain, torch.Tensor), "a lone out where no LSE was asked for"
        assert torch.equal(plain[rows], given[rows])
        mixed, mixed_lse = flydsl_flash_attn_paged_prefill_func(*built.args, **kwargs, out=built.out, return_lse=True)
        assert mixed is built.out
        assert torch.equal(mixed_lse[:, rows], given_lse[:, rows])
        mixed, mixed_lse = flydsl_flash_attn_paged_prefill_func(*built.args, **kwargs, lse=built.lse, return_lse=True)
        assert mixed_lse is built.lse
        assert torch.equal(mixed[rows], given[rows])
    for call in calls:
        assert_ran([call], executor, launched=bool(form.q_lens))


def test_out_alone_writes_nothing_else(executor: str) -> None:
    built = build(replace(BLOCK, cu_start=2))
    with use_executor(executor):
        assert flydsl_flash_attn_paged_prefill_func(*built.args, **built.kwargs, out=built.out) is built.out
    expected, _ = built.reference()
    compare_out(built.out[2:-2], expected[2:-2], executor)
    built.check_canaries()
    assert bool((built.lse.view(torch.uint8) == 0xA5).all()), "an LSE that was not given was written"


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", MODES)
@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given"])
def test_gradient_modes(outer: str, inner: str, given: bool, executor: str) -> None:
    """Tensors made under one mode and used under another: a server's buffers are made once and used everywhere."""
    with MODES[outer]():
        built = build(Case((3, 2), (65, 30), heads=2, kv_heads=1))
    with MODES[inner]():
        out, lse = run(built, executor, **({} if given else {"out": None, "lse": None}))
        assert not out.requires_grad
        compare(built, out, lse, executor)
