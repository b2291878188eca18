"""Which input channels are selected: the k largest |x| * norm, or all from a bound on; ascending, ties to the first."""

from __future__ import annotations

import numpy as np
import pytest

from ralo import _core

SIZES = (1, 2, 15, 16, 17, 31, 33, 255, 640, 1728, 8192)


def scores(x: np.ndarray, norms: np.ndarray | None) -> np.ndarray:
    return np.abs(x if norms is None else x * norms)


def top(x: np.ndarray, norms: np.ndarray | None, k: int) -> list[int]:
    out = np.full(len(x), 0xFFFFFFFF, np.uint32)
    count = _core.select_top(x, norms, k, out)
    assert (out[count:] == 0xFFFFFFFF).all()  # nothing is written past them
    return out[:count].tolist()


def cases(n: int) -> list[tuple[np.ndarray, np.ndarray | None]]:
    rng = np.random.default_rng(n)
    x, norms = rng.standard_normal(n).astype(np.float32), rng.random(n).astype(np.float32)
    coarse = np.round(x).astype(np.float32)  # few values: many ties
    return [(x, None), (x, norms), (coarse, None), (np.zeros(n, np.float32), None), (x * np.float32(1e-42), norms)]


@pytest.mark.parametrize("n", SIZES)
def test_the_k_largest(level, n):
    for x, norms in cases(n):
        order = np.argsort(-scores(x, norms), kind="stable")  # of equal ones the first
        for k in sorted({0, 1, n // 3, n // 2, n - 1, n}):
            assert top(x, norms, k) == sorted(order[:k].tolist()), (n, k)


@pytest.mark.parametrize("n", SIZES)
def test_all_from_a_bound_on(level, n):
    for x, norms in cases(n):
        found = scores(x, norms)
        for least in (0.0, float(np.median(found)), float(found.max()), 1e30):
            out = np.full(n, 0xFFFFFFFF, np.uint32)
            count = _core.select_above(x, norms, least, out)
            assert out[:count].tolist() == np.flatnonzero(found >= np.float32(least)).tolist()
            assert (out[count:] == 0xFFFFFFFF).all()


@pytest.mark.parametrize("guess", [1e-30, 1e-3, 0.5, 0.7, 2.0, 1e30])
@pytest.mark.parametrize("n", SIZES)
def test_about_k_from_any_guess(level, n, guess):
    for x, norms in cases(n):
        found = scores(x, norms)
        nonzero = np.count_nonzero(found)
        for k in sorted({1, n // 3, n // 2, n - 1, n} - {0}):
            out = np.full(n, 0xFFFFFFFF, np.uint32)
            count = _core.select_near(x, norms, k, guess, out)
            chosen, left = out[:count], np.setdiff1d(np.arange(n), out[:count])
            assert count <= k and (count >= k - k // 64 or count == nonzero), (n, k, count)
            assert (np.diff(chosen.astype(int)) > 0).all() and (out[count:] == 0xFFFFFFFF).all()
            if count and len(left):
                assert found[chosen].min() >= found[left].max()


def test_a_good_guess_and_a_bad_one_choose_nearly_alike(level):
    x = np.random.default_rng(0).standard_normal(1728).astype(np.float32)
    out = np.empty(1728, np.uint32)
    exact = set(top(x, None, 800))
    for guess in (0.6, 0.7, 100.0):
        found = set(out[: _core.select_near(x, None, 800, guess, out)].tolist())
        assert found <= exact and len(exact - found) <= 12


@pytest.mark.parametrize("power", [1.0, 2.0, 0.7, 3.0])
@pytest.mark.parametrize("n", SIZES)
def test_the_fewest_that_hold_a_share(level, n, power):
    rng = np.random.default_rng(n)
    x, norms = rng.standard_normal(n).astype(np.float32), rng.random(n).astype(np.float32)
    for norm in (None, norms):
        weights = scores(x, norm).astype(np.float64) ** power
        order = np.argsort(-weights)
        for mass in (0.3, 0.9, 0.99):
            out = np.full(n, 0xFFFFFFFF, np.uint32)
            count = _core.select_mass(x, norm, mass, power, out)
            assert sorted(order[:count].tolist()) == out[:count].tolist()
            held = weights[out[:count]].sum() / weights.sum()
            assert held >= mass - 1e-5 and (
                count == 1 or held - weights[order[count - 1]] / weights.sum() < mass + 1e-5
            )
            assert (out[count:] == 0xFFFFFFFF).all()


def test_a_share_of_what_is_not_a_number_is_all(level):
    x = np.ones(40, np.float32)
    x[7] = np.nan
    assert _core.select_mass(x, None, 0.5, 2.0, np.empty(40, np.uint32)) == 40


@pytest.mark.parametrize("least", [1.0, 0.2, 0.01, 0.001, 1e-12])
@pytest.mark.parametrize("n", SIZES)
def test_likely_ones(level, n, least):
    for spread in (0.0, 1.0, 5.0, 60.0):
        x = (spread * np.random.default_rng(n).standard_normal(n) - 40).astype(np.float32)
        share = np.exp(x.astype(np.float64) - x.max())
        share /= share.sum()
        out = np.full(n, 0xFFFFFFFF, np.uint32)
        count = _core.select_likely(x, least, out)
        chosen = out[:count]
        assert (np.diff(chosen.astype(int)) > 0).all() and (out[count:] == 0xFFFFFFFF).all()
        assert (share[chosen] > least * (1 - 1e-4)).all()
        assert (np.delete(share, chosen) < least * (1 + 1e-4)).all()
        assert count * least < 1 + 1e-4


def test_of_what_is_no_number_nothing_is_likely(level):
    x = np.zeros(40, np.float32)
    for at in (0, 17, 39):
        x[:] = 0
        x[at] = np.nan
        assert _core.select_likely(x, 0.001, np.empty(40, np.uint32)) == 0


@pytest.mark.parametrize("n", SIZES)
def test_finite(level, n):
    x = np.full(n, 3e38, np.float32)
    assert _core.finite(x)
    for bad in (np.nan, np.inf, -np.inf):
        for at in {0, n // 2, n - 1}:
            y = x.copy()
            y[at] = bad
            assert not _core.finite(y)


def test_a_nan_is_never_left_out(level):
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    x[[3, 50]] = np.nan, -np.inf
    assert top(x, None, 2) == [3, 50]
    out = np.empty(100, np.uint32)
    assert out[: _core.select_above(x, None, 1e30, out)].tolist() == [3, 50]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: _core.select_top(x, None, 9, out),
        lambda x, out: _core.select_top(x, None, 3, out[:7]),
        lambda x, out: _core.select_top(x, x[:7], 3, out),
        lambda x, out: _core.select_above(x, None, -1.0, out),
        lambda x, out: _core.select_above(x, None, float("nan"), out),
        lambda x, out: _core.select_above(x, x[:7], 1.0, out),
        lambda x, out: _core.select_near(x, None, 9, 1.0, out),
        lambda x, out: _core.select_near(x, None, 3, 0.0, out),
        lambda x, out: _core.select_near(x, None, 3, float("nan"), out),
        lambda x, out: _core.select_mass(x, x[:7], 0.5, 1.0, out),
        lambda x, out: _core.select_likely(x, 0.1, out[:7]),
        lambda x, out: _core.select_likely(x, 0.0, out),
    ],
)
def test_wrong_calls_are_refused(call):
    with pytest.raises(ValueError):
        call(np.ones(8, np.float32), np.empty(8, np.uint32))
