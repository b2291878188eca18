"""From a checkpoint to a model with factors: ranks that are shared out, every layer in turn, kept as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ralo import arch
from ralo.config import ModelConfig
from ralo.errors import RaloError
from ralo.formats import packed
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor
from ralo.matrix import Matrix
from ralo.modes.base import TARGETS
from ralo.modes.made import packed_settings
from ralo.modes.tt import TT
from ralo.profile import fingerprint
from ralo.remake.felt import Key, felt
from ralo.remake.layer import F32, Refusal, build_layer, moments_of
from ralo.remake.model import Maker, Remade, remake, text_of
from ralo.remake.parts import Parts
from ralo.remake.windows import Windows
from ralo.tt.about import AboutTT
from ralo.tt.build import build
from ralo.tt.matrix import FactoredMatrix
from ralo.tt.place import Place, Recipe
from ralo.tt.ranks import DENSE, UNIT, Choice, allotted
from ralo.weights import Weights

GAP, GAP_TRAIN = 0.3, 0.02  # the most that factors may miss, where nothing else is said
RANK_REST, RANK_TRAIN = 64, 4
NOT_WORTH = "takes more than factors would save: within the share others feel it less"


@dataclass(frozen=True)
class Built:
    weights: Weights
    about: AboutTT
    resumed: int  # layers that were there already


def pack_tt(
    ckpt: Checkpoint,
    cfg: ModelConfig,
    weights: Weights,
    mode: TT,
    tokens: Sequence[int],
    to: Path,
    progress: Callable[[float], None] | None,
) -> Built:
    """Builds and writes a pack; what was kept on the way goes once it is there."""
    check_overrides(mode)
    settings, model = packed_settings(mode), fingerprint(weights)
    source = {"where": repr(mode.where), "model": model, "quant": weights.quant, "text": text_of(tokens)}
    parts = Parts(to, settings | source, AboutTT)
    on = [(i, p) for i in range(cfg.n_layers) for p in TARGETS[mode.target] if mode.at(i, p).enabled]
    steps, done = 2 * len(on), 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(min(1.0, done / steps))

    ranks = parts.budget(lambda: _ranks(ckpt, cfg, weights, mode, on, tokens, tick))

    def makers(i: int, found: Mapping[str, Tensor]) -> dict[str, Maker[FactoredMatrix]]:
        places = [p for p in TARGETS[mode.target] if (i, p) in ranks]
        return {p: _maker(cfg, weights, mode, i, p, found, ranks[i, p], tick) for p in places}

    remade: Remade[FactoredMatrix] = remake(ckpt, cfg, weights, Windows.of(cfg, weights, tokens), parts, makers, tick)
    records = {name: AboutTT.record(m) for name, m in remade.matrices.items()}
    about = AboutTT(model, settings, records, {name: str(why) for name, why in remade.refused.items()})
    packed.save(ckpt, remade.weights, to, about)
    parts.remove()
    return Built(remade.weights, about, remade.resumed)


def check_overrides(mode: TT) -> None:
    """What is said of some layers only must be something that each matrix tells by itself."""
    for override in mode.where:
        if bad := [name for name in override.values if name not in ("on", "rank", "gap", "rest", "maxvol_k")]:
            raise RaloError(f"[[tt.where]] cannot set {bad[0].replace('_', '-')} for packing")


def _recipe(mode: TT, place: str, quant: str, rank: int) -> Recipe:
    train = mode.form != "best"
    rest = not train and (mode.rest == "on" or (mode.rest == "auto" and place in TARGETS["mlp"]))
    start = mode.rank or (RANK_TRAIN if train else RANK_REST if rest else rank)
    gap = mode.gap or (GAP_TRAIN if train else GAP)
    return Recipe(mode.form, start, mode.rank > 0, gap, mode.maxvol_k, mode.cores, rest, quant)


def _maker(
    cfg: ModelConfig, weights: Weights, mode: TT, i: int, name: str, found: Mapping[str, Tensor], rank: int,
    tick: Callable[[], None],
) -> Maker[FactoredMatrix]:  # fmt: skip
    recipe, dense = _recipe(mode.at(i, name), name, weights.quant, rank), getattr(weights.layers[i], name)

    def make(inputs: Iterator[F32]) -> FactoredMatrix | Refusal:
        tick()
        if not recipe.rank:
            return Refusal(NOT_WORTH)
        return build(Place.of(found, name, moments_of(inputs), cfg.head_dim), recipe, dense)

    return make


def _ranks(
    ckpt: Checkpoint, cfg: ModelConfig, weights: Weights, mode: TT, on: Sequence[Key], tokens: Sequence[int],
    tick: Callable[[], None],
) -> dict[Key, int]:  # fmt: skip
    """By the share, where no rank is given; elsewhere the recipe knows."""
    free = {key for key in on if not _recipe(mode.at(*key), key[1], weights.quant, DENSE).rank}
    choices: dict[Key, Choice] = {}
    family, windows = arch.find(ckpt), Windows.of(cfg, weights, tokens)

    def trials() -> Iterator[tuple[Key, Matrix]]:
        for i, layer in enumerate(weights.layers):
            found, tried = family.layer(ckpt, cfg, i), dict[Key, Matrix]()
            probes = {p: _probe(cfg, weights.quant, (i, p), found, choices, tried) for _, p in free if (i, p) in free}
            build_layer(layer, i, windows, probes)
            for trial in tried.items():
                tick()
                yield trial

    loss = felt(cfg, weights, trials(), tokens) if free else {}
    ranks = allotted(mode.share, {key: replace(choice, kl=loss[key]) for key, choice in choices.items()})
    return dict.fromkeys(on, DENSE) | ranks


def _probe(
    cfg: ModelConfig, quant: str, key: Key, found: Mapping[str, Tensor], choices: dict[Key, Choice],
    tried: dict[Key, Matrix],
) -> Maker[FactoredMatrix]:  # fmt: skip
    """Makes factors of half the rank that a place could have, to be tried, and changes nothing."""

    def make(inputs: Iterator[F32]) -> Refusal:
        place = Place.of(found, key[1], moments_of(inputs), cfg.head_dim)
        weighed, shape = place.weighed(), place.wanted.shape
        if (most := Choice.of(shape).most) >= UNIT:
            probe = max(UNIT, most // 2 // UNIT * UNIT)
            choices[key] = Choice.of(shape, weighed.s, probe)
            tried[key] = place.two_factors(weighed, probe, quant)
        return Refusal("only tried")

    return make
