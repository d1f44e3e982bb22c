"""Native calls: which kernel a request needs, what it is run with, and its launch on a GPU or on the emulator."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..kernels.fmha_gfx950 import traits as numbers
from ..kernels.fmha_gfx950.traits import Traits
from ..options import Launch, Options
from ..page_table import BlockTable
from ..request import Request
from . import executors, flydsl_private
from .queues import EmulatorQueue, Queue, StreamQueue


@cache
def _traits(layout: str, page: int, head_dim: int, head_dim_v: int, table: str, lse: bool) -> Traits:
    return Traits(layout, page, head_dim, head_dim_v, table, lse)


def specialise(request: Request) -> Traits:
    """What a request's kernel is compiled for."""
    cache = request.cache
    table = "block" if isinstance(request.table, BlockTable) else "csr"
    return _traits(cache.name, cache.page, cache.head_dim, cache.head_dim_v, table, request.return_lse)


#: Bytes of a buffer that 32-bit offsets reach, with room for one access beyond.
REACH = 2**31 - 16


def out_of_reach(request: Request) -> str | None:
    """What of a call the kernel's addressing can't reach, naming argument and limit; None where it reaches all."""
    cache, table = request.cache, request.table
    total_q, heads, _ = request.q.shape
    rows = numbers.Traits.waves * numbers.STRIP
    group = heads // cache.kv_heads
    if group > rows:
        return _limit("q", f"{group} query heads a KV head", f"at most {rows}")
    # A workgroup's rows lie within one buffer: its positions times all heads.
    widest = rows // group * heads * max(cache.head_dim, cache.head_dim_v * 2)
    if widest > REACH:
        return _limit("q", f"{heads} heads: the rows of a query tile span {widest} bytes", f"at most {REACH}")
    if request.return_lse and group * total_q * 4 > REACH:
        return _limit("lse", f"{group} heads a KV head of {total_q} rows", f"at most {REACH} bytes of float32")
    columns = table.block_table.shape[1] if isinstance(table, BlockTable) else table.kv_page_indices.shape[0]
    if columns * 4 > REACH:
        name = "block_table" if isinstance(table, BlockTable) else "kv_page_indices"
        return _limit(name, f"{columns} entries", f"at most {REACH} bytes of int32")
    if request.batch * 4 > REACH or request.batch > numbers.GRID_YZ:
        return _limit(
            "cu_seqlens_q", f"{request.batch} requests", f"at most {numbers.GRID_YZ}, the grid's second dimension"
        )
    tiles = -(-min(request.max_seqlen_q, total_q) // (rows // group))
    if tiles > numbers.GRID_YZ:
        return _limit(
            "max_seqlen_q", f"{tiles} query tiles a request", f"at most {numbers.GRID_YZ}, the grid's third dimension"
        )
    longest = min(request.max_seqlen_k, columns * cache.page)
    if longest > numbers.MAX_KEYS:
        return _limit("max_seqlen_k", f"lengths of {longest} tokens", f"at most {numbers.MAX_KEYS}")
    if total_q > numbers.MAX_KEYS or cache.pages > numbers.MAX_KEYS:
        return _limit("q", f"{total_q} rows and {cache.pages} pages", f"at most {numbers.MAX_KEYS} of each")
    return None


def _limit(name: str, came: str, accepted: str) -> str:
    return f"{name}: got {came}; accepted by the native kernel: {accepted}"


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Digest of the kernel's source files."""
    digest = hashlib.sha256()
    for file in sorted(Path(numbers.__file__).parent.glob("*.py")):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Key:
    """All that a compiled kernel depends on."""

    arch: str
    flydsl: str
    sources: str
    options: str
    executor: str
    traits: Traits


@dataclass
class Kernel:
    """A compiled kernel: ``call(arguments, out_pointer, stream)``."""

    name: str
    call: Callable[..., None]


_kernels: dict[Key, Kernel] = {}
_lock = threading.RLock()


@cache
def _key(traits: Traits, executor: str) -> Key:
    version = executors.flydsl_version() or ""
    return Key(numbers.ARCH, version, sources_digest(), repr(compile_options(traits)), executor, traits)


def compile_options(traits: Traits) -> dict[str, Any]:
    """Options of the compiler for a specialisation."""
    # It is the vectoriser that pairs float32 operations into packed ones.
    return {"llvm_options": {"vectorize-slp": traits.packed_f32}}


def _compile(traits: Traits) -> Kernel:
    """Compile with null addresses, which compiles and launches nothing."""
    import flydsl.compiler as flyc

    from ..kernels.fmha_gfx950.arguments import Arguments, null
    from ..kernels.fmha_gfx950.builder import build

    compile_with = flyc.compile[compile_options(traits)]
    try:
        compiled = compile_with(build(traits), Arguments(**null()), _null_pointer(), flydsl_private.stream(None))
    except Exception as error:
        if "lld invocation failed" in str(error):
            raise RuntimeError(
                "compiling for hardware needs a linker, ld.lld of LLVM 19 or later in $ROCM_PATH/llvm/bin: install "
                "ROCm, or let ROCM_PATH name a folder that has it"
            ) from error
        raise
    flydsl_private.check_target(compiled)
    return Kernel(traits.name, compiled)


def _null_pointer() -> Any:
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    return flyc.from_c_void_p(fx.BFloat16, None)


def kernel(traits: Traits, executor: str, cache_dir: Path) -> tuple[Kernel, bool]:
    """The compiled kernel of a specialisation, and whether this call compiled it.

    Thread-safe: of several threads that need one kernel, one compiles it and the others wait.
    """
    key = _key(traits, executor)
    found = _kernels.get(key)
    if found is not None:
        return found, False
    with _lock:
        found = _kernels.get(key)
        if found is not None:
            return found, False
        with flydsl_private.compiling(emulated=executor == "emulator", cache_dir=cache_dir):
            _kernels[key] = made = _compile(traits)
        return made, True


def recording(executor: str) -> bool:
    """Whether a call on this executor is recorded into a graph of the emulator."""
    if executor != "emulator":
        return False
    from ..emulator.queue import capturing

    return capturing()


def preload(request: Request, executor: str, options: Options) -> tuple[str, bool]:
    """Compile what a request needs; its name, and whether it was compiled now."""
    found, compiled = kernel(specialise(request), executor, options.cache_dir)
    return found.name, compiled


def run(
    request: Request,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    executor: str,
    options: Options,
    launches: list[Launch] | None,
) -> None:
    """Launch the native kernel for a request.

    Parameters
    ----------
    request : Request
        One that plan sends here.
    out, lse : torch.Tensor
        Results; lse is None without ``return_lse``.
    executor : {"gpu", "emulator"}
    options : Options
    launches : list of Launch, optional
        Where what was launched is noted.
    """
    if limit := out_of_reach(request):
        raise NotImplementedError(limit)
    if not request.batch or not request.max_seqlen_q:
        return
    traits = specialise(request)
    found, compiled = kernel(traits, executor, options.cache_dir)
    note = Launch(found.name, compiled)
    if launches is not None:
        launches.append(note)
    queue: Queue = StreamQueue(request.device, request.stream) if executor == "gpu" else EmulatorQueue()
    tensors = _tensors(request, queue)
    values = _values(request, traits, tensors)
    values["out"] = out.data_ptr()
    values["lse"] = lse.data_ptr() if lse is not None else 0
    results = {"out": out} if lse is None else {"out": out, "lse": lse}

    def launch(stream: Any) -> None:
        # A compiled launcher reads fields by name and takes bare numbers; building an Arguments of FlyDSL's numbers
        # would take longer than all the rest of a call.
        found.call(SimpleNamespace(**values), values["out"], stream)

    queue.launch(launch, tensors, results, note)


def _tensors(request: Request, queue: Queue) -> dict[str, torch.Tensor]:
    """Every input by the name of its address in the kernel's arguments, packed where the kernel needs it so."""
    table, scales = request.table, request.scales

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_contiguous() else queue.copy(tensor)

    tensors = {"q": packed(request.q), "k": request.cache.k, "v": request.cache.v}
    tensors["cu_seqlens_q"] = packed(request.cu_seqlens_q)
    if isinstance(table, BlockTable):
        rows = table.block_table
        # Only the stride between rows is free.
        tensors["table"] = rows if rows.shape[1] < 2 or rows.stride(1) == 1 else packed(rows)
        tensors["lengths"] = packed(table.seqlen_k)
    else:
        tensors["table"] = packed(table.kv_page_indices)
        tensors["lengths"] = packed(table.kv_indptr)
        if table.kv_last_page_lens is not None:
            tensors["last_page_lens"] = packed(table.kv_last_page_lens)
    tensors |= {"q_descale": scales.q, "k_descale": scales.k, "v_descale": scales.v}
    return tensors


def _values(request: Request, traits: Traits, tensors: dict[str, torch.Tensor]) -> dict[str, int | float]:
    """The kernel's arguments, results excepted."""
    cache, table = request.cache, tensors["table"]
    total_q, heads, _ = request.q.shape
    group = heads // cache.kv_heads
    positions = numbers.positions_per_tile(traits, group)
    block = isinstance(request.table, BlockTable)
    return {
        "last_page_lens": 0,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        "k_page_stride": cache.k_page_stride,
        "v_page_stride": cache.v_page_stride,
        "table_stride": table.stride(0) if block else 0,
        "table_entries": table.shape[1] if block else table.shape[0],
        "total_q": total_q,
        "requests": request.batch,
        "heads": heads,
        "kv_heads": cache.kv_heads,
        "group": group,
        "positions": positions,
        "reciprocal": numbers.group_reciprocal(traits, group),
        "ranks": -(-min(request.max_seqlen_q, total_q) // positions),
        "pages": cache.pages,
        # The bound is the caller's and may be any integer; the kernel counts in 32 bits.
        "max_seqlen_k": min(request.max_seqlen_k, numbers.MAX_KEYS),
        "softmax_scale": request.scales.softmax,
    }
