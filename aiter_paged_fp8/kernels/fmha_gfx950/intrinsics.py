"""FlyDSL's spelling of what the kernel's other files speak of: buffers, uniform values, single instructions."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

from .traits import LANES

Fp8 = fx.Float8E4M3FN

#: log2(e) and its inverse: exponentials are powers of two inside the kernel, log-sum-exps are natural outside.
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def buffer(address: Any, kind: Any, size: Any) -> Any:
    """A buffer of this many bytes: loads beyond it give 0, stores beyond it are dropped."""
    align = max(kind.width // 8, 4)
    pointer = fx.inttoptr(fx.PointerType.get(kind.ir_type, fx.AddressSpace.Global, align), address)
    return fx.rocdl.make_buffer_ptr(pointer, num_records_bytes=fx.Int64(size))


def number(address: Any) -> Any:
    """One float32 from memory, the same for all lanes."""
    return fx.rocdl.s_buffer_load(buffer(address, fx.Int32, fx.Int64(4)), fx.Int32(0)).bitcast(fx.Float32)


def window(pointer: Any, offset: Any, count: int) -> Any:
    """View of ``count`` elements from an element offset on."""
    return fx.make_view(fx.add_offset(pointer, offset), fx.make_layout(count, 1))


def registers(count: int, kind: Any) -> Any:
    """Mutable values in registers."""
    return fx.make_rmem_tensor(fx.make_layout(count, 1), kind)


def variable(value: Any, kind: Any) -> Any:
    """One mutable value in a register."""
    made = registers(1, kind)
    put(made, value)
    return made


def get(held: Any) -> Any:
    """Value of a `variable`."""
    return held.load()[0]


def put(held: Any, value: Any) -> None:
    """Set a `variable`."""
    held.store(Vec.from_elements([value], held.dtype))


def fill(held: Any, values: Any, kind: Any) -> None:
    """Set all of some registers."""
    held.store(Vec.from_elements(list(values), kind))


def scalar(value: Any) -> Any:
    """A value that is the same in all lanes, in a scalar register."""
    return fx.Int32(rocdl.readfirstlane(T.i32, value))


def clamp(value: Any, low: Any, high: Any) -> Any:
    """An integer inside [low, high]."""
    return fx.arith.min(fx.arith.max(value, low), high)


def wave_and_lane() -> tuple[Any, Any]:
    """Number of this wave in its workgroup (scalar), and of this lane in its wave."""
    thread = fx.Int32(fx.thread_idx.x)
    return divide(scalar(thread), LANES), thread & (LANES - 1)


def shift_right(value: Any, bits: int) -> Any:
    """Logical shift."""
    return (value.bitcast(fx.Uint32) >> bits).bitcast(fx.Int32)


def divide(value: Any, power: int) -> Any:
    """Quotient, rounded down, of an integer and a power of two: a shift."""
    assert power & (power - 1) == 0
    return value >> (power.bit_length() - 1)


def any_lane(condition: Any) -> Any:
    """Whether a condition holds in any lane: a scalar, so that a branch on it is one branch for the wave."""
    return fx.Int64(rocdl.ballot(T.i64, condition)) != fx.Int64(0)


def exp2(value: Any) -> Any:
    """v_exp_f32."""
    return fx.Float32(rocdl.exp2(T.f32, fx.Float32(value).ir_value()))


def log2(value: Any) -> Any:
    """v_log_f32."""
    return fx.Float32(rocdl.log(T.f32, fx.Float32(value).ir_value()))


def reciprocal(value: Any) -> Any:
    """v_rcp_f32."""
    return fx.Float32(rocdl.rcp(T.f32, fx.Float32(value)))


def maximum(first: Any, second: Any) -> Any:
    """The larger one; of a number and NaN, the number."""
    return fx.Float32(fx.arith.maxnumf(first, second, fastmath=fx.arith.FastMathFlags.nnan))


def sum_of(values: list[Any]) -> Any:
    """Pairwise, for a power of two of values: rounding errors grow with the logarithm of the count."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def both_halves(value: Any) -> tuple[Any, Any]:
    """A query's value from the lower and from the upper half of the wave, in both halves' lanes."""
    bits = value.bitcast(fx.Int32).ir_value()
    kind = fx.Int32.ir_type
    pair = rocdl.permlane32_swap(llvm.StructType.get_literal([kind, kind]), bits, bits, False, False)
    low, high = (fx.Int32(llvm.extractvalue(kind, pair, [k])).bitcast(fx.Float32) for k in range(2))
    return low, high


def undefined() -> Any:
    """Any bits: what an instruction keeps of them is overwritten before it is used."""
    return get(registers(1, fx.Int32))


def pack_fp8(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four floats as e4m3 in one register."""
    low = rocdl.cvt_pk_fp8_f32(T.i32, a, b, undefined(), False)
    return fx.Int32(rocdl.cvt_pk_fp8_f32(T.i32, c, d, low, True))


def phase_barrier() -> None:
    """A barrier that no instruction crosses."""
    rocdl.sched_barrier(0)
    rocdl.s_barrier()
    rocdl.sched_barrier(0)


def loads_done() -> None:
    """Wait until everything that this wave loads, into registers or LDS, has arrived."""
    rocdl.s_waitcnt(vmcnt=0)
