"""Own FlyDSL kernels of LDS, buffers, loads to LDS and transposing reads through the real compiler, against torch."""

import flydsl  # noqa: F401
import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

from op_tests.emulator_flydsl import SETTINGS, emulating, launcher, run_everywhere

BLOCK = 256
WORDS = torch.randint(-(2**31), 2**31 - 1, (8 * BLOCK,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)


def same(want):
    def check(got):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))

    return check


@fx.struct
class WordBuffer:
    words: fx.Array[fx.Int32, BLOCK, 16]


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def reverse_kernel(A: fx.Tensor, C: fx.Tensor):
    lds = fx.SharedAllocator().allocate(WordBuffer).peek().words.view(fx.make_layout(BLOCK, 1))
    t = fx.thread_idx.x
    first = fx.block_idx.x * BLOCK
    lds[t] = A[first + t]
    fx.gpu.barrier()
    C[first + t] = lds[BLOCK - 1 - t]


def test_waves_exchange_words_through_lds():
    want = WORDS.view(8, BLOCK).flip(1).flatten()
    uses = ("ds_write_b32", "ds_read_b32", "s_barrier")
    run_everywhere(reverse_kernel, (WORDS,), torch.zeros_like(WORDS), same(want), grid=8, block=BLOCK, uses=uses)


@fx.struct
class ByteBuffer:
    bytes: fx.Array[fx.Float8E4M3FN, 16 * BLOCK, 128]


def wide_kernel(copy, lanes_bytes):
    @flyc.kernel(known_block_size=[BLOCK, 1, 1])
    def kernel(A: fx.Tensor, C: fx.Tensor):
        lds = fx.SharedAllocator().allocate(ByteBuffer).peek().bytes.view(fx.make_layout(16 * BLOCK, 1))
        t = fx.thread_idx.x
        row = fx.make_layout(lanes_bytes, 1)
        atom = fx.make_copy_atom(copy(), fx.Float8E4M3FN)
        source, target, middle = (fx.logical_divide(x, row) for x in (A, C, lds))
        fx.copy_atom_call(atom, fx.slice(source, (None, t)), fx.slice(middle, (None, t)))
        fx.gpu.barrier()
        fx.copy_atom_call(atom, fx.slice(middle, (None, (t + 77) % BLOCK)), fx.slice(target, (None, t)))

    return kernel


@pytest.mark.parametrize(
    ("copy", "size", "uses"),
    [
        (fx.UniversalCopy128b, 16, ("ds_write_b128", "ds_read_b128", "global_load_dwordx4", "global_store_dwordx4")),
        (fx.UniversalCopy64b, 8, ("ds_write_b64", "ds_read_b64", "global_load_dwordx2", "global_store_dwordx2")),
        (fx.UniversalCopy16b, 2, ("ds_write_b16", "ds_read_u16", "global_load_ushort", "global_store_short")),
        (fx.UniversalCopy8b, 1, ("ds_write_b8", "ds_read_u8", "global_load_ubyte", "global_store_byte")),
    ],
    ids=["16 bytes", "8 bytes", "2 bytes", "1 byte"],
)
def test_copies_of_every_width(copy, size, uses):
    source = WORDS.view(torch.uint8)[: size * BLOCK].clone().view(torch.float8_e4m3fn)
    want = source.view(torch.uint8).view(BLOCK, size).roll(-77, 0).flatten()
    run_everywhere(wide_kernel(copy, size), (source,), torch.zeros_like(source), same(want), block=BLOCK, uses=uses)


