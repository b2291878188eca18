"""Packed keys: codes of keys and queries against the reference, and how much of a score they still tell."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from kernels.test_attention import KV, WIDTHS, Cache, filled
from kernels.test_block import normal
from pairwise import pairwise
from reference import attention as attention_ref
from reference import codes as ref

from ralo import _core

FORMS = (
    ref.Form("signs"),
    ref.Form("signs", bits=2),
    ref.Form("signs", bits=3),
    ref.Form("signs", bits=4),
    ref.Form("ternary", -1.04),
    ref.Form("ternary", 0.4),
    ref.Form("overlap", -1.64),
    ref.Form("overlap", 0.9),
    ref.Form("difference", -0.7),
    ref.Form("difference", 0.5),
)
BLOCKS, HEADS = 3, 2
SCALE = 0.25  # what queries are multiplied with


def unpacked(words: np.ndarray) -> np.ndarray:
    """(..., words) of 64 bits -> booleans (..., words * 64)."""
    bits = words[..., None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)
    return bits.astype(bool).reshape(*words.shape[:-1], -1)


def by_key(codes: np.ndarray) -> np.ndarray:
    """Of every block (STEP, ..., keys a group) -> (n, ...): key t of a block is in group t % STEP."""
    last_first = np.moveaxis(codes, -1, 1)  # (blocks, group, STEP, ...)
    return last_first.reshape(-1, *last_first.shape[3:])


def stored(kv: str, rows: np.ndarray) -> np.ndarray:
    """Rows (n, heads, e) as kernels read them from the cache, in float32: (heads, n, padded e)."""
    values, scales = attention_ref.store(kv, rows)
    exact = values.astype(np.float32) * (np.float32(1) if scales is None else scales[..., None])
    return exact.swapaxes(0, 1)


@cache
def held(kv: str, e: int) -> tuple[Cache, np.ndarray, np.ndarray]:
    """A cache, and its keys and values as numbers (heads, n, padded e). Keys differ in size and have a mean."""
    n = BLOCKS * ref.BLOCK
    k = (normal(n, HEADS * e, seed=1) + normal(1, HEADS * e, seed=2)) * np.exp(normal(n, 1, seed=3))
    v = normal(n, HEADS * e, seed=4) + np.float32(0.5)
    k[70], k[100] = 0, k[101]
    return filled(kv, HEADS, k, v, e), *(stored(kv, x.reshape(n, HEADS, e)) for x in (k, v))


def code(kv: str, e: int, form: ref.Form, head: int = 0, blocks: int = BLOCKS) -> list[np.ndarray]:
    return list(_core.code_keys(held(kv, e)[0].core, head, blocks, form.code, form.eps))


def queries(g: int, e: int) -> np.ndarray:
    q = np.zeros((g, attention_ref.padded(e)), np.float32)
    q[:, :e] = normal(g, e, seed=5) * SCALE
    return q


def packed(form: ref.Form, q: np.ndarray, scale: float = SCALE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Planes (g, planes, words), factors and offsets (g)."""
    g, ep = q.shape
    planes = np.full((g, form.planes, form.words(ep)), 77, np.uint64)
    factor, offset = np.full((2, g), np.nan, np.float32)
    _core.code_query(q, scale, form.code, form.eps, form.bits, planes, factor, offset)
    return planes, factor, offset


