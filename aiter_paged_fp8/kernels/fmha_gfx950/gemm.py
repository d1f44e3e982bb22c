"""The two matrix products: S^T = K Q^T and O^T = V^T P^T, both with the 32x32x64 fp8 MFMA.

Transposed, so that a lane holds one query of every result: the softmax needs no shuffle, and P stays in its lane
between the products (see traits for the orders that make it so).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flydsl.expr as fx
from flydsl.expr import range_constexpr, rocdl
from flydsl.expr.typing import Vector as Vec

from . import intrinsics as gpu
from .lds import Ring
from .traits import ACCUMULATORS, DEPTH, HALVES, PACK, PACKS_PER_OPERAND, STRIP, Traits, operand_k
from .work import Work

OPERAND = DEPTH // HALVES
#: 1.0 four times, in e4m3.
ONES = 0x38383838


class Gemm:
    """Operands and accumulators of one wave.

    Attributes
    ----------
    scores : list
        Per strip of 32 keys: 16 float32, key ``16 * half + register`` of the strip.
    probabilities : list
        Per 64 keys: 32 e4m3, as the second product takes them.
    outputs : list
        Per strip of 32 V dims: 16 float32, dim ``16 * half + register`` of the strip.
    """

    def __init__(self, traits: Traits, work: Work, k_ring: Ring, v_ring: Ring) -> None:
        self.traits, self.k_ring, self.v_ring = traits, k_ring, v_ring
        self.work = work
        self.atom = fx.make_mma_atom(fx.rocdl.cdna4.MFMA_Scale(STRIP, STRIP, DEPTH, gpu.Fp8))
        self.read = fx.make_copy_atom(fx.UniversalCopy128b(), gpu.Fp8)
        half, row = work.half, work.row_in_strip
        self.k_lane = traits.k_lane_offset(half, row)
        self.v_lane = traits.v_lane_offset(half, row)
        self.queries = [gpu.registers(OPERAND, gpu.Fp8) for _ in range_constexpr(traits.dim_steps)]
        self.scores = [gpu.registers(ACCUMULATORS, fx.Float32) for _ in range_constexpr(traits.key_strips)]
        self.probabilities = [gpu.registers(OPERAND, gpu.Fp8) for _ in range_constexpr(traits.key_steps)]
        self.outputs = [gpu.registers(ACCUMULATORS, fx.Float32) for _ in range_constexpr(traits.dim_strips)]
        self.row_sum = gpu.registers(ACCUMULATORS, fx.Float32)
        self.ones = gpu.registers(OPERAND, gpu.Fp8)
        self.ones.store(Vec.from_elements([fx.Int32(ONES)] * (OPERAND // 4), fx.Int32).bitcast(gpu.Fp8))
        for output in (*self.outputs, self.row_sum):
            output.store(Vec.filled(ACCUMULATORS, 0.0, fx.Float32))

    def load_queries(self, address: Any, flip: Any) -> None:
        """Read this wave's rows of Q; rows beyond the tile are zeros.

        Parameters
        ----------
        flip : Int32
            Bits to flip in every register: the signs, where the product of scales is negative.
        """
        traits = self.traits
        rows, offset = self.work.rows(address, gpu.Fp8, traits.head_dim)
        atom = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), gpu.Fp8)
        first = offset + self.work.half * operand_k(1, 0)
        for step in range_constexpr(traits.dim_steps):
            halves = fx.logical_divide(self.queries[step], fx.make_layout(PACK, 1))
            for pack in range_constexpr(PACKS_PER_OPERAND):
                dim = step * DEPTH + operand_k(0, pack * PACK)
                fx.copy_atom_call(atom, gpu.window(rows, first + dim, PACK), fx.slice(halves, (None, pack)))
            words = self.queries[step].load().bitcast(fx.Int32)
            flipped = [words[k] ^ flip for k in range_constexpr(OPERAND // 4)]
            self.queries[step].store(Vec.from_elements(flipped, fx.Int32).bitcast(gpu.Fp8))

    def _operand(self, ring: Ring, base: Any, offsets: list[int]) -> Any:
        """One operand from LDS: the packs at these byte offsets."""
        operand = gpu.registers(OPERAND, gpu.Fp8)
        halves = fx.logical_divide(operand, fx.make_layout(PACK, 1))
        for pack in range_constexpr(PACKS_PER_OPERAND):
            fx.copy_atom_call(self.read, ring.pack(base + offsets[pack]), fx.slice(halves, (None, pack)))
        return operand

    def _score_steps(self, slot: Any) -> list[tuple[Any, Any]]:
        """Reads of K operands, and the MFMAs that they feed: S^T of the tile in a slot of the K ring."""
        traits = self.traits
        base = slot + self.k_lane
        steps = []
        for strip in range_constexpr(traits.key_strips):
            for step in range_constexpr(traits.dim_steps):
                offsets = [traits.k_offset(strip, step, pack) for pack in range(PACKS_PER_OPERAND)]
                steps.append(
                    (partial(self._operand, self.k_ring, base, offsets), partial(self._add_scores, strip, step))
                )
        return steps

    def _add_scores(self, strip: int, step: int, keys: Any) -> None:
        if step == 0:
            self.scores[strip].store(Vec.filled(ACCUMULATORS, 0.0, fx.Float32))
        fx.gemm(self.atom, self.scores[strip], keys, self.queries[step], self.scores[strip])

    def output_steps(self, slot: Any, take: Any) -> list[tuple[Any, Any]]:
        """Reads of V of the tile in a slot of the V ring, and ``take(strip, step, values)`` for each operand."""
        traits = self.traits
        steps = []
        for strip in range_constexpr(traits.dim_strips):
            for step in range_constexpr(traits.key_steps):
                steps.append((partial(self.values, slot, step, strip), partial(take, strip, step)))
        return steps

    def values(self, slot: Any, step: int, strip: int) -> Any:
        """V^T of 64 keys and 32 dims."""
        offsets = [self.traits.v_offset(step, strip, pack) for pack in range(PACKS_PER_OPERAND)]
        return self._operand(self.v_ring, slot + self.v_lane, offsets)

    def add_row_sums(self) -> None:
        """Add P as it is multiplied, rounded, to the row sums: a product with ones."""
        for step in range_constexpr(self.traits.key_steps):
            fx.gemm(self.atom, self.row_sum, self.ones, self.probabilities[step], self.row_sum)

    def _add_outputs(self, strip: int, step: int, values: Any) -> None:
        fx.gemm(self.atom, self.outputs[strip], values, self.probabilities[step], self.outputs[strip])

    def forget_scores(self) -> None:
        """Let go of the scores, which would stay in registers as long as a branch might leave them as they are."""
        for held in self.scores:
            held.store(gpu.registers(ACCUMULATORS, fx.Float32).load())

    def scores_of(self, slot: Any) -> None:
        """S^T of the tile in a slot of the K ring."""
        self.run(self._score_steps(slot))

    def add_outputs(self, slot: Any) -> None:
        """O^T += V^T P^T of the tile in a slot of the V ring."""
        self.run(self.output_steps(slot, self._add_outputs))

    def outputs_and_scores(self, v_slot: Any, k_slot: Any) -> None:
        """O^T += V^T P^T of one tile, then S^T of the next: P is dead before S is complete."""
        self.add_row_sums()
        self.run(self.output_steps(v_slot, self._add_outputs) + self._score_steps(k_slot))

    def run(self, steps: list[tuple[Any, Any]]) -> None:
        """MFMAs in order, each operand read `traits.operands_ahead` MFMAs before it is needed."""
        ahead = self.traits.operands_ahead
        operands = [read() for read, _ in steps[:ahead]]
        for number in range_constexpr(len(steps)):
            steps[number][1](operands[number])
            if number + ahead < len(steps):
                operands.append(steps[number + ahead][0]())
            rocdl.sched_barrier(0)
