"""Chains of random cores, for tests of tensor trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ralo.tt.cores import Cores


def random_cores(ins: Sequence[int], outs: Sequence[int], rank: int, seed: int = 0) -> Cores:
    """Every bond of rank `rank`, even where fewer would do."""
    rng = np.random.default_rng(seed)
    ranks = [1, *[rank] * (len(ins) - 1), 1]
    shapes = zip(ranks[:-1], ins, outs, ranks[1:], strict=True)
    return Cores(tuple(rng.standard_normal(shape) for shape in shapes))


def off(found: np.ndarray, right: np.ndarray) -> float:
    """The relative error."""
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))
