"""From a model and a text to everything a search needs: costs that were measured, and texts that do not overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from ralo import calibrate, texts
from ralo import profile as profiles
from ralo.errors import RaloError
from ralo.lm import LM
from ralo.matrix import HALVED
from ralo.modes import Mix
from ralo.modes.base import ZEROS
from ralo.modes.mix import HEAD
from ralo.modes.share import F64, GRID, KEEP_ALL, Key, Ways, floor, share_cost, share_time, ways
from ralo.profile import Profile
from ralo.tune.costs import (
    Progress,
    bytes_over_grid,
    coarse_kl,
    coarse_seconds,
    coarse_weights,
    head_kl,
    over_grid,
)
from ralo.tune.record import Record
from ralo.tune.search import TOGETHER
from ralo.tune.sites import Precision, Sites, sites
from ralo.tune.trial import Texts
from ralo.weights import PLACES

GOALS = ("latency", "throughput", "memory")
LOOK, OFTEN, DIAL, CHECK = 8192, 1024, 16384, 16384  # tokens
LEAST, ENOUGH = 2048, 16384  # tokens of a text: fewer are refused, or warned of
COARSE = "int4"
NEVER = 1e9  # a cost that nothing is worth


@dataclass(frozen=True)
class Wish:
    """What is asked for."""

    quant: str  # auto, int8 or int4
    goal: str
    contexts: tuple[int, ...]

    def mixes(self, own: str) -> bool:
        """Whether coarser weights are an option beside the model's own."""
        return own == "int8" and self.quant in ("auto", COARSE)


def split(tokens: Sequence[int], seed: int) -> Texts:
    """A text in three: to look at, to tune on, to check with. The seed says where it is cut."""
    if len(tokens) < LEAST:
        raise RaloError(f"the text has {len(tokens)} tokens; tuning needs at least {LEAST}, better {3 * ENOUGH}")
    start = seed * 4099 % len(tokens)
    tokens = [*tokens[start:], *tokens[:start]]
    look = min(LOOK, len(tokens) // 4)
    dial = min(DIAL, (len(tokens) - look) // 2)
    rest = tokens[look + dial :]
    return Texts(list(tokens[:look]), list(tokens[look : look + dial]), list(rest[:CHECK]))


def shipped(lm: LM) -> Texts:
    """Texts that ship with ralo; `held_out` is none of them."""
    seen = texts.tokens_of(lm, "calibration", LOOK + DIAL)
    return Texts(seen[:LOOK], seen[LOOK:], texts.tokens_of(lm, "tuning", CHECK))


def known_profile(lm: LM, beside: Path, look: Sequence[int], record: Record, progress: Progress) -> Profile:
    """The profile of an earlier search, that of the model, or a new one."""
    if beside.exists():
        found = profiles.load(beside)
        found.check(lm.model.weights, beside)
        record.get("profile", lambda: {"file": beside.name}, must=True)
        return found
    made: list[Profile] = []

    def make() -> dict[str, str]:
        made.append(lm.profile or calibrate.calibrate(lm, look, OFTEN, progress))
        made[0].save(beside)
        return {"file": beside.name}

    record.known.pop("profile", None)  # its file is gone
    record.get("profile", make, must=True)
    return made[0]


def dials(
    lm: LM, profile: Profile, wish: Wish, mix: Mix, look: Sequence[int], record: Record, progress: Progress
) -> dict[str, Sites]:
    """The joint dial, and that of each mode alone."""
    skipping = wish.goal != "memory"
    precisions = [_own(lm, profile)]
    if wish.mixes(lm.quant):
        precisions = _with_coarse(lm, profile, wish, mix, look, record, progress, precisions[0])
    if skipping:
        precisions = [replace(p, seconds=_of_open_neurons(lm, profile, p.seconds)) for p in precisions]
    out = {TOGETHER: sites(lm.quant, mix, precisions, skipping)}
    if len(precisions) > 1 and skipping:
        out["kwta alone"] = sites(lm.quant, mix, precisions[:1], True)
        out["mix alone"] = sites(lm.quant, mix, precisions, False)
    return out


def _own(lm: LM, profile: Profile) -> Precision:
    """The model's own precision."""
    by = {place: ways(profile, place) for place in PLACES} if lm.quant == HALVED else {}
    seconds = {place: share_time(profile, place, by.get(place, Ways())) for place in PLACES}
    return Precision(lm.quant, _shares(lm, profile, by), seconds)


def _shares(lm: LM, profile: Profile, by: Mapping[str, Ways]) -> dict[Key, F64]:
    """KL over GRID by layer and place, of what a profile says."""
    kl = {}
    for i, place in product(range(len(lm.model.weights.layers)), PLACES):
        way = by.get(place, Ways())
        nearly = (GRID >= KEEP_ALL) & (GRID < 1) & (not way.tiles)  # a list of those costs more than it saves
        kl[i, place] = np.where(nearly, NEVER, share_cost(profile, (i, place), way))
    if lm.model.cfg.act in ZEROS and lm.model.cfg.gated:  # silent neurons are skipped as a whole
        fewer = {"up": GRID < KEEP_ALL, "down": GRID < 1}
        kl = {key: np.where(fewer[key[1]], NEVER, curve) if key[1] in fewer else curve for key, curve in kl.items()}
    return kl


def _with_coarse(
    lm: LM, profile: Profile, wish: Wish, mix: Mix, look: Sequence[int], record: Record, progress: Progress,
    own: Precision,
) -> list[Precision]:  # fmt: skip
    """The coarser precision beside the own one, or alone where it is asked for; and the head, which has no channels to
    skip, as an option of both."""
    coarse, head = coarse_weights(lm, mix)
    layers, of = lm.model.weights.layers, f"{COARSE} {mix.pack}".strip()
    found = record.get(f"kl at {of}", lambda: coarse_kl(lm, coarse, look[: OFTEN + 1], progress), must=True)
    shares = _shares(lm, profile, {})
    kl = {key: max(0.0, found[f"{key[0]}.{key[1]}"] - floor(profile, key[0])) + curve for key, curve in shares.items()}
    took = record.get(f"seconds at {of}", lambda: coarse_seconds(lm, profile, look, coarse, head), must=True)
    seconds = over_grid(took["places"])
    if head is not None and wish.quant == "auto":  # int4 is layers alone, as in a model loaded at int4
        lost = record.get(f"head at {of}", lambda: {"kl": head_kl(lm, head, look[: OFTEN + 1])}, must=True)
        key, never = (len(layers) - 1, HEAD), np.where(GRID < 1, NEVER, 0.0)
        kl[key], seconds[HEAD] = lost["kl"] + never, np.full(len(GRID), took["head"])
        own = replace(
            own, kl={**own.kl, key: never}, seconds={**own.seconds, HEAD: np.full(len(GRID), took["own head"])}
        )
    if wish.goal == "memory":
        seconds = bytes_over_grid(coarse, head)
        own = replace(own, seconds=bytes_over_grid(layers, lm.model.weights.head))
    return [*([own] if wish.quant != COARSE else []), Precision(COARSE, kl, seconds)]


def _of_open_neurons(lm: LM, profile: Profile, seconds: Mapping[str, F64]) -> dict[str, F64]:
    """What places take where silent neurons are skipped: the gate as it is read, and of the others their part."""
    cfg = lm.model.cfg
    if cfg.act not in ZEROS or not cfg.gated:
        return dict(seconds)
    active = float(np.mean([(gates > 0).mean() for gates in profile.gates.values()]))
    up, down = seconds["up"], seconds["down"]
    return {**seconds, "up": (up + active * up[-1]) / 2, "down": active * down}
