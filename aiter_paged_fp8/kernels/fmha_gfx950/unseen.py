"""NaN in V of keys that a row does not see.

Their P is 0, but 0 * NaN is NaN, and a tile with a mask may hold any bytes beyond the request's length. So such a tile
is searched for NaN in V. Where there is any, the second product takes 448 in its place, and rows that do see a NaN get
theirs from a third product, of ones where V is NaN and ones where the row sees the key.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import range_constexpr, rocdl
from flydsl.expr.typing import Vector as Vec

from . import intrinsics as gpu
from .gemm import ONES, OPERAND, Gemm
from .traits import ACCUMULATORS, PACK, Traits, operand_k
from .work import Work

#: Four e4m3 values in a register: all bits but the signs; the lowest bit of each.
MAGNITUDES, LOW_BITS = 0x7F7F7F7F, 0x01010101
#: What makes 1.0 of a lowest bit.
ONE = ONES & 0xFF


def _nan_bits(word: Any) -> Any:
    """The lowest bit of each of four e4m3 values that is NaN: magnitude 0x7F, and no other, carries into its sign."""
    return gpu.shift_right((word & MAGNITUDES) + LOW_BITS, 7) & LOW_BITS


class Unseen:
    """The second product of a tile with a mask."""

    def __init__(self, traits: Traits, work: Work, gemm: Gemm) -> None:
        self.traits, self.work, self.gemm = traits, work, gemm

    @flyc.jit
    def add_outputs(self, slot: Any, tile: Any) -> None:
        """O^T += V^T P^T, in which only NaN that a row sees counts."""
        if self._any_nan(slot):
            self._add_carefully(slot, tile)
        else:
            self.gemm.add_outputs(slot)

    def _any_nan(self, slot: Any) -> Any:
        """Whether any V of the tile is NaN: its sum over the keys says so, since no sum of so few others overflows."""
        gemm = self.gemm
        probe = gpu.registers(ACCUMULATORS, fx.Float32)
        probe.store(Vec.filled(ACCUMULATORS, 0.0, fx.Float32))
        gemm.run(
            gemm.output_steps(slot, lambda strip, step, values: fx.gemm(gemm.atom, probe, values, gemm.ones, probe))
        )
        total = gpu.sum_of(list(probe.load()))
        return gpu.any_lane(total != total)

    def _add_carefully(self, slot: Any, tile: Any) -> None:
        traits, gemm = self.traits, self.gemm
        seen = [self._seen(tile, step) for step in range_constexpr(traits.key_steps)]
        nan = fx.Float32(float("nan"))
        for strip in range_constexpr(traits.dim_strips):
            output, marks = gemm.outputs[strip], gpu.registers(ACCUMULATORS, fx.Float32)
            marks.store(Vec.filled(ACCUMULATORS, 0.0, fx.Float32))
            for step in range_constexpr(traits.key_steps):
                values = gemm.values(slot, step, strip)
                words = values.load().bitcast(fx.Int32)
                bits = [_nan_bits(words[k]) for k in range_constexpr(OPERAND // 4)]
                # 448 in place of NaN: they differ in the lowest bit.
                self._put(values, [words[k] ^ bits[k] for k in range_constexpr(OPERAND // 4)])
                fx.gemm(gemm.atom, output, values, gemm.probabilities[step], output)
                self._put(values, [bits[k] * ONE for k in range_constexpr(OPERAND // 4)])
                fx.gemm(gemm.atom, marks, values, seen[step], marks)
                rocdl.sched_barrier(0)
            marked, outputs = marks.load(), output.load()
            gpu.fill(
                output,
                [(marked[k] > 0.0).select(nan, outputs[k]) for k in range_constexpr(ACCUMULATORS)],
                fx.Float32,
            )
            rocdl.sched_barrier(0)

    def _put(self, operand: Any, words: list[Any]) -> None:
        operand.store(Vec.from_elements(words, fx.Int32).bitcast(gpu.Fp8))

    def _seen(self, tile: Any, step: int) -> Any:
        """Operand of 1.0 where this lane's row sees the key, in the order of `Gemm.probabilities`."""
        traits = self.traits
        last = self.work.limit - tile * traits.tile_keys - self.work.half * operand_k(1, 0)
        operand = gpu.registers(OPERAND, gpu.Fp8)
        words = []
        for word in range_constexpr(OPERAND // 4):
            strip = step * (traits.key_strips // traits.key_steps) + 4 * word // PACK
            key = traits.tile_key(strip, 4 * word % PACK)
            count = gpu.clamp(last - (key - 1), fx.Int32(0), fx.Int32(4))
            some = ((fx.Int32(1) << (count << 3)) - 1) & ONES
            words.append((count == 4).select(fx.Int32(ONES), some))
        self._put(operand, words)
        return operand
