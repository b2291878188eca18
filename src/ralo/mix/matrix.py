"""A matrix of fewer bits than the model's, rounded once more, or made for the inputs that come to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from ralo import _core
from ralo.matrix import F32, Matrix
from ralo.memory import Arena
from ralo.remake.compensate import F64
from ralo.remake.quantised import quantised
from ralo.remake.values import values


class CoarseMatrix(Matrix):
    """Stored as any other; its type says that it stands in for finer weights."""

    def digest(self) -> str:
        digest = hashlib.blake2b(self.data.tobytes(), digest_size=16)
        digest.update(b"" if self.scales is None else self.scales.tobytes())
        return digest.hexdigest()


def rounded(matrix: Matrix, quant: str, arena: Arena) -> CoarseMatrix:
    """The same weights with fewer bits."""
    out = CoarseMatrix.empty(quant, matrix.ic, matrix.parts, matrix.bias is not None, arena)
    assert isinstance(out, CoarseMatrix)
    rows = np.ascontiguousarray(values(matrix.quant, matrix.data, matrix.scales).T)
    _core.pack(quant, rows, matrix.oc, 0, out.data, out.scales)
    if matrix.bias is not None and out.bias is not None:
        out.bias[:] = matrix.bias
    return out


def made_for(weights: F32, parts: Mapping[str, int], bias: F32 | None, quant: str, moments: F64) -> CoarseMatrix:
    """Weights (ic, oc) whose channels make up for each other's rounding on inputs of these second moments."""
    plain, _ = quantised(quant, weights, parts, moments)
    return CoarseMatrix(quant, plain.ic, parts, plain.data, plain.scales, bias)
