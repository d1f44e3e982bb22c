"""Memory of the emulator: legal addresses, buffer ranges, LDS bounds, widths, and loads that go straight to LDS."""

import numpy as np
import pytest

from aiter_paged_fp8.emulator import MemoryFault, ProgramError
from op_tests.emulator_kernels import Kernel, words

# s4..s7 describe the first argument with the number of bytes that is put in; v1 is the lane's byte offset.
BUFFER = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_load_dwordx2 s[8:9], s[0:1], 0x8
    v_lshlrev_b32_e32 v1, 2, v0
    v_lshlrev_b32_e32 v2, 4, v0
    s_waitcnt lgkmcnt(0)
    s_and_b32 s5, s5, 0xffff
    s_movk_i32 s6, {records}
    s_mov_b32 s7, 0x20000
    {body}
    s_endpgm
"""


def buffer_kernel(body, records, **options):
    return Kernel(BUFFER.format(body=body, records=records), **options)


@pytest.mark.parametrize(
    ("records", "soffset", "offset"), [(1024, 0, 0), (1000, 0, 0), (1020, 8, 0), (512, 4, 16), (20, 0, 12)]
)
def test_each_dword_of_a_buffer_load_is_in_range_or_zero(records, soffset, offset):
    kernel = buffer_kernel(
        f"s_movk_i32 s10, {soffset}\n buffer_load_dwordx4 v[4:7], v2, s[4:7], s10 offen offset:{offset}\n"
        "s_waitcnt vmcnt(0)\n"
        "global_store_dwordx4 v2, v[4:7], s[8:9]",
        records,
    )
    source, target = words(300), np.full(256, 7, np.uint32)
    assert kernel.run(source, target).reports == []
    for lane in range(64):
        for element in range(4):
            start = offset + soffset + 16 * lane + 4 * element
            want = source[start // 4] if start + 4 <= records else 0
            assert target[4 * lane + element] == want


def test_buffer_stores_out_of_range_are_dropped():
    kernel = Kernel(
        BUFFER.format(
            body="v_mov_b32_e32 v4, 1\n v_mov_b32_e32 v5, 2\n v_lshlrev_b32_e32 v3, 3, v0\n"
            "buffer_store_dwordx2 v[4:5], v3, s[4:7], 0 offen",
            records=100,
        )
    )
    target = np.zeros(128, np.uint32)
    kernel.run(target, np.zeros(1, np.uint32))
    assert target[:25].tolist() == [1 + k % 2 for k in range(25)]
    assert not target[25:].any()


def test_a_buffer_in_range_may_still_leave_its_tensor():
    kernel = buffer_kernel("buffer_load_dword v4, v1, s[4:7], 0 offen offset:4\n s_waitcnt vmcnt(0)", 4096)
    source = words(64)
    with pytest.raises(MemoryFault) as fault:
        kernel.run(source, np.zeros(1, np.uint32))
    assert fault.value.details["lane"] == 63
    assert fault.value.details["nearest"] == "arg0"
    assert fault.value.details["address"] == source.ctypes.data + 256
    assert "4 bytes past the end of the nearest tensor, arg0" in str(fault.value)
    assert f"line {kernel.line_of('buffer_load_dword')}" in str(fault.value)


def test_inactive_lanes_touch_nothing():
    kernel = buffer_kernel(
        "v_cmpx_gt_u32_e64 s[20:21], 63, v0\n buffer_load_dword v4, v1, s[4:7], 0 offen offset:4", 4096
    )
    kernel.run(words(64), np.zeros(1, np.uint32))


def test_neighbouring_tensors_do_not_lend_each_other_bytes():
    storage = words(128)
    kernel = Kernel(BUFFER.format(body="global_load_dword v4, v1, s[8:9] offset:-4\n s_waitcnt vmcnt(0)", records=0))
    with pytest.raises(MemoryFault, match="before the start of the nearest tensor, arg1"):
        kernel.run(storage[:60], storage[64:])
    # The same bytes are legal where one tensor covers them.
    kernel.run(storage[:64], storage[64:])


def test_a_lane_pattern_may_spread_over_several_tensors():
    kernel = Kernel(
        """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        s_load_dwordx2 s[8:9], s[0:1], 0x10
        v_lshlrev_b32_e32 v1, 2, v0
        v_and_b32_e32 v2, 1, v0
        v_cmp_eq_u32_e32 vcc, 1, v2
        s_waitcnt lgkmcnt(0)
        v_mov_b32_e32 v4, s4
        v_mov_b32_e32 v5, s5
        v_mov_b32_e32 v6, s6
        v_mov_b32_e32 v7, s7
        v_cndmask_b32_e32 v4, v4, v6, vcc
        v_cndmask_b32_e32 v5, v5, v7, vcc
        v_lshlrev_b32_e32 v8, 2, v0
        v_mov_b32_e32 v9, 0
        v_lshl_add_u64 v[4:5], v[4:5], 0, v[8:9]
        global_load_dword v10, v[4:5], off
        s_waitcnt vmcnt(0)
        global_store_dword v1, v10, s[8:9]
        s_endpgm
        """
    )
    a, b, target = words(64), words(64, 5), np.zeros(64, np.uint32)
    kernel.run(a, b, target)
    assert (target == np.where(np.arange(64) % 2, b, a)).all()


NARROW = {
    "ubyte": lambda value: value & 0xFF,
    "sbyte": lambda value: (value & 0xFF) - (0x100 if value & 0x80 else 0),
    "ushort": lambda value: value & 0xFFFF,
    "sshort": lambda value: (value & 0xFFFF) - (0x10000 if value & 0x8000 else 0),
    "short_d16": lambda value: 0x00010000 | value & 0xFFFF,
    "short_d16_hi": lambda value: 5 | (value & 0xFFFF) << 16,
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("how", ["buffer_load_{} v4, v3, s[4:7], 0 offen", "global_load_{} v4, v3, s[4:5]"])
def test_narrow_loads_extend_or_keep(name, how):
    keep = "v_mov_b32_e32 v4, 0x10005\n" if "d16" in name else ""
    kernel = buffer_kernel(
        f"v_mul_u32_u24_e32 v3, 3, v0\n {keep}{how.format(name)}\n s_waitcnt vmcnt(0)\n"
        "global_store_dword v1, v4, s[8:9]",
        256,
    )
    source, target = words(64), np.zeros(64, np.uint32)
    kernel.run(source, target)
    for lane in range(64):
        value = int.from_bytes(source.tobytes()[3 * lane : 3 * lane + 2], "little")
        assert int(target[lane]) == NARROW[name](value) & 0xFFFFFFFF


def test_narrow_stores_leave_their_neighbours():
    kernel = buffer_kernel(
        "v_mul_u32_u24_e32 v3, 3, v0\n v_add_u32_e32 v4, 0x1230, v0\n buffer_store_short v4, v3, s[4:7], 0 offen\n"
        "global_store_byte v3, v4, s[8:9] offset:2",
        256,
    )
    target, other = np.full(256, 0xEE, np.uint8), np.full(256, 0xEE, np.uint8)
    assert kernel.run(target, other).reports == []
    for lane in range(64):
        assert target[3 * lane : 3 * lane + 3].tolist() == [0x30 + lane, 0x12, 0xEE]
        assert other[3 * lane : 3 * lane + 3].tolist() == [0xEE, 0xEE, 0x30 + lane]


def test_dma_places_lanes_after_m0_and_writes_zeros_out_of_range():
    kernel = buffer_kernel(
        """s_movk_i32 m0, 0x20
        s_nop 0
        v_cmpx_ne_u32_e64 s[20:21], 3, v0
        buffer_load_dwordx4 v2, s[4:7], 0 offen offset:16 lds
        s_mov_b64 exec, -1
        s_waitcnt vmcnt(0)
        ds_read_b128 v[4:7], v2 offset:48
        s_waitcnt lgkmcnt(0)
        global_store_dwordx4 v2, v[4:7], s[8:9]""".replace("s_movk_i32 m0, 0x20", "s_mov_b32 m0, 0x20"),
        800,
        lds=2048,
    )
    source, target = words(300), np.zeros(256, np.uint32)
    result = kernel.run(source, target, poison=0xABCDABCD)
    for lane in range(64):
        for element in range(4):
            start = 16 + 16 * lane + 4 * element
            want = 0xABCDABCD if lane == 3 else source[start // 4] if start + 4 <= 800 else 0
            assert target[4 * lane + element] == want
    # The lane that was off has left its bytes undefined, and they are stored.
    assert [report.kind for report in result.reports] == ["undefined"]


def test_global_dma_agrees_with_a_plain_load():
    kernel = buffer_kernel(
        """s_mov_b32 m0, 0
        v_xor_b32_e32 v3, 0xf0, v2
        global_load_lds_dwordx4 v3, s[4:5]
        s_waitcnt vmcnt(0)
        ds_read_b128 v[4:7], v2
        s_waitcnt lgkmcnt(0)
        global_store_dwordx4 v2, v[4:7], s[8:9]""",
        0,
        lds=1024,
    )
    source, target = words(256), np.zeros(256, np.uint32)
    assert kernel.run(source, target).reports == []
    index = (16 * np.arange(64) ^ 0xF0) // 4
    assert (target.reshape(64, 4) == source[index[:, None] + np.arange(4)]).all()


LDS = {
    "ds_write_b32 v1, v3\n ds_read_b32 v4, v1": lambda value: value,
    "ds_write_b32 v1, v3\n s_waitcnt lgkmcnt(0)\n ds_read_u16 v4, v1 offset:2": lambda value: value >> 16,
    "ds_write_b32 v1, v3\n ds_read_i8 v4, v1 offset:1": lambda value: ((value >> 8 & 0xFF) ^ 0x80) - 0x80,
    "ds_write_b16 v1, v3\n ds_write_b16_d16_hi v1, v3 offset:2\n ds_read_b32 v4, v1": lambda value: value,
    "ds_write2_b32 v1, v3, v3 offset0:0 offset1:64\n ds_read2_b32 v[4:5], v1 offset0:64 offset1:0": lambda value: value,
    "ds_write2st64_b32 v1, v3, v3 offset0:1 offset1:2\n ds_read2st64_b32 v[4:5], v1 offset0:2 offset1:1": lambda v: v,
}


@pytest.mark.parametrize("body", LDS)
@pytest.mark.parametrize("memory", ["latest", "earliest"])
def test_lds_widths(body, memory):
    kernel = buffer_kernel(
        f"buffer_load_dword v3, v1, s[4:7], 0 offen\n s_waitcnt vmcnt(0)\n {body}\n s_waitcnt lgkmcnt(0)\n"
        "global_store_dword v1, v4, s[8:9]",
        256,
        lds=1024,
    )
    source, target = words(64), np.zeros(64, np.uint32)
    assert kernel.run(source, target, memory=memory).reports == []
    assert target.tolist() == [LDS[body](int(value)) & 0xFFFFFFFF for value in source]


def test_transposing_reads_follow_their_byte_map():
    kernel = buffer_kernel(
        """buffer_load_dwordx2 v[4:5], v3, s[4:7], 0 offen
        s_waitcnt vmcnt(0)
        ds_write_b64 v3, v[4:5]
        ds_read_b64_tr_b8 v[6:7], v3
        ds_read_b64_tr_b16 v[8:9], v3
        s_waitcnt lgkmcnt(0)
        global_store_dwordx4 v2, v[6:9], s[8:9]""".replace(
            "buffer_load", "v_lshlrev_b32_e32 v3, 3, v0\n buffer_load", 1
        ),
        512,
        lds=512,
    )
    source, target = np.arange(512, dtype=np.uint16).astype(np.uint8), np.zeros(1024, np.uint8)
    source = np.random.default_rng(0).permutation(np.tile(np.arange(256, dtype=np.uint8), 2))
    assert kernel.run(source, target).reports == []
    fetched = source.reshape(64, 8)
    for lane in range(64):
        by_bytes = [fetched[16 * (lane // 16) + 2 * n + (lane >> 3 & 1), lane & 7] for n in range(8)]
        halves = [fetched[16 * (lane // 16) + (lane >> 2 & 3) + 4 * n, 2 * (lane & 3) :][:2] for n in range(4)]
        assert target[16 * lane : 16 * lane + 8].tolist() == by_bytes
        assert target[16 * lane + 8 : 16 * lane + 16].tolist() == np.concatenate(halves).tolist()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ds_read_b32 v4, v1 offset:772", "at 0x400: the workgroup has 1024 bytes"),
        ("ds_read_b64 v[4:5], v1 offset:768", "at 0x3fc: the workgroup has 1024 bytes"),
        ("ds_write_b32 v0, v1", "must be a multiple of 4"),
        ("ds_read_b64_tr_b8 v[4:5], v1", "must be a multiple of 8"),
    ],
)
def test_lds_accesses_out_of_bounds_or_misaligned_are_faults(body, message):
    with pytest.raises(MemoryFault, match="of LDS") as fault:
        buffer_kernel(body, 0, lds=1024).run(np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    assert message in str(fault.value)
    assert fault.value.details["lane"] in (1, 63)


def test_more_lds_than_there_is_is_refused():
    with pytest.raises(MemoryFault, match="163840 exist"):
        buffer_kernel("s_nop 0", 0, lds=163856).run(np.zeros(1, np.uint32), np.zeros(1, np.uint32))


def test_lds_exchanges():
    kernel = buffer_kernel(
        """buffer_load_dword v3, v1, s[4:7], 0 offen
        v_xor_b32_e32 v4, 0x24, v1
        s_waitcnt vmcnt(0)
        ds_bpermute_b32 v5, v4, v3
        ds_swizzle_b32 v6, v3 offset:swizzle(SWAP,2)
        ds_swizzle_b32 v7, v3 offset:swizzle(BROADCAST,8,3)
        s_waitcnt lgkmcnt(0)
        global_store_dwordx3 v2, v[5:7], s[8:9]""",
        256,
    )
    source, target = words(64), np.zeros(256, np.uint32)
    assert kernel.run(source, target).reports == []
    lane = np.arange(64)
    got = target.reshape(64, 4)
    assert (got[:, 0] == source[lane ^ 9]).all()
    assert (got[:, 1] == source[lane ^ 2]).all()
    assert (got[:, 2] == source[lane // 8 * 8 + 3]).all()


def test_scalar_loads_read_buffers_and_are_faults_elsewhere():
    kernel = buffer_kernel(
        "s_buffer_load_dwordx2 s[12:13], s[4:7], 0x4\n s_movk_i32 s16, 0x8\n"
        "s_buffer_load_dwordx4 s[20:23], s[4:7], s16\n"
        "s_waitcnt lgkmcnt(0)\n v_mov_b32_e32 v4, s12\n v_mov_b32_e32 v5, s13\n v_mov_b32_e32 v6, s21\n"
        "v_mov_b32_e32 v7, s22\n"
        "v_mov_b32_e32 v8, 0\n v_cmpx_eq_u32_e64 s[24:25], 0, v0\n global_store_dwordx4 v8, v[4:7], s[8:9]",
        16,
    )
    source, target = words(16), np.zeros(4, np.uint32)
    kernel.run(source, target)
    assert target.tolist() == [source[1], source[2], source[3], 0]
    with pytest.raises(MemoryFault, match="s_load_dwordx2"):
        Kernel("s_load_dwordx2 s[4:5], s[0:1], 0x1000\n s_waitcnt lgkmcnt(0)\n s_endpgm").run(source)


def test_an_unknown_user_register_is_refused_before_anything_runs():
    from aiter_paged_fp8.emulator import Launch, Machine, Memory, Options, Program, load
    from op_tests.emulator_kernels import isa_text

    text = isa_text("s_endpgm", 1).replace("user_sgpr_kernarg_segment_ptr 1", "user_sgpr_queue_ptr 1")
    with pytest.raises(ProgramError, match="queue_ptr"):
        Machine(Launch(load(Program.parse(text)), (1, 1, 1), (64, 1, 1), b"\0" * 8), Memory(), Options()).run()
