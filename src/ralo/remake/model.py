"""All layers of a model in turn, each kept as it is finished."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ralo import arch
from ralo.config import ModelConfig
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor
from ralo.matrix import Matrix
from ralo.remake.layer import F32, Refusal, build_layer, matrices_of
from ralo.remake.parts import Parts
from ralo.remake.windows import Windows
from ralo.weights import Weights

M = TypeVar("M", bound=Matrix)
Maker = Callable[[Iterator[F32]], M | Refusal]  # makes the matrix of one place from the inputs that come there


@dataclass(frozen=True)
class Remade(Generic[M]):
    weights: Weights
    matrices: dict[str, M]  # those that were made, by name
    refused: dict[str, Refusal]
    resumed: int  # layers that were there already


def remake(
    ckpt: Checkpoint,
    cfg: ModelConfig,
    weights: Weights,
    windows: Windows,
    parts: Parts,
    makers: Callable[[int, Mapping[str, Tensor]], Mapping[str, Maker[M]]],
    tick: Callable[[], None],
) -> Remade[M]:
    """New matrices where a layer has makers for them, which are given its tensors; `tick` after each that was known."""
    layers, resumed = [], 0
    made: dict[str, M | Refusal] = {}
    family = arch.find(ckpt)
    for i, layer in enumerate(weights.layers):
        wanted = makers(i, family.layer(ckpt, cfg, i))
        shapes = {p: (getattr(layer, p).ic, getattr(layer, p).parts) for p in wanted}
        known = parts.finished(i, shapes)
        here = build_layer(layer, i, windows, {p: _known(known[p], tick) for p in known} or wanted)
        if here and not known:
            parts.keep(i, here)
        resumed += bool(known)
        layers.append(layer.using(matrices_of(here)))
        made |= {f"layers.{i}.{place}": m for place, m in here.items()}
    refused = {name: m for name, m in made.items() if isinstance(m, Refusal)}
    return Remade(replace(weights, layers=tuple(layers)), matrices_of(made), refused, resumed)


def _known(made: M | Refusal, tick: Callable[[], None]) -> Maker[M]:
    def make(_: Iterator[F32]) -> M | Refusal:
        tick()
        return made

    return make


def text_of(tokens: Sequence[int]) -> str:
    """Stands for a text."""
    return hashlib.blake2b(b",".join(b"%d" % t for t in tokens), digest_size=8).hexdigest()
