"""One immutable, validated description of a call. Every error message about an argument is made here, and nowhere else.

`describe` reads metadata only: shapes, dtypes, devices and strides. It is legal on meta tensors and during graph
capture. `check_metadata` reads contents, and runs only where the caller asked for it.
"""

from __future__ import annotations

import math
from decimal import Decimal
from itertools import pairwise
from numbers import Real
from operator import index
from typing import Any, NamedTuple, NoReturn

import torch

from .layouts import PACK, Cache, Linear, Vectorized
from .page_table import BlockTable, Csr, Table, to_host

# The values of a request are named tuples, built by the tuple's own constructor: a frozen dataclass takes 0.3
# microseconds a field to build, which for one call would be more than all of its checks.
_value = tuple.__new__

E4M3, BFLOAT16, FLOAT32, INT32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32
Tensor = torch.Tensor
# A softmax scale must survive as a float32: from its smallest positive value to its largest finite one.
_MIN_SCALE, _MAX_SCALE = 2.0**-149, torch.finfo(torch.float32).max

_K_FORMS = (
    "[slots, Hkv, D], [pages, page, Hkv, D] (linear) or [pages, Hkv, D/16, page, 16] (vectorized); see docs/layouts.md"
)


class Scales(NamedTuple):
    """Descales (float32, one element each, on the device) and the softmax scale (a host number)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax: float


class Request(NamedTuple):
    """A valid call. What comes after it trusts it.

    Attributes
    ----------
    q, cu_seqlens_q, max_seqlen_q
        Queries [total_q, Hq, D], their row offsets [B + 1], and the bound of their lengths.
    cache : Linear or Vectorized
    table : BlockTable or Csr
    scales : Scales
    out, lse : torch.Tensor or None
        Where results go; None is allocated by the call.
    return_lse : bool
    max_seqlen_k : int
    causal : bool
    stream : torch.Stream or None
    device : torch.device
    """

    q: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    cache: Cache
    table: Table
    scales: Scales
    out: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    max_seqlen_k: int
    causal: bool
    stream: Any
    device: torch.device

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1


def _refuse(kind: type[Exception], name: str, came: object, accepted: str) -> NoReturn:
    raise kind(f"{name}: got {came}; accepted: {accepted}")


def _shape(tensor: torch.Tensor) -> str:
    return f"shape {list(tensor.shape)}"


def _refuse_tensor(name: str, value: object, dtype: torch.dtype, device: torch.device | None, what: str) -> NoReturn:
    """What is wrong with something that is not a tensor of this dtype on this device without gradient."""
    if not isinstance(value, torch.Tensor):
        _refuse(TypeError, name, type(value).__name__, f"a tensor, {what}")
    if value.dtype is not dtype:
        hint = " (fnuz and e5m2 are other formats)" if dtype is E4M3 else ""
        _refuse(TypeError, name, value.dtype, f"{dtype}{hint}, {what}")
    if device is not None and value.device != device:
        _refuse(ValueError, name, f"a tensor on {value.device}", f"q's device, {device}")
    _refuse(NotImplementedError, name, "requires_grad=True", "tensors that need no gradient; there is no backward")


def _ints(name: str, value: Any, device: torch.device, what: str) -> torch.Size:
    """Shape of an int32 tensor (which can't require grad)."""
    if not isinstance(value, Tensor) or value.dtype is not INT32 or value.device != device:
        _refuse_tensor(name, value, INT32, device, what)
    return value.shape


def _length(name: str, value: object) -> int:
    try:
        # A tensor would be read from the device; True is no length.
        number = None if isinstance(value, bool | torch.Tensor) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        came = f"a tensor, {_shape(value)}" if isinstance(value, torch.Tensor) else repr(value)
        _refuse(TypeError, name, came, "an integer (a Python or numpy int; tensors would need a device read)")
    if number < 0:
        _refuse(ValueError, name, number, "an integer >= 0")
    return number


def _flag(name: str, value: object) -> bool:
    if value is True or value is False:
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    _refuse(TypeError, name, repr(value), "True or False")


def _refuse_descale(name: str, value: Any, device: torch.device) -> NoReturn:
    if isinstance(value, Tensor) and value.dtype is FLOAT32 and value.device == device and not value.requires_grad:
        _refuse(ValueError, name, _shape(value), "one element, of any shape (per-tensor descale)")
    _refuse_tensor(name, value, FLOAT32, device, "one element: real = fp8 * descale")


def _softmax_scale(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        _refuse(TypeError, "softmax_scale", type(value).__name__, "None or a real number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not _MIN_SCALE <= number <= _MAX_SCALE:  # NaN compares false, so it ends here too
        _refuse(ValueError, "softmax_scale", number, "None or a positive finite number that float32 can hold")
    return number


def _page_stride(name: str, cache: torch.Tensor) -> int:
    """The free stride between pages, once everything inside a page is known to be packed."""
    strides = cache.stride()
    packed = 1
    for dim in range(cache.dim() - 1, 0, -1):
        size = cache.shape[dim]
        if size > 1 and strides[dim] != packed:
            _refuse(
                NotImplementedError,
                name,
                f"stride {strides[dim]} in dim {dim} of {_shape(cache)}",
                f"{packed} there: any stride between pages, a packed layout inside a page (caches are never copied)",
            )
        packed *= size
    return strides[0]


def _cache(k: torch.Tensor, v: torch.Tensor, q_heads: int, head_dim: int) -> Cache:
    ks, vs = k.shape, v.shape
    dims = len(ks)
    if dims not in (3, 4, 5):
        _refuse(ValueError, "k", _shape(k), _K_FORMS)
    if len(vs) != dims:
        _refuse(ValueError, "v", _shape(v), f"the layout of k, which has {dims} dims")
    if dims == 5:
        pages, heads, packs, page, pack = ks
        pages_v, heads_v, packs_v, dim_v, pack_v = vs
        dim = packs * PACK
        if pack != PACK:
            _refuse(ValueError, "k", _shape(k), f"a last dim of {PACK} fp8 elements in the vectorized layout")
        if page % PACK:
            _refuse(
                ValueError, "k", f"pages of {page} tokens, {_shape(k)}", f"multiples of {PACK} tokens if vectorized"
            )
        page_v = packs_v * PACK if pack_v == PACK else -1
    elif dims == 4:
        pages, page, heads, dim = ks
        pages_v, page_v, heads_v, dim_v = vs
    else:
        pages, heads, dim = ks
        pages_v, heads_v, dim_v = vs
        page = page_v = 1
    if pages_v != pages or heads_v != heads or page_v != page:
        same = f"k's {pages} pages of {page} tokens and {heads} heads in k's layout (Dv is free), k having {_shape(k)}"
        _refuse(ValueError, "v", _shape(v), same)
    if dim != head_dim:
        _refuse(ValueError, "k", f"head dim {dim} in {_shape(k)}", f"q's head dim, {head_dim}")
    if not heads or q_heads % heads:
        _refuse(ValueError, "k", f"{heads} KV heads", f"a number of KV heads that divides q's {q_heads} heads")
    if not page or not dim_v:
        _refuse(ValueError, "v", _shape(v), "pages of at least 1 token and a head dim of at least 1")
    k_stride = page * heads * dim if k.is_contiguous() else _page_stride("k", k)
    v_stride = page * heads * dim_v if v.is_contiguous() else _page_stride("v", v)
    kind: type[Cache] = Vectorized if dims == 5 else Linear
    return _value(kind, (k, v, pages, page, heads, dim, dim_v, k_stride, v_stride))


def _block_table(
    batch: int, page: int, max_seqlen_k: int, device: torch.device, block_table: Any, seqlen_k: Any
) -> BlockTable:
    rows = _ints("block_table", block_table, device, "[B, columns]")
    if seqlen_k is None:
        _refuse(ValueError, "seqlen_k", None, "[B] int32 together with block_table")
    lengths = _ints("seqlen_k", seqlen_k, device, "[B]")
    needed = -(-max_seqlen_k // page)
    if len(rows) != 2 or rows[0] != batch or rows[1] < needed:
        accepted = f"[{batch}, >= {needed}]: one row a request, ceil(max_seqlen_k {max_seqlen_k} / page {page}) columns"
        _refuse(ValueError, "block_table", _shape(block_table), accepted)
    if lengths != (batch,):
        _refuse(ValueError, "seqlen_k", _shape(seqlen_k), f"[{batch}], one length a request")
    return _value(BlockTable, (block_table, seqlen_k))


def _csr(
    batch: int, page: int, device: torch.device, kv_indptr: Any, kv_page_indices: Any, kv_last_page_lens: Any
) -> Csr:
    if kv_indptr is None and kv_page_indices is None:
        accepted = "block_table with seqlen_k, or kv_indptr with kv_page_indices"
        _refuse(ValueError, "block_table", "neither a block table nor kv_indptr", accepted)
    if kv_indptr is None:
        _refuse(ValueError, "kv_indptr", None, "[B + 1] int32 together with kv_page_indices")
    if kv_page_indices is None:
        _refuse(ValueError, "kv_page_indices", None, "1-D int32 together with kv_indptr")
    if _ints("kv_indptr", kv_indptr, device, "[B + 1]") != (batch + 1,):
        _refuse(ValueError, "kv_indptr", _shape(kv_indptr), f"[{batch + 1}], B + 1 of cu_seqlens_q")
    if len(_ints("kv_page_indices", kv_page_indices, device, "1-D")) != 1:
        _refuse(ValueError, "kv_page_indices", _shape(kv_page_indices), "a 1-D tensor of page ids")
    if kv_last_page_lens is None:
        if page != 1:
            accepted = f"[{batch}] int32 with pages of {page}; optional at page 1 only"
            _refuse(ValueError, "kv_last_page_lens", None, accepted)
    elif _ints("kv_last_page_lens", kv_last_page_lens, device, "[B]") != (batch,):
        _refuse(ValueError, "kv_last_page_lens", _shape(kv_last_page_lens), f"[{batch}], one length a request")
    return _value(Csr, (kv_indptr, kv_page_indices, kv_last_page_lens))


def _output(name: str, value: Any, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], dims: str) -> None:
    if not isinstance(value, Tensor) or value.dtype is not dtype or value.device != device or value.requires_grad:
        _refuse_tensor(name, value, dtype, device, dims)
    if value.shape != shape:
        _refuse(ValueError, name, _shape(value), f"{dims} = {list(shape)}")
    if not value.is_contiguous():
        _refuse(ValueError, name, f"strides {list(value.stride())}", "a contiguous tensor")


def _check_stream(stream: object, device: torch.device) -> None:
    if not isinstance(stream, torch.Stream):
        accepted = "None or a torch stream (wrap a raw handle in torch.cuda.ExternalStream)"
        _refuse(TypeError, "stream", type(stream).__name__, accepted)
    if stream.device != device:
        _refuse(ValueError, "stream", f"a stream of {stream.device}", f"None or a stream of q's device, {device}")


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_table: torch.Tensor | None = None,
    seqlen_k: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_page_indices: torch.Tensor | None = None,
    kv_last_page_lens: torch.Tensor | None = None,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse: torch.Tensor | None = None,
    stream: Any = None,
) -> Request:
    """Validate the arguments of the public function and describe the call.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, ...
        As in `aiter_paged_fp8.flydsl_flash_attn_paged_prefill_func`.

    Returns
    -------
    Request

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Naming the argument, what came and what is accepted. Nothing has been written then.
    """
    return describe_positional(
        q,
        k,
        v,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        block_table,
        seqlen_k,
        kv_indptr,
        kv_page_indices,
        kv_last_page_lens,
        q_descale,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        out,
        return_lse,
        lse,
        stream,
    )


def describe_positional(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    block_table: Any,
    seqlen_k: Any,
    kv_indptr: Any,
    kv_page_indices: Any,
    kv_last_page_lens: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    softmax_scale: Any,
    causal: Any,
    out: Any,
    return_lse: Any,
    lse: Any,
    stream: Any,
) -> Request:
    """`describe` without keywords, which would cost a call a microsecond and a half."""
    if not isinstance(q, Tensor) or q.dtype is not E4M3 or q.requires_grad:
        _refuse_tensor("q", q, E4M3, None, "[total_q, Hq, D]")
    device = q.device
    shape = q.shape
    if len(shape) != 3 or not shape[1] or not shape[2]:
        _refuse(ValueError, "q", _shape(q), "[total_q, Hq, D] with at least one head and one dim")
    total_q, heads, head_dim = shape
    if not isinstance(k, Tensor) or k.dtype is not E4M3 or k.device != device or k.requires_grad:
        _refuse_tensor("k", k, E4M3, device, _K_FORMS)
    if not isinstance(v, Tensor) or v.dtype is not E4M3 or v.device != device or v.requires_grad:
        _refuse_tensor("v", v, E4M3, device, "the layout of k")
    if not isinstance(cu_seqlens_q, Tensor) or cu_seqlens_q.dtype is not INT32 or cu_seqlens_q.device != device:
        _refuse_tensor("cu_seqlens_q", cu_seqlens_q, INT32, device, "[B + 1]")
    rows = cu_seqlens_q.shape
    if len(rows) != 1 or not rows[0]:
        _refuse(ValueError, "cu_seqlens_q", _shape(cu_seqlens_q), "[B + 1]: 1-D with at least one element")
    batch = rows[0] - 1
    if type(max_seqlen_q) is not int or max_seqlen_q < 0:
        max_seqlen_q = _length("max_seqlen_q", max_seqlen_q)
    if type(max_seqlen_k) is not int or max_seqlen_k < 0:
        max_seqlen_k = _length("max_seqlen_k", max_seqlen_k)
    cache = _cache(k, v, heads, head_dim)
    table: Table
    if block_table is not None:
        table = _block_table(batch, cache.page, max_seqlen_k, device, block_table, seqlen_k)
    elif seqlen_k is not None:
        _refuse(ValueError, "block_table", None, "[B, columns] int32 together with seqlen_k")
    else:
        table = _csr(batch, cache.page, device, kv_indptr, kv_page_indices, kv_last_page_lens)
    for name, scale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if (
            not isinstance(scale, Tensor)
            or scale.dtype is not FLOAT32
            or scale.device != device
            or scale.requires_grad
            or scale.numel() != 1
        ):
            _refuse_descale(name, scale, device)
    softmax_scale = head_dim**-0.5 if softmax_scale is None else _softmax_scale(softmax_scale)
    if causal is not True and causal is not False:
        causal = _flag("causal", causal)
    if return_lse is not True and return_lse is not False:
        return_lse = _flag("return_lse", return_lse)
    if out is not None:
        _output("out", out, BFLOAT16, device, (total_q, heads, cache.head_dim_v), "[total_q, Hq, Dv]")
    if lse is not None:
        if not return_lse:
            _refuse(ValueError, "lse", "a tensor without return_lse", "lse only together with return_lse=True")
        _output("lse", lse, FLOAT32, device, (heads, total_q), "[Hq, total_q]")
    if stream is not None:
        _check_stream(stream, device)
    return _value(
        Request,
        (
            q,
            cu_seqlens_q,
            max_seqlen_q,
            cache,
            table,
            _value(Scales, (q_descale, k_descale, v_descale, softmax_scale)),
            out,
            lse,
            return_lse,
            max_seqlen_k,
            causal,
            stream,
            device,
        ),
    )


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream records a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_metadata(request: Request, *, captured: bool = False) -> None:
    """Read offsets, lengths, page ids and descales, and refuse what could make numbers wrong.

    Parameters
    ----------
    request : Request
    captured : bool
        Whether the call is recorded for later, by other means than torch's.

    Raises
    ------
    ValueError
        Naming the argument, the request, the position in the tensor, and the value there.
    RuntimeError
        Under graph capture, where nothing can be read.
    """
    q, cache, table = request.q, request.cache, request.table
    if captured or capturing(q.device):
        raise RuntimeError("check_metadata: got a call under graph capture; accepted: calls whose metadata can be read")
    cu, *parts = to_host((request.cu_seqlens_q, *table.host_parts()))
    total_q = q.shape[0]
    for i, offset in enumerate(cu):
        if not 0 <= offset <= total_q:
            _wild("cu_seqlens_q", min(i, max(request.batch - 1, 0)), i, offset, f"0 to total_q {total_q}")
        if i and offset < cu[i - 1]:
            _wild("cu_seqlens_q", i - 1, i, offset, f"at least the offset before it, {cu[i - 1]}")
        if i and offset - cu[i - 1] > request.max_seqlen_q:
            _wild(
                "cu_seqlens_q", i - 1, i, offset, f"at most max_seqlen_q {request.max_seqlen_q} rows after {cu[i - 1]}"
            )
    if isinstance(table, BlockTable):
        lengths = parts[0]
        used = [range(-(-length // cache.page)) for length in lengths]
    else:
        lengths, used = _check_csr(table, parts, cache.page)
    for i, length in enumerate(lengths):
        if 0 <= length <= request.max_seqlen_k:
            continue
        accepted = f"a length of 0 to max_seqlen_k {request.max_seqlen_k}"
        if isinstance(table, BlockTable):
            _wild("seqlen_k", i, i, length, accepted)
        _wild("kv_indptr", i, i + 1, parts[0][i + 1], f"an offset that gives {accepted}, not of {length}")
    for i, pages_used in enumerate(used):
        row = table.block_table[i] if isinstance(table, BlockTable) else table.kv_page_indices
        name = "block_table" if isinstance(table, BlockTable) else "kv_page_indices"
        ids = row[pages_used.start : pages_used.stop]
        bad = ((ids < 0) | (ids >= cache.pages)).nonzero()
        if bad.numel():
            at = int(bad[0])
            _wild(name, i, pages_used.start + at, int(ids[at]), f"a page id of 0 to {cache.pages - 1}")
    for name, descale in (
        ("q_descale", request.scales.q),
        ("k_descale", request.scales.k),
        ("v_descale", request.scales.v),
    ):
        number = float(descale)
        if not math.isfinite(number):
            raise ValueError(f"{name}: got {number} at position 0, for every request; accepted: a finite number")


def _check_csr(table: Csr, parts: list[list[int]], page: int) -> tuple[list[int], list[range]]:
    indptr, count = parts[0], table.kv_page_indices.shape[0]
    lengths, used = [], []
    for i, (start, stop) in enumerate(pairwise(indptr)):
        if not 0 <= start <= count:
            _wild("kv_indptr", i, i, start, f"0 to kv_page_indices.numel() {count}")
        if not start <= stop <= count:
            _wild("kv_indptr", i, i + 1, stop, f"{start} to kv_page_indices.numel() {count}")
        length = stop - start
        if len(parts) > 1 and length:
            last = parts[1][i]
            if not 1 <= last <= page:
                _wild("kv_last_page_lens", i, i, last, f"1 to the page size {page}")
            length = (length - 1) * page + last
        lengths.append(length)
        used.append(range(start, stop))
    return lengths, used


def _wild(name: str, request: int, position: int, value: int, accepted: str) -> NoReturn:
    raise ValueError(f"{name}: got {value} at position {position}, for request {request}; accepted: {accepted}")
