"""From a checkpoint to a model of mixed precision: layer after layer, each made for what comes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ralo import arch
from ralo.config import ModelConfig
from ralo.formats import packed
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor
from ralo.matrix import Matrix
from ralo.mix.about import AboutMix
from ralo.mix.matrix import CoarseMatrix, made_for
from ralo.modes.base import TARGETS
from ralo.modes.made import packed_settings
from ralo.modes.mix import HEAD, Mix, coarser_than
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
            progress(min(1.0, done / (cfg.n_layers * len(TARGETS[mode.target]) + 1)))

    def makers(i: int, found: Mapping[str, Tensor]) -> dict[str, Maker[CoarseMatrix]]:
        own = {p: getattr(weights.layers[i], p) for p in TARGETS[mode.target]}
        wanted = {p: quant for p, quant in mode.places(i, last=False).items() if coarser_than(quant, own[p])}
        return {p: _maker(own[p], quant, found, tick) for p, quant in wanted.items()}

    windows = Windows.of(cfg, weights, tokens)
    remade: Remade[CoarseMatrix] = remake(ckpt, cfg, weights, windows, parts, makers, tick)
    made, out = dict(remade.matrices), remade.weights
    head = mode.places(cfg.n_layers - 1, last=True).get(HEAD)
    if head and coarser_than(head, weights.head):
        top = arch.find(ckpt).top(ckpt, cfg)
        make = _maker(weights.head, head, {HEAD: top.get(HEAD, top["embed"])}, tick)
        made[HEAD] = make(windows.normed(weights.final_norm))
        out = replace(out, head=made[HEAD])
    about = AboutMix(model, settings, {name: AboutMix.record(m) for name, m in made.items()})
    packed.save(ckpt, out, to, about)
    parts.remove()
    return Built(out, about, remade.resumed)


def _maker(
    dense: Matrix, quant: str, found: Mapping[str, Tensor], tick: Callable[[], None]
) -> Callable[[Iterator[F32]], CoarseMatrix]:
    def make(inputs: Iterator[F32]) -> CoarseMatrix:
        tick()
        values, bias = joined(found, dense.parts)
        return made_for(values, dense.parts, bias, quant, moments_of(inputs))

    return make
