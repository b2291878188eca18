"""KWTA's speed against its quality: per k with a profile, without one, and in the seed's form; a table and a plot.

Leaves out: prompts, which are dense. Speed is decode at 128 tokens of context with the guard on, in turns with dense;
quality is on held-out novels that ship with ralo.
Run: python benches/kwta.py -m MODEL [--profile FILE] [--quant int8] [--tokens 8192] [--rounds 9] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ralo import KWTA, load, texts
from ralo import profile as profiles
from ralo.bench import Ralo, measure
from ralo.compose import compose
from ralo.guard import Guard
from ralo.lm import LM
from ralo.model import Dense
from ralo.quality import perplexity

KS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25)
Point = tuple[str, KWTA, profiles.Profile | None]
WIDTH, HEIGHT, LEFT, TOP, MOST = 640, 360, 60, 20, 8.0  # of the plot; its largest Δppl


def points(profile: profiles.Profile | None) -> list[Point]:
    known: list[Point] = [("profile", KWTA(k=k), profile) for k in KS if profile]
    plain: list[Point] = [("no profile", KWTA(k=k), None) for k in (0.6, 0.5, 0.4, 0.3)]
    return (
        known
        + plain
        + [("seed", KWTA(k=k, form="seed", duty=duty), None) for k, duty in ((0.9, 1), (0.6, 2), (0.4, 2))]
    )


def measured(lm: LM, point: Point, tokens: list[int], rounds: int) -> dict[str, float | str]:
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


def plot(rows: list[dict[str, float | str]]) -> str:
    """Δppl over speed-up as SVG, a line per way; what lies above MOST is left out."""
    fastest = max(float(r["speedup"]) for r in rows) + 0.05
    colours = {"profile": "#0a7", "no profile": "#c60", "seed": "#888"}

    def at(speedup: float, dppl: float) -> tuple[float, float]:
        x = LEFT + (speedup - 0.9) / (fastest - 0.9) * (WIDTH - LEFT - 20)
        return x, TOP + (1 - min(max(dppl, -0.5), MOST) / MOST) * (HEIGHT - 2 * TOP - 20)

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for dppl in (0, 2, 4, 6, 8):
        (x, y), (x2, _) = at(0.9, dppl), at(fastest, dppl)
        out.append(f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{x2:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        out.append(f'<text x="{x - 8:.0f}" y="{y + 4:.0f}" text-anchor="end">+{dppl} %</text>')
    for tenth in range(9, int(fastest * 10) + 1):
        x, y = at(tenth / 10, 0)
        out.append(f'<text x="{x:.0f}" y="{HEIGHT - 24}" text-anchor="middle">{tenth / 10:.1f}x</text>')
    for i, (way, colour) in enumerate(colours.items()):
        found = [
            (float(r["speedup"]), float(r["dppl"]), r["k"])
            for r in rows
            if r["way"] == way and float(r["dppl"]) <= MOST
        ]
        line = " ".join("{:.1f},{:.1f}".format(*at(s, d)) for s, d, _ in found)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for s, d, k in found:
            x, y = at(s, d)
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            out.append(f'<text x="{x + 6:.1f}" y="{y - 6:.1f}" fill="{colour}">{k:g}</text>')
        out.append(f'<text x="{LEFT + 20}" y="{TOP + 16 * (i + 1)}" fill="{colour}">{way}</text>')
    out.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">decode speed-up over dense; labels are k</text>'
    )
    return "\n".join([*out, "</svg>"])


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
        args.plot.write_text(plot(rows) + "\n")


if __name__ == "__main__":
    main()
