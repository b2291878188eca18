"""Halves of layers with a mode's weights beside the same halves dense, as they come in decoding: after all the other
weights of the model were read."""

from __future__ import annotations

import statistics
import time

import numpy as np

from ralo.lm import LM
from ralo.rope import RopeTable

PAST = 128  # tokens of context
PASSES = 4  # through all layers, a round


def speedup(lm: LM, which: str, layers: list[int], rounds: int) -> tuple[float, tuple[float, float]]:
    """Of `attention` or `mlp` of some layers with the modes that are on, over dense: median of rounds in turns, and
    the range that holds the middle half of them."""
    halves, ratios = _Halves(lm, which, layers), []
    for i in range(rounds + 1):
        dense, made = (sum(halves.seconds(on) for _ in range(PASSES)) for on in (False, True))
        if i:  # the first round warms up
            ratios.append(dense / made)
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return statistics.median(ratios), (low, high)


class _Halves:
    def __init__(self, lm: LM, which: str, layers: list[int]) -> None:
        cfg = lm.model.cfg
        self.which, self.timed, self.layers = which, layers, lm.model.layers
        self.seq, self.past = lm.new_sequence(), min(PAST, cfg.max_context - 1)
        self.seq.reserve(self.past + 1)
        rope = RopeTable(cfg.rope) if cfg.rope else None
        self.angles = rope(self.past, self.past + 1, self.past + 1) if rope else (None, None)
        width = lm.model.weights.layers[0].o.oc
        self.x = np.random.default_rng(0).standard_normal((1, width), dtype=np.float32)

    def seconds(self, on: bool) -> float:
        """Of those halves in one token's way through the model."""
        x, took, (cos, sin) = self.x.copy(), 0.0, self.angles
        for i, layer in enumerate(self.layers):
            state = self.seq.states[i] if on else None
            starts = time.perf_counter()
            layer.attention.run(x, self.seq.caches[i], self.past, cos, sin, True, state)
            between = time.perf_counter()
            layer.mlp.run(x, self.past, True, state)
            if i in self.timed:
                took += between - starts if self.which == "attention" else time.perf_counter() - between
        return took
