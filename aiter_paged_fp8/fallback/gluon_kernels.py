"""Rows that see a tile of keys or more, on Hopper: FP8 attention over pages, layouts chosen by hand.

Why not plain Triton: on an H200 its copies were what everything waited for (350 TFLOP/s). It brings packs into rows
of 128 swizzled bytes, so that each line of the cache is scattered over eight lines of shared memory. Here shared
memory has the order of the cache, [packs, rows, 16 bytes], which the matrix unit reads as its layout without swizzle:
a warp copies 512 contiguous bytes to 512 contiguous bytes. K of linear pages, whose rows are contiguous, comes in rows
of swizzled bytes; V of linear pages has to be turned, which `triton_kernels.pack_v` does once for all tiles of rows.

One program: ``BM`` query rows (64, one warpgroup; two programs share a multiprocessor, so that one's softmax runs
beside the other's products) against all their keys, or one of ``splits`` parts of them. Tiles of rows of which some
row sees fewer than ``BN`` keys are `triton_kernels.attend`'s: the matrix unit adds e4m3 products with some 14 bits, too
few for the LSE of such rows.

Per tile t, with two buffers each for K and V (`_step`):

    wait for K(t+1), V(t); barrier (everybody is done with K(t), V(t-1))
    S(t+1) = Q K(t+1)^T, asynchronous
    copy K(t+2) and V(t+1) into the buffers that are free now
    maximum and weights P(t) of S(t); rescale O; O += P(t) V(t); wait for both products

No product is on its way from one iteration to the next: ptxas would wait after every single instruction of them then.
Tiles at the diagonal and at the end are few: scores of what a row does not see become minus infinity there, and V is
searched for NaN first, since 0 x NaN is NaN (`_mark_nan`).
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

from .triton_kernels import FREE, FREE_POINTERS, LIFT, LN_2, LOG2_E, NEVER
from .triton_work import item, page_id, request


@gluon.jit
def _max(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _page_base(ids, tile, n, stride, last, pages, PAGE: gl.constexpr, BN: gl.constexpr, FEW: gl.constexpr):
    """Element offset of each token's page, for the tokens ``n`` [BN] of a tile; ids are read once a page or token."""
    if PAGE % BN == 0:
        page = page_id(ids, gl.minimum(tile * BN // PAGE, last), pages)
        base = n.to(gl.int64) * 0 + page.to(gl.int64) * stride
    elif BN % PAGE == 0 and FEW * PAGE >= BN:
        COUNT: gl.constexpr = BN // PAGE
        page = page_id(ids, gl.minimum(tile * COUNT, last), pages)
        base = n.to(gl.int64) * 0 + page.to(gl.int64) * stride
        for i in gl.static_range(1, COUNT):
            page = page_id(ids, gl.minimum(tile * COUNT + i, last), pages)
            base = gl.where(n >= i * PAGE, page.to(gl.int64) * stride, base)
    else:
        page = page_id(ids, gl.minimum((tile * BN + n) // PAGE, last), pages)
        base = page.to(gl.int64) * stride
    return base


@gluon.jit
def _slot(tile, n, PAGE: gl.constexpr, BN: gl.constexpr):
    """Place of each token of a tile in its page."""
    return (tile * BN) % PAGE + n if PAGE % BN == 0 else (n % PAGE if BN % PAGE == 0 else (tile * BN + n) % PAGE)


@gluon.jit
def _copy_k(
    k, smem, ids, tile, head, stride, last, pages,
    FIRST: gl.constexpr, WIDTH: gl.constexpr, D: gl.constexpr, HKV: gl.constexpr, PAGE: gl.constexpr,
    VECTORIZED: gl.constexpr, BN: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """K [BN, WIDTH of D] of a tile to shared memory.

    A warp takes 32 neighbouring tokens of one pack, or whole rows of a linear page.
    """
    ACROSS: gl.constexpr = min(NW, WIDTH // 16)
    if VECTORIZED:
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [NW // ACROSS, ACROSS], [1, 0])
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // WIDTH, WIDTH // 16], [NW, 1], [1, 0])
    n = gl.arange(0, BN, gl.SliceLayout(1, layout))
    d = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    slot = _slot(tile, n, PAGE, BN)
    token = _page_base(ids, tile, n, stride, last, pages, PAGE, BN, 2)
    if VECTORIZED:
        token += slot * 16 + head * (D * PAGE)
        dim = (d // 16) * (PAGE * 16) + d % 16
    else:
        token += slot * (HKV * D) + head * D
        dim = d
    offsets = token[:, None] + dim[None, :]
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])
    async_copy.async_copy_global_to_shared(smem, k + offsets)


@gluon.jit
def _copy_v(
    v, smem, ids, tile, head, stride, last, pages,
    FIRST: gl.constexpr, WIDTH: gl.constexpr, DV: gl.constexpr, HKV: gl.constexpr, PAGE: gl.constexpr,
    VECTORIZED: gl.constexpr, BN: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """V [WIDTH of Dv, BN] of a tile to shared memory: a warp takes 32 neighbouring rows of one pack of tokens."""
    ACROSS: gl.constexpr = min(NW, BN // 16)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [NW // ACROSS, ACROSS], [1, 0])
    n = gl.arange(0, BN, gl.SliceLayout(0, layout))
    d = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(1, layout))
    if VECTORIZED:
        slot = _slot(tile, n, PAGE, BN)
        token = _page_base(ids, tile, n, stride, last, pages, PAGE, BN, 8)
        token += (slot // 16) * (DV * 16) + slot % 16 + head * (DV * PAGE)
    else:
        # As pack_v has left it, [tiles of the request, Hkv, BN / 16, Dv, 16]; v points to the request's first tile.
        token = (n // 16) * (DV * 16) + n % 16 + (tile.to(gl.int64) * HKV + head) * (BN * DV)
    offsets = token[None, :] + (d * 16)[:, None]
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])
    async_copy.async_copy_global_to_shared(smem, v + offsets)


@gluon.constexpr_function
def _packs(rows, columns, size=1):
    """Shared memory [rows, columns] in packs of 16 bytes along the columns, as the cache has them: [columns / 16, rows,
    16]. It is what the matrix unit calls the layout without swizzle; a copy of packs is as straight as one of lines.
    ``size``: bytes per element."""
    pack = 16 // size
    bases, bit = [], 1
    while bit < pack:
        bases.append([0, bit])
        bit *= 2
    bit = 1
    while bit < rows:
        bases.append([bit, 0])
        bit *= 2
    bit = pack
    while bit < columns:
        bases.append([0, bit])
        bit *= 2
    return gl.SharedLinearLayout(bases)


@gluon.constexpr_function
def _k_layout(tokens, width, vectorized):
    return _packs(tokens, width) if vectorized else gl.NVMMASharedLayout(min(width, 128), 8, rank=2)


@gluon.jit
def _copy(
    k, v, k0, k1, v0, v1, ids, k_tile, v_tile, end, head, k_stride, v_stride, last, pages,
    D: gl.constexpr, DV: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr,
    HKV: gl.constexpr, PAGE: gl.constexpr, VECTORIZED: gl.constexpr, BN: gl.constexpr, NW: gl.constexpr,
    VALUES: gl.constexpr = True,
):  # fmt: skip
    """K of one tile and, if ``VALUES``, V of another; past the last tile, that once more."""
    at = gl.minimum(k_tile, end - 1)
    _copy_k(k, k0, ids, at, head, k_stride, last, pages, 0, D0, D, HKV, PAGE, VECTORIZED, BN, NW)
    if D1 > 0:
        _copy_k(k, k1, ids, at, head, k_stride, last, pages, D0, D1, D, HKV, PAGE, VECTORIZED, BN, NW)
    if VALUES:
        at = gl.minimum(v_tile, end - 1)
        _copy_v(v, v0, ids, at, head, v_stride, last, pages, 0, V0, DV, HKV, PAGE, VECTORIZED, BN, NW)
        if V1 > 0:
            _copy_v(v, v1, ids, at, head, v_stride, last, pages, V0, V1, DV, HKV, PAGE, VECTORIZED, BN, NW)


@gluon.jit
def _scores(
    q0, q1, k0, k1, D1: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, score: gl.constexpr, PRECISE: gl.constexpr
):
    """Q K^T: asynchronous, with some 14 bits; or, if ``PRECISE``, with float32 sums of each instruction's products."""
    s = gl.zeros([BM, BN], gl.float32, score)
    if PRECISE:
        s = warpgroup_mma(q0, k0.permute((1, 0)), s, use_acc=False, max_num_imprecise_acc=32)
        if D1 > 0:
            s = warpgroup_mma(q1, k1.permute((1, 0)), s, max_num_imprecise_acc=32)
    else:
        s = warpgroup_mma(q0, k0.permute((1, 0)), s, use_acc=False, is_async=True)
        if D1 > 0:
            s = warpgroup_mma(q1, k1.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _min(a, b):
    return gl.minimum(a, b)


@gluon.jit
def _mark_nan(acc, v, seen, V: gl.constexpr, BN: gl.constexpr, NW: gl.constexpr):
    """O with NaN where rows see a NaN of V, which becomes 0 there: in P V it would reach rows that don't see it.

    A row sees the first ``seen`` [BM] tokens of this tile (or all, if it has fewer), so the first NaN of a column of V
    decides. Four bytes at a time; 0x7F and 0xFF are e4m3's NaN.
    """
    lay: gl.constexpr = acc.type.layout
    words_lay: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, NW], [1, 0])
    words = v._reinterpret(gl.uint32, [V, BN // 4], _packs(V, BN // 4, 4))
    bits = words.load(words_lay)
    nan = ((bits & 0x7F7F7F7F) + 0x01010101) & 0x80808080
    if gl.reduce(gl.reduce((nan != 0).to(gl.int32), 1, _max), 0, _max) > 0:
        words.store(bits & (((nan >> 7) * 0xFF) ^ 0xFFFFFFFF))
        within = gl.where((nan & 0x8080) != 0, gl.where((nan & 0x80) != 0, 0, 1), gl.where((nan & 0x800000) != 0, 2, 3))
        at = gl.arange(0, BN // 4, gl.SliceLayout(0, words_lay))[None, :] * 4 + within
        first = gl.convert_layout(gl.reduce(gl.where(nan != 0, at, NEVER), 1, _min), gl.SliceLayout(0, lay))
        rows_see = gl.convert_layout(seen, gl.SliceLayout(1, lay))
        acc = gl.where(first[None, :] < rows_see[:, None], float("nan"), acc)
        fence_async_shared()
        gl.thread_barrier()
    return acc


@gluon.jit
def _step(
    s, acc0, acc1, total, top, k, v, q0, q1, k0, k1, next_k0, next_k1, v0, v1, next_v0, next_v1, ids, t, end,
    limit, scale, head, k_stride, v_stride, last, pages,
    D: gl.constexpr, DV: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr,
    HKV: gl.constexpr, PAGE: gl.constexpr, VECTORIZED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    NW: gl.constexpr, MASKED: gl.constexpr, PRECISE: gl.constexpr,
):  # fmt: skip
    """Tile t, whose scores are there; where ``MASKED``, each row sees ``limit`` [BM] keys."""
    score: gl.constexpr = s.type.layout
    lay0: gl.constexpr = acc0.type.layout
    lay1: gl.constexpr = acc1.type.layout
    # Beside these scores there are no registers for masks, nor for a second set of sums.
    LATE: gl.constexpr = MASKED or PRECISE
    async_copy.wait_group(0)
    # What this thread has copied is for the matrix unit before everybody else may count on it.
    fence_async_shared()
    gl.thread_barrier()
    if MASKED:
        seen = limit - t * BN
        acc0 = _mark_nan(acc0, v0, seen, V0, BN, NW)
        if V1 > 0:
            acc1 = _mark_nan(acc1, v1, seen, V1, BN, NW)
        s = gl.where(gl.arange(0, BN, gl.SliceLayout(0, score))[None, :] < seen[:, None], s, float("-inf"))
    if not LATE:
        following = _scores(q0, q1, next_k0, next_k1, D1, BM, BN, score, False)
    _copy(k, v, k0, k1, next_v0, next_v1, ids, t + 2, t + 1, end, head, k_stride, v_stride, last, pages,
          D, DV, D0, D1, V0, V1, HKV, PAGE, VECTORIZED, BN, NW)  # fmt: skip
    async_copy.commit_group()
    raised = gl.maximum(top, gl.reduce(s, 1, _max) * scale)
    shift = raised
    if MASKED:
        # A row that saw no key yet has no maximum; any number will do in its place.
        shift = gl.where(raised == float("-inf"), 0.0, raised)
    p = gl.exp2(s * scale - (shift - LIFT)[:, None])
    kept = gl.exp2(top - shift)
    total = total * kept + gl.reduce(p, 1, _add)
    narrow = p.to(gl.float8e4nv)
    acc0 = acc0 * gl.convert_layout(kept, gl.SliceLayout(1, lay0))[:, None]
    p0 = gl.convert_layout(narrow, gl.DotOperandLayout(0, lay0, 4))
    o0 = warpgroup_mma(p0, v0.permute((1, 0)), acc0, is_async=True)
    if V1 > 0:
        acc1 = acc1 * gl.convert_layout(kept, gl.SliceLayout(1, lay1))[:, None]
        p1 = gl.convert_layout(narrow, gl.DotOperandLayout(0, lay1, 4))
        o1 = warpgroup_mma(p1, v1.permute((1, 0)), acc1, is_async=True)
        if LATE:
            acc0, acc1 = warpgroup_mma_wait(0, deps=(o0, o1))
        else:
            following, acc0, acc1 = warpgroup_mma_wait(0, deps=(following, o0, o1))
    elif LATE:
        acc0 = warpgroup_mma_wait(0, deps=(o0,))
    else:
        following, acc0 = warpgroup_mma_wait(0, deps=(following, o0))
    if LATE:
        following = _scores(q0, q1, next_k0, next_k1, D1, BM, BN, score, PRECISE)
        if not PRECISE:
            following = warpgroup_mma_wait(0, deps=(following,))
    return following, acc0, acc1, total, raised


@gluon.jit
def _load_q(q, q_at, r, rows, flip, FIRST: gl.constexpr, WIDTH: gl.constexpr, BM: gl.constexpr, lay: gl.constexpr):
    """Part of Q in shared memory, its signs flipped where the scale of scores is negative."""
    smem = gl.allocate_shared_memory(gl.float8e4nv, [BM, WIDTH], gl.NVMMASharedLayout(min(WIDTH, 128), 8, rank=2))
    d = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, lay))
    values = gl.load(q + q_at[:, None] + d[None, :], mask=(r < rows)[:, None], other=0.0)
    smem.store((values.to(gl.uint8, bitcast=True) ^ flip).to(gl.float8e4nv, bitcast=True))
    return smem


@gluon.jit
def _later(number):
    """A number that the compiler takes for a new one: what is computed from it stays behind this place."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _rows(
    tile, head, part, start, total_q, G: gl.constexpr, HKV: gl.constexpr, DV: gl.constexpr, BM: gl.constexpr,
    SPLIT: gl.constexpr, row: gl.constexpr,
):  # fmt: skip
    """Where a tile's rows [BM] lie in LSE and O, or in the parts of both."""
    r = tile * BM + gl.arange(0, BM, row)
    place = (start + r // G).to(gl.int64)
    q_heads = head * G + r % G
    lse_at = q_heads.to(gl.int64) * total_q + place
    row_at = (place * (HKV * G) + q_heads) * DV
    if SPLIT:
        lse_at += part.to(gl.int64) * total_q * (HKV * G)
        row_at += part.to(gl.int64) * total_q * (HKV * G * DV)
    return lse_at, row_at


@gluon.jit
def _store(
    pointer, acc, row_at, total, factor, tile, rows, FIRST: gl.constexpr, WIDTH: gl.constexpr, BM: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Part of O over its row sums; where keys are split, rows without a key in this part are left."""
    lay: gl.constexpr = acc.type.layout
    row: gl.constexpr = gl.SliceLayout(1, lay)
    r = tile * BM + gl.arange(0, BM, row)
    e = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, lay))
    total = gl.convert_layout(total, row)
    mask = (r < rows) & (total != 0)
    result = acc / gl.where(total == 0, 1.0, total)[:, None] * factor
    if not SPLIT:
        result = result.to(gl.bfloat16)
    gl.store(pointer + gl.convert_layout(row_at, row)[:, None] + e[None, :], result, mask=mask[:, None])


@gluon.jit(do_not_specialize=FREE, do_not_specialize_on_alignment=FREE_POINTERS)
def attend_long(
    q, k, v, out, lse, part_out, part_lse, cu, lengths, table, lasts, q_descale, k_descale, v_descale,
    softmax_scale, total_q, most, columns, table_stride, pages, batch, splits, steps,
    q_row, q_head, k_stride, v_stride,
    G: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    V0: gl.constexpr, V1: gl.constexpr, PAGE: gl.constexpr, VECTORIZED: gl.constexpr, CSR: gl.constexpr,
    HAS_LAST: gl.constexpr, CAUSAL: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr, OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One tile of rows against its keys, or one of ``splits`` parts of them. Grid as `triton_kernels.attend`'s."""
    NW: gl.constexpr = num_warps
    n = gl.program_id(0)
    part = n % splits
    n = n // splits
    head = n % HKV
    requests: gl.constexpr = gl.BlockedLayout([CHUNK // 32], [32], [NW], [0])
    b, from_last = item(
        n // HKV, gl.arange(0, CHUNK, requests), cu, lengths, table, lasts, total_q, most, columns, table_stride, pages,
        batch, steps, G, BM, PAGE, CSR, HAS_LAST, CHUNK,
    )  # fmt: skip
    b_at = gl.maximum(b, 0)
    start, q_len, kv_len, ids = request(
        b_at, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, PAGE, CSR, HAS_LAST
    )
    rows = q_len * G
    tile = (rows + BM - 1) // BM - 1 - from_last
    ahead = kv_len - q_len
    if CAUSAL:
        whole = gl.minimum(kv_len, (tile * BM) // G + ahead + 1)
        hi = gl.minimum(kv_len, gl.minimum((tile * BM + BM - 1) // G, q_len - 1) + ahead + 1)
    else:
        whole = kv_len
        hi = kv_len
    if (b >= 0) & (tile >= 0) & (whole >= BN):
        score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, BN, 32])
        lay0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, V0, 32])
        lay1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, V1 if V1 > 0 else 16, 32])
        row: gl.constexpr = gl.SliceLayout(1, score)
        first = n * 0
        end = (hi + BN - 1) // BN
        if SPLIT:
            each = (end + splits - 1) // splits
            first = gl.minimum(part * each, end)
            end = gl.minimum(first + each, end)
        if first >= end:
            lse_at, _ = _rows(tile, head, part, start, total_q, G, HKV, DV, BM, SPLIT, row)
            r = tile * BM + gl.arange(0, BM, row)
            gl.store(part_lse + lse_at, gl.full([BM], float("-inf"), gl.float32, row), mask=r < rows)
        else:
            last = (kv_len + PAGE - 1) // PAGE - 1
            if not VECTORIZED:
                v += b_at.to(gl.int64) * v_stride

            # In float64: the product of two tiny descales and a huge scale may be any number.
            scale64 = gl.load(q_descale).to(gl.float64) * gl.load(k_descale).to(gl.float64)
            scale64 = scale64 * softmax_scale * LOG2_E
            negative = scale64 < 0
            scale = gl.where(negative, -scale64, scale64).to(gl.float32)
            # Minus infinity times 0 would be NaN; times this, scores are as good as 0.
            scale = gl.where(scale == 0, 1e-37, scale)
            flip = gl.where(negative, 0x80, 0).to(gl.uint8)

            q_lay: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [NW, 1], [1, 0])
            r_q = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, q_lay))
            q_at = (start + r_q // G).to(gl.int64) * q_row + (head * G + r_q % G).to(gl.int64) * q_head
            q0 = _load_q(q, q_at, r_q, rows, flip, 0, D0, BM, q_lay)
            k_even0 = gl.allocate_shared_memory(gl.float8e4nv, [BN, D0], _k_layout(BN, D0, VECTORIZED))
            k_odd0 = gl.allocate_shared_memory(gl.float8e4nv, [BN, D0], _k_layout(BN, D0, VECTORIZED))
            v_even0 = gl.allocate_shared_memory(gl.float8e4nv, [V0, BN], _packs(V0, BN))
            v_odd0 = gl.allocate_shared_memory(gl.float8e4nv, [V0, BN], _packs(V0, BN))
            q1, k_even1, k_odd1, v_even1, v_odd1 = q0, k_even0, k_odd0, v_even0, v_odd0
            if D1 > 0:
                q1 = _load_q(q, q_at, r_q, rows, flip, D0, D1, BM, q_lay)
                k_even1 = gl.allocate_shared_memory(gl.float8e4nv, [BN, D1], _k_layout(BN, D1, VECTORIZED))
                k_odd1 = gl.allocate_shared_memory(gl.float8e4nv, [BN, D1], _k_layout(BN, D1, VECTORIZED))
            if V1 > 0:
                v_even1 = gl.allocate_shared_memory(gl.float8e4nv, [V1, BN], _packs(V1, BN))
                v_odd1 = gl.allocate_shared_memory(gl.float8e4nv, [V1, BN], _packs(V1, BN))

            _copy(k, v, k_even0, k_even1, v_even0, v_even1, ids, first, first, end, head, k_stride, v_stride,
                  last, pages, D, DV, D0, D1, V0, V1, HKV, PAGE, VECTORIZED, BN, NW, VALUES=False)  # fmt: skip
            async_copy.commit_group()
            _copy(k, v, k_odd0, k_odd1, v_even0, v_even1, ids, first + 1, first, end, head, k_stride, v_stride,
                  last, pages, D, DV, D0, D1, V0, V1, HKV, PAGE, VECTORIZED, BN, NW)  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(1)
            fence_async_shared()
            gl.thread_barrier()
            acc0 = gl.zeros([BM, V0], gl.float32, lay0)
            acc1 = gl.zeros([BM, V1 if V1 > 0 else 16], gl.float32, lay1)
            total = gl.zeros([BM], gl.float32, row)
            top = gl.full([BM], float("-inf"), gl.float32, row)
            s = _scores(q0, q1, k_even0, k_even1, D1, BM, BN, score, HAS_LSE)
            if not HAS_LSE:
                s = warpgroup_mma_wait(0, deps=(s,))
            # Two tiles an iteration, so that each buffer is an allocation of its own: the compiler puts a barrier
            # between accesses to the same one. Past the end comes a tile that nobody sees.
            middle = first + gl.maximum(gl.minimum(whole // BN, end) - first, 0) // 2 * 2
            for t in range(first, middle, 2):
                s, acc0, acc1, total, top = _step(
                    s, acc0, acc1, total, top, k, v, q0, q1, k_even0, k_even1, k_odd0, k_odd1, v_even0, v_even1,
                    v_odd0, v_odd1, ids, t, end, 0, scale, head, k_stride, v_stride, last, pages,
                    D, DV, D0, D1, V0, V1, HKV, PAGE, VECTORIZED, BM, BN, NW, False, HAS_LSE,
                )  # fmt: skip
                s, acc0, acc1, total, top = _step(
                    s, acc0, acc1, total, top, k, v, q0, q1, k_odd0, k_odd1, k_even0, k_even1, v_odd0, v_odd1,
                    v_even0, v_even1, ids, t + 1, end, 0, scale, head, k_stride, v_stride, last, pages,
                    D, DV, D0, D1, V0, V1, HKV, PAGE, VECTORIZED, BM, BN, NW, False, HAS_LSE,
                )  # fmt: skip
            # What comes now must not be computed before that loop: it has no register to spare.
            tile, head, middle = _later(tile), _later(head), _later(middle)
            start, q_len, kv_len, ids = request(
                _later(b), cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, PAGE, CSR, HAS_LAST
            )
            last = (kv_len + PAGE - 1) // PAGE - 1
            rows, ahead = q_len * G, kv_len - q_len
            r = tile * BM + gl.arange(0, BM, row)
            limit = kv_len
            if CAUSAL:
                limit = gl.minimum(limit, r // G + ahead + 1)
            else:
                limit += r * 0
            for t in range(middle, end, 2):
                s, acc0, acc1, total, top = _step(
                    s, acc0, acc1, total, top, k, v, q0, q1, k_even0, k_even1, k_odd0, k_odd1, v_even0, v_even1,
                    v_odd0, v_odd1, ids, t, end, limit, scale, head, k_stride, v_stride, last, pages,
                    D, DV, D0, D1, V0, V1, HKV, PAGE, VECTORIZED, BM, BN, NW, True, HAS_LSE,
                )  # fmt: skip
                if t + 1 < end:
                    s, acc0, acc1, total, top = _step(
                        s, acc0, acc1, total, top, k, v, q0, q1, k_odd0, k_odd1, k_even0, k_even1, v_odd0, v_odd1,
                        v_even0, v_even1, ids, t + 1, end, limit, scale, head, k_stride, v_stride, last, pages,
                        D, DV, D0, D1, V0, V1, HKV, PAGE, VECTORIZED, BM, BN, NW, True, HAS_LSE,
                    )  # fmt: skip
            async_copy.wait_group(0)

            lse_at, row_at = _rows(tile, head, part, start, total_q, G, HKV, DV, BM, SPLIT, row)
            blind = total == 0
            log2 = gl.where(blind, float("-inf"), top + gl.log2(gl.where(blind, 1.0, total) * 0.00390625))  # 2**-LIFT
            if SPLIT:
                gl.store(part_lse + lse_at, log2, mask=r < rows)
                _store(part_out, acc0, row_at, total, 1.0, tile, rows, 0, V0, BM, SPLIT)
                if V1 > 0:
                    _store(part_out, acc1, row_at, total, 1.0, tile, rows, V0, V1, BM, SPLIT)
            else:
                factor = gl.load(v_descale)
                if HAS_LSE:
                    gl.store(lse + lse_at, log2 * LN_2, mask=r < rows)
                _store(out, acc0, row_at, total, factor, tile, rows, 0, V0, BM, SPLIT)
                if V1 > 0:
                    _store(out, acc1, row_at, total, factor, tile, rows, V0, V1, BM, SPLIT)
    if OVERLAP:
        # `triton_kernels.attend` was launched before this kernel, which did not wait for it to end: now both end.
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
