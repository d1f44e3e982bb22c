"""Inputs, poison, canaries and comparison, shared by the tests of the public function.

A `Case` is a value that says what a call looks like; `build` draws fresh tensors from its seed, with every byte that
must not matter poisoned.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from aiter_paged_fp8 import Call, flydsl_flash_attn_paged_prefill_func, record, use_options
from aiter_paged_fp8.reference import paged_attention

#: Executors that every behavioural test runs on. A new one joins by its name; AITER_PAGED_FP8_TEST_EXECUTORS chooses
#: others, such as "triton" on a machine with a GPU.
EXECUTORS = tuple(os.environ.get("AITER_PAGED_FP8_TEST_EXECUTORS", "torch,emulator").split(","))
#: Those that can record a call into a graph, on CPU.
CAPTURING = tuple(name for name in EXECUTORS if name == "emulator")

E4M3 = torch.float8_e4m3fn
NAN_BYTE, MAX_BYTE = 0x7F, 0x7E
LAYOUTS = ("slots", "linear", "vectorized")
#: What a float32 sum of products may lose, relative to the size of its terms: 16 units in the last place.
FLOAT32_CANCELLATION = 2.0**-20
PATHS = {"torch": "dense", "triton": "dense", "emulator": "paged", "gpu": "paged"}


@dataclass(frozen=True)
class Case:
    """One call. ``page`` is 1 for slots; ``breaks`` says the one thing that this case can break."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 128
    dim_v: int = 128
    layout: str = "vectorized"
    page: int = 64
    table: str = "block"
    causal: bool = True
    descales: tuple[float, float, float] = (0.5, 1.5, 2.0)
    softmax_scale: float | None = None
    deviation: float = 1.0
    tail_byte: int = NAN_BYTE
    interleaved: bool = False
    spare_pages: int = 3
    cu_start: int = 0
    seed: int = 0
    breaks: str = ""

    def __str__(self) -> str:
        return self.breaks.replace(" ", "-") or (
            f"{self.layout}{self.page}-{self.table}-{self.dim}x{self.dim_v}-h{self.heads}x{self.kv_heads}"
            f"-q{'_'.join(map(str, self.q_lens))}-kv{'_'.join(map(str, self.kv_lens))}{'' if self.causal else '-full'}"
        )


