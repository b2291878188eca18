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
    outputs = [np.empty(m.oc, np.float32) for m in matrices]
    norms, lists = [np.ones(m.ic, np.float32) for m in matrices], [np.empty(m.ic, np.uint32) for m in matrices]
    random = [np.sort(rng.choice(m.ic, int(keep * m.ic), replace=False)).astype(np.uint32) for m in matrices]

    def whole(i: int) -> None:
        matrices[i].core.apply(inputs[i][None], outputs[i][None])

    def some(i: int) -> None:
        matrices[i].core.apply_some(inputs[i], random[i], outputs[i])

    def chosen(i: int) -> None:
        count = _core.select_top(inputs[i], norms[i], int(keep * matrices[i].ic), lists[i])
        matrices[i].core.apply_some(inputs[i], lists[i][:count], outputs[i])

    ratios = []
    for _ in range(rounds + 1):
        times = []
        for way in (whole, some, chosen):  # all matrices each time: none finds its weights still in the cache
            clock = time.perf_counter()
            for i in range(len(matrices)):
                way(i)
            times.append(time.perf_counter() - clock)
        ratios.append((times[1] / times[0], times[2] / times[0]))
    one, other = (statistics.median(column) for column in zip(*ratios[1:], strict=True))
    return one, other


def _random(quant: str, ic: int, oc: int, rng: np.random.Generator) -> Matrix:
    m = Matrix.empty(quant, ic, {"w": oc}, False, Arena())
    m.data[:] = rng.integers(0, 256, m.data.shape, np.uint8)
    if m.scales is not None:
        m.scales[:] = 0x3C00  # bf16 1/128
    return m
