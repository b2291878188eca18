"""Time falls with bytes: a matvec with half of its channels beside the whole one, on shapes of a 1.1 B model."""

from __future__ import annotations

import statistics
import time

import numpy as np

from ralo import _core
from ralo.matrix import Matrix
from ralo.memory import Arena

SHAPES = ((2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048))  # qkv, o, gate and up, down
COPIES = 3  # of each: together far more than any cache


def half_of_dense(rounds: int = 9, quant: str = "int8", keep: float = 0.5) -> tuple[float, float]:
    """Time with a random share of the channels over time with all, and the same with the choice of winners included."""
    rng = np.random.default_rng(0)
    matrices = [_random(quant, ic, oc, rng) for _ in range(COPIES) for ic, oc in SHAPES]
    inputs = [rng.standard_normal(m.ic).astype(np.float32) for m in matrices]
    norms = [np.ones(m.ic, np.float32) for m in matrices]
    some, chosen = [], []
    for _ in range(rounds + 1):
        times = [0.0, 0.0, 0.0]
        for m, x, norm in zip(matrices, inputs, norms, strict=True):
            y, out = np.empty(m.oc, np.float32), np.empty(m.ic, np.uint32)
            channels = np.sort(rng.choice(m.ic, int(keep * m.ic), replace=False)).astype(np.uint32)
            marks = [time.perf_counter()]
            m.core.apply(x[None], y[None])
            marks.append(time.perf_counter())
            m.core.apply_some(x, channels, y)
            marks.append(time.perf_counter())
            m.core.apply_some(x, out[: _core.select_top(x, norm, int(keep * m.ic), out)], y)
            marks.append(time.perf_counter())
            times = [t + b - a for t, a, b in zip(times, marks, marks[1:], strict=False)]
        some.append(times[1] / times[0])
        chosen.append(times[2] / times[0])
    return statistics.median(some[1:]), statistics.median(chosen[1:])


def _random(quant: str, ic: int, oc: int, rng: np.random.Generator) -> Matrix:
    m = Matrix.empty(quant, ic, {"w": oc}, False, Arena())
    m.data[:] = rng.integers(0, 256, m.data.shape, np.uint8)
    if m.scales is not None:
        m.scales[:] = 0x3C00  # bf16 1/128
    return m
