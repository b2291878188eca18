"""Streams a text through a model once per question: what its inputs look like, what skipping at each place costs in
quality, and how long each place takes on this CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ralo import _core, timing
from ralo.lm import LM
from ralo.matrix import HALVED, QUANTS, Matrix
from ralo.memory import Arena
from ralo.modes.base import LayerSlots
from ralo.modes.guess import acts
from ralo.modes.share import FINE
from ralo.profile import Guess, Place, Profile, fingerprint
from ralo.quality import divergence, log_probs, scores
from ralo.remake.values import values
from ralo.tt.lowrank import Weighed
from ralo.weights import PLACES

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Progress = Callable[[float], None]

# Shares at which the cost in quality is measured: places that bear much are asked for less.
LEVELS = {"qkv": (0.45, 0.65, 0.85), "o": (0.25, 0.45, 0.7), "up": (0.45, 0.65, 0.85), "down": (0.25, 0.45, 0.7)}
SCORE_BITS = 17  # of a float's 31, the lower ones that a histogram of scores leaves out: 1.6 % of a value
QUANTILES = 257
WINNER_TOKENS = 512
INPUT_TOKENS = 128  # of the whole text: its first pages are not like the rest
GUESS_RANK = 256  # of factors that guess a gate, at most
CTX = 512  # tokens of a window: enough context, and little attention


@dataclass
class Seen:
    """Running statistics of one place."""

    norms: F32
    total: NDArray[np.float64]
    square: NDArray[np.float64]
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1 << (31 - SCORE_BITS), np.int64))
    rows: int = 0

    def add(self, x: F32) -> None:
        self.total += x.sum(axis=0, dtype=np.float64)
        self.square += np.square(x, dtype=np.float64).sum(axis=0)
        bits = np.abs(x * self.norms).view(np.uint32) >> SCORE_BITS
        self.histogram += np.bincount(bits.reshape(-1), minlength=len(self.histogram))
        self.rows += len(x)

    def quantiles(self) -> F32:
        edges = (np.arange(len(self.histogram), dtype=np.uint32) << SCORE_BITS).view(np.float32)
        below = np.cumsum(self.histogram) / max(1, self.histogram.sum())
        used = np.flatnonzero(self.histogram)
        out: F32 = np.interp(np.linspace(0, 1, QUANTILES), below[used], edges[used]).astype(np.float32)
        return out

    def moments(self) -> F32:
        return np.array([self.total, self.square], np.float32) / np.float32(max(1, self.rows))


def calibrate(lm: LM, tokens: Sequence[int], often: int = 2048, progress: Progress | None = None) -> Profile:
    """A profile from tokens of ordinary text; the first `often` of them are run many times, with less and less read."""
    before = lm.model.slots, lm.model.modes_in_prefill
    try:
        seen, mlps = _watch(lm, tokens)
        kl = _sensitivity(lm, tokens[: often + 1], {key: s.norms for key, s in seen.items()}, progress)
        places = {key: Place(s.norms, s.moments(), s.quantiles(), *kl[key]) for key, s in seen.items()}
        guesses = {layer: guess for layer, moments in mlps.moments.items() if (guess := gate_guess(lm, layer, moments))}
        profile = Profile(
            fingerprint(lm.model.weights), len(tokens) - 1, places, winners=mlps.winners, gates=mlps.gates,
            inputs=mlps.inputs, guesses=guesses,
        )  # fmt: skip
        found = timing.seconds(lm, profile, tokens)
        head = timing.head_seconds(lm, tokens)
    finally:
        lm.model.use(*before)
    return replace(profile, seconds=found.whole, halved=found.halved, tiled=found.tiled, head=head)


@dataclass
class Mlps:
    """What was seen of every layer's MLP."""

    every: int  # tokens, of which one is kept as it came in
    winners: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    gates: dict[int, F32] = field(default_factory=dict)
    inputs: dict[int, F32] = field(default_factory=dict)
    moments: dict[int, F64] = field(default_factory=dict)  # layer -> (D, D): sum of x x^T, where there is a gate

    def see_input(self, lm: LM, layer: int, x: F32, past: int) -> None:
        if lm.model.cfg.gated:
            self.moments[layer] = self.moments.get(layer, 0.0) + (x.T @ x).astype(np.float64)
        if layer not in self.gates:
            self.gates[layer], self.inputs[layer] = _gates(lm, layer, x), np.empty((0, x.shape[1]), np.float32)
        kept = x[-past % self.every :: self.every]
        self.inputs[layer] = np.concatenate([self.inputs[layer], kept])[:INPUT_TOKENS]

    def see_neurons(self, layer: int, strength: F32) -> None:
        known = self.winners.get(layer)
        if known is None or len(known) < WINNER_TOKENS:
            bits = np.packbits(strength > np.median(strength, axis=1, keepdims=True), axis=1)
            self.winners[layer] = bits if known is None else np.concatenate([known, bits])[:WINNER_TOKENS]


