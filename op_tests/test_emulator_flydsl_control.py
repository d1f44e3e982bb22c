"""Own FlyDSL kernels of scalar loops, branches, lane exchange and barriers through the real compiler, against torch."""

import flydsl  # noqa: F401
import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl._mlir.dialects import llvm
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.utils.arith import _to_raw as raw

from op_tests.emulator_flydsl import run_everywhere

LANES, BLOCK = 64, 256
VALUES = torch.randint(-1000, 1000, (4 * BLOCK,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)


def same(want):
    def check(got):
        assert torch.equal(got, want.to(got.dtype))

    return check


@flyc.kernel(known_block_size=[LANES, 1, 1])
def loop_kernel(A: fx.Tensor, N: fx.Tensor, C: fx.Tensor):
    group, lane = fx.block_idx.x, fx.thread_idx.x
    count = fx.Int64(N[group])
    total = fx.Int32(0)
    for k, state in range(fx.Int64(0), count, fx.Int64(1), init=[total]):
        total = state[0] + A[fx.Int32(k) * LANES + lane] * (fx.Int32(k) + 1)
        results = yield [total]
    C[group * LANES + lane] = results


def test_a_loop_whose_length_differs_between_workgroups():
    counts = torch.tensor([1, 3, 12, 7], dtype=torch.int32)
    rows = VALUES[: 12 * LANES].view(12, LANES).long()
    weight = torch.arange(1, 13)[:, None]
    want = torch.stack([(rows * weight)[:n].sum(0) for n in counts.tolist()]).flatten()
    uses = ("s_cbranch_scc1",)
    run_everywhere(
        loop_kernel, (VALUES, counts), torch.zeros(4 * LANES, dtype=torch.int32), same(want), grid=4, uses=uses
    )


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def branch_kernel(A: fx.Tensor, C: fx.Tensor):
    i = fx.block_idx.x * BLOCK + fx.thread_idx.x
    a = A[i]
    C[i] = a
    if a > 0:
        C[i] = A[i ^ 1] * 2
    if fx.thread_idx.x >= 192:
        C[i] = a - 1


def test_branches_that_part_lanes_and_waves():
    x = VALUES.view(4, BLOCK)
    other = VALUES[torch.arange(4 * BLOCK) ^ 1].view(4, BLOCK)
    want = torch.where(x > 0, other * 2, x)
    want[:, 192:] = x[:, 192:] - 1
    run_everywhere(
        branch_kernel,
        (VALUES,),
        torch.zeros_like(VALUES),
        same(want.flatten()),
        grid=4,
        block=BLOCK,
        uses=("s_and_saveexec_b64", "s_or_b64"),
    )


@flyc.kernel(known_block_size=[LANES, 1, 1])
def lanes_kernel(A: fx.Tensor, C: fx.Tensor):
    lane = fx.thread_idx.x
    a = A[lane]
    pair = llvm.StructType.get_literal([T.i32, T.i32])
    wide = rocdl.permlane32_swap(pair, raw(a), raw(a + 1000), False, False)
    narrow = rocdl.permlane16_swap(pair, raw(a), raw(a + 1000), False, False)
    C[lane * 8 + 0] = fx.Int32(llvm.extractvalue(T.i32, wide, [0]))
    C[lane * 8 + 1] = fx.Int32(llvm.extractvalue(T.i32, wide, [1]))
    C[lane * 8 + 2] = fx.Int32(llvm.extractvalue(T.i32, narrow, [0]))
    C[lane * 8 + 3] = fx.Int32(llvm.extractvalue(T.i32, narrow, [1]))
    C[lane * 8 + 4] = fx.Int32(rocdl.ds_bpermute(T.i32, (lane ^ 21) * 4, a))
    C[lane * 8 + 5] = fx.Int32(rocdl.update_dpp(T.i32, raw(fx.Int32(-7)), raw(a), 0x111, 0xF, 0xF, False))
    C[lane * 8 + 6] = a + fx.Int32(rocdl.readlane(T.i32, a, fx.Int32(37)))
    C[lane * 8 + 7] = a + fx.Int32(rocdl.readfirstlane(T.i32, a))


def test_lanes_exchange_values():
    a = VALUES[:LANES]
    b = a + 1000
    want = torch.zeros(LANES, 8, dtype=torch.int32)
    for lane in range(LANES):
        want[lane, 0] = b[lane - 32] if lane >= 32 else a[lane]
        want[lane, 1] = a[lane + 32] if lane < 32 else b[lane]
        want[lane, 2] = b[lane - 16] if lane // 16 % 2 else a[lane]
        want[lane, 3] = b[lane] if lane // 16 % 2 else a[lane + 16]
        want[lane, 4] = a[lane ^ 21]
        want[lane, 5] = a[lane - 1] if lane % 16 else -7
    want[:, 6], want[:, 7] = a + a[37], a + a[0]
    uses = (
        "v_permlane32_swap_b32",
        "v_permlane16_swap_b32",
        "ds_bpermute_b32",
        "v_readlane_b32",
        "v_readfirstlane_b32",
    )
    run_everywhere(lanes_kernel, (a,), torch.zeros(8 * LANES, dtype=torch.int32), same(want.flatten()), uses=uses)


@flyc.kernel(known_block_size=[LANES, 1, 1])
def reduce_kernel(A: fx.Tensor, C: fx.Tensor):
    lane = fx.thread_idx.x
    total = A[fx.block_idx.x * LANES + lane]
    for step in fx.range_constexpr(6):
        total = total + total.shuffle_xor(fx.Int32(1 << step), fx.Int32(LANES))
    C[fx.block_idx.x * LANES + lane] = total


def test_a_wave_reduces_by_shuffles():
    want = VALUES.view(16, LANES).sum(1, keepdim=True).expand(16, LANES).flatten()
    run_everywhere(reduce_kernel, (VALUES,), torch.zeros_like(VALUES), same(want), grid=16)


@fx.struct
class Partials:
    words: fx.Array[fx.Int32, BLOCK, 16]


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def tree_kernel(A: fx.Tensor, C: fx.Tensor):
    lds = fx.SharedAllocator().allocate(Partials).peek().words.view(fx.make_layout(BLOCK, 1))
    t = fx.thread_idx.x
    lds[t] = A[fx.block_idx.x * BLOCK + t]
    fx.gpu.barrier()
    for step in fx.range_constexpr(8):
        half = BLOCK >> (step + 1)
        if t < half:
            lds[t] = lds[t] + lds[t + half]
        fx.gpu.barrier()
    rocdl.s_setprio(1)
    C[fx.block_idx.x * BLOCK + t] = lds[0] + t
    rocdl.s_setprio(0)


def test_a_workgroup_reduces_over_barriers():
    want = (VALUES.view(4, BLOCK).sum(1, keepdim=True) + torch.arange(BLOCK)).flatten()
    executed = run_everywhere(
        tree_kernel,
        (VALUES,),
        torch.zeros_like(VALUES),
        same(want),
        grid=4,
        block=BLOCK,
        uses=("s_barrier", "s_setprio"),
    )
    assert executed["s_barrier"] == 9 * 16
