"""The gate-first MLP: neurons win by act(gate), the others are not read; all of them are dense bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_block import EPS, D, F, normal, packed, stream
from reference import linear, neurons
from reference.rows import act, norm_rms

from ralo import _core
from ralo.matrix import Matrix

QUANTS = ("f32", "bf16", "int8", "int4")
K = 20
NORMS = np.random.default_rng(3).random(F).astype(np.float32)


class Half:
    """An MLP with a slot for neurons, and what it should give."""

    def __init__(self, quant: str = "f32", name: str = "silu", bias: bool = True, **slot: object) -> None:
        self.weight, self.name = normal(D, seed=9), name
        self.up = packed({"gate": normal(F, D, seed=1) * 0.3, "up": normal(F, D, seed=2) * 0.3}, quant)
        self.down = packed({"down": normal(D, F, seed=8) * 0.3}, quant)
        if not bias:
            self.up, self.down = (Matrix(quant, m.ic, m.parts, m.data, m.scales, None) for m in (self.up, self.down))
        self.mlp = _core.Mlp(_core.Norm(self.weight, None, EPS), self.up.core, self.down.core, F, True, name)
        self.slot = slot_of(self.up, **slot)
        self.mlp.use(None, None, self.slot)

    def run(self, x: np.ndarray, past: int = 0, state: _core.LayerState | None = None) -> tuple[np.ndarray, int]:
        y = x.copy()
        return y, self.mlp.run(y, past, True, state)

    def gated(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """act(gate) and up of one token (1, D padded)."""
        dense = linear.unpack(self.up.quant, self.up.data, self.up.scales)
        bias = 0 if self.up.bias is None else self.up.bias
        parts = (dense @ norm_rms(x[0, :D], self.weight, EPS)) + bias
        return parts[self.up.slices["gate"]], parts[self.up.slices["up"]]

    def winners(self, x: np.ndarray, k: int, norms: np.ndarray | None = None, block: int = 1) -> np.ndarray:
        a = act(self.name, self.gated(x)[0])
        return neurons.top(np.abs(a * (1 if norms is None else norms)), k, block)

    def want(self, x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        dense = linear.unpack(self.down.quant, self.down.data, self.down.scales)[:D]
        bias = 0 if self.down.bias is None else self.down.bias[:D]
        return x[0, :D] + dense @ neurons.hidden(self.name, *self.gated(x), chosen) + bias


def slot_of(
    up: Matrix,
    norms: np.ndarray | None = None,
    block: int = 1,
    pick: str = "top",
    amount: float = K,
    duty: int = 1,
    seed: bool = False,
    zeros: bool = False,
) -> _core.KwtaMlp:
    data, scales = _core.neuron_rows(up.core, up.slices["up"].start, up.parts["up"])
    rest = (norms, block, pick, amount, 1.0, duty, seed, zeros)
    return _core.KwtaMlp(up.quant, up.ic, up.parts["up"], data, scales, *rest)


def near(got: np.ndarray, want: np.ndarray, within: float = 1e-4) -> None:
    got, want = got.reshape(-1)[:D], want.reshape(-1)[:D]
    assert np.abs(got - want).max() <= within * np.abs(want).max()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("quant", QUANTS)
def test_all_neurons_are_dense_bit_for_bit(level, threads, quant, tokens):
    for slot in ({"amount": F}, {"pick": "above", "amount": 0.0}, {"block": 16, "amount": 5}):
        half = Half(quant, **slot)
        assert np.array_equal(half.run(stream(tokens), 0, _core.LayerState())[0], half.run(stream(tokens))[0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quant", QUANTS)
def test_winners_alone_are_computed(level, threads, quant, bias):
    x = stream(1)
    for slot in ({}, {"norms": NORMS}, {"norms": NORMS, "block": 8}):
        block = slot.get("block", 1)
        half = Half(quant, bias=bias, amount=K // block, **slot)
        got, dense = half.run(x, 0, _core.LayerState())[0], half.run(x)[0]
        near(got, half.want(x, half.winners(x, K // block, **slot)))
        assert np.abs(got - dense).max() > 0.1


@pytest.mark.parametrize("quant", QUANTS)
def test_zeros_are_dropped_without_loss(level, quant):
    """Of a relu about half the neurons are zero: they are not read, and the result is the dense one."""
    x, half = stream(1), Half(quant, "relu", pick="above", amount=0.0, zeros=True)
    got, _ = half.run(x, 0, _core.LayerState())
    near(got, half.run(x)[0])
    open_ = int((half.gated(x)[0] > 0).sum())
    assert half.slot.counts()["kept"] == open_ < F
    assert half.slot.counts()["bytes_read"] == open_ * sum(sizes(half))


@pytest.mark.parametrize("slot", [{}, {"duty": 4}, {"duty": 3, "seed": True}, {"zeros": True}], ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_many_tokens_are_as_one_by_one(level, quant, slot):
    half, x, state = Half(quant, "relu", **slot), stream(9), _core.LayerState()
    together, _ = half.run(x, 2, _core.LayerState())
    counts, before = half.slot.counts(), Half(quant, "relu", **slot)
    alone = np.stack([before.run(x[t : t + 1], 2 + t, state)[0].reshape(-1)[:D] for t in range(9)])
    together = together.reshape(9, -1)[:, :D]
    off = np.abs(alone - together) / np.abs(together).max(axis=1, keepdims=True)
    # Each rounds to 16 bits on its own: all are near, the farthest of so many is what it happens to be.
    assert np.sqrt((off**2).mean()) < 3e-5 and off.max() < 2e-4
    one_by_one = before.slot.counts()
    assert all(counts[name] == one_by_one[name] for name in ("steps", "channels", "kept", "held"))
    assert counts["bytes_read"] == counts["bytes_skipped"] == 0 < one_by_one["bytes_read"]


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_planted_nan_is_caught(level, tokens):
    half, x, state = Half("int8"), stream(tokens), _core.LayerState()
    clean = half.run(x, 0, state)[0]
    half.slot.plant = True
    got, read = half.run(x, 0, state)
    assert np.array_equal(got, half.run(x)[0]) and half.slot.nonfinite == 1 and not half.slot.plant
    assert read > half.run(x)[1]
    assert np.array_equal(half.run(x, 0, state)[0], clean) and half.slot.nonfinite == 1


# ---------------------------------------------------------------- counts


def sizes(half: Half) -> tuple[int, int]:
    """Bytes of a neuron in up, and in down."""
    down = half.down
    return neurons.neuron_bytes(down.quant, D), down.data[0].nbytes + (
        0 if down.scales is None else down.scales[0].nbytes
    )


def gate_bytes(half: Half) -> int:
    return (half.up.data.nbytes + (0 if half.up.scales is None else half.up.scales.nbytes)) // 2


@pytest.mark.parametrize("quant", QUANTS)
def test_counts_are_the_bytes_read(level, quant):
    half, state = Half(quant), _core.LayerState()
    reads = [half.run(stream(1), t, state)[1] for t in range(3)]
    counts = half.slot.counts()
    assert counts["bytes_read"] == 3 * K * sum(sizes(half))
    assert counts["bytes_skipped"] == 3 * half.run(stream(1))[1] - sum(reads), "what dense reads more"
    assert sum(reads) == 3 * gate_bytes(half) + counts["bytes_read"]
    assert (counts["steps"], counts["channels"], counts["kept"]) == (3, 3 * F, 3 * K)


def test_dense_steps_of_seed_read_the_gate_once(level):
    half, state = Half("int8", duty=2, seed=True), _core.LayerState()
    dense = half.run(stream(1))[1]
    sparse, between = (half.run(stream(1), t, state)[1] for t in (0, 1))
    assert sparse < dense == between
    assert half.slot.counts()["bytes_read"] == (F + K) * sum(sizes(half))


def test_a_slot_in_front_of_down_takes_the_winners(level):
    half, x, tap = Half("int8"), stream(1), _core.Tap(F)
    half.mlp.use(None, tap, half.slot)
    got, read = half.run(x, 0, _core.LayerState())
    (h,) = tap.take()
    chosen = half.winners(x, K)
    assert np.array_equal(np.flatnonzero(h), chosen)
    np.testing.assert_allclose(h, neurons.hidden("silu", *half.gated(x), chosen), atol=1e-3)
    near(got, half.want(x, chosen))
    up, _ = sizes(half)
    assert half.slot.counts()["bytes_read"] == K * up
    assert half.slot.counts()["bytes_skipped"] == gate_bytes(half) - K * up  # up is as large as the gate
    assert read == gate_bytes(half) + K * up + F * sizes(half)[1]


# ---------------------------------------------------------------- state


def test_winners_are_held_and_survive_clone_and_trim(level):
    half, state = Half(duty=4), _core.LayerState()
    first, second, third = (stream(9)[t : t + 1] for t in range(3))
    held = half.winners(first, K)
    half.run(first, 4, state)
    near(half.run(second, 5, state)[0], half.want(second, held))
    assert half.slot.counts()["held"] == 1 and state.nbytes >= 4 * K

    copy = state.clone()
    half.run(third, 8, state)  # chooses anew; the copy still has the winners of position 4
    near(half.run(second, 9, state)[0], half.want(second, half.winners(third, K)))
    near(half.run(second, 6, copy)[0], half.want(second, held))

    copy.trim(5)  # position 4 is still there
    near(half.run(second, 5, copy)[0], half.want(second, held))
    before = half.slot.counts()["held"]
    copy.trim(4)
    near(half.run(second, 5, copy)[0], half.want(second, half.winners(second, K)))
    assert half.slot.counts()["held"] == before


def test_where_nobody_wins_only_the_bias_is_added(level):
    half, x = Half(pick="above", amount=1e30), stream(1)
    near(half.run(x, 0, _core.LayerState())[0], half.want(x, np.empty(0, np.int64)))


# ---------------------------------------------------------------- refusals


def test_slots_that_do_not_fit_are_refused():
    half, norm = Half("int8"), _core.Norm(normal(D), None, EPS)
    plain = packed({"up": normal(F, D)}, "int8")
    other = packed({"gate": normal(F, D + 1), "up": normal(F, D + 1)}, "int8")
    narrow = packed({"gate": normal(F - 1, D), "up": normal(F - 1, D)}, "int8")
    data, scales = _core.neuron_rows(half.up.core, 128, F)
    rest = (1, "top", K, 1.0, 1, False, False)
    ungated = _core.Mlp(norm, plain.core, half.down.core, F, False, "silu")
    cases = [
        ("has none", lambda: ungated.use(None, None, half.slot)),
        ("another shape", lambda: half.mlp.use(None, None, slot_of(other))),
        ("another shape", lambda: half.mlp.use(None, None, slot_of(narrow))),
        ("another precision", lambda: half.mlp.use(None, None, Half("int4").slot)),
        ("data must be", lambda: _core.KwtaMlp("int8", D, F + 1, data, scales, None, *rest)),
        ("data must be", lambda: _core.KwtaMlp("int8", D + 64, F, data, scales, None, *rest)),
        ("have scales", lambda: _core.KwtaMlp("int8", D, F, data, None, None, *rest)),
        ("scales must be", lambda: _core.KwtaMlp("int8", D, F, data, scales[:1], None, *rest)),
        ("norms must be", lambda: _core.KwtaMlp("int8", D, F, data, scales, NORMS[1:], *rest)),
        ("must be positive", lambda: _core.KwtaMlp("int8", D, F, data, scales, None, 0, *rest[1:])),
        ("pick must be", lambda: _core.KwtaMlp("int8", D, F, data, scales, None, 1, "best", *rest[2:])),
    ]
    for message, case in cases:
        with pytest.raises(ValueError, match=message):
            case()
