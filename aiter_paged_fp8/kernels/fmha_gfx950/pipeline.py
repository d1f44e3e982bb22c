"""The order of loads, waits, barriers and phases.

Eight waves in two groups of four, one of each group on every SIMD. A tile of 128 keys takes a wave two phases: a
vector phase (mask, maximum, exponentials, conversion of tile t) and a matrix phase (PV of tile t, then QK of tile
t + 1). The late group runs one phase behind the early one, so that on each SIMD one wave feeds the matrix unit while
the other feeds the vector unit. Every phase ends at a barrier; between two barriers lies an interval:

    interval      2t         2t + 1     2t + 2              2t + 3
    early group   QK(t)      vector(t)  PV(t), QK(t + 1)    vector(t + 1)
    late group    ...        QK(t)      vector(t)           PV(t), QK(t + 1)
    loads issued  t + 1                 t + 2
    loads done               t + 1                          t + 2

Both groups issue their parts of a tile in the same interval, and wait for them before the barrier that ends the next
one; so the code of the two differs in where it issues and where it waits. K(t + 2) takes the place of K(t), last read
in interval 2t + 1, and V(t + 2), of three, that of V(t - 1), last read in the same one. All reads of LDS in a matrix
phase feed its MFMAs, which end before its barrier: nothing is overwritten that is still on its way.
"""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import range_constexpr, rocdl

from . import intrinsics as gpu
from .epilogue import Epilogue
from .gemm import Gemm
from .lds import Pages, Ring, Staging, storage
from .softmax import Softmax
from .traits import Traits
from .unseen import Unseen
from .work import Work


class Pipeline:
    """The work of one wave, traced."""

    def __init__(self, traits: Traits, args: Any) -> None:
        self.traits, self.args = traits, args
        self.work = Work(traits, args)
        tiles = fx.get_iter(fx.SharedAllocator().allocate(storage(traits)).peek().tiles.view(fx.make_layout(1, 1)))
        k_bytes = traits.k_slots * traits.k_tile_bytes
        self.k_ring = Ring(tiles, 0, traits.k_slots, traits.k_tile_bytes)
        self.v_ring = Ring(tiles, k_bytes, traits.v_slots, traits.v_tile_bytes)

    @flyc.jit
    def run(self) -> None:
        """Everything, for workgroups that have rows."""
        if self.work.count > 0:
            self.attend()

    @flyc.jit
    def attend(self) -> None:
        """Start the parts, walk over the tiles, store."""
        work, traits, args = self.work, self.traits, self.args
        self.gemm = Gemm(traits, work, self.k_ring, self.v_ring)
        self.softmax = Softmax(traits, args, work, self.gemm)
        self.unseen = Unseen(traits, work, self.gemm)
        self.pages = Pages(traits, args, work)
        self.staging = Staging(traits, args, work, self.k_ring, self.v_ring)
        self.v_read = gpu.variable(fx.Int32(0), fx.Int32)
        self.ids = [gpu.variable(fx.Int32(0), fx.Int32) for _ in range_constexpr(traits.pages_per_tile)]
        if work.tiles > 0:
            if work.wave < traits.waves // traits.groups:
                self.walk(False)
            else:
                self.walk(True)
        Epilogue(traits, args, work, self.gemm, self.softmax).store()

    @flyc.jit
    def walk(self, late: bool) -> None:
        """All tiles: those that every row sees wholly, then those with a mask."""
        self.start(late)
        for tile in range(fx.Int32(0), self.work.full, fx.Int32(1)):
            self.step(tile, late, False)
        for tile in range(self.work.full, self.work.tiles, fx.Int32(1)):
            self.step(tile, late, True)
        if fx.const_expr(not late):
            gpu.phase_barrier()
        # Nothing may still be on its way into LDS when the workgroup's LDS is given to another one.
        gpu.loads_done()

    def start(self, late: bool) -> None:
        """Interval 0, and what comes before it."""
        first, second = fx.Int32(0), fx.Int32(1)
        self.staging.load(first, self.pages.of_tile(first), fx.Int32(0))
        ids = self.pages.of_tile(second)
        self.gemm.load_queries(self.args.q, self.softmax.flip)
        gpu.loads_done()
        gpu.phase_barrier()
        self.staging.load(second, ids, fx.Int32(self.v_ring.tile_bytes))
        self.look_up(fx.Int32(2))
        if late:
            gpu.phase_barrier()
        self.gemm.scores_of(self.k_ring.slot_of(first))
        if late:
            gpu.loads_done()
        gpu.phase_barrier()

    def look_up(self, tile: Any) -> None:
        """Read the page ids of a tile; a phase later they are there."""
        for held, page in zip(self.ids, self.pages.of_tile(tile), strict=True):
            gpu.put(held, page)

    def stage_ahead(self, tile: Any) -> None:
        """Issue the loads of the tile after the next."""
        step = self.v_ring.tile_bytes
        read = gpu.get(self.v_read)
        behind = (read == 0).select(fx.Int32((self.traits.v_slots - 1) * step), read - step)
        self.staging.load(tile + 2, [gpu.get(held) for held in self.ids], behind)
        self.look_up(tile + 3)

    def step(self, tile: Any, late: bool, masked: bool) -> None:
        """Vector phase of a tile, then its matrix phase."""
        if late:
            self.stage_ahead(tile)
        if masked:
            self.softmax.mask(tile)
        self.softmax.follow_maximum(branch=not masked)
        self.softmax.probabilities(before_branch=masked)
        if not late:
            gpu.loads_done()
        gpu.phase_barrier()

        rocdl.s_setprio(1)
        if not late:
            self.stage_ahead(tile)
        if masked:
            self.gemm.forget_scores()
            self.gemm.add_row_sums()
            self.unseen.add_outputs(gpu.get(self.v_read), tile)
            self.score_next(tile)
        else:
            self.gemm.outputs_and_scores(gpu.get(self.v_read), self.k_ring.slot_of(tile + 1))
        self.advance()
        rocdl.s_setprio(0)
        if late:
            gpu.loads_done()
        gpu.phase_barrier()

    @flyc.jit
    def score_next(self, tile: Any) -> None:
        """QK of the next tile, where there is one."""
        if tile + 1 < self.work.tiles:
            self.gemm.scores_of(self.k_ring.slot_of(tile + 1))

    def advance(self) -> None:
        """Move on to the next slot of the V ring."""
        step = self.v_ring.tile_bytes
        following = gpu.get(self.v_read) + step
        gpu.put(self.v_read, (following == self.traits.v_slots * step).select(fx.Int32(0), following))
