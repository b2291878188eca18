"""KWTA's speed against its quality: per k with a profile, the same with all winners read whole, without a profile, and
in the seed's form; a table and a plot.

Leaves out: prompts, which are dense. Speed is decode at 128 tokens of context with the guard on, in turns with dense;
quality is on held-out novels that ship with ralo.
Run: python benches/kwta.py -m MODEL [--profile FILE] [--quant int8] [--tokens 8192] [--rounds 9] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lines import Axis, Point, plot

from ralo import KWTA, load, texts
from ralo import profile as profiles
from ralo.bench import Ralo, measure
from ralo.compose import compose
from ralo.guard import Guard
from ralo.lm import LM
from ralo.model import Dense
from ralo.quality import perplexity

KS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25)
Way = tuple[str, KWTA, profiles.Profile | None]
MOST = 8.0  # percent: the largest Δppl of the plot


def points(profile: profiles.Profile | None) -> list[Way]:
    known: list[Way] = [("profile", KWTA(k=k), profile) for k in KS if profile]
    known += [("all whole", KWTA(k=k, fine=1.0), profile) for k in (0.6, 0.4, 0.3) if profile]
    plain: list[Way] = [("no profile", KWTA(k=k), None) for k in (0.6, 0.5, 0.4, 0.3)]
    return (
        known
        + plain
        + [("seed", KWTA(k=k, form="seed", duty=duty), None) for k, duty in ((0.9, 1), (0.6, 2), (0.4, 2))]
    )


def measured(lm: LM, point: Way, tokens: list[int], rounds: int) -> dict[str, float | str]:
    name, mode, profile = point
    lm.use(compose([]))
    lm.profile, lm.guard = None, Guard(lm.model, lm.guard.options)  # one that has seen nothing yet
    lm.use(compose([mode]), profile)
    quality = perplexity(lm.model, tokens, min(1024, lm.model.cfg.max_context), lm.kv)
    text = texts.sample(lm)
    sparse, dense = Ralo(lm, lm.guard, text), Ralo(lm, Dense(lm.model), text)
    ratio, (low, high) = measure({"ralo": sparse, "dense": dense}, "decode", 128, 48, rounds).ratio("ralo", "dense")
    out: dict[str, float | str] = {"way": name, "k": mode.k, "speedup": ratio, "low": low, "high": high}
    out |= {"dppl": quality.delta_ppl_pct, "dppl_low": quality.ci95[0], "dppl_high": quality.ci95[1]}
    out |= {"kl": quality.kl, "top1": quality.top1_agree, "off": sum(not w.on for w in lm.guard.modes.values())}
    return out | {"bytes": sparse.stats.bytes_per_token / dense.stats.bytes_per_token}


def drawn(rows: list[dict[str, float | str]]) -> str:
    """Δppl over speed-up, a line per way; labels are k."""
    fastest = max(float(r["speedup"]) for r in rows) + 0.05
    ticks = [(t / 10, f"{t / 10:.1f}x") for t in range(9, int(fastest * 10) + 1)]
    axis = Axis(0.9, fastest, ticks, "decode speed-up over dense; labels are k")
    lines: dict[str, list[Point]] = {}
    for r in rows:
        lines.setdefault(str(r["way"]), []).append(Point(float(r["speedup"]), float(r["dppl"]), f"{r['k']:g}"))
    return plot(lines, axis, MOST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="mini")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    lm = load(args.model, args.quant)
    profile = profiles.load(args.profile) if args.profile else lm.profile
    tokens, rows = texts.held_out(lm, args.tokens), []
    print(
        "| way | k | bytes | speed-up (95 %) | Δppl % (95 %) | KL | top-1 |\n|---|---|---|---|---|---|---|", flush=True
    )
    for point in points(profile):
        r = measured(lm, point, tokens, args.rounds)
        rows.append(r)
        speed = (
            f"{r['speedup']:.2f} ({r['low']:.2f} … {r['high']:.2f})" if not r["off"] else "switched off by the guard"
        )
        worse = f"{r['dppl']:+.2f} ({r['dppl_low']:+.2f} … {r['dppl_high']:+.2f})"
        print(
            f"| {r['way']} | {r['k']:g} | {r['bytes']:.2f} | {speed} | {worse} | {r['kl']:.4f} | {r['top1']:.3f} |",
            flush=True,
        )
    if args.plot:
        args.plot.write_text(drawn(rows))


if __name__ == "__main__":
    main()
