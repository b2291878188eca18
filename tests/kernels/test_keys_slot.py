"""k winners take all among the keys of attention: the slot against the same rule in numpy, its counts, its state."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from kernels.test_attention import KV, Cache
from kernels.test_block import EPS, D, linear, normal, packed, stream
from pairwise import pairwise
from reference import attention as attention_ref
from reference import keys as ref
from reference import rows as rows_ref

from ralo import _core


class Half:
    """The attention half of a layer behind a slot, a cache that holds `past` keys, and the state of its text."""

    def __init__(self, rule: ref.Rule, kv="f16", heads=(4, 2), e=12, past=200, window=0, room=40) -> None:
        self.rule, self.kv, self.heads, self.e, self.past, self.window = rule, kv, heads, e, past, window
        sizes = {"q": heads[0] * e, "k": heads[1] * e, "v": heads[1] * e}
        self.w = {name: normal(n, D, seed=i) * 0.2 for i, (name, n) in enumerate(sizes.items())}
        self.w_o = normal(D, heads[0] * e, seed=7) * 0.2
        parts = (packed(self.w).core, packed({"o": self.w_o}).core)
        norm = _core.Norm(np.ones(D, np.float32), None, EPS)
        self.attention = _core.Attention(norm, *parts, *heads, e, None, None, window)
        self.slot, self.state = _core.KwtaKeys(*astuple(rule)), _core.LayerState()
        self.attention.use(None, None, self.slot)
        self.cache = Cache(kv, heads[1], past + room, e)
        self.cache.core.store(normal(past, heads[1] * e, seed=5), normal(past, heads[1] * e, seed=6), 0)

    def run(self, x: np.ndarray, past: int | None = None, state: bool = True) -> tuple[np.ndarray, int]:
        """The residual stream after the half (T, D), and the bytes of cache read."""
        x = x.copy()
        at = self.past if past is None else past
        _, read = self.attention.run(x, self.cache.core, at, None, None, True, self.state if state else None)
        return x[:, :D], read

    def want(self, x: np.ndarray) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """The same by the reference, from keys and values that are in the cache after run(x)."""
        n, e = self.past + len(x), self.e
        scales = [None if s is None else s[:, :n] for s in self.cache.scales]
        rows = [r[:, :n] for r in self.cache.rows]
        k, v = (attention_ref.load(r, s)[..., :e].swapaxes(0, 1) for r, s in zip(rows, scales, strict=True))
        before = x[:, :D].astype(np.float64)
        q = linear(self.w["q"], rows_ref.norm_rms(before, np.ones(D), EPS)).reshape(len(x), self.heads[0], e)
        out, lists = ref.attend(self.rule, q, k, v, self.past, self.window, e**-0.5)
        return before + linear(self.w_o, out.reshape(len(x), -1)), lists


BEST, SEED = ref.Rule(0.2, recent=8), ref.Rule(0.2, recent=8, seed=True)
FORMS = pytest.mark.parametrize("rule", [BEST, SEED], ids=["best", "seed"])
RULES = (BEST, SEED, ref.Rule(1.0, keep_abs=5, sinks=0, recent=0), ref.Rule(0.5, 30, 2, 1, seed=True))
SHAPES = ((4, 4), (6, 3), (8, 1), (10, 2))


@pytest.mark.parametrize(
    ("rule", "tokens", "heads", "e", "past", "window", "kv"),
    pairwise(RULES, (1, 3, 11), SHAPES, (8, 20, 64), (40, 200, 1100), (0, 50, 600), KV),
)
def test_the_rule_and_what_it_counts(level, rule, tokens, heads, e, past, window, kv):
    half = Half(rule, kv, heads, e, past, window)
    x = stream(tokens)
    got, read = half.run(x)
    want, lists = half.want(x)
    np.testing.assert_allclose(got, want, atol=3e-5)
    counts = ref.counts(rule, kv, e, lists, past, window)
    if rule.seed:  # and the keys that energies were computed from
        counts["bytes_read"] += (past + tokens) * heads[1] * ref.row_bytes(kv, e)
    assert half.slot.counts() == counts and read == counts["bytes_read"]
    assert counts["kept"] < counts["keys"]
    assert half.slot.nonfinite == 0


@FORMS
@pytest.mark.parametrize("kv", KV)
def test_losers_are_not_read(level, rule, kv):
    """Rubbish for values, and in form seed for keys whose energies are known, changes no bit."""
    half, x = Half(rule, kv), stream(1)
    clean, _ = half.run(x)
    (lists,) = half.want(x)[1]
    for head, kept in enumerate(lists):
        others = np.setdiff1d(np.arange(half.past), kept)
        assert len(others) > 100
        for rows, scales in list(zip(half.cache.bytes, half.cache.scales, strict=True))[0 if rule.seed else 1 :]:
            rows[head, others] = 0xFF
            if scales is not None:
                scales[head, others] = np.nan
    half.state.trim(half.past)
    assert np.array_equal(half.run(x)[0], clean)


@FORMS
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("kv", KV)
def test_dense_where_everything_is_kept(level, rule, kv, tokens):
    x = stream(tokens)
    dense, read = Half(rule, kv).run(x, state=False)
    few = {"keep": 1.0}, {"keep_abs": 999}, {"min_ctx": 999}, {"recent": 999}, {"sinks": 250}
    for change in few:
        half = Half(replace(rule, **change), kv)
        got, got_read = half.run(x)
        assert np.array_equal(got, dense) and got_read == read, change
        keys = 2 * sum(range(201, 201 + tokens))
        counts = {"steps": tokens, "keys": keys, "kept": keys, "bytes_read": read, "bytes_skipped": 0}
        assert half.slot.counts() == counts and half.state.nbytes == 0
    half = Half(rule, kv)
    half.slot.on = False
    assert np.array_equal(half.run(x)[0], dense)
    half.slot.on = True
    got, got_read = half.run(x)
    assert np.abs(got - dense).max() > 1e-3
    assert tokens > 1 or rule.seed or got_read < 0.65 * read


@FORMS
@pytest.mark.parametrize(("kv", "window"), [("f32", 0), ("f16", 60), ("int8", 0)])
def test_many_tokens_equal_one_by_one(level, rule, kv, window):
    """The first of them have too few keys to leave any out."""
    rule = replace(rule, min_ctx=55)
    many, single = (Half(rule, kv, past=45, window=window) for _ in range(2))
    x = stream(30)
    got, _ = many.run(x)
    steps = [single.run(x[t : t + 1], 45 + t)[0] for t in range(30)]
    np.testing.assert_allclose(got, np.concatenate(steps), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got, many.want(x)[0], atol=3e-5)
    ours, theirs = many.slot.counts(), single.slot.counts()
    assert ours.pop("bytes_read") <= theirs.pop("bytes_read")  # dense tokens share what they read
    assert ours == theirs and ours["kept"] < ours["keys"]


@FORMS
@pytest.mark.parametrize("tokens", [1, 11])
def test_same_bits_at_any_number_of_threads(level, threads, rule, tokens):
    x = stream(tokens)
    for heads in ((8, 1), (6, 3)):
        got, _ = Half(rule, heads=heads, past=2100).run(x)
        _core.set_threads(1)
        assert np.array_equal(got, Half(rule, heads=heads, past=2100).run(x)[0])
        _core.set_threads(threads)


@FORMS
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_planted_nan_is_caught(level, rule, tokens):
    x = stream(tokens)
    dense, dense_read = Half(rule).run(x, state=False)
    sparse, read = Half(rule).run(x)
    half = Half(rule)
    half.slot.plant = True
    got, got_read = half.run(x)
    assert np.array_equal(got, dense) and got_read == read + dense_read
    assert half.slot.nonfinite == 1 and not half.slot.plant and half.slot.counts()["bytes_skipped"] == 0
    half.state.trim(half.past)
    assert np.array_equal(half.run(x)[0], sparse) and half.slot.nonfinite == 1


def missing(half: Half, past: int) -> int:
    """Runs a token there; how many energies of each head were not known. The result is that of a fresh state."""
    before, x = half.slot.counts(), stream(1)
    got, read = half.run(x, past)
    kept = half.slot.counts()["kept"] - before["kept"]
    state, half.state = half.state, _core.LayerState()
    assert np.array_equal(half.run(x, past)[0], got)
    half.state = state
    return (read // ref.row_bytes(half.kv, half.e) - 2 * kept) // half.heads[1]


def test_state_survives_trim_and_clone(level):
    half = Half(SEED)
    assert half.state.nbytes == 0
    assert [missing(half, past) for past in (200, 201, 202)] == [201, 1, 1]
    assert 4 * 2 * 203 <= half.state.nbytes < 2 * 4 * 2 * 203 + 64
    first, half.state = half.state, half.state.clone()
    assert half.state.nbytes <= first.nbytes
    half.state.trim(1000)
    assert missing(half, 203) == 1
    half.state.trim(150)
    half.cache.core.store(normal(1, 24, seed=9) * 9, normal(1, 24), 160)  # the text goes on differently
    assert missing(half, 203) == 54
    half.state = first  # the clone's trim did not reach it
    half.cache.core.store(normal(200, 24, seed=5)[160:161], normal(200, 24, seed=6)[160:161], 160)
    assert missing(half, 203) == 1
    assert missing(half, 203) == 1  # a position run again has another key


def test_form_best_remembers_nothing(level):
    half = Half(BEST)
    half.run(stream(1))
    assert half.state.nbytes == 0
