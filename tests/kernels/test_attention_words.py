"""Prefill attention where exactness is not asked for: 16-bit words, or the exact one where they do not pay."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from reference import attention as ref
from reference import rounded
from test_attention import KV, PREFILL, Cache, case, filled, qkv, run

from ralo import _core

WORDS = ("f16", "int8")  # caches that are read as words


def stored(kv: str, x: np.ndarray, e: int) -> np.ndarray:
    """What rows (n, heads * e) stand for in the cache: (n, heads, e)."""
    return ref.load(*ref.store(kv, x.reshape(len(x), -1, e)))[..., :e]


def attend(held: Cache, q: np.ndarray, heads: int, past: int, window: int, scale: float, exact=False) -> np.ndarray:
    out = np.full(q.shape, np.nan, np.float32)
    held.core.attend(q, heads, past, window, scale, out, exact)
    return out


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@cache
def bound(tokens, past, heads, e, window, kv) -> np.ndarray:
    """What words and float32 may be off by (T, H * E)."""
    q, k, v, _, floats = case(tokens, past, heads, e, window, kv)
    q, k, v = q[past:].reshape(tokens, -1, e), stored(kv, k, e), stored(kv, v, e)
    return rounded.attend_error(q, k, v, past, window, e**-0.5).reshape(tokens, -1) + floats


def few(tokens, past, heads, e, window, kv) -> bool:
    """Where exactness is asked for they go through decode, each as it would alone."""
    return tokens <= ref.FEW_TOKENS


@pytest.mark.parametrize("params", PREFILL, ids=str)
def test_near_the_reference(level, params):
    (got, read), (exact, read_exact) = (run(*params, exact) for exact in (False, True))
    assert read == read_exact or few(*params)
    if level not in rounded.LEVELS or params[-1] not in WORDS:
        assert np.array_equal(got, exact) or few(*params)
        np.testing.assert_allclose(got, exact, atol=1e-5)
        return
    want = case(*params)[3]
    assert not np.array_equal(got, exact)
    assert (np.abs(got - want) <= bound(*params)).all(), f"off by {np.abs(got - want).max()}"
    assert 1e-5 < distance(got, want) < 6e-4  # most are far nearer than they must be


@pytest.mark.parametrize("params", PREFILL[::6], ids=str)
def test_same_bits_again_and_at_any_number_of_threads(level, threads, params):
    got, _ = run(*params, exact=False)
    assert np.array_equal(got, run(*params, exact=False)[0])
    _core.set_threads(1)
    alone, _ = run(*params, exact=False)
    _core.set_threads(threads)
    assert np.array_equal(got, alone)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("kv", WORDS)
def test_the_last_tokens_give_the_same_bits_without_the_others(level, kv, window):
    """96 tokens of two heads are a tile; the second tile, or part of it, in a batch of its own."""
    params = (130, 33, (4, 2), 20, window, kv)
    q, k, v, *_ = case(*params)
    whole, held = run(*params, exact=False)[0], filled(kv, 2, k, v, 20)
    for tokens in (2, 13, 34):
        assert np.array_equal(attend(held, q[-tokens:], 4, 163 - tokens, window, 20**-0.5), whole[-tokens:])


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("kv", WORDS)
def test_however_a_prompt_is_cut(level, kv, window):
    """Values share scales with those of tokens that a smaller batch has not seen yet: near, not the same."""
    params = (130, 33, (4, 2), 20, window, kv)
    q, k, v, *_ = case(*params)
    whole, held = run(*params, exact=False)[0], Cache(kv, 2, 163, 20)
    held.core.store(k[:33], v[:33], 0)
    parts = []
    for at in range(33, 163, 13):
        held.core.store(k[at : at + 13], v[at : at + 13], at)
        parts.append(attend(held, q[at : at + 13], 4, at, window, 20**-0.5))
    assert (np.abs(np.concatenate(parts) - whole) <= 2 * bound(*params)).all()
    assert distance(np.concatenate(parts), whole) < 6e-4


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("e", [8, 16, 64, 128, 512, 1024])
def test_queries_and_keys_have_all_the_bits_that_fit(level, e):
    """Values that words hold as they are leave the error of the scores: about 1 / limit."""
    n, past = 200, 70
    rng = np.random.default_rng(e)
    q, k = (rng.standard_normal((n, e)).astype(np.float32) for _ in "qk")
    v = rng.integers(-2047, 2048, (n, e)).astype(np.float32)
    v[::64] = 2047
    got = attend(filled("f16", 1, k, v, e), q[past:], 1, past, 0, e**-0.5)
    want, _ = ref.attend(q[past:, None], stored("f16", k, e), stored("f16", v, e), past, 0, e**-0.5)
    low, high = (0.5, 2) if level in rounded.LEVELS else (0, 0.02)
    assert low <= distance(got, want[:, 0]) * rounded.word_limit(ref.padded(e)) <= high


@pytest.mark.parametrize("e", [16, 32, 64, 128, 512, 1024])
@pytest.mark.parametrize("kv", WORDS)
def test_sums_at_their_largest(level, kv, e):
    """Every product of a query and a key is as large as it can be, and of the same sign."""
    v = qkv(40, 1, 1, e)[2].copy()
    k = np.where(np.arange(40) % 2, 1, -1)[:, None] * np.ones((40, e), np.float32)
    held = filled(kv, 1, k.astype(np.float32), v, e)
    for sign in (1, -1):
        q = np.full((35, e), sign, np.float32)
        want, floats = ref.attend(q[:, None], stored(kv, k, e), stored(kv, v, e), 5, 0, 1 / e)
        error = rounded.attend_error(q[:, None], stored(kv, k, e), stored(kv, v, e), 5, 0, 1 / e) + floats
        assert (np.abs(attend(held, q, 1, 5, 0, 1 / e) - want[:, 0]) <= error[:, 0]).all()


@pytest.mark.parametrize("kv", WORDS)
def test_large_scores(level, kv):
    """Up to +-25,000, far enough apart for one key to win almost every time."""
    rng = np.random.default_rng(0)
    n, e, past = 640, 16, 600
    q, k, v = (rng.integers(-10, 11, (n, e)).astype(np.float32) for _ in range(3))
    k *= 12
    k[:, 0], v[:, 0] = 127, 127
    held = filled(kv, 1, k, v, e)
    for queries in (q[past:, None], -q[past:, None]):
        args = queries, stored(kv, k, e), stored(kv, v, e), past, 0, 1.0
        want, floats = ref.attend(*args)
        error = np.abs(attend(held, queries[:, 0], 1, past, 0, 1.0) - want[:, 0])
        assert (error <= (rounded.attend_error(*args) + floats)[:, 0]).all()
        assert np.median(error) < 0.02 and np.quantile(error, 0.9) < 0.1


@pytest.mark.parametrize("kv", WORDS)
def test_equal_scores_give_the_mean(level, kv):
    _, k, v = qkv(105, 1, 1, 16)
    got = attend(filled(kv, 1, k, v, 16), np.zeros((5, 16), np.float32), 1, 100, 0, 1.0)
    want = [stored(kv, v, 16)[: 101 + t, 0].mean(0) for t in range(5)]
    np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.parametrize("kv", WORDS)
def test_equal_scores_of_any_size_give_the_mean(level, kv):
    """Also at -2^14 ln 2, around which float32 has fewer digits, with all weights and values at their largest."""
    ones = np.ones((64, 16), np.float32)
    held = filled(kv, 1, ones, ones, 16)
    for score in (0, 1e-6, 1, -1, 2000, -2000, 25_000, -25_000, *np.arange(-11_357, -11_346, 0.37)):
        np.testing.assert_allclose(attend(held, ones, 1, 0, 0, score / 16), 1, atol=1e-3, err_msg=str(score))


@pytest.mark.parametrize("kv", KV)
def test_what_is_never_rounded(level, kv):
    """One token; and heads so wide that words would have too few bits."""
    for params in ((1, 70, (4, 2), 20, 0, kv), (ref.FEW_TOKENS + 1, 70, (2, 1), 1040, 0, kv)):
        assert np.array_equal(*(run(*params, exact)[0] for exact in (False, True)))


# ---------------------------------------------------------------- what is not finite

TOKENS, PAST, BAD_AT = 130, 33, 100  # positions 33 .. 162, of them 64 .. 127 share a tile with the bad one
AT = np.arange(PAST, PAST + TOKENS)


def disturbed(kv: str, window: int, part: int) -> tuple[np.ndarray, np.ndarray]:
    """Results (T, kv head, head of its group, E) without and with a NaN in a key (0) or value (1) of kv head 1.

    It is in element 3; with int8, whose rows cannot hold one, in the scale.
    """
    q, k, v = qkv(PAST + TOKENS, 4, 2, 20)
    held, out = filled(kv, 2, k, v, 20), []
    for bad in (False, True):
        if bad and kv == "int8":
            held.scales[part][1, BAD_AT] = np.nan
        elif bad:
            held.rows[part][1, BAD_AT, 3] = np.nan
        out.append(attend(held, q[PAST:], 4, PAST, window, 20**-0.5).reshape(TOKENS, 2, 2, 20))
    return tuple(out)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kv", WORDS)
def test_a_query_that_is_not_finite_takes_its_head_and_no_other(level, kv, value):
    q, k, v = qkv(PAST + TOKENS, 4, 2, 20)
    held, q = filled(kv, 2, k, v, 20), q[PAST:].copy()
    clean = attend(held, q, 4, PAST, 0, 20**-0.5).reshape(TOKENS, 4, 20)
    for at in ((0, 0, 0), (96, 3, 19), (129, 2, 7)):  # token, head, element
        bad = q.copy()
        bad.reshape(TOKENS, 4, 20)[at] = value
        got = attend(held, bad, 4, PAST, 0, 20**-0.5).reshape(TOKENS, 4, 20)
        assert not np.isfinite(got[at[:2]]).any()
        got[at[:2]] = clean[at[:2]]
        assert np.array_equal(got, clean)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("kv", WORDS)
def test_a_nan_key_reaches_those_who_see_it(level, kv, window):
    clean, got = disturbed(kv, window, part=0)
    sees = (AT >= BAD_AT) & (AT - window < BAD_AT if window else True)
    assert np.isnan(got[sees, 1]).all()
    assert np.array_equal(got[:, 0], clean[:, 0]) and np.array_equal(got[~sees], clean[~sees])


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("kv", WORDS)
def test_a_nan_value_reaches_those_who_see_it(level, kv, window):
    """Tokens of the same tile may feel it too, before and after; with words none at positions before the tile."""
    clean, got = disturbed(kv, window, part=1)
    sees = (AT >= BAD_AT) & (AT - window < BAD_AT if window else True)
    touched = slice(3, 4) if kv == "f16" else slice(None)
    assert np.isnan(got[sees, 1, :, touched]).all() and np.array_equal(got[:, 0], clean[:, 0])
    if kv == "f16":
        assert np.array_equal(np.delete(got, 3, -1), np.delete(clean, 3, -1))
    if level in rounded.LEVELS:
        before = rounded.TILE_KEYS > AT
        assert before.any() and np.array_equal(got[before], clean[before])
