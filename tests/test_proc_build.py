"""How procedural weights are made: errors made up for by later channels, bits shared out, deltas where they are due."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_linear import Rows

from ralo.proc.budget import allotted
from ralo.proc.build import Recipe, build_matrix
from ralo.proc.generator import bits_of
from ralo.remake.compensate import DAMPING, compensated
from ralo.remake.layer import moments_of


def correlated(ic: int, tokens: int = 400, seed: int = 1) -> np.ndarray:
    """Inputs (T, ic) of which a few directions explain most, and channels of very different strength."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, ic // 8)) @ rng.standard_normal((ic // 8, ic))
    return ((x + 0.3 * rng.standard_normal(x.shape)) * rng.uniform(0.1, 3, ic)).astype(np.float32)


def weights(ic: int, oc: int) -> np.ndarray:
    return np.random.default_rng(ic).standard_normal((ic, oc)).astype(np.float32)


def plain(w: np.ndarray, moments: np.ndarray, store) -> None:
    """Channel by channel in float64: the rest takes over what one lost, as the inverse of what is left says."""
    strength = np.diag(moments)
    damped = moments + np.diag((strength == 0) + DAMPING * strength.mean())
    left, rest = w.astype(np.float64), list(np.argsort(-strength, kind="stable"))
    while rest:
        i, *later = rest
        error = left[i] - store(int(i), left[i])
        inverse = np.linalg.inv(damped[np.ix_(rest, rest)])
        left[later] -= inverse[1:, :1] / inverse[0, 0] * error
        rest = later


@pytest.mark.parametrize("ic", [1, 2, 64, 65, 100])
def test_compensation_is_that_of_a_plain_loop(ic):
    x = correlated(ic) if ic >= 8 else np.random.default_rng(ic).standard_normal((50, ic)).astype(np.float32)
    if ic > 8:
        x[:, 5] = 0  # a channel that is never seen
    w, moments = weights(ic, 20), (x.T @ x).astype(np.float64)
    found, want, order = np.empty((ic, 20)), np.empty((ic, 20)), []

    def rough(i: int, row: np.ndarray) -> np.ndarray:  # no steps: what is near goes to what is near
        return row * (0.7 + 0.2 * np.sin(i + np.arange(20))).astype(row.dtype)

    def ours(i: int, row: np.ndarray) -> np.ndarray:
        assert row.dtype == np.float32
        found[i] = row
        order.append(i)
        return rough(i, row)

    def theirs(i: int, row: np.ndarray) -> np.ndarray:
        want[i] = row
        return rough(i, row)

    compensated(w.copy(), moments, ours)
    plain(w, moments, theirs)
    assert sorted(order) == list(range(ic)) and order == np.argsort(-np.diag(moments), kind="stable").tolist()
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=2e-3 * np.abs(want).max())


def test_compensation_loses_less():
    x, w = correlated(150), weights(150, 64)
    stored = np.empty_like(w)

    def rounded(i: int, row: np.ndarray) -> np.ndarray:
        stored[i] = np.rint(row / 0.5) * 0.5
        return stored[i]

    compensated(w.copy(), (x.T @ x).astype(np.float64), rounded)
    fresh = correlated(150)[:100]
    plainly = np.rint(w / 0.5) * 0.5
    assert np.square(fresh @ (w - stored)).sum() < 0.2 * np.square(fresh @ (w - plainly)).sum()


def test_what_is_stored_exactly_moves_nothing():
    w, seen = weights(70, 8), np.empty((70, 8), np.float32)

    def exact(i: int, row: np.ndarray) -> np.ndarray:
        seen[i] = row
        return row

    x = correlated(70)
    compensated(w.copy(), (x.T @ x).astype(np.float64), exact)
    assert np.array_equal(seen, w)


def test_moments():
    x = correlated(24)
    np.testing.assert_allclose(moments_of(iter([x[:100], x[100:101], x[101:]])), x.T.astype(float) @ x, rtol=1e-5)


# ---------------------------------------------------------------- a matrix of seeds

PLAIN = Recipe(columns=3, deltas=0.0, eps=0.0, watermark=4096)


def built(recipe: Recipe, moments: np.ndarray | None, oc: int = 320):
    return build_matrix({"down": Rows(weights(96, oc).T.copy())}, "down", recipe, moments)


