"""What a kernel is run with: one value of addresses and numbers, none of which is compiled in."""

import flydsl.expr as fx


@fx.struct
class Arguments:
    """Addresses are of first elements; strides and counts are in elements.

    ``lengths`` is ``seqlen_k`` beside a block table and ``kv_indptr`` for CSR; ``table_entries`` counts the columns of
    a block table's row, or all page indices of CSR. ``positions``, ``group`` and ``reciprocal`` are
    `traits.positions_per_tile`, query heads of a KV head, and `traits.group_reciprocal`.
    """

    q: fx.Int64
    k: fx.Int64
    v: fx.Int64
    out: fx.Int64
    lse: fx.Int64
    cu_seqlens_q: fx.Int64
    table: fx.Int64
    lengths: fx.Int64
    last_page_lens: fx.Int64
    q_descale: fx.Int64
    k_descale: fx.Int64
    v_descale: fx.Int64
    k_page_stride: fx.Int64
    v_page_stride: fx.Int64
    table_stride: fx.Int64
    table_entries: fx.Int32
    total_q: fx.Int32
    requests: fx.Int32
    heads: fx.Int32
    kv_heads: fx.Int32
    group: fx.Int32
    positions: fx.Int32
    reciprocal: fx.Int32
    ranks: fx.Int32
    pages: fx.Int32
    max_seqlen_k: fx.Int32
    softmax_scale: fx.Float32


def null() -> dict[str, int | float]:
    """Values to compile with: none of them is compiled in."""
    return {name: 0.0 if kind is fx.Float32 else 0 for name, kind in Arguments.__annotations__.items()}
