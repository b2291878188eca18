"""From a checkpoint to a model with procedural weights: every layer in turn, kept as it is finished."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ralo import arch
from ralo.config import ModelConfig
from ralo.errors import RaloError
from ralo.formats import packed
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor
from ralo.modes.base import TARGETS
from ralo.modes.proc import Proc
from ralo.options import fields
from ralo.proc.about import About, Made
from ralo.proc.budget import allotted, sensitivity
from ralo.proc.build import F32, Recipe, build_layer, build_matrix, moments_of
from ralo.proc.build_hashed import build_hashed
from ralo.proc.parts import Parts
from ralo.proc.windows import Windows
from ralo.profile import fingerprint
from ralo.weights import Weights

FELT_STEPS = 4  # of the progress shown, what feeling out the places takes
WINDOW = 512  # tokens that see each other while the text goes through
BY_LAYER = ("on", "deltas", "generator", "watermark", "shed_eps", "fanout")  # may differ from layer to layer
NOT_BUILT = ("on", "pack")  # settings that do not change what is built


@dataclass(frozen=True)
class Built:
    weights: Weights
    about: About
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
    settings: dict[str, Any] = {f.name: getattr(mode, f.name) for f in fields(Proc) if f.name not in NOT_BUILT}
    model, places = fingerprint(weights), TARGETS[mode.target]
    width = min(WINDOW, cfg.max_context)
    windows = Windows(cfg, weights, [tokens[i : i + width] for i in range(0, len(tokens), width)])
    source = {"where": repr(mode.where), "model": model, "quant": weights.quant, "text": hash_of(tokens)}
    parts = Parts(to, settings | source)
    family, layers, resumed = arch.find(ckpt), [], 0
    digests: dict[str, str] = {}
    steps, done = FELT_STEPS + cfg.n_layers * len(places), 0.0

    def tick(more: float = 1.0) -> None:
        nonlocal done
        done += more
        if progress:
            progress(done / steps)

    columns = parts.budget(lambda: _columns(ckpt, cfg, weights, mode, tokens, tick))

    for i, layer in enumerate(weights.layers):
        at = {p: mode.at(i, p) for p in places if (i, p) in columns}
        shapes = {p: (getattr(layer, p).ic, getattr(layer, p).parts) for p in at}
        found, known = family.layer(ckpt, cfg, i), parts.finished(i, shapes)
        makers = {p: _maker(found, p, m, columns[i, p], known.get(p), tick) for p, m in at.items()}
        made = build_layer(layer, i, windows, makers)
        if not known and made:
            parts.keep(i, made)
        resumed += bool(known)
        layers.append(layer.using(made))
        digests |= {f"layers.{i}.{place}": m.digest() for place, m in made.items()}
    about = About(model, settings, digests)
    return Built(replace(weights, layers=tuple(layers)), about, resumed), parts


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


def _maker(
    found: Mapping[str, Tensor], place: str, mode: Proc, columns: int, known: Made | None, tick: Callable[[], None]
) -> Callable[[Iterator[F32]], Made]:
    """Makes one matrix, or takes the one that is known."""

    def make(inputs: Iterator[F32]) -> Made:
        made: Made
        if known is not None:
            made = known
        elif mode.form == "seed":
            settings = (mode.fanout, int(mode.block), mode.base_scale, mode.shed_eps, mode.watermark)
            made, _ = build_hashed(found, place, *settings)
        else:
            recipe = Recipe(columns, mode.deltas, mode.shed_eps, mode.watermark, mode.generator)
            made, _ = build_matrix(found, place, recipe, moments_of(inputs))
        tick()
        return made

    return make


def hash_of(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(b",".join(b"%d" % t for t in tokens), digest_size=8).hexdigest()
