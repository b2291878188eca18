"""Finds the setting of a mode's one dial that stays within a quality budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ralo import texts
from ralo.bench import Ralo, measure
from ralo.compose import compose
from ralo.lm import LM
from ralo.model import Dense
from ralo.modes import KWTA
from ralo.profile import Profile
from ralo.quality import Quality, perplexity

LEAST = 0.1  # below, no model is of use
STEP = 0.02  # k is found to within this
CTX = 1024
TIMED_TOKENS, ROUNDS, ALIKE = 32, 25, 0.02  # of a speed measurement, and the difference that does not count


@dataclass(frozen=True)
class Tuned:
    """The setting that was found, its quality, and everything that was tried on the way."""

    mode: KWTA
    quality: Quality
    tried: tuple[tuple[float, Quality], ...]


def tune_k(
    lm: LM,
    mode: KWTA,
    profile: Profile | None,
    tokens: Sequence[int],
    max_dppl: float,
    progress: Callable[[float], None] | None = None,
) -> Tuned:
    """The fastest k whose perplexity is at most `max_dppl` percent above dense: raised while it hurts, lowered while
    there is slack and it pays. The modes that were on before are on again afterwards."""
    before = lm.plan
    tried: dict[float, Quality] = {}

    def quality(k: float) -> Quality:
        lm.use(compose([replace(mode, k=k)]), profile)
        ctx = min(CTX, lm.model.cfg.max_context)
        tried[k] = perplexity(lm.model, tokens, ctx, lm.kv, exact=False)
        if progress:
            progress(min(1.0, len(tried) / 6))
        return tried[k]

    try:
        low, high = LEAST, 1.0  # too little, and enough
        while high - low > STEP:
            middle = round((low + high) / 2, 3)
            if quality(middle).delta_ppl_pct <= max_dppl:
                high = middle
            else:
                low = middle
        middle = round((high + 1) / 2, 3)  # more is kept, but costs need not fall evenly
        held = [k for k in (high, middle) if (tried.get(k) or quality(k)).delta_ppl_pct <= max_dppl]
        k = fastest(lm, mode, profile, sorted({*held, 1.0}))
        found = tried.get(k) or quality(k)
    finally:
        lm.use(before, profile)
    return Tuned(replace(mode, k=k), found, tuple(sorted(tried.items())))


def fastest(lm: LM, mode: KWTA, profile: Profile | None, ks: Sequence[float]) -> float:
    """Of some k, all good enough, the one that decodes fastest; the largest of those that are about as fast."""
    text, speed = texts.sample(lm), {}
    room = lm.model.cfg.max_context - TIMED_TOKENS - 2
    for k in ks:
        lm.use(compose([replace(mode, k=k)]), profile)
        engines = {"ralo": Ralo(lm, lm.model, text), "dense": Ralo(lm, Dense(lm.model), text)}
        samples = measure(dict(engines), "decode", max(0, min(128, room)), min(TIMED_TOKENS, max(1, room)), ROUNDS)
        speed[k], _ = samples.ratio("ralo", "dense")
    return max(k for k in ks if speed[k] >= (1 - ALIKE) * max(speed.values()))
