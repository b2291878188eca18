"""What event-driven decode promises: long texts decode faster at nearly the same quality, a token keeps its time,
verified drafts cost nothing in quality, and where nothing is alike the mode switches itself off."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ralo import texts
from ralo.accept.event_budget import accept_budget
from ralo.accept.event_verify import accept_verify
from ralo.accept.literal import literal
from ralo.accept.rows import Progress, Row, Task, at_least, at_most, holds, needs_context, tried
from ralo.accept.watched import caught, plant, watched
from ralo.bench import Ralo, measure
from ralo.compose import compose
from ralo.guard import Guard
from ralo.lm import LM
from ralo.model import Dense
from ralo.modes import Event
from ralo.quality import perplexity

LONG, LONGEST = 4096, 7500  # tokens of a long prompt, or half of what the model has; of one under a budget
SPEED, ANY = {"base": 1.15}, 1.10
GAP, MAX_DPPL = 3.0, 2.0  # percent
TRIED = 3.0  # percent that having tried may cost
WORST_TOKENS = 512
ROOM = 640  # tokens after the context
STEPS = 32
BUDGET_MS = 4.0  # the document's

mode = Event.name


def accept(task: Task, open_model: Callable[[str], LM], say: Progress) -> list[Row]:
    lm = open_model(task.quants[0])
    ctx = long_context(lm)
    rows = tried(mode, "decode and quality of a long text", lambda: _long_text(task, lm, ctx, say))
    rows += tried(mode, "a budget of time", lambda: accept_budget(task, lm, LONGEST, say))
    rows += tried(mode, "verified drafts", lambda: accept_verify(task, lm, say))
    say("unrelated tokens")
    rows += tried(mode, "unrelated tokens", lambda: _worst(lm, ctx))
    say("invariants")
    rows += tried(mode, "invariants", lambda: _invariants(lm))
    say("the guard")
    return rows + tried(mode, "guard and metrics", lambda: _guarded(lm))


def long_context(lm: LM) -> int:
    return min(LONG, lm.model.cfg.max_context // 2)


def _setting(ctx: int) -> Event:
    return Event(min_ctx=min(1024, ctx // 4))


def _long_text(task: Task, lm: LM, ctx: int, say: Progress) -> list[Row]:
    needs_context(lm, 4 * STEPS)
    lm.use(compose([_setting(ctx)]))
    say(f"decode at {ctx} tokens")
    text = texts.held_out(lm, ctx + ROOM)
    engines = {"ralo": Ralo(lm, lm.guard, text), "dense": Ralo(lm, Dense(lm.model), text)}
    samples = measure(dict(engines), "decode", ctx, STEPS, task.rounds)
    ratio, (low, high) = samples.ratio("ralo", "dense")
    wanted = SPEED.get(str(lm.path).rstrip("/").rpartition("/")[2], ANY)
    shown = f"{ratio:.2f} ({low:.2f} … {high:.2f})"
    rows = [at_least(mode, f"decode speed-up over dense, {lm.quant}, context {ctx}", ratio, wanted, shown)]
    say("quality of late positions")
    window = 2 * ctx if 2 * ctx <= lm.model.cfg.max_context else ctx + ctx // 2
    tokens = texts.held_out(lm, max(task.tokens // window, 1) * window)
    window = min(window, len(tokens) - 1)
    q = perplexity(lm.model, tokens, window, lm.kv, first=window // 2)
    ci = f"{q.ci95[0]:+.2f} … {q.ci95[1]:+.2f}"
    shown = f"{q.delta_ppl_pct:+.2f} ({ci}; top-1 {q.top1_agree:.3f}, {q.tokens} tokens)"
    rows.append(at_most(mode, f"Δppl % on positions {window // 2} to {window}", q.delta_ppl_pct, MAX_DPPL, shown))
    gap = 100 * float(np.expm1(q.kl))
    rows.append(at_most(mode, "quality_gap % there, exp(KL) - 1", gap, GAP, f"{gap:.2f}"))
    say("the document's own form")
    form = Event(form="seed", min_ctx=min(1024, ctx // 4))
    return [*rows, literal(lm, form, "blocks of 32 by age", tokens, window, window // 2)]


def _worst(lm: LM, ctx: int) -> list[Row]:
    """Unrelated tokens with deltas everywhere: nothing of a token before is worth anything."""
    needs_context(lm, WORST_TOKENS + STEPS)
    ctx = min(ctx, lm.model.cfg.max_context - WORST_TOKENS)
    rng = np.random.default_rng(0)
    tokens = [int(t) for t in rng.integers(0, lm.model.cfg.vocab, ctx + WORST_TOKENS)]
    prompt, fed = tokens[:ctx], tokens[ctx:]
    lm.use(compose([]))
    lm.guard = Guard(lm.model, lm.guard.options)
    lm.use(compose([Event(deltas="all", topk=0.1, min_ctx=min(1024, ctx // 4))]))
    start = lm.new_sequence()
    lm.guard.prefill(prompt, start)
    ours, dense = start.clone(), start.clone()
    spent = {"ours": 0.0, "dense": 0.0}
    same = True
    off_at = 0
    for i, token in enumerate(fed):
        clock = time.perf_counter()
        one = lm.guard.step(token, ours)
        middle = time.perf_counter()
        other = lm.model.step(token, dense, dense=True)
        spent["ours"] += middle - clock
        spent["dense"] += time.perf_counter() - middle
        if not lm.guard.modes[mode].on:
            off_at = off_at or i + 1
            same = same and bool((one == other).all())
    every = Event().gap_every
    cost = 100 * (spent["ours"] / spent["dense"] - 1)
    line = f"unrelated tokens, deltas everywhere: off within {every} tokens"
    rows = [holds(mode, line, 0 < off_at <= every, "; ".join(lm.guard.events) or "stayed on")]
    rows.append(holds(mode, "then dense bit for bit", same and off_at > 0))
    line = f"cost of having tried over {WORST_TOKENS} tokens, %"
    rows.append(at_most(mode, line, cost, TRIED, f"{cost:+.1f}"))
    lm.guard = Guard(lm.model, lm.guard.options)
    return rows


def _invariants(lm: LM) -> list[Row]:
    needs_context(lm, STEPS)
    text = texts.sample(lm)[:STEPS]
    dense = _run(lm, text, dense=True)
    lm.use(compose([Event.off()]))
    off = _run(lm, text)
    lm.use(compose([Event(min_ctx=0)]))
    before = lm.model.bytes_read
    on = _run(lm, text)
    read = lm.model.bytes_read - before
    lm.use(compose([]))
    before = lm.model.bytes_read
    _run(lm, text, dense=True)
    whole = lm.model.bytes_read - before
    lm.use(compose([Event(min_ctx=0)]))
    _run(lm, text)
    skipped = int(float(lm.metrics()["event.bytes_skipped"]))
    return [
        holds(mode, "everything sent, nothing held: dense bit for bit", bool((dense == off).all())),
        holds(mode, "less sent: not dense", bool((dense != on).any())),
        holds(mode, "bytes skipped are bytes not read", whole - read == skipped, f"{skipped} bytes"),
    ]


def _guarded(lm: LM) -> list[Row]:
    """Under the document's own budget, and without one."""
    ctx = min(128, lm.model.cfg.max_context // 2)
    rows = watched(lm, Event(min_ctx=0, budget_ms=BUDGET_MS), ctx)
    lm.use(compose([Event(min_ctx=0)]))
    line = "a NaN in what it sends and in its attention is caught and counted"
    return [*rows, caught(lm, mode, line, plant(lm), ctx)]


def _run(lm: LM, text: list[int], dense: bool = False) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    seq = lm.new_sequence()
    return np.stack([lm.model.step(token, seq, dense) for token in text])
