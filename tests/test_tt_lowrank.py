"""Two factors: they miss what they say, inputs and outputs weigh as they should, and rounding is made up for."""

from __future__ import annotations

import numpy as np
import pytest
from test_proc_build import correlated
from tiny_cores import off

from ralo.matrix import QUANTS, Matrix
from ralo.remake.quantised import beside, quantised
from ralo.tt import lowrank
from ralo.tt.lowrank import DAMPING, Weighed, factors_and_rest, gap_of, root_of, two_factors
from ralo.tt.matrix import RANK

IC, OC = 96, 192
X = correlated(IC)
MOMENTS = X.T.astype(np.float64) @ X
RNG = np.random.default_rng(6)
W = RNG.standard_normal((IC, OC)).astype(np.float32)
LOW = (RNG.standard_normal((IC, 20)) @ RNG.standard_normal((20, OC))).astype(np.float32)
ONE = {"o": 150}  # padded to OC


def missed(w: np.ndarray, other: np.ndarray, moments: np.ndarray = MOMENTS) -> float:
    """||(W - W') X|| / ||W X||, with every direction of X damped, from the definition."""
    damped = moments + DAMPING * np.diag(moments).mean() * np.eye(len(moments))
    energies = [np.trace(d.T @ damped @ d) for d in (w.astype(np.float64) - other, w.astype(np.float64))]
    return float(np.sqrt(energies[0] / energies[1]))


def made(rank: int, quant: str = "f32", w: np.ndarray = W, parts=ONE, product: int = OC, moments=MOMENTS, bias=None):
    weighed = Weighed.of(w[:, :product], moments)
    return two_factors(w, parts, product, weighed, rank, quant, bias, moments)


# ---------------------------------------------------------------- singular values


@pytest.mark.parametrize("felt", [None, np.linspace(0.2, 5, OC)], ids=["alike", "felt"])
@pytest.mark.parametrize("rank", [1, 10, 64, 95, 96])
def test_the_gap_is_the_one_that_factors_have(rank, felt):
    weighed = Weighed.of(W, MOMENTS, felt)
    first, second = weighed.factors(rank)
    assert (first.shape, second.shape) == ((IC, rank), (rank, OC))
    assert weighed.gap(rank) == pytest.approx(missed(W, first @ second), abs=1e-6)
    assert gap_of(W, first @ second, MOMENTS) == pytest.approx(missed(W, first @ second), abs=1e-9)
    assert np.linalg.norm(first) == pytest.approx(np.linalg.norm(second))


def test_the_gap_falls_from_all_to_nothing():
    weighed = Weighed.of(W, MOMENTS)
    gaps = [weighed.gap(rank) for rank in range(IC + 1)]
    assert gaps[0] == pytest.approx(1) and gaps[-1] == 0 and all(np.diff(gaps) < 0)
    assert gap_of(np.zeros_like(W), W, MOMENTS) == 0  # there is nothing that could be missed


def test_the_root_is_one_of_the_damped_moments():
    root = root_of(MOMENTS)
    assert np.array_equal(root, np.tril(root))
    np.testing.assert_allclose(root @ root.T, MOMENTS + DAMPING * np.diag(MOMENTS).mean() * np.eye(IC), rtol=1e-9)
    assert np.isfinite(root_of(np.zeros((4, 4)))).all()  # a text that sends nothing


def test_inputs_that_are_seen_more_weigh_more():
    u, s, vt = np.linalg.svd(W, full_matrices=False)
    for rank in (10, 40):
        first, second = Weighed.of(W, MOMENTS).factors(rank)
        plain = (u[:, :rank] * s[:rank]) @ vt[:rank]
        assert missed(W, first @ second) < 0.6 * missed(W, plain)
        assert off(first @ second, W) > off(plain, W)  # which is the best of all where every input is alike


