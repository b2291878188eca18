"""Packs of factors for tiny models, written by hand: their ranks are lower than any that `ralo pack` would choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ralo import arch
from ralo.formats import packed
from ralo.loader import open_checkpoint
from ralo.modes.made import packed_settings
from ralo.modes.tt import TT
from ralo.profile import fingerprint
from ralo.tt.about import AboutTT
from ralo.tt.dims import choose
from ralo.tt.lowrank import factors_and_rest
from ralo.tt.matrix import FactoredMatrix
from ralo.tt.place import Place
from ralo.tt.svd import tt_svd
from ralo.tt.train import trained
from ralo.weights import build

KINDS = {"qkv": "two", "o": "train", "up": "rest", "down": "two"}
RANK = 40
SPEEDUP = 1.5


def factored(place: Place, kind: str, quant: str, rank: int = RANK) -> FactoredMatrix:
    """Two factors (values kept beside them), factors and a rest, or a train of two cores."""
    if kind == "two":
        return place.two_factors(place.weighed(), rank, quant)
    if kind == "rest":
        return factors_and_rest(place.weights, place.parts, rank, "int4", place.bias, place.moments)
    return trained(place, tt_svd(place.weights.astype(np.float64), *choose(*place.weights.shape), rank), quant)


def write_pack(
    model: Path,
    to: Path,
    quant: str = "int8",
    kinds: Mapping[str, str] = KINDS,
    refused: Mapping[str, str] | None = None,
) -> Path:
    """A pack whose places are of these kinds in every layer; `refused`: what it says of others."""
    ckpt = open_checkpoint(str(model))
    cfg, weights = build(ckpt, quant)
    layers, records = [], {}
    for i, layer in enumerate(weights.layers):
        found, made = arch.find(ckpt).layer(ckpt, cfg, i), {}
        for name, kind in kinds.items():
            dense = getattr(layer, name)
            m = factored(Place.of(found, name, np.eye(dense.ic), cfg.head_dim), kind, quant)
            made[name] = FactoredMatrix(m.ic, m.parts, m.train, m.steps, m.bias, m.gap, SPEEDUP + i / 4, dense.nbytes)
            records[f"layers.{i}.{name}"] = AboutTT.record(made[name])
        layers.append(layer.using(made))
    about = AboutTT(fingerprint(weights), packed_settings(TT()), records, dict(refused or {}))
    packed.save(ckpt, replace(weights, layers=tuple(layers)), to, about)
    return to
