"""What KWTA promises: faster within a quality budget, dense at its off point, honest counters, a working guard."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ralo import _core, texts
from ralo.accept.kernel import half_of_dense
from ralo.accept.rows import Progress, Row, Task, at_least, at_most, holds
from ralo.autotune import tune_k
from ralo.bench import Ralo, measure
from ralo.calibrate import calibrate
from ralo.compose import compose
from ralo.guard import Guard
from ralo.lm import LM
from ralo.matrix import Matrix
from ralo.model import Dense
from ralo.modes import KWTA
from ralo.modes.base import LayerSlots, Override
from ralo.profile import Profile
from ralo.quality import Quality, perplexity
from ralo.weights import PLACES

LOOK, TUNE = 8192, 12288  # tokens to calibrate on, and others to tune k on
MARGIN = 0.9  # of the budget that is tuned for: other text may come out a little worse
CI_SLACK, OTHER_SLACK = 0.5, 0.5  # points that the interval and another kind of text may be above
HALF, HALF_CHOSEN = 0.58, 0.62
STEPS = 24

mode = KWTA.name


def accept(task: Task, open_model: Callable[[str], LM], say: Progress) -> list[Row]:
    rows: list[Row] = []
    profile = None
    for quant in task.quants:
        lm = open_model(quant)
        if profile is None:
            say("calibrating")
            profile = lm.profile or calibrate(lm, texts.tokens_of(lm, "calibration", LOOK))
        say(f"tuning k at {quant}")
        tuned = tune_k(lm, KWTA(), profile, texts.tokens_of(lm, "tuning", TUNE), MARGIN * task.max_dppl)
        rows += _quality_and_speed(task, lm, tuned.mode, profile, say)
        if quant == task.quants[0]:
            say("invariants")
            rows += _invariants(lm, tuned.mode if tuned.mode.k < 1 else KWTA(k=0.5), profile)
    say("matvecs with half of the channels")
    half, chosen = half_of_dense(task.rounds)
    rows.append(
        at_most(mode, "matvec with half of its channels / whole, 1.1 B shapes, int8", half, HALF, f"{half:.3f}")
    )
    rows.append(at_most(mode, "the same with the choice of winners", chosen, HALF_CHOSEN, f"{chosen:.3f}"))
    return rows


def _quality_and_speed(task: Task, lm: LM, setting: KWTA, profile: Profile, say: Progress) -> list[Row]:
    quant, text = lm.quant, texts.sample(lm)
    lm.use(compose([setting]), profile)
    say(f"quality at {quant}")
    ctx = min(1024, lm.model.cfg.max_context)
    quality = perplexity(lm.model, texts.held_out(lm, task.tokens), ctx, lm.kv)
    other = perplexity(lm.model, texts.tokens_of(lm, "other", task.tokens), ctx, lm.kv)
    say(f"speed at {quant}")
    engines = {"ralo": Ralo(lm, lm.guard, text), "dense": Ralo(lm, Dense(lm.model), text)}
    samples = measure(dict(engines), "decode", task.ctx, 64, task.rounds)
    ratio, (low, high) = samples.ratio("ralo", "dense")
    wanted, shown = task.minimum[quant], f"{ratio:.2f} ({low:.2f} … {high:.2f}) at k = {setting.k:g}"
    limit = task.max_dppl
    return [
        at_least(mode, f"decode speed-up over dense, {quant}, context {task.ctx}", ratio, wanted, shown),
        at_most(mode, f"Δppl % on held-out text, {quant}", quality.delta_ppl_pct, limit, _shown(quality)),
        at_most(mode, "upper end of its 95 % interval", quality.ci95[1], limit + CI_SLACK, f"{quality.ci95[1]:+.2f}"),
        at_most(
            mode, "Δppl % on another kind of text, less that", other.delta_ppl_pct - quality.delta_ppl_pct,
            OTHER_SLACK, f"{other.delta_ppl_pct - quality.delta_ppl_pct:+.2f} ({_shown(other)})",
        ),
    ]  # fmt: skip


def _shown(q: Quality) -> str:
    return f"{q.delta_ppl_pct:+.2f} (KL {q.kl:.4f}, top-1 {q.top1_agree:.3f}, {q.tokens} tokens)"


def _invariants(lm: LM, setting: KWTA, profile: Profile) -> list[Row]:
    text = texts.sample(lm)
    dense, dense_bytes = _run(lm, text, dense=True)
    lm.model.use(_everything_wins(lm))
    whole, _ = _run(lm, text)
    lm.use(compose([setting]), profile)
    kept, bytes_read = _run(lm, text)
    skipped = int(lm.metrics()["kwta.bytes_skipped"])
    rows = [
        holds(mode, "every channel wins: dense bit for bit", bool((dense == whole).all())),
        holds(mode, "fewer win: not dense", bool((dense != kept).any())),
        holds(mode, "bytes skipped are bytes not read", dense_bytes - bytes_read == skipped, f"{skipped} bytes"),
    ]
    return [*rows, _stable(lm, setting, profile), _planted(lm, setting, profile), _wrecked(lm, setting, profile)]


def _run(lm: LM, text: list[int], dense: bool = False) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float32]], int]:
    seq, before = lm.new_sequence(), lm.model.bytes_read
    logits = np.stack([lm.model.step(token, seq, dense) for token in text[:STEPS]])
    return logits, lm.model.bytes_read - before


def _everything_wins(lm: LM) -> list[LayerSlots]:
    out = []
    for weights in lm.model.weights.layers:
        slots = LayerSlots()
        for place in PLACES:
            matrix: Matrix = getattr(weights, place)
            slot = _core.KwtaInput(matrix.ic, None, 1, "top", matrix.ic, 1.0, 1, False, False)
            slots.put(place, slot, mode, "everything wins")
        out.append(slots)
    return out


def _fresh(lm: LM, setting: KWTA, profile: Profile) -> None:
    """The mode with a guard that has seen nothing yet."""
    lm.use(compose([]), profile)
    lm.guard = Guard(lm.model, lm.guard.options)
    lm.use(compose([setting]), profile)


def _text(lm: LM, tokens: int) -> int:
    """Tokens that were made, of as many as were asked for."""
    request = lm.request(texts.sample(lm)[:64], tokens, temperature=1.0, seed=1)
    return sum(piece.token >= 0 for piece in lm.run(request))


def _stable(lm: LM, setting: KWTA, profile: Profile) -> Row:
    """Held winners change less from step to step."""
    flicker = {}
    for duty in (1, 4):
        _fresh(lm, KWTA(k=setting.k, duty=duty, gate="off"), profile)
        _text(lm, 128)
        flicker[duty] = float(lm.metrics()["kwta.flicker"]) / duty  # winners change once in `duty` steps
    shown = f"{flicker[4]:.3f} of winners a step, {flicker[1]:.3f} with duty 1"
    return holds(mode, "winners are stabler with duty 4", flicker[4] < 0.5 * flicker[1], shown)


def _planted(lm: LM, setting: KWTA, profile: Profile) -> Row:
    _fresh(lm, setting, profile)
    occupant = next(o for s in lm.model.slots for o in s.taken.values())
    assert isinstance(occupant.slot, _core.KwtaInput | _core.KwtaMlp)
    occupant.slot.plant = True
    made, caught = _text(lm, STEPS), int(float(lm.metrics()["guard.nonfinite"]))
    shown = f"{caught} caught, {made} tokens"
    return holds(mode, "a planted NaN is caught, counted, and the text goes on", caught == 1 and made == STEPS, shown)


def _wrecked(lm: LM, setting: KWTA, profile: Profile) -> Row:
    """A share that ruins answers is switched off within `every` tokens, and comes back after it is raised."""
    every = lm.guard.options.every
    _fresh(lm, KWTA(where=(Override(None, None, {"k": 0.05, "gate": "off"}),)), profile)
    _text(lm, every)
    off = not lm.guard.modes[mode].on
    lm.use(compose([setting]), profile)
    still_off = not lm.guard.modes[mode].on
    _text(lm, 4 * every)
    back = lm.guard.modes[mode].on
    shown = "; ".join(lm.guard.events) or "the guard did nothing"
    return holds(mode, "the guard switches a ruinous k off and a good one on again", off and still_off and back, shown)
