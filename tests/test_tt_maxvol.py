"""Rows of the largest volume: against all subsets of small matrices, and with columns that depend on each other."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ralo.tt.maxvol import NEAR, maxvol, maxvol_rect


def normal(n: int, r: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([n, r, seed]).standard_normal((n, r))


def volume(a: np.ndarray) -> float:
    return float(np.prod(np.linalg.svd(a, compute_uv=False)))


@pytest.mark.parametrize(("n", "r"), [(6, 1), (9, 2), (10, 3), (10, 4), (9, 8), (5, 5)])
def test_the_volume_is_near_the_largest_and_mostly_is_it(n, r):
    reached = []
    for seed in range(30):
        a = normal(n, r, seed)
        best = max(volume(a[list(rows)]) for rows in combinations(range(n), r))
        reached.append(volume(a[maxvol(a)]) / best)
    assert min(reached) >= (NEAR * np.sqrt(r)) ** -r  # what no exchange improving it guarantees
    assert min(reached) >= 0.6 and np.mean(np.array(reached) > 1 - 1e-9) >= 0.7  # what was found of these


@pytest.mark.parametrize(("n", "r"), [(20, 1), (20, 7), (300, 12), (200, 32)])
def test_no_exchange_makes_it_larger(n, r):
    for seed in range(5):
        a = normal(n, r, seed)
        rows = maxvol(a)
        assert rows.shape == (r,) and rows.dtype == np.int64 and len(set(rows.tolist())) == r
        assert np.abs(a @ np.linalg.inv(a[rows])).max() <= NEAR * (1 + 1e-9)


def test_a_matrix_on_which_elimination_alone_errs():
    """Its largest elements are those of two rows that are nearly alike."""
    a = np.array([[1.0, 1.0], [0.99, 1.05], [0.98, -1.0], [0.1, 0.1]])
    assert set(maxvol(a).tolist()) in ({0, 2}, {1, 2}) and volume(a[maxvol(a)]) > 1.9
    wilkinson = np.concatenate([np.eye(12) - np.tril(np.ones((12, 12)), -1), 0.9 * np.eye(12)])
    wilkinson[:12, -1] = 1  # elements double with every step
    rows = maxvol(wilkinson)
    assert np.abs(wilkinson @ np.linalg.inv(wilkinson[rows])).max() <= NEAR * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 14), st.integers(0, 10**6))
def test_the_scale_of_a_column_does_not_count(r, more, seed):
    a = normal(r + more, r, seed)
    scales = 10 ** np.random.default_rng(seed).uniform(-8, 8, r)
    assert maxvol(a).tolist() == maxvol(a * np.exp2(np.rint(np.log2(scales)))).tolist()


DEPENDENT = {
    "two alike": normal(30, 4)[:, [0, 1, 1, 2]],
    "rank 2": normal(30, 2) @ normal(2, 5),
    "a column of zeros": normal(30, 3) * [1, 0, 1],
    "nearly alike": normal(30, 3)[:, [0, 0, 1]] + 1e-15 * normal(30, 3, 1),
    "one row": np.outer(np.arange(30) == 17, [1.0, 2, 3]),
    "zero": np.zeros((30, 3)),
    "zero, square": np.zeros((3, 3)),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_columns(name):
    a = DEPENDENT[name]
    for rows in (maxvol(a), maxvol_rect(a, min(8, len(a)))):
        assert len(set(rows.tolist())) == len(rows)
        made_of = a @ np.linalg.pinv(a[rows], rcond=1e-12)
        np.testing.assert_allclose(made_of @ a[rows], a, atol=1e-12)
        assert np.abs(made_of).max() < 2


def test_more_rows_are_each_the_best_to_add():
    for seed in range(10):
        a = normal(15, 3, seed)
        assert maxvol_rect(a, 3).tolist() == maxvol(a).tolist()
        chosen = maxvol_rect(a, 15).tolist()
        assert sorted(chosen) == list(range(15))
        for k in range(4, 15):
            assert maxvol_rect(a, k).tolist() == chosen[:k]
            others = [volume(a[[*chosen[: k - 1], i]]) for i in range(15) if i not in chosen[: k - 1]]
            assert volume(a[chosen[:k]]) == pytest.approx(max(others)) and max(others) > volume(a[chosen[: k - 1]])


def test_more_rows_interpolate_more_calmly():
    a = normal(500, 8)
    norms = [np.linalg.norm(a @ np.linalg.pinv(a[maxvol_rect(a, k)]), axis=1).max() for k in (8, 12, 16, 32)]
    assert norms == sorted(norms, reverse=True) and norms[2] < 0.7 * norms[0]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: maxvol(np.ones((2, 3))), "2 x 3 is not tall"),
        (lambda: maxvol(np.full((3, 2), np.nan)), "not finite"),
        (lambda: maxvol_rect(np.ones((5, 3)), 2), "2 rows asked for of a matrix of 5 x 3"),
        (lambda: maxvol_rect(np.ones((5, 3)), 6), "6 rows asked for of a matrix of 5 x 3"),
    ],
)
def test_refusals(call, says):
    with pytest.raises(ValueError, match=says):
        call()