def _watch(lm: LM, tokens: Sequence[int]) -> tuple[dict[tuple[int, str], Seen], Mlps]:
    model, seen, taps = lm.model, {}, {}
    for i, layer in enumerate(model.weights.layers):
        for place in PLACES:
            matrix: Matrix = getattr(layer, place)
            norms = np.empty(matrix.ic, np.float32)
            matrix.core.norms(norms)
            seen[i, place] = Seen(norms, np.zeros(matrix.ic), np.zeros(matrix.ic))
            taps[i, place] = _core.Tap(matrix.ic)
    model.use(_slots(len(model.layers), taps))
    mlps = Mlps((len(tokens) - 1) // INPUT_TOKENS | 1)  # odd: first tokens of windows are like no others
    for _ in scores(model, tokens, min(CTX, model.cfg.max_context), lm.kv, exact=False):
        for (i, place), tap in taps.items():
            x = tap.take()
            if place == "up":
                mlps.see_input(lm, i, x, seen[i, place].rows)
            seen[i, place].add(x)
            if place == "down":
                mlps.see_neurons(i, np.abs(x) * seen[i, place].norms)
    return seen, mlps


def _gates(lm: LM, layer: int, x: F32) -> F32:
    """Quantiles of |act(gate)| of one layer for inputs (T, D); of an MLP without a gate, of its only activation."""
    up = lm.model.weights.layers[layer].up
    gate = up(x)[:, up.slices["gate" if lm.model.cfg.gated else "up"]]
    found: F32 = np.quantile(np.abs(acts(lm.model.cfg.act, gate)), np.linspace(0, 1, QUANTILES)).astype(np.float32)
    return found


def gate_guess(lm: LM, layer: int, moments: F64) -> Guess | None:
    """Factors of a layer's gate, weighed by second moments (D, D) of its inputs; smaller ranks are their first columns
    and rows. None: the weights are not stored as such, or two factors of it are never the smaller ones."""
    up, f = lm.model.weights.layers[layer].up, lm.model.cfg.d_ff
    rank = min(GUESS_RANK, up.ic * f // (2 * (up.ic + f)))
    if up.quant not in QUANTS or rank < 1:
        return None
    gate = values(up.quant, up.data, up.scales)[:, up.slices["gate"]]
    first, second = Weighed.leading(gate, moments).factors(rank)
    return first.astype(np.float16), second.astype(np.float16)


def _slots(layers: int, inputs: Mapping[tuple[int, str], _core.Input]) -> list[LayerSlots]:
    out = [LayerSlots() for _ in range(layers)]
    for (i, place), slot in inputs.items():
        out[i].put(place, slot, "calibrate", "")
    return out


def _sensitivity(
    lm: LM, tokens: Sequence[int], norms: dict[tuple[int, str], F32], progress: Progress | None
) -> dict[tuple[int, str], tuple[F32, F32]]:
    """Mean KL from dense with one place of one layer reading only a share of its channels; and half of the bits of
    most of them, where weights are int8."""
    model, far = lm.model, Far(lm, tokens)
    out = {}
    for done, ((i, place), norm) in enumerate(norms.items()):
        row = []
        for share in LEVELS[place]:
            k = max(1, round(share * len(norm)))
            slot = _core.KwtaInput(len(norm), norm, 1, "top", k, 1.0, 1, False, False)
            model.use(_slots(len(model.layers), {(i, place): slot}))
            row.append(far.kl())
        half = []
        matrix: Matrix = getattr(model.weights.layers[i], place)
        if matrix.quant == HALVED:
            tiles = _core.KwtaTiles(len(norm), norm, matrix.tiles(Arena()), max(1, round(FINE * len(norm))))
            model.use(_slots(len(model.layers), {(i, place): tiles}))
            half.append(far.kl())
        out[i, place] = np.array([LEVELS[place], row], np.float32), np.array(half, np.float32)
        if progress:
            progress((done + 1) / len(norms))
    return out


class Far:
    """How far a model with modes is from dense on a text; dense is run once."""

    def __init__(self, lm: LM, tokens: Sequence[int]) -> None:
        self.lm, self.tokens = lm, tokens
        self.dense = [log_probs(s).astype(np.float16) for s in self._scores(dense=True)]

    def kl(self) -> float:
        """Mean KL of the slots that are filled now."""
        pairs = zip(self.dense, self._scores(), strict=True)
        total = sum(float(divergence(p.astype(np.float32), log_probs(s)).sum()) for p, s in pairs)
        return total / (len(self.tokens) - 1)

    def _scores(self, dense: bool = False) -> Iterator[F32]:
        model, ctx = self.lm.model, min(CTX, self.lm.model.cfg.max_context)
        return (s for _, _, s in scores(model, self.tokens, ctx, self.lm.kv, exact=False, dense=dense))