@dataclass(repr=False)
class Built:
    """Tensors of a case, and what the reference needs to know of them."""

    case: Case
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cu: list[int]
    page_ids: list[list[int]]
    out: torch.Tensor
    lse: torch.Tensor
    _guards: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __repr__(self) -> str:
        # A failing test shows its arguments; to show a tensor of many GiB torch would convert all of it.
        return f"Built({self.case})"

    @property
    def q(self) -> torch.Tensor:
        return self.args[0]

    def reference(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        q, k, v = self.args[:3]
        names = ("q_descale", "k_descale", "v_descale")
        scales = {name: float(self.kwargs[name]) for name in names}
        return paged_attention(
            q.cpu(),
            k.cpu(),
            v.cpu(),
            self.cu,
            self.page_ids,
            list(case.kv_lens),
            softmax_scale=self.kwargs.get("softmax_scale"),
            causal=case.causal,
            dtype=dtype,
            **scales,
        )

    def poison(self) -> None:
        """Fill outputs with a pattern that no result has, and the memory around them with canaries."""
        for whole, _ in self._guards:
            whole.view(torch.uint8).fill_(0xA5)

    def check_canaries(self) -> None:
        for whole, mask in self._guards:
            around = whole.view(torch.uint8)[mask]
            assert bool((around == 0xA5).all()), "bytes outside of an output, or of an inactive row, were written"


def guarded(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor in the middle of a larger allocation; returns (tensor, the whole allocation)."""
    pad = 64
    size = math.prod(shape)
    whole = torch.empty(size + 2 * pad, dtype=dtype, device=device)
    return whole[pad : pad + size].view(*shape), whole


def fp8(shape: Sequence[int], generator: torch.Generator, deviation: float = 1.0) -> torch.Tensor:
    """Normal values as e4m3."""
    return (torch.randn(*shape, generator=generator) * deviation).to(E4M3)


def scatter(
    case: Case, tokens: torch.Tensor, page_ids: list[list[int]], pages: int, is_key: bool, dim: int
) -> torch.Tensor:
    """A cache that holds ``tokens`` [sum(kv_lens), Hkv, dim] at the places that the page table names, poison elsewhere.

    Written by coordinates of the documented shapes, so that no address formula of the package is involved.
    """
    heads, page = case.kv_heads, case.page
    if case.layout == "slots":
        shape: tuple[int, ...] = (pages, heads, dim)
    elif case.layout == "linear":
        shape = (pages, page, heads, dim)
    elif is_key:
        shape = (pages, heads, dim // 16, page, 16)
    else:
        shape = (pages, heads, page // 16, dim, 16)
    gap = 2 if case.interleaved else 1
    cache = torch.full((pages, gap, *shape[1:]), case.tail_byte, dtype=torch.uint8)[:, 0]
    at = 0
    source = tokens.view(torch.uint8)
    for ids, length in zip(page_ids, case.kv_lens, strict=True):
        position = torch.arange(length)
        where = torch.tensor(ids, dtype=torch.long)[position // page] if length else position
        slot = position % page
        rows = source[at : at + length]
        if case.layout == "slots":
            cache[where] = rows
        elif case.layout == "linear":
            cache[where, slot] = rows
        elif is_key:
            cache[where, :, :, slot] = rows.view(length, heads, dim // 16, 16)
        else:
            cache[where, :, slot // 16, :, slot % 16] = rows
        at += length
    return cache.view(E4M3)


def build(case: Case) -> Built:
    """Fresh tensors of a case. Pages of a request are scattered; the seed is printed so that a failure can be
    repeated."""
    print(f"seed {case.seed}: {case}")
    generator = torch.Generator().manual_seed(case.seed)
    counts = [-(-length // case.page) for length in case.kv_lens]
    used = sum(counts)
    pages = used + case.spare_pages
    order = torch.randperm(pages, generator=generator).tolist()
    page_ids, at = [], 0
    for count in counts:
        page_ids.append(order[at : at + count])
        at += count
    total = sum(case.kv_lens)
    keys = fp8((total, case.kv_heads, case.dim), generator, case.deviation)
    vals = fp8((total, case.kv_heads, case.dim_v), generator)
    k = scatter(case, keys, page_ids, pages, True, case.dim)
    v = scatter(case, vals, page_ids, pages, False, case.dim_v)
    cu = [case.cu_start + offset for offset in accumulate(case.q_lens, initial=0)]
    total_q = cu[-1] + case.cu_start  # as many rows that belong to nobody behind as before
    q = fp8((total_q, case.heads, case.dim), generator)
    q.view(torch.uint8)[: cu[0]] = NAN_BYTE
    q.view(torch.uint8)[cu[-1] :] = NAN_BYTE
    kwargs = table_args(case, page_ids, wild=pages + 7)
    for name, number in zip(("q_descale", "k_descale", "v_descale"), case.descales, strict=True):
        kwargs[name] = torch.tensor([number])
    kwargs["causal"] = case.causal
    if case.softmax_scale is not None:
        kwargs["softmax_scale"] = case.softmax_scale
    out, out_whole = guarded((total_q, case.heads, case.dim_v), torch.bfloat16)
    lse, lse_whole = guarded((case.heads, total_q), torch.float32)
    args = (q, k, v, torch.tensor(cu, dtype=torch.int32), max([*case.q_lens, 0]), max([*case.kv_lens, 0]))
    built = Built(case, args, kwargs, cu, page_ids, out, lse)
    for tensor, whole, rows in ((out, out_whole, 0), (lse, lse_whole, 1)):
        mask = torch.ones(whole.view(torch.uint8).shape, dtype=torch.bool)
        start = tensor.storage_offset() * tensor.element_size()
        inside = mask[start : start + tensor.numel() * tensor.element_size()]
        # Rows of requests are for the numerical comparison; all other bytes are for the canary.
        inside = inside.view(*tensor.shape[:-1], -1) if tensor.numel() else inside
        if tensor.numel() and rows == 0:
            inside[cu[0] : cu[-1]] = False
        elif tensor.numel():
            inside[:, cu[0] * 4 : cu[-1] * 4] = False
        built._guards.append((whole, mask))
    built.poison()
    return built


def table_args(case: Case, page_ids: list[list[int]], wild: int) -> dict[str, Any]:
    """Block table or CSR tensors; entries that no request uses are wild."""
    lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    if case.table == "block":
        columns = max([-(-length // case.page) for length in case.kv_lens] + [0]) + 2
        table = torch.full((len(page_ids), columns), wild, dtype=torch.int32)
        for row, ids in enumerate(page_ids):
            table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return {"block_table": table, "seqlen_k": lens}
    flat = [wild, *[page for ids in page_ids for page in ids], wild]
    counts = [len(ids) for ids in page_ids]
    indptr = torch.tensor(list(accumulate(counts, initial=1)), dtype=torch.int32)
    args = {"kv_indptr": indptr, "kv_page_indices": torch.tensor(flat, dtype=torch.int32)}
    if case.page > 1 or case.table == "csr_last":
        last = [(length - 1) % case.page + 1 if length else wild for length in case.kv_lens]
        args["kv_last_page_lens"] = torch.tensor(last, dtype=torch.int32)
    return args


def run(built: Built, executor: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the public function on one executor, with LSE, into poisoned outputs; assert that this executor ran it."""
    (out, lse), calls = submit(built, executor, **changes)
    q, max_seqlen_q = built.args[0], built.args[4]
    assert_ran(calls, executor, launched=bool(q.shape[0] and max_seqlen_q and built.case.q_lens))
    return out, lse


def submit(built: Built, executor: str, **changes: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], list[Call]]:
    """Call the public function on one executor, with LSE; what it does may run later, in a stream or graph."""
    kwargs = {"out": built.out, "lse": built.lse, "return_lse": True, **built.kwargs, **changes}
    with use_options(executor=executor), record() as calls:
        return call_on_device(executor, built.args, kwargs), calls


def on_gpu(executor: str) -> bool:
    """Whether an executor's calls need their tensors on a GPU here."""
    return executor in ("triton", "gpu") and torch.cuda.is_available()


def call_on_device(executor: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The public function, on twins of all tensors where the executor needs a GPU.

    Whole storages travel, so that what stands around and between tensors is the same there; what the call wrote into
    ``out`` and ``lse``, and around them, travels back.
    """
    if not on_gpu(executor):
        return flydsl_flash_attn_paged_prefill_func(*args, **kwargs)
    storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def twin(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            whole = whole[: _ACCESSIBLE.get((storage.data_ptr(), storage.nbytes()))]
            storages[storage.data_ptr()] = (whole, whole.cuda())
        there = torch.empty(0, dtype=value.dtype, device="cuda")
        moved = storages[storage.data_ptr()][1].untyped_storage()
        return there.set_(moved, value.storage_offset(), value.shape, value.stride())

    there = {name: twin(value) for name, value in kwargs.items()}
    result = flydsl_flash_attn_paged_prefill_func(*[twin(value) for value in args], **there)
    results = list(result) if isinstance(result, tuple) else [result]
    torch.cuda.synchronize()
    for at, name in enumerate(("out", "lse")[: len(results)]):
        given = kwargs.get(name)
        if given is None:
            results[at] = results[at].cpu()
            continue
        assert results[at] is there[name], f"{name} is not the tensor that was given"
        whole, moved = storages[given.untyped_storage().data_ptr()]
        whole.copy_(moved)
        results[at] = given
    if sum(whole.numel() for whole, _ in storages.values()) > 2**30:
        # Many processes share one GPU: none keeps what only a huge pool needs.
        there.clear()
        storages.clear()
        torch.cuda.empty_cache()
    return tuple(results) if isinstance(result, tuple) else results[0]


def assert_ran(calls: list[Call], executor: str, launched: bool = True) -> None:
    """Exactly one call, on the path and executor that were asked for; a native one executed instructions, where it has
    any rows."""
    assert len(calls) == 1
    (call,) = calls
    assert (call.plan.path, call.plan.executor) == (PATHS[executor], executor)
    if call.plan.path == "paged":
        assert bool(call.launches) == launched
        assert all(launch.instructions for launch in call.launches)
    if executor == "triton":
        assert bool(call.launches) == launched


def bf16_ulp(values: torch.Tensor) -> torch.Tensor:
    """Distance between neighbouring bf16 numbers (8 significant bits) at each value."""
    _, exponent = torch.frexp(values.abs().clamp(min=torch.finfo(torch.bfloat16).tiny))
    return torch.ldexp(torch.ones_like(values), exponent - 8)


def compare(built: Built, out: torch.Tensor, lse: torch.Tensor, executor: str) -> None:
    """Active rows numerically against float64, inactive rows and everything around the outputs exactly."""
    expected, expected_lse = built.reference()
    rows = slice(built.cu[0], built.cu[-1])
    compare_out(out[rows], expected[rows], executor)
    compare_lse(lse[:, rows], expected_lse[:, rows], executor)
    built.check_canaries()


def compare_out(out: torch.Tensor, expected: torch.Tensor, executor: str) -> None:
    """Gates of the executor: one bf16 ulp for the fallback; NaN and zero rows exactly for all."""
    out = out.double()
    assert torch.equal(out.isnan(), expected.isnan()), "NaN in the wrong elements"
    blind = (expected == 0).all(-1)
    assert bool((out[blind] == 0).all()), "rows that see no key are not 0"
    poisoned = expected.isnan().any(-1)
    out, expected = out.nan_to_num(0.0), expected.nan_to_num(0.0)
    if executor == "torch":
        rounded = expected.to(torch.bfloat16).double()
        # Where values cancel to less than float32 resolves of their sum, a bf16 ulp of the remainder is finer than
        # float32 itself; the largest output stands for the size of the values.
        resolution = FLOAT32_CANCELLATION * expected.abs().max() if expected.numel() else expected
        error = (out - rounded).abs() / torch.maximum(bf16_ulp(rounded), resolution)
        assert float(error.max() if error.numel() else 0) <= 1.0
        return
    if expected.norm():
        assert float((out - expected).norm() / expected.norm()) <= 0.035
    seen = ~blind & ~poisoned
    if bool(seen.any()):
        assert float(torch.cosine_similarity(out[seen], expected[seen], dim=-1, eps=1e-300).min()) >= 0.998


def compare_lse(lse: torch.Tensor, expected: torch.Tensor, executor: str) -> None:
    """-inf and NaN exactly; elsewhere within the executor's gate times max(1, |LSE|)."""
    lse = lse.double()
    assert torch.equal(lse == -math.inf, expected == -math.inf), "-inf in the wrong rows"
    assert torch.equal(lse.isnan(), expected.isnan()), "NaN in the wrong rows"
    finite = expected.isfinite()
    gate = 2e-6 if executor == "torch" else 1e-4
    error = (lse - expected)[finite].abs() / expected[finite].abs().clamp(min=1.0)
    assert float(error.max() if error.numel() else 0) <= gate


def with_seed(case: Case, seed: int) -> Case:
    return replace(case, seed=seed)


# Native shapes as the contract's table "Where a valid call goes" has them; written out so that the package can't shrink
# them unseen.
NATIVE_DIMS = ((128, 128), (192, 128), (192, 192))
NATIVE_PAGES = {"slots": (1,), "linear": (1,), "vectorized": (16, 64, 1024)}
# (layout, page, D, Dv) of those that a kernel exists for.
NATIVE_BUILT = {("vectorized", 64, 128, 128)}


def served(case: Case, executor: str) -> bool:
    """Whether an executor must serve a case: the dense path every case, the native one what is built."""
    native = case.causal and (case.layout, case.page, case.dim, case.dim_v) in NATIVE_BUILT
    return PATHS[executor] == "dense" or native


def on_served(names: str, rows: Iterable[Any], thin: int = 1) -> pytest.MarkDecorator:
    """Parametrise over rows, each on every executor that must serve it (what it refuses is tested in test_plan).

    What a row asks for is its `Case` (or its ``case``), or what it gives for ``layout``, ``page``, ``causal`` and
    ``dims``. Where an executor has no part in what is tested, those after the first take every ``thin``-th row.
    """
    asked = []
    for row in rows:
        values = dict(zip(names.split(","), row if isinstance(row, tuple) else (row,), strict=True))
        cases = [getattr(value, "case", value) for value in values.values()]
        known = {name: value for name, value in values.items() if name in ("layout", "page", "causal")}
        if "dims" in values:
            known["dim"], known["dim_v"] = values["dims"]
        case = next((case for case in cases if isinstance(case, Case)), Case((), (), **known))
        asked.append((case, tuple(values.values())))
    given: list[tuple[Any, ...]] = []
    for executor in EXECUTORS:
        mine = [(executor, *values) for case, values in asked if served(case, executor)]
        given += mine[:: 1 if executor == EXECUTORS[0] else thin]
    return pytest.mark.parametrize(("executor", *names.split(",")), given, ids=str)


def check(built: Built, executor: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Run and compare. Where the executor need not serve the case, it must refuse it and write nothing: None then."""
    if served(built.case, executor):
        out, lse = run(built, executor, **changes)
        compare(built, out, lse, executor)
        return out, lse
    with pytest.raises(RuntimeError, match=executor):
        run(built, executor, **changes)
    assert all(bool((whole.view(torch.uint8) == 0xA5).all()) for whole, _ in built._guards), "a refused call wrote"
    return None


def token(built: Built, name: str, request: int, index: int) -> torch.Tensor:
    """The bytes of one token in "k" or "v", a writable view: [Hkv, dim]; vectorized K has [Hkv, dim/16, 16]."""
    case = built.case
    cache = built.args[1 if name == "k" else 2].view(torch.uint8)
    page, slot = built.page_ids[request][index // case.page], index % case.page
    if case.layout == "slots":
        return cache[page]
    if case.layout == "linear":
        return cache[page, slot]
    return cache[page, :, :, slot] if name == "k" else cache[page, :, slot // 16, :, slot % 16]


def fresh_seed() -> int:
    """A new seed for each run, printed; AITER_PAGED_FP8_TEST_SEED repeats one."""
    seed = int(os.environ.get("AITER_PAGED_FP8_TEST_SEED") or random.SystemRandom().getrandbits(32))
    print(f"AITER_PAGED_FP8_TEST_SEED={seed}")
    return seed


def sparse_bytes(size: int) -> torch.Tensor:
    """A byte tensor of any size that costs only what is touched (it reads as zeros), whatever the machine's memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= 0x4000  # MAP_NORESERVE, which the mmap module does not name before Python 3.13
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


#: Bytes that may be read of storages which end in inaccessible memory, by address and size.
_ACCESSIBLE: dict[tuple[int, int], int] = {}


def at_end_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last one of its mapping: reading on meets inaccessible memory and ends the
    process."""
    size = tensor.numel() * tensor.element_size()
    mapped = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = sparse_bytes(mapped + mmap.PAGESIZE)
    behind = ctypes.c_void_p(whole.data_ptr() + mapped)
    assert ctypes.CDLL(None, use_errno=True).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    _ACCESSIBLE[whole.data_ptr(), whole.numel()] = mapped
    copy = whole[mapped - size : mapped].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


_POSITIONAL = ("q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")


def named(built: Built) -> dict[str, Any]:
    """All arguments of a case by name, outputs and LSE included."""
    arguments = dict(zip(_POSITIONAL, built.args, strict=True))
    return {**arguments, **built.kwargs, "out": built.out, "lse": built.lse, "return_lse": True}


def as_meta(value: Any) -> Any:
    """A tensor's twin without memory: same shape, strides, dtype and need of gradient. Anything else stays what it
    is."""
    if not isinstance(value, torch.Tensor):
        return value
    twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return twin.requires_grad_(value.requires_grad)
