"""Accuracy of the native kernel: the gates of every native result, and the one that catches faults, a float64 model
that rounds P as the kernel does.

Each test prints the errors that it found beside its gate (pytest -rP shows them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from aiter_paged_fp8.reference import e4m3_values
from op_tests import rounding_model
from op_tests.cases import E4M3, Built, Case, build, fresh_seed, token
from op_tests.conftest import FULL
from op_tests.native_cases import MODES, run_native
from op_tests.rounding_model import Modelled, Rule, modelled

pytestmark = pytest.mark.grows

#: Relative L2 against exact attention, and against the model that rounds P as the kernel does.
REFERENCE_GATE, MODEL_GATE = 0.035, 0.004
COSINE_GATE, LSE_GATE, ONES_GATE = 0.998, 1e-4, 0.004
UNIT = (1.0, 1.0, 1.0)


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def check_gates(built: Built, mode: str = "latest") -> Modelled:
    """Run the kernel and hold it against both references; returns what the model saw."""
    out, lse, _ = run_native(built, mode)
    assert lse is not None
    rows = slice(built.cu[0], built.cu[-1])
    got, got_lse = out[rows].double(), lse[:, rows].double()
    expected, expected_lse = (exact[rows] if at == 0 else exact[:, rows] for at, exact in enumerate(built.reference()))
    model = modelled(built)
    model_out, model_lse = model.out[rows], model.lse[:, rows]
    assert torch.equal(got_lse == -math.inf, expected_lse == -math.inf)
    assert torch.equal((got == 0).all(-1), (expected == 0).all(-1))
    seen = (expected != 0).any(-1)
    finite = expected_lse.isfinite()
    lse_size = expected_lse[finite].abs().clamp(min=1.0)
    figures = {
        "relative L2": (relative(got, expected), REFERENCE_GATE),
        "against the model": (relative(got, model_out), MODEL_GATE),
        "1 - row cosine": (
            1 - float(torch.cosine_similarity(got[seen], expected[seen], dim=-1).min()),
            1 - COSINE_GATE,
        ),
        "LSE": (float(((got_lse - expected_lse)[finite].abs() / lse_size).max()), LSE_GATE),
        "LSE against the model": (float(((got_lse - model_lse)[finite].abs() / lse_size).max()), LSE_GATE),
    }
    report(str(built.case) or "case", figures)
    built.check_canaries()
    assert model.highest <= rounding_model.LARGEST * (1 + 1e-9)
    return model


def report(name: str, figures: dict[str, tuple[float, float]]) -> None:
    """Print every figure beside its gate, then assert them."""
    for what, (value, gate) in figures.items():
        print(f"GATE {name}: {what} {value:.3g} <= {gate:.3g}")
    failed = {what: pair for what, pair in figures.items() if not pair[0] <= pair[1]}
    assert not failed, failed


# -- the model itself -------------------------------------------------------------------------------------------------


def test_the_model_rounds_as_e4m3_does() -> None:
    values = e4m3_values().nan_to_num(0.0)
    values = values[values >= 0].unique()
    middles = (values[1:] + values[:-1]) / 2
    # All values and ties, and numbers just beside the ties; torch's own conversion rounds to nearest even, too.
    numbers = torch.cat(
        [values, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), torch.rand(4000).double() * 464]
    )
    assert torch.equal(rounding_model.round_e4m3(numbers), numbers.float().to(E4M3).double())


def test_the_model_without_rounding_is_attention() -> None:
    case = Case([30, 5, 4], [300, 3, 0], heads=4, kv_heads=2, descales=(-0.9, 2.5, 2.0), cu_start=2, seed=fresh_seed())
    built = build(case)
    expected, expected_lse = built.reference()
    model = modelled(built, Rule(rounded=False))
    rows = slice(built.cu[0], built.cu[-1])
    assert relative(model.out[rows], expected[rows]) <= 1e-12
    assert torch.allclose(model.lse[:, rows], expected_lse[:, rows], rtol=1e-12, atol=1e-12)


def test_the_gate_would_see_another_rule() -> None:
    # The gate of 0.004 tells the kernel's rule from its neighbours; each is far enough that noise can't hide it.
    # Ordinary scores, whose maximum grows by less than the threshold from tile to tile.
    built = build(Case([24], [640], heads=2, kv_heads=1, descales=(1.0, 2.0, 1.0), seed=fresh_seed()))
    kernel = modelled(built).out
    others = {
        "lift 5": Rule(lift=5.0),
        "lift half a power lower": Rule(lift=rounding_model.LIFT - 0.5),
        "a reference that follows every growth": Rule(threshold=0.0),
        "tiles of 64": Rule(tile=64),
        "no rounding": Rule(rounded=False),
    }
    for name, rule in others.items():
        distance = relative(modelled(built, rule).out, kernel)
        print(f"{name}: {distance:.4f}")
        assert distance > 2 * MODEL_GATE, name


# -- inputs that try the running maximum ------------------------------------------------------------------------------


def direction(built: Built, generator: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(built.case.dim, generator=generator) < 0.5, -1.0, 1.0)


def ramp(built: Built, gains: Sequence[float], *, opposed: bool = False, request: int = 0, noise: float = 0.3) -> None:
    """Keys of tile t lie ``gains[t]`` along a direction that all queries have; with ``opposed``, every second query
    has its opposite. Queries are the direction and noise, so that a gain of 1 is 128 in the score."""
    case = built.case
    generator = torch.Generator().manual_seed(case.seed + 1)
    along = direction(built, generator)
    rows = slice(built.cu[request], built.cu[request + 1])
    sign = torch.where(torch.arange(case.q_lens[request]) % 2 == 0, 1.0, -1.0 if opposed else 1.0)[:, None, None]
    built.q[rows] = (sign * along + 0.25 * built.q[rows].float()).to(E4M3)
    for index in range(case.kv_lens[request]):
        key = gains[index // 128] * along + noise * torch.randn(case.kv_heads, case.dim, generator=generator)
        where = token(built, "k", request, index)
        where.copy_(key.to(E4M3).view(torch.uint8).view(where.shape))


#: In powers of two a gain of 1 is 16.3 at the default softmax scale, a threshold of 4 is a gain of 0.245.
WALKS: dict[str, tuple[list[float], tuple[int, int], int]] = {
    # gains by tile, fewest and most moves after the first tile, the last tile that must move the reference
    "up in every tile": ([-1.0, -0.6, -0.2, 0.2, 0.6], (4, 4), 4),
    "up and down by more than the threshold": ([0.0, 0.6, -0.6, 1.2, -1.2, 1.8], (3, 3), 5),
    "down only": ([1.0, 0.5, 0.0, -0.5], (0, 0), 0),
    "up by less than the threshold each": ([0.0, 0.12, 0.24, 0.36, 0.48], (1, 3), 3),
    "once, in the last tile": ([0.0, 0.0, -0.4, 0.0, 1.0], (1, 1), 4),
    "once, in the last tile of a few keys": ([0.3, -0.4, 0.0, 1.0], (1, 1), 3),
    "by hundreds": ([-20.0, 20.0, -20.0, 28.0], (1, 2), 3),
}


@pytest.mark.parametrize("mode", list(MODES) if FULL else ["latest"])
@pytest.mark.parametrize("name", WALKS)
def test_a_maximum_that_walks(name: str, mode: str) -> None:
    gains, (fewest, most), last = WALKS[name]
    keys = 128 * len(gains) - (121 if "few keys" in name else 0)
    built = build(Case([5], [keys], heads=4, kv_heads=2, descales=UNIT, seed=fresh_seed(), breaks=name))
    ramp(built, gains)
    model = check_gates(built, mode)
    assert int(model.rescales.min()) >= fewest
    assert int(model.rescales.max()) <= most
    assert int(model.last.max()) >= last


@pytest.mark.parametrize("mode", list(MODES) if FULL else ["latest", "skewed"])
def test_rows_of_one_wave_that_walk_apart(mode: str) -> None:
    # Where one row's maximum grows, its neighbour's falls: the rescale must be each row's own.
    built = build(Case([40], [640], heads=2, kv_heads=1, descales=UNIT, seed=fresh_seed(), breaks="rows apart"))
    ramp(built, [0.0, 0.5, -0.5, 1.0, -1.0], opposed=True)
    model = check_gates(built, mode)
    assert set(model.last[0].tolist()) == {3, 4}


def test_a_row_keeps_its_reference_while_its_neighbour_rescales() -> None:
    # In the second tile one half of the rows grows and the other falls far; the latter's later tiles count as much as
    # their first, and are rounded by its reference.
    built = build(Case([40], [640], heads=2, kv_heads=1, descales=UNIT, seed=fresh_seed(), breaks="neighbours"))
    ramp(built, [0.0, 0.6, 0.0, 0.0, 0.0], opposed=True)
    model = check_gates(built)
    assert set(model.last[0].tolist()) == {0, 1}


def test_a_maximum_that_grows_in_masked_tiles() -> None:
    # 200 rows of one head: the last two tiles have masks; the growth there is seen by some rows only.
    built = build(
        Case([200], [512], heads=1, kv_heads=1, descales=UNIT, seed=fresh_seed(), breaks="growth under a mask")
    )
    ramp(built, [0.0, -0.3, 0.5, 1.0])
    model = check_gates(built)
    assert set(model.last[0].tolist()) == {2, 3}


def test_growth_around_the_threshold() -> None:
    # Exact scores: 0 for the first tile, 32 + d / 2 for the second, which with c = 1/8 are 4 + d / 16 powers of two.
    # The reference moves for positive d and stays for negative ones; row by row, since one wrong decision is 2 % of it.
    differences = torch.tensor([-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0])
    scale = 0.125 / math.log2(math.e)
    case = Case([8], [263], heads=1, kv_heads=1, descales=UNIT, softmax_scale=scale, seed=fresh_seed())
    built = build(case)
    built.q.view(torch.uint8).zero_()
    built.q[:, 0, 40] = torch.tensor(8.0).to(E4M3)
    built.q[:, 0, 99] = differences.to(E4M3)
    for index in range(263):
        key = torch.zeros(case.dim)
        key[40], key[99] = (4.0, 0.5) if 128 <= index < 256 else (0.0, 0.0)
        token(built, "k", 0, index).copy_(key.to(E4M3).view(torch.uint8).view(1, 8, 16))
    out, _, _ = run_native(built)
    model = modelled(built)
    assert model.rescales[0].tolist() == [0] * 4 + [1] * 4
    assert float(model.highest) > 0.97 * rounding_model.LARGEST
    errors = (out.double() - model.out).norm(dim=-1) / model.out.norm(dim=-1)
    report("around the threshold", {"worst row against the model": (float(errors.max()), MODEL_GATE)})


# -- the named gates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviation", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("table", ["block", "csr"])
def test_logit_deviation(deviation: float, table: str) -> None:
    # q and K are standard normal, so with the default softmax scale the logits' deviation is the product of descales.
    case = Case(
        [33, 5],
        [400, 150],
        heads=4,
        kv_heads=2,
        descales=(0.5, 2 * deviation, 2.0),
        table=table,
        seed=fresh_seed(),
        breaks=f"deviation {deviation} {table}",
    )
    check_gates(build(case))


@pytest.mark.parametrize("place", [0, 100, 128, 300, 399])
def test_attention_sink(place: int) -> None:
    # One key takes nearly all weight of every row that sees it.
    case = Case([33], [400], heads=2, kv_heads=1, descales=UNIT, seed=fresh_seed(), breaks=f"sink at {place}")
    built = build(case)
    built.q.copy_((1 + 0.25 * built.q.float()).to(E4M3))
    token(built, "k", 0, place)[...] = torch.tensor(1.25).to(E4M3).view(torch.uint8)
    assert float(built.reference()[1][:, -1].min()) > 10, "not a sink"
    check_gates(built)


@pytest.mark.parametrize("strength", [0.3, 0.6])
def test_weak_attention_sink_beside_many_keys(strength: float) -> None:
    # A sink that takes about half: its weight and the rest's must both be right.
    case = Case([20], [700], heads=2, kv_heads=1, descales=UNIT, seed=fresh_seed(), breaks=f"weak sink {strength}")
    built = build(case)
    built.q.copy_((1 + 0.25 * built.q.float()).to(E4M3))
    token(built, "k", 0, 0)[...] = torch.tensor(strength).to(E4M3).view(torch.uint8)
    check_gates(built)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("negative scales", {"descales": (-0.8, 1.5, -2.0)}),
        ("scales of both extremes", {"descales": (1e-20, 1e20, 1.0)}),
        ("a softmax scale so small that the reference never moves", {"softmax_scale": 1e-8}),
        ("a large softmax scale", {"softmax_scale": 1.0}),
        ("many heads", {"heads": 16, "kv_heads": 1}),
        ("three heads", {"heads": 6, "kv_heads": 2}),
        ("more rows than keys", {"q_lens": (70,), "kv_lens": (50,)}),
    ],
)
def test_the_model_of_other_calls(name: str, more: dict[str, object]) -> None:
    shape: dict[str, object] = {"q_lens": (40, 3), "kv_lens": (300, 65), "heads": 4, "kv_heads": 2, "descales": UNIT}
    check_gates(build(Case(**{**shape, **more}, seed=fresh_seed(), breaks=name)))  # type: ignore[arg-type]


def set_values(built: Built, value: Callable[[int], torch.Tensor]) -> None:
    for index in range(built.case.kv_lens[0]):
        where = token(built, "v", 0, index)
        where.copy_(value(index).to(E4M3).view(torch.uint8).expand(where.shape))


@pytest.mark.parametrize("deviation", [0.25, 1.0, 2.0])
def test_values_of_one(deviation: float) -> None:
    # Divided by the sum of the rounded P, not by the float32 sum, which would be up to 0.04 off.
    case = Case([40], [400], heads=4, kv_heads=2, descales=(1.0, deviation, 1.0), seed=fresh_seed(), breaks="ones")
    built = build(case)
    set_values(built, lambda index: torch.ones(case.dim_v))
    out, _, _ = run_native(built)
    error = float((out.double() - 1).abs().max())
    check = relative(out.double(), modelled(built).out)
    report(f"V = 1, deviation {deviation}", {"|o - 1|": (error, ONES_GATE), "against the model": (check, MODEL_GATE)})


def test_a_uniform_row_of_ones_is_exact() -> None:
    # Q = 0: 2**lift is an e4m3 value, so nothing is rounded, at any length.
    case = Case([300], [400], heads=1, kv_heads=1, descales=UNIT, seed=fresh_seed())
    built = build(case)
    built.q.view(torch.uint8).zero_()
    set_values(built, lambda index: torch.ones(case.dim_v))
    out, lse, _ = run_native(built)
    assert bool((out == 1).all())
    lengths = torch.arange(101, 401).double().log()
    assert lse is not None
    assert bool(((lse[0].double() - lengths).abs() <= 2e-6 * lengths).all())


def test_values_of_alternating_sign() -> None:
    # What cancels in O: a P that is summed in one place and rounded in another shows against its neighbours.
    case = Case([20], [512], heads=2, kv_heads=1, descales=UNIT, seed=fresh_seed(), breaks="alternating V")
    built = build(case)
    ramp(built, [0.0, 0.3, 0.1, 0.5])
    set_values(built, lambda index: torch.full((case.dim_v,), 1.5 if index % 3 else -1.0))
    check_gates(built)
