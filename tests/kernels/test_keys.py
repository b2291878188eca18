"""The kernels of attention over some of the keys: scores, which keys matter, and the values of those kept."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from kernels.test_attention import KV, Cache, filled
from kernels.test_block import normal
from pairwise import pairwise
from reference import attention as attention_ref
from reference import keys as ref

from ralo import _core

GROUPS = (1, 2, 3, 4, 5, 8)
COUNTS = (1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 130, 700)
KERNELS = pairwise(GROUPS, (8, 16, 20, 64, 128), COUNTS, KV)
CAPACITY, HEAD, FIRST = 1500, 1, 7  # of the cache; the kv head under test; where a run of keys starts


@cache
def keys_case(g: int, e: int, kv: str) -> tuple[Cache, np.ndarray, np.ndarray, np.ndarray]:
    """A cache, queries (g, padded e), and what the keys and values (n, padded e) of one head stand for."""
    k, v = normal(CAPACITY, 2 * e, seed=1), normal(CAPACITY, 2 * e, seed=2)
    q = np.zeros((g, attention_ref.padded(e)), np.float32)
    q[:, :e] = normal(g, e) * e**-0.5
    return filled(kv, 2, k, v, e), q, *stored(kv, k, v, e)[:, :, HEAD]


def stored(kv: str, k: np.ndarray, v: np.ndarray, e: int) -> np.ndarray:
    """Keys and values as the cache holds them, as numbers: (2, n, heads, padded e)."""
    return np.array([attention_ref.load(*attention_ref.store(kv, x.reshape(len(x), -1, e))) for x in (k, v)])


def some(n: int, count: int) -> np.ndarray:
    return np.sort(np.random.default_rng(count).permutation(n)[:count]).astype(np.uint32)


@pytest.mark.parametrize(("g", "e", "count", "kv"), KERNELS)
def test_scores_of_a_run_and_of_a_list(level, g, e, count, kv):
    held, q, k, _ = keys_case(g, e, kv)
    for positions in (None, some(CAPACITY, count)):
        out = np.full((g, count), np.nan, np.float32)
        _core.key_scores(held.core, HEAD, q, positions, FIRST, out)
        chosen = k[FIRST : FIRST + count] if positions is None else k[positions]
        bound = 2 * (q.shape[1] + 4) * attention_ref.EPS * np.abs(q) @ np.abs(chosen).T
        assert (np.abs(out - q.astype(np.float64) @ chosen.T) <= bound).all()


@pytest.mark.parametrize(("g", "e", "count", "kv"), KERNELS)
def test_attention_over_a_list(level, g, e, count, kv):
    held, q, k, v = keys_case(g, e, kv)
    positions = some(CAPACITY, count)
    scores = (4 * q.astype(np.float64) @ k[positions].T).astype(np.float32)
    out = np.full((g, e), np.nan, np.float32)
    _core.attend_some(held.core, HEAD, scores, positions, out)
    want = ref.attend_some(scores.astype(np.float64), v[positions])[:, :e]
    np.testing.assert_allclose(out, want, rtol=0, atol=(count + 32) * attention_ref.EPS * np.abs(v).max())


@pytest.mark.parametrize("kv", KV)
def test_what_is_not_in_the_list_is_not_read(level, kv):
    k, v = normal(300, 40), normal(300, 40, seed=1)
    q, positions = np.zeros((3, 32), np.float32), some(300, 90)
    q[:, :20] = normal(3, 20)
    results = []
    for dirty in (False, True):
        held = filled(kv, 2, k, v, 20)
        for rows, scales in zip(held.bytes, held.scales, strict=True):
            others = np.setdiff1d(np.arange(300), positions)
            rows[:, others] = 0xFF if dirty else rows[:, others]
            if scales is not None and dirty:
                scales[:, others] = np.nan
        scores, out = np.empty((3, 90), np.float32), np.empty((3, 20), np.float32)
        _core.key_scores(held.core, 0, q, positions, 0, scores)
        _core.attend_some(held.core, 0, scores, positions, out)
        results.append((scores, out))
    assert all(np.array_equal(*pair) and np.isfinite(pair[0]).all() for pair in zip(*results, strict=True))


@pytest.mark.parametrize(("e", "count", "kv"), pairwise((8, 16, 20, 64, 128), COUNTS, KV))
def test_energy(level, e, count, kv):
    held, _, k, _ = keys_case(1, e, kv)
    out = np.full(count, np.nan, np.float32)
    _core.key_energy(held.core, HEAD, FIRST, out)
    np.testing.assert_allclose(out, ref.energy(k[FIRST : FIRST + count]), rtol=1e-5)


@pytest.mark.parametrize(("g", "n"), pairwise(GROUPS, COUNTS))
def test_importance(level, g, n):
    scores = normal(g, n) * 30 - 50
    out = np.full(n, np.nan, np.float32)
    _core.key_importance(scores, out)
    np.testing.assert_allclose(out, ref.importance(scores.astype(np.float64)), rtol=3e-5, atol=1e-37)


@pytest.mark.parametrize(
    "call",
    [
        lambda c, f: _core.key_scores(c, 2, f(1, 16), None, 0, f(1, 4)),
        lambda c, f: _core.key_scores(c, 0, f(1, 8), None, 0, f(1, 4)),
        lambda c, f: _core.key_scores(c, 0, f(1, 16), None, 7, f(1, 4)),
        lambda c, f: _core.key_scores(c, 0, f(1, 16), None, 0, f(2, 4)),
        lambda c, f: _core.key_scores(c, 0, f(1, 16), np.array([3, 10], np.uint32), 0, f(1, 2)),
        lambda c, f: _core.key_scores(c, 0, f(1, 16), np.array([3, 3], np.uint32), 0, f(1, 2)),
        lambda c, f: _core.key_scores(c, 0, f(1, 16), np.array([3], np.uint32), 0, f(1, 2)),
        lambda c, f: _core.attend_some(c, 2, f(1, 2), np.array([1, 3], np.uint32), f(1, 16)),
        lambda c, f: _core.attend_some(c, 0, f(1, 2), np.array([3, 1], np.uint32), f(1, 16)),
        lambda c, f: _core.attend_some(c, 0, f(1, 2), np.array([1], np.uint32), f(1, 16)),
        lambda c, f: _core.attend_some(c, 0, f(1, 2), np.array([1, 3], np.uint32), f(1, 17)),
        lambda c, f: _core.attend_some(c, 0, f(1, 0), np.empty(0, np.uint32), f(1, 16)),
        lambda c, f: _core.key_energy(c, 2, 0, f(4)),
        lambda c, f: _core.key_energy(c, 0, 7, f(4)),
        lambda c, f: _core.key_importance(f(2, 4), f(5)),
        lambda c, f: _core.KwtaKeys(0.0),
        lambda c, f: _core.KwtaKeys(1.5),
        lambda c, f: _core.KwtaKeys(float("nan")),
    ],
)
def test_wrong_calls_are_refused(call):
    with pytest.raises(ValueError):
        call(Cache("f16", 2, 10, 16).core, lambda *shape: np.zeros(shape, np.float32))
