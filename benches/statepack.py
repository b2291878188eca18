"""Packed keys: Δppl, recall and speed by how many are chosen, at several lengths, beside the document's forms.

Leaves out: prompts, which are dense, and the guard, which would switch the document's forms off. Quality is of the
second half of each window of held-out novels, against exact attention; speed is decode at the end of the window.
Run: python benches/statepack.py -m MODEL [--tokens 16000] [--rounds 5] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from lines import Axis, Point, plot

from ralo import StatePack, load, texts
from ralo.bench import Ralo, measure
from ralo.compose import compose
from ralo.lm import LM
from ralo.model import Dense
from ralo.quality import perplexity

CONTEXTS, KEYS = (2048, 4096, 8000), (32, 64, 128, 256, 512)
PACKED = StatePack(target="kv", min_ctx=0)
OTHERS = {
    "ternary": replace(PACKED, on="ternary"),
    "binary, nothing for the rest": replace(PACKED, rest="off"),
    "seed binary": replace(PACKED, form="seed"),
    "seed ternary": replace(PACKED, form="seed", on="ternary"),
}
MOST = 8.0  # percent: the largest Δppl of the plot
STEPS = 32


def measured(lm: LM, name: str, mode: StatePack, ctx: int, tokens: int, rounds: int) -> dict[str, float | str]:
    lm.use(compose([replace(mode, check=0)]))
    text = texts.held_out(lm, max(1, tokens // ctx) * ctx)
    quality = perplexity(lm.model, text, ctx, lm.kv, first=ctx // 2)
    engines = {"ralo": Ralo(lm, lm.model, text), "dense": Ralo(lm, Dense(lm.model), text)}
    ratio, (low, high) = measure(dict(engines), "decode", ctx - STEPS - 2, STEPS, rounds).ratio("ralo", "dense")
    lm.use(compose([replace(mode, check=1, gap=100.0)]))  # another run: a checked token is exact
    list(lm.run(lm.request(text[: ctx - STEPS - 2], STEPS, temperature=1.0, seed=1)))
    found = lm.metrics()
    out: dict[str, float | str] = {"way": name, "ctx": ctx, "keys": mode.keys, "recall": found["pack.recall"]}
    out |= {"mass": found["pack.mass"], "dppl": quality.delta_ppl_pct, "low": quality.ci95[0], "high": quality.ci95[1]}
    return out | {"kl": quality.kl, "top1": quality.top1_agree, "speedup": ratio, "slow": low, "fast": high}


def shown(r: dict[str, float | str]) -> str:
    worse = f"{r['dppl']:+.2f} ({r['low']:+.2f} … {r['high']:+.2f})"
    speed = f"{r['speedup']:.2f} ({r['slow']:.2f} … {r['fast']:.2f})"
    told = f"{r['recall']:.2f} | {r['mass']:.2f} | {worse} | {r['kl']:.4f} | {r['top1']:.3f} | {speed}"
    return f"| {r['way']} | {r['ctx']} | {r['keys']:g} | {told} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="mini")
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    lm = load(args.model, args.quant)
    contexts = [ctx for ctx in CONTEXTS if ctx <= lm.model.cfg.max_context]
    ways = [("binary", replace(PACKED, keys=float(n)), ctx) for ctx in contexts for n in KEYS]
    ways += [(name, replace(way, keys=float(n)), contexts[-1]) for name, way in OTHERS.items() for n in (128, 256)]
    print("| way | context | keys | recall | mass | Δppl % (95 %) | KL | top-1 | decode / dense (95 %) |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    lines: dict[str, list[Point]] = {}
    for name, mode, ctx in ways:
        r = measured(lm, name, mode, ctx, args.tokens, args.rounds)
        print(shown(r), flush=True)
        lines.setdefault(f"{name}, {ctx} tokens", []).append(Point(mode.keys, float(r["dppl"]), f"{r['speedup']:.1f}x"))
    if args.plot:
        axis = Axis(KEYS[0], KEYS[-1], [(n, str(n)) for n in KEYS], "keys chosen; labels are decode / dense", log=True)
        args.plot.write_text(plot(lines, axis, MOST))


if __name__ == "__main__":
    main()
