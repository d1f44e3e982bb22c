"""Host side of the Triton provider: which calls it takes, the choice of tiles and splits, and the launches.

Nothing here reads the device: lengths, page ids and descales are looked at by the kernels only, so that a call can be
captured into a graph and its lengths may change from replay to replay. What a kernel is compiled for follows from
shapes, strides, head counts, layout and table kind; lengths and batch size choose no specialisation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..layouts import PACK, Vectorized
from ..options import Launch
from ..page_table import Csr
from ..request import Request, capturing

if TYPE_CHECKING:
    from ..planner import Facts

#: Architectures whose matrix units take OCP e4m3; on all others (e4m3fnuz ones too) bytes are decoded to float16. So on
#: gfx12, whose units would take it: Triton 3.6 aborts the process there.
_FP8_ARCHS = re.compile(r"sm_(89|9\d|1\d\d)|gfx950")
_ARCHS = re.compile(r"sm_(8\d|9\d|1\d\d)|gfx(90a|942|950|11\d\d|12\d\d)")
#: Of these, the ones on which the kernels have run: nobody gets them elsewhere without asking.
_SEEN = re.compile(r"sm_90")
#: Programs that a multiprocessor holds at once; parts of keys are made until there is one program for each place.
PROGRAMS_PER_UNIT = 2
#: Fewest tiles of keys in a part, most parts of a tile of rows.
MIN_TILES, MAX_PARTS = 4, 128
#: Rows of the merge that one program takes, and parts that it reads at once.
MERGE_ROWS, MERGE_PARTS = 4, 8


class Tiles(NamedTuple):
    """Query rows and keys per tile, warps per program, and how many tiles of keys are on their way at once."""

    rows: int
    keys: int
    warps: int
    stages: int


#: Of the kernel for Hopper: two programs a multiprocessor, so that one's softmax runs beside the other's products.
#: With LSE its scores are summed in float32 after each instruction; the registers for that come from tiles of half as
#: many keys.
LONG, LONG_LSE = Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 2)
#: Keys per tile of the other rows then: few keys, and code that runs once.
SHORT_KEYS = 64
#: V of linear pages is turned for it where that many tiles of rows gain by it, into at most so many bytes, for fewer
#: requests x KV heads than a grid has room for in its second dimension.
PACK_TILES, PACK_BYTES, PACK_HEADS = 8, 1 << 30, 1 << 16
#: Requests that a program looks at together when it searches for its tile.
CHUNK = 256


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why Triton can't be used here; None where it imports."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    try:
        from . import triton_kernels  # noqa: F401
    except ImportError as error:
        return f"Triton does not import: {error}"
    return None


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors."""
    from . import triton_kernels

    return not hasattr(triton_kernels.attend, "device_caches")


def refusal(facts: Facts, arch: str, forced: bool) -> str | None:
    """Why this provider does not serve a call (a phrase), or None.

    Parameters
    ----------
    facts : Facts
    arch : str
        Architecture that the call is planned for.
    forced : bool
        Whether the executor was asked for by name: only then does it serve; CPU tensors in Triton's interpreter.
    """
    kind = facts.device.type
    if kind == "cpu" and not forced:
        return "takes tensors on a GPU, the call has CPU tensors"
    if reason := missing():
        return reason
    if kind == "cpu":
        return None if interpreted() else "takes CPU tensors under TRITON_INTERPRET=1 only"
    if not _ARCHS.fullmatch(arch):
        return f"knows no architecture {arch}"
    if not forced and not _SEEN.fullmatch(arch):
        return f"was never run on {arch}: there it is taken only where it is asked for (use_options(executor='triton'))"
    if interpreted():
        return "runs in Triton's interpreter here (TRITON_INTERPRET=1), which takes CPU tensors only"
    return None


def expected(facts: Facts, arch: str) -> bool:
    """Whether a call on such a GPU counts on this provider."""
    return facts.device.type != "cpu" and bool(_SEEN.fullmatch(arch))


def tiles(fp8: bool, vectorized: bool, page: int, dim: int, dim_v: int) -> Tiles:
    """The tiles that measured best on an H200, by what the products are made of."""
    if max(dim, dim_v) > 192:
        # In float16 half as many keys: gfx9 and gfx12 have 64 KB of LDS.
        return Tiles(64, 64 if fp8 else 32, 4, 2)
    return Tiles(64, 128, 4, 2) if fp8 else Tiles(64, 64, 4, 2)


