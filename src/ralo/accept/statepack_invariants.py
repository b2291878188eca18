"""What holds of packed keys whatever they gain: dense at their off point, honest counters, bits counted alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ralo import _core, texts
from ralo.accept.rows import Row, holds, needs_context
from ralo.accept.watched import watched
from ralo.compose import compose
from ralo.errors import RaloError
from ralo.lm import LM
from ralo.modes import StatePack
from ralo.modes.statepack import POPCOUNTS, counts_by

ROOM = 96  # tokens after the context
STEPS = 24
KEYS, LEAST = 64, 256  # few keys, and tokens of context of which some are left out then

mode = StatePack.name


def accept_invariants(lm: LM) -> list[Row]:
    needs_context(lm, LEAST + ROOM)
    text = texts.sample(lm)
    ctx = min(1500, lm.model.cfg.max_context - ROOM)
    packed = StatePack(target="kv", min_ctx=0, keys=KEYS, check=0)
    dense, dense_bytes, _ = _run(lm, StatePack.off(), text, ctx, dense=True)
    off, _, _ = _run(lm, StatePack.off(), text, ctx)
    on, on_bytes, skipped = _run(lm, packed, text, ctx)
    ways = [_run(lm, replace(packed, popcnt=way), text, ctx)[0] for way in _core.popcounts()]
    return [
        holds(mode, "all keys and no neurons packed: dense bit for bit", bool((dense == off).all())),
        holds(mode, "below min-ctx: dense bit for bit", _below(lm, text, ctx, dense)),
        holds(mode, "fewer keys: not dense", bool((dense != on).any())),
        holds(mode, "bytes skipped are bytes not read", dense_bytes - on_bytes == skipped, f"{skipped} bytes"),
        holds(mode, "every way of counting bits gives the same", all((on == w).all() for w in ways),
              ", ".join(_core.popcounts())),
        holds(mode, "trimmed and cloned texts go on alike", _trimmed(lm, packed, text, ctx)),
        _planted(lm, packed, text, ctx),
        *watched(lm, replace(packed, target="both", check=STEPS), LEAST),
    ]  # fmt: skip


Logits = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def _run(lm: LM, setting: StatePack, text: list[int], ctx: int, dense: bool = False) -> tuple[Logits, int, int]:
    """Logits of some steps after a text, the bytes they read, and the bytes that were skipped."""
    lm.use(compose([setting]))
    seq = lm.new_sequence()
    lm.model.prefill([text[i % len(text)] for i in range(ctx)], seq, dense=True)
    read = lm.model.bytes_read
    logits = np.stack([lm.model.step(token, seq, dense) for token in text[:STEPS]])
    return logits, lm.model.bytes_read - read, int(float(lm.metrics().get("pack.bytes_skipped", 0)))


def refused_counts() -> Row:
    """At every ISA level this CPU has."""
    level, refused, taken = _core.level(), [], []
    for name in _core.levels():
        _core.force_level(name)
        for way in (way for way in POPCOUNTS if way not in _core.popcounts()):
            try:
                counts_by(way)
                taken.append(f"{way} at {name}")
            except RaloError:
                refused.append(f"{way} at {name}")
    _core.force_level(level)
    said = f"taken: {', '.join(taken)}" if taken else ", ".join(refused) or "this CPU has them all"
    return holds(mode, "a way of counting bits that is not there is refused", not taken, said)


def _below(lm: LM, text: list[int], ctx: int, dense: Logits) -> bool:
    return bool((_run(lm, StatePack(target="kv", min_ctx=ctx + ROOM), text, ctx)[0] == dense).all())


def _trimmed(lm: LM, setting: StatePack, text: list[int], ctx: int) -> bool:
    lm.use(compose([setting]))
    seq = lm.new_sequence()
    lm.model.prefill([text[i % len(text)] for i in range(ctx)], seq, dense=True)
    first = [lm.model.step(t, seq) for t in text[:STEPS]]
    copy = seq.clone()
    seq.trim(ctx)
    again = [lm.model.step(t, seq) for t in text[:STEPS]]
    after = lm.model.step(text[STEPS], copy), lm.model.step(text[STEPS], seq)
    return bool(np.array_equal(first, again) and np.array_equal(*after))


def _planted(lm: LM, setting: StatePack, text: list[int], ctx: int) -> Row:
    lm.use(compose([setting]))
    slot = lm.model.slots[0].attend
    assert isinstance(slot, _core.PackKeys)
    slot.plant = True
    seq = lm.new_sequence()
    lm.model.prefill([text[i % len(text)] for i in range(ctx)], seq, dense=True)
    good = bool(np.isfinite(lm.model.step(text[0], seq)).all())
    return holds(mode, "a planted NaN is caught and counted", good and slot.nonfinite == 1, f"{slot.nonfinite} caught")
