"""Own FlyDSL kernels of integer, float and conversion instructions through the real compiler, against torch."""

import flydsl  # noqa: F401
import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec
from flydsl.expr.utils.arith import _to_raw as raw

from op_tests.emulator_flydsl import run_everywhere

BLOCK, N = 256, 512


def index():
    return fx.block_idx.x * BLOCK + fx.thread_idx.x


def integers(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, (N,), generator=generator, dtype=torch.int32)


def floats(seed):
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def integer_kernel(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor):
    i = index()
    a, b = A[i], B[i]
    C[i * 8 + 0] = a + b * 3
    C[i * 8 + 1] = (a << (b & 31)) ^ (b >> 3)
    C[i * 8 + 2] = (a < b).select(a - b, b)
    C[i * 8 + 3] = fx.max(a, b) - fx.min(a, b)
    C[i * 8 + 4] = (a & b) | (a ^ 12345)
    C[i * 8 + 5] = a // 7
    C[i * 8 + 6] = a % 10
    C[i * 8 + 7] = fx.shrui(a, 5)


def test_integers():
    a, b = integers(1), integers(2)
    x, y = a.long(), b.long()
    wanted = [
        x + y * 3,
        (x << (y & 31)) ^ (y >> 3),
        torch.where(x < y, x - y, y),
        torch.maximum(x, y) - torch.minimum(x, y),
        (x & y) | (x ^ 12345),
        torch.div(x, 7, rounding_mode="floor"),
        x - 10 * torch.div(x, 10, rounding_mode="trunc"),
        (x & 0xFFFFFFFF) >> 5,
    ]

    def check(c):
        for k, want in enumerate(wanted):
            assert torch.equal(c.view(-1, 8)[:, k], want.to(torch.int32)), k

    uses = ("v_mul_hi_i32", "v_max_i32", "v_lshlrev_b32", "v_ashrrev_i32", "v_cndmask_b32")
    run_everywhere(integer_kernel, (a, b), torch.zeros(8 * N, dtype=torch.int32), check, grid=2, block=BLOCK, uses=uses)


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def float_kernel(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor):
    i = index()
    a, b = A[i], B[i]
    C[i * 8 + 0] = fx.fma(a, b, a)
    C[i * 8 + 1] = a * b - a
    C[i * 8 + 2] = fx.maxnumf(a, b) + fx.minnumf(a, b)
    C[i * 8 + 3] = a / b
    C[i * 8 + 4] = fx.absf(a) - b
    C[i * 8 + 5] = fx.trunc(a * 9.0)
    C[i * 8 + 6] = fx.roundeven(b * 9.0)
    C[i * 8 + 7] = (a > b).select(a, -b)


def test_floats():
    a, b = floats(1), floats(2)
    wanted = [
        (a.double() * b + a).float(),
        a * b - a,
        torch.maximum(a, b) + torch.minimum(a, b),
        a / b,
        a.abs() - b,
        (a * 9).trunc(),
        (b * 9).round(),
        torch.where(a > b, a, -b),
    ]

    def check(c):
        for k, want in enumerate(wanted):
            # The compiler may contract a product and a sum.
            close = (
                torch.isclose(c.view(-1, 8)[:, k], want, rtol=0, atol=3e-7) if k == 1 else c.view(-1, 8)[:, k] == want
            )
            assert close.all(), k

    uses = ("v_fma_f32", "v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32", "v_trunc_f32", "v_rndne_f32")
    run_everywhere(float_kernel, (a, b), torch.zeros(8 * N), check, grid=2, block=BLOCK, uses=uses)


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def function_kernel(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor):
    i = index()
    a, b = A[i], B[i]
    C[i * 8 + 0] = fx.Float32(rocdl.exp2(T.f32, raw(a)))
    C[i * 8 + 1] = fx.Float32(rocdl.log(T.f32, raw(b)))
    C[i * 8 + 2] = fx.Float32(rocdl.rcp(T.f32, raw(b)))
    C[i * 8 + 3] = fx.Float32(rocdl.sqrt(T.f32, raw(b)))
    C[i * 8 + 4] = fx.Float32(rocdl.rsq(T.f32, raw(b)))
    C[i * 8 + 5] = fx.Float32(rocdl.sin(T.f32, raw(b)))
    C[i * 8 + 6] = fx.Float32(rocdl.cos(T.f32, raw(b)))
    C[i * 8 + 7] = fx.Float32(rocdl.fmed3(T.f32, raw(a), raw(b), raw(fx.Float32(0.5))))


