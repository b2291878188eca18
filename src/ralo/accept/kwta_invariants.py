"""What holds of KWTA whatever it gains: dense at its off point, honest counters, stable winners, a working guard."""

from __future__ import annotations

import numpy as np

from ralo import _core, texts
from ralo.accept.rows import Row, holds, needs_context, tried
from ralo.accept.watched import exported
from ralo.compose import compose
from ralo.guard import Guard
from ralo.lm import LM
from ralo.matrix import Matrix
from ralo.modes import KWTA
from ralo.modes.base import LayerSlots, Override
from ralo.profile import Profile
from ralo.weights import PLACES

STEPS, PROMPT = 24, 64

mode = KWTA.name


def accept_invariants(lm: LM, setting: KWTA, profile: Profile) -> list[Row]:
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
    return rows + tried(mode, "stable winners, guard and metrics", lambda: _guarded(lm, setting, profile))


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
    """Tokens that were made, of as many as were asked for: in several texts where one ends before."""
    made = 0
    for seed in range(1, tokens + 1):
        request = lm.request(texts.sample(lm)[:PROMPT], tokens - made, temperature=1.0, seed=seed)
        made += sum(piece.token >= 0 for piece in lm.run(request))
        if made >= tokens:
            break
    return made


def _guarded(lm: LM, setting: KWTA, profile: Profile) -> list[Row]:
    needs_context(lm, PROMPT + STEPS)
    rows = [_stable(lm, profile), _planted(lm, setting, profile), _wrecked(lm, setting, profile)]
    return [*rows, exported(mode, lm.metrics())]


def _stable(lm: LM, profile: Profile) -> Row:
    """Held winners change less from step to step."""
    flicker = {}
    for duty in (1, 4):
        _fresh(lm, KWTA(k=0.5, fine=1.0, duty=duty, gate="off"), profile)  # a tuned k may let all win, by halves
        _text(lm, 128)
        flicker[duty] = float(lm.metrics()["kwta.flicker"]) / duty  # winners change once in `duty` steps
    shown = f"{flicker[4]:.3f} of winners a step, {flicker[1]:.3f} with duty 1"
    return holds(mode, "winners are stabler with duty 4", flicker[4] < 0.5 * flicker[1], shown)


def _planted(lm: LM, setting: KWTA, profile: Profile) -> Row:
    _fresh(lm, setting, profile)
    occupant = next(o for s in lm.model.slots for o in s.taken.values())
    assert isinstance(occupant.slot, _core.KwtaInput | _core.KwtaTiles | _core.KwtaMlp)
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
