"""What StatePack promises: long texts decode faster at the same quality, silent neurons cost nothing, and where it does
not pay it stays out of the way."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ralo import _core, peer, texts
from ralo.accept.attention import SHAPES, packed_beside_exact
from ralo.accept.needle import needle
from ralo.accept.rows import Progress, Row, Task, at_least, at_most, holds
from ralo.accept.statepack_mlp import accept_mlp
from ralo.bench import Engine, Ralo, measure
from ralo.compose import compose
from ralo.errors import RaloError
from ralo.lm import LM
from ralo.model import Dense
from ralo.modes import StatePack
from ralo.quality import Quality, perplexity

ATTENTION = {8192: 4.0, 32768: 8.0}  # keys -> speed-up of attention alone
LONG = 8000  # tokens of context, or what the model has
DECODE, PEER, MAX_DPPL = {"base": 1.6}, {"base": 3.0}, 1.0  # of models by name; Δppl in percent
ANY = 1.10  # speed-up that the document asks of any model
CHANCE = 0.1  # of needles that were never there
ROOM = 96  # tokens after the context
STEPS = 24

mode = StatePack.name


def accept(task: Task, open_model: Callable[[str], LM], say: Progress) -> list[Row]:
    lm, rows = open_model(task.quants[0]), list[Row]()  # opened first: it sets the number of threads
    for shape in SHAPES:
        for keys, wanted in ATTENTION.items():
            say(f"attention over {keys} keys")
            rows.append(_attention(shape, keys, wanted, task.rounds))
    rows += _long_text(task, lm, say)
    rows += accept_mlp(task, lm, say)
    say("invariants")
    return [*rows, *_invariants(lm)]


def _attention(shape: tuple[int, int, int], keys: int, wanted: float, rounds: int) -> Row:
    t = packed_beside_exact(shape, keys, rounds)
    heads, group, width = shape
    shown = f"{t.ratio:.1f} ({t.exact * 1e6:.0f} → {t.packed * 1e6:.0f} µs)"
    return at_least(mode, f"attention, {heads} kv heads x {group} x {width}, {keys} keys", t.ratio, wanted, shown)


def _long_text(task: Task, lm: LM, say: Progress) -> list[Row]:
    """Decode, quality and needles at a long context."""
    ctx = min(LONG, lm.model.cfg.max_context - ROOM)
    lm.use(compose([StatePack(target="kv", min_ctx=min(2048, ctx // 2))]))
    say(f"decode at {ctx} tokens")
    rows = _decode(task, lm, ctx)
    say("quality of late positions")
    tokens = texts.held_out(lm, max(task.tokens // ctx, 1) * ctx)
    quality = perplexity(lm.model, tokens, min(ctx, len(tokens) - 1), lm.kv, first=min(ctx, len(tokens) - 1) // 2)
    line = f"Δppl % on positions {ctx // 2} to {ctx}, against exact attention"
    rows.append(at_most(mode, line, quality.delta_ppl_pct, MAX_DPPL, _shown(quality)))
    say("needles")
    return [*rows, *_needles(lm, ctx)]


def _needles(lm: LM, ctx: int) -> list[Row]:
    line = f"facts found at 10 depths of {ctx} tokens"
    try:
        found = needle(lm, ctx)
    except RaloError as error:  # a model whose context is too short
        return [Row(mode, line, "measured", str(error), False)]
    shown = f"{found.ours} of {found.trials}, dense {found.dense}"
    rows = [at_least(mode, line, found.ours, found.dense, shown)]
    wrong = f"{found.ours_guessed} of {found.trials}, dense {found.guessed}"
    rows.append(at_most(mode, "facts found that were in no text", found.ours_guessed, CHANCE * found.trials, wrong))
    return rows


def _decode(task: Task, lm: LM, ctx: int) -> list[Row]:
    name, text = str(lm.path).rstrip("/").rpartition("/")[2], texts.held_out(lm, ctx + ROOM)
    engines: dict[str, Engine] = {"ralo": Ralo(lm, lm.guard, text), "dense": Ralo(lm, Dense(lm.model), text)}

    def rows(with_peer: bool) -> list[Row]:
        samples = measure(engines, "decode", ctx, STEPS, task.rounds)
        ratio, (low, high) = samples.ratio("ralo", "dense")
        shown, wanted = f"{ratio:.2f} ({low:.2f} … {high:.2f})", DECODE.get(name, ANY)
        out = [at_least(mode, f"decode speed-up over dense, {lm.quant}, context {ctx}", ratio, wanted, shown)]
        if with_peer:
            ratio, (low, high) = samples.ratio("ralo", "peer")
            shown = f"{ratio:.2f} ({low:.2f} … {high:.2f})"
            out.append(at_least(mode, f"decode beside {peer.NAME}, context {ctx}", ratio, PEER[name], shown))
        return out

    if name not in PEER or importlib.util.find_spec("llama_cpp") is None:
        return rows(with_peer=False)
    with peer.beside(lm, ctx + ROOM) as other:
        engines["peer"] = other
        return rows(with_peer=True)


def _shown(q: Quality) -> str:
    ci = f"{q.ci95[0]:+.2f} … {q.ci95[1]:+.2f}"
    return f"{q.delta_ppl_pct:+.2f} ({ci}; KL {q.kl:.4f}, top-1 {q.top1_agree:.3f}, {q.tokens} tokens)"


def _invariants(lm: LM) -> list[Row]:
    text = texts.sample(lm)
    ctx = min(1500, lm.model.cfg.max_context - ROOM)
    packed = StatePack(target="kv", min_ctx=0, keys=64, check=0)
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
