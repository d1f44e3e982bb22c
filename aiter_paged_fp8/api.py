"""The public functions. They read like the contract: describe, decide, run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .fallback import providers
from .options import Call, Options, current_calls, current_options
from .planner import Code, Plan, decide, log_once
from .request import E4M3, Request, check_metadata, describe, describe_positional
from .runtime import native

__all__ = [
    "Support",
    "flydsl_flash_attn_batch_prefill_func",
    "flydsl_flash_attn_paged_prefill_func",
    "flydsl_flash_attn_paged_prefill_preload",
    "flydsl_flash_attn_paged_prefill_supported",
    "plan",
]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def flydsl_flash_attn_paged_prefill_func(
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
) -> Result:
    """FP8 attention of packed variable-length queries over a paged KV cache.

    Request b owns rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q and the tokens that its part of the page
    table names: ``out = softmax(q k^T * q_descale * k_descale * softmax_scale) v * v_descale``, causal with the
    diagonal at the bottom right.

    Parameters
    ----------
    q : torch.Tensor
        [total_q, Hq, D] float8_e4m3fn; any strides.
    k, v : torch.Tensor
        float8_e4m3fn. Linear slots [slots, Hkv, D] and [slots, Hkv, Dv]; linear pages [pages, page, Hkv, D] and
        [pages, page, Hkv, Dv]; or vectorized pages, K [pages, Hkv, D/16, page, 16] and V [pages, Hkv, page/16, Dv,
        16]. The stride between pages is free.
    cu_seqlens_q : torch.Tensor
        [B + 1] int32, row offsets of the requests. Need not start at 0; rows outside are neither read nor written.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths in tokens. A longer KV length counts as ``max_seqlen_k``.
    block_table, seqlen_k : torch.Tensor, optional
        [B, >= ceil(max_seqlen_k / page)] int32 page ids and [B] int32 lengths in tokens, together.
    kv_indptr, kv_page_indices, kv_last_page_lens : torch.Tensor, optional
        CSR: [B + 1], 1-D and [B] int32. Request b has the n pages between its offsets and (n - 1) * page + last
        tokens. Last lengths are optional at page 1; one outside [0, page] counts as its nearest bound. Ignored beside
        a block table.
    q_descale, k_descale, v_descale : torch.Tensor
        float32, one element each: real = fp8 * descale.
    softmax_scale : float, optional
        None = D ** -0.5.
    causal : bool
        Query i of a request sees keys j <= i + kv_len - q_len; with False, all of its keys.
    out : torch.Tensor, optional
        [total_q, Hq, Dv] bfloat16, contiguous, to write into.
    return_lse : bool
        Return the log-sum-exp as well.
    lse : torch.Tensor, optional
        [Hq, total_q] float32, contiguous, to write into; only with ``return_lse``.
    stream : torch.cuda.Stream, optional
        Stream that everything runs on; None = the current stream of q's device.

    Returns
    -------
    out : torch.Tensor
        [total_q, Hq, Dv] bfloat16. Rows that see no key are 0.
    lse : torch.Tensor
        Only with ``return_lse``: [Hq, total_q] float32, natural logarithm; -inf in rows that see no key.

    Raises
    ------
    TypeError, ValueError
        For a bad argument, named in the message; nothing has been written then.
    NotImplementedError
        For a valid call that neither the kernel nor the fallback serves, inputs that require grad, caches that would
        have to be copied.
    RuntimeError
        Where a forced executor can't serve the call.

    Examples
    --------
    >>> import torch
    >>> from aiter_paged_fp8 import flydsl_flash_attn_paged_prefill_func
    >>> one, i32 = torch.ones(1), torch.int32
    >>> q = torch.ones(3, 4, 128).to(torch.float8_e4m3fn)               # 3 queries, 4 heads
    >>> k = v = torch.ones(8, 1, 128).to(torch.float8_e4m3fn)           # 8 slots, 1 KV head
    >>> out = flydsl_flash_attn_paged_prefill_func(
    ...     q, k, v, torch.tensor([0, 3], dtype=i32), 3, 5,
    ...     kv_indptr=torch.tensor([0, 5], dtype=i32), kv_page_indices=torch.tensor([7, 1, 3, 2, 0], dtype=i32),
    ...     q_descale=one, k_descale=one, v_descale=one)
    >>> out.shape, out.dtype
    (torch.Size([3, 4, 128]), torch.bfloat16)
    """
    request = describe_positional(
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
    options = current_options()
    return _run(request, decide(request, options), options)


def _run(request: Request, chosen: Plan, options: Options) -> Result:
    """Carry out a plan."""
    log_once(chosen)
    calls = current_calls()
    call = None
    if calls is not None:
        call = Call(chosen)
        calls.append(call)
    if chosen.path is None:
        if options.executor != "auto":
            raise RuntimeError(f"executor {options.executor} was asked for and can't serve this call: {chosen.reason}")
        raise NotImplementedError(chosen.reason)
    if options.check_metadata:
        check_metadata(request, captured=chosen.path == "paged" and native.recording(chosen.executor or ""))
    q, out, lse = request.q, request.out, request.lse
    if out is None:
        out = torch.empty((q.shape[0], q.shape[1], request.cache.head_dim_v), dtype=torch.bfloat16, device=q.device)
    if lse is None and request.return_lse:
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    if request.stream is not None:
        # Memory that the caller may free while this stream still writes it.
        for result in (out, lse):
            if result is not None and result.is_cuda:
                result.record_stream(request.stream)
    if out.numel():
        launches = None if call is None else call.launches
        if chosen.path == "paged":
            native.run(request, out, lse, chosen.executor or "", options, launches)
        else:
            providers.by_name(chosen.executor).run(request, out, lse, launches)
    return out if lse is None else (out, lse)


def plan(*args: Any, arch: str | None = None, **kwargs: Any) -> Plan:
    """Where a call with these arguments would go, and why. Runs nothing and reads no tensor's contents.

    Parameters
    ----------
    *args, **kwargs
        The arguments of `flydsl_flash_attn_paged_prefill_func`; meta tensors will do.
    arch : str, optional
        Architecture to plan for, such as ``"gfx950"``; None takes q's device. Required for meta tensors.

    Returns
    -------
    Plan
        Truthy when the call can run under the options in force.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the call itself would for a bad argument; ValueError for meta tensors without ``arch``.
    """
    return decide(describe(*args, **kwargs), current_options(), arch)


@dataclass(frozen=True)
class Support:
    """Whether the native kernel serves a call; truthy if so."""

    supported: bool
    code: Code
    reason: str

    def __bool__(self) -> bool:
        return self.supported


def flydsl_flash_attn_paged_prefill_supported(*args: Any, arch: str | None = None, **kwargs: Any) -> Support:
    """Whether a call with these arguments takes the native paged path: ``plan(...).path == "paged"``, with the reason.

    Parameters and errors are those of `plan`.
    """
    chosen = plan(*args, arch=arch, **kwargs)
    return Support(chosen.path == "paged", chosen.code, chosen.reason)


def flydsl_flash_attn_paged_prefill_preload(*args: Any, arch: str | None = None, **kwargs: Any) -> Plan:
    """Compile what a call with these arguments will need, so that the call itself compiles nothing.

    Executes nothing and touches no buffer; meta tensors and machines without the GPU will do. Of the dense fallback,
    Triton compiles where its GPU is and does nothing elsewhere; torch has nothing to compile.

    Returns
    -------
    Plan
        Where the call will go. Parameters and errors are those of `plan`.
    """
    request, options = describe(*args, **kwargs), current_options()
    chosen = decide(request, options, arch)
    if chosen.path == "paged":
        native.preload(request, chosen.executor or "", options)
    elif chosen and (compiling := providers.by_name(chosen.executor).preload):
        compiling(request)
    return chosen


def flydsl_flash_attn_batch_prefill_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_indptr: torch.Tensor | None,
    kv_page_indices: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    out: torch.Tensor | None = None,
    kv_last_page_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seqlen_k: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    kv_block_descale: torch.Tensor | None = None,
    sink_ptr: torch.Tensor | None = None,
    sink_size: int = 0,
) -> Result | None:
    """`aiter.ops.mha.mha_batch_prefill_func` where the native kernel serves it.

    Parameters
    ----------
    q, k, v, ...
        The argument list of AITER's function (its main branch of 2026-08), with the meanings of
        `flydsl_flash_attn_paged_prefill_func`. Results are always deterministic. One query per request
        (``max_seqlen_q == 1``) sees all its keys, causal or not.

    Returns
    -------
    out, (out, lse) or None
        None where the caller must go on to its own backend: dropout, soft cap, window, ALiBi, sink, block descales,
        attention probabilities, tensors that are not fp8 or come without descales, CSR pages without last-page
        lengths, or a call that would not take the native path. A forced executor (`use_options`) that isn't ``auto``
        serves the call, by the dense path too.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RuntimeError
        As `flydsl_flash_attn_paged_prefill_func`, for calls that ask for none of the features above. Kernel errors
        propagate.
    """
    if (
        dropout_p
        or logits_soft_cap
        or alibi_slopes is not None
        or return_attn_probs
        or kv_block_descale is not None
        or sink_ptr is not None
        or sink_size
        or q_descale is None
        or k_descale is None
        or v_descale is None
        or (window_size != (-1, -1) and list(window_size[:2]) != [-1, -1])
        or any(window_size[2:])
    ):
        return None
    if any(getattr(tensor, "dtype", E4M3) is not E4M3 for tensor in (q, k, v)):
        return None
    if block_table is None and kv_last_page_lens is None and isinstance(k, torch.Tensor):
        dims = k.dim()
        if dims > 3 and k.shape[3 if dims == 5 else 1] > 1:
            return None
    request = describe_positional(
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
        None,
        None,
    )
    if request.max_seqlen_q == 1 and not request.causal:
        request = request._replace(causal=True)
    options = current_options()
    chosen = decide(request, options)
    if options.executor == "auto" and (chosen.path != "paged" or native.out_of_reach(request)):
        return None
    return _run(request, chosen, options)
