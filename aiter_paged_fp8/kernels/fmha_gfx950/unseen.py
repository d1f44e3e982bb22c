"""NaN in V of keys that a row does not see.

Their P is 0, but 0 * NaN is NaN, and a tile with a mask may hold any bytes beyond the request's length. So the second
product of such a tile takes 448 in place of NaN, and rows that do see a NaN get theirs from a third product, of ones
where V is NaN and ones where the row sees the key; it is made only where there is a NaN.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import range_constexpr, rocdl
from flydsl.expr.typing import Vector as Vec

from . import intrinsics as gpu
from .gemm import OPERAND, Gemm
from .traits import ACCUMULATORS, PACK, Traits, operand_k
from .work import Work

#: Four e4m3 values in a register: all bits but the signs; the lowest bit of each.
MAGNITUDES, LOW_BITS = 0x7F7F7F7F, 0x01010101
#: 1.0 four times, and what makes it of the lowest bits.
ONES, ONE = 0x38383838, 0x38


def _nan_bits(word: Any) -> Any:
    """The lowest bit of each of four e4m3 values that is NaN: magnitude 0x7F, and no other, carries into its sign."""
    return gpu.shift_right((word & MAGNITUDES) + LOW_BITS, 7) & LOW_BITS


class Unseen:
    """The second product of a tile with a mask."""

    def __init__(self, traits: Traits, work: Work, gemm: Gemm) -> None:
        self.traits, self.work, self.gemm = traits, work, gemm

    def clean(self, values: Any) -> None:
        """Put 448 in place of NaN (they differ in the lowest bit), and note whether there was any."""
        words = values.load().bitcast(fx.Int32)
        found, cleaned = gpu.get(self.found), []
        for k in range_constexpr(OPERAND // 4):
            bits = _nan_bits(words[k])
            found = found | bits
            cleaned.append(words[k] ^ bits)
        gpu.put(self.found, found)
        self._put(values, cleaned)

    @flyc.jit
    def add_outputs(self, slot: Any, tile: Any) -> None:
        """O^T += V^T P^T, in which only NaN that a row sees counts."""
        self.found = gpu.variable(fx.Int32(0), fx.Int32)
        self.gemm.add_outputs(slot, self.clean)
        if gpu.any_lane(gpu.get(self.found) != 0):
            self.mark(slot, tile)

    def mark(self, slot: Any, tile: Any) -> None:
        """Outputs of rows that see a NaN become NaN."""
        traits, gemm = self.traits, self.gemm
        seen = [self._seen(tile, step) for step in range_constexpr(traits.key_steps)]
        for strip in range_constexpr(traits.dim_strips):
            marks = gpu.registers(ACCUMULATORS, fx.Float32)
            marks.store(Vec.filled(ACCUMULATORS, 0.0, fx.Float32))
            for step in range_constexpr(traits.key_steps):
                values = gemm.values(slot, step, strip)
                words = values.load().bitcast(fx.Int32)
                self._put(values, [_nan_bits(words[k]) * ONE for k in range_constexpr(OPERAND // 4)])
                fx.gemm(gemm.atom, marks, values, seen[step], marks)
            marked, outputs = marks.load(), gemm.outputs[strip].load()
            nan = fx.Float32(float("nan"))
            gpu.fill(
                gemm.outputs[strip],
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
