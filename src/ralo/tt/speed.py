"""Whether factors are faster than the weights they replace, on this machine, read from memory as in decoding."""

from __future__ import annotations

import time

import numpy as np

from ralo.matrix import Matrix
from ralo.tt.matrix import FactoredMatrix

ROUNDS = 15
OUT_OF_CACHE = 64 << 20  # bytes: of copies that are run one after another, so that each comes from memory


_known: dict[tuple[object, ...], float] = {}


def speedup(made: FactoredMatrix, dense: Matrix) -> float:
    """Of one token. Measured once for a shape, so that layers of one shape are judged alike."""
    key = (made.train, made.kept, *(step.quant for step in made.steps), dense.quant, dense.ic, dense.oc)
    if key not in _known:
        _known[key] = _measured(made, dense)
    return _known[key]


def _measured(made: FactoredMatrix, dense: Matrix) -> float:
    """The best of some rounds in turns: what else the machine does only ever slows them down."""
    both = [[_copy(m) for _ in range(2 + OUT_OF_CACHE // max(1, m.nbytes))] for m in (dense, made)]
    x, y = np.ones((1, dense.ic), np.float32), np.zeros((1, dense.oc), np.float32)
    best = [float("inf")] * 2
    for _ in range(ROUNDS):
        for i, matrices in enumerate(both):
            clock = time.perf_counter()
            for matrix in matrices:
                matrix.core.apply(x, y)
            best[i] = min(best[i], (time.perf_counter() - clock) / len(matrices))
    return best[0] / best[1]


def _copy(matrix: Matrix) -> Matrix:
    if isinstance(matrix, FactoredMatrix):
        steps = [_copy(step) for step in matrix.steps]
        return FactoredMatrix(matrix.ic, matrix.parts, matrix.train, steps, matrix.bias)
    scales = None if matrix.scales is None else matrix.scales.copy()
    return Matrix(matrix.quant, matrix.ic, matrix.parts, matrix.data.copy(), scales, matrix.bias)