@pytest.mark.parametrize(("form", "kv", "e"), pairwise(FORMS, KV, (*WIDTHS, 320)))
def test_codes_of_cached_keys(level, form, kv, e):
    _, k, v = held(kv, e)
    for head in range(HEADS):
        bits, scales, means, sums = code(kv, e, form, head)
        want = ref.encode(form, k[head], v[head])
        assert bits.shape == (BLOCKS, ref.STEP, form.words(k.shape[2]), ref.BLOCK // ref.STEP)
        assert np.array_equal(unpacked(by_key(bits)), want.bits)
        assert np.array_equal(by_key(scales), want.scales)
        assert np.array_equal(means.view(np.float16), want.means)
        assert np.array_equal(sums, want.values)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_codes_depend_on_their_block_alone(level, form):
    """And on the scale before it, in the document's forms: coding fewer blocks gives the first of them."""
    whole = code("f16", 64, form)
    for blocks in (0, 1, 2):
        for part, all_of_it in zip(code("f16", 64, form, blocks=blocks), whole, strict=True):
            assert len(part) == blocks and np.array_equal(part, all_of_it[:blocks])


def test_codes_of_keys_that_are_all_alike(level):
    """Nothing is left of them but their mean; no scale is a NaN."""
    same = np.tile(normal(1, 16), (ref.BLOCK, 1)).astype(np.float16).astype(np.float32)
    for form in (ref.Form("signs"), ref.Form("ternary", -1.04)):
        _, scales, means, _ = _core.code_keys(filled("f16", 1, same, same, 16).core, 0, 1, form.code, form.eps)
        assert np.array_equal(means.view(np.float16)[0], same[0].astype(np.float16)) and not scales.any()


@pytest.mark.parametrize(("form", "e", "g"), pairwise(FORMS, (*WIDTHS, 320), (1, 2, 5)))
def test_queries(level, form, e, g):
    q = queries(g, e)
    planes, factor, offset = packed(form, q)
    for h in range(g):
        want = ref.pack_query(form, q[h], SCALE)
        assert np.array_equal(unpacked(planes[h]), want.planes)
        assert (factor[h], offset[h]) == (want.factor, want.offset)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_queries_of_any_size(level, form):
    """Zero, tiny, huge; and what is not a number neither crashes nor reaches the query beside it."""
    sizes = np.array([0, 1e-38, 1e-20, 1, 1e20, 1e37], np.float32)
    q = normal(1, 64) * sizes[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        planes, factor, offset = packed(form, q)
        for h in range(len(q)):
            want = ref.pack_query(form, q[h], SCALE)
            assert np.array_equal(unpacked(planes[h]), want.planes)
            np.testing.assert_array_equal([factor[h], offset[h]], [want.factor, want.offset])
    for bad in (np.nan, np.inf, -np.inf):
        q[0, 3] = bad
        for ours, before in zip(packed(form, q), (planes, factor, offset), strict=True):
            np.testing.assert_array_equal(ours[1:], before[1:])


def correlated(n: int, e: int, seed: int) -> np.ndarray:
    """Rows (n, padded e) around a mean, with some directions much longer than others, as keys and queries have them."""
    rng = np.random.default_rng([seed, e])
    mix = np.random.default_rng(e).standard_normal((e, e)) * np.geomspace(2, 0.3, e) / e**0.5
    out = np.zeros((n, attention_ref.padded(e)), np.float32)
    out[:, :e] = rng.standard_normal((n, e)) @ mix.T + rng.standard_normal(e)
    return out


def truth(form: ref.Form, k: np.ndarray, q: np.ndarray, e: int) -> float:
    """Mean correlation of guesses with scores q . k, by the kernels' codes."""
    cache_of_keys = filled("f32", 1, k[:, :e], k[:, :e], e)
    bits, scales, means, _ = _core.code_keys(cache_of_keys.core, 0, len(k) // ref.BLOCK, form.code, form.eps)
    planes, factor, offset = packed(form, q)
    codes = ref.Encoded(unpacked(by_key(bits)), by_key(scales), means.view(np.float16), means)
    made = [ref.Query(unpacked(p), f, o) for p, f, o in zip(planes, factor, offset, strict=True)]
    guesses = ref.guesses(form, made, codes, q.astype(np.float64) @ codes.means.astype(np.float64).T)
    return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(guesses, q @ k.T, strict=True)]))


@pytest.mark.parametrize("e", (*WIDTHS, 320))
@pytest.mark.parametrize("form", [ref.Form("signs", bits=4), ref.Form("ternary", -1.04)], ids=str)
def test_guesses_go_with_scores(level, form, e):
    k, q = correlated(512, e, seed=1), correlated(8, e, seed=2)
    assert truth(form, k, q, e) > 0.7


@pytest.mark.parametrize("e", [64, 128])
def test_overlap_of_gaussian_keys_tells_nothing(level, e):
    """Which dimensions are large says nothing of the sign of their product."""
    k, q = normal(1024, e, seed=1), normal(16, e, seed=2)
    assert abs(truth(ref.Form("overlap", -1.64), k, q, e)) < 0.1
    one, four = (truth(ref.Form("signs", bits=bits), k, q, e) for bits in (1, 4))
    assert 0.6 < one < 0.7 < four  # 2 / pi, and its root


@pytest.mark.parametrize(("bits", "slope"), [(1, 2 / np.pi), (4, 1)])
def test_how_large_guesses_are(level, bits, slope):
    """Over many keys a guess is the score on average, or less where it knows little."""
    k, q = normal(2048, 64, seed=1), normal(1, 64, seed=2)
    form = ref.Form("signs", bits=bits)
    codes = ref.encode(form, k, k)
    guess = ref.guesses(form, [ref.pack_query(form, q[0], 1)], codes, q @ codes.means.astype(np.float64).T)[0]
    true = (q @ k.T)[0]
    assert guess @ true / (true @ true) == pytest.approx(slope, abs=0.05)


@pytest.mark.parametrize(
    "call",
    [
        lambda c, f: _core.code_keys(c, 2, 1, "signs", -1),
        lambda c, f: _core.code_keys(c, 0, 2, "signs", -1),
        lambda c, f: _core.code_keys(c, 0, 1, "sign", -1),
        lambda c, f: _core.code_query(f(2, 16), 1, "signs", -1, 4, np.zeros((2, 4, 2), np.uint64), f(2), f(2)),
        lambda c, f: _core.code_query(f(2, 16), 1, "signs", -1, 4, np.zeros((2, 2, 1), np.uint64), f(2), f(2)),
        lambda c, f: _core.code_query(f(2, 16), 1, "signs", -1, 4, np.zeros((1, 4, 1), np.uint64), f(2), f(2)),
        lambda c, f: _core.code_query(f(2, 16), 1, "signs", -1, 4, np.zeros((2, 4, 1), np.uint64), f(3), f(2)),
        lambda c, f: _core.PackKeys(code="bits"),
        lambda c, f: _core.PackKeys(popcount="popcount"),
        lambda c, f: _core.PackKeys(keep=0.0),
        lambda c, f: _core.PackKeys(keep=1.5),
        lambda c, f: _core.PackKeys(p=-0.1),
        lambda c, f: _core.PackKeys(mix=float("nan")),
    ],
)
def test_wrong_calls_are_refused(call):
    with pytest.raises(ValueError):
        call(Cache("f16", 2, 70, 16).core, lambda *shape: np.zeros(shape, np.float32))
