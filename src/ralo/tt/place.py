"""One place of a layer that may be factored: its weights, what its inputs are like, and how it is to be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo.formats.tensor import Tensor
from ralo.matrix import F32, padded
from ralo.remake.layer import joined
from ralo.tt.lowrank import Weighed, two_factors
from ralo.tt.matrix import FactoredMatrix
from ralo.tt.ranks import UNIT
from ralo.weights import FUSED

F64 = NDArray[np.float64]
PRODUCT = {"qkv": ("q", "k")}  # parts that are factored, elsewhere all: values are nearly of full rank


@dataclass(frozen=True)
class Recipe:
    """How one place is factored."""

    form: str  # best: two weighed factors; svd and seed: a tensor train, by singular values or by cross
    rank: int  # to start from
    lower: bool  # whether a lower one is taken where that keeps the gap too
    gap: float
    maxvol_k: int
    cores: int
    rest: bool
    quant: str


@dataclass(frozen=True)
class Place:
    """The weights of a place and what its inputs are like."""

    weights: F32  # (ic, oc), every part padded
    bias: F32 | None
    parts: dict[str, int]
    product: int  # the first outputs, which are factored
    moments: F64
    felt: F64 | None  # how much each of them counts; None: alike

    @classmethod
    def of(cls, found: Mapping[str, Tensor], name: str, moments: F64, head: int) -> Place:
        parts = {s: found[s].shape[0] for s in FUSED[name] if s in found}
        weights, bias = joined(found, parts)
        product = sum(padded(n) for s, n in parts.items() if s in PRODUCT.get(name, parts))
        return cls(weights, bias, parts, product, moments, _met(weights, parts, moments, head))

    @property
    def wanted(self) -> F32:
        """What is factored."""
        return self.weights[:, : self.product]

    def weighed(self) -> Weighed:
        return Weighed.of(self.wanted, self.moments, self.felt)

    def two_factors(self, weighed: Weighed, rank: int, quant: str) -> FactoredMatrix:
        return two_factors(self.weights, self.parts, self.product, weighed, rank, quant, self.bias, self.moments)


def _met(weights: F32, parts: Mapping[str, int], moments: F64, head: int) -> F64 | None:
    """An output of a query counts as much as the keys are large that it meets, and the other way round.

    Rotary embedding turns pairs of them, half a head apart, so that both of a pair meet both.
    """
    if set(parts) != {"q", "k", "v"} or head % 2 or any(n % UNIT for n in (parts["q"], parts["k"])):
        return None
    energy = np.einsum("io,io->o", weights, (moments @ weights).astype(np.float32))[: parts["q"] + parts["k"]]
    pairs = energy.reshape(-1, 2, head // 2).sum(1)
    queries, keys = pairs[: parts["q"] // head], pairs[parts["q"] // head :]
    group = len(queries) // len(keys)
    of_keys = queries.reshape(len(keys), group, -1).sum(1)
    met = np.concatenate([np.repeat(keys, group, axis=0), of_keys])
    both: F64 = np.repeat(met[:, None], 2, axis=1).reshape(-1).astype(np.float64)
    return np.sqrt(np.maximum(both, 1e-12 * float(both.max()) + 1e-30)).astype(np.float64)
