"""From a checkpoint to a model of mixed precision: layer after layer, each made for what comes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ralo.config import ModelConfig
from ralo.formats import packed
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor
from ralo.matrix import Matrix
from ralo.mix.about import AboutMix
from ralo.mix.matrix import CoarseMatrix, made_for
from ralo.modes.base import TARGETS
from ralo.modes.made import packed_settings
from ralo.modes.mix import Mix, coarser_than
from ralo.profile import fingerprint
from ralo.remake.layer import F32, joined, moments_of
from ralo.remake.model import Maker, Remade, remake, text_of
from ralo.remake.parts import Parts
from ralo.remake.windows import Windows
from ralo.weights import Weights


@dataclass(frozen=True)
class Built:
    weights: Weights
    about: AboutMix
    resumed: int  # layers that were there already


def pack_mix(
    ckpt: Checkpoint,
    cfg: ModelConfig,
    weights: Weights,
    mode: Mix,
    tokens: Sequence[int],
    to: Path,
    progress: Callable[[float], None] | None,
) -> Built:
    """Builds and writes a pack; what was kept on the way goes once it is there."""
    settings, model = packed_settings(mode), fingerprint(weights)
    source = {"where": repr(mode.where), "model": model, "finer": weights.quant, "text": text_of(tokens)}
    parts, done = Parts(to, settings | source, AboutMix), 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(min(1.0, done / (cfg.n_layers * len(TARGETS[mode.target]))))

    def makers(i: int, found: Mapping[str, Tensor]) -> dict[str, Maker[CoarseMatrix]]:
        layer = weights.layers[i]
        here = {p: mode.at(i, p) for p in TARGETS[mode.target]}
        on = [p for p, m in here.items() if m.enabled and coarser_than(m.quant, getattr(layer, p))]
        return {p: _maker(getattr(layer, p), here[p].quant, found, tick) for p in on}

    remade: Remade[CoarseMatrix] = remake(ckpt, cfg, weights, Windows.of(cfg, weights, tokens), parts, makers, tick)
    about = AboutMix(model, settings, {name: AboutMix.record(m) for name, m in remade.matrices.items()})
    packed.save(ckpt, remade.weights, to, about)
    parts.remove()
    return Built(remade.weights, about, remade.resumed)


def _maker(dense: Matrix, quant: str, found: Mapping[str, Tensor], tick: Callable[[], None]) -> Maker[CoarseMatrix]:
    def make(inputs: Iterator[F32]) -> CoarseMatrix:
        tick()
        values, bias = joined(found, dense.parts)
        return made_for(values, dense.parts, bias, quant, moments_of(inputs))

    return make
