"""f32 arithmetic against rational numbers and the manual's pseudocode, one value at a time."""

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest

from aiter_paged_fp8.emulator.math import floats
from op_tests.exact_floats import F32, INFINITE, NAN, f32_value

RNG = np.random.default_rng(3)
SIGN, QUIET, DEFAULT_NAN = 0x80000000, 0x00400000, 0xFFC00000
# Zeros, subnormals, neighbours of 1, extremes, infinities, quiet and signalling NaNs; each with either sign.
EDGES = [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40000000, 0x7F7FFFFF, 0x7F800000]
EDGES += [0x7FC00000, 0x7FC12345, 0x7F800001, 0x7FA00000]
EDGES += [e | SIGN for e in EDGES]


def array(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.uint32)


def grid(count: int) -> list[np.ndarray]:
    """All combinations of the edge values, [n] each."""
    return [g.ravel() for g in np.meshgrid(*[array(EDGES)] * count)]


def is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > 0x7F800000


def is_signalling(bits: int) -> bool:
    return is_nan(bits) and not bits & QUIET


def exact(kind: str, *operands: int, denorm: int = 3) -> int:
    """Sum, difference, product or fused multiply-add, rounded once; NaN rules and flushing as documented."""
    s = [o if denorm & 1 or o & 0x7F800000 else o & SIGN for o in operands]
    if kind == "sub":
        s[1] ^= SIGN
    for operand in s:
        if is_nan(operand):
            return operand | QUIET
    x = [F32.value(o) for o in s]
    negative = [o >> 31 for o in s]
    if kind in ("mul", "fma"):
        sign = negative[0] ^ negative[1]
        if INFINITE in x[:2]:
            if 0 in x[:2]:
                return DEFAULT_NAN
            product = INFINITE
        else:
            product = x[0] * x[1]
        terms = [(product, sign)] + ([(x[2], negative[2])] if kind == "fma" else [])
    else:
        terms = list(zip(x, negative, strict=True))
    infinite = {sign for term, sign in terms if term == INFINITE}
    if infinite:
        return DEFAULT_NAN if len(infinite) == 2 else 0x7F800000 | infinite.pop() << 31
    total = sum((t for t, _ in terms), Fraction(0))
    if total == 0:
        return SIGN if all(sign for _, sign in terms) else 0
    bits = F32.round(abs(total)) | (SIGN if total < 0 else 0)
    return bits if denorm & 2 or bits & 0x7F800000 else bits & SIGN


def check(kind: str, function: object, operands: list[np.ndarray], denorm: int = 3) -> None:
    got = function(*operands, denorm=denorm)
    for i, row in enumerate(zip(*operands, strict=True)):
        want = exact(kind, *map(int, row), denorm=denorm)
        assert int(got[i]) == want, (kind, [hex(r) for r in row], hex(int(got[i])), hex(want))


def random_floats(count: int, low: int, high: int) -> np.ndarray:
    """Random signs and mantissas, biased exponents from `low` to `high`."""
    mantissa = RNG.integers(0, 1 << 23, count, dtype=np.uint32)
    # Short mantissas make exact results and ties.
    mantissa &= np.where(RNG.random(count) < 0.4, 0xFFFFFFFF << 12, 0xFFFFFFFF).astype(np.uint32)
    exponent = RNG.integers(low, high + 1, count).astype(np.uint32)
    return mantissa | exponent << np.uint32(23) | RNG.integers(0, 2, count).astype(np.uint32) << np.uint32(31)


@pytest.mark.parametrize("kind", ["add", "sub", "mul"])
@pytest.mark.parametrize("denorm", [0, 1, 2, 3])
def test_sum_difference_and_product(kind: str, denorm: int) -> None:
    function = getattr(floats, f"{kind}_f32")
    check(kind, function, grid(2), denorm)
    near = [random_floats(1500, 100, 140), random_floats(1500, 110, 150)]
    small = [random_floats(1500, 0, 70), random_floats(1500, 50, 130)]
    for operands in (near, small):
        check(kind, function, operands, denorm)


@pytest.mark.parametrize("denorm", [0, 3])
def test_fma_on_all_combinations_of_edge_values(denorm: int) -> None:
    check("fma", floats.fma_f32, grid(3), denorm)


