"""Event-driven decode: what holding keys, sending deltas and a budget of time cost in quality; tables and a plot.

`held`: keys that attention holds, how long, and the error a head may have, on positions after a long prompt;
`deltas`: a share of the channels of one place, as deltas and as plain winners; `budget`: quality over the time of a
token, at a short and a long context; `passes`: what a dense pass over several tokens takes beside one.
Leaves out: prompts, which are dense.
Run: python benches/event.py -m MODEL held|deltas|budget|passes [--tokens 8192] [--ctx 4096] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from lines import Axis, Point, plot

from ralo import Event, _core, load, texts
from ralo import profile as profiles
from ralo.accept.event_budget import kept_budget
from ralo.bench import Ralo, measure
from ralo.compose import compose
from ralo.guard import Guard
from ralo.lm import LM
from ralo.model import FEW, Dense
from ralo.modes.base import LayerSlots, LayerView, norms_of
from ralo.quality import Quality, perplexity

HELD = (
    (512, 32, 0.3),
    (512, 16, 0.3),
    (256, 32, 0.3),
    (128, 32, 0.3),
    (512, 32, 0.2),
    (512, 32, 100.0),
    (512, 128, 0.3),
)
SHARES = (0.7, 0.5, 0.3)
PARTS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.9)
MOST = 12.0  # percent: the largest gap of the plot


def fresh(lm: LM, *modes: Event) -> None:
    lm.use(compose([]))
    lm.guard = Guard(lm.model, lm.guard.options)
    lm.use(compose(modes))


def head(*columns: str) -> None:
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def shown(q: Quality) -> tuple[str, str, str]:
    worse = f"{q.delta_ppl_pct:+.2f} ({q.ci95[0]:+.2f} … {q.ci95[1]:+.2f})"
    return worse, f"{q.kl:.4f}", f"{q.top1_agree:.3f}"


def held(lm: LM, ctx: int, tokens: int, rounds: int) -> None:
    text = texts.held_out(lm, tokens // (2 * ctx) * 2 * ctx)
    head("keys", "hold", "head gap", "keys read", "Δppl % (95 %)", "KL", "top-1", "decode / dense (95 %)")
    for keys, hold, gap in HELD:
        fresh(lm, Event(topk=1.0, keys=keys, hold=hold, head_gap=gap))
        q = perplexity(lm.model, text, 2 * ctx, lm.kv, first=ctx)
        read = f"{float(lm.metrics()['event.topk_kept']):.2f}"
        engines = {"ralo": Ralo(lm, lm.guard, text), "dense": Ralo(lm, Dense(lm.model), text)}
        ratio, (low, high) = measure(dict(engines), "decode", ctx, 32, rounds).ratio("ralo", "dense")
        row(keys, hold, gap, read, *shown(q), f"{ratio:.2f} ({low:.2f} … {high:.2f})")


def one_place(lm: LM, place: str, share: float, track: bool) -> list[LayerSlots]:
    out = []
    for i, weights in enumerate(lm.model.weights.layers):
        view, slots, n = LayerView(i, lm.model.cfg, weights, None), LayerSlots(), getattr(weights, place).ic
        slot = _core.EventInput(n, norms_of(view, place), 1, [round(share * n)], track, 0, 1, 0, 1, 64, i, None)
        slots.put(place, slot, Event.name, "")
        out.append(slots)
    return out


def deltas(lm: LM, tokens: int) -> None:
    text = texts.held_out(lm, tokens)
    head("place", "share", "deltas: Δppl % (95 %)", "KL", "top-1", "winners: Δppl % (95 %)", "KL", "top-1")
    for place in ("o", "down", "qkv", "up"):
        for share in SHARES:
            cells: list[str] = []
            for track in (True, False):
                lm.model.use(one_place(lm, place, share, track))
                cells += shown(perplexity(lm.model, text, 1024, lm.kv))
            row(place, share, *cells)


def budget(lm: LM, ctx: int, path: Path | None) -> None:
    head("context", "budget / dense", "median / budget", "p99 / budget", "Δppl %", "gap %", "level")
    lines: dict[str, list[Point]] = {}
    for context in (128, ctx):
        for part in PARTS:
            k = kept_budget(lm, context, part)
            rates = f"{k.median / k.budget:.2f}", f"{k.p99 / k.budget:.2f}"
            row(context, part, *rates, f"{k.dppl:+.2f}", f"{k.gap:.2f}", f"{k.level:.1f}")
            lines.setdefault(f"{context} tokens", []).append(Point(k.median / k.dense, k.gap, f"{part:g}"))
    if path:
        ticks = [(t / 10, f"{t / 10:.1f}") for t in range(3, 11)]
        axis = Axis(0.3, 1.05, ticks, "median time of a token / dense's; labels are budget / dense")
        path.write_text(plot(lines, axis, MOST))


def passes(lm: LM, rounds: int) -> None:
    head("context", *(f"{n} tokens" for n in range(1, FEW + 1)))
    text = texts.held_out(lm, 8000)
    for ctx in (128, 4096, 7700):
        seq = lm.new_sequence()
        lm.model.prefill(text[:ctx], seq, dense=True)
        took: dict[int, list[float]] = {n: [] for n in range(1, FEW + 1)}
        for _ in range(rounds):
            for n, times in took.items():
                clock = time.perf_counter()
                lm.model.verify(text[ctx : ctx + n], seq)
                times.append(time.perf_counter() - clock)
                seq.trim(ctx)
        medians = [statistics.median(times) for times in took.values()]
        row(ctx, *(f"{m / medians[0]:.2f}" for m in medians))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("held", "deltas", "budget", "passes"))
    parser.add_argument("-m", "--model", default="mini")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    lm = load(args.model, args.quant)
    if args.profile:
        lm.use(compose([]), profiles.load(args.profile))
    if args.what == "held":
        held(lm, args.ctx, args.tokens, args.rounds)
    elif args.what == "deltas":
        deltas(lm, args.tokens)
    elif args.what == "budget":
        budget(lm, args.ctx, args.plot)
    else:
        passes(lm, args.rounds)


if __name__ == "__main__":
    main()
