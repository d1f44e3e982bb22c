"""FP8 attention over paged KV caches in Triton: each program takes one tile of query rows through its keys.

A tile is ``BM`` rows of one KV head, where a row is a query token of one of the ``G`` query heads that share the KV
head, token-major: row r is token r // G, head r % G. Keys pass by in tiles of ``BN`` tokens, read where the page table
says; the first part of them is seen by all rows and needs no mask, the rest is (`_span` with and without ``MASKED``).

Softmax is the online one in the base-2 domain, with the weights lifted by ``LIFT`` powers of two: the largest weight of
a row is 2**8 then, inside of e4m3's range (448), and what is small beside it keeps its bits. O is divided by the
float32 sum of the weights before they were rounded.

Number formats: where ``FP8``, the products are e4m3 x e4m3 (that of weights and V only if V's tokens lie contiguous in
packs, ``VECTORIZED``: the matrix unit wants them so, and a transposition through registers costs more than it saves;
elsewhere weights and V are float16). Without ``FP8`` bytes are decoded to float16, which holds every e4m3 value.

Everything read from device memory is clamped (`triton_work.request`), offsets are 64 bits wide, and every access is
masked or clamped: wild metadata makes wrong numbers and no wild access.

Tensors: q [total_q, Hq, D], out [total_q, Hq, Dv] bf16, lse [Hq, total_q] float32; with ``SPLIT``, part_out
[splits, total_q, Hq, Dv] float32 and part_lse [splits, Hq, total_q] float32 (base 2), merged by `combine`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_work import item, page_id, request

#: Powers of two by which weights are lifted; an exact e4m3 number, and not above 448 (= 2**8.807).
LIFT: tl.constexpr = tl.constexpr(8.0)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
#: A place behind all tokens.
NEVER: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit
def _decode(raw):
    """e4m3 bytes as float16: the bits of one at the place of the other are 2**8 too small, and NaN is a number."""
    wide = raw.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half)


@triton.jit
def _bits(values):
    """The bytes of e4m3 numbers, or of what is bytes already."""
    return values.to(tl.uint8, bitcast=True)


@triton.jit
def _half(values):
    """e4m3 numbers, or their bytes, as float16."""
    if values.dtype == tl.uint8:
        half = _decode(values)
    else:
        half = values.to(tl.float16)
    return half


@triton.jit
def _k_tile(k, offsets, d, n, hi, D: tl.constexpr, FULL_D: tl.constexpr, MASKED: tl.constexpr):
    """[BN, part of D] of K."""
    if MASKED and FULL_D:
        tile = tl.load(k + offsets, mask=(n < hi)[:, None], other=0.0)
    elif MASKED:
        tile = tl.load(k + offsets, mask=(n < hi)[:, None] & (d < D)[None, :], other=0.0)
    elif FULL_D:
        tile = tl.load(k + offsets)
    else:
        tile = tl.load(k + offsets, mask=(d < D)[None, :], other=0.0)
    return tile


@triton.jit
def _v_packs(v, offsets, d, n, hi, DV: tl.constexpr, FULL_DV: tl.constexpr, MASKED: tl.constexpr):
    """[part of Dv, BN] of V whose tokens lie in packs.

    Packs are loaded whole, so that a length which is no multiple of one costs no wide load: a pack lies inside of its
    page, and what stands behind the length meets weights of 0.
    """
    if MASKED and FULL_DV:
        tile = tl.load(v + offsets, mask=((n // 16) * 16 < hi)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(v + offsets, mask=((n // 16) * 16 < hi)[None, :] & (d < DV)[:, None], other=0.0)
    elif FULL_DV:
        tile = tl.load(v + offsets)
    else:
        tile = tl.load(v + offsets, mask=(d < DV)[:, None], other=0.0)
    return tile


@triton.jit
def _v_tile(
    v, token, dim, d, n, hi, DV: tl.constexpr, FULL_DV: tl.constexpr, MASKED: tl.constexpr, VECTORIZED: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """[part of Dv, BN] of V where tokens lie in packs, else [BN, part of Dv]."""
    if VECTORIZED:
        offsets = token[None, :] + dim[:, None]
        if ALIGNED:
            # What the compiler can't see through the page table: runs of a pack.
            offsets = tl.max_contiguous(tl.multiple_of(offsets, (1, 16)), (1, 16))
        tile = _v_packs(v, offsets, d, n, hi, DV, FULL_DV, MASKED)
    else:
        tile = _k_tile(v, token[:, None] + dim[None, :], d, n, hi, DV, FULL_DV, MASKED)
    return tile


@triton.jit
def _scores(q0, q1, k0, k1, D1: tl.constexpr, FP8: tl.constexpr):
    """Q K^T; in float16 it is exact but for float32 sums."""
    if FP8:
        s = tl.dot(q0, k0.T)
        if D1 > 0:
            s = tl.dot(q1, k1.T, s)
    else:
        s = tl.dot(_half(q0), _half(k0).T)
        if D1 > 0:
            s = tl.dot(_half(q1), _half(k1).T, s)
    return s


@triton.jit
def _weigh(p, v, acc, FP8: tl.constexpr, VECTORIZED: tl.constexpr):
    """acc + P V."""
    if VECTORIZED and FP8:
        acc = tl.dot(p.to(tl.float8e4nv), v.T, acc)
    elif VECTORIZED:
        acc = tl.dot(p.to(tl.float16), _half(v).T, acc)
    else:
        acc = tl.dot(p.to(tl.float16), _half(v), acc)
    return acc


@triton.jit
def _weigh_seen(p, v, acc, seen, BN: tl.constexpr, FP8: tl.constexpr, VECTORIZED: tl.constexpr):
    """acc + P V where each row sees the first ``seen`` [BM] keys of the tile.

    0 x NaN is NaN, so V goes into the product without its NaN, and a row that sees one gets it afterwards: the first
    one of a column decides. ``seen`` may be more than the tile has.
    """
    bits = _bits(v)
    unusable = (bits & 0x7F) == 0x7F
    clean = tl.where(unusable, 0, bits).to(tl.uint8)
    if FP8:
        clean = clean.to(tl.float8e4nv, bitcast=True)
    n = tl.arange(0, BN)
    if VECTORIZED:
        first = tl.min(tl.where(unusable, n[None, :], NEVER), 1)
    else:
        first = tl.min(tl.where(unusable, n[:, None], NEVER), 0)
    result = _weigh(p, clean, acc, FP8, VECTORIZED)
    return tl.where(first[None, :] < seen[:, None], float("nan"), result)


@triton.jit
def _span(
    q0, q1, acc0, acc1, total, top, lo, hi, limit, scale, k, v, ids, last, pages, head, k_stride, v_stride,
    D: tl.constexpr, DV: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    HKV: tl.constexpr, PAGE: tl.constexpr, VECTORIZED: tl.constexpr, FP8: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Keys [lo, hi) of a request against a tile of rows; ``limit`` [BM] is how many keys each row sees."""
    FULL_D: tl.constexpr = D0 + D1 == D
    FULL_DV: tl.constexpr = V0 + V1 == DV
    #: Pages per tile of keys where a tile is whole pages or a part of one: 1 or 2 are looked up one tile ahead.
    ONE: tl.constexpr = PAGE % BN == 0
    TWO: tl.constexpr = BN == 2 * PAGE
    n_in = tl.arange(0, BN)
    d0, d1 = tl.arange(0, D0), D0 + tl.arange(0, D1 if D1 > 0 else 16)
    e0, e1 = tl.arange(0, V0), V0 + tl.arange(0, V1 if V1 > 0 else 16)
    if VECTORIZED:
        k_dim0 = head * (D * PAGE) + (d0 // 16) * (PAGE * 16) + d0 % 16
        k_dim1 = head * (D * PAGE) + (d1 // 16) * (PAGE * 16) + d1 % 16
        v_dim0 = head * (DV * PAGE) + e0 * 16
        v_dim1 = head * (DV * PAGE) + e1 * 16
    else:
        k_dim0, k_dim1 = head * D + d0, head * D + d1
        v_dim0, v_dim1 = head * DV + e0, head * DV + e1
    if ONE or TWO:
        next0 = tl.minimum(tl.maximum(tl.load(ids + lo // PAGE, mask=lo < hi, other=0), 0), pages - 1)
        next1 = next0
        if TWO:
            inside = (lo < hi) & (lo // PAGE + 1 <= last)
            next1 = tl.minimum(tl.maximum(tl.load(ids + lo // PAGE + 1, mask=inside, other=0), 0), pages - 1)
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        n0 = tl.multiple_of(n0, BN)
        n = n0 + n_in
        if ONE:
            page = next0.to(tl.int64)
            next0 = page_id(ids, tl.minimum((n0 + BN) // PAGE, last), pages)
            slot0 = n0 % PAGE
            if VECTORIZED:
                k_base, v_base = k + page * k_stride + slot0 * 16, v + page * v_stride + slot0 * DV
                k_token, v_token = n_in * 16, (n_in // 16) * (DV * 16) + n_in % 16
            else:
                k_base, v_base = k + page * k_stride + slot0 * (HKV * D), v + page * v_stride + slot0 * (HKV * DV)
                k_token, v_token = n_in * (HKV * D), n_in * (HKV * DV)
        else:
            k_base, v_base = k, v
            slot = n_in % PAGE if BN % PAGE == 0 else n % PAGE
            if TWO:
                page0, page1 = next0.to(tl.int64), next1.to(tl.int64)
                next0 = page_id(ids, tl.minimum(n0 // PAGE + 2, last), pages)
                next1 = page_id(ids, tl.minimum(n0 // PAGE + 3, last), pages)
                k_page = tl.where(n_in < PAGE, page0 * k_stride, page1 * k_stride)
                v_page = tl.where(n_in < PAGE, page0 * v_stride, page1 * v_stride)
            else:
                if MASKED:
                    page = page_id(ids, tl.minimum(n // PAGE, last), pages).to(tl.int64)
                else:
                    page = page_id(ids, n // PAGE, pages).to(tl.int64)
                k_page, v_page = page * k_stride, page * v_stride
            if VECTORIZED:
                k_token = k_page + slot * 16
                v_token = v_page + (slot // 16) * (DV * 16) + slot % 16
            else:
                k_token, v_token = k_page + slot * (HKV * D), v_page + slot * (HKV * DV)
        k0 = _k_tile(k_base, k_token[:, None] + k_dim0[None, :], d0, n, hi, D, FULL_D, MASKED)
        k1 = k0
        if D1 > 0:
            k1 = _k_tile(k_base, k_token[:, None] + k_dim1[None, :], d1, n, hi, D, FULL_D, MASKED)
        s = _scores(q0, q1, k0, k1, D1, FP8 and not EXACT)
        if MASKED:
            seen = n[None, :] < limit[:, None]
            s = tl.where(seen, s * scale, float("-inf"))
            raised = tl.maximum(top, tl.max(s, 1))
            # A row that saw no key yet has no maximum; any number will do in its place.
            shift = tl.where(raised == float("-inf"), 0.0, raised)
            p = tl.exp2(s - (shift - LIFT)[:, None])
        else:
            raised = tl.maximum(top, tl.max(s, 1) * scale)
            shift = raised
            p = tl.exp2(s * scale - (shift - LIFT)[:, None])
        kept = tl.exp2(top - shift)
        top = raised
        total = total * kept + tl.sum(p, 1)
        acc0 = acc0 * kept[:, None]
        if V1 > 0:
            acc1 = acc1 * kept[:, None]
        v0 = _v_tile(v_base, v_token, v_dim0, e0, n, hi, DV, FULL_DV, MASKED, VECTORIZED, ALIGNED)
        if MASKED:
            acc0 = _weigh_seen(p, v0, acc0, limit - n0, BN, FP8, VECTORIZED)
        else:
            acc0 = _weigh(p, v0, acc0, FP8, VECTORIZED)
        if V1 > 0:
            v1 = _v_tile(v_base, v_token, v_dim1, e1, n, hi, DV, FULL_DV, MASKED, VECTORIZED, ALIGNED)
            if MASKED:
                acc1 = _weigh_seen(p, v1, acc1, limit - n0, BN, FP8, VECTORIZED)
            else:
                acc1 = _weigh(p, v1, acc1, FP8, VECTORIZED)
    return acc0, acc1, total, top


#: What changes from call to call: neither values nor alignment may choose a specialisation. (Strides of q and of the
#: caches and the addresses of q, k, v and outputs do: they belong to a model and its pool.)
FREE = [
    "total_q", "most", "columns", "table_stride", "pages", "batch", "splits", "softmax_scale", "steps", "per_request",
]  # fmt: skip
FREE_POINTERS = [
    "cu",
    "lengths",
    "table",
    "lasts",
    "q_descale",
    "k_descale",
    "v_descale",
    "lse",
    "part_out",
    "part_lse",
]


@triton.jit
def _tile(
    b, tile, part, head, q, k, v, out, lse, part_out, part_lse, cu, lengths, table, lasts,
    q_descale, k_descale, v_descale, softmax_scale, total_q, most, columns, table_stride, pages, splits,
    q_row, q_head, k_stride, v_stride,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, PAGE: tl.constexpr, VECTORIZED: tl.constexpr, CSR: tl.constexpr,
    HAS_LAST: tl.constexpr, CAUSAL: tl.constexpr, HAS_LSE: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """One tile of a request's rows against its keys, or one part of them; where ``SHORT`` all of them with masks."""
    start, q_len, kv_len, ids = request(
        b, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, PAGE, CSR, HAS_LAST
    )
    rows = q_len * G
    r = tile * BM + tl.arange(0, BM)
    valid = r < rows
    token = r // G
    q_heads = head * G + r % G
    place = (start + token).to(tl.int64)
    if CAUSAL:
        ahead = kv_len - q_len
        limit = tl.minimum(kv_len, token + ahead + 1)
        hi = tl.minimum(kv_len, tl.minimum((tile * BM + BM - 1) // G, q_len - 1) + ahead + 1)
        whole = tl.minimum(kv_len, (tile * BM) // G + ahead + 1)
    else:
        limit = tl.full([BM], 0, tl.int32) + kv_len
        hi = kv_len
        whole = kv_len
    hi = tl.maximum(hi, 0)
    whole = tl.maximum(whole, 0)
    lo = 0
    if SPLIT:
        chunk = tl.cdiv(tl.cdiv(hi, splits), BN) * BN
        lo = tl.minimum(part * chunk, hi)
        hi = tl.minimum(lo + chunk, hi)
    # In whole tiles of keys from lo, which is a multiple of one where any key is left.
    whole = lo if SHORT else lo + tl.maximum(tl.minimum(whole, hi) - lo, 0) // BN * BN
    last = tl.maximum(tl.cdiv(kv_len, PAGE) - 1, 0)

    # In float64: the product of two tiny descales and a huge scale may be any number.
    scale64 = tl.load(q_descale).to(tl.float64) * tl.load(k_descale).to(tl.float64)
    scale64 = scale64 * softmax_scale * LOG2_E
    # A negative factor moves to q's signs, so that the largest score is the largest product.
    flip = tl.where(scale64 < 0, 0x80, 0)
    scale = tl.abs(scale64).to(tl.float32)
    q_at = q + place * q_row + q_heads.to(tl.int64) * q_head
    d0, d1 = tl.arange(0, D0), D0 + tl.arange(0, D1 if D1 > 0 else 16)
    q0 = tl.load(q_at[:, None] + d0[None, :], mask=valid[:, None] & (d0 < D)[None, :], other=0.0)
    q0 = (_bits(q0) ^ flip.to(tl.uint8)).to(q0.dtype, bitcast=True)
    q1 = q0
    if D1 > 0:
        q1 = tl.load(q_at[:, None] + d1[None, :], mask=valid[:, None] & (d1 < D)[None, :], other=0.0)
        q1 = (_bits(q1) ^ flip.to(tl.uint8)).to(q1.dtype, bitcast=True)
    acc0 = tl.zeros([BM, V0], tl.float32)
    acc1 = tl.zeros([BM, V1 if V1 > 0 else 16], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    e0, e1 = tl.arange(0, V0), V0 + tl.arange(0, V1 if V1 > 0 else 16)
    row_at = (place * (HKV * G) + q_heads) * DV
    lse_at = q_heads.to(tl.int64) * total_q + place
    # The matrix unit adds e4m3 products with some 14 bits: too few for the LSE of rows that see few keys, or whose
    # scores are large.
    if not SHORT:
        acc0, acc1, total, top = _span(
            q0, q1, acc0, acc1, total, top, lo, whole, limit, scale, k, v, ids, last, pages, head, k_stride,
            v_stride, D, DV, D0, D1, V0, V1, HKV, PAGE, VECTORIZED, FP8, BN, False, HAS_LSE, STAGES, ALIGNED,
        )  # fmt: skip
    acc0, acc1, total, top = _span(
        q0, q1, acc0, acc1, total, top, whole, hi, limit, scale, k, v, ids, last, pages, head, k_stride,
        v_stride, D, DV, D0, D1, V0, V1, HKV, PAGE, VECTORIZED, FP8, BN, True, True, 1, ALIGNED,
    )  # fmt: skip
    blind = total == 0
    divisor = tl.where(blind, 1.0, total)
    log2 = tl.where(blind, float("-inf"), top + tl.log2(divisor * 0.00390625))  # 2**-LIFT
    acc0 = acc0 / divisor[:, None]
    acc1 = acc1 / divisor[:, None]
    if SPLIT:
        row_at += part.to(tl.int64) * total_q * (HKV * G * DV)
        lse_at += part.to(tl.int64) * total_q * (HKV * G)
        tl.store(part_lse + lse_at, log2, mask=valid)
        any_key = valid & (total != 0)
        tl.store(part_out + row_at[:, None] + e0[None, :], acc0, mask=any_key[:, None] & (e0 < DV)[None, :])
        if V1 > 0:
            tl.store(part_out + row_at[:, None] + e1[None, :], acc1, mask=any_key[:, None] & (e1 < DV)[None, :])
    else:
        factor = tl.load(v_descale)
        acc0 = tl.where(blind[:, None], 0.0, acc0 * factor).to(tl.bfloat16)
        tl.store(out + row_at[:, None] + e0[None, :], acc0, mask=valid[:, None] & (e0 < DV)[None, :])
        if V1 > 0:
            acc1 = tl.where(blind[:, None], 0.0, acc1 * factor).to(tl.bfloat16)
            tl.store(out + row_at[:, None] + e1[None, :], acc1, mask=valid[:, None] & (e1 < DV)[None, :])
        if HAS_LSE:
            tl.store(lse + lse_at, log2 * LN_2, mask=valid)


@triton.jit(do_not_specialize=FREE, do_not_specialize_on_alignment=FREE_POINTERS)
def attend(
    q, k, v, out, lse, part_out, part_lse, cu, lengths, table, lasts, q_descale, k_descale, v_descale,
    softmax_scale, total_q, most, columns, table_stride, pages, batch, splits, steps, per_request,
    q_row, q_head, k_stride, v_stride,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, PAGE: tl.constexpr, VECTORIZED: tl.constexpr, CSR: tl.constexpr,
    HAS_LAST: tl.constexpr, CAUSAL: tl.constexpr, HAS_LSE: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
    LONG: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of rows against its keys; with ``SPLIT``, against one of ``splits`` parts of them.

    Grid: (tiles of rows x KV heads x splits), the longest tiles first (`triton_work.item`). Where ``LONG``, tiles whose
    rows all see that many keys are left to `gluon_kernels.attend_long`, and the grid is (``per_request`` x requests x
    KV heads x splits): each program takes every per_request-th of the other tiles of its request.
    """
    if OVERLAP:
        # attend_long, launched next with programmatic dependent launch, may start as soon as all programs got here.
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    n = tl.program_id(0)
    part = n % splits
    n = n // splits
    head = n % HKV
    n = n // HKV
    if LONG > 0:
        b = n % batch
        _, q_len, kv_len, _ = request(
            b, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, PAGE, CSR, HAS_LAST
        )
        # Tile t sees t * BM // G + ahead + 1 keys with all of its rows.
        end = tl.cdiv(q_len * G, BM)
        if CAUSAL:
            short = tl.cdiv((LONG - 1 - (kv_len - q_len)).to(tl.int64) * G, BM)
            end = tl.where(kv_len < LONG, end, tl.minimum(end, tl.maximum(short, 0)).to(tl.int32))
        else:
            end = tl.where(kv_len < LONG, end, 0)
        for tile in range(n // batch, end, per_request):
            _tile(
                b, tile, part, head, q, k, v, out, lse, part_out, part_lse, cu, lengths, table, lasts,
                q_descale, k_descale, v_descale, softmax_scale, total_q, most, columns, table_stride, pages, splits,
                q_row, q_head, k_stride, v_stride, G, HKV, D, DV, D0, D1, V0, V1, PAGE, VECTORIZED, CSR, HAS_LAST,
                CAUSAL, HAS_LSE, SPLIT, FP8, BM, BN, STAGES, ALIGNED, True,
            )  # fmt: skip
    else:
        b, from_last = item(
            n, tl.arange(0, CHUNK), cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, batch,
            steps, G, BM, PAGE, CSR, HAS_LAST, CHUNK,
        )  # fmt: skip
        _, q_len, _, _ = request(
            tl.maximum(b, 0), cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, PAGE, CSR,
            HAS_LAST,
        )  # fmt: skip
        tile = tl.cdiv(q_len * G, BM) - 1 - from_last
        if (b >= 0) & (tile >= 0):
            _tile(
                b, tile, part, head, q, k, v, out, lse, part_out, part_lse, cu, lengths, table, lasts,
                q_descale, k_descale, v_descale, softmax_scale, total_q, most, columns, table_stride, pages, splits,
                q_row, q_head, k_stride, v_stride, G, HKV, D, DV, D0, D1, V0, V1, PAGE, VECTORIZED, CSR, HAS_LAST,
                CAUSAL, HAS_LSE, SPLIT, FP8, BM, BN, STAGES, ALIGNED, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=FREE, do_not_specialize_on_alignment=FREE_POINTERS)
def pack_v(
    v, packed, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, batch, v_stride, packed_stride,
    HKV: tl.constexpr, DV: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, CSR: tl.constexpr,
    HAS_LAST: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """V of linear pages, turned so that tokens lie in packs: [requests, tiles of BN tokens, Hkv, BN / 16, Dv, 16].

    Grid: (tiles, requests x KV heads). ``v`` and ``packed`` are bytes; tokens past a request's end become 0.
    """
    b = tl.program_id(1) // HKV
    head = tl.program_id(1) % HKV
    tile = tl.program_id(0)
    _, q_len, kv_len, ids = request(
        b, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, PAGE, CSR, HAS_LAST
    )
    if (tile * BN < kv_len) & (q_len > 0):
        n, e = tl.arange(0, BN), tl.arange(0, E)
        at = tile * BN + n
        inside = at < kv_len
        page = page_id(ids, tl.minimum(at, kv_len - 1) // PAGE, pages).to(tl.int64)
        token = page * v_stride + at % PAGE * (HKV * DV) + head * DV
        values = tl.load(v + token[:, None] + e[None, :], mask=inside[:, None] & (e < DV)[None, :], other=0)
        place = packed + b.to(tl.int64) * packed_stride + (tile.to(tl.int64) * HKV + head) * (BN * DV)
        offsets = (n // 16 * (DV * 16) + n % 16)[None, :] + (e * 16)[:, None]
        tl.store(place + offsets, values.T, mask=(e < DV)[:, None])


@triton.jit(
    do_not_specialize=["total_q", "batch", "splits"],
    do_not_specialize_on_alignment=["cu", "v_descale", "lse", "part_out", "part_lse"],
)
def combine(
    out, lse, part_out, part_lse, cu, v_descale, total_q, batch, splits,
    HQ: tl.constexpr, DV: tl.constexpr, E: tl.constexpr, HAS_LSE: tl.constexpr, BR: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of ``BR`` rows (a row here: token x query head) of one request. Grid: (row blocks, requests)."""
    b = tl.program_id(1)
    start = tl.minimum(tl.maximum(tl.load(cu + b), 0), total_q)
    stop = tl.minimum(tl.maximum(tl.load(cu + b + 1), 0), total_q)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    valid = r < (stop - start).to(tl.int64) * HQ
    place, head = (start + r // HQ).to(tl.int64), r % HQ
    e = tl.arange(0, E)
    rows = total_q.to(tl.int64) * HQ
    lse_at = head.to(tl.int64) * total_q + place
    out_at = (place * HQ + head)[:, None] * DV + e[None, :]
    inside = valid[:, None] & (e < DV)[None, :]
    top = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, E], tl.float32)
    # Several parts at once: their loads wait together.
    for first in range(0, splits, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        own = part.to(tl.int64)[:, None] * rows
        log2 = tl.load(
            part_lse + own + lse_at[None, :], mask=(part < splits)[:, None] & valid[None, :], other=float("-inf")
        )
        # A part without keys wrote no numbers.
        some = inside[None, :, :] & (log2 != float("-inf"))[:, :, None]
        values = tl.load(part_out + own[:, :, None] * DV + out_at[None, :, :], mask=some, other=0.0)
        raised = tl.maximum(top, tl.max(log2, 0))
        shift = tl.where(raised == float("-inf"), 0.0, raised)
        kept, fresh = tl.exp2(top - shift), tl.exp2(log2 - shift[None, :])
        acc = acc * kept[:, None] + tl.sum(values * fresh[:, :, None], 0)
        total = total * kept + tl.sum(fresh, 0)
        top = raised
    blind = total == 0
    divisor = tl.where(blind, 1.0, total)
    result = tl.where(blind[:, None], 0.0, acc / divisor[:, None] * tl.load(v_descale))
    tl.store(out + out_at, result.to(tl.bfloat16), mask=inside)
    if HAS_LSE:
        natural = tl.where(blind, float("-inf"), (top + tl.log2(divisor)) * LN_2)
        tl.store(lse + lse_at, natural, mask=valid)