def test_fma_on_random_values() -> None:
    for exponents in ((100, 150), (0, 70), (40, 100), (180, 254)):
        operands = [random_floats(2000, *exponents), random_floats(2000, *exponents)]
        # Addends of the product's size, so that both matter and cancel.
        product = (operands[0] >> np.uint32(23) & np.uint32(255)).astype(int)
        product += (operands[1] >> np.uint32(23) & np.uint32(255)).astype(int) - 127
        field = np.clip(product + RNG.integers(-30, 30, 2000), 0, 254).astype(np.uint32)
        addend = random_floats(2000, 0, 0) | field << np.uint32(23)
        check("fma", floats.fma_f32, [*operands, addend])


def test_fma_where_rounding_through_a_double_goes_wrong() -> None:
    """The product lies on a midpoint of two floats, the addend is below the last bit of its double."""
    odd = [(x, y) for x in range(4097, 8192, 256) for y in range(4097, 8192, 512) if x * y >> 24 and x % 2 and y % 2]
    a, b, c = [], [], []
    for x, y in odd:
        for shift in (0, -40, -86, -100):
            for tiny in (1, 0x80000001, 0x00400000, 0x80400001, 0x10000000, 0x90000000):
                a.append(int(np.float32(x * 2.0**shift).view(np.uint32)))
                b.append(int(np.float32(y * 2.0**-12).view(np.uint32)))
                c.append(tiny)
    # Subnormal results have their midpoints elsewhere: half a step, more or less 2**-46 of that, on a large subnormal.
    for x, y in (((1 << 23) - 1, (1 << 23) + 1), (8392705, 8384513)):
        assert x * y in ((1 << 46) - 1, (1 << 46) + 1)
        for sign in (1, -1):
            for k in range(0x400000, 0x400100):
                a.append(int(np.float32(sign * x * 2.0**-98).view(np.uint32)))
                b.append(int(np.float32(y * 2.0**-98).view(np.uint32)))
                c.append(k)
    # A product just above, at and below the midpoint under which everything rounds to zero.
    a += [0x00000001, 0x1A000001, 0x00800001]
    b += [0x3F000001, 0x1A000000, 0x3F000000]
    c += [0, SIGN, 0]
    operands = [array(x) for x in (a, b, c)]
    check("fma", floats.fma_f32, operands)
    with np.errstate(all="ignore"):
        naive = operands[0].view(np.float32).astype(float) * operands[1].view(np.float32)
        naive = (naive + operands[2].view(np.float32)).astype(np.float32).view(np.uint32)
    # The inputs are hard: without the correction they would not come out right.
    assert (naive != floats.fma_f32(*operands)).sum() > 500


def manual_minimum(a: int, b: int, ieee: bool, largest: bool) -> int:
    for s in (a, b) if ieee else ():
        if is_signalling(s):
            return s | QUIET
    if is_nan(a):
        return b
    if is_nan(b):
        return a
    if not (a | b) & 0x7FFFFFFF:
        return a & b if largest else a | b
    x, y = f32_value(a), f32_value(b)
    return (a if x >= y else b) if largest else (a if x < y else b)


def manual_minimum3(a: int, b: int, c: int, ieee: bool, largest: bool) -> int:
    return manual_minimum(manual_minimum(a, b, ieee, largest), c, ieee, largest)


def manual_median(a: int, b: int, c: int, ieee: bool) -> int:
    if is_nan(a) or is_nan(b) or is_nan(c):
        return manual_minimum3(a, b, c, ieee, False)
    top = f32_value(manual_minimum3(a, b, c, ieee, True))
    if top == f32_value(a):
        return manual_minimum(b, c, ieee, True)
    return manual_minimum(a, c if top == f32_value(b) else b, ieee, True)


def ieee_2019(a: int, b: int, c: int, largest: bool) -> int:
    for s in (a, b, c):
        if is_nan(s):
            return s | QUIET
    return manual_minimum3(a, b, c, True, largest)


@pytest.mark.parametrize("ieee", [False, True])
def test_minimum_maximum_and_median_with_every_kind_of_zero_and_nan(ieee: bool) -> None:
    two, three = grid(2), grid(3)
    calls = {
        "min_f32": (two, lambda *s: manual_minimum(*s, ieee, False)),
        "max_f32": (two, lambda *s: manual_minimum(*s, ieee, True)),
        "min3_f32": (three, lambda *s: manual_minimum3(*s, ieee, False)),
        "max3_f32": (three, lambda *s: manual_minimum3(*s, ieee, True)),
        "med3_f32": (three, lambda *s: manual_median(*s, ieee)),
    }
    for name, (operands, scalar) in calls.items():
        got = getattr(floats, name)(*operands, ieee=ieee)
        want = [scalar(*map(int, row)) for row in zip(*operands, strict=True)]
        assert got.tolist() == want, name
    # Without zeros and NaNs another path is taken.
    operands = [random_floats(3000, 1, 254) for _ in range(3)]
    for name, (_, scalar) in calls.items():
        used = operands[: 2 if name in ("min_f32", "max_f32") else 3]
        want = [scalar(*map(int, row)) for row in zip(*used, strict=True)]
        assert getattr(floats, name)(*used, ieee=ieee).tolist() == want, name