def test_a_built_matrix_is_near_and_compensated_nearer():
    x = correlated(96)
    moments = (x.T @ x).astype(np.float64)
    matrix, lost = built(PLAIN, moments)
    worse, lost_more = built(Recipe(3, 0.0, 0.0, 4096, compensate=False), moments)
    assert (matrix.ic, matrix.parts, matrix.oc) == (96, {"down": 320}, 320) and matrix.scales.shape == (96, 3)
    right = x @ weights(96, 320)
    off, off_more = (np.square(m(x) - right).sum() / np.square(right).sum() for m in (matrix, worse))
    assert off < 0.5 * off_more and lost < 0.5 * lost_more
    assert (lost, lost_more) == (pytest.approx(off, rel=0.05), pytest.approx(off_more, rel=0.05))


def test_without_inputs_it_is_the_weights_that_count():
    matrix, lost = built(PLAIN, None)
    w = weights(96, 320)
    assert lost == pytest.approx(np.square(matrix.unpack() - w).sum() / np.square(w).sum(), rel=0.02)


def test_deltas_go_where_the_error_is_felt_most():
    x = correlated(96)
    moments = (x.T @ x).astype(np.float64)
    without, lost = built(PLAIN, moments)
    matrix, lost_less = built(Recipe(3, 0.05, 0.0, 4096), moments)
    assert without.fanout == 0 and 0.02 * 320 < matrix.fanout < 0.1 * 320 and lost_less < lost
    strength = np.diag(moments)
    each = np.diff(matrix.deltas.starts.astype(int))
    assert each[strength > np.median(strength)].sum() > 3 * each[strength < np.median(strength)].sum()
    few, _ = built(Recipe(3, 0.05, 0.0, 2), moments)
    assert np.diff(few.deltas.starts).max() == 2
    none, _ = built(Recipe(3, 0.05, 1e9, 4096), moments)
    assert none.fanout == 0


# ---------------------------------------------------------------- sharing bits out

SHAPES = {(i, p): s for i in range(4) for p, s in {"up": (256, 1536), "down": (768, 256), "o": (128, 512)}.items()}


def spent(columns: dict[tuple[int, str], int]) -> float:
    """Bits a weight, of all places together."""
    weights = sum(ic * oc for ic, oc in SHAPES.values())
    return sum(bits_of(n, SHAPES[k][1]) * SHAPES[k][0] * SHAPES[k][1] for k, n in columns.items()) / weights


@pytest.mark.parametrize("bits", [2.1, 2.5, 3.0, 3.5, 4.25, 6.0, 8.25])
@pytest.mark.parametrize("felt", ["alike", "apart"])
def test_the_budget_is_kept_to_and_used(bits, felt):
    rng = np.random.default_rng(7)
    columns = allotted(bits, {k: 10 ** rng.uniform(-3, 0) if felt == "apart" else 1.0 for k in SHAPES}, SHAPES)
    assert columns.keys() == SHAPES.keys()
    assert all(-(-oc // 64 // 4) <= columns[k] <= oc // 64 for k, (_, oc) in SHAPES.items())
    assert bits - 0.12 < spent(columns) <= bits


def test_more_goes_to_what_is_felt_more():
    felt = {k: {"up": 1.0, "down": 1.0, "o": 1.0}[k[1]] * 4.0 ** k[0] for k in SHAPES}
    columns = allotted(3.5, felt, SHAPES)
    for place in ("up", "down", "o"):
        of_layers = [columns[i, place] for i in range(4)]
        assert of_layers == sorted(of_layers) and of_layers[0] < of_layers[-1]


def test_more_bits_take_nothing_away():
    alike = {(i, "up"): (256, 1536) for i in range(6)}
    felt = {key: 3.0 ** key[0] for key in alike}
    before = allotted(2.1, felt, alike)
    for bits in np.linspace(2.15, 8.25, 62):
        after = allotted(float(bits), felt, alike)
        assert all(after[k] >= before[k] for k in alike)
        before = after
    assert set(before.values()) == {24}


def test_too_few_bits_give_the_fewest_columns():
    assert set(allotted(1.0, dict.fromkeys(SHAPES, 1.0), {k: (8, 256) for k in SHAPES}).values()) == {1}
