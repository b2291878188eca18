"""What is promised of every mode: its metrics are there by name, the guard switches it off and on again, and a result
that is not finite is computed again densely."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

from ralo import texts
from ralo.accept.rows import Row, holds, needs_context
from ralo.compose import compose
from ralo.errors import RaloError
from ralo.guard import FARTHEST, METRICS, WINDOW, Guard, GuardOptions
from ralo.lm import LM
from ralo.matrix import U16
from ralo.modes.base import Mode
from ralo.profile import Profile
from ralo.sequence import Sequence

EXPORTED = {  # by mode: the first word of its metrics, and the names that the documents give them
    "state-pack": ("pack", "enabled mode density active popcnt recall mass"),
    "kwta": ("kwta", "keep_ratio duty_hits temp flicker bytes_skipped"),
    "event": ("event", "enabled budget_ms_used quorum_hits topk_kept quality_gap stale_pct"),
    "proc": ("proc", "fanout_effective trims mem_ratio base_scale"),
    "tt": ("tt", "enabled rank gap speedup mem_saved"),
    "mix": ("mix", "enabled mem_ratio"),
}
EVERY = 2  # tokens between two comparisons
OFF, BACK = 2 * EVERY, WINDOW * EVERY  # tokens within which a mode is off, and on again
STEPS = 8
UNREACHABLE = -1.0  # nats: everything is farther from dense
INFINITY = 0x7F80  # bf16


def watched(lm: LM, setting: Mode, ctx: int = 0, profile: Profile | None = None) -> list[Row]:
    """Of a mode that is on alone, after `ctx` tokens of text. All is off afterwards."""
    name, options = setting.name, lm.guard.options
    needs_context(lm, ctx + OFF + STEPS + BACK + STEPS)
    _alone(lm, setting, GuardOptions(every=EVERY), profile)
    if name not in lm.guard.modes:
        raise RaloError("no layer of this model has a place for it")
    rows = [_switched(lm, name, ctx), exported(name, lm.metrics())]
    lm.use(compose([]), profile)
    lm.guard = Guard(lm.model, options)
    return rows


def _alone(lm: LM, setting: Mode, options: GuardOptions, profile: Profile | None) -> None:
    """With a guard that has seen nothing yet."""
    lm.use(compose([]), profile)
    lm.guard = Guard(lm.model, options)
    lm.use(compose([setting]), profile)


def _start(lm: LM, ctx: int) -> tuple[Sequence, list[int]]:
    """A text of that length, and what follows."""
    text, seq = texts.sample(lm), lm.new_sequence()
    if ctx:
        lm.model.prefill(text[:ctx], seq, dense=True)
    return seq, text[ctx:]


def _fed(lm: LM, seq: Sequence, tokens: list[int]) -> None:
    for token in tokens:
        clock = time.perf_counter()
        lm.guard.step(token, seq)
        lm.guard.took(time.perf_counter() - clock)


def _switched(lm: LM, mode: str, ctx: int) -> Row:
    """By a limit that nothing keeps, and then by one that everything finite does."""
    (seq, text), watch = _start(lm, ctx), lm.guard.modes[mode]
    watch.limit = UNREACHABLE
    _fed(lm, seq, text[:OFF])
    off, at, dense = not watch.on, OFF + STEPS, seq.clone()
    pairs = [(lm.guard.step(t, seq), lm.model.step(t, dense, dense=True)) for t in text[OFF:at]]
    same = all(bool((ours == other).all()) for ours, other in pairs)
    watch.limit = FARTHEST
    _fed(lm, seq, text[at : at + BACK])
    back = watch.on
    _fed(lm, seq, text[at + BACK : at + BACK + STEPS])
    said = "; ".join(lm.guard.events) or "the guard did nothing"
    line = "guard: too far from dense it is off, the text dense bit for bit; near again it is on"
    return holds(mode, line, off and same and back, said if same else f"{said}; not dense while off")


def exported(mode: str, found: Mapping[str, float | str]) -> Row:
    """The metrics of a mode that has run, and the guard's."""
    word, names = EXPORTED[mode][0], EXPORTED[mode][1].split()
    values = {name: float(found.get(f"{word}.{name}", "nan")) for name in names}
    missing = [f"{word}.{name}" for name, value in values.items() if not isfinite(value)]
    missing += [f"guard.{name}" for name in METRICS if f"guard.{name}" not in found]
    said = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    line = f"metrics: {word}.{' .'.join(names)}, guard.*"
    return holds(mode, line, not missing, f"missing: {', '.join(missing)}" if missing else said)


def plant(lm: LM) -> int:
    """The next result of one occupant of every kind gets a NaN; how many."""
    kinds: dict[type, Any] = {type(o.slot): o.slot for slots in lm.model.slots for o in slots.taken.values()}
    for slot in kinds.values():
        slot.plant = True
    return len(kinds)


def infinite(scales: U16 | None) -> U16:
    """Scales of weights that give no finite result."""
    assert scales is not None
    out = scales.copy()
    out[0, 0] = INFINITY
    return out


def caught(lm: LM, mode: str, line: str, planted: int, ctx: int = 0) -> Row:
    """Of what was planted in the modes that are on. All is off afterwards."""
    seq, text = _start(lm, ctx)
    finite = all(bool(np.isfinite(lm.model.step(token, seq)).all()) for token in text[:STEPS])
    found = lm.guard.nonfinite
    lm.use(compose([]))
    return holds(mode, line, finite and found >= planted > 0, f"{found} caught in {STEPS} tokens")
