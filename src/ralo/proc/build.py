"""Builds one matrix of procedural weights: seeds, what they miss made up for by later channels, and deltas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.formats.tensor import Tensor
from ralo.matrix import U16
from ralo.proc.generator import SIGMA, tables
from ralo.proc.matrix import Deltas, ProcMatrix
from ralo.remake.compensate import compensated
from ralo.remake.layer import joined
from ralo.remake.values import bf16_values, bf16_words
from ralo.weights import FUSED

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
SAMPLE = 48  # channels that the bound of deltas is taken from


@dataclass(frozen=True)
class Recipe:
    """How one matrix is made."""

    columns: int  # of seeds, a channel
    deltas: float  # share of weights that are put right one by one
    eps: float
    watermark: int
    generator: str = "fitted"
    compensate: bool = True


def build_matrix(
    found: Mapping[str, Tensor], place: str, recipe: Recipe, moments: F64 | None
) -> tuple[ProcMatrix, float]:
    """Seeds and deltas of the sites of a place; and the share of typical outputs that is lost."""
    sites = [s for s in FUSED[place] if s in found]
    parts = {s: found[s].shape[0] for s in sites}
    weights, bias = joined(found, parts)
    ic = len(weights)
    columns = recipe.columns
    data, scales = np.empty((ic, columns * _core.PAD), np.uint8), np.empty((ic, columns), np.uint16)
    search = _core.SeedSearch(tables(recipe.generator), SIGMA)
    rebuilt = np.empty_like(weights)
    felt = np.sqrt(np.diag(moments)).astype(np.float32) if moments is not None else np.ones(ic, np.float32)
    deltas = _Collected(ic)

    def store(i: int, row: F32) -> F32:
        search.row(row, data[i], scales[i], rebuilt[i])
        deltas.take(i, row, rebuilt[i], bound / max(float(felt[i]), 1e-30))
        found_row: F32 = rebuilt[i]
        return found_row

    bound = float("inf")  # error times how much it is felt: what is above gets a delta
    if recipe.deltas > 0:
        sample = range(0, ic, max(1, ic // SAMPLE))
        bound = float(
            np.quantile([felt[i] * np.abs(weights[i] - store(i, weights[i])) for i in sample], 1 - recipe.deltas)
        )
    original = weights.copy() if moments is not None else weights
    if moments is not None and recipe.compensate:
        compensated(weights, moments, store)
    else:
        for i in range(ic):
            store(i, weights[i])
    matrix = ProcMatrix(ic, parts, data, scales, bias, tables(recipe.generator), deltas.all())
    return matrix.shed(recipe.eps, recipe.watermark)[0], _lost(original, rebuilt, moments)


class _Collected:
    """Deltas of the weights that are furthest off, channel by channel."""

    def __init__(self, ic: int) -> None:
        self.at: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * ic
        self.values: list[U16] = [np.zeros(0, np.uint16)] * ic

    def take(self, i: int, row: F32, rebuilt: F32, bound: float) -> None:
        """Notes the deltas of channel i that are above the bound, and adds them to what was rebuilt."""
        off = row - rebuilt
        at = np.flatnonzero(np.abs(off) > bound)
        self.at[i], self.values[i] = at, bf16_words(off[at])
        rebuilt[at] += bf16_values(self.values[i])

    def all(self) -> Deltas:
        starts = np.zeros(len(self.at) + 1, np.uint32)
        np.cumsum([len(at) for at in self.at], out=starts[1:])
        return Deltas(starts, np.concatenate(self.at).astype(np.uint16), np.concatenate(self.values))


def _lost(original: F32, rebuilt: F32, moments: F64 | None) -> float:
    """Share of the outputs' energy that the error makes up, for typical inputs."""
    error = original - rebuilt
    if moments is None:
        return float(np.square(error).sum() / max(1e-30, np.square(original).sum()))
    weigh = moments.astype(np.float32)
    wrong, right = float((error * (weigh @ error)).sum()), float((original * (weigh @ original)).sum())
    return wrong / max(1e-30, right)