def _long(request: Request, q: torch.Tensor, out: torch.Tensor, row_tiles: int, with_lse: bool) -> Tiles | None:
    """Tiles of the kernel for Hopper, which takes the rows that see many keys; None where it does not serve.

    It copies 16 bytes at a time.
    """
    cache, tile = request.cache, LONG_LSE if with_lse else LONG
    if not _has_hopper(request.device) or not {cache.head_dim, cache.head_dim_v} <= {64, 128, 192}:
        return None
    addresses = [cache.k.data_ptr(), q.data_ptr(), out.data_ptr()]
    strides = [cache.k_page_stride, q.stride(0), q.stride(1)]
    if isinstance(cache, Vectorized):
        addresses.append(cache.v.data_ptr())
        strides.append(cache.v_page_stride)
        if tile.keys % cache.page and cache.page % tile.keys:
            return None
    elif (
        row_tiles < PACK_TILES
        or request.batch * cache.kv_heads >= PACK_HEADS
        or request.batch * _packed_bytes(request, tile) > PACK_BYTES
    ):
        return None
    return None if any(number % PACK for number in (*addresses, *strides)) else tile


def _packed_bytes(request: Request, tile: Tiles) -> int:
    """Bytes of V that a request has in packs at most."""
    tokens = -(-request.max_seqlen_k // tile.keys) * tile.keys
    return tokens * request.cache.kv_heads * request.cache.head_dim_v


def halves(dim: int) -> tuple[int, int]:
    """A head dim as one or two powers of two that hold it: 192 is 128 + 64."""
    if dim <= 64:
        return 64, 0
    if dim <= 128:
        return 128, 0
    return (128, 64) if dim <= 192 else (256, 0)


def _power(dim: int) -> int:
    """The power of two that holds a head dim."""
    return max(16, 1 << (dim - 1).bit_length())


def parts(programs: int, units: int, key_tiles: int) -> int:
    """Into how many parts the keys of each tile of rows are cut: 1 where rows alone fill the device."""
    room = units * PROGRAMS_PER_UNIT // max(programs, 1)
    return max(1, min(room, key_tiles // MIN_TILES, MAX_PARTS))


@lru_cache(maxsize=64)
def _units(device: torch.device) -> int:
    return 132 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=64)
def _has_fp8(device: torch.device) -> bool:
    from ..planner import device_arch

    return bool(_FP8_ARCHS.fullmatch(device_arch(device)))


@lru_cache(maxsize=64)
def _has_hopper(device: torch.device) -> bool:
    from ..planner import device_arch

    if device_arch(device) != "sm_90":
        return False
    try:
        from . import gluon_kernels  # noqa: F401
    except ImportError:
        # Gluon is Triton's experimental half: where its names differ, plain Triton does all.
        return False
    return True


class _Launch(NamedTuple):
    """One kernel launch: arguments, what it is compiled for, and the key that tells specialisations apart."""

    kernel: Any
    grid: tuple[int, ...]
    values: dict[str, Any]
    constants: dict[str, Any]
    key: tuple[Any, ...]


#: Keys of what was compiled and loaded in this process.
_ready: set[tuple[Any, ...]] = set()


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _launches(request: Request, out: torch.Tensor, lse: torch.Tensor | None) -> Iterator[_Launch]:
    from . import triton_kernels

    cache, table, scales = request.cache, request.table, request.scales
    q, device, batch = request.q, request.device, request.batch
    if q.stride(2) != 1:
        q = q.contiguous()
    vectorized, csr = isinstance(cache, Vectorized), isinstance(table, Csr)
    fp8 = _has_fp8(device)
    tile = tiles(fp8, vectorized, cache.page, cache.head_dim, cache.head_dim_v)
    total_q, heads = q.shape[0], q.shape[1]
    group = heads // cache.kv_heads
    row_tiles = -(-min(request.max_seqlen_q, total_q) * group // tile.rows)
    programs = min(row_tiles * batch, -(-total_q * group // tile.rows) + batch - 1) * cache.kv_heads
    splits = parts(programs, _units(device), -(-request.max_seqlen_k // tile.keys))
    if max(programs * splits, total_q * heads + tile.rows) >= 2**31:
        raise NotImplementedError(f"q: got {total_q} rows of {heads} heads; accepted: fewer than 2**31 rows x heads")
    part_out = part_lse = out
    if splits > 1:
        part_out = torch.empty((splits, total_q, heads, cache.head_dim_v), dtype=torch.float32, device=device)
        part_lse = torch.empty((splits, heads, total_q), dtype=torch.float32, device=device)
    last_lens = table.kv_last_page_lens if isinstance(table, Csr) else None
    if isinstance(table, Csr):
        lengths, ids, table_stride = _packed(table.kv_indptr), _packed(table.kv_page_indices), 0
        columns = ids.shape[0]
    else:
        lengths, ids = _packed(table.seqlen_k), table.block_table
        ids = ids if ids.stride(1) == 1 else ids.contiguous()
        columns, table_stride = ids.shape[1], ids.stride(0)
    (d0, d1), (v0, v1) = halves(cache.head_dim), halves(cache.head_dim_v)

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if fp8 else tensor.view(torch.uint8)

    values = {
        "q": raw(q),
        "k": raw(cache.k),
        "v": raw(cache.v),
        "out": out,
        "lse": out if lse is None else lse,
        "part_out": part_out,
        "part_lse": part_lse,
        "cu": _packed(request.cu_seqlens_q),
        "lengths": lengths,
        "table": ids,
        "lasts": lengths if last_lens is None else _packed(last_lens),
        "q_descale": scales.q,
        "k_descale": scales.k,
        "v_descale": scales.v,
        "softmax_scale": scales.softmax,
        "total_q": total_q,
        "most": request.max_seqlen_k,
        "columns": columns,
        "table_stride": table_stride,
        "pages": cache.pages,
        "batch": batch,
        "splits": splits,
        # Halvings that find one of so many levels (triton_work.item).
        "steps": min((request.max_seqlen_k * group // tile.rows + row_tiles + 1).bit_length(), 31),
        "per_request": 0,
        "q_row": q.stride(0),
        "q_head": q.stride(1),
        "k_stride": cache.k_page_stride,
        "v_stride": cache.v_page_stride,
    }
    constants = {
        "G": group,
        "HKV": cache.kv_heads,
        "D": cache.head_dim,
        "DV": cache.head_dim_v,
        "D0": d0,
        "D1": d1,
        "V0": v0,
        "V1": v1,
        "PAGE": cache.page,
        "VECTORIZED": vectorized,
        "CSR": csr,
        "HAS_LAST": last_lens is not None,
        "CAUSAL": request.causal,
        "HAS_LSE": lse is not None,
        "SPLIT": splits > 1,
        "FP8": fp8,
        "BM": tile.rows,
        "BN": tile.keys,
        "STAGES": tile.stages,
        "ALIGNED": cache.v_page_stride % PACK == 0,
        "LONG": 0,
        "CHUNK": CHUNK,
        "OVERLAP": False,
        "num_warps": tile.warps,
    }

    def launch(kernel: Any, grid: tuple[int, ...], **changed: Any) -> _Launch:
        offered = values | constants | changed
        names, constexprs = _arguments(kernel)
        some = {name: value for name, value in offered.items() if name in names}
        compiled = {name: value for name, value in offered.items() if name in constexprs or name in _OPTIONS}
        return _launch(kernel, grid, some, compiled, device)

    long = _long(request, q, out, row_tiles, lse is not None) if fp8 else None
    if long is not None:
        from . import gluon_kernels

        v, v_stride = values["v"], cache.v_page_stride
        if not vectorized:
            v_stride = _packed_bytes(request, long)
            packed = torch.empty((batch, v_stride), dtype=torch.uint8, device=device)
            grid = (-(-request.max_seqlen_k // long.keys), batch * cache.kv_heads)
            source = cache.v.view(torch.uint8)
            yield launch(
                triton_kernels.pack_v, grid, v=source, packed=packed, packed_stride=v_stride,
                E=_power(cache.head_dim_v), BN=long.keys,
            )  # fmt: skip
            v = packed.view(cache.v.dtype)
        # Of a request that has no fewer keys than rows, no more tiles than these are left to the other kernel. It runs
        # beside this one, which is launched next with programmatic dependent launch. (With parts of keys this did not
        # pay on an H200.)
        few = min(row_tiles, -(-long.keys * group // tile.rows))
        rest, beside = few * batch * cache.kv_heads * splits, splits == 1
        yield launch(triton_kernels.attend, (rest,), LONG=long.keys, per_request=few, BN=SHORT_KEYS, OVERLAP=beside)
        yield launch(
            gluon_kernels.attend_long, (programs * splits,), v=v, v_stride=v_stride, BM=long.rows, BN=long.keys,
            OVERLAP=beside, num_warps=long.warps, launch_pdl=beside,
        )  # fmt: skip
    else:
        yield launch(triton_kernels.attend, (programs * splits,))
    if splits > 1:
        blocks = -(-min(request.max_seqlen_q, total_q) * heads // MERGE_ROWS)
        yield launch(
            triton_kernels.combine, (blocks, batch), HQ=heads, E=_power(cache.head_dim_v),
            BR=MERGE_ROWS, AT_ONCE=MERGE_PARTS, num_warps=4,
        )  # fmt: skip


#: Options of the compiler and of a launch, given beside a kernel's arguments.
_OPTIONS = ("num_warps", "launch_pdl")


@lru_cache(maxsize=8)
def _arguments(kernel: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Names of a kernel's arguments, and of what it is compiled for."""
    annotations = {name: str(param.annotation) for name, param in signature(kernel.fn).parameters.items()}
    compiled = frozenset(name for name, annotation in annotations.items() if "constexpr" in annotation)
    return frozenset(annotations) - compiled, compiled


#: Arguments that Triton specialises on: addresses by their alignment, strides by value 1, divisibility and width.
_SPECIAL = ("q", "k", "v", "out", "packed", "q_row", "q_head", "k_stride", "v_stride", "packed_stride")


def _launch(
    kernel: Any, grid: tuple[int, ...], values: dict[str, Any], constants: dict[str, Any], device: torch.device
) -> _Launch:
    special: list[Any] = []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            special.append((value.dtype, name in _SPECIAL and value.data_ptr() % 16 == 0))
        elif isinstance(value, int):
            divisible = name in _SPECIAL and (value == 1, value % 16 == 0)
            special.append((divisible, -(2**31) <= value < 2**31))
    key = (kernel.__name__, device, *special, *constants.items())
    return _Launch(kernel, grid, values, constants, key)


@contextmanager
def _on_device(request: Request) -> Iterator[None]:
    if request.device.type != "cuda":
        yield
        return
    stream = nullcontext() if request.stream is None else torch.cuda.stream(request.stream)
    with torch.cuda.device(request.device), stream, torch.inference_mode():
        yield


def attend(request: Request, out: torch.Tensor, lse: torch.Tensor | None, launches: list[Launch] | None = None) -> None:
    """Attend every request of a call and write its rows; rows that belong to no request stay as they are.

    Parameters
    ----------
    request : Request
    out : torch.Tensor
        [total_q, Hq, Dv] bfloat16.
    lse : torch.Tensor, optional
        [Hq, total_q] float32.
    launches : list of Launch, optional
        Gets a note of each launch.

    Raises
    ------
    RuntimeError
        Under stream capture, where a kernel was not compiled before (by a call like this one, or by preload).
    """
    if not (request.batch and request.max_seqlen_q and request.q.shape[0]):
        return
    with _on_device(request):
        recording = capturing(request.device)
        for launch in _launches(request, out, lse):
            fresh = launch.key not in _ready
            if fresh and recording and not interpreted():
                raise RuntimeError(
                    f"stream: got a call under stream capture whose kernel {launch.kernel.__name__} is not compiled "
                    "yet; accepted: calls that ran before, or were preloaded, with the same shapes and strides"
                )
            launch.kernel[launch.grid](**launch.values, **launch.constants)
            _ready.add(launch.key)
            if launches is not None:
                launches.append(Launch(f"triton_{launch.kernel.__name__}", fresh and not interpreted()))


def preload(request: Request) -> None:
    """Compile and load what a call needs; runs nothing. Does nothing where there is no GPU to compile for."""
    if request.device.type != "cuda" or not (request.batch and request.max_seqlen_q and request.q.shape[0]):
        return
    shape = (request.q.shape[0], request.q.shape[1], request.cache.head_dim_v)
    with _on_device(request):
        out = (
            request.out if request.out is not None else torch.empty(shape, dtype=torch.bfloat16, device=request.device)
        )
        lse = request.lse
        if lse is None and request.return_lse:
            lse = torch.empty((shape[1], shape[0]), dtype=torch.float32, device=request.device)
        for launch in _launches(request, out, lse):
            compiled = launch.kernel.warmup(grid=launch.grid, **launch.values, **launch.constants)
            compiled._init_handles()
            _ready.add(launch.key)
