"""What each option of each place costs, measured on this CPU and this model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ralo import calibrate
from ralo.calibrate import Far
from ralo.lm import LM
from ralo.modes.base import LayerSlots, LayerView
from ralo.modes.mix import CoarseSlot, Mix
from ralo.modes.share import F64, GRID, Key, costs, times
from ralo.profile import Profile, fingerprint
from ralo.weights import PLACES, LayerWeights

Progress = Callable[[float], None]


def coarse_layers(lm: LM, mix: Mix) -> list[LayerWeights]:
    """All of a model's layers at a coarser precision, as the mode gives them."""
    weights = lm.model.weights
    model = fingerprint(weights)
    views = [LayerView(i, lm.model.cfg, layer, None, model) for i, layer in enumerate(weights.layers)]
    ready = mix.prepare(views)
    return [ready.weights(view) for view in views]


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


def coarse_seconds(layers: Sequence[LayerWeights]) -> dict[str, Any]:
    """`place` -> shares of the channels, and the seconds of a matvec at each."""
    return {place: found.astype(float).tolist() for place, found in calibrate.seconds(layers).items()}


def share_kl(profile: Profile, layers: int) -> dict[Key, F64]:
    """KL over GRID by layer and place, of what a profile says."""
    keys = {(i, place): 1 for i in range(layers) for place in PLACES}
    return dict(costs(profile, keys, dict.fromkeys(keys, 1.0)).quality)


def over_grid(seconds: Mapping[str, Any]) -> dict[str, F64]:
    """Measured times of places, over GRID."""
    return {place: times(np.asarray(found, np.float32)) for place, found in seconds.items()}


def bytes_over_grid(layers: Sequence[LayerWeights]) -> dict[str, F64]:
    """Where memory counts and not time: what a place takes, whatever is read of it."""
    return {place: np.full(len(GRID), float(getattr(layers[0], place).nbytes)) for place in PLACES}