def test_outputs_that_are_felt_more_are_better():
    felt = np.ones(OC)
    felt[: OC // 2] = 10
    errors = []
    for weights in (None, felt):
        first, second = Weighed.of(W, MOMENTS, weights).factors(30)
        wrong = np.square(X @ (W - first @ second)).sum(0)
        errors.append((wrong[: OC // 2].sum(), wrong[OC // 2 :].sum()))
    assert errors[1][0] < 0.8 * errors[0][0] and errors[1][1] > errors[0][1]


# ---------------------------------------------------------------- two factors


@pytest.mark.parametrize("rank", [16, 64])
def test_what_is_hardly_seen_is_not_given_up(rank):
    """A text of few tokens has few directions: the others still count as much as the gap says."""
    x = np.repeat(correlated(IC)[:9], 50, axis=0)
    moments = x.T.astype(np.float64) @ x
    assert made(rank, moments=moments).gap == pytest.approx(Weighed.of(W, moments).gap(rank), rel=0.02)
    assert made(rank, "int8", moments=moments).gap < Weighed.of(W, moments).gap(rank) + 0.01


def test_weights_of_low_rank_are_kept_as_they_are():
    matrix = made(20, w=LOW)
    assert off(matrix.unpack(), LOW) < 1e-5 and matrix.gap < 1e-5 and matrix.rank == 20
    assert made(19, w=LOW).gap > 1e-3


@pytest.mark.parametrize(("quant", "most"), [("bf16", 0.005), ("int8", 0.02), ("int4", 0.15)])
def test_rounded_factors_are_near(quant, most):
    matrix = made(20, quant, LOW)
    assert [step.quant for step in matrix.steps] == [quant] * 2
    assert 1e-5 < matrix.gap < most
    assert matrix.gap == pytest.approx(missed(LOW, matrix.unpack()), rel=0.03)


@pytest.mark.parametrize("quant", QUANTS)
def test_some_parts_are_kept(quant):
    bias = RNG.standard_normal(384).astype(np.float32)
    w = RNG.standard_normal((IC, 384)).astype(np.float32)
    matrix = made(40, quant, w, {"q": 130, "k": 70, "v": 40}, 320, bias=bias)
    assert (matrix.kept, matrix.bias is bias, matrix.steps[0].parts) == (64, True, {RANK: 40, "v": 40})
    got = matrix.unpack()
    assert missed(w[:, 320:], got[:, 320:]) < {"f32": 1e-6, "bf16": 0.01, "int8": 0.02, "int4": 0.2}[quant]
    assert matrix.gap == pytest.approx(missed(w[:, :320], got[:, :320]), rel=0.03)  # of what is factored
    assert matrix.gap < Weighed.of(w[:, :320], MOMENTS).gap(40) + {"int4": 0.1}.get(quant, 0.01)


def test_the_second_factor_is_fitted_to_the_rounded_first():
    """It makes up for some of what rounding the first one lost: nothing fits better behind it."""
    first, second = Weighed.of(LOW, MOMENTS).factors(20)
    _, held = quantised("int4", lowrank.wide(first), {RANK: 20}, None)
    held = held[:, :20]
    _, refitted = lowrank._second("f32", held, LOW, ONE, MOMENTS)
    assert missed(LOW, held @ refitted) < 0.8 * missed(LOW, held @ second)
    best = np.linalg.lstsq(root_of(MOMENTS).T @ held, root_of(MOMENTS).T @ LOW, rcond=None)[0]
    assert missed(LOW, held @ refitted) == pytest.approx(missed(LOW, held @ best), rel=1e-3)
    assert made(20, "int4", LOW).gap < gap_of(LOW, held @ quantised("int4", second, ONE, None)[1], MOMENTS)


def test_factors_and_a_rest_miss_less_than_either():
    parts = {"gate": 100, "up": 30}
    matrix = factors_and_rest(W, parts, 24, "int4", None, MOMENTS)
    alone = [gap_of(W, quantised("int4", W, parts, m)[1], MOMENTS) for m in (None, MOMENTS)]
    assert matrix.rest and matrix.rank == 24 and [s.quant for s in matrix.steps] == ["int4"] * 2
    assert matrix.gap < 0.9 * min(alone) and matrix.gap < Weighed.of(W, MOMENTS).gap(24)
    assert matrix.gap == pytest.approx(missed(W, matrix.unpack()), rel=0.05)
    assert matrix.steps[0].parts == {RANK: 24, **parts} and matrix.steps[1].parts == parts


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize("moments", [None, MOMENTS], ids=["plain", "compensated"])
@pytest.mark.parametrize("quant", QUANTS)
def test_the_values_are_those_that_the_matrix_applies(level, quant, moments):
    before = W.copy()
    matrix, values = quantised(quant, W, {"a": 100, "b": 60}, moments)
    y = np.empty((IC, OC), np.float32)
    matrix.core.apply(np.eye(IC, dtype=np.float32), y)
    np.testing.assert_array_equal(y, values)
    assert (matrix.quant, matrix.ic, matrix.oc, matrix.bias) == (quant, IC, OC, None)
    assert np.array_equal(W, before) and off(values, W) < {"f32": 1e-9, "bf16": 0.01, "int8": 0.02, "int4": 0.4}[quant]


def test_coarse_channels_make_up_for_each_other():
    for quant in QUANTS:
        (plain, values), (other, better) = (quantised(quant, W, {"o": OC}, m) for m in (None, MOMENTS))
        if quant == "int4":
            assert missed(W, better) < 0.7 * missed(W, values)
        else:
            assert np.array_equal(plain.data, other.data) and np.array_equal(values, better)


def test_parts_must_be_those_of_the_weights():
    with pytest.raises(ValueError, match=r"192 outputs are not those of {'o': 100}, padded"):
        quantised("int8", W, {"o": 100}, None)


@pytest.mark.parametrize("quant", QUANTS)
def test_matrices_beside_each_other(quant):
    parts = {"a": 64, "b": 100}
    pairs = [quantised(quant, w, {name: n}, None) for (name, n), w in zip(parts.items(), (W[:, :64], W[:, 64:]),
                                                                       strict=True)]  # fmt: skip
    both = beside([m for m, _ in pairs], parts)
    assert isinstance(both, Matrix) and (both.parts, both.oc, both.quant) == (parts, OC, quant)
    y = np.empty((IC, OC), np.float32)
    both.core.apply(np.eye(IC, dtype=np.float32), y)
    np.testing.assert_array_equal(y, np.concatenate([values for _, values in pairs], axis=1))


def test_leading_factors_are_those_of_singular_values():
    weights, x = RNG.standard_normal((48, 160)), RNG.standard_normal((300, 48)) * np.linspace(0.2, 2, 48)
    whole, leading = Weighed.of(weights, x.T @ x), Weighed.leading(weights, x.T @ x)
    assert np.allclose(leading.s, whole.s, rtol=1e-8)
    for rank in (1, 16, 40):
        ours, theirs = ((a @ b) for a, b in (leading.factors(rank), whole.factors(rank)))
        assert np.allclose(ours, theirs, atol=1e-8 * np.abs(theirs).max())