def dma_kernel(op, buffered):
    @flyc.kernel(known_block_size=[BLOCK, 1, 1])
    def kernel(A: fx.Tensor, C: fx.Tensor):
        lds = fx.SharedAllocator().allocate(ByteBuffer).peek().bytes.view(fx.make_layout(16 * BLOCK, 1))
        t = fx.thread_idx.x
        row = fx.make_layout(16, 1)
        source = fx.rocdl.make_buffer_tensor(A) if fx.const_expr(buffered) else A
        source, middle = fx.logical_divide(source, row), fx.logical_divide(lds, row)
        # Each wave fills 64 rows of LDS from its own first one; the lane is added by the instruction.
        wave = fx.rocdl.readfirstlane(fx.Int32.ir_type, t // 64 * 64)
        atom = fx.make_copy_atom(op(), fx.Float8E4M3FN)
        fx.copy_atom_call(atom, fx.slice(source, (None, t)), fx.slice(middle, (None, fx.Int32(wave))))
        fx.rocdl.s_waitcnt(vmcnt=0)
        fx.gpu.barrier()
        target = fx.logical_divide(C, row)
        back = fx.make_copy_atom(fx.UniversalCopy128b(), fx.Float8E4M3FN)
        fx.copy_atom_call(back, fx.slice(middle, (None, BLOCK - 1 - t)), fx.slice(target, (None, t)))

    return kernel


DMA = {
    "buffer, 16 bytes": (fx.rocdl.BufferCopyLDS128b, True, "buffer_load_dwordx4"),
    "global, 16 bytes": (fx.rocdl.cdna4.GlobalLoadAsyncLDS128b, False, "global_load_lds_dwordx4"),
}


@pytest.mark.parametrize("name", DMA)
def test_loads_straight_to_lds(name):
    op, buffered, mnemonic = DMA[name]
    source = WORDS.view(torch.uint8)[: 16 * BLOCK].clone().view(torch.float8_e4m3fn)
    want = source.view(torch.uint8).view(BLOCK, 16).flip(0).flatten()
    executed = run_everywhere(
        dma_kernel(op, buffered), (source,), torch.zeros_like(source), same(want), block=BLOCK, uses=(mnemonic,)
    )
    assert executed[mnemonic] == BLOCK // 64


@fx.struct
class TileBuffer:
    bytes: fx.Array[fx.Float8E4M3FN, 512, 128]


@flyc.kernel(known_block_size=[64, 1, 1])
def transpose_kernel(A: fx.Tensor, C: fx.Tensor):
    lds = fx.SharedAllocator().allocate(TileBuffer).peek().bytes.view(fx.make_layout(512, 1))
    lane = fx.thread_idx.x
    row = fx.make_layout(8, 1)
    copy = fx.make_copy_atom(fx.UniversalCopy64b(), fx.Float8E4M3FN)
    source, middle, target = (fx.logical_divide(x, row) for x in (A, lds, C))
    fx.copy_atom_call(copy, fx.slice(source, (None, lane)), fx.slice(middle, (None, lane)))
    fx.gpu.barrier()
    turned = fx.make_rmem_tensor(row, fx.Float8E4M3FN)
    fx.copy_atom_call(
        fx.make_copy_atom(fx.rocdl.cdna4.LDSReadTrans(8, 64), fx.Float8E4M3FN), fx.slice(middle, (None, lane)), turned
    )
    fx.copy_atom_call(copy, turned, fx.slice(target, (None, lane)))


def test_the_transposing_read():
    source = WORDS.view(torch.uint8)[:512].clone()
    rows = source.view(64, 8)
    want = torch.zeros(64, 8, dtype=torch.uint8)
    for lane in range(64):
        for n in range(8):
            want[lane, n] = rows[16 * (lane // 16) + 2 * n + (lane >> 3 & 1), lane & 7]
    out = torch.zeros(512, dtype=torch.uint8).view(torch.float8_e4m3fn)
    run_everywhere(
        transpose_kernel, (source.view(torch.float8_e4m3fn),), out, same(want.flatten()), uses=("ds_read_b64_tr_b8",)
    )


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def buffer_kernel(A: fx.Tensor, C: fx.Tensor):
    t = fx.thread_idx.x
    row = fx.make_layout(4, 1)
    source = fx.logical_divide(fx.rocdl.make_buffer_tensor(A, max_size=False), row)
    target = fx.logical_divide(fx.rocdl.make_buffer_tensor(C, max_size=False), row)
    held = fx.make_rmem_tensor(row, fx.Int32)
    copy = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.Int32)
    fx.copy_atom_call(copy, fx.slice(source, (None, t)), held)
    fx.copy_atom_call(copy, held, fx.slice(target, (None, t)))


def test_a_buffer_ends_with_its_tensor():
    # The kernel's grid covers more than the tensors: loads give zeros, stores are dropped.
    source = WORDS[:1000].clone()
    guard = torch.zeros(1024, dtype=torch.int32)
    view = guard[:900]
    uses = ("buffer_load_dwordx4", "buffer_store_dwordx4")
    run_everywhere(buffer_kernel, (source,), view, same(source[:900]), block=BLOCK, uses=uses)
    assert not guard[900:].any()


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def gather_kernel(A: fx.Tensor, P: fx.Tensor, C: fx.Tensor):
    page = P[fx.block_idx.x]
    t = fx.thread_idx.x
    C[fx.block_idx.x * BLOCK + t] = A[page * BLOCK + t]


def test_a_page_table_is_read_by_scalar_loads():
    pages = torch.tensor([5, 0, 7, 2, 2, 6], dtype=torch.int32)
    want = WORDS.view(8, BLOCK)[pages.long()].flatten()
    uses = ("s_load_dword", "global_load_dword")
    run_everywhere(
        gather_kernel,
        (WORDS, pages),
        torch.zeros(6 * BLOCK, dtype=torch.int32),
        same(want),
        grid=6,
        block=BLOCK,
        uses=uses,
    )


def test_a_store_of_every_workgroup_to_one_place_is_reported():
    @flyc.kernel(known_block_size=[BLOCK, 1, 1])
    def kernel(A: fx.Tensor, C: fx.Tensor):
        C[fx.thread_idx.x] = A[fx.thread_idx.x]

    out = torch.zeros(BLOCK, dtype=torch.int32)
    for options in SETTINGS.values():
        with emulating(options) as session:
            flyc.compile(launcher(kernel, 2, grid=2, block=BLOCK), WORDS, out)
        assert [report.kind for report in session.launches[0].reports] == ["global-race"]
