"""Masking and online softmax of one wave, in float32 and powers of two.

With ``c = softmax_scale * q_descale * k_descale * log2(e)``, a row's running maximum m of unscaled scores s, and the
lift L: ``P = 2 ** (c * s - c * m + L)``, rounded to e4m3 for the second product. m follows the true maximum lazily: it
moves only where that is more than the threshold above it, so that the accumulators are rarely rescaled and P never
passes the largest e4m3 value.

There are two row sums. O is divided by the sum of P as it was multiplied, rounded; the matrix unit makes that one
(`Gemm.add_row_sums`). The log-sum-exp needs the sum of P before rounding, which is made here, and only for it.
"""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import range_constexpr
from flydsl.expr.typing import Vector as Vec

from . import intrinsics as gpu
from .gemm import Gemm
from .traits import ACCUMULATORS, FLOAT32_TINY, Traits, operand_k
from .work import Work

#: Sign bits of the four e4m3 values in a register.
FP8_SIGNS = 0x80808080 - 2**32


class Softmax:
    """Running maximum of this lane's row, and its float32 sum; the two halves of a wave sum different keys of it."""

    def __init__(self, traits: Traits, args: Any, work: Work, gemm: Gemm) -> None:
        self.traits, self.work, self.gemm = traits, work, gemm
        scale = _product(args.softmax_scale, gpu.number(args.q_descale), gpu.number(args.k_descale)) * gpu.LOG2_E
        #: With a negative factor the signs of Q are flipped instead, so that larger scores always weigh more.
        self.flip = (scale < 0.0).select(fx.Int32(FP8_SIGNS), fx.Int32(0))
        magnitude = (scale < 0.0).select(-scale, scale)
        # Masked scores are -inf, which a factor of 0 would turn into NaN. (A NaN stays NaN here.)
        self.scale = (magnitude < FLOAT32_TINY).select(fx.Float32(FLOAT32_TINY), magnitude)
        self.maximum = gpu.variable(fx.Float32(traits.floor), fx.Float32)
        self.sum = gpu.variable(fx.Float32(0.0), fx.Float32)
        self.bias = gpu.variable(fx.Float32(0.0), fx.Float32)
        self.rescale_above = gpu.variable(fx.Float32(0.0), fx.Float32)
        self.slack = fx.Float32(float(traits.threshold)) * gpu.reciprocal(self.scale)
        self._follow(fx.Float32(traits.floor))

    def _follow(self, maximum: Any) -> None:
        """Set what depends on the running maximum."""
        gpu.put(self.maximum, maximum)
        gpu.put(self.bias, fx.fma(-maximum, self.scale, fx.Float32(self.traits.lift)))
        gpu.put(self.rescale_above, maximum + self.slack)

    def mask(self, tile: Any) -> None:
        """Scores of keys that this row does not see become -inf."""
        traits = self.traits
        first = tile * traits.tile_keys + self.work.half * operand_k(1, 0)
        per_step = traits.key_strips // traits.key_steps
        for strip in range_constexpr(traits.key_strips):
            # Counted anew for each step, so that the keys compared with are small enough for inline constants.
            visible = self.work.limit - (first + traits.tile_key(strip - strip % per_step, 0))
            held = self.gemm.scores[strip]
            scores = held.load()
            gpu.fill(
                held,
                [
                    (visible >= traits.tile_key(strip % per_step, k)).select(scores[k], fx.Float32(float("-inf")))
                    for k in range_constexpr(ACCUMULATORS)
                ],
                fx.Float32,
            )

    def _tile_maximum(self) -> Any:
        highest = None
        for held in self.gemm.scores:
            scores = held.load()
            for k in range_constexpr(ACCUMULATORS):
                highest = scores[k] if highest is None else gpu.maximum(highest, scores[k])
        return gpu.maximum(*gpu.both_halves(highest))

    @flyc.jit
    def follow_maximum(self, branch: bool) -> None:
        """Rescale what has been accumulated, in the rows whose maximum has grown by more than the threshold.

        Parameters
        ----------
        branch : bool
            Whether to branch around it where no row's has. Not where another branch follows in the same phase: the
            accumulators would be held twice. Rows that have not grown are multiplied by 1 then.
        """
        highest = self._tile_maximum()
        grown = highest > gpu.get(self.rescale_above)
        if fx.const_expr(branch):
            if gpu.any_lane(grown):
                self._rescale(grown, highest)
        else:
            self._rescale(grown, highest)

    def _rescale(self, grown: Any, highest: Any) -> None:
        old = gpu.get(self.maximum)
        new = grown.select(highest, old)
        factor = gpu.exp2((old - new) * self.scale)
        self._follow(new)
        if self.traits.lse:
            gpu.put(self.sum, gpu.get(self.sum) * factor)
        for held in (*self.gemm.outputs, self.gemm.row_sum):
            values = held.load()
            gpu.fill(held, [values[k] * factor for k in range_constexpr(ACCUMULATORS)], fx.Float32)

    def probabilities(self, before_branch: bool) -> None:
        """P of the tile from its scores, as operands of the second product, and their sum.

        Parameters
        ----------
        before_branch : bool
            Whether a branch follows. The compiler would move the additions behind it and keep 64 values in registers
            until then; an exchange between lanes stays where it is.
        """
        bias = gpu.get(self.bias)
        sums = []
        strips = self.traits.key_strips
        per_step = strips // self.traits.key_steps
        for step in range_constexpr(self.traits.key_steps):
            words = []
            for strip in range_constexpr(step * per_step, (step + 1) * per_step):
                scores = self.gemm.scores[strip].load()
                values = [gpu.exp2(fx.fma(scores[k], self.scale, bias)) for k in range_constexpr(ACCUMULATORS)]
                words += [gpu.pack_fp8(*values[k : k + 4]) for k in range_constexpr(0, ACCUMULATORS, 4)]
                if self.traits.lse:
                    sums.append(gpu.sum_of(values))
            self.gemm.probabilities[step].store(Vec.from_elements(words, fx.Int32).bitcast(gpu.Fp8))
        if not self.traits.lse:
            return
        total = gpu.sum_of(sums)
        if before_branch:
            low, high = gpu.both_halves(total)
            total = (low + high) * 0.5
        gpu.put(self.sum, gpu.get(self.sum) + total)


def _product(a: Any, b: Any, c: Any) -> Any:
    """a * b * c without overflow or underflow on the way where the result has none: the extremes meet first."""
    size = [fx.Float32(abs(x)) for x in (a, b, c)]
    high = gpu.maximum(gpu.maximum(size[0], size[1]), size[2])
    low = -gpu.maximum(gpu.maximum(-size[0], -size[1]), -size[2])
    middle = gpu.maximum(-gpu.maximum(-size[0], -size[1]), -gpu.maximum(-gpu.maximum(size[0], size[1]), -size[2]))
    signs = (a.bitcast(fx.Int32) ^ b.bitcast(fx.Int32) ^ c.bitcast(fx.Int32)) & fx.Int32(-(2**31))
    product = (high * low) * middle
    signed = (product.bitcast(fx.Int32) ^ signs).bitcast(fx.Float32)
    # The maxima above ignore NaN.
    clean = (a == a) & (b == b) & (c == c)
    return clean.select(signed, fx.Float32(float("nan")))
