"""Makes the factors of one place, at the lowest rank that keeps the gap; or says why the place keeps its weights."""

from __future__ import annotations

from collections.abc import Callable

from ralo.matrix import Matrix
from ralo.remake.layer import Refusal
from ralo.tt.lowrank import factors_and_rest
from ralo.tt.matrix import FactoredMatrix
from ralo.tt.place import Place, Recipe
from ralo.tt.ranks import UNIT, Choice
from ralo.tt.speed import speedup
from ralo.tt.train import a_train

REST = "int4"  # precision of what factors miss, where that is kept


def build(place: Place, recipe: Recipe, dense: Matrix) -> FactoredMatrix | Refusal:
    """Factors that keep the gap and are faster than `dense`, the weights they replace."""
    made = a_train(place, recipe) if recipe.form != "best" else _two(place, recipe)
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
        return Refusal(_too_large(weighed.gap(most), most, recipe.gap))
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
