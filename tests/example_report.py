"""A report with everything in it, as a tuning of a small model would make it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from ralo.accept.rows import Row
from ralo.report import Cell, Point, Report

MB = 1_000_000


def point(name: str, kind: str, ctx: int, speedup: float, delta: float | None, kl: float | None, tok_s: float) -> Point:
    """With intervals as wide as they are on a shared machine."""
    ci95 = None if delta is None else (delta - 0.12, delta + 0.12) if delta else (0.0, 0.0)
    speeds = (speedup, speedup) if name == "dense int8" else (0.96 * speedup, 1.05 * speedup)
    weights, cache = (36 if "int4" in name else 62) * MB, 2 * ctx * 768 * 2 * 6 // 12
    return Point(name, kind, ctx, speedup, speeds, delta, ci95, kl, tok_s, weights, cache)


SHORT = [
    point("dense int8", "dense", 128, 1.0, 0.0, 0.0, 312.4),
    point("dense int4", "dense", 128, 1.52, 1.45, 0.0213, 474.8),
    point("kwta", "mode", 128, 1.21, 1.72, 0.0202, 378.0),
    point("state-pack", "mode", 128, 0.99, 0.01, 0.0003, 309.2),
    point("event", "mode", 128, 0.97, 0.35, 0.0041, 303.0),
    point("tt", "mode", 128, 1.11, 0.7, 0.0098, 346.7),
    point("plan 0.5 %", "plan", 128, 1.14, 0.46, 0.0052, 356.1),
    point("plan 1 %", "plan", 128, 1.24, 0.93, 0.0121, 387.3),
    point("plan 2 %", "plan", 128, 1.38, 1.88, 0.0254, 431.1),
    point("llama.cpp Q8_0", "peer", 128, 0.85, None, None, 266.9),
]
LONG = [
    point("dense int8", "dense", 4096, 1.0, 0.0, 0.0, 141.3),
    point("dense int4", "dense", 4096, 1.13, 1.45, 0.0213, 159.7),
    point("kwta", "mode", 4096, 1.06, 1.72, 0.0202, 149.8),
    point("state-pack", "mode", 4096, 1.85, 0.49, 0.0061, 261.4),
    point("event", "mode", 4096, 1.34, 1.03, 0.0133, 189.3),
    point("proc", "mode", 4096, 0.93, 0.75, 0.0104, 131.4),
    point("plan 0.5 %", "plan", 4096, 1.86, 0.48, 0.006, 262.8),
    point("plan 1 %", "plan", 4096, 1.97, 0.95, 0.0119, 278.4),
    point("plan 2 %", "plan", 4096, 2.21, 1.93, 0.0261, 312.3),
    point("llama.cpp Q8_0", "peer", 4096, 0.47, None, None, 66.4),
]
PLACES = ("qkv", "o", "up", "down")


def layers(count: int = 12) -> list[list[Cell]]:
    chance = random.Random(1)
    rows = []
    for i in range(count):
        keeps = [min(1.0, base + 0.03 * abs(i - 6) + chance.uniform(-0.1, 0.1)) for base in (0.45, 0.3, 0.38, 0.22)]
        row = [Cell(keep, f"kwta k {keep:.2f}") for keep in keeps]
        if i in (0, count - 1):
            row[0] = Cell(1.0, "dense")
        if i == 5:
            row[3] = Cell(0.52, "factors, rank 96")
            row[1] = Cell(1.06, "procedural")
        rows.append(row)
    return rows


def gap(tokens: int = 500) -> dict[str, list[tuple[int, float]]]:
    chance = random.Random(2)

    def series(base: float, grows: float) -> list[tuple[int, float]]:
        return [(t, (base + grows * t / tokens) * math.exp(chance.gauss(-0.4, 0.9))) for t in range(tokens)]

    return {"kwta": series(0.018, 0.006), "plan 2 %": series(0.02, 0.018)}


LINES = [
    ("decode speed-up over dense, int8, context {c}", "≥ 1.3", "1.21 (1.19 … 1.23)", False),
    ("Δppl % on held-out text, int8", "≤ 2", "+1.72 (+1.55 … +1.90), KL 0.0202, top-1 0.951", True),
    ("upper end of its 95 % interval", "≤ 2.5", "+1.90", True),
    ("every channel wins: dense bit for bit", "holds", "yes", True),
    ("bytes skipped are bytes not read", "holds", "18743296 bytes", True),
    ("a planted NaN is caught, counted, and the text goes on", "holds", "1 caught", True),
    ("matvec with half of its channels / whole, 1.1 B shapes, int8", "≤ 0.6", "0.541", True),
    ("decode beside llama.cpp, context {c}", "shown", "2.14 (2.11 … 2.19)", True),
]
ROWS = [
    Row(mode, line.format(c=ctx), target, value, passed or mode in ("state-pack", "proc", "tt"))
    for mode, ctx in (("state-pack", 8000), ("kwta", 128), ("event", 4096), ("proc", 128), ("tt", 128))
    for line, target, value, passed in LINES
]
REPORT = Report(
    title="shared/models/base",
    about={
        "CPU": "AMD EPYC 9R14 96-Core Processor",
        "threads": "2, avx512",
        "ralo": "0.2.0",
        "quality": "16384 tokens of held-out novels",
        "command": "ralo tune -m shared/models/base --max-dppl 0.5,1,2 --peer llama.cpp --html report.html",
    },
    summary=[
        ("fastest plan within 2 %", "2.21x", "at 4096 tokens, Δppl +1.93 %"),
        ("at 128 tokens", "1.38x", "Δppl +1.88 %"),
        ("beside llama.cpp", "4.70x", "Q8_0, at 4096 tokens"),
        ("lines that hold", "38 of 40", "2 FAIL"),
    ],
    points=[*SHORT, *LONG],
    budgets=[(b, p) for ctx in (SHORT, LONG) for b, p in zip((0.5, 1.0, 2.0), ctx[6:9], strict=True)],
    places=PLACES,
    layers=layers(),
    gap=gap(),
    rows=ROWS,
)
CLOSE = Report(
    "ways that hardly differ",
    {},
    points=[replace(p, speedup=1 + i / 5000, delta_ppl_pct=i / 9999, delta_ppl_ci95=None) for i, p in enumerate(SHORT)],
    budgets=[(1 + i / 1000, replace(p, speedup=1 + i / 5000, speedup_ci95=(0.99, 1.01))) for i, p in enumerate(SHORT)],
    gap={p.name: [(9000 + t, 1e-7 * (t % (i + 2))) for t in range(90)] for i, p in enumerate(SHORT)},
)
CROWDED = Report(
    "many ways",
    {},
    points=[
        point(
            f"way {i} of many", ("mode", "plan", "peer")[i % 3], 0, 1 + (i * 7 % 31) / 31, (i * 11 % 31) / 9, 0.01, 99
        )
        for i in range(31)
    ],
)
NASTY = "a<b>&\"c'</script><!--"
BAD = (math.nan, math.inf)
BROKEN = Report(
    title=NASTY + "\x00\udcff\n" + "x" * 300,
    about={NASTY: NASTY},
    summary=[(NASTY, NASTY, NASTY)],
    points=[
        replace(SHORT[0], name=NASTY, speedup=math.nan),
        replace(SHORT[1], name=NASTY, speedup=math.inf, speedup_ci95=BAD),
        replace(SHORT[2], delta_ppl_pct=math.nan, delta_ppl_ci95=BAD, kl=math.inf, tok_s=math.nan),
        replace(SHORT[3], delta_ppl_pct=1e300, speedup=1e-300, kind=NASTY),
        replace(SHORT[4], delta_ppl_pct=-3e5, speedup=1e300, speedup_ci95=(-math.inf, math.inf)),
        replace(SHORT[5], name="w" * 200, speedup_ci95=(5.0, -5.0), nbytes=0, cache_nbytes=None),
    ],
    budgets=[(math.nan, SHORT[0]), (math.inf, SHORT[1]), (0.0, replace(SHORT[2], speedup=1.0))],
    places=[NASTY],
    layers=[[Cell(math.nan, NASTY)], [Cell(-math.inf, "")], [Cell(-1.0, ""), Cell(1e300, "")], []],
    gap={NASTY: [(0, math.nan)], "empty": [], "flat": [(7, 0.0)], "w" * 200: [(0, 1.0), (1, math.inf)]},
    rows=[Row(NASTY, NASTY, NASTY, NASTY, False)],
)
