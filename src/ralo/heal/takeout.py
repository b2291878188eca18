"""From packed weights to a plain model: what every linear map is made of, and what of it may learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ralo.compose import compose
from ralo.config import ModelConfig
from ralo.heal.plain import DELTAS, KEPT, Array, PlainMap, PlainModel
from ralo.matrix import QUANTS, Matrix
from ralo.modes import KWTA
from ralo.modes.base import LayerSlots, norms_of, views_of
from ralo.modes.kwta import ALIKE
from ralo.proc.matrix import Deltas, ProcMatrix
from ralo.rope import RopeTable
from ralo.tt.matrix import FactoredMatrix, orders
from ralo.weights import PLACES, Weights

NOTHING, FACTORS, ALL = "nothing", "factors", "all"  # what learns: `all` is every matrix of the layers


def plain_model(cfg: ModelConfig, weights: Weights, ctx: int, train: str = NOTHING, k: float = 1.0) -> PlainModel:
    """For texts of up to `ctx` tokens. `k` below 1: as KWTA with that k runs it."""
    arrays: dict[str, Array] = {"embed": weights.embed.table}
    if weights.positions is not None:
        arrays["positions"] = weights.positions[cfg.position_offset : cfg.position_offset + ctx]
    if cfg.rope:
        arrays["cos"], arrays["sin"] = RopeTable(cfg.rope)(0, ctx, ctx)
    arrays |= weights.norms()
    maps = {}
    for name, matrix in weights.matrices().items():
        maps[name], own = _map(matrix, train if name != "head" else NOTHING)
        arrays |= {f"{name}.{part}": array for part, array in own.items()}
    if k < 1:
        _let_win(cfg, weights, k, maps, arrays)
    return PlainModel(
        ctx=ctx, heads=cfg.n_heads, kv_heads=cfg.n_kv_heads, head_dim=cfg.head_dim, vocab=cfg.vocab, act=cfg.act,
        gated=cfg.gated, norm=cfg.norm, eps=cfg.norm_eps, windows=cfg.windows, maps=maps, arrays=arrays,
    )  # fmt: skip


def _map(matrix: Matrix, train: str) -> tuple[PlainMap, dict[str, Array]]:
    """A map and its arrays."""
    parts = {name: (at.start, at.stop - at.start) for name, at in matrix.slices.items()}
    arrays: dict[str, Array] = {} if matrix.bias is None else {"bias": matrix.bias}
    if isinstance(matrix, FactoredMatrix):
        found, own = _factored(matrix, parts, train)
    elif isinstance(matrix, ProcMatrix):
        found, own = _proc(matrix, parts, train)
    elif matrix.quant in QUANTS:
        own = _stored("0", matrix)
        found = PlainMap("dense", matrix.oc, parts, (matrix.quant,), ("0",) if train == ALL else ())
    else:  # rebuilt in a way that has nothing to learn
        unpacked: Any = matrix
        own = {"0.data": unpacked.unpack().view(np.uint8)}
        found = PlainMap("dense", matrix.oc, parts, ("f32",))
    return found, arrays | own


def _stored(name: str, matrix: Matrix) -> dict[str, Array]:
    scales = {} if matrix.scales is None else {f"{name}.scales": matrix.scales}
    return {f"{name}.data": matrix.data, **scales}


def _factored(
    matrix: FactoredMatrix, parts: dict[str, tuple[int, int]], train: str
) -> tuple[PlainMap, dict[str, Array]]:
    rows, gathered, to = orders(matrix.train)
    arrays: dict[str, Array] = {} if to is None else {"to": to}
    for k, (step, at) in enumerate(zip(matrix.steps, gathered, strict=True)):
        arrays |= _stored(str(k), step) | ({} if at is None else {f"{k}.from": at})
    learn = tuple(map(str, range(len(rows)))) if train != NOTHING else ()
    learn += (KEPT,) if train == ALL and matrix.kept else ()
    quants = tuple(step.quant for step in matrix.steps)
    return PlainMap(
        "factored", matrix.oc, parts, quants, learn, tuple(rows), prod(matrix.train.outs), matrix.kept
    ), arrays


def _proc(matrix: ProcMatrix, parts: dict[str, tuple[int, int]], train: str) -> tuple[PlainMap, dict[str, Array]]:
    assert matrix.scales is not None
    d = matrix.deltas
    bare = ProcMatrix(matrix.ic, matrix.parts, matrix.data, matrix.scales, None, matrix.tables, Deltas.none(matrix.ic))
    channels = np.repeat(np.arange(matrix.ic, dtype=np.int64), d.starts[1:] - d.starts[:-1])
    arrays: dict[str, Array] = {"0.data": bare.unpack().view(np.uint8), DELTAS: d.values}
    arrays["at"] = channels * matrix.oc + d.at
    return PlainMap("proc", matrix.oc, parts, ("f32",), (DELTAS,) if train != NOTHING and len(d.at) else ()), arrays


def _let_win(cfg: ModelConfig, weights: Weights, k: float, maps: dict[str, PlainMap], arrays: dict[str, Array]) -> None:
    """Says at every place how many channels KWTA would use there, and by what they are judged."""
    views = views_of(cfg, weights)
    for view, slots in zip(views, compose([KWTA(k=k)]).build(views).slots, strict=True):
        for place, share in _shares(slots).items():
            name, norms = f"layers.{view.index}.{place}", norms_of(view, place)
            alike = float(norms.std()) < ALIKE * float(norms.mean())
            arrays[f"{name}.norms"] = np.ones_like(norms) if alike else norms
            gate_only = place == "up" and "mlp" in slots.taken
            maps[name] = replace(maps[name], winners=round(share * len(norms)), gate_only=gate_only)


def _shares(slots: LayerSlots) -> Mapping[str, float]:
    """Of the channels, by place, where not all are used."""
    return {p: share for p in PLACES if p in slots.taken and (share := slots.taken[p].share) is not None}
