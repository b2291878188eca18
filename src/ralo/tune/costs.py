"""What each option of each place costs, measured on this CPU and this model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ralo import timing
from ralo.calibrate import Far
from ralo.lm import LM
from ralo.matrix import Matrix
from ralo.modes.base import LayerSlots, views_of
from ralo.modes.mix import HEAD, CoarseSlot, Mix
from ralo.modes.share import F64, GRID, times
from ralo.profile import Profile, fingerprint
from ralo.weights import PLACES, LayerWeights

Progress = Callable[[float], None]


def coarse_weights(lm: LM, mix: Mix) -> tuple[list[LayerWeights], Matrix | None]:
    """All of a model's layers at a coarser precision, as the mode gives them, and the head where it can be."""
    weights = lm.model.weights
    views = views_of(lm.model.cfg, weights, model=fingerprint(weights))
    ready = (replace(mix, head="on") if mix.has_head() else mix).prepare(views)
    assert isinstance(ready, Mix) and ready.loaded is not None
    return [ready.weights(view) for view in views], ready.loaded[-1].get(HEAD)


def coarse_kl(lm: LM, layers: Sequence[LayerWeights], tokens: Sequence[int], progress: Progress) -> dict[str, float]:
    """`layer.place` -> mean KL from dense with only this place coarser."""
    model, far, out = lm.model, Far(lm, tokens), {}
    before = model.slots
    keys = [(i, place) for i in range(len(layers)) for place in PLACES]
    try:
        for done, (i, place) in enumerate(keys):
            slots = [LayerSlots() for _ in layers]
            slots[i].put(f"{place}_weights", CoarseSlot(getattr(layers[i], place), 0), "tune", "")
            model.use(slots)
            out[f"{i}.{place}"] = far.kl()
            progress((done + 1) / len(keys))
    finally:
        model.use(before)
    return out


def head_kl(lm: LM, head: Matrix, tokens: Sequence[int]) -> float:
    """Mean KL from dense with only the head coarser."""
    model, far, before = lm.model, Far(lm, tokens), lm.model.slots
    slots = [LayerSlots() for _ in before]
    slots[-1].put(f"{HEAD}_weights", CoarseSlot(head, 0), "tune", "")
    try:
        model.use(slots)
        return far.kl()
    finally:
        model.use(before)


def coarse_seconds(
    lm: LM, profile: Profile, tokens: Sequence[int], layers: Sequence[LayerWeights], head: Matrix | None
) -> dict[str, Any]:
    """`places`: of each, shares of the channels and what a layer takes at each; and both heads."""
    before = lm.model.slots
    try:
        found = timing.coarse_seconds(lm, profile, tokens, layers, head)
    finally:
        lm.model.use(before)
    places = {place: took.astype(float).tolist() for place, took in found.places.items()}
    return {"places": places, "own head": found.own_head, "head": found.head}


def over_grid(seconds: Mapping[str, Any]) -> dict[str, F64]:
    """Measured times of places over GRID."""
    return {place: times(np.asarray(found, np.float32)) for place, found in seconds.items()}


def bytes_over_grid(layers: Sequence[LayerWeights], head: Matrix | None) -> dict[str, F64]:
    """Where memory counts and not time: what a place takes, whatever is read of it."""
    size = {place: getattr(layers[0], place).nbytes for place in PLACES} | ({HEAD: head.nbytes} if head else {})
    return {place: np.full(len(GRID), float(n)) for place, n in size.items()}
