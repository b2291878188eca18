"""How much a change of one place is felt in what a model says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ralo.config import ModelConfig
from ralo.matrix import Matrix
from ralo.model import Model
from ralo.quality import divergence, log_probs, scores
from ralo.weights import Weights

Key = tuple[int, str]  # layer, place
TOKENS = 1024


def felt(
    cfg: ModelConfig, weights: Weights, trials: Iterable[tuple[Key, Matrix]], tokens: Sequence[int]
) -> dict[Key, float]:
    """KL from the model as it is with one matrix in place of its own, for each that is tried."""
    text, ctx = tokens[: TOKENS + 1], min(TOKENS, cfg.max_context)
    before = [log_probs(s) for _, _, s in scores(Model(cfg, weights), text, ctx, "f16")]
    out = {}
    for (i, place), matrix in trials:
        layers = list(weights.layers)
        layers[i] = layers[i].using({place: matrix})
        after = scores(Model(cfg, replace(weights, layers=tuple(layers))), text, ctx, "f16")
        both = zip(before, after, strict=True)
        out[i, place] = float(np.mean([divergence(b, log_probs(s)).mean() for b, (_, _, s) in both]))
    return out
