"""What a program of the Triton kernels works on: which request, which tile of its rows, where its pages are.

Plain arithmetic on scalars and vectors whose layout the caller has chosen, so that Triton's kernels and Gluon's call
the same functions. Everything read from device memory is clamped here exactly as `page_table.spans` does on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request(
    b, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages,
    PAGE: tl.constexpr, CSR: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """First row, row count, KV length and first page-table entry of requests ``b``, clamped to what is there."""
    start = tl.minimum(tl.maximum(tl.load(cu + b), 0), total_q)
    stop = tl.minimum(tl.maximum(tl.load(cu + b + 1), 0), total_q)
    q_len = tl.maximum(stop - start, 0)
    if CSR:
        first = tl.load(lengths + b).to(tl.int64)
        end = tl.load(lengths + b + 1).to(tl.int64)
        stated = (end - first - 1) * PAGE
        if HAS_LAST:
            stated += tl.maximum(tl.load(lasts + b), 0)
        else:
            stated += PAGE
        first = tl.minimum(tl.maximum(first, 0), columns)
        end = tl.minimum(tl.maximum(end, 0), columns)
        capacity = tl.maximum(end - first, 0) * PAGE
        ids = table + first
    else:
        stated = tl.load(lengths + b).to(tl.int64)
        capacity = stated * 0 + columns.to(tl.int64) * PAGE
        ids = table + b.to(tl.int64) * table_stride
    capacity = tl.where(pages > 0, capacity, 0)
    kv_len = tl.minimum(tl.minimum(stated, most), capacity)
    return start, q_len, tl.maximum(kv_len, 0).to(tl.int32), ids


@triton.jit
def page_id(ids, index, pages):
    """Page ids at in-range indices, clamped into the cache."""
    return tl.minimum(tl.maximum(tl.load(ids + index), 0), pages - 1)


@triton.jit
def _extent(
    b, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, batch,
    G: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr, CSR: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """First level and number of row tiles of requests ``b`` (of none beyond the last request): see `item`."""
    _, q_len, kv_len, _ = request(
        tl.minimum(b, batch - 1), cu, lengths, table, lasts, total_q, most, columns, table_stride, pages,
        PAGE, CSR, HAS_LAST,
    )  # fmt: skip
    # Any number would do for correctness; this bound keeps 32 bits enough.
    first = tl.minimum((most.to(tl.int64) - kv_len) * G // BM, 1 << 30).to(tl.int32)
    return first, tl.where(b < batch, (q_len * G + BM - 1) // BM, 0)


@triton.jit
def _below(level, first, tiles):
    """How many tiles lie below a level."""
    return tl.sum(tl.minimum(tl.maximum(level - first, 0), tiles), 0)


@triton.jit
def _pick(rank, i, level, first, tiles):
    """Of the requests that have a tile at a level the rank-th (from 1): its number + 1 and its tile, or zeros; how many
    there are."""
    has = ((level >= first) & (level < first + tiles)).to(tl.int32)
    hit = (has > 0) & (tl.cumsum(has, 0) == rank)
    b = tl.sum(tl.where(hit, i + 1, 0), 0)
    return b, tl.sum(tl.where(hit, level - first, 0), 0), tl.sum(has, 0)


@triton.jit
def item(
    n, i, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, batch, steps,
    G: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr, CSR: tl.constexpr, HAS_LAST: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The n-th longest tile of rows of a batch: its request, and how many tiles of that request come after it.

    Programs start in the order of their numbers, so the longest come first and the last to run are short. The last
    tile of a request sees most of its keys, each one before ``BM / G`` fewer: a tile's *level* is how many such steps
    it is below ``most``. The tiles below a level are counted in closed form, so a bisection of ``steps`` halvings finds
    the level, and a prefix sum over the requests that have a tile there the request. ``i`` is arange(CHUNK). Past the
    last tile the request is -1.
    """
    level = n * 0
    b = level
    from_last = n
    if batch > 1:
        under = level
        step = (level + 1) << (steps - 1)
        first, tiles = _extent(
            i, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, batch, G, BM, PAGE, CSR, HAS_LAST
        )
        for _ in range(steps):
            probe = level + step
            count = _below(probe, first, tiles)
            for start in range(CHUNK, batch, CHUNK):
                more_first, more_tiles = _extent(
                    start + i, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, batch,
                    G, BM, PAGE, CSR, HAS_LAST,
                )  # fmt: skip
                count += _below(probe, more_first, more_tiles)
            down = count <= n
            level = tl.where(down, probe, level)
            under = tl.where(down, count, under)
            step = step >> 1
        rank = n - under + 1
        found, from_last, seen = _pick(rank, i, level, first, tiles)
        for start in range(CHUNK, batch, CHUNK):
            more_first, more_tiles = _extent(
                start + i, cu, lengths, table, lasts, total_q, most, columns, table_stride, pages, batch,
                G, BM, PAGE, CSR, HAS_LAST,
            )  # fmt: skip
            more, more_from_last, more_seen = _pick(rank - seen, start + i, level, more_first, more_tiles)
            found += more
            from_last += more_from_last
            seen += more_seen
        b = found - 1
    return b, from_last
