"""Makes a tensor train of a place, by cross or by singular values."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from ralo.matrix import F32, padded
from ralo.remake.layer import Refusal
from ralo.remake.quantised import quantised
from ralo.tt.cores import Cores
from ralo.tt.cross import entries_of, tt_cross
from ralo.tt.dims import cheaper_order, choose, cost
from ralo.tt.lowrank import gap_of
from ralo.tt.matrix import FactoredMatrix, Train
from ralo.tt.place import Place, Recipe
from ralo.tt.svd import tt_svd


def a_train(place: Place, recipe: Recipe) -> FactoredMatrix | Refusal:
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
    most = f"at rank {found.rank}, the most that takes fewer multiplications"
    return Refusal(f"misses {found.gap:.3f} of its outputs {most}, and may miss {recipe.gap:g}")


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
