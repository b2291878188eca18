"""From a checkpoint to a model with procedural weights: every layer in turn, kept as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ralo.config import ModelConfig
from ralo.errors import RaloError
from ralo.formats import packed
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor
from ralo.modes.base import TARGETS
from ralo.modes.made import packed_settings
from ralo.modes.proc import Proc
from ralo.proc.about import AboutProc, Made
from ralo.proc.budget import allotted, sensitivity
from ralo.proc.build import F32, Recipe, build_matrix
from ralo.proc.build_hashed import build_hashed
from ralo.profile import fingerprint
from ralo.remake.layer import moments_of
from ralo.remake.model import Maker, Remade, remake, text_of
from ralo.remake.parts import Parts
from ralo.remake.windows import Windows
from ralo.weights import Weights

FELT_STEPS = 4  # of the progress shown, what feeling out the places takes
BY_LAYER = ("on", "deltas", "generator", "watermark", "shed_eps", "fanout")  # may differ from layer to layer


@dataclass(frozen=True)
class Built:
    weights: Weights
    about: AboutProc
    resumed: int  # layers that were there already


def build_proc(
    ckpt: Checkpoint,
    cfg: ModelConfig,
    weights: Weights,
    mode: Proc,
    tokens: Sequence[int],
    to: Path,
    progress: Callable[[float], None] | None,
) -> tuple[Built, Parts]:
    """The weights with procedural ones at the mode's places, and the parts on disk, which go once they are packed."""
    check_overrides(mode)
    settings = packed_settings(mode)
    model, places = fingerprint(weights), TARGETS[mode.target]
    windows = Windows.of(cfg, weights, tokens)
    source = {"where": repr(mode.where), "model": model, "quant": weights.quant, "text": text_of(tokens)}
    parts = Parts(to, settings | source, AboutProc)
    steps, done = FELT_STEPS + cfg.n_layers * len(places), 0.0

    def tick(more: float = 1.0) -> None:
        nonlocal done
        done += more
        if progress:
            progress(done / steps)

    columns = parts.budget(lambda: _columns(ckpt, cfg, weights, mode, tokens, tick))

    def makers(i: int, found: Mapping[str, Tensor]) -> dict[str, Maker[Made]]:
        return {p: _maker(found, p, mode.at(i, p), columns[i, p], tick) for p in places if (i, p) in columns}

    remade: Remade[Made] = remake(ckpt, cfg, weights, windows, parts, makers, tick)
    about = AboutProc(model, settings, {name: AboutProc.record(m) for name, m in remade.matrices.items()})
    return Built(remade.weights, about, remade.resumed), parts


def pack_proc(
    ckpt: Checkpoint,
    cfg: ModelConfig,
    weights: Weights,
    mode: Proc,
    tokens: Sequence[int],
    to: Path,
    progress: Callable[[float], None] | None,
) -> Built:
    """Builds and writes a pack; what was kept on the way goes once it is there."""
    built, parts = build_proc(ckpt, cfg, weights, mode, tokens, to, progress)
    packed.save(ckpt, built.weights, to, built.about)
    parts.remove()
    return built


def bits_a_weight(matrices: Sequence[Made]) -> float:
    """Of memory, on average over some matrices; padding is no weight."""
    return 8 * sum(m.nbytes for m in matrices) / sum(m.ic * sum(m.parts.values()) for m in matrices)


def check_overrides(mode: Proc) -> None:
    """A pack has one form; what is said of some layers only must be something that each matrix tells by itself."""
    for override in mode.where:
        if bad := [name for name in override.values if name not in BY_LAYER]:
            known = ", ".join(name.replace("_", "-") for name in BY_LAYER)
            raise RaloError(f"[[proc.where]] cannot set {bad[0].replace('_', '-')} for packing, only {known}")


def _columns(
    ckpt: Checkpoint,
    cfg: ModelConfig,
    weights: Weights,
    mode: Proc,
    tokens: Sequence[int],
    tick: Callable[[float], None],
) -> dict[tuple[int, str], int]:
    """Of every place where the mode is on."""
    on = [(i, p) for i in range(cfg.n_layers) for p in TARGETS[mode.target] if mode.at(i, p).enabled]
    shapes = {(i, p): (m.ic, m.oc) for i, p in on if (m := getattr(weights.layers[i], p))}
    if mode.form == "seed":
        return dict.fromkeys(on, 0)  # its memory is the fanout's
    felt = sensitivity(ckpt, cfg, weights, on, tokens, lambda: tick(FELT_STEPS / len(on)))
    return allotted(mode.bits, felt, shapes)


def _maker(found: Mapping[str, Tensor], place: str, mode: Proc, columns: int, tick: Callable[[], None]) -> Maker[Made]:
    """Makes one matrix."""

    def make(inputs: Iterator[F32]) -> Made:
        made: Made
        if mode.form == "seed":
            settings = (mode.fanout, int(mode.block), mode.base_scale, mode.shed_eps, mode.watermark)
            made, _ = build_hashed(found, place, *settings)
        else:
            recipe = Recipe(columns, mode.deltas, mode.shed_eps, mode.watermark, mode.generator)
            made, _ = build_matrix(found, place, recipe, moments_of(inputs))
        tick()
        return made

    return make
