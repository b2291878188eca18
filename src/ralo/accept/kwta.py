"""What KWTA promises: faster within a quality budget, dense at its off point, honest counters, a working guard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ralo import texts
from ralo.accept.kernel import half_of_dense
from ralo.accept.kwta_invariants import accept_invariants
from ralo.accept.literal import literal
from ralo.accept.rows import Progress, Row, Task, at_least, at_most, holds
from ralo.autotune import Tuned, tune_k
from ralo.bench import Ralo, measure
from ralo.calibrate import calibrate
from ralo.compose import compose
from ralo.lm import LM
from ralo.model import Dense
from ralo.modes import KWTA
from ralo.profile import Profile
from ralo.quality import Quality, perplexity

LOOK, TUNE = 8192, 12288  # tokens to calibrate on, and others to tune k on
MARGIN = 0.9  # of the budget that is tuned for: other text may come out a little worse
CI_SLACK, OTHER_SLACK = 0.5, 0.5  # points that the interval and another kind of text may be above
HALF, HALF_CHOSEN = 0.58, 0.62
DOCUMENT_K, FASTER, DOCUMENT_DPPL = (0.4, 0.6), 1.10, 2.0  # the document's k, speed-up and percent
CTX = 1024

mode = KWTA.name


def accept(task: Task, open_model: Callable[[str], LM], say: Progress) -> list[Row]:
    rows: list[Row] = []
    for quant in task.quants:
        lm = open_model(quant)
        say(f"calibrating at {quant}")  # what a share is worth in time is another thing at another precision
        profile = lm.profile or calibrate(lm, texts.tokens_of(lm, "calibration", LOOK))
        say(f"tuning k at {quant}")
        tuned = tune_k(lm, KWTA(), profile, texts.tokens_of(lm, "tuning", TUNE), MARGIN * task.max_dppl)
        found = _measured(task, lm, tuned.mode, profile, say)
        rows += _quality_and_speed(task, lm, found, profile, say)
        if quant == task.quants[0]:
            rows.append(_autotuned(tuned, MARGIN * task.max_dppl))
            rows += _document(task, lm, found, profile, say)
            say("invariants")
            rows += accept_invariants(lm, tuned.mode if tuned.mode.k < 1 else KWTA(k=0.5), profile)
    say("matvecs with half of the channels")
    half, chosen = half_of_dense(task.rounds)
    rows.append(
        at_most(mode, "matvec with half of its channels / whole, 1.1 B shapes, int8", half, HALF, f"{half:.3f}")
    )
    rows.append(at_most(mode, "the same with the choice of winners", chosen, HALF_CHOSEN, f"{chosen:.3f}"))
    return rows


@dataclass(frozen=True)
class _Found:
    """What a setting gives at one precision."""

    setting: KWTA
    quality: Quality
    ratio: float
    shown: str


def _measured(task: Task, lm: LM, setting: KWTA, profile: Profile, say: Progress) -> _Found:
    quant, text = lm.quant, texts.sample(lm)
    lm.use(compose([setting]), profile)
    say(f"quality at {quant}, k = {setting.k:g}")
    quality = perplexity(lm.model, texts.held_out(lm, task.tokens), min(CTX, lm.model.cfg.max_context), lm.kv)
    say(f"speed at {quant}, k = {setting.k:g}")
    engines = {"ralo": Ralo(lm, lm.guard, text), "dense": Ralo(lm, Dense(lm.model), text)}
    samples = measure(dict(engines), "decode", task.ctx, 64, task.rounds)
    ratio, (low, high) = samples.ratio("ralo", "dense")
    return _Found(setting, quality, ratio, f"{ratio:.2f} ({low:.2f} … {high:.2f}) at k = {setting.k:g}")


def _quality_and_speed(task: Task, lm: LM, found: _Found, profile: Profile, say: Progress) -> list[Row]:
    quant, limit, quality = lm.quant, task.max_dppl, found.quality
    say(f"another kind of text at {quant}")
    lm.use(compose([found.setting]), profile)
    tokens = texts.tokens_of(lm, "other", task.tokens)
    other = perplexity(lm.model, tokens, min(CTX, lm.model.cfg.max_context), lm.kv)
    line = f"decode speed-up over dense, {quant}, context {task.ctx}"
    return [
        at_least(mode, line, found.ratio, task.minimum[quant], found.shown),
        at_most(mode, f"Δppl % on held-out text, {quant}", quality.delta_ppl_pct, limit, _shown(quality)),
        at_most(mode, "upper end of its 95 % interval", quality.ci95[1], limit + CI_SLACK, f"{quality.ci95[1]:+.2f}"),
        at_most(
            mode, "Δppl % on another kind of text, less that", other.delta_ppl_pct - quality.delta_ppl_pct,
            OTHER_SLACK, f"{other.delta_ppl_pct - quality.delta_ppl_pct:+.2f} ({_shown(other)})",
        ),
    ]  # fmt: skip


def _autotuned(tuned: Tuned, budget: float) -> Row:
    """Raised where it hurt, lowered where there was slack."""
    k, hurt = tuned.mode.k, [k for k, q in tuned.tried if q.delta_ppl_pct > budget]
    ok = tuned.quality.delta_ppl_pct <= budget and all(k > low for low in hurt)
    said = f"{k:g} of " + ", ".join(f"{at:g}: {q.delta_ppl_pct:+.2f}" for at, q in tuned.tried)
    line = f"autotune: k rises where Δppl is above {budget:g} %, falls where it is not"
    return holds(mode, line, ok, said)


def _document(task: Task, lm: LM, found: _Found, profile: Profile, say: Progress) -> list[Row]:
    """The document's own k: the one that was tuned, or the nearest that it speaks of."""
    low, high = DOCUMENT_K
    k = min(max(found.setting.k, low), high)
    if k != found.setting.k:
        found = _measured(task, lm, replace(found.setting, k=k), profile, say)
    line, tokens = f"k from {low:g} to {high:g}, {lm.quant}", texts.held_out(lm, task.tokens)
    return [
        at_least(mode, f"{line}: decode speed-up over dense, context {task.ctx}", found.ratio, FASTER, found.shown),
        at_most(mode, f"{line}: Δppl %", found.quality.delta_ppl_pct, DOCUMENT_DPPL, _shown(found.quality)),
        literal(lm, KWTA(form="seed", k=low, duty=2), f"k {low:g}, blocks of 32, duty 2", tokens,
                min(CTX, lm.model.cfg.max_context)),
    ]  # fmt: skip


def _shown(q: Quality) -> str:
    return f"{q.delta_ppl_pct:+.2f} (KL {q.kl:.4f}, top-1 {q.top1_agree:.3f}, {q.tokens} tokens)"
