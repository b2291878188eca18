"""Gate first where a neuron wins by its own gate: one region of the pool, slices of neurons, the gate by its rows or by
channels; the same bits whatever the number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_block import EPS, normal, packed
from reference import linear, neurons
from reference.rows import act, norm_rms

from ralo import _core

D, F = 96, 600  # three slices, the last of which is not whole
QUANTS = ("f32", "bf16", "int8", "int4")


class Sliced:
    """A ReLU MLP whose slot skips silent neurons, and what it should give."""

    def __init__(self, quant: str, by_rows: bool, least: float = 1e-30) -> None:
        self.weight = normal(D, seed=9)
        rows = {"gate": normal(F, D, seed=1) * 0.3, "up": normal(F, D, seed=2) * 0.3}
        self.up, self.down = packed(rows, quant), packed({"down": normal(D, F, seed=8) * 0.3}, quant)
        self.mlp = _core.Mlp(_core.Norm(self.weight, None, EPS), self.up.core, self.down.core, F, True, "relu")
        self.rows = [_core.neuron_rows(self.up.core, self.up.slices[part].start, F) for part in ("up", "gate")]
        gate = self.rows[1] if by_rows else (None, None)
        rest = (None, 1, "above", least, 1.0, 1, False, True, None)
        self.slot = _core.KwtaMlp(quant, D, F, *self.rows[0], *rest, *gate)
        self.mlp.use(None, None, self.slot)

    def run(self, x: np.ndarray, past: int = 0, state: _core.LayerState | None = None) -> tuple[np.ndarray, int]:
        y = x.copy()
        return y, self.mlp.run(y, past, True, state)

    def hidden(self, x: np.ndarray, least: float = 0.0) -> np.ndarray:
        """act(gate) * up of one token, zero where a gate is not above `least`."""
        both = linear.unpack(self.up.quant, self.up.data, self.up.scales) @ norm_rms(x[0, :D], self.weight, EPS)
        both = both + self.up.bias
        a = act("relu", both[self.up.slices["gate"]])
        return np.where(a > least, a * both[self.up.slices["up"]], 0)

    def want(self, x: np.ndarray, least: float = 0.0) -> np.ndarray:
        down = linear.unpack(self.down.quant, self.down.data, self.down.scales)[:D]
        return x[0, :D] + down @ self.hidden(x, least) + self.down.bias[:D]


def token(seed: int = 5) -> np.ndarray:
    x = np.zeros((1, (D + 63) // 64 * 64), np.float32)
    x[0, :D] = normal(D, seed=seed)
    return x


def near(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got[0, :D] - want).max() <= 2e-4 * np.abs(want).max()


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("quant", QUANTS)
def test_silent_neurons_are_left_out_without_loss(level, quant, by_rows):
    half, x = Sliced(quant, by_rows), token()
    got, read = half.run(x, 0, _core.LayerState())
    near(got, half.want(x))
    near(got, half.run(x)[0][0, :D])
    counts, loud = half.slot.counts(), np.count_nonzero(half.hidden(x))
    assert counts["kept"] == loud < F == counts["channels"]
    per = (
        neurons.neuron_bytes(quant, D),
        half.down.data[0].nbytes + (0 if half.down.scales is None else half.down.scales[0].nbytes),
    )
    assert counts["bytes_read"] == loud * sum(per) < read
    assert counts["bytes_skipped"] == half.run(x)[1] - read > 0


@pytest.mark.parametrize("by_rows", [False, True])
def test_the_number_of_threads_changes_no_bit(level, by_rows):
    before, got = _core.threads(), []
    for n in (1, 2, 3, 5):
        _core.set_threads(n)
        got.append(Sliced("int8", by_rows).run(token(), 0, _core.LayerState())[0])
    _core.set_threads(before)
    assert all(np.array_equal(got[0], other) for other in got[1:])


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_bound_leaves_out_quiet_neurons_too(level, by_rows):
    half, x = Sliced("f32", by_rows, least=0.4), token()
    near(half.run(x, 0, _core.LayerState())[0], half.want(x, 0.4))
    assert half.slot.counts()["kept"] == np.count_nonzero(half.hidden(x, 0.4)) < np.count_nonzero(half.hidden(x))


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("at", ["plant", "input"])
def test_what_is_not_finite_is_computed_again_densely(level, by_rows, at):
    half, x = Sliced("int8", by_rows), token()
    if at == "plant":
        half.slot.plant = True
    else:
        x[0, 3] = np.inf
    got, _ = half.run(x, 0, _core.LayerState())
    assert half.slot.nonfinite == 1 and not half.slot.plant
    assert np.array_equal(got, half.run(x)[0], equal_nan=True)


def test_how_much_winners_change_is_looked_at(level):
    half, state = Sliced("int8", True), _core.LayerState()
    for position in range(33):
        half.run(token(position), position, state)
    counts = half.slot.counts()
    assert counts["compared"] == 2 and 0.2 < counts["changed"] / counts["compared"] < 0.8


def test_a_slot_in_front_chooses_what_the_gate_sees(level):
    """The gate sees some channels, `up` and `down` all: as dense with a gate of those channels."""
    half, x = Sliced("f32", True), token()
    norms = np.ones(D, np.float32)
    half.mlp.use(_core.KwtaInput(D, norms, 1, "top", D // 2, 1.0, 1, False, False), None, half.slot)
    got, _ = half.run(x, 0, _core.LayerState())
    seen = norm_rms(x[0, :D], half.weight, EPS)
    some = np.where(np.abs(seen) >= np.sort(np.abs(seen))[-(D // 2)], seen, 0)
    weights = linear.unpack("f32", half.up.data, half.up.scales)
    gate = (weights @ some + half.up.bias)[half.up.slices["gate"]]
    up = (weights @ seen + half.up.bias)[half.up.slices["up"]]
    down = linear.unpack("f32", half.down.data, half.down.scales)[:D]
    near(got, x[0, :D] + down @ (act("relu", gate) * up) + half.down.bias[:D])


def test_rows_of_a_gate_need_neurons_that_win_by_themselves():
    half = Sliced("int8", True)
    with pytest.raises(ValueError, match="wins by its own gate"):
        _core.KwtaMlp("int8", D, F, *half.rows[0], None, 1, "top", 5, 1.0, 1, False, True, None, *half.rows[1])
