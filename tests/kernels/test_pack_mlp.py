"""The MLP that reads active neurons only: its results, when it runs dense instead, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_block import EPS, normal, packed
from reference import linear, neurons
from reference.rows import act, norm_rms

from ralo import _core
from ralo.matrix import Matrix, padded

QUANTS = ("f32", "bf16", "int8", "int4")
D, F = 40, 600  # three tasks, the last one short
CASES = {"relu": ("relu", 0.0), "silu": ("silu", 0.2), "relu2": ("relu2", 0.0)}


class Half:
    """An MLP with a slot that skips neurons, and what it should give."""

    def __init__(
        self, quant: str = "f32", name: str = "relu", eps: float = 0.0, rho: float = 1.0,
        bias: bool = True, gate: bool = True, up: bool = True, **guess: object,
    ) -> None:  # fmt: skip
        self.weight, self.name, self.eps = normal(D, seed=9), name, eps
        self.up = packed({"gate": normal(F, D, seed=1) * 0.3, "up": normal(F, D, seed=2) * 0.3}, quant)
        self.down = packed({"down": normal(D, F, seed=8) * 0.3}, quant)
        if not bias:
            self.up, self.down = (Matrix(quant, m.ic, m.parts, m.data, m.scales, None) for m in (self.up, self.down))
        self.mlp = _core.Mlp(_core.Norm(self.weight, None, EPS), self.up.core, self.down.core, F, True, name)
        rows = (self.rows("up") if up else (None, None)) + (self.rows("gate") if gate and up else (None, None))
        self.codes = _core.gate_codes(quant, D, F, *self.rows("gate")) if guess else None
        guessed = _core.GateGuess(D, F, *self.codes, **{"offset": None, **guess}) if self.codes else None
        self.slot = _core.PackMlp(quant, D, F, *rows, eps, rho, guessed)
        self.mlp.use(None, None, self.slot)

    def rows(self, part: str) -> tuple[np.ndarray, np.ndarray | None]:
        return _core.neuron_rows(self.up.core, self.up.slices[part].start, F)

    def run(self, x: np.ndarray, past: int = 0, state: _core.LayerState | None = None) -> tuple[np.ndarray, int]:
        y = x.copy()
        return y, self.mlp.run(y, past, True, state)

    def active(self, x: np.ndarray) -> np.ndarray:
        return np.flatnonzero(np.abs(act(self.name, self.gated(x)[0])) > self.eps)

    def normed(self, x: np.ndarray) -> np.ndarray:
        return norm_rms(x[0, :D], self.weight, EPS)

    def gated(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        dense = linear.unpack(self.up.quant, self.up.data, self.up.scales)
        parts = dense @ self.normed(x) + (0 if self.up.bias is None else self.up.bias)
        return parts[self.up.slices["gate"]], parts[self.up.slices["up"]]

    def want(self, x: np.ndarray, active: np.ndarray | None = None) -> np.ndarray:
        active = self.active(x) if active is None else active
        dense = linear.unpack(self.down.quant, self.down.data, self.down.scales)[:D]
        bias = 0 if self.down.bias is None else self.down.bias[:D]
        return x[0, :D] + dense @ neurons.hidden(self.name, *self.gated(x), active) + bias

    def bytes_of(self, active: int, rows: bool = True) -> int:
        """What a packed token reads."""
        row = neurons.neuron_bytes(self.up.quant, D)
        gate = F * row if rows else stored(self.up) // 2
        return gate + active * (row + stored(self.down) // F)


def stored(m: Matrix) -> int:
    return m.data.nbytes + (0 if m.scales is None else m.scales.nbytes)


def stream(tokens: int, seed: int = 0) -> np.ndarray:
    x = np.zeros((tokens, padded(D)), np.float32)
    x[:, :D] = normal(tokens, D, seed=seed)
    return x


def clear_of(half: Half, x: np.ndarray, eps: float) -> float:
    """A bound not far from eps > 0 that no |act(gate)| of these tokens is close to: rounding then does not matter."""
    values = np.concatenate([np.abs(act(half.name, half.gated(row[None])[0])) for row in x])
    values = np.sort(values[(values > eps / 2) & (values < 2 * eps)])
    widest = int(np.argmax(np.diff(values))) if len(values) > 1 else 0
    return float(values[widest : widest + 2].mean()) if eps else eps


def near(got: np.ndarray, want: np.ndarray, within: float = 2e-4) -> None:
    got, want = got.reshape(-1)[:D], want.reshape(-1)[:D]
    assert np.abs(got - want).max() <= within * np.abs(want).max()


@pytest.mark.parametrize("rows", [{}, {"gate": False}, {"up": False}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("quant", QUANTS)
def test_active_neurons_alone_are_computed(level, quant, case, bias, rows):
    name, eps = CASES[case]
    half, x = Half(quant, name, eps, bias=bias, **rows), stream(1)
    got, dense = half.run(x, 0, _core.LayerState())[0], half.run(x)[0]
    near(got, half.want(x))
    count = len(half.active(x))
    assert half.slot.counts()["active"] == count < F
    if eps == 0:
        near(got, dense)  # nothing is lost
    else:
        assert np.abs(got - dense)[0, :D].max() > 1e-3


@pytest.mark.parametrize("quant", QUANTS)
def test_results_do_not_depend_on_threads(level, quant):
    half, x, before, found = Half(quant), stream(1), _core.threads(), []
    for threads in (1, 2, 3):
        _core.set_threads(threads)
        found.append(half.run(x, 0, _core.LayerState())[0])
    _core.set_threads(before)
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_no_gate_skips_down(level):
    up, down = packed({"up": normal(F, D, seed=1)}, "int8"), packed({"down": normal(D, F, seed=8)}, "int8")
    mlp = _core.Mlp(_core.Norm(normal(D), None, EPS), up.core, down.core, F, False, "relu")
    slot = _core.PackMlp("int8", D, F, None, None, None, None, 0.0, 1.0)
    mlp.use(None, None, slot)
    x, dense = stream(1), stream(1)
    all_, read = mlp.run(dense), mlp.run(x, 0, True, _core.LayerState())
    near(x, dense)
    assert all_ - read == slot.counts()["bytes_skipped"] > 0


# ---------------------------------------------------------------- batches, counts, guard


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("quant", QUANTS)
def test_many_tokens_are_as_one_by_one(level, quant, case):
    name, eps = CASES[case]
    x, state = stream(9), _core.LayerState()
    eps = clear_of(Half(quant, name), x, eps)
    half, alone = Half(quant, name, eps), Half(quant, name, eps)
    together, _ = half.run(x, 2, _core.LayerState())
    for t in range(9):
        near(alone.run(x[t : t + 1], 2 + t, state)[0], together[t])
    a, b = half.slot.counts(), alone.slot.counts()
    assert all(a[name] == b[name] for name in ("steps", "neurons", "active", "packed", "dense"))
    assert a["bytes_read"] == a["bytes_skipped"] == 0 < b["bytes_read"]


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("quant", QUANTS)
def test_counts_are_the_bytes_read(level, quant, rows):
    half, state, x = Half(quant, gate=rows), _core.LayerState(), stream(3)
    reads = [half.run(x[t : t + 1], t, state)[1] for t in range(3)]
    counts, dense = half.slot.counts(), half.run(x[:1])[1]
    assert reads == [half.bytes_of(len(half.active(x[t : t + 1])), rows) for t in range(3)]
    assert counts["bytes_read"] == sum(reads)
    assert counts["bytes_skipped"] == 3 * dense - sum(reads) > 0
    assert counts["active"] == sum(len(half.active(x[t : t + 1])) for t in range(3))
    assert (counts["steps"], counts["packed"], counts["neurons"]) == (3, 3, 3 * F)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_planted_nan_is_caught(level, tokens):
    half, x, state = Half("int8"), stream(tokens), _core.LayerState()
    clean = half.run(x, 0, state)[0]
    half.slot.plant = True
    got, read = half.run(x, 0, state)
    assert np.array_equal(got, half.run(x)[0]) and half.slot.nonfinite == 1 and not half.slot.plant
    assert read > half.run(x)[1]
    assert np.array_equal(half.run(x, 0, state)[0], clean) and half.slot.nonfinite == 1


@pytest.mark.parametrize("tokens", [1, 4])
def test_slots_in_front_of_the_maps_are_respected(level, tokens):
    half, x = Half("int8"), stream(tokens)
    want = half.run(x, 0, _core.LayerState())[0]
    up, down = _core.Tap(D), _core.Tap(F)
    half.mlp.use(up, down, half.slot)
    got, _ = half.run(x, 0, _core.LayerState())
    np.testing.assert_allclose(got[:, :D], want[:, :D], atol=1e-4 * np.abs(want).max())
    seen, h = up.take(), down.take()
    assert seen.shape == (tokens, D) and h.shape == (tokens, F)
    assert np.array_equal(np.flatnonzero(h[0]), half.active(x[:1]))


def test_slots_that_do_not_fit_are_refused():
    half = Half("int8")
    rows = _core.neuron_rows(half.up.core, 0, F)
    plain = packed({"up": normal(F, D)}, "int8")
    ungated = _core.Mlp(_core.Norm(normal(D), None, EPS), plain.core, half.down.core, F, False, "relu")
    none = (None, None)
    cases = [
        ("another precision", lambda: half.mlp.use(None, None, Half("int4").slot)),
        ("another shape", lambda: half.mlp.use(None, None, _core.PackMlp("int8", D, F + 1, *none, *none, 0.0, 1.0))),
        ("without a gate", lambda: ungated.use(None, None, half.slot)),
        ("data must be", lambda: _core.PackMlp("int8", D, F + 1, *rows, *none, 0.0, 1.0)),
        ("data must be", lambda: _core.PackMlp("int8", D, F, *rows, rows[0][:1], rows[1], 0.0, 1.0)),
        ("have scales", lambda: _core.PackMlp("int8", D, F, rows[0], None, *none, 0.0, 1.0)),
        ("without rows of up", lambda: _core.PackMlp("int8", D, F, *none, *rows, 0.0, 1.0)),
        ("negative", lambda: _core.PackMlp("int8", D, F, *rows, *none, -1.0, 1.0)),
        ("negative", lambda: _core.PackMlp("int8", D, F, *rows, *none, 0.0, -1.0)),
    ]
    for message, case in cases:
        with pytest.raises(ValueError, match=message):
            case()
