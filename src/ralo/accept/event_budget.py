"""A budget of time per token: whether it is kept, what it costs in quality, and whether it can be repeated."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from ralo import texts
from ralo.accept.rows import Progress, Row, Task, at_most, holds, needs_context
from ralo.compose import compose
from ralo.guard import Guard
from ralo.lm import LM
from ralo.modes import Event
from ralo.modes.base import Mode
from ralo.quality import log_probs
from ralo.sequence import Sequence

PARTS = (0.6, 0.75, 0.9)  # of the time of a dense token
OVER = 1.10  # of the budget that 99 in 100 tokens may take
TOKENS = 500
WARM = 32  # tokens before a budget is measured: what a layer takes is learnt
ROOM, LEAST = 640, 128  # tokens after the context, and of a context that tells anything
LOOK = 48  # dense tokens that the budget is derived from

mode = Event.name


@dataclass(frozen=True)
class Kept:
    """How a budget went: milliseconds, Δppl in percent beside dense on the same tokens, mean level."""

    budget: float
    dense: float
    median: float
    p99: float
    dppl: float
    gap: float
    level: float


def accept_budget(task: Task, lm: LM, longest: int, say: Progress) -> list[Row]:
    """At a context of that many tokens, or as many as leave room for those that are measured."""
    needs_context(lm, ROOM + LEAST)
    ctx, rows = min(longest, lm.model.cfg.max_context - ROOM), []
    for part in PARTS:
        say(f"a budget of {part:.0%} of dense")
        k = kept_budget(lm, ctx, part)
        shown = f"{k.p99 / k.budget:.2f} (median {k.median:.2f}, p99 {k.p99:.2f}, budget {k.budget:.2f} ms)"
        line = f"p99 of {TOKENS} tokens / budget of {part:.0%} of dense, context {ctx}"
        rows.append(at_most(mode, line, k.p99 / k.budget, OVER, shown))
        shown = f"{k.dppl:+.2f} (gap {k.gap:.2f} %, level {k.level:.1f})"
        rows.append(holds(mode, f"Δppl % at {part:.0%} of dense, for comparison", bool(np.isfinite(k.dppl)), shown))
    say("replaying a schedule")
    return [*rows, _replayed(lm, ctx)]


def kept_budget(lm: LM, ctx: int, part: float, extra: tuple[Mode, ...] = ()) -> Kept:
    """Text that is given, token by token through the guard, as fast as a part of dense's own time."""
    tokens = texts.held_out(lm, ctx + WARM + TOKENS + LOOK)
    lm.use(compose([]))
    start = lm.new_sequence()
    lm.model.prefill(tokens[:ctx], start, dense=True)
    dense_ms = 1e3 * statistics.median(_dense_times(lm, start.clone(), tokens[ctx : ctx + LOOK]))
    lm.guard = Guard(lm.model, lm.guard.options)
    lm.use(compose([*extra, Event(budget_ms=part * dense_ms, min_ctx=min(1024, ctx // 4))]))
    fed, truth = tokens[ctx : ctx + WARM + TOKENS], np.array(tokens[ctx + 1 : ctx + WARM + TOKENS + 1])
    times, ours = _paced(lm, start.clone(), fed)
    dense = log_probs(lm.model.logits(lm.model.forward(fed, start.clone(), exact=True, dense=True), dense=True))
    rows = np.arange(len(fed))
    loss = (dense[rows, truth] - ours[rows, truth])[WARM:]
    kl = (np.exp(dense) * (dense - ours)).sum(axis=1)[WARM:]
    pace = lm.model.pace
    assert pace
    late = 1e3 * np.array(times[WARM:])
    return Kept(
        part * dense_ms, dense_ms, float(np.median(late)), float(np.percentile(late, 99)),
        100 * float(np.expm1(loss.mean())), 100 * float(np.expm1(kl.mean())), pace.mean_level,
    )  # fmt: skip


def _dense_times(lm: LM, seq: Sequence, tokens: list[int]) -> list[float]:
    times = []
    for token in tokens:
        clock = time.perf_counter()
        lm.model.step(token, seq, dense=True).argmax()
        times.append(time.perf_counter() - clock)
    return times[8:]


def _paced(
    lm: LM, seq: Sequence, tokens: list[int]
) -> tuple[list[float], np.ndarray[tuple[int, int], np.dtype[np.float32]]]:
    times, out = [], np.full((len(tokens), lm.model.cfg.vocab), 0, np.float32)  # touched: a new page takes its time
    for i, token in enumerate(tokens):
        clock = time.perf_counter()
        out[i] = lm.guard.step(token, seq)
        out[i].argmax()
        times.append(time.perf_counter() - clock)
        lm.guard.took(times[-1])
    return times, log_probs(out)


def _replayed(lm: LM, ctx: int) -> Row:
    """The same tokens and scores from a schedule as from the clock."""
    tokens = texts.held_out(lm, ctx)
    pace = lm.model.pace
    assert pace
    budget_ms = 1e3 * pace.budget_s

    def run(known: list[bytes] | None) -> tuple[list[int], list[bytes]]:
        lm.guard = Guard(lm.model, lm.guard.options)
        lm.use(compose([Event(budget_ms=budget_ms, min_ctx=min(1024, ctx // 4))]))
        pace = lm.model.pace
        assert pace
        if known is not None:
            pace.replay(known)
        made = lm.generate(tokens[:ctx], 200, temperature=1.0, seed=5).tokens
        return made, pace.schedule

    made, schedule = run(None)
    again, _ = run(schedule)
    differ = len({level for token in schedule for level in token})
    shown = f"{len(made)} tokens, {differ} levels used"
    return holds(mode, "a recorded schedule gives the same tokens again", made == again and differ > 1, shown)
