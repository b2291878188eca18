"""Channels that win in front of a linear map: the others are not read, all of them are dense bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_block import EPS, D, F, normal, packed, stream
from reference import linear
from reference.rows import act, norm_rms

from ralo import _core

QUANTS = ("f32", "bf16", "int8", "int4")
K = 15


def top(score: np.ndarray, k: int, block: int = 1) -> np.ndarray:
    """Indices of the k blocks with the largest norm of their scores."""
    blocks = [score[i : i + block] for i in range(0, len(score), block)]
    order = np.argsort([-np.sqrt((b.astype(np.float64) ** 2).sum()) for b in blocks], kind="stable")[:k]
    return np.concatenate([np.arange(b * block, min((b + 1) * block, len(score))) for b in sorted(order)])


class Half:
    """An MLP with a slot in front of `up`, one in front of `down`, and what it should give."""

    def __init__(self, quant: str = "f32", up: dict | None = None, down: dict | None = None) -> None:
        self.weight = normal(D, seed=9)
        self.up = packed({"gate": normal(F, D, seed=1) * 0.3, "up": normal(F, D, seed=2) * 0.3}, quant)
        self.down = packed({"down": normal(D, F, seed=8) * 0.3}, quant)
        self.mlp = _core.Mlp(_core.Norm(self.weight, None, EPS), self.up.core, self.down.core, F, True, "silu")
        self.slots = [None if s is None else slot(n, **s) for n, s in ((D, up), (F, down))]
        self.mlp.use(*self.slots, None)

    def run(self, x: np.ndarray, past: int = 0, state: _core.LayerState | None = None) -> tuple[np.ndarray, int]:
        y = x.copy()
        return y, self.mlp.run(y, past, True, state)

    def want(self, x: np.ndarray, up: np.ndarray | None, down: np.ndarray | None, scale: float = 1.0) -> np.ndarray:
        """With only these channels of up and of down; None is all."""
        w = [linear.unpack(m.quant, m.data, m.scales) for m in (self.up, self.down)]
        parts = w[0] @ (self.input(x) * only(D, up)) * (scale if up is not None else 1) + self.up.bias
        h = act("silu", parts[self.up.slices["gate"]]) * parts[self.up.slices["up"]]
        self.hidden = h
        return x[0, :D] + w[1][:D] @ (h * only(F, down)) * (scale if down is not None else 1) + self.down.bias[:D]

    def input(self, x: np.ndarray) -> np.ndarray:
        return norm_rms(x[0, :D], self.weight, EPS)


def only(n: int, channels: np.ndarray | None) -> np.ndarray:
    mask = np.zeros(n) if channels is not None else np.ones(n)
    if channels is not None:
        mask[channels] = 1
    return mask


def slot(
    n: int,
    norms: np.ndarray | None = None,
    block: int = 1,
    pick: str = "top",
    amount: float = K,
    temp: float = 0.5,
    duty: int = 1,
    seed: bool = False,
    renorm: bool = False,
    guess: float = 0.0,
) -> _core.KwtaInput:
    return _core.KwtaInput(n, norms, block, pick, amount, temp, duty, seed, renorm, guess)


def near(got: np.ndarray, want: np.ndarray, within: float = 1e-4) -> None:
    got = got.reshape(-1)[:D]
    assert np.abs(got - want).max() <= within * np.abs(want).max()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("quant", QUANTS)
def test_all_channels_are_dense_bit_for_bit(level, threads, quant, tokens):
    for rule in ({"amount": 10**6}, {"pick": "above", "amount": 0.0}, {"block": 16, "amount": 5}):
        half = Half(quant, rule, rule)
        if tokens > 1 and rule == {"pick": "above", "amount": 0.0}:
            continue
        assert np.array_equal(half.run(stream(tokens), 0, _core.LayerState())[0], half.run(stream(tokens))[0])


@pytest.mark.parametrize("quant", QUANTS)
def test_only_winners_count(level, threads, quant):
    x = stream(1)
    half = Half(quant, {"amount": K})
    near(half.run(x, 0, _core.LayerState())[0], half.want(x, top(np.abs(half.input(x)), K), None), 2e-4)
    half = Half(quant, None, {"amount": K})
    half.want(x, None, None)
    near(half.run(x, 0, _core.LayerState())[0], half.want(x, None, top(np.abs(half.hidden), K)), 2e-4)


@pytest.mark.parametrize(
    ("rule", "channels"),
    [
        ({"norms": np.linspace(0, 1, D, dtype=np.float32)}, lambda s: top(s * np.linspace(0, 1, D), K)),
        ({"block": 16, "amount": 2}, lambda s: top(s, 2, 16)),
        ({"pick": "above", "amount": 0.7}, lambda s: np.flatnonzero(s >= 0.7)),
        ({"pick": "mass", "amount": 0.8}, lambda s: fewest(s**2, 0.8)),
        ({"pick": "mass", "amount": 0.8, "temp": 1.0}, lambda s: fewest(s, 0.8)),
        ({"pick": "near", "guess": 0.7}, lambda s: top(s, K)),
    ],
    ids=lambda v: "" if callable(v) else " ".join(f"{k}={w}" for k, w in v.items() if k != "norms"),
)
def test_rules(level, rule, channels):
    half, x = Half(up=rule), stream(1)
    near(half.run(x, 0, _core.LayerState())[0], half.want(x, channels(np.abs(half.input(x))), None))


def fewest(weights: np.ndarray, share: float) -> np.ndarray:
    order = np.argsort(-weights)
    count = int(np.searchsorted(np.cumsum(weights[order]), share * weights.sum())) + 1
    return np.sort(order[:count])


def test_renorm(level):
    half, x = Half(up={"renorm": True}), stream(1)
    near(half.run(x, 0, _core.LayerState())[0], half.want(x, top(np.abs(half.input(x)), K), None, D / K))


@pytest.mark.parametrize("quant", QUANTS)
def test_bytes_counted_are_bytes_of_winners(level, quant):
    half = Half(quant, {"amount": K}, {"amount": 30})
    _, read = half.run(stream(1), 0, _core.LayerState())
    counts = [s.counts() for s in half.slots]
    per_channel = [(m.nbytes - m.bias.nbytes) // m.ic for m in (half.up, half.down)]
    assert [c["bytes_read"] for c in counts] == [K * per_channel[0], 30 * per_channel[1]]
    assert [c["bytes_skipped"] for c in counts] == [(D - K) * per_channel[0], (F - 30) * per_channel[1]]
    assert read == sum(c["bytes_read"] for c in counts)
    assert [(c["steps"], c["channels"], c["kept"]) for c in counts] == [(1, D, K), (1, F, 30)]


@pytest.mark.parametrize("seed", [False, True])
@pytest.mark.parametrize("duty", [1, 4])
@pytest.mark.parametrize("renorm", [False, True])
def test_many_tokens_give_what_they_give_one_by_one(level, threads, seed, duty, renorm):
    rule = {"duty": duty, "seed": seed, "renorm": renorm}
    together, single, x = Half(up=rule, down=rule), Half(up=rule, down=rule), stream(9)
    state = _core.LayerState()
    rows = [single.run(x[t : t + 1], 3 + t, state)[0] for t in range(9)]
    found, _ = together.run(x, 3, _core.LayerState())
    np.testing.assert_allclose(found[:, :D], np.concatenate(rows)[:, :D], rtol=1e-4, atol=1e-4)
    ours, theirs = ([s.counts() for s in h.slots] for h in (together, single))
    assert [[c[k] for k in ("steps", "channels", "kept", "held")] for c in ours] == [
        [c[k] for k in ("steps", "channels", "kept", "held")] for c in theirs
    ]


def test_winners_are_held_for_duty_steps(level):
    half, state = Half(up={"duty": 4}), _core.LayerState()
    first, second, third = stream(1), stream(1) * 0.9 + normal(1, 64, seed=5), stream(1) + normal(1, 64, seed=6)
    held = top(np.abs(half.input(first)), K)
    half.run(first, 4, state)
    near(half.run(second, 5, state)[0], half.want(second, held, None))
    copy = state.clone()
    assert copy.nbytes > 0
    near(half.run(third, 8, state)[0], half.want(third, top(np.abs(half.input(third)), K), None))
    near(half.run(third, 6, copy)[0], half.want(third, held, None))
    copy.trim(5)  # position 4, where they were chosen, is still there
    near(half.run(second, 5, copy)[0], half.want(second, held, None))
    copy.trim(4)
    near(half.run(second, 5, copy)[0], half.want(second, top(np.abs(half.input(second)), K), None))
    assert half.slots[0].counts()["held"] == 3


def test_a_text_goes_on_under_other_settings(level):
    """Winners that nobody held are not mistaken for held ones."""
    state, x = _core.LayerState(), stream(1)
    Half(up={}).run(x, 15, state)
    later = Half(up={"duty": 4})
    near(later.run(x, 17, state)[0], later.want(x, top(np.abs(later.input(x)), K), None))


def test_the_seed_form_is_dense_in_between(level):
    half, state = Half(up={"duty": 3, "seed": True}), _core.LayerState()
    x = stream(1)
    near(half.run(x, 3, state)[0], half.want(x, top(np.abs(half.input(x)), K), None))
    assert np.array_equal(half.run(x, 4, state)[0], half.run(x)[0])


def test_flicker(level):
    half, state = Half(up={}), _core.LayerState()
    a, b = stream(1), -stream(1)  # the same magnitudes: the same winners
    for past in range(33):
        half.run(a if past % 2 else b, past, state)
    assert half.slots[0].counts() | {"changed": 0.0, "compared": 2.0} == half.slots[0].counts()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("place", [0, 1])
def test_a_planted_nan_is_caught(level, tokens, place):
    half = Half("int8", {"amount": K} if place == 0 else None, {"amount": K} if place == 1 else None)
    half.slots[place].plant = True
    x = stream(tokens)
    found, _ = half.run(x, 0, _core.LayerState())
    dense, _ = half.run(x)
    assert np.array_equal(found, dense) and half.slots[place].nonfinite == 1
    assert not np.array_equal(half.run(x, 0, _core.LayerState())[0], dense)


def test_switched_off_or_without_state_it_is_dense(level):
    half, x = Half(up={"amount": K}), stream(1)
    dense = half.run(x)[0]
    half.slots[0].on = False
    assert np.array_equal(half.run(x, 0, _core.LayerState())[0], dense)
    half.slots[0].on = True
    assert not np.array_equal(half.run(x, 0, _core.LayerState())[0], dense)


def test_a_tap_keeps_what_came_by(level):
    half, x = Half(), stream(3)
    tap = _core.Tap(D)
    half.mlp.use(tap, None, None)
    dense = half.run(x)[0]
    assert np.array_equal(half.run(x, 0, _core.LayerState())[0], dense)
    half.run(x[:1], 0, _core.LayerState())
    seen = tap.take()
    assert seen.shape == (4, D) and np.array_equal(seen[0], seen[3])
    np.testing.assert_allclose(seen[0], half.input(x[:1]), rtol=1e-5)
    assert tap.take().shape == (0, D)


@pytest.mark.parametrize("quant", QUANTS)
def test_norms(level, threads, quant):
    for m in (Half(quant).up, Half(quant).down):
        out = np.empty(m.ic, np.float32)
        m.core.norms(out)
        want = np.sqrt((linear.unpack(quant, m.data, m.scales).astype(np.float64) ** 2).sum(axis=0))
        np.testing.assert_allclose(out, want, rtol=1e-5)
    with pytest.raises(ValueError):
        m.core.norms(np.empty(m.ic + 1, np.float32))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: slot(0),
        lambda: slot(8, block=0),
        lambda: slot(8, duty=0),
        lambda: slot(8, norms=np.ones(7, np.float32)),
        lambda: slot(8, pick="best"),
        lambda: slot(8, pick="near"),
        lambda: slot(8, amount=-1),
        lambda: slot(8, temp=0),
        lambda: Half().mlp.use(slot(D + 1), None, None),
        lambda: Half().mlp.use(None, slot(F + 1), None),
    ],
)
def test_wrong_slots_are_refused(wrong):
    with pytest.raises(ValueError):
        wrong()
