"""16-bit instructions from ISA text, against numpy's halves and Python integers; atomics against a loop over lanes."""

import ml_dtypes
import numpy as np
import pytest

from op_tests.emulator_kernels import Kernel, words

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


def signed(value):
    return value - (value >> 15 << 16)


def fused(a, b, c):
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)


# numpy's halves are rounded once, to nearest even.
FLOAT = {
    "v_add_f16": lambda a, b, c: a + b,
    "v_sub_f16": lambda a, b, c: a - b,
    "v_subrev_f16": lambda a, b, c: b - a,
    "v_mul_f16": lambda a, b, c: a * b,
    "v_min_f16": lambda a, b, c: np.minimum(a, b),
    "v_max_f16": lambda a, b, c: np.maximum(a, b),
    "v_fma_f16": fused,
}
FUNCTIONS = {
    "v_exp_f16": np.exp2,
    "v_log_f16": np.log2,
    "v_rcp_f16": lambda a: 1 / a,
    "v_sqrt_f16": np.sqrt,
    "v_rsq_f16": lambda a: 1 / np.sqrt(a),
}
INTEGER = {
    "v_add_u16": lambda a, b, c: a + b,
    "v_sub_u16": lambda a, b, c: a - b,
    "v_subrev_u16": lambda a, b, c: b - a,
    "v_mul_lo_u16": lambda a, b, c: a * b,
    "v_min_u16": lambda a, b, c: min(a, b),
    "v_max_u16": lambda a, b, c: max(a, b),
    "v_min_i16": lambda a, b, c: min(signed(a), signed(b)),
    "v_max_i16": lambda a, b, c: max(signed(a), signed(b)),
    "v_lshlrev_b16": lambda a, b, c: b << (a & 15),
    "v_lshrrev_b16": lambda a, b, c: b >> (a & 15),
    "v_ashrrev_i16": lambda a, b, c: signed(b) >> (a & 15),
    "v_mad_u16": lambda a, b, c: a * b + c,
}
PACKED_FLOAT = {
    "v_pk_add_f16": FLOAT["v_add_f16"],
    "v_pk_mul_f16": FLOAT["v_mul_f16"],
    "v_pk_fma_f16": fused,
    "v_pk_min_f16": FLOAT["v_min_f16"],
    "v_pk_max_f16": FLOAT["v_max_f16"],
}
PACKED_INTEGER = {
    "v_pk_add_u16": INTEGER["v_add_u16"],
    "v_pk_sub_u16": INTEGER["v_sub_u16"],
    "v_pk_add_i16": INTEGER["v_add_u16"],
    "v_pk_sub_i16": INTEGER["v_sub_u16"],
    "v_pk_mul_lo_u16": INTEGER["v_mul_lo_u16"],
    "v_pk_mad_u16": INTEGER["v_mad_u16"],
    "v_pk_min_u16": INTEGER["v_min_u16"],
    "v_pk_max_u16": INTEGER["v_max_u16"],
    "v_pk_min_i16": INTEGER["v_min_i16"],
    "v_pk_max_i16": INTEGER["v_max_i16"],
    "v_pk_lshlrev_b16": INTEGER["v_lshlrev_b16"],
    "v_pk_lshrrev_b16": INTEGER["v_lshrrev_b16"],
    "v_pk_ashrrev_i16": INTEGER["v_ashrrev_i16"],
}
# Whether each of less, equal, greater and unordered satisfies the comparison.
COMPARE = {
    "v_cmp_lt_f16": "l",
    "v_cmp_eq_f16": "e",
    "v_cmp_le_f16": "le",
    "v_cmp_gt_f16": "g",
    "v_cmp_lg_f16": "lg",
    "v_cmp_ge_f16": "ge",
    "v_cmp_o_f16": "leg",
    "v_cmp_u_f16": "u",
    "v_cmp_nge_f16": "lu",
    "v_cmp_nlg_f16": "eu",
    "v_cmp_ngt_f16": "leu",
    "v_cmp_nle_f16": "gu",
    "v_cmp_neq_f16": "lgu",
    "v_cmp_nlt_f16": "geu",
}
DOTS = {
    "v_dot2_f32_f16": np.float16,
    "v_dot2_f32_bf16": ml_dtypes.bfloat16,
    "v_dot2c_f32_bf16": ml_dtypes.bfloat16,
}
MIXED = ("v_fma_mix_f32",)


def text(mnemonic, count):
    suffix = "" if count == 3 or "_pk_" in mnemonic else "_e64"
    return f"{mnemonic}{suffix} v10, " + ", ".join(f"v{2 + k}" for k in range(count))


def arity(mnemonic):
    return 3 if any(word in mnemonic for word in ("fma", "mad")) else 2


@pytest.mark.parametrize("mnemonic", FLOAT)
def test_plain_halves_clear_the_upper_half(mnemonic):
    sources = [half_pairs() for _ in range(3)]
    want = FLOAT[mnemonic](*[source[:, 0] for source in sources])
    got = run(text(mnemonic, arity(mnemonic)), *sources)
    assert got.tolist() == want.view(np.uint16).astype(int).tolist()


def test_source_modifiers_and_constants():
    a, b = half_pairs(), half_pairs()
    want = np.maximum(-a[:, 0], np.abs(b[:, 0]))
    assert run("v_max_f16_e64 v10, -v2, |v3|", a, b).tolist() == want.view(np.uint16).astype(int).tolist()
    want = np.float16(2.0) + a[:, 0]
    assert run("v_add_f16_e32 v10, 2.0, v2", a).tolist() == want.view(np.uint16).astype(int).tolist()


