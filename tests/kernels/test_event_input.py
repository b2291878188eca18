"""Deltas in front of a linear map: the map of what was sent, token after token, and nothing read of the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernels.test_attention import Cache
from kernels.test_block import EPS, normal, packed
from pairwise import pairwise
from reference import event as ref
from reference import linear

from ralo import _core
from ralo.matrix import padded

QUANTS = ("f32", "bf16", "int8", "int4")
D, HEADS, E = 72, 5, 16  # channels of qkv; of o there are HEADS * E
WIDTH = HEADS * E
SPREAD = {"qkv": normal(D, seed=1) ** 2, "o": normal(WIDTH, seed=2) ** 2}


def slot(rule: ref.InputRule) -> _core.EventInput:
    return _core.EventInput(
        rule.n, rule.norms, rule.block, [rule.most], rule.track, rule.theta, rule.quorum, rule.conv_eps, rule.conv_j,
        rule.age_max, 0, None,
    )  # fmt: skip


def walk(tokens: int, step: float = 0.3, seed: int = 0) -> np.ndarray:
    """A residual stream (T, D padded) that moves a little from token to token."""
    x = np.full((tokens, padded(D)), 7, np.float32)
    now = normal(D, seed=seed + 100)
    for t, move in enumerate(normal(tokens, D, seed=seed + 101)):
        now = np.sqrt(1 - step**2) * now + np.float32(step) * move
        x[t, :D] = now
    return x


class Half:
    """Attention that sees its own token alone, so that `o` gets the values as they are: what each map was given, and
    what it made of it, can be looked at."""

    def __init__(self, place: str, occupant: _core.Input | None, quant: str = "f32", room: int = 64) -> None:
        self.place, self.slot, self.state = place, occupant, _core.LayerState()
        parts = {name: normal(WIDTH, D, seed=i) * 0.2 for i, name in enumerate("qkv")}
        self.qkv, self.o = packed(parts, quant), packed({"o": normal(D, WIDTH, seed=7) * 0.2}, quant)
        self.norm = _core.Norm(np.ones(D, np.float32), None, EPS)
        self.half = _core.Attention(self.norm, self.qkv.core, self.o.core, HEADS, HEADS, E, None, None, 1)
        self.half.use(*((occupant, None) if place == "qkv" else (None, occupant)), None)
        self.cache = Cache("f32", HEADS, room, E)
        self.matrix = self.qkv if place == "qkv" else self.o
        self.w = linear.unpack(quant, self.matrix.data, self.matrix.scales)  # (oc, n)
        self.bytes = sum(a.nbytes for a in (self.matrix.data, self.matrix.scales) if a is not None)
        self.read = 0

    def run(self, x: np.ndarray, past: int = 0, state: bool = True) -> np.ndarray:
        """What the map with the slot gave (T, oc) besides what it was added to; `given` is what it got."""
        y, rows = x.copy(), slice(past, past + len(x))
        weights, _ = self.half.run(y, self.cache.core, past, None, None, True, self.state if state else None)
        other = self.o if self.place == "qkv" else self.qkv
        self.read += weights - sum(a.nbytes for a in (other.data, other.scales) if a is not None)
        values = [r[:, rows].swapaxes(0, 1).reshape(len(x), -1) for r in self.cache.rows]
        if self.place == "o":
            self.given = values[1].copy()
            return y - np.where(np.arange(padded(D)) < D, x, 7)
        self.given = np.empty((len(x), D), np.float32)
        self.norm.run(np.ascontiguousarray(x[:, :D]), self.given)
        return np.concatenate(values, axis=1)  # keys and values

    def of(self, sent: np.ndarray) -> np.ndarray:
        """What the map makes of x = sent (T, n)."""
        y = sent.astype(np.float64) @ self.w.T + self.matrix.bias
        if self.place == "o":
            return y
        return np.concatenate([y[:, self.matrix.slices[name]] for name in "kv"], axis=1)


def rule(place: str = "o", **settings) -> ref.InputRule:
    n = D if place == "qkv" else WIDTH
    return ref.InputRule(**{"n": n, "most": n // 3, "age_max": 1 << 20} | settings)


def near(got: np.ndarray, want: np.ndarray, quant: str = "f32") -> None:
    within = 2e-5 if quant in ("f32", "bf16") else 2e-3  # one token of int8 and int4 may be rounded to 16 bits
    assert np.abs(got - want).max() <= within * np.abs(want).max()


def whole(got: np.ndarray, dense: np.ndarray) -> bool:
    """A whole map adds its bias last and dense adds it first: no other difference."""
    return bool(np.abs(got - dense).max() < 1e-6 * np.abs(dense).max())


@pytest.mark.parametrize(
    ("quant", "place", "track", "norms", "block", "stop"),
    pairwise(QUANTS, ("qkv", "o"), (True, False), (True, False), (1, 16), (0, 1)),
)
def test_it_is_the_map_of_what_was_sent(level, threads, quant, place, track, norms, block, stop):
    early = {"theta": 0.3, "quorum": 0.5, "conv_eps": 0.12, "conv_j": 3} if stop else {}
    settings = rule(place, track=track, norms=SPREAD[place] if norms else None, block=block, age_max=7, **early)
    half, want = Half(place, slot(settings), quant), ref.Input(settings)
    for t, x in enumerate(walk(22)):
        got = half.run(x[None], t)
        near(got, half.of(want.step(half.given[0])[None]), quant)
    counts = half.slot.counts()
    assert (counts["sent"], counts["whole"], counts["quorum_hits"]) == (want.sent, want.whole, want.stopped)
    assert half.slot.nonfinite == 0 and want.whole == (4 if track else 0)


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("place", ["qkv", "o"])
@pytest.mark.parametrize("quant", QUANTS)
def test_as_many_as_there_are_is_dense_bit_for_bit(level, threads, quant, place, track):
    few = rule(place, track=track)
    half, x = Half(place, slot(replace(few, most=few.n)), quant), walk(6)
    less = Half(place, slot(replace(few, most=few.n - 1)), quant)
    for t in range(6):
        dense = half.run(x[t : t + 1], t, state=False)
        assert np.array_equal(half.run(x[t : t + 1], t), dense)
        assert whole(less.run(x[t : t + 1], t), dense) == (track and t == 0)
    assert np.array_equal(half.run(x, 6), half.run(x, 6, state=False)) and half.state.nbytes == 0


def counted(settings: ref.InputRule, x: np.ndarray) -> dict[str, float]:
    half = Half("o", slot(settings))
    for t in range(len(x)):
        half.run(x[t : t + 1], t)
    return half.slot.counts()


def test_channels_that_did_not_move_are_not_sent(level):
    x = walk(2)
    x[1] = x[0]
    x[1, :D] += 1e-3 * normal(D, seed=3)
    plain, half = rule(most=WIDTH - 1), Half("o", None)
    given = [half.run(x[t : t + 1], t) is not None and half.given[0] for t in range(2)]
    moves = np.abs(given[1] - given[0])
    for theta in (0.0, 0.5, 1.0, 1.7):
        moved = int((moves >= theta * np.sqrt((moves**2).mean())).sum())
        counts = counted(replace(plain, theta=theta), x)
        assert counts["sent"] == WIDTH + min(moved, WIDTH - 1) and counts["quorum_hits"] == 0
    assert moved < WIDTH / 4


def test_a_quorum_that_has_converged_is_enough(level):
    """Each of the two conditions asks for more channels, or for fewer; the larger number counts."""
    x, loose = walk(2), rule(most=WIDTH - 1, quorum=0.0, conv_eps=10.0, conv_j=1)
    assert counted(loose, x) | {"sent": WIDTH + 1, "quorum_hits": 1} == counted(loose, x)
    assert counted(replace(loose, conv_j=6), x)["sent"] == WIDTH + 6
    some = [counted(replace(loose, quorum=quorum), x)["sent"] - WIDTH for quorum in (0.2, 0.5, 0.9)]
    assert 1 < some[0] < some[1] < some[2] < WIDTH - 1
    fine = [counted(replace(loose, conv_eps=eps), x)["sent"] - WIDTH for eps in (0.2, 0.1, 0.05)]
    assert 1 < fine[0] < fine[1] < fine[2] < WIDTH - 1
    never = counted(replace(loose, conv_eps=0.0), x)
    assert never["sent"] == 2 * WIDTH - 1 and never["quorum_hits"] == 0
    all_of_it = counted(replace(loose, quorum=1.0), x)
    assert all_of_it["sent"] == 2 * WIDTH - 1 and all_of_it["quorum_hits"] == 0


@pytest.mark.parametrize("age_max", [1, 3, 50])
def test_the_whole_map_is_computed_again_after_age_max_tokens(level, age_max):
    half, x = Half("o", slot(rule(age_max=age_max))), walk(12)
    for t in range(12):
        dense = half.run(x[t : t + 1], t, state=False)
        assert whole(half.run(x[t : t + 1], t), dense) == (t % age_max == 0)
    assert half.slot.counts()["whole"] == -(-12 // age_max)


@pytest.mark.parametrize("quant", ["f32", "int8"])
@pytest.mark.parametrize("age_max", [64, 1 << 20])
def test_errors_do_not_add_up(level, quant, age_max):
    """Over 4096 tokens the result stays that of what was sent: rounding adds little, also where nothing is computed
    anew."""
    settings = rule(most=8, age_max=age_max)
    half, want, off = Half("o", slot(settings), quant, room=4096), ref.Input(settings), 0.0
    for t, x in enumerate(walk(4096)):
        got = half.run(x[None], t)
        sent = want.step(half.given[0])
        if t % 64 == 63:
            exact = half.of(sent[None])
            off = max(off, float(np.abs(got - exact).max() / np.abs(exact).max()))
    assert 0 < off < (1e-4 if quant == "f32" else 1e-3 if age_max == 64 else 1e-2)


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("quant", QUANTS)
def test_several_tokens_equal_one_by_one(level, threads, quant, track):
    x, settings = walk(9), rule("qkv", track=track, age_max=5, theta=0.2, norms=SPREAD["qkv"])
    together, single = Half("qkv", slot(settings), quant), Half("qkv", slot(settings), quant)
    many = together.run(x, 3)
    one = np.concatenate([single.run(x[t : t + 1], 3 + t) for t in range(9)])
    assert np.array_equal(many, one) or not track
    near(many, one, quant)
    ours, theirs = together.slot.counts(), single.slot.counts()
    names = ("steps", "channels", "sent", "whole", "quorum_hits")
    assert [ours[name] for name in names] == [theirs[name] for name in names]
    assert ours["bytes_read"] == together.read == (theirs["bytes_read"] if track else together.bytes)


@pytest.mark.parametrize("place", ["qkv", "o"])
@pytest.mark.parametrize("quant", QUANTS)
def test_counters(level, quant, place):
    settings = rule(place, most=20, age_max=4)
    half, x = Half(place, slot(settings), quant), walk(10)
    for t in range(10):
        half.run(x[t : t + 1], t)
    n, each = settings.n, half.bytes // settings.n
    read = (3 * n + 7 * 20) * each
    assert half.slot.counts() == {
        "steps": 10, "channels": 10 * n, "sent": 3 * n + 7 * 20, "quorum_hits": 0, "whole": 3,
        "bytes_read": read, "bytes_skipped": 10 * n * each - read,
    }  # fmt: skip
    assert half.read == read
    plain = Half(place, slot(replace(settings, track=False)), quant)
    for t in range(10):
        plain.run(x[t : t + 1], t)
    assert plain.slot.counts() | {"sent": 200, "whole": 0, "bytes_read": 200 * each} == plain.slot.counts()
    assert plain.read == 200 * each and plain.state.nbytes == 0
    dense = Half(place, slot(replace(settings, most=n)), quant)
    dense.run(x)
    counts = {"steps": 10, "sent": 10 * n, "whole": 0, "bytes_read": half.bytes, "bytes_skipped": 0}
    assert dense.slot.counts() | counts == dense.slot.counts() and dense.read == half.bytes


@pytest.mark.parametrize("quant", ["f32", "int8"])
def test_another_end_of_the_text_starts_with_the_whole(level, quant):
    half, x = Half("o", slot(rule()), quant), walk(12)
    for t in range(8):
        half.run(x[t : t + 1], t)
    copy = half.state.clone()
    assert half.state.nbytes == copy.nbytes == 4 * (WIDTH + padded(D))
    half.state.trim(8)  # nothing after the eighth token is there to be forgotten
    half.state.trim(100)
    on = [half.run(x[t : t + 1], t) for t in range(8, 12)]
    assert half.slot.counts()["whole"] == 1
    half.state = copy
    assert np.array_equal(half.run(x[8:9], 8), on[0])
    half.state.trim(5)
    dense = half.run(x[9:10], 5, state=False)
    assert whole(half.run(x[9:10], 5), dense) and half.slot.counts()["whole"] == 2
    half.run(x[10:11], 6)
    assert half.slot.counts()["whole"] == 2
    assert whole(half.run(x[9:10], 40), dense) and half.slot.counts()["whole"] == 3  # tokens are missing


def test_a_clone_goes_on_by_itself(level):
    half, x = Half("o", slot(rule())), walk(8)
    for t in range(4):
        half.run(x[t : t + 1], t)
    first, copy = half.state, half.state.clone()
    alike = [half.run(x[t : t + 1], t) for t in range(4, 8)]
    half.state = copy.clone()
    half.run(-x[4:5], 4)  # another text
    half.state = copy
    assert np.array_equal([half.run(x[t : t + 1], t) for t in range(4, 8)], alike)
    assert first.nbytes == copy.nbytes


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("place", ["qkv", "o"])
def test_a_planted_nan_is_caught(level, place, tokens, track):
    half, x = Half(place, slot(rule(place, track=track)), "int8"), walk(3 + tokens)
    half.run(x[:3], 0)
    dense = half.run(x[3:], 3, state=False)
    half.slot.plant = True
    before = half.read
    assert np.array_equal(half.run(x[3:], 3), dense)
    assert half.slot.nonfinite == 1 and not half.slot.plant and half.state.nbytes == 0
    assert half.read - before > half.bytes  # the map itself, and what was read in vain
    assert whole(half.run(x[3:], 3)[-1], dense[-1]) == (track and tokens == 1)


def test_a_broken_input_is_what_dense_makes_of_it(level):
    half, x = Half("o", slot(rule()), "f32"), walk(4)
    half.run(x[:1], 0)
    x[1, 5] = np.nan
    dense = half.run(x[1:2], 1, state=False)
    assert np.isnan(dense).any()
    np.testing.assert_array_equal(half.run(x[1:2], 1), dense)
    assert half.slot.nonfinite == 1 and half.state.nbytes == 0
    assert whole(half.run(x[2:3], 2), half.run(x[2:3], 2, state=False))
    assert np.isfinite(half.run(x[3:4], 3)).all() and half.slot.nonfinite == 1


def test_switched_off_or_without_state_it_is_dense(level):
    half, x = Half("qkv", slot(rule("qkv", track=False))), walk(1)
    dense = half.run(x, state=False)
    half.slot.on = False
    assert np.array_equal(half.run(x), dense)
    half.slot.on = True
    assert not np.array_equal(half.run(x), dense)


def test_a_level_says_how_many(level):
    pacer = _core.Pacer(3, 1, 2)
    occupant = _core.EventInput(WIDTH, None, 1, [WIDTH, 30, 4], True, 0, 1, 0, 1, 1 << 20, 0, pacer)
    half, x = Half("o", occupant), walk(8)
    for t, (use, sent) in enumerate([(2, WIDTH), (2, 4), (1, 30), (0, WIDTH), (2, WIDTH), (2, 4)]):
        before = occupant.counts()["sent"]
        pacer.replay([use])
        out = half.run(x[t : t + 1], t)
        assert occupant.counts()["sent"] - before == sent
        assert whole(out, half.run(x[t : t + 1], t, state=False)) == (sent == WIDTH)
    assert occupant.counts()["whole"] == 2  # level 0 is dense and keeps nothing: the next one starts anew


GOOD = {"n": 8, "norms": None, "block": 1, "most": [3], "track": True, "theta": 0.0, "quorum": 0.5, "conv_eps": 0.0,
        "conv_j": 1, "age_max": 4, "layer": 0, "pacer": None}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"block": 0},
        {"age_max": 0},
        {"most": []},
        {"most": [1, 2]},
        {"norms": np.ones(7, np.float32)},
        {"theta": -1.0},
        {"quorum": 1.1},
        {"quorum": -0.1},
        {"conv_eps": -1.0},
        {"pacer": _core.Pacer(2, 1, 0)},
        {"pacer": _core.Pacer(1, 1, 0), "layer": 1},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(wrong):
    _core.EventInput(**GOOD)
    with pytest.raises(ValueError):
        _core.EventInput(**GOOD | wrong)


def test_a_slot_of_another_width_is_refused():
    with pytest.raises(ValueError):
        Half("o", slot(rule("qkv")))