def test_functions_of_one_float():
    a, b = floats(3), floats(4).abs() + 0.01
    turn = b.double() * 2 * torch.pi
    x, y = a.double(), b.double()
    half = torch.full_like(a, 0.5)
    wanted = [
        2**x,
        torch.log2(y),
        1 / y,
        y.sqrt(),
        y.rsqrt(),
        turn.sin(),
        turn.cos(),
        torch.stack([a, b, half]).median(0)[0],
    ]

    def check(c):
        for k, want in enumerate(wanted):
            torch.testing.assert_close(c.view(-1, 8)[:, k].double(), want.double(), rtol=3e-7, atol=3e-7)

    uses = ("v_exp_f32", "v_log_f32", "v_rcp_f32", "v_sqrt_f32", "v_rsq_f32", "v_sin_f32", "v_cos_f32", "v_med3_f32")
    run_everywhere(function_kernel, (a, b), torch.zeros(8 * N), check, grid=2, block=BLOCK, uses=uses)


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def packed_kernel(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor):
    i = index()
    a = Vec.from_elements([A[i], A[(i + 1) % N]], fx.Float32)
    b = Vec.from_elements([B[i], B[(i + 1) % N]], fx.Float32)
    total = a * b + (b - a) * a
    C[i * 2 + 0] = total[0]
    C[i * 2 + 1] = total[1]


def test_packed_floats():
    a, b = floats(5), floats(6)
    want = a.double() * b + (b - a).double() * a

    def check(c):
        c = c.view(-1, 2).double()
        torch.testing.assert_close(c[:, 0], want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(c[:, 1], want.roll(-1), rtol=1e-6, atol=1e-6)

    uses = ("v_pk_mul_f32", "v_pk_add_f32")
    run_everywhere(packed_kernel, (a, b), torch.zeros(2 * N), check, grid=2, block=BLOCK, uses=uses)


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def narrow_kernel(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor):
    i = index()
    a, b = A[i], B[i]
    low = rocdl.cvt_pk_fp8_f32(T.i32, raw(a), raw(b), raw(fx.Int32(0)), False)
    both = rocdl.cvt_pk_fp8_f32(T.i32, raw(b), raw(a), low, True)
    C[i * 4 + 0] = fx.Int32(both)
    C[i * 4 + 1] = fx.Float32(rocdl.cvt_f32_fp8(T.f32, both, 2)).bitcast(fx.Int32)
    C[i * 4 + 2] = fx.Int32(a * 100.0)
    C[i * 4 + 3] = fx.Float32(fx.Int32(i)).bitcast(fx.Int32)


def test_narrow_floats_and_integers():
    a, b = floats(7) * 50, floats(8)
    codes = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    first, second = (code.view(torch.uint8).long() for code in codes)
    packed = first | second << 8 | second << 16 | first << 24

    def check(c):
        c = c.view(-1, 4)
        assert torch.equal(c[:, 0], packed.to(torch.int32))
        assert torch.equal(c[:, 1].view(torch.float32), codes[1].float())
        assert torch.equal(c[:, 2], (a * 100).to(torch.int32))
        assert torch.equal(c[:, 3].view(torch.float32), torch.arange(N).float())

    uses = ("v_cvt_pk_fp8_f32", "v_cvt_f32_fp8", "v_cvt_i32_f32")
    run_everywhere(narrow_kernel, (a, b), torch.zeros(4 * N, dtype=torch.int32), check, grid=2, block=BLOCK, uses=uses)


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def half_kernel(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor):
    i = index()
    C[i * 2] = fx.Float32(A[i])
    C[i * 2 + 1] = fx.Float32(B[i])


def test_sixteen_bits_in():
    a, b = floats(9).bfloat16(), floats(10).half()

    def check(c):
        assert torch.equal(c, torch.stack([a.float(), b.float()], 1).flatten())

    uses = ("v_cvt_f32_f16", "v_lshlrev_b32", "global_load_ushort")
    run_everywhere(half_kernel, (a, b), torch.zeros(2 * N), check, grid=2, block=BLOCK, uses=uses)


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def round_kernel(A: fx.Tensor, B: fx.Tensor):
    i = index()
    B[i] = (A[i] * 1.5).to(fx.BFloat16)


def test_rounding_to_bf16():
    a = floats(11)
    want = (a * 1.5).bfloat16()
    out = torch.zeros(N, dtype=torch.bfloat16)

    def check(c):
        assert torch.equal(c.view(torch.int16), want.view(torch.int16))

    run_everywhere(round_kernel, (a,), out, check, grid=2, block=BLOCK, uses=("v_cvt_pk_bf16_f32",))