def test_minimum3_and_maximum3_let_a_nan_win() -> None:
    three = grid(3)
    for name, largest in (("minimum3_f32", False), ("maximum3_f32", True)):
        want = [ieee_2019(*map(int, row), largest) for row in zip(*three, strict=True)]
        assert getattr(floats, name)(*three).tolist() == want


def test_legacy_product_of_a_zero_is_zero() -> None:
    a, b = grid(2)
    got = floats.mul_legacy_f32(a, b)
    for x, y, r in zip(a, b, got, strict=True):
        zero = not (int(x) & 0x7FFFFFFF and int(y) & 0x7FFFFFFF)
        assert int(r) == (0 if zero else exact("mul", int(x), int(y)))


COMPARISONS = {
    "f": "", "lt": "<", "eq": "=", "le": "<=", "gt": ">", "lg": "<>", "ge": ">=", "o": "<=>",
    "u": "?", "nge": "<?", "nlg": "=?", "ngt": "<=?", "nle": ">?", "neq": "<>?", "nlt": ">=?", "tru": "<=>?",
}  # fmt: skip


def test_comparisons_by_the_four_relations() -> None:
    a, b = grid(2)
    for how, true_for in COMPARISONS.items():
        want = []
        for x, y in zip(a, b, strict=True):
            x, y = f32_value(int(x)), f32_value(int(y))
            want.append(("<" if x < y else "=" if x == y else ">" if x > y else "?") in true_for)
        assert floats.cmp_f32(how, a, b).tolist() == want, how
    assert floats.cmp_f32("eq", array([1]), array([0]), denorm=0)[0]


def test_every_class_of_number() -> None:
    kinds = [0xFF800001, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000001, SIGN, 0, 0x007FFFFF, 0x00800000, 0x7F800000]
    for number, bits in enumerate(kinds):
        for mask_bit in range(10):
            got = floats.cmp_class_f32(array([bits]), np.uint32(1 << mask_bit))
            assert bool(got[0]) == (mask_bit == number), (hex(bits), mask_bit)
    assert floats.cmp_class_f32(array([0x7F800001, 0x7F800000]), np.uint32(3)).tolist() == [True, False]


def test_output_modifiers() -> None:
    values = array([0xBF800000, SIGN, 0x3F000000, 0x3F800000, 0x3F800001, 0x7F800000, 0xFF800000, 0x7FC00000])
    one = 0x3F800000
    assert floats.clamp_f32(values).tolist() == [0, 0, 0x3F000000, one, one, one, 0, 0]
    assert floats.clamp_f32(values, dx10_clamp=False)[-1] == 0x7FC00000
    half, twice = floats.omod_f32(array([one, 0x00800000]), 3), floats.omod_f32(array([one, 0x7F7FFFFF]), 1)
    assert half.tolist() == [0x3F000000, 0]
    assert twice.tolist() == [0x40000000, 0x7F800000]
    assert floats.omod_f32(array([one]), 2).tolist() == [0x40800000]
    assert floats.neg(values[:2]).tolist() == [one, 0]
    assert floats.absolute(values[:2]).tolist() == [one, 0]


def test_operands_broadcast_like_scalar_registers() -> None:
    vector, per_wave = random_floats(640, 100, 150).reshape(10, 64), random_floats(10, 100, 150).reshape(10, 1)
    literal = np.uint32(0x3FC00000)
    got = floats.fma_f32(vector, per_wave, literal)
    assert got.shape == (10, 64)
    assert int(got[7, 9]) == exact("fma", int(vector[7, 9]), int(per_wave[7, 0]), int(literal))
    assert floats.max_f32(vector, literal).shape == (10, 64)


def test_reference_knows_its_own_formats() -> None:
    assert F32.round(Fraction(1, 3)) == 0x3EAAAAAB
    assert F32.value(0x7F800000) == INFINITE
    assert F32.value(0x7F800001) == NAN
