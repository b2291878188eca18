"""Two factors instead of a matrix, found so that the products with typical inputs move least.

With the inputs' second moments C = L L^T, the best factors of rank r are those of the singular values of L^T W: inputs
that are seen more weigh more. Where an output is felt more than another, its column is weighed too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo.matrix import F32, Matrix, padded
from ralo.remake.quantised import beside, quantised
from ralo.tt.matrix import RANK, FactoredMatrix, Train, step_parts

F64 = NDArray[np.float64]
DAMPING = 1e-4  # of the mean second moment, added to all: directions that were never seen are not free
TURNS = 2  # of factors and residual, each made for what the other leaves


@dataclass(frozen=True)
class Weighed:
    """A matrix as its inputs and outputs weigh it, taken apart into singular values: factors of any rank, and how much
    they miss, from one piece of work."""

    root: F64  # (ic, ic) L
    felt: F64  # (oc)
    u: F64
    s: F64
    vt: F64

    @classmethod
    def of(cls, weights: NDArray[np.floating], moments: F64, felt: F64 | None = None) -> Weighed:
        root = root_of(moments)
        felt = np.ones(weights.shape[1]) if felt is None else felt
        u, s, vt = np.linalg.svd(root.T @ (weights * felt), full_matrices=False)
        return cls(root, felt, u, s, vt)

    @classmethod
    def leading(cls, weights: NDArray[np.floating], moments: F64) -> Weighed:
        """The same by eigenvalues, many times sooner for a wide matrix; the smallest singular values are rough."""
        root = root_of(moments)
        whole = root.T @ weights
        squares, u = np.linalg.eigh(whole @ whole.T)
        s, u = np.sqrt(np.maximum(squares[::-1], 0)), u[:, ::-1]
        vt = (u.T @ whole) / np.maximum(s, 1e-12 * s[0])[:, None]
        return cls(root, np.ones(weights.shape[1]), u, s, vt)

    def gap(self, rank: int) -> float:
        """||(W - W') X|| / ||W X|| of factors of a rank: what each singular value adds, as outputs are and not as they
        are felt."""
        each = np.square(self.s) * np.square(self.vt / self.felt).sum(1)
        return float(np.sqrt(each[rank:].sum() / max(float(each.sum()), 1e-300)))

    def factors(self, rank: int) -> tuple[F64, F64]:
        """(ic, rank) and (rank, oc), well conditioned: alike in size, and so is what each rank has in either."""
        roots = np.sqrt(self.s[:rank])
        first = np.linalg.solve(self.root.T, self.u[:, :rank]).astype(np.float64) * roots
        second = roots[:, None] * self.vt[:rank] / self.felt
        even = np.sqrt(max(float(np.linalg.norm(second)), 1e-30) / max(float(np.linalg.norm(first)), 1e-30))
        return first * even, second / even


def damped(moments: F64) -> F64:
    mean = max(float(np.diag(moments).mean()), 1e-12)
    return np.asarray(moments + DAMPING * mean * np.eye(len(moments)), np.float64)


def root_of(moments: F64) -> F64:
    return np.linalg.cholesky(damped(moments)).astype(np.float64)


def gap_of(weights: NDArray[np.floating], stored: NDArray[np.floating], moments: F64) -> float:
    """||(W - W') X|| / ||W X||."""
    root = root_of(moments)
    whole = float(np.linalg.norm(root.T @ weights))
    return float(np.linalg.norm(root.T @ (weights - stored))) / whole if whole > 0 else 0.0


def two_factors(
    weights: F32, parts: Mapping[str, int], product: int, weighed: Weighed, rank: int, quant: str, bias: F32 | None,
    moments: F64,
) -> FactoredMatrix:  # fmt: skip
    """Factors for the first `product` outputs; the others as they are, beside the first factor."""
    ic = len(weights)
    train = Train.two(ic, product, rank)
    with_rank, goes = step_parts(train, parts, rest=False)
    stays = {name: n for name, n in with_rank.items() if name != RANK}
    first, _ = weighed.factors(rank)
    one, held = quantised(quant, wide(first), {RANK: rank}, moments)
    held = held[:, :rank]
    two, second = _second(quant, held, weights[:, :product], goes, moments)
    if stays:
        rest, _ = quantised(quant, weights[:, product:], stays, moments)
        one = beside([one, rest], with_rank)
    return FactoredMatrix(ic, parts, train, [one, two], bias, gap_of(weights[:, :product], held @ second, moments))


def factors_and_rest(
    weights: F32, parts: Mapping[str, int], rank: int, quant: str, bias: F32 | None, moments: F64
) -> FactoredMatrix:
    """Factors, and beside the first one what they miss, at a coarse precision; each made for what the other leaves."""
    ic, oc = weights.shape
    _, left = quantised(quant, weights, parts, None)
    for _ in range(TURNS):
        first, _ = Weighed.of(weights - left, moments).factors(rank)
        one, held = quantised(quant, wide(first), {RANK: rank}, moments)
        held = held[:, :rank]
        two, second = _second(quant, held, weights - left, parts, moments)
        rest, left = quantised(quant, weights - held @ second, parts, moments)
    train = Train.two(ic, oc, rank)
    steps = [beside([one, rest], step_parts(train, parts, rest=True)[0]), two]
    return FactoredMatrix(ic, parts, train, steps, bias, gap_of(weights, held @ second + left, moments))


def _second(quant: str, held: F32, weights: F32, parts: Mapping[str, int], moments: F64) -> tuple[Matrix, F32]:
    """The factor that fits best behind a first one that is rounded already."""
    seen = damped(moments)  # as the gap is measured: else what is hardly seen would be given up
    between = held.T.astype(np.float64) @ seen @ held
    mean = max(float(np.diag(between).mean()), 1e-12)
    best = np.linalg.solve(between + 1e-6 * mean * np.eye(len(between)), held.T @ (seen @ weights))
    return quantised(quant, best, parts, between)


def wide(first: F64) -> F64:
    """With columns of zeros up to whole blocks of outputs."""
    return np.pad(first, ((0, 0), (0, padded(first.shape[1]) - first.shape[1])))
