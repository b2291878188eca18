"""The key/value cache and attention over it: what is stored, what comes out, how many bytes it took."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from pairwise import pairwise
from reference import attention as ref

from ralo import _core
from ralo.matrix import padded

KV = ("f32", "f16", "int8")
PASTS = (0, 1, 31, 32, 33, 511, 512, 513, 1100)
HEADS = ((1, 1), (4, 4), (6, 3), (8, 1), (10, 5), (5, 1))  # query heads, kv heads
WIDTHS = (8, 16, 20, 64, 80, 128)
WINDOWS = (0, 1, 7, 64, 600)
DECODE = [(1, *case) for case in pairwise(PASTS, HEADS, WIDTHS, WINDOWS, KV)]
PREFILL = pairwise((2, 17, 65, 130), PASTS, HEADS, WIDTHS, WINDOWS, KV)
PREFILL += [(3, 5, (200, 1), 20, 0, "f16"), (3, 70, (390, 2), 8, 3, "int8")]  # a group larger than a tile


class Cache:
    """Storage full of rubbish (NaN as f16 and as scales), as memory is that nobody has written to yet."""

    def __init__(self, kv: str, heads: int, capacity: int, e: int) -> None:
        kind = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "int8": np.dtype(np.int8)}[kv]
        self.bytes = [np.full((heads, capacity, ref.padded(e) * kind.itemsize), 0xFF, np.uint8) for _ in "kv"]
        self.rows = [a.view(kind) for a in self.bytes]  # (heads, capacity, padded e)
        self.scales = (None, None)
        if kv == "int8":
            self.scales = tuple(np.full((heads, capacity), np.nan, np.float32) for _ in "kv")
        self.core = _core.LayerCache(kv, *self.bytes, *self.scales)


def qkv(tokens: int, heads: int, kv_heads: int, e: int, seed: int = 0) -> list[np.ndarray]:
    """q, k, v as the model passes them: views of one wide array, each part at a multiple of PAD."""
    widths = [heads * e, kv_heads * e, kv_heads * e]
    wide = np.random.default_rng(seed).standard_normal((tokens, sum(map(padded, widths)))).astype(np.float32)
    starts = np.cumsum([0, *map(padded, widths)])
    return [wide[:, at : at + n] for at, n in zip(starts, widths, strict=False)]


@cache
def case(tokens, past, heads, e, window, kv):
    """q, k, v of every position, and the reference: result (T, H * E), bound on its error."""
    (heads, kv_heads), n = heads, past + tokens
    q, k, v = qkv(n, heads, kv_heads, e, seed=n + heads + e)
    stored = [ref.load(*ref.store(kv, x.reshape(n, kv_heads, e))) for x in (k, v)]
    want = ref.attend(q[past:].reshape(tokens, heads, e), *(x[..., :e] for x in stored), past, window, e**-0.5)
    return q, k, v, *(x.reshape(tokens, -1) for x in want)


def filled(kv: str, heads: int, k: np.ndarray, v: np.ndarray, e: int, spare: int = 3) -> Cache:
    held = Cache(kv, heads, len(k) + spare, e)
    held.core.store(k, v, 0)
    return held


def run(tokens, past, heads, e, window, kv, exact=True) -> tuple[np.ndarray, int]:
    q, k, v, *_ = case(tokens, past, heads, e, window, kv)
    held = filled(kv, heads[1], k[:past], v[:past], e, spare=tokens + 3)
    held.core.store(k[past:], v[past:], past)
    out = np.full((tokens, heads[0] * e), np.nan, np.float32)
    return out, held.core.attend(q[past:], heads[0], past, window, e**-0.5, out, exact)


@pytest.mark.parametrize("params", DECODE + PREFILL, ids=str)
def test_equals_the_reference(level, params):
    tokens, past, heads, e, window, kv = params
    got, read = run(*params)
    *_, want, bound = case(*params)
    assert (np.abs(got - want) <= bound).all(), f"off by {np.abs(got - want).max()}"
    assert read == ref.bytes_read(kv, tokens, past, *heads, e, window)


@pytest.mark.parametrize("params", DECODE[::6] + PREFILL[::6], ids=str)
def test_same_bits_again_and_at_any_number_of_threads(level, threads, params):
    got, read = run(*params)
    assert np.array_equal(got, run(*params)[0])
    _core.set_threads(1)
    alone, read_alone = run(*params)
    _core.set_threads(threads)
    assert np.array_equal(got, alone) and read == read_alone


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("window", [0, 7])
def test_prefill_equals_decode_step_by_step(level, kv, window):
    params = (65, 33, (6, 3), 20, window, kv)
    q, k, v, _, bound = case(*params)
    whole, _ = run(*params)
    held = filled(kv, 3, k[:33], v[:33], 20, spare=65)
    for t in range(33, 98):
        out = np.empty((1, 6 * 20), np.float32)
        held.core.store(k[t : t + 1], v[t : t + 1], t)
        held.core.attend(q[t : t + 1], 6, t, window, 20**-0.5, out)
        assert (np.abs(out[0] - whole[t - 33]) <= 2 * bound[t - 33]).all()


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("kv", KV)
def test_large_scores(level, kv, tokens):
    """Whole numbers, so that scores up to +-25,000 are exact and only the softmax is under test."""
    rng = np.random.default_rng(0)
    n, e = 600 + tokens, 16
    q, k, v = (rng.integers(-10, 11, (n, e)).astype(np.float32) for _ in range(3))
    k *= 12  # no key exceeds 127, and each has one 127: its int8 scale is exactly 1
    k[:, 0], v[:, 0] = 127, 127
    held, out = filled(kv, 1, k, v, e), np.empty((tokens, e), np.float32)
    for sign in (1, -1):
        held.core.attend(sign * q[600:], 1, 600, 0, 1.0, out)
        want, _ = ref.attend(sign * q[600:, None], k[:, None].astype(float), v[:, None].astype(float), 600, 0, 1.0)
        np.testing.assert_allclose(out, want[:, 0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("kv", KV)
def test_equal_scores_give_the_mean(level, kv, tokens):
    _, k, v = qkv(100 + tokens, 1, 1, 16)
    held, out = filled(kv, 1, k, v, 16), np.empty((tokens, 16), np.float32)
    held.core.attend(np.zeros((tokens, 16), np.float32), 1, 100, 0, 1.0, out)
    exact = ref.load(*ref.store(kv, v))
    want = [exact[: 101 + t].mean(0) for t in range(tokens)]
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_no_tokens(level):
    held = Cache("f16", 2, 4, 8)
    empty = np.empty((0, 16), np.float32)
    held.core.store(empty, empty, 4)
    assert held.core.attend(empty, 2, 4, 0, 1.0, empty) == 0


# ---------------------------------------------------------------- what is stored


def edge_rows(n: int, e: int) -> np.ndarray:
    """Rows of every size: zero, subnormal, subnormal as f16, tiny, huge, ties between two multiples."""
    x = np.random.default_rng(n).standard_normal((n, e)).astype(np.float32)
    sizes = np.array([1, 0, 1e-44, 1e-39, 1e-36, 1e-30, 3e-7, 6e-5, 1e4, 1e38], np.float32)
    x = np.clip(x, -3, 3) * sizes[np.arange(n) % len(sizes), None]
    x[-1] = np.arange(e) % 9 - 4.5  # halves
    x[-1, 0] = 127
    return x


@pytest.mark.parametrize("e", [1, 3, 8, 15, 16, 17, 20, 33, 80])
@pytest.mark.parametrize("kv", KV)
def test_stored_rows_equal_the_reference(level, kv, e):
    heads, n, at = 3, 21, 2
    k, v = edge_rows(n, 2 * heads * e)[:, : heads * e], edge_rows(n, 2 * heads * e)[:, heads * e :]
    held, untouched = Cache(kv, heads, n + 5, e), Cache(kv, heads, n + 5, e)
    held.core.store(k, v, at)
    for x, rows, scales, before in zip((k, v), held.rows, held.scales, untouched.rows, strict=True):
        want, want_scales = ref.store(kv, x.reshape(n, heads, e).swapaxes(0, 1))
        np.testing.assert_array_equal(rows[:, at : at + n], want)
        for outside in (slice(None, at), slice(at + n, None)):
            assert rows[:, outside].tobytes() == before[:, outside].tobytes()
        if kv == "int8":
            np.testing.assert_array_equal(scales[:, at : at + n], want_scales)
            assert np.isnan(scales[:, :at]).all() and np.isnan(scales[:, at + n :]).all()


def test_f16_rounds_every_value_as_numpy_does(level):
    """All float16 values, those half way between two, and those just beside them."""
    exact = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (exact[:-1] + exact[1:]) / 2
    beside = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))
    x = np.concatenate([exact, middle, *beside, [65519, 65520, 1e30, np.inf]])
    x = np.concatenate([x, -x]).astype(np.float32)
    x = np.resize(x, (-(-len(x) // 64), 64))
    held = filled("f16", 1, x, x, 64, spare=0)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(held.rows[0][0].view(np.uint16), x.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_f16_keeps_what_is_not_finite(level, value):
    x = np.full((1, 16), value, np.float32)
    np.testing.assert_array_equal(filled("f16", 1, x, x, 16).rows[0][0, :1], x)


def test_int8_rows_with_a_nan_do_not_crash(level):
    x = np.full((1, 16), np.nan, np.float32)
    x[0, 1:3] = 2, -2
    assert filled("int8", 1, x, x, 16).rows[0][0, 0].tolist() == [0, 127, -127] + [0] * 13


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("error", "k", "v", "k_scales", "v_scales"),
    [
        (ValueError, (2, 4, 32), (2, 4, 64), None, None),
        (ValueError, (2, 4, 32), (2, 5, 32), None, None),
        (ValueError, (2, 4, 32), (1, 4, 32), None, None),
        (ValueError, (2, 4, 16), (2, 4, 16), None, None),  # 8 f16 values: not padded
        (ValueError, (2, 4, 0), (2, 4, 0), None, None),
        (ValueError, (0, 4, 32), (0, 4, 32), None, None),
        (ValueError, (2, 4, 32), (2, 4, 32), (2, 4), None),
        (ValueError, (2, 4, 32), (2, 4, 32), None, (2, 4)),
        (ValueError, (2, 4, 32), (2, 4, 32), (2, 4), (2, 5)),
        (ValueError, (2, 4, 32), (2, 4, 32), (3, 4), (2, 4)),
        (ValueError, (2, 4, 24), (2, 4, 24), (2, 4), (2, 4)),
        (TypeError, (4, 32), (4, 32), None, None),
        (TypeError, (2, 4, 32), (2, 4, 32), (8,), (8,)),
    ],
)
def test_wrong_caches_are_refused(error, k, v, k_scales, v_scales):
    scales = (None if s is None else np.zeros(s, np.float32) for s in (k_scales, v_scales))
    with pytest.raises(error):
        _core.LayerCache(
            "int8" if k_scales or v_scales else "f16", np.zeros(k, np.uint8), np.zeros(v, np.uint8), *scales
        )


def test_kinds_of_cache_and_their_scales():
    rows, scales = np.zeros((2, 4, 64), np.uint8), np.zeros((2, 4), np.float32)
    for kind, given in (("f64", None), ("int8", None), ("f16", scales), ("f32", scales)):
        with pytest.raises(ValueError):
            _core.LayerCache(kind, rows, rows, given, given)


def test_caches_that_would_be_copied_are_refused():
    good = np.zeros((2, 4, 32), np.uint8)
    fixed = good.copy()
    fixed.flags.writeable = False
    for bad in (good.astype(np.float16), np.zeros((2, 8, 32), np.uint8)[:, ::2], fixed):
        with pytest.raises(TypeError):
            _core.LayerCache("f16", bad, good, None, None)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("error", "keys", "values", "at"),
    [
        (ValueError, zeros(2, 16), zeros(3, 16), 0),
        (ValueError, zeros(2, 16), zeros(2, 32), 0),
        (ValueError, zeros(2, 17), zeros(2, 17), 0),  # not the same width for both heads
        (ValueError, zeros(2, 34), zeros(2, 34), 0),  # wider than the cache
        (ValueError, zeros(2, 16), zeros(2, 16), 3),  # full
        (ValueError, zeros(2, 16), zeros(2, 16), 2**63),
        (ValueError, zeros(2, 32)[:, ::2], zeros(2, 16), 0),
        (ValueError, zeros(2, 32)[:, :16], zeros(2, 16), 0),  # not equally far apart
        (ValueError, zeros(2, 16)[::-1], zeros(2, 16), 0),
        (TypeError, zeros(2, 16), zeros(2, 16), -1),
        (TypeError, zeros(16), zeros(16), 0),
        (TypeError, zeros(2, 16).astype(np.float16), zeros(2, 16), 0),
    ],
)
def test_wrong_rows_are_refused(error, keys, values, at):
    with pytest.raises(error):
        Cache("f16", 2, 4, 16).core.store(keys, values, at)


@pytest.mark.parametrize(
    ("error", "q", "heads", "past", "out"),
    [
        (ValueError, zeros(2, 32), 3, 0, zeros(2, 32)),
        (ValueError, zeros(2, 32), 0, 0, zeros(2, 32)),
        (ValueError, zeros(2, 33), 2, 0, zeros(2, 33)),
        (ValueError, zeros(2, 34), 2, 0, zeros(2, 34)),  # wider than the cache
        (ValueError, zeros(2, 0), 2, 0, zeros(2, 0)),
        (ValueError, zeros(2, 32), 2, 3, zeros(2, 32)),  # past the end
        (ValueError, zeros(2, 32), 2, 2**63, zeros(2, 32)),
        (ValueError, zeros(2, 32), 2, 0, zeros(1, 32)),
        (ValueError, zeros(2, 32), 2, 0, zeros(2, 16)),
        (ValueError, zeros(2, 64)[:, ::2], 2, 0, zeros(2, 32)),
        (TypeError, zeros(2, 32), 2, -1, zeros(2, 32)),
        (TypeError, zeros(2, 32), 2, 0, zeros(2, 64)[:, :32]),
        (TypeError, zeros(2, 32), 2, 0, zeros(2, 32).astype(np.float64)),
        (TypeError, zeros(2, 32).astype(np.float64), 2, 0, zeros(2, 32)),
    ],
)
def test_wrong_queries_are_refused(error, q, heads, past, out):
    with pytest.raises(error):
        Cache("f16", 2, 4, 16).core.attend(q, heads, past, 0, 1.0, out)


FEW = pairwise((2, 3, 5, 8), (0, 1, 500, 508, 511, 512, 1100), HEADS, (20, 64, 128), (0, 4096), KV)


@pytest.mark.parametrize("params", FEW, ids=str)
def test_a_few_tokens_give_bit_for_bit_what_each_gives_alone(level, params):
    tokens, past, heads, e, window, kv = params
    together, _ = run(*params)
    q, k, v, *_ = case(*params)
    held = filled(kv, heads[1], k, v, e)
    for t in range(tokens):
        alone = np.full((1, heads[0] * e), np.nan, np.float32)
        held.core.attend(q[past + t : past + t + 1], heads[0], past + t, window, e**-0.5, alone, True)
        assert np.array_equal(alone[0], together[t])
