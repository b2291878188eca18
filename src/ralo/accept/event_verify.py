"""Drafts verified densely: the same text as dense, and how much sooner."""

from __future__ import annotations

import statistics
import time

from ralo import texts
from ralo.accept.rows import Progress, Row, Task, at_least, holds, needs_context
from ralo.compose import compose
from ralo.generate import Request, generate
from ralo.guard import Guard
from ralo.lm import LM
from ralo.model import Dense, Runner
from ralo.modes import Event
from ralo.sampling import Sampler, Sampling
from ralo.sequence import Sequence
from ralo.verify import Drafting, Verified

PROMPTS, NEW = 20, 200
LONG = 7700  # tokens of a prompt, or what the model has
LEAST = 128  # tokens of a prompt that tells anything
SPEED, ANY = {"base": 1.15}, 1.0
SAMPLED = 4  # prompts that are also continued by chance

mode = Event.name


def accept_verify(task: Task, lm: LM, say: Progress) -> list[Row]:
    needs_context(lm, NEW + 8 + LEAST)
    ctx = min(LONG, lm.model.cfg.max_context - NEW - 8)
    text = texts.held_out(lm, ctx + PROMPTS * 512)
    lm.guard = Guard(lm.model, lm.guard.options)
    lm.use(compose([Event(verify="on", min_ctx=min(1024, ctx // 4))]))
    drafting, ratios, same, sampled = Drafting(), [], 0, 0
    step = max(1, (len(text) - ctx) // PROMPTS)
    for i in range(PROMPTS):
        say(f"verified drafts, prompt {i + 1} of {PROMPTS}")
        start = lm.new_sequence()
        lm.model.prefill(text[i * step : i * step + ctx - 1], start, dense=True)
        last = text[i * step + ctx - 1]
        for sampling in (Sampling(temperature=0), *[Sampling(seed=i)] * (i < SAMPLED)):
            dense, dense_s = _text(lm, Dense(lm.model), start.clone(), last, Sampler(sampling))
            sampler = Sampler(sampling)
            ours, ours_s = _text(lm, Verified(lm.model, drafting, sampler), start.clone(), last, sampler)
            if sampling.temperature == 0:
                same += ours == dense
                ratios.append(dense_s / ours_s)
            else:
                sampled += ours == dense
    m = drafting.metrics()
    ratio = statistics.median(ratios)
    shown = f"{ratio:.2f} ({min(ratios):.2f} … {max(ratios):.2f}; {m['accept_rate']:.2f} of {m['drafts']:.1f} accepted)"
    wanted = SPEED.get(str(lm.path).rstrip("/").rpartition("/")[2], ANY)
    line = f"verified drafts: same greedy text as dense, {PROMPTS} prompts of {ctx} x {NEW} tokens"
    return [
        holds(mode, line, same == PROMPTS, f"{same} of {PROMPTS}"),
        holds(mode, "… and the same sampled text by seed", sampled == SAMPLED, f"{sampled} of {SAMPLED}"),
        at_least(mode, "verified drafts: speed-up over dense", ratio, wanted, shown),
    ]


def _text(lm: LM, runner: Runner, seq: Sequence, last: int, sampler: Sampler) -> tuple[list[int], float]:
    request = Request([last], sampler, NEW)
    clock = time.perf_counter()
    tokens = [piece.token for piece in generate(runner, seq, request)]
    return tokens, time.perf_counter() - clock
