"""What StatePack promises: long texts decode faster at the same quality, silent neurons cost nothing, and where it does
not pay it stays out of the way."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

from ralo import peer, texts
from ralo.accept.attention import SHAPES, packed_beside_exact
from ralo.accept.literal import literal
from ralo.accept.needle import needle
from ralo.accept.rows import Progress, Row, Task, at_least, at_most, needs_context, tried
from ralo.accept.statepack_invariants import LEAST, ROOM, accept_invariants, refused_counts
from ralo.accept.statepack_mlp import accept_mlp
from ralo.bench import Engine, Ralo, measure
from ralo.compose import compose
from ralo.lm import LM
from ralo.model import Dense
from ralo.modes import StatePack
from ralo.quality import Quality, perplexity

ATTENTION = {8192: 4.0, 32768: 8.0}  # keys -> speed-up of attention alone
LONG = 8000  # tokens of context, or what the model has
DECODE, PEER, MAX_DPPL = {"base": 1.6}, {"base": 3.0}, 1.0  # of models by name; Δppl in percent
ANY = 1.10  # speed-up that the document asks of any model
CHANCE = 0.1  # of needles that were never there
STEPS = 24
DOCUMENT_DPPL = 2.0  # percent

mode = StatePack.name


def accept(task: Task, open_model: Callable[[str], LM], say: Progress) -> list[Row]:
    lm, rows = open_model(task.quants[0]), list[Row]()  # opened first: it sets the number of threads
    for shape in SHAPES:
        for keys, wanted in ATTENTION.items():
            say(f"attention over {keys} keys")
            rows.append(_attention(shape, keys, wanted, task.rounds))
    rows += tried(mode, "decode, quality and facts of a long text", lambda: _long_text(task, lm, say))
    rows += accept_mlp(task, lm, say)
    say("invariants")
    rows += tried(mode, "invariants of packed keys", lambda: accept_invariants(lm))
    return [*rows, refused_counts()]


def _attention(shape: tuple[int, int, int], keys: int, wanted: float, rounds: int) -> Row:
    t = packed_beside_exact(shape, keys, rounds)
    heads, group, width = shape
    shown = f"{t.ratio:.1f} ({t.exact * 1e6:.0f} → {t.packed * 1e6:.0f} µs)"
    return at_least(mode, f"attention, {heads} kv heads x {group} x {width}, {keys} keys", t.ratio, wanted, shown)


def _long_text(task: Task, lm: LM, say: Progress) -> list[Row]:
    """Decode, quality and needles at a long context."""
    needs_context(lm, LEAST + ROOM)
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
    rows += tried(mode, f"facts found at 10 depths of {ctx} tokens", lambda: _needles(lm, ctx))
    say("two bitmaps, and the document's own form")
    return [*rows, *_other_codes(lm, tokens, ctx)]


def _other_codes(lm: LM, tokens: list[int], ctx: int) -> list[Row]:
    """In one window of the text."""
    ctx = min(ctx, len(tokens) - 1)
    setting = StatePack(on="ternary", target="kv", min_ctx=min(2048, ctx // 2))
    lm.use(compose([setting]))
    q = perplexity(lm.model, tokens[: ctx + 1], ctx, lm.kv, first=ctx // 2)
    rows = [at_most(mode, "Δppl % of two bitmaps, ternary, in one window", q.delta_ppl_pct, DOCUMENT_DPPL, _shown(q))]
    form = replace(setting, on="binary", form="seed")
    return [*rows, literal(lm, form, "overlap of raw keys", tokens[: ctx + 1], ctx, ctx // 2)]


def _needles(lm: LM, ctx: int) -> list[Row]:
    line = f"facts found at 10 depths of {ctx} tokens"
    found = needle(lm, ctx)
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
