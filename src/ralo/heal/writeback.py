"""What was learned, as packed weights again: each matrix at the precision and in the form that it had."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ralo import _core
from ralo.errors import RaloError
from ralo.heal.plain import DELTAS, F32, INT4, KEPT
from ralo.matrix import Matrix, padded
from ralo.proc.matrix import Deltas, ProcMatrix
from ralo.remake.quantised import beside, quantised
from ralo.remake.values import bf16_values, bf16_words
from ralo.tt.matrix import RANK, FactoredMatrix
from ralo.weights import PLACES, Weights


def written_back(weights: Weights, trained: Mapping[str, F32]) -> Weights:
    """The same with what was learned in its place; the other matrices are the very same."""
    for name, values in trained.items():
        if not np.isfinite(values).all():
            raise RaloError(f"{name}: what was learned is not finite; heal again with a smaller --lr")
    layers = []
    for i, layer in enumerate(weights.layers):
        made = {}
        for place in PLACES:
            at = f"layers.{i}.{place}."
            own = {name.removeprefix(at): values for name, values in trained.items() if name.startswith(at)}
            if own:
                made[place] = _matrix(getattr(layer, place), own)
        layers.append(layer.using(made))
    return replace(weights, layers=tuple(layers))


def _matrix(matrix: Matrix, own: Mapping[str, F32]) -> Matrix:
    if isinstance(matrix, FactoredMatrix):
        return _factored(matrix, own)
    if isinstance(matrix, ProcMatrix):
        assert matrix.scales is not None
        deltas = Deltas(matrix.deltas.starts, matrix.deltas.at, bf16_words(own[DELTAS]))
        return ProcMatrix(matrix.ic, matrix.parts, matrix.data, matrix.scales, matrix.bias, matrix.tables, deltas)
    dense = _quantised(matrix, own["0"], matrix.parts)
    return Matrix(matrix.quant, matrix.ic, matrix.parts, dense.data, dense.scales, matrix.bias)


def _factored(matrix: FactoredMatrix, own: Mapping[str, F32]) -> Matrix:
    healed: Any = copy.copy(matrix)  # with all else that is said of it
    healed.steps = tuple(_step(matrix, k, own) for k in range(len(matrix.steps)))
    healed.core, healed.bytes_read = healed._core(), 0
    found: Matrix = healed
    return found


def _step(matrix: FactoredMatrix, k: int, own: Mapping[str, F32]) -> Matrix:
    step = matrix.steps[k]
    learned, kept = own.get(str(k)), own.get(KEPT) if k == 0 else None
    if learned is None and kept is None:
        return step
    if k > 0 or not matrix.kept:
        assert learned is not None
        return _quantised(step, learned, step.parts)
    stays = {name: n for name, n in step.parts.items() if name != RANK}
    one, rest = _parts(step, padded(step.parts[RANK]), stays)
    one = one if learned is None else _quantised(one, learned, one.parts)
    rest = rest if kept is None else _quantised(rest, kept, stays)
    return beside([one, rest], step.parts)


def _parts(step: Matrix, rank: int, stays: Mapping[str, int]) -> tuple[Matrix, Matrix]:
    """A first step as two: the outputs that the product goes on with, and those that are kept."""
    at, group = _core.row_bytes(step.quant, rank), _core.groups(step.quant, rank)

    def cut(parts: Mapping[str, int], stored: slice, scaled: slice) -> Matrix:
        scales = None if step.scales is None else np.ascontiguousarray(step.scales[:, scaled])
        return Matrix(step.quant, step.ic, parts, np.ascontiguousarray(step.data[:, stored]), scales, None)

    return (
        cut({RANK: step.parts[RANK]}, slice(0, at), slice(0, group)),
        cut(stays, slice(at, None), slice(group, None)),
    )


def _quantised(like: Matrix, weights: F32, parts: Mapping[str, int]) -> Matrix:
    """At the precision of another of the same shape. int4 learned behind its rounding: its scales stay."""
    if like.quant != "int4":
        return quantised(like.quant, weights, parts, None)[0]
    assert like.scales is not None
    scales = bf16_values(like.scales)[..., None]  # (ic, groups, 1)
    groups = weights.reshape(*scales.shape[:2], -1)
    steps = np.rint(groups / np.where(scales != 0, scales, np.float32(1))).clip(*INT4).astype(np.int8) - INT4[0]
    first, second = np.split(steps.astype(np.uint8), 2, axis=2)
    data = np.ascontiguousarray((first | second << 4).reshape(like.data.shape), np.uint8)
    return Matrix("int4", like.ic, parts, data, like.scales, None)
