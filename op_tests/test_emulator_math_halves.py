"""f16 arithmetic and dot products against rational numbers."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from aiter_paged_fp8.emulator.math import halves
from op_tests.exact_floats import F16, F32, INFINITE, NAN

RNG = np.random.default_rng(31)
SIGN, QUIET, DEFAULT_NAN, INF = 0x8000, 0x0200, 0xFE00, 0x7C00
EDGES = [0, 1, 0x400, 0x3C01, 0x7BFF, INF, 0x7D01]
EDGES += [e | SIGN for e in EDGES]


def operands(count: int) -> list[np.ndarray]:
    """Edge values combined, then random ones; junk above the low half."""
    edges = [g.ravel() for g in np.meshgrid(*[np.array(EDGES, np.uint32)] * count)]
    anything = [RNG.integers(0, 1 << 16, 1500, dtype=np.uint32) for _ in range(count)]
    near = [(RNG.integers(0x2400, 0x4C00, 1500, dtype=np.uint32)) | (x & np.uint32(SIGN)) for x in anything]
    junk = RNG.integers(0, 1 << 16, len(edges[0]) + 3000, dtype=np.uint32) << np.uint32(16)
    return [np.concatenate(parts) | junk for parts in zip(edges, anything, near, strict=True)]


def exact(kind: str, *bits: int, clamps: bool = False) -> int:
    s = [b & 0xFFFF for b in bits]
    if kind == "sub":
        s[1] ^= SIGN
    for operand in s:
        if F16.value(operand) == NAN:
            return operand | QUIET
    x, negative = [F16.value(o) for o in s], [o >> 15 for o in s]
    terms = list(zip(x, negative, strict=True))
    if kind in ("mul", "fma"):
        if INFINITE in x[:2] and 0 in x[:2]:
            return DEFAULT_NAN
        product = INFINITE if INFINITE in x[:2] else x[0] * x[1]
        terms = [(product, negative[0] ^ negative[1]), *terms[2:]]
    infinite = {sign for term, sign in terms if term == INFINITE}
    if infinite:
        return DEFAULT_NAN if len(infinite) == 2 else INF | infinite.pop() << 15
    total = sum((t for t, _ in terms), Fraction(0))
    if total == 0:
        return SIGN if all(sign for _, sign in terms) else 0
    return min(F16.round(abs(total)), 0x7BFF if clamps else INF) | (SIGN if total < 0 else 0)


@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize("kind", ["add", "sub", "mul", "fma"])
def test_arithmetic_rounds_once(kind: str, clamps: bool) -> None:
    inputs = operands(3 if kind == "fma" else 2)
    got = getattr(halves, f"{kind}_f16")(*inputs, overflow_clamps=clamps)
    for i, row in enumerate(zip(*(x.tolist() for x in inputs), strict=True)):
        assert int(got[i]) == exact(kind, *row, clamps=clamps), (kind, [hex(r) for r in row], hex(int(got[i])))


def test_fma_takes_its_addend_into_account_far_below_the_last_bit() -> None:
    # The product is halfway between two halves, 2**-11 above one; the addend is 2**-24 and decides.
    a, b, c = (np.array(x, np.uint32) for x in ([0x3C10, 0x3C10, 0xBC10], [0x3C20] * 3, [0x0001, 0x8001, 0x8001]))
    got = halves.fma_f16(a, b, c).tolist()
    assert got == [exact("fma", *map(int, row)) for row in zip(a, b, c, strict=True)] == [0x3C31, 0x3C30, 0xBC31]


def test_subnormals_are_flushed_as_the_mode_says() -> None:
    one, tiny = np.array([0x3C00], np.uint32), np.array([0x8001], np.uint32)
    for denorm, want in ((0, SIGN), (1, SIGN), (2, SIGN), (3, 0x8001)):
        assert halves.mul_f16(one, tiny, denorm=denorm).tolist() == [want]
        assert halves.fma_f16(one, tiny, tiny & 0x8000, denorm=denorm).tolist() == [want]
    assert halves.max_f16(tiny, np.array([0xBC00], np.uint32), denorm=0).tolist() == [SIGN]
    assert halves.cmp_f16("eq", tiny, one * 0, denorm=0).tolist() == [True]


def manual_minimum(a: int, b: int, ieee: bool, largest: bool) -> int:
    x, y = F16.value(a), F16.value(b)
    for s, value in ((a, x), (b, y)) if ieee else ():
        if value == NAN and not s & QUIET:
            return s | QUIET
    if x == NAN:
        return b
    if y == NAN:
        return a
    # Magnitudes order like integers; -0 is below +0.
    key = [-(s & 0x7FFF) - 1 if s & SIGN else s for s in (a, b)]
    return (a, b)[(key[1] > key[0]) if largest else (key[1] < key[0])]


@pytest.mark.parametrize("ieee", [False, True])
def test_minimum_and_maximum(ieee: bool) -> None:
    a, b = operands(2)
    for name, largest in (("min_f16", False), ("max_f16", True)):
        got = getattr(halves, name)(a, b, ieee=ieee)
        want = [
            manual_minimum(x & 0xFFFF, y & 0xFFFF, ieee, largest) for x, y in zip(a.tolist(), b.tolist(), strict=True)
        ]
        assert got.tolist() == want


def test_comparisons_see_half_values() -> None:
    a, b = operands(2)
    with np.errstate(all="ignore"):
        x, y = (s.astype(np.uint16).view(np.float16).astype(np.float64) for s in (a, b))
        assert (halves.cmp_f16("lt", a, b) == (x < y)).all()
        assert (halves.cmp_f16("nle", a, b) == ~(x <= y)).all()


# The manual's functional examples.
EXAMPLES = {
    "exp_f16": {0xFC00: 0, SIGN: 0x3C00, INF: INF},
    "log_f16": {0xFC00: 0xFE00, 0xBC00: 0xFE00, SIGN: 0xFC00, 0: 0xFC00, 0x3C00: 0, INF: INF},
    "rcp_f16": {0xFC00: SIGN, 0xC000: 0xB800, SIGN: 0xFC00, 0: INF, INF: 0},
    "rsq_f16": {0xFC00: 0xFE00, SIGN: 0xFC00, 0: INF, 0x4400: 0x3800, INF: 0},
    "sqrt_f16": {0xFC00: 0xFE00, SIGN: SIGN, 0: 0, 0x4400: 0x4000, INF: INF},
}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_functions_of_the_manual(name: str) -> None:
    examples = {**EXAMPLES[name], 0x7D01: 0x7F01}
    assert getattr(halves, name)(np.array(list(examples), np.uint32)).tolist() == list(examples.values())


def test_functions_round_the_exact_value() -> None:
    for bits in range(1, INF, 37):
        value = F16.value(bits)
        assert int(halves.rcp_f16(np.array([bits], np.uint32))[0]) == F16.round(1 / value)
        root = int(halves.sqrt_f16(np.array([bits], np.uint32))[0])
        # The root lies between the midpoints on either side.
        below, above = ((F16.value(root) + F16.value(root + d)) / 2 for d in (-1, 1))
        assert below**2 <= value <= above**2


def pairs(count: int) -> tuple[np.ndarray, list[list[float]]]:
    """bf16 pairs, packed and as numbers."""
    bits = np.float32(RNG.normal(size=(count, 2))).view(np.uint32) >> np.uint32(16)
    values = (bits << np.uint32(16)).view(np.float32).astype(float).tolist()
    return bits[:, 0] | bits[:, 1] << np.uint32(16), values


def once(total: Fraction) -> Fraction:
    return F32.value(F32.round(abs(total))) * (1 if total >= 0 else -1)


@pytest.mark.parametrize("accumulator_first", [False, True])
def test_bf16_dot_products_add_in_the_documented_order(accumulator_first: bool) -> None:
    a, x = pairs(2000)
    b, y = pairs(2000)
    c = np.float32(RNG.normal(size=2000))
    function: Callable[..., np.ndarray] = halves.dot2c_f32_bf16 if accumulator_first else halves.dot2_f32_bf16
    got = function(a, b, c.view(np.uint32)).view(np.float32)
    for i in range(2000):
        low, high = (Fraction(x[i][n]) * Fraction(y[i][n]) for n in range(2))
        addend = Fraction(float(c[i]))
        want = once(once(addend + low) + high) if accumulator_first else once(once(low + high) + addend)
        assert Fraction(float(got[i])) == want


def test_f16_dot_products() -> None:
    values = RNG.integers(-64, 64, (4, 100)) / 4
    h = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    c = np.float32(np.arange(100))
    got = halves.dot2_f32_f16(h[0] | h[1] << 16, h[2] | h[3] << 16, c.view(np.uint32)).view(np.float32)
    assert (got == values[0] * values[2] + values[1] * values[3] + c).all()


def test_dot_products_flush_subnormals() -> None:
    one, tiny = np.array([0x3F80], np.uint32), np.array([0x0001], np.uint32)
    zero = np.array([0], np.uint32)
    assert halves.dot2_f32_bf16(one, tiny, zero).tolist() == [0]
    assert halves.dot2c_f32_bf16(zero, zero, np.array([0x00400000], np.uint32)).tolist() == [0]
