"""Weights of our own making at a stored precision, and what the stored values are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.matrix import F32, Matrix, padded
from ralo.remake.compensate import F64, compensated
from ralo.remake.values import values as values

COARSE = "int4"  # where channels make up for each other's rounding; finer ones have nothing to make up for


def quantised(quant: str, weights: NDArray[Any], parts: Mapping[str, int], moments: F64 | None) -> tuple[Matrix, F32]:
    """A matrix of weights (ic, oc: every part padded), and the values it holds. `moments`: of its inputs."""
    ic, oc = weights.shape
    if oc != sum(padded(n) for n in parts.values()):
        raise ValueError(f"{oc} outputs are not those of {dict(parts)}, padded")
    matrix = Matrix.empty(quant, ic, parts, bias=False)
    rows = np.ascontiguousarray(weights.T, np.float32)
    _core.pack(quant, rows, oc, 0, matrix.data, matrix.scales)
    if quant == COARSE and moments is not None:

        def store(i: int, row: F32) -> F32:
            scales = None if matrix.scales is None else matrix.scales[i : i + 1]
            _core.pack(quant, row[:, None], oc, 0, matrix.data[i : i + 1], scales)
            held: F32 = values(quant, matrix.data[i : i + 1], scales)[0]
            return held

        compensated(np.array(weights, np.float32), moments, store)
    return matrix, values(quant, matrix.data, matrix.scales)


def beside(matrices: Sequence[Matrix], parts: Mapping[str, int]) -> Matrix:
    """Matrices of one precision with the same inputs as one, whose outputs are theirs, one after another."""
    data = np.concatenate([m.data for m in matrices], axis=1)
    scales = [m.scales for m in matrices if m.scales is not None]
    return Matrix(
        matrices[0].quant, matrices[0].ic, parts, data, np.concatenate(scales, axis=1) if scales else None, None
    )