@pytest.mark.parametrize("mnemonic", FUNCTIONS)
def test_functions_are_within_an_ulp(mnemonic):
    source = np.abs(half_pairs()) / np.float16(4) + np.float16(0.01)
    got = run(f"{mnemonic}_e32 v10, v2", source).astype(np.uint16).view(np.float16)
    want = FUNCTIONS[mnemonic](source[:, 0].astype(np.float64))
    assert (np.abs(got.astype(np.float64) - want) <= np.spacing(np.abs(want).astype(np.float16)).astype(float)).all()


def test_op_sel_picks_the_upper_half():
    a, b = half_pairs(), half_pairs()
    want = a[:, 1] + b[:, 0]
    assert run("v_add_f16_e64 v10, v2, v3 op_sel:[1,0,0]", a, b).tolist() == want.view(np.uint16).astype(int).tolist()


@pytest.mark.parametrize("mnemonic", INTEGER)
def test_plain_16_bit_integers(mnemonic):
    sources = [words(64, 7), words(64, 99), words(64, 1234)]
    want = [INTEGER[mnemonic](*[int(value) & 0xFFFF for value in lane]) & 0xFFFF for lane in zip(*sources, strict=True)]
    assert run(text(mnemonic, arity(mnemonic)), *sources).tolist() == want


@pytest.mark.parametrize("mnemonic", [*PACKED_FLOAT, *PACKED_INTEGER])
def test_packed_instructions_do_both_halves(mnemonic):
    if mnemonic in PACKED_FLOAT:
        sources = [half_pairs() for _ in range(3)]
        want = PACKED_FLOAT[mnemonic](*sources).view(np.uint16)
    else:
        sources = [words(64, seed).view(np.uint16).reshape(64, 2) for seed in (7, 99, 1234)]
        want = np.array(
            [
                [PACKED_INTEGER[mnemonic](*[int(source[lane, half]) for source in sources]) & 0xFFFF for half in (0, 1)]
                for lane in range(64)
            ],
            np.uint16,
        )
    got = run(text(mnemonic, arity(mnemonic)), *sources).view(np.uint16).reshape(64, 2)
    assert (got == want).all()


@pytest.mark.parametrize("mnemonic", COMPARE)
def test_compares(mnemonic):
    a, b = half_pairs(), half_pairs()
    b[:20] = a[:20]
    a[30:34] = np.nan
    got = run(f"{mnemonic}_e64 s[20:21], v2, v3\n v_cndmask_b32_e64 v10, 0, 1, s[20:21]", a, b)
    for lane in range(64):
        x, y = float(a[lane, 0]), float(b[lane, 0])
        relation = "u" if x != x or y != y else "l" if x < y else "g" if x > y else "e"
        assert got[lane] == (relation in COMPARE[mnemonic])


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


@pytest.mark.parametrize("mnemonic", DOTS)
def test_dot_products_sum_in_float(mnemonic):
    a, b = (half_pairs().astype(DOTS[mnemonic]) for _ in range(2))
    c = RNG.standard_normal(64).astype(np.float32)
    lines = f"{mnemonic} v10, v2, v3, v4"
    if "dot2c" in mnemonic:
        lines = f"v_mov_b32_e32 v10, v4\n {mnemonic}_e32 v10, v2, v3"
    got = run(lines, a.view(np.uint16), b.view(np.uint16), c).view(np.float32)
    want = (a.astype(np.float64) * b.astype(np.float64)).sum(axis=1) + c
    assert np.allclose(got, want, rtol=1e-6, atol=1e-5)


def test_mixed_multiply_add_takes_halves_and_floats():
    a, b = half_pairs(), half_pairs()
    c = RNG.standard_normal(64).astype(np.float32)
    got = run("v_fma_mix_f32 v10, v2, -v3, v4 op_sel:[1,0,0] op_sel_hi:[1,1,0]", a, b, c).view(np.float32)
    want = a[:, 1].astype(np.float64) * -b[:, 0].astype(np.float64) + c
    assert (got == want.astype(np.float32)).all()


def signed32(value):
    return value - (value >> 31 << 32)


ATOMICS = {
    "global_atomic_add": lambda old, data: old + data,
    "global_atomic_sub": lambda old, data: old - data,
    "global_atomic_and": lambda old, data: old & data,
    "global_atomic_or": lambda old, data: old | data,
    "global_atomic_xor": lambda old, data: old ^ data,
    "global_atomic_umin": min,
    "global_atomic_umax": max,
    "global_atomic_smin": lambda old, data: min(signed32(old), signed32(data)),
    "global_atomic_smax": lambda old, data: max(signed32(old), signed32(data)),
    "global_atomic_swap": lambda old, data: data,
}
FLOAT_ATOMICS = ("global_atomic_add_f32", "global_atomic_pk_add_bf16")
ROWS = (
    *FLOAT,
    *FUNCTIONS,
    *INTEGER,
    *PACKED_FLOAT,
    *PACKED_INTEGER,
    *COMPARE,
    *DOTS,
    *MIXED,
    *ATOMICS,
    *FLOAT_ATOMICS,
)


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
    {name} v4, v2, v3, s[4:5] sc0
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[8:9]
    s_endpgm
    """
    cells, data, old = words(8, 3), words(64, 1234567), np.zeros(64, np.uint32)
    want, returned = cells.tolist(), []
    for lane in range(64):
        returned.append(want[lane % 8])
        want[lane % 8] = ATOMICS[name](want[lane % 8], int(data[lane])) & 0xFFFFFFFF
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
    pairs = np.zeros(1, np.uint32)
    packed = body.replace("v_mov_b32_e32 v2, 1.0", "v_mov_b32_e32 v2, 0x3f804000").replace("add_f32", "pk_add_bf16")
    Kernel(packed, block=64).run(pairs)
    assert pairs.view(ml_dtypes.bfloat16).astype(float).tolist() == [128, 64]
