"""A gated relu MLP whose gate is mostly shut, at a shape of its own: zero skipping beside guessed gates.

Random int8 weights; a negative bias of the gate sets the share of active neurons. Layers are more than fit a cache.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.matrix import Matrix
from ralo.modes.statepack import RECALL, Rows, gate_slack

F32 = NDArray[np.float32]
OUT_OF_CACHE = 128 << 20  # bytes
TOKENS = 12
SPREAD = 30  # standard deviation of the stored weights
STEP = 2.0**-11  # a weight is a stored value times this
Slot = _core.PackMlp | _core.KwtaMlp | None


@dataclass
class Layer:
    up: Matrix
    down: Matrix
    mlp: _core.Mlp
    rows: Rows  # of up
    gate: Rows
    codes: tuple[NDArray[np.uint64], F32]

    @property
    def gate_bias(self) -> F32:
        assert self.up.bias is not None
        return self.up.bias[self.up.slices["gate"]]


def layers(d: int, f: int, density: float) -> list[Layer]:
    rng = np.random.default_rng(0)
    return [layer(d, f, density, rng) for _ in range(1 + OUT_OF_CACHE // (3 * d * f))]


def layer(d: int, f: int, density: float, rng: np.random.Generator) -> Layer:
    up, down = _matrix(d, {"gate": f, "up": f}, rng), _matrix(f, {"down": d}, rng)
    mlp = _core.Mlp(_core.Norm(np.ones(d, np.float32), None, 1e-6), up.core, down.core, f, True, "relu")
    rows, gate = (_core.neuron_rows(up.core, up.slices[part].start, f) for part in ("up", "gate"))
    made = Layer(up, down, mlp, rows, gate, _core.gate_codes("int8", d, f, *gate))
    made.gate_bias[:] = -statistics.NormalDist().inv_cdf(1 - density) * SPREAD * STEP * d**0.5
    return made


def _matrix(ic: int, parts: dict[str, int], rng: np.random.Generator) -> Matrix:
    m = Matrix.empty("int8", ic, parts, bias=True)
    values = rng.standard_normal(m.data.shape, dtype=np.float32) * SPREAD
    m.data[:] = (np.clip(np.rint(values), -127, 127) + 128).astype(np.uint8)
    assert m.scales is not None
    m.scales[:] = 0x3A00  # bf16 2^-11
    return m


def inputs(d: int, tokens: int = TOKENS) -> F32:
    return np.random.default_rng(1).standard_normal((tokens, d), dtype=np.float32)


def slack_of(at: Layer, tokens: F32, recall: float = RECALL) -> float:
    """So that the guess leaves out that few of the active neurons."""
    normed = (tokens / np.sqrt(np.square(tokens).mean(axis=1, keepdims=True))).astype(np.float32)
    return gate_slack("int8", at.gate, at.codes, at.gate_bias, normed, recall)


def packed(at: Layer, slack: float | None = None, popcount: str = "lut", by_rows: bool = True) -> _core.PackMlp:
    """Zero skipping; with a slack, gates are guessed first."""
    d, f = at.up.ic, len(at.codes[1])
    guess = None if slack is None else _core.GateGuess(d, f, *at.codes, None, slack, 0.0, popcount)
    gate, scales = at.gate if by_rows else (None, None)
    return _core.PackMlp("int8", d, f, *at.rows, gate, scales, 0.0, 1.0, guess)


def measure(all_layers: list[Layer], occupants: list[Slot], tokens: F32) -> tuple[float, float]:
    """Seconds and bytes of a token and layer; the first token, which checks the guess, is left out."""
    states = [_core.LayerState() for _ in all_layers]
    for at, slot in zip(all_layers, occupants, strict=True):
        at.mlp.use(None, None, slot)
    took, read = 0.0, 0
    for t, x in enumerate(tokens):
        stream = x[None].copy()
        clock = time.perf_counter()
        here = sum(at.mlp.run(stream, t, True, state) for at, state in zip(all_layers, states, strict=True))
        if t > 0:
            took, read = took + time.perf_counter() - clock, read + here
    runs = (len(tokens) - 1) * len(all_layers)
    return took / runs, read / runs


def recall_of(slots: list[Slot]) -> float:
    """Share of the active neurons that guesses found, at the tokens that were checked."""
    counts = [slot.counts() for slot in slots if isinstance(slot, _core.PackMlp)]
    checked = sum(c["checked"] for c in counts)
    return 1 - sum(c["missed"] for c in counts) / checked if checked else 1.0
