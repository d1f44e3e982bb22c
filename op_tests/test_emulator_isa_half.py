"""16-bit instructions from ISA text, against numpy's halves and Python integers; atomics against a loop over lanes."""

import numpy as np
import pytest
from emulator_kernels import Kernel, words

RNG = np.random.default_rng(21)


def half_pairs():
    """Register of two halves per lane, small enough to have no infinities."""
    return (RNG.standard_normal((64, 2)) * 8).astype(np.float16)


def run(lines, *sources):
    """Run lines on v2.., one register per source; return v10, which held 0x12345678."""
    body = ["v_lshlrev_b32_e32 v1, 2, v0"]
    body += [f"s_load_dwordx2 s[{4 + 2 * k}:{5 + 2 * k}], s[0:1], {8 * k:#x}" for k in range(len(sources) + 1)]
    body.append("s_waitcnt lgkmcnt(0)")
    body += [f"global_load_dword v{2 + k}, v1, s[{6 + 2 * k}:{7 + 2 * k}]" for k in range(len(sources))]
    body += ["v_mov_b32_e32 v10, 0x12345678", "s_waitcnt vmcnt(0)", lines, "s_nop 4"]
    body += ["global_store_dword v1, v10, s[4:5]", "s_endpgm"]
    target = np.zeros(64, np.uint32)
    Kernel("\n".join(body)).run(target, *[np.ascontiguousarray(source).view(np.uint32).ravel() for source in sources])
    return target


PLAIN = {
    "v_add_f16_e32 v10, v2, v3": lambda a, b, c: a + b,
    "v_sub_f16_e32 v10, v2, v3": lambda a, b, c: a - b,
    "v_subrev_f16_e32 v10, v2, v3": lambda a, b, c: b - a,
    "v_mul_f16_e32 v10, v2, v3": lambda a, b, c: a * b,
    "v_min_f16_e32 v10, v2, v3": np.minimum,
    "v_max_f16_e64 v10, -v2, |v3|": lambda a, b, c: np.maximum(-a, np.abs(b)),
    "v_fma_f16 v10, v2, v3, v4": lambda a, b, c: (
        a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    ).astype(np.float16),
    "v_add_f16_e32 v10, 2.0, v2": lambda a, b, c: np.float16(2.0) + a,
}


@pytest.mark.parametrize("lines", PLAIN)
def test_plain_halves_clear_the_upper_half(lines):
    a, b, c = half_pairs(), half_pairs(), half_pairs()
    function = PLAIN[lines]
    low = [source[:, 0] for source in (a, b, c)]
    want = function(*low) if not isinstance(function, np.ufunc) else function(*low[:2])
    assert run(lines, a, b, c).tolist() == want.view(np.uint16).astype(int).tolist()


def test_op_sel_picks_the_upper_half():
    a, b = half_pairs(), half_pairs()
    want = a[:, 1] + b[:, 0]
    assert run("v_add_f16_e64 v10, v2, v3 op_sel:[1,0,0]", a, b).tolist() == want.view(np.uint16).astype(int).tolist()


INTEGERS = {
    "v_add_u16_e32 v10, v2, v3": lambda a, b: a + b,
    "v_sub_u16_e32 v10, v2, v3": lambda a, b: a - b,
    "v_mul_lo_u16_e32 v10, v2, v3": lambda a, b: a * b,
    "v_max_u16_e32 v10, v2, v3": max,
    "v_min_i16_e32 v10, v2, v3": lambda a, b: min(a - (a >> 15 << 16), b - (b >> 15 << 16)),
    "v_lshlrev_b16_e32 v10, v2, v3": lambda a, b: b << (a & 15),
    "v_ashrrev_i16_e32 v10, v2, v3": lambda a, b: (b - (b >> 15 << 16)) >> (a & 15),
}


@pytest.mark.parametrize("lines", INTEGERS)
def test_plain_16_bit_integers(lines):
    a, b = words(64, 7), words(64, 99)
    want = [INTEGERS[lines](int(x) & 0xFFFF, int(y) & 0xFFFF) & 0xFFFF for x, y in zip(a, b, strict=True)]
    assert run(lines, a, b).tolist() == want


def test_packed_halves_and_their_selections():
    a, b, c = half_pairs(), half_pairs(), half_pairs()

    def check(lines, low, high):
        want = np.stack([low, high], -1).astype(np.float16)
        assert (run(lines, a, b, c).view(np.float16).reshape(64, 2) == want).all(), lines

    check("v_pk_add_f16 v10, v2, v3", a[:, 0] + b[:, 0], a[:, 1] + b[:, 1])
    check("v_pk_mul_f16 v10, v2, v3 op_sel:[1,0] op_sel_hi:[0,1]", a[:, 1] * b[:, 0], a[:, 0] * b[:, 1])
    check("v_pk_add_f16 v10, v2, v3 neg_lo:[0,1]", a[:, 0] - b[:, 0], a[:, 1] + b[:, 1])
    check("v_pk_mul_f16 v10, v2, 2.0 op_sel_hi:[1,0]", a[:, 0] * np.float16(2), a[:, 1] * np.float16(2))
    wide = [source.astype(np.float64) for source in (a, b, c)]
    fused = (wide[0] * wide[1] + wide[2]).astype(np.float16)
    check("v_pk_fma_f16 v10, v2, v3, v4", fused[:, 0], fused[:, 1])


def test_dot_products_sum_in_float():
    a, b = half_pairs(), half_pairs()
    c = RNG.standard_normal(64).astype(np.float32)
    got = run("v_dot2_f32_f16 v10, v2, v3, v4", a, b, c).view(np.float32)
    want = (a.astype(np.float64) * b.astype(np.float64)).sum(axis=1) + c
    assert np.allclose(got, want, rtol=1e-6, atol=1e-6)


ATOMICS = {
    "add": lambda old, data: old + data & 0xFFFFFFFF,
    "sub": lambda old, data: old - data & 0xFFFFFFFF,
    "and": lambda old, data: old & data,
    "or": lambda old, data: old | data,
    "xor": lambda old, data: old ^ data,
    "umin": min,
    "umax": max,
    "swap": lambda old, data: data,
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("memory", ["latest", "earliest"])
def test_atomics_take_lanes_that_meet_one_after_the_other(name, memory):
    body = f"""
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_load_dwordx2 s[8:9], s[0:1], 0x10
    v_lshlrev_b32_e32 v1, 2, v0
    v_and_b32_e32 v2, 28, v1
    s_waitcnt lgkmcnt(0)
    global_load_dword v3, v1, s[6:7]
    s_waitcnt vmcnt(0)
    global_atomic_{name} v4, v2, v3, s[4:5] sc0
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[8:9]
    s_endpgm
    """
    cells, data, old = words(8, 3), words(64, 1234567), np.zeros(64, np.uint32)
    want, returned = cells.tolist(), []
    for lane in range(64):
        returned.append(want[lane % 8])
        want[lane % 8] = ATOMICS[name](want[lane % 8], int(data[lane]))
    result = Kernel(body).run(cells, data, old, memory=memory)
    assert cells.tolist() == want
    assert old.tolist() == returned
    assert result.reports == []


def test_float_atomics_and_no_global_race_between_workgroups():
    body = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_mov_b32_e32 v1, 0
    v_mov_b32_e32 v2, 1.0
    s_waitcnt lgkmcnt(0)
    global_atomic_add_f32 v1, v2, s[4:5]
    s_endpgm
    """
    total = np.zeros(1, np.float32)
    result = Kernel(body, grid=5, block=128).run(total)
    assert total[0] == 640
    assert result.reports == []
