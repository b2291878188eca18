"""Makes the factors of one place, at the lowest rank that keeps the gap; or says why the place keeps its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from ralo.formats.tensor import Tensor
from ralo.matrix import F32, Matrix, padded
from ralo.remake.layer import Refusal, joined
from ralo.remake.quantised import quantised
from ralo.tt.cores import Cores
from ralo.tt.cross import entries_of, tt_cross
from ralo.tt.dims import cheaper_order, choose, cost
from ralo.tt.lowrank import Weighed, factors_and_rest, gap_of, two_factors
from ralo.tt.matrix import FactoredMatrix, Train
from ralo.tt.ranks import UNIT, Choice
from ralo.tt.speed import speedup
from ralo.tt.svd import tt_svd
from ralo.weights import FUSED

F64 = NDArray[np.float64]
PRODUCT = {"qkv": ("q", "k")}  # parts that are factored, elsewhere all: values are nearly of full rank
REST = "int4"  # precision of what factors miss, where that is kept


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


def build(place: Place, recipe: Recipe, dense: Matrix) -> FactoredMatrix | Refusal:
    """Factors that keep the gap and are faster than `dense`, the weights they replace."""
    made = _train(place, recipe) if recipe.form != "best" else _two(place, recipe)
    if isinstance(made, Refusal):
        return made
    if made.gap > recipe.gap:
        return Refusal(f"misses {made.gap:.3f} of its outputs at rank {made.rank}, more than {recipe.gap:g}")
    faster = speedup(made, dense)
    if faster <= 1:
        return Refusal(f"keeps the gap at rank {made.rank}, but is {faster:.2f} times as fast")
    said = made.gap, round(faster, 3), dense.nbytes
    return FactoredMatrix(made.ic, made.parts, made.train, made.steps, made.bias, *said)


def _two(place: Place, recipe: Recipe) -> FactoredMatrix | Refusal:
    if recipe.rest:
        return factors_and_rest(place.weights, place.parts, recipe.rank, REST, place.bias, place.moments)
    weighed = place.weighed()
    most = Choice.of(place.wanted.shape).most
    rank = _lowest(weighed.gap, recipe.rank, most, recipe.gap, recipe.lower)
    if rank == 0:
        return Refusal(_too_large(weighed.gap(most) if most else 1.0, most, recipe.gap))
    return place.two_factors(weighed, rank, recipe.quant)


def _lowest(gap: Callable[[int], float], rank: int, most: int, limit: float, lower: bool) -> int:
    """The rank to start from, raised until it keeps the gap; 0: none does that is smaller than the weights."""
    rank = max(1, -(-rank // UNIT)) * UNIT
    while lower and rank > UNIT and gap(rank - UNIT) <= limit:
        rank -= UNIT
    while rank <= most and gap(rank) > limit:
        rank += UNIT
    return rank if rank <= most else 0


def _too_large(gap: float, rank: int, limit: float) -> str:
    if not rank:
        return "is too small to be factored"
    return f"misses {gap:.3f} of its outputs at rank {rank}, the most that is smaller, and may miss {limit:g}"


def _train(place: Place, recipe: Recipe) -> FactoredMatrix | Refusal:
    """A tensor train of the whole matrix, at the rank asked for or the lowest one above it that keeps the gap."""
    ic, oc = place.weights.shape
    ins, outs = choose(ic, oc, recipe.cores)
    ranks = (1, *[recipe.rank] * (recipe.cores - 1), 1)
    found = None
    while cost(ins, outs, ranks, cheaper_order(ins, outs, ranks)) < ic * oc:
        rank = max(ranks)
        cores = _cores(place.weights, ins, outs, rank, recipe)
        found = trained(place, cores, recipe.quant)
        if found.gap <= recipe.gap:
            return found
        ranks = (1, *[2 * rank] * (recipe.cores - 1), 1)
    if found is None:
        return Refusal(f"takes more multiplications at rank {recipe.rank} than dense")
    return Refusal(_too_large(found.gap, found.rank, recipe.gap))


def _cores(weights: F32, ins: tuple[int, ...], outs: tuple[int, ...], rank: int, recipe: Recipe) -> Cores:
    if recipe.form == "svd":
        return tt_svd(weights.astype(np.float64), ins, outs, rank)
    k = max(recipe.maxvol_k, rank)
    return tt_cross(entries_of(weights.astype(np.float64)), ins, outs, rank, k, recipe.gap)


def trained(place: Place, cores: Cores, quant: str) -> FactoredMatrix:
    """A tensor train as a matrix, contracted in the cheaper order."""
    ranks = cores.ranks
    train = Train(cores.ins, cores.outs, ranks[1:-1], cheaper_order(cores.ins, cores.outs, ranks))
    steps, stored = [], list(cores.cores)
    for k in train.order:
        core = cores.cores[k].transpose(3, 1, 2, 0) if train.backwards else cores.cores[k]
        ic, oc = train.step(k)
        wide = np.pad(core.reshape(ic, oc), ((0, 0), (0, padded(oc) - oc)))
        step, held = quantised(quant, wide, {"core": oc}, None)
        steps.append(step)
        kept = held[:, :oc].astype(np.float64).reshape(core.shape)
        stored[k] = kept.transpose(3, 1, 2, 0) if train.backwards else kept
    gap = gap_of(place.weights, replace(cores, cores=tuple(stored)).full(), place.moments)
    assert prod(train.outs) == place.weights.shape[1]
    return FactoredMatrix(len(place.weights), place.parts, train, steps, place.bias, gap)
