"""What mixed precision promises: half of the bytes, faster, within the quality budget, dense where it is off."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ralo import texts
from ralo.accept.rows import Progress, Row, Task, at_least, at_most, holds, tried
from ralo.accept.watched import caught, infinite, watched
from ralo.bench import Engine, Ralo, measure
from ralo.compose import compose
from ralo.lm import LM
from ralo.matrix import Matrix
from ralo.model import Dense
from ralo.modes import Mix
from ralo.modes.mix import CoarseSlot
from ralo.quality import perplexity

FASTER, BYTES, LOSS = 1.10, 0.6, 2.0  # int4 beside int8 with all places coarser
STEPS = 16

mode = Mix.name


def accept(task: Task, open_model: Callable[[str], LM], say: Progress) -> list[Row]:
    lm = open_model("int8")
    dense = _run(lm)
    lm.use(compose([Mix()]))
    say("quality at int4")
    ratio = float(lm.metrics()["mix.mem_ratio"])
    q = perplexity(lm.model, texts.held_out(lm, task.tokens), min(1024, lm.model.cfg.max_context), lm.kv)
    say("speed at int4")
    engines: dict[str, Engine] = {"mixed": Ralo(lm, lm.guard, texts.sample(lm))}
    engines["dense"] = Ralo(lm, Dense(lm.model), texts.sample(lm))
    faster, (low, high) = measure(engines, "decode", task.ctx, 64, task.rounds).ratio("mixed", "dense")
    mixed, same = _run(lm), _run(lm, dense=True)
    quality = f"{q.delta_ppl_pct:+.2f} (KL {q.kl:.4f}, top-1 {q.top1_agree:.3f}, {q.tokens} tokens)"
    rows = [
        at_most(mode, "bytes of int4 weights / int8", ratio, BYTES, f"{ratio:.3f}"),
        at_least(mode, "decode speed-up over int8 dense, all places int4", faster, FASTER,
                 f"{faster:.2f} ({low:.2f} … {high:.2f})"),
        at_most(mode, "Δppl % on held-out text", q.delta_ppl_pct, LOSS, quality),
        holds(mode, "int4 at every place: not dense", bool((mixed != dense).any())),
        holds(mode, "left aside: dense bit for bit", bool((same == dense).all())),
        _planted(lm),
    ]  # fmt: skip
    return rows + tried(mode, "guard and metrics", lambda: watched(lm, Mix()))


def _planted(lm: LM) -> Row:
    """An infinite scale in the first coarser weights there are."""
    name, slots = next((name, slots) for slots in lm.model.slots for name in slots.taken)
    slot = slots.taken[name].slot
    assert isinstance(slot, CoarseSlot)
    m = slot.matrix
    bad = Matrix(m.quant, m.ic, m.parts, m.data, infinite(m.scales), m.bias)
    slots.put(name, CoarseSlot(bad, slot.replaced), mode, "broken")
    lm.model.use(lm.model.slots)
    return caught(lm, mode, "a planted Inf falls back to dense and is counted", 1)


def _run(lm: LM, dense: bool = False) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    seq = lm.new_sequence()
    return np.stack([lm.model.step(token, seq, dense) for token in texts.sample(lm)[:STEPS]])
