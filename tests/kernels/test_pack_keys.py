"""Attention that packed keys choose for: exact where all is read, close where what matters is, the same bits always."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.test_attention import KV, Cache
from kernels.test_block import normal
from pairwise import pairwise

from ralo import _core

CODES = {"signs": -1.0, "ternary": -1.04, "overlap": -1.64, "difference": -1.64}  # and their eps
GROUPS = ((2, 2), (4, 2), (4, 1), (10, 2))  # query heads, kv heads


class Text:
    """Queries, keys and values of n positions, in a cache. `loud` makes attention look at few keys."""

    def __init__(self, kv="f16", heads=(4, 2), e=32, n=400, window=0, loud=1.0, seed=0) -> None:
        self.kv, self.heads, self.e, self.n, self.window, self.scale = kv, heads, e, n, window, e**-0.5
        self.q = normal(n, heads[0] * e, seed=seed) * np.float32(loud)
        self.k = normal(n, heads[1] * e, seed=seed + 1) + normal(heads[1] * e, seed=seed + 2)
        self.v = normal(n, heads[1] * e, seed=seed + 3)
        self.cache = Cache(kv, heads[1], n, e)
        self.store(0)

    def store(self, first: int) -> None:
        self.cache.core.store(self.k[first:], self.v[first:], first)

    def exact(self, past: int, tokens: int = 1) -> np.ndarray:
        out = np.full((tokens, self.q.shape[1]), np.nan, np.float32)
        self.cache.core.attend(self.q[past : past + tokens], self.heads[0], past, self.window, self.scale, out)
        return out

    def run(self, slot: _core.PackKeys, past: int, tokens: int = 1, state: Any = None) -> np.ndarray:
        return self.counted(slot, past, tokens, state)[0]

    def counted(self, slot: _core.PackKeys, past: int, tokens: int = 1, state: Any = None) -> tuple[np.ndarray, int]:
        """The result (T, heads * e) and the bytes of cache read."""
        q, out = self.q[past : past + tokens], np.full((tokens, self.q.shape[1]), np.nan, np.float32)
        state = _core.LayerState() if state is None else state
        return out, slot.attend(self.cache.core, q, self.heads[0], past, self.window, self.scale, state, out)


def slot(**settings: Any) -> _core.PackKeys:
    """Few keys, so that short texts have some to leave out."""
    eps = CODES[settings.get("code", "signs")]
    return _core.PackKeys(**{"eps": eps, "keep_abs": 16, "recent": 8} | settings)


def off_by(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| beside the typical |b|."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("kv", "heads", "window", "code", "e", "sinks", "recent"),
    pairwise(KV, GROUPS, (0, 203, 256), tuple(CODES), (8, 20, 64, 128), (0, 4, 130), (1, 8, 64)),
)
def test_exact_where_all_keys_are_chosen(level, kv, heads, window, code, e, sinks, recent):
    """All but one are wanted, which is as many as there are besides the last one."""
    text = Text(kv, heads, e, 400, window)
    for past in (340, 382, 383, 384):
        n = window or past + 1
        packed = slot(code=code, keep_abs=n - 1, sinks=sinks, recent=recent)
        np.testing.assert_allclose(text.run(packed, past), text.exact(past), atol=2e-5)
        counts = packed.counts()
        assert counts["packed"] == counts["heads"] == heads[1] and counts["kept"] == counts["keys"] == n * heads[1]


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(
    "settings",
    [
        {"min_ctx": 352},
        {"keep": 1.0, "keep_abs": 0},
        {"keep_abs": 351},
        {"recent": 224},
        {"sinks": 343},
        {"sinks": 330},  # no whole block between those and the last keys
        {"sinks": 256, "recent": 40},
        {"n": 136, "past": 134},  # recent + 127 keys
    ],
    ids=str,
)
def test_dense_bit_for_bit(level, kv, settings):
    settings = settings.copy()
    text = Text(kv, settings.pop("heads", (4, 2)), n=settings.pop("n", 400))
    past, state, packed = settings.pop("past", 350), _core.LayerState(), slot(**settings)
    out, read = text.counted(packed, past, state=state)
    assert np.array_equal(out, text.exact(past)) and state.nbytes == 0 and packed.nonfinite == 0
    counts = packed.counts()
    assert counts["packed"] == counts["bytes_skipped"] == 0 and counts["bytes_read"] == read
    assert counts["keys"] == counts["kept"] == (past + 1) * text.heads[1]


def test_packed_from_where_it_pays(level):
    """One key more than in the last case above, and all heads are packed."""
    text, packed = Text(n=136), slot()
    assert not np.array_equal(text.run(packed, 135), text.exact(135))
    assert packed.counts()["packed"] == packed.counts()["heads"] == 2


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize(("kv", "heads", "code"), pairwise(KV, GROUPS, ("signs", "ternary")))
def test_a_few_keys_that_matter_are_found(level, kv, heads, code, rest):
    text = Text(kv, heads, e=64, n=2100)
    g, e, past = heads[0] // heads[1], 64, 2099
    for i, place in enumerate((5, 300, 1023, 1024, 1800)):  # each query looks at one of them, and none at the others
        for head in range(heads[1]):
            query = text.q[past].reshape(heads[1], g, e)[head, i % g]
            text.k[place, head * e : (head + 1) * e] = 14 * query / np.linalg.norm(query)
    text.store(0)
    packed = slot(code=code, keep_abs=48, rest=rest)
    assert off_by(text.run(packed, past), text.exact(past)) < 0.05
    assert packed.counts()["kept"] <= heads[1] * (48 + 4 + 8 + 63)


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("code", CODES)
def test_equal_values_are_the_result_whatever_is_chosen(level, code, rest):
    text = Text(n=700, loud=3)
    text.v[:] = normal(1, text.v.shape[1], seed=9)
    text.store(0)
    packed = slot(code=code, rest=rest, p=0.5)
    np.testing.assert_allclose(text.run(packed, 699), text.exact(699), atol=1e-5)
    assert packed.counts()["kept"] < 200


@pytest.mark.parametrize(("kv", "window"), [("f32", 0), ("f16", 500), ("int8", 0)])
def test_the_mean_stands_for_keys_that_are_not_read(level, kv, window):
    """Nobody matters more than another: whoever reads a few knows little of the mean of all."""
    text = Text(kv, n=1000, window=window, loud=0)
    text.v += np.linspace(-2, 2, 1000, dtype=np.float32)[:, None]  # values move on with the text
    text.store(0)
    exact = text.exact(999)
    with_rest, without = (np.abs(text.run(slot(rest=rest), 999) - exact).max() for rest in (True, False))
    assert with_rest < 0.2 and with_rest < 0.25 * without


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize(("kv", "window", "code"), pairwise(KV, (0, 200), tuple(CODES)))
def test_several_tokens_equal_one_by_one(level, kv, window, code, rest):
    """Across the end of a block, and with checks now and then."""
    text = Text(kv, (6, 3), n=400, window=window, loud=2)
    many, single = (slot(code=code, rest=rest, check_every=7, limit=0.2) for _ in range(2))
    together, state = text.run(many, 300, 100), _core.LayerState()
    alone = [text.run(single, past, state=state) for past in range(300, 400)]
    assert np.array_equal(together, np.concatenate(alone))
    ours, theirs = many.counts(), single.counts()
    assert ours == pytest.approx(theirs, rel=1e-12) and ours["checks"] == 15 and ours["packed"] > 0


def test_tokens_with_few_keys_come_first(level):
    """Of several at once those are dense, and the others what they are alone."""
    text, packed = Text(n=200), slot()
    out = text.run(packed, 100, 100)
    np.testing.assert_allclose(out[:35], text.exact(100, 100)[:35], atol=1e-5)
    assert np.array_equal(out[35:], text.run(slot(), 135, 65))
    assert packed.counts()["packed"] == 2 * 65 and packed.counts()["heads"] == 200


@pytest.mark.parametrize("heads", [(4, 1), (6, 3)])
@pytest.mark.parametrize("code", ["signs", "difference"])
def test_same_bits_at_any_number_of_threads(level, threads, heads, code):
    """A long text is scanned by several tasks."""
    text = Text("f16", heads, 16, 5000, loud=2)
    settings = {"code": code, "keep_abs": 200, "p": 0.9, "check_every": 3}
    out = text.run(slot(**settings), 4996, 4)
    _core.set_threads(1)
    assert np.array_equal(out, text.run(slot(**settings), 4996, 4))
    _core.set_threads(threads)


@pytest.mark.parametrize("code", CODES)
def test_every_way_to_count_gives_the_same_bits(level, code):
    text = Text("f16", (6, 2), 80, 900, loud=2)
    first, *others = (text.run(slot(code=code, popcount=way), 890, 10).tobytes() for way in _core.popcounts())
    assert others and all(other == first for other in others)


def test_a_share_of_the_weight_needs_fewer_keys(level):
    text = Text(n=1500, loud=2)
    kept = []
    for p in (0.0, 0.9, 0.5, 0.01):
        packed = slot(keep_abs=300, p=p)
        text.run(packed, 1490, 10)
        kept.append(packed.counts()["kept"])
    assert kept == sorted(kept, reverse=True) and kept[2] < 0.7 * kept[0] and kept[3] < kept[2]


def test_guesses_may_be_mixed_into_scores(level):
    text = Text(n=500, loud=2)
    exact, half, guess = (text.run(slot(keep_abs=200, mix=mix), 499) for mix in (1.0, 0.5, 0.0))
    assert off_by(exact, text.exact(499)) < off_by(half, text.exact(499)) < off_by(guess, text.exact(499))
    assert off_by(guess, exact) > 0.01


def test_no_key_is_read_in_any_case(level):
    """Neither first nor last ones: at the end of a block all are guessed."""
    text, packed = Text(n=384, window=320, loud=2), slot(sinks=0, recent=0, keep_abs=100)
    assert off_by(text.run(packed, 383), text.exact(383)) < 0.5
    assert 196 <= packed.counts()["kept"] <= 200 and packed.nonfinite == 0


def test_a_share_of_the_keys(level):
    text, packed = Text(n=900), slot(keep=0.2, keep_abs=0)
    text.run(packed, 899)
    fixed = 4 + 900 - 832  # the first ones, and those after the last block that lies before the last eight
    assert 2 * (fixed + 177) <= packed.counts()["kept"] <= 2 * (fixed + 180)  # a sixty-fourth may be missing
