"""The keys that all rows of a tile see, on Hopper: FP8 attention over vectorized pages, layouts chosen by hand.

Why not plain Triton: on an H200 its copies were what everything waited for (350 TFLOP/s). It brings packs into rows
of 128 swizzled bytes, so that each line of the cache is scattered over eight lines of shared memory. Here shared
memory has the order of the cache, [packs, rows, 16 bytes], which the matrix unit reads as its layout without swizzle:
a warp copies 512 contiguous bytes to 512 contiguous bytes.

One program: ``BM`` query rows (64, one warpgroup; two programs share a multiprocessor, so that one's softmax runs
beside the other's products) against all whole tiles of ``BN`` keys that every row sees. It writes the normalised
result so far as bf16 and its log2 sum; `triton_kernels.attend` goes on from there with ``RESUME``, through the
diagonal and the tail, which need masks.

Per tile t, with two buffers each for K and V (`_step`):

    wait for K(t+1), V(t); barrier (everybody is done with K(t), V(t-1))
    S(t+1) = Q K(t+1)^T, asynchronous
    copy K(t+2) and V(t+1) into the buffers that are free now
    maximum and weights P(t) of S(t); rescale O; O += P(t) V(t); wait for both products

No product is on its way from one iteration to the next: ptxas would wait after every single instruction of them then.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .triton_kernels import _FREE, _FREE_POINTERS

_LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
_LIFT: gl.constexpr = gl.constexpr(8.0)


@gluon.jit
def _request(
    b,
    cu,
    lengths,
    table,
    lasts,
    total_q,
    most,
    columns,
    table_stride,
    pages,
    PAGE: gl.constexpr,
    CSR: gl.constexpr,
    HAS_LAST: gl.constexpr,
):
    """As `triton_kernels._request`."""
    start = gl.minimum(gl.maximum(gl.load(cu + b), 0), total_q)
    stop = gl.minimum(gl.maximum(gl.load(cu + b + 1), 0), total_q)
    q_len = gl.maximum(stop - start, 0)
    if CSR:
        first = gl.load(lengths + b).to(gl.int64)
        end = gl.load(lengths + b + 1).to(gl.int64)
        stated = (end - first - 1) * PAGE
        if HAS_LAST:
            stated += gl.maximum(gl.load(lasts + b), 0)
        else:
            stated += PAGE
        first = gl.minimum(gl.maximum(first, 0), columns)
        end = gl.minimum(gl.maximum(end, 0), columns)
        capacity = gl.maximum(end - first, 0) * PAGE
        ids = table + first
    else:
        stated = gl.load(lengths + b).to(gl.int64)
        capacity = columns.to(gl.int64) * PAGE
        ids = table + b.to(gl.int64) * table_stride
    if pages <= 0:
        capacity = capacity * 0
    kv_len = gl.minimum(gl.minimum(stated, most), capacity)
    return start, q_len, gl.maximum(kv_len, 0).to(gl.int32), ids


@gluon.jit
def _max(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _page_base(ids, tile, n, stride, last, pages, PAGE: gl.constexpr, BN: gl.constexpr):
    """Element offset of each token's page, for the tokens ``n`` [BN] of a tile: ids are read once a page."""
    if PAGE % BN == 0:
        page = gl.minimum(gl.maximum(gl.load(ids + gl.minimum(tile * BN // PAGE, last)), 0), pages - 1)
        base = n.to(gl.int64) * 0 + page.to(gl.int64) * stride
    else:
        COUNT: gl.constexpr = BN // PAGE
        page = gl.minimum(gl.maximum(gl.load(ids + gl.minimum(tile * COUNT, last)), 0), pages - 1)
        base = n.to(gl.int64) * 0 + page.to(gl.int64) * stride
        for i in gl.static_range(1, COUNT):
            page = gl.minimum(gl.maximum(gl.load(ids + gl.minimum(tile * COUNT + i, last)), 0), pages - 1)
            base = gl.where(n >= i * PAGE, page.to(gl.int64) * stride, base)
    return base


@gluon.jit
def _copy_k(
    k,
    smem,
    ids,
    tile,
    head,
    stride,
    last,
    pages,
    FIRST: gl.constexpr,
    WIDTH: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    BN: gl.constexpr,
    NW: gl.constexpr,
):
    """K [BN, WIDTH of D] of a tile to shared memory: a warp takes 32 neighbouring tokens of one pack."""
    ACROSS: gl.constexpr = min(NW, WIDTH // 16)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [NW // ACROSS, ACROSS], [1, 0])
    n = gl.arange(0, BN, gl.SliceLayout(1, layout))
    d = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    slot = (tile * BN) % PAGE + n if PAGE % BN == 0 else n % PAGE
    token = _page_base(ids, tile, n, stride, last, pages, PAGE, BN) + slot * 16 + head * (D * PAGE)
    dim = (d // 16) * (PAGE * 16) + d % 16
    offsets = token[:, None] + dim[None, :]
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])
    async_copy.async_copy_global_to_shared(smem, k + offsets)


@gluon.jit
def _copy_v(
    v,
    smem,
    ids,
    tile,
    head,
    stride,
    last,
    pages,
    FIRST: gl.constexpr,
    WIDTH: gl.constexpr,
    DV: gl.constexpr,
    PAGE: gl.constexpr,
    BN: gl.constexpr,
    NW: gl.constexpr,
):
    """V [WIDTH of Dv, BN] of a tile to shared memory: a warp takes 32 neighbouring rows of one pack of tokens."""
    ACROSS: gl.constexpr = min(NW, BN // 16)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [NW // ACROSS, ACROSS], [1, 0])
    n = gl.arange(0, BN, gl.SliceLayout(0, layout))
    d = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(1, layout))
    slot = (tile * BN) % PAGE + n if PAGE % BN == 0 else n % PAGE
    token = _page_base(ids, tile, n, stride, last, pages, PAGE, BN)
    token += (slot // 16) * (DV * 16) + slot % 16 + head * (DV * PAGE)
    offsets = token[None, :] + (d * 16)[:, None]
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])
    async_copy.async_copy_global_to_shared(smem, v + offsets)


@gluon.constexpr_function
def _packs(rows, columns):
    """Shared memory [rows, columns] in packs of 16 bytes along the columns, as the cache has them: [columns / 16, rows,
    16]. It is what the matrix unit calls the layout without swizzle; a copy of packs is as straight as one of lines."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8]]
    bit = 1
    while bit < rows:
        bases.append([bit, 0])
        bit *= 2
    bit = 16
    while bit < columns:
        bases.append([0, bit])
        bit *= 2
    return gl.SharedLinearLayout(bases)


@gluon.jit
def _copy(
    k, v, k0, k1, v0, v1, ids, k_tile, v_tile, count, head, k_stride, v_stride, last, pages,
    D: gl.constexpr, DV: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr,
    PAGE: gl.constexpr, BN: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """K of one tile and V of another; past the last tile, that once more."""
    at = gl.minimum(k_tile, count - 1)
    _copy_k(k, k0, ids, at, head, k_stride, last, pages, 0, D0, D, PAGE, BN, NW)
    if D1 > 0:
        _copy_k(k, k1, ids, at, head, k_stride, last, pages, D0, D1, D, PAGE, BN, NW)
    at = gl.maximum(gl.minimum(v_tile, count - 1), 0)
    _copy_v(v, v0, ids, at, head, v_stride, last, pages, 0, V0, DV, PAGE, BN, NW)
    if V1 > 0:
        _copy_v(v, v1, ids, at, head, v_stride, last, pages, V0, V1, DV, PAGE, BN, NW)


@gluon.jit
def _scores(q0, q1, k0, k1, D1: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, score: gl.constexpr):
    """Q K^T, asynchronous."""
    s = gl.zeros([BM, BN], gl.float32, score)
    s = warpgroup_mma(q0, k0.permute((1, 0)), s, use_acc=False, is_async=True)
    if D1 > 0:
        s = warpgroup_mma(q1, k1.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _step(
    s, acc0, acc1, total, top, k, v, q0, q1, k0, k1, next_k0, next_k1, v0, v1, next_v0, next_v1, ids, t, count, scale,
    head, k_stride, v_stride, last, pages,
    D: gl.constexpr, DV: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr,
    PAGE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Tile t, whose scores are there."""
    score: gl.constexpr = s.type.layout
    lay0: gl.constexpr = acc0.type.layout
    lay1: gl.constexpr = acc1.type.layout
    async_copy.wait_group(0)
    gl.thread_barrier()
    fence_async_shared()
    following = _scores(q0, q1, next_k0, next_k1, D1, BM, BN, score)
    _copy(k, v, k0, k1, next_v0, next_v1, ids, t + 2, t + 1, count, head, k_stride, v_stride, last, pages,
          D, DV, D0, D1, V0, V1, PAGE, BN, NW)  # fmt: skip
    async_copy.commit_group()
    raised = gl.maximum(top, gl.reduce(s, 1, _max) * scale)
    p = gl.exp2(s * scale - gl.where(t < count, raised - _LIFT, float("inf"))[:, None])
    kept = gl.exp2(top - raised)
    total = total * kept + gl.reduce(p, 1, _add)
    narrow = p.to(gl.float8e4nv)
    acc0 = acc0 * gl.convert_layout(kept, gl.SliceLayout(1, lay0))[:, None]
    p0 = gl.convert_layout(narrow, gl.DotOperandLayout(0, lay0, 4))
    o0 = warpgroup_mma(p0, v0.permute((1, 0)), acc0, is_async=True)
    if V1 > 0:
        acc1 = acc1 * gl.convert_layout(kept, gl.SliceLayout(1, lay1))[:, None]
        p1 = gl.convert_layout(narrow, gl.DotOperandLayout(0, lay1, 4))
        o1 = warpgroup_mma(p1, v1.permute((1, 0)), acc1, is_async=True)
        following, acc0, acc1 = warpgroup_mma_wait(0, deps=(following, o0, o1))
    else:
        following, acc0 = warpgroup_mma_wait(0, deps=(following, o0))
    return following, acc0, acc1, total, raised


@gluon.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_FREE_POINTERS)
def whole_tiles(
    q, k, v, out, lse, part_out, part_lse, cu, lengths, table, lasts, q_descale, k_descale, v_descale,
    softmax_scale, total_q, most, columns, table_stride, pages, batch, splits,
    q_row, q_head, k_stride, v_stride,
    G: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    V0: gl.constexpr, V1: gl.constexpr, PAGE: gl.constexpr, CSR: gl.constexpr, HAS_LAST: gl.constexpr,
    CAUSAL: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One tile of rows against the whole tiles of keys that all of them see. Grid as `triton_kernels.attend`'s."""
    NW: gl.constexpr = num_warps
    item = gl.program_id(0)
    head = item % HKV
    item = item // HKV
    b = item % batch
    from_last = item // batch
    start, q_len, kv_len, ids = _request(
        b, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, PAGE, CSR, HAS_LAST
    )
    rows = q_len * G
    tile = (rows + BM - 1) // BM - 1 - from_last
    if CAUSAL:
        whole = gl.minimum(kv_len, (tile * BM) // G + kv_len - q_len + 1)
    else:
        whole = kv_len
    count = gl.maximum(whole, 0) // BN
    if (tile >= 0) & (count > 0):
        last = (kv_len + PAGE - 1) // PAGE - 1
        score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, BN, 32])
        lay0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, V0, 32])
        lay1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, V1 if V1 > 0 else 16, 32])
        row: gl.constexpr = gl.SliceLayout(1, score)
        row0: gl.constexpr = gl.SliceLayout(1, lay0)
        row1: gl.constexpr = gl.SliceLayout(1, lay1)

        scale64 = gl.load(q_descale).to(gl.float64) * gl.load(k_descale).to(gl.float64)
        scale64 = scale64 * softmax_scale * _LOG2_E
        negative = scale64 < 0
        scale = gl.where(negative, -scale64, scale64).to(gl.float32)
        flip = gl.where(negative, 0x80, 0).to(gl.uint8)

        q_lay: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [NW, 1], [1, 0])
        r_q = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, q_lay))
        q_at = (start + r_q // G).to(gl.int64) * q_row + (head * G + r_q % G).to(gl.int64) * q_head
        q_smem0 = gl.allocate_shared_memory(gl.float8e4nv, [BM, D0], gl.NVMMASharedLayout(min(D0, 128), 8, rank=2))
        d0 = gl.arange(0, D0, gl.SliceLayout(0, q_lay))
        q0 = gl.load(q + q_at[:, None] + d0[None, :], mask=(r_q < rows)[:, None], other=0.0)
        q_smem0.store((q0.to(gl.uint8, bitcast=True) ^ flip).to(gl.float8e4nv, bitcast=True))
        k_even0 = gl.allocate_shared_memory(gl.float8e4nv, [BN, D0], _packs(BN, D0))
        k_odd0 = gl.allocate_shared_memory(gl.float8e4nv, [BN, D0], _packs(BN, D0))
        v_even0 = gl.allocate_shared_memory(gl.float8e4nv, [V0, BN], _packs(V0, BN))
        v_odd0 = gl.allocate_shared_memory(gl.float8e4nv, [V0, BN], _packs(V0, BN))
        q_smem1, k_even1, k_odd1, v_even1, v_odd1 = q_smem0, k_even0, k_odd0, v_even0, v_odd0
        if D1 > 0:
            q_smem1 = gl.allocate_shared_memory(gl.float8e4nv, [BM, D1], gl.NVMMASharedLayout(min(D1, 128), 8, rank=2))
            d1 = D0 + gl.arange(0, D1, gl.SliceLayout(0, q_lay))
            q1 = gl.load(q + q_at[:, None] + d1[None, :], mask=(r_q < rows)[:, None], other=0.0)
            q_smem1.store((q1.to(gl.uint8, bitcast=True) ^ flip).to(gl.float8e4nv, bitcast=True))
            k_even1 = gl.allocate_shared_memory(gl.float8e4nv, [BN, D1], _packs(BN, D1))
            k_odd1 = gl.allocate_shared_memory(gl.float8e4nv, [BN, D1], _packs(BN, D1))
        if V1 > 0:
            v_even1 = gl.allocate_shared_memory(gl.float8e4nv, [V1, BN], _packs(V1, BN))
            v_odd1 = gl.allocate_shared_memory(gl.float8e4nv, [V1, BN], _packs(V1, BN))

        _copy(k, v, k_even0, k_even1, v_even0, v_even1, ids, 0, -1, count, head, k_stride, v_stride, last, pages,
              D, DV, D0, D1, V0, V1, PAGE, BN, NW)  # fmt: skip
        async_copy.commit_group()
        _copy(k, v, k_odd0, k_odd1, v_even0, v_even1, ids, 1, 0, count, head, k_stride, v_stride, last, pages,
              D, DV, D0, D1, V0, V1, PAGE, BN, NW)  # fmt: skip
        async_copy.commit_group()
        async_copy.wait_group(1)
        gl.thread_barrier()
        fence_async_shared()
        acc0 = gl.zeros([BM, V0], gl.float32, lay0)
        acc1 = gl.zeros([BM, V1 if V1 > 0 else 16], gl.float32, lay1)
        total = gl.zeros([BM], gl.float32, row)
        top = gl.full([BM], float("-inf"), gl.float32, row)
        s = _scores(q_smem0, q_smem1, k_even0, k_even1, D1, BM, BN, score)
        s = warpgroup_mma_wait(0, deps=(s,))
        # Two tiles an iteration, so that each buffer is an allocation of its own: the compiler puts a barrier between
        # accesses to the same one. Where the count is odd, the last tile comes twice, the second time with weights 0.
        for t in range(0, count, 2):
            s, acc0, acc1, total, top = _step(
                s, acc0, acc1, total, top, k, v, q_smem0, q_smem1, k_even0, k_even1, k_odd0, k_odd1,
                v_even0, v_even1, v_odd0, v_odd1, ids, t, count, scale, head, k_stride, v_stride, last, pages,
                D, DV, D0, D1, V0, V1, PAGE, BM, BN, NW,
            )  # fmt: skip
            s, acc0, acc1, total, top = _step(
                s, acc0, acc1, total, top, k, v, q_smem0, q_smem1, k_odd0, k_odd1, k_even0, k_even1,
                v_odd0, v_odd1, v_even0, v_even1, ids, t + 1, count, scale, head, k_stride, v_stride, last, pages,
                D, DV, D0, D1, V0, V1, PAGE, BM, BN, NW,
            )  # fmt: skip
        async_copy.wait_group(0)

        r = tile * BM + gl.arange(0, BM, row)
        place = (start + r // G).to(gl.int64)
        q_heads = head * G + r % G
        log2 = top + gl.log2(total * 0.00390625)  # 2**-LIFT
        gl.store(part_lse + q_heads.to(gl.int64) * total_q + place, log2, mask=r < rows)
        row_at = (place * (HKV * G) + q_heads) * DV
        e0 = gl.arange(0, V0, gl.SliceLayout(0, lay0))
        r0 = tile * BM + gl.arange(0, BM, row0)
        at0 = gl.convert_layout(row_at, row0)[:, None] + e0[None, :]
        result = (acc0 / gl.convert_layout(total, row0)[:, None]).to(gl.bfloat16)
        gl.store(out + at0, result, mask=(r0 < rows)[:, None])
        if V1 > 0:
            e1 = V0 + gl.arange(0, V1, gl.SliceLayout(0, lay1))
            r1 = tile * BM + gl.arange(0, BM, row1)
            at1 = gl.convert_layout(row_at, row1)[:, None] + e1[None, :]
            result = (acc1 / gl.convert_layout(total, row1)[:, None]).to(gl.bfloat16)
            gl.store(out + at1, result, mask=(r1 < rows)[:, None])
