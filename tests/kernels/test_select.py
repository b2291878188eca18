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
    ],
)
def test_wrong_calls_are_refused(call):
    with pytest.raises(ValueError):
        call(np.ones(8, np.float32), np.empty(8, np.uint32))
