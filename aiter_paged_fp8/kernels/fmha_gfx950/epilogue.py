"""Results of a workgroup: O divided by the row sum, and the log-sum-exp."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl.expr import range_constexpr
from flydsl.expr.typing import Vector as Vec

from . import intrinsics as gpu
from .gemm import Gemm
from .softmax import Softmax
from .traits import ACCUMULATORS, STRIP, Traits, operand_k
from .work import Work

#: bf16 values in a 16-byte store.
STORE = 8


class Epilogue:
    def __init__(self, traits: Traits, args: Any, work: Work, gemm: Gemm, softmax: Softmax) -> None:
        self.traits, self.args, self.work, self.gemm, self.softmax = traits, args, work, gemm, softmax

    def store(self) -> None:
        """Store this wave's rows. Rows that see no key: 0, and -inf."""
        rounded = self.gemm.row_sum.load()[0]
        empty = rounded == 0.0
        self._store_outputs(empty.select(fx.Float32(0.0), gpu.reciprocal(rounded)))
        if self.traits.lse:
            low, high = gpu.both_halves(gpu.get(self.softmax.sum))
            total = low + high
            lse = (
                fx.fma(gpu.get(self.softmax.maximum), self.softmax.scale, gpu.log2(total) - self.traits.lift) * gpu.LN_2
            )
            self._store_lse(empty.select(fx.Float32(float("-inf")), lse))

    def _store_outputs(self, inverse: Any) -> None:
        traits = self.traits
        descale = gpu.number(self.args.v_descale)
        rows, offset = self.work.rows(self.args.out, fx.BFloat16, traits.head_dim_v)
        atom = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.BFloat16)
        first = offset + self.work.half * operand_k(1, 0)
        for strip in range_constexpr(traits.dim_strips):
            values = self.gemm.outputs[strip].load()
            # Two products, not one factor: a descale may be so small that its product with the inverse sum is not
            # normal.
            scaled = [values[k] * inverse * descale for k in range_constexpr(ACCUMULATORS)]
            for piece in range_constexpr(0, ACCUMULATORS, STORE):
                held = gpu.registers(STORE, fx.BFloat16)
                held.store(Vec.from_elements(scaled[piece : piece + STORE], fx.Float32).to(fx.BFloat16))
                fx.copy_atom_call(atom, held, gpu.window(rows, first + (strip * STRIP + piece), STORE))

    def _store_lse(self, lse: Any) -> None:
        args, work = self.args, self.work
        first_head = work.head * args.group
        address = args.lse + (fx.Int64(first_head) * fx.Int64(args.total_q) + fx.Int64(work.first_row)) * 4
        elements = (args.group - 1) * args.total_q + work.count
        buffer = gpu.buffer(address, fx.Float32, fx.Int64(elements) * 4)
        # One half stores; rows beyond the tile would fall on other positions and are sent beyond the buffer.
        mine = (work.half == 0) & (work.position < work.count)
        offset = mine.select(work.member * args.total_q + work.position, elements)
        held = gpu.variable(lse, fx.Float32)
        atom = fx.make_copy_atom(fx.rocdl.BufferCopy32b(), fx.Float32)
        fx.copy_atom_call(atom, held, gpu.window(buffer, offset, 1))
