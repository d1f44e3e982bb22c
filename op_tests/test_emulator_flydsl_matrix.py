"""Own FlyDSL kernels of matrix instructions through the real compiler, against a float64 product of torch."""

import flydsl  # noqa: F401
import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch
from flydsl.expr.typing import Vector as Vec

from op_tests.emulator_flydsl import run_everywhere

LANES = 64


def tile_kernel(atom, dtype, per_lane, results):
    """A wave multiplies one tile: lane l loads `per_lane` elements of A and B, stores `results` of D."""

    @flyc.kernel(known_block_size=[LANES, 1, 1])
    def kernel(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor):
        lane = fx.thread_idx.x
        a = fx.make_rmem_tensor(fx.make_layout(per_lane, 1), dtype)
        b = fx.make_rmem_tensor(fx.make_layout(per_lane, 1), dtype)
        c = fx.make_rmem_tensor(fx.make_layout(results, 1), fx.Float32)
        block = fx.make_layout(per_lane, 1)
        a.store(fx.slice(fx.logical_divide(A, block), (None, lane)).load())
        b.store(fx.slice(fx.logical_divide(B, block), (None, lane)).load())
        c.store(Vec.filled(results, 0.0, fx.Float32))
        multiply = fx.make_mma_atom(atom())
        fx.gemm(multiply, c, a, b, c)
        fx.gemm(multiply, c, a, b, c)
        fx.slice(fx.logical_divide(C, fx.make_layout(results, 1)), (None, lane)).store(c.load())

    return kernel


# Name: atom, element, its torch type, rows, depth, k of item t of a lane, mnemonic.
def runs(per_lane):
    return lambda rows: lambda lane, t: per_lane * (lane // rows) + t


def sixteens(rows):
    step = {32: 32, 16: 64}[rows]
    return lambda lane, t: 16 * (lane // rows) + step * (t // 16) + t % 16


TILES = {
    "fp8 32x32x64": (
        lambda: fx.rocdl.cdna4.MFMA_Scale(32, 32, 64, fx.Float8E4M3FN),
        *(fx.Float8E4M3FN, torch.float8_e4m3fn, 32, 64, sixteens, "v_mfma_f32_32x32x64_f8f6f4"),
    ),
    "fp8 16x16x128": (
        lambda: fx.rocdl.cdna4.MFMA_Scale(16, 16, 128, fx.Float8E4M3FN),
        *(fx.Float8E4M3FN, torch.float8_e4m3fn, 16, 128, sixteens, "v_mfma_f32_16x16x128_f8f6f4"),
    ),
    "fp8 16x16x32": (
        lambda: fx.rocdl.MFMA(16, 16, 32, fx.Float8E4M3FN),
        *(fx.Float8E4M3FN, torch.float8_e4m3fn, 16, 32, runs(8), "v_mfma_f32_16x16x32_fp8_fp8"),
    ),
    "fp8 32x32x16": (
        lambda: fx.rocdl.MFMA(32, 32, 16, fx.Float8E4M3FN),
        *(fx.Float8E4M3FN, torch.float8_e4m3fn, 32, 16, runs(8), "v_mfma_f32_32x32x16_fp8_fp8"),
    ),
    "bf16 32x32x16": (
        lambda: fx.rocdl.MFMA(32, 32, 16, fx.BFloat16),
        *(fx.BFloat16, torch.bfloat16, 32, 16, runs(8), "v_mfma_f32_32x32x16_bf16"),
    ),
    "bf16 16x16x32": (
        lambda: fx.rocdl.MFMA(16, 16, 32, fx.BFloat16),
        *(fx.BFloat16, torch.bfloat16, 16, 32, runs(8), "v_mfma_f32_16x16x32_bf16"),
    ),
    "f16 16x16x16": (
        lambda: fx.rocdl.MFMA(16, 16, 16, fx.Float16),
        *(fx.Float16, torch.float16, 16, 16, runs(4), "v_mfma_f32_16x16x16_f16"),
    ),
}


def place_of_result(rows, register, lane):
    if rows == 32:
        return 8 * (register // 4) + 4 * (lane // 32) + register % 4, lane % 32
    return register + 4 * (lane // 16), lane % 16


@pytest.mark.parametrize("name", TILES)
def test_tiles(name):
    atom, dtype, torch_type, rows, depth, k_map, mnemonic = TILES[name]
    per_lane, results = rows * depth // LANES, rows * rows // LANES
    generator = torch.Generator().manual_seed(1)
    operands = [torch.randn(LANES * per_lane, generator=generator).to(torch_type) for _ in range(2)]
    matrices = []
    for operand in operands:
        matrix = torch.zeros(rows, depth, dtype=torch.float64)
        for lane in range(LANES):
            for t in range(per_lane):
                matrix[lane % rows, k_map(rows)(lane, t)] = operand[lane * per_lane + t].double()
        matrices.append(matrix)
    # Twice, the second time onto the first result.
    want = 2 * matrices[0] @ matrices[1].T

    def check(c):
        c = c.view(LANES, results)
        got = torch.zeros(rows, rows, dtype=torch.float64)
        for lane in range(LANES):
            for register in range(results):
                got[place_of_result(rows, register, lane)] = c[lane, register].double()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)

    kernel = tile_kernel(atom, dtype, per_lane, results)
    executed = run_everywhere(kernel, operands, torch.zeros(LANES * results), check, uses=(mnemonic,))
    assert executed[mnemonic] == 2


def test_block_scales():
    @flyc.kernel(known_block_size=[LANES, 1, 1])
    def kernel(A: fx.Tensor, B: fx.Tensor, S: fx.Tensor, C: fx.Tensor):
        lane = fx.thread_idx.x
        a = fx.make_rmem_tensor(fx.make_layout(32, 1), fx.Float8E4M3FN)
        b = fx.make_rmem_tensor(fx.make_layout(32, 1), fx.Float8E4M3FN)
        c = fx.make_rmem_tensor(fx.make_layout(16, 1), fx.Float32)
        a.store(fx.slice(fx.logical_divide(A, fx.make_layout(32, 1)), (None, lane)).load())
        b.store(fx.slice(fx.logical_divide(B, fx.make_layout(32, 1)), (None, lane)).load())
        c.store(Vec.filled(16, 0.0, fx.Float32))
        atom = fx.make_mma_atom(fx.rocdl.cdna4.MFMA_Scale(32, 32, 64, fx.Float8E4M3FN))
        fx.gemm(atom, c, a, b, c, scale_a=S[lane], scale_b=fx.Int32(0x7F))
        fx.slice(fx.logical_divide(C, fx.make_layout(16, 1)), (None, lane)).store(c.load())

    generator = torch.Generator().manual_seed(2)
    ones = torch.ones(LANES * 32).to(torch.float8_e4m3fn)
    # Lane l scales row l % 32 in k block l // 32.
    exponents = torch.randint(120, 134, (LANES,), generator=generator, dtype=torch.int32)
    factor = 2.0 ** (exponents.double() - 127)
    want = 32 * (factor[:32] + factor[32:])

    def check(c):
        c = c.view(LANES, 16)
        for lane in range(LANES):
            for register in range(16):
                row, _ = place_of_result(32, register, lane)
                assert c[lane, register] == want[row]

    run_everywhere(
        kernel,
        (ones, ones.clone(), exponents),
        torch.zeros(LANES * 16),
        check,
        uses=("v_mfma_scale_f32_32x32x64_f8f6f4",),
    )
