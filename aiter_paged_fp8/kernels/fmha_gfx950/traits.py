"""Every number of the native kernel's specialisations. Imports neither FlyDSL nor a GPU.

This file says what the kernel is to serve (`HEAD_DIMS`, `PAGES`) and which of it exists (`BUILT`); plan reads both from
here. From one `Traits` value it derives all tile sizes, operand orders and LDS offsets that the kernel is traced with.

Orders of rows and bytes follow from two facts of the 32x32x64 fp8 MFMA (AMD matrix instruction calculator; see
`accumulator_row` and `operand_k`): the product K Q^T leaves 16 keys of one query in a lane, and the product V^T P^T
wants 16 consecutive keys of one query in a lane. `strip_order` places keys in the first product so that these are
the same keys: P goes from one product to the next without leaving its lane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...layouts import PACK, Vectorized

#: The architecture that the kernel is compiled for.
ARCH = "gfx950"

#: (D, Dv) of the matrix steps: multiples of the 64-deep fp8 MFMA whose operands fit the register and LDS budget.
HEAD_DIMS = ((128, 128), (192, 128), (192, 192))

#: Native page sizes of each layout, in tokens.
PAGES = {"linear": (1,), "vectorized": (16, 64, 1024)}

#: (layout, page, D, Dv) for which a kernel exists in this version.
BUILT: frozenset[tuple[str, int, int, int]] = frozenset({("vectorized", 64, 128, 128)})

# -- the machine ------------------------------------------------------------------------------------------------------

#: Lanes of a wave.
LANES = 64
#: LDS of a workgroup, in bytes.
LDS_BYTES = 163_840
#: Registers (VGPR and AGPR together) of a SIMD lane, shared by the waves on that SIMD.
SIMD_REGISTERS = 512
#: SIMDs of a compute unit.
SIMDS = 4
#: XCDs of the chip; workgroups are dealt to them in turn.
XCDS = 8
#: Largest grid in its second and third dimension (HIP).
GRID_YZ = 65_535
#: Tokens, rows and pages that the kernel's 32-bit counters count, with room for the tiles behind the last one.
MAX_KEYS = 2**31 - 1024

# -- the matrix step --------------------------------------------------------------------------------------------------

#: Rows and columns of one MFMA: keys (or V head dims) x queries.
STRIP = 32
#: Depth of one MFMA: head dims (or keys).
DEPTH = 64
#: Accumulator registers of one MFMA in a lane.
ACCUMULATORS = STRIP * STRIP // LANES
#: Halves of a wave: lanes l and l + 32 hold the same query.
HALVES = LANES // STRIP
#: Bytes that one lane moves at once: a pack.
PACKS_PER_OPERAND = DEPTH // HALVES // PACK

#: Largest finite e4m3 value.
E4M3_MAX = 448.0
#: Bound of one factor's magnitude in a dot product of e4m3 values.
_PRODUCT_MAX = E4M3_MAX * E4M3_MAX
#: Smallest positive normal float32: the least factor of the exponent that keeps -inf * factor = -inf.
FLOAT32_TINY = 2.0**-126


def accumulator_row(half: int, register: int) -> int:
    """Row of an MFMA result that a lane of this half holds in this accumulator register (column: lane % 32).

    Source: AMD matrix instruction calculator, D layout of the 32x32 shapes.
    """
    return 8 * (register // 4) + 4 * half + register % 4


def operand_k(half: int, byte: int) -> int:
    """Depth index of a byte of an fp8 MFMA operand (row or column: lane % 32).

    Source: AMD matrix instruction calculator, 32x32x64 f8f6f4.
    """
    return PACK * half + STRIP * (byte // PACK) + byte % PACK


def strip_order(row: Any) -> Any:
    """Which of a strip's 32 keys (or V head dims) stands in this row of the MFMA's first operand.

    The inverse of `accumulator_row`, so that register r of half h belongs to key ``16 * h + r``. Written with shifts,
    for ints and for the kernel's lane numbers alike.
    """
    return ((row >> 2) & 1) * PACK + (row >> 3) * 4 + (row & 3)


@dataclass(frozen=True)
class Traits:
    """What one kernel is compiled for. Nothing here varies from call to call.

    Attributes
    ----------
    layout, page, head_dim, head_dim_v
        Of the cache.
    table : {"block", "csr"}
        Form of the page table.
    lse : bool
        Whether log-sum-exps are stored.
    packed_f32 : bool
        Whether packed float32 instructions may be used. Off: on gfx950 they can read stale operands beside MFMAs
        (ROCm/rocMLIR issue 2459, LLVM issue 206825).
    threshold : int
        Lazy rescale: powers of two by which a row's maximum may grow before its accumulators are rescaled.

    Raises
    ------
    ValueError
        Where the numbers don't fit together or not into the machine.
    """

    layout: str
    page: int
    head_dim: int
    head_dim_v: int
    table: str
    lse: bool
    packed_f32: bool = False
    threshold: int = 4

    #: Keys of one phase of the pipeline.
    tile_keys = 128
    #: Waves of a workgroup: two groups in opposite phase.
    waves = 8
    groups = 2
    #: Tiles in flight. K(t + 1) is loaded while K(t) is read; V(t) is read one step later than K(t).
    k_slots = 2
    v_slots = 3
    #: Operands that are read from LDS before the MFMA that takes them: hides LDS latency, costs 8 registers each.
    operands_ahead = 4

    def __post_init__(self) -> None:
        if (self.layout, self.page, self.head_dim, self.head_dim_v) not in BUILT:
            came = f"{self.layout} pages of {self.page}, (D, Dv) = {(self.head_dim, self.head_dim_v)}"
            raise ValueError(f"traits: no kernel for {came}; accepted: {sorted(BUILT)}")
        if self.table not in ("block", "csr"):
            raise ValueError(f"table: got {self.table!r}; accepted: 'block' or 'csr'")
        # Above 4, the lifted P of a row whose maximum has grown would pass the largest e4m3 value and turn into NaN.
        if self.threshold not in range(1, 5):
            raise ValueError(f"threshold: got {self.threshold!r}; accepted: 1 to 4")
        if self.lift + self.threshold > math.log2(E4M3_MAX):
            raise ValueError(f"lift {self.lift} and threshold {self.threshold} pass the largest e4m3 value")
        if self.lds_bytes > LDS_BYTES:
            raise ValueError(f"traits: {self.lds_bytes} bytes of LDS; accepted: at most {LDS_BYTES}")
        if self.head_dim % DEPTH or self.head_dim_v % STRIP or self.tile_keys % DEPTH:
            raise ValueError(f"traits: head dims and tiles must be whole MFMA steps, got {self}")

    @property
    def name(self) -> str:
        """Name of the kernel."""
        options = ("_lse" if self.lse else "") + ("_packed" if self.packed_f32 else "")
        return f"paged_prefill_{self.layout}{self.page}_d{self.head_dim}_{self.head_dim_v}_{self.table}{options}"

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return self.waves * LANES

    @property
    def tile_rows(self) -> int:
        """Query rows of a workgroup: 32 of each wave."""
        return self.waves * STRIP

    @property
    def registers(self) -> int:
        """Registers that a wave may have so that all waves of a workgroup are resident."""
        return SIMD_REGISTERS * SIMDS // self.waves

    # -- exponents ----------------------------------------------------------------------------------------------------

    @property
    def lift(self) -> float:
        """Power of two that P is multiplied by before it is rounded to e4m3.

        With the threshold it ends at the largest e4m3 value, 1.75 * 2**8; for an integer threshold ``2**lift`` is
        itself an e4m3 value, so that a uniform row is rounded exactly.
        """
        return math.log2(E4M3_MAX / 2**self.threshold)

    @property
    def floor(self) -> float:
        """Running maximum before the first key: below every dot product, and finite, so that nothing becomes NaN."""
        return -(2.0 ** math.ceil(math.log2(self.head_dim * _PRODUCT_MAX)))

    # -- matrix steps -------------------------------------------------------------------------------------------------

    @property
    def key_strips(self) -> int:
        """Strips of 32 keys in a tile."""
        return self.tile_keys // STRIP

    @property
    def dim_steps(self) -> int:
        """MFMA steps along the QK head dim."""
        return self.head_dim // DEPTH

    @property
    def key_steps(self) -> int:
        """MFMA steps along the keys of a tile."""
        return self.tile_keys // DEPTH

    @property
    def dim_strips(self) -> int:
        """Strips of 32 V head dims."""
        return self.head_dim_v // STRIP

    # -- LDS ----------------------------------------------------------------------------------------------------------

    @property
    def pages_per_tile(self) -> int:
        return self.tile_keys // self.page

    @property
    def k_page_bytes(self) -> int:
        """One KV head's part of a K page."""
        return self.page * self.head_dim

    @property
    def v_page_bytes(self) -> int:
        return self.page * self.head_dim_v

    @property
    def k_tile_bytes(self) -> int:
        return self.pages_per_tile * self.k_page_bytes

    @property
    def v_tile_bytes(self) -> int:
        return self.pages_per_tile * self.v_page_bytes

    @property
    def lds_bytes(self) -> int:
        return self.k_slots * self.k_tile_bytes + self.v_slots * self.v_tile_bytes

    @property
    def dma_bytes(self) -> int:
        """What one wave loads into LDS with one instruction."""
        return LANES * PACK

    @cached_property
    def staged(self) -> Vectorized:
        """A tile in LDS, as a cache of one head: pages are kept as they are in memory."""
        return Vectorized(
            k=None,  # type: ignore[arg-type]
            v=None,  # type: ignore[arg-type]
            pages=self.pages_per_tile,
            page=self.page,
            kv_heads=1,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            k_page_stride=self.k_page_bytes,
            v_page_stride=self.v_page_bytes,
        )

    def k_offset(self, strip: int, step: int, pack: int) -> int:
        """Bytes from a tile to what lane 0 reads of K for this key strip, head-dim step and operand pack."""
        key = strip * STRIP
        return self.staged.k_offset(key // self.page, key % self.page, 0, step * DEPTH + operand_k(0, pack * PACK))

    def k_lane_offset(self, half: Any, row: Any) -> Any:
        """Bytes that a lane adds to `k_offset`: its row's key, and its half's pack."""
        pack = self.staged.k_offset(0, 0, 0, operand_k(1, 0))
        return half * pack + strip_order(row) * PACK

    def v_offset(self, step: int, strip: int, pack: int) -> int:
        """Bytes from a tile to what lane 0 reads of V for this key step, V-dim strip and operand pack."""
        key = step * DEPTH + operand_k(0, pack * PACK)
        return self.staged.v_offset(key // self.page, key % self.page, 0, strip * STRIP)

    def v_lane_offset(self, half: Any, row: Any) -> Any:
        """Bytes that a lane adds to `v_offset`: its row's V dim, and its half's keys."""
        pack = self.staged.v_offset(0, operand_k(1, 0), 0, 0)
        return half * pack + strip_order(row) * PACK

    def tile_key(self, strip: int, register: int) -> int:
        """Key of a tile whose score half 0 holds in this register; half 1 holds the key 16 further on."""
        return strip * STRIP + register


def positions_per_tile(traits: Traits, group: int) -> int:
    """Query positions of a workgroup.

    The rows of a workgroup are the query heads of one KV head at consecutive positions (row = position * group +
    head), whole positions only: all heads that share K and V meet in one workgroup, and so in one XCD's L2.
    """
    return traits.tile_rows // group


def group_reciprocal(traits: Traits, group: int) -> int:
    """Factor with which ``(row * factor) >> 16 == row // group`` for every row of a workgroup."""
    return -(-(1 << 16) // group)


def workgroup_id(rank: int, request: int, head: int, requests: int, heads: int) -> int:
    """Linear id of a workgroup: KV heads fastest, then requests, then query tiles from the last (longest) to the first.

    For a number of KV heads that is a multiple of 8, or divides it, the ids of one KV head are congruent modulo
    ``gcd(heads, 8)``: its pages stay in the L2 of 8 / gcd XCDs, and every XCD has the same share of every request.
    """
    return (rank * requests + request) * heads + head
