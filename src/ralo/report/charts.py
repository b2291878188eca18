"""The other charts of a report: over quality budgets, over time, and memory as bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ralo.drawing import LINE, Area, Axes, Drawing, Stroke, Words
from ralo.report.data import Gap, Point, interval, known, size, times
from ralo.report.labels import along, named, shortened
from ralo.report.marks import EDGE, HEIGHT, LEFT, RIGHT, WIDTH, legend_of_lines, looks, shape, spread, whisker

BUCKETS = 40  # points of a line over time


def over_budget(budgets: Sequence[tuple[float, Point]]) -> Drawing:
    """Speed-up of the plan found within each budget, a line per context."""
    drawn = sorted(((b, p) for b, p in budgets if known(b) and known(p.speedup)), key=lambda pair: pair[0])
    out = Drawing(WIDTH, EDGE)
    out.words("speed-up over dense int8")
    top, most = out.y + LINE, max(b for b, _ in drawn) or 1.0
    ys = spread([1.0, *(v for _, p in drawn for v in (p.speedup, *whisker(p.speedup, p.speedup_ci95)))])
    axes = Axes(LEFT, RIGHT, top, top + HEIGHT, (0, 1.1 * most), ys)
    out.marks += [*axes.rows(unit="x"), *axes.columns()]
    contexts, names, lines = sorted({p.ctx for _, p in drawn}), [], []
    for (kind, dash), ctx in zip(looks(len(contexts)), contexts, strict=True):
        here = [(axes.at(b, p.speedup), b, p) for b, p in drawn if p.ctx == ctx]
        out.marks.append(Stroke([at for at, _, _ in here], kind, 2.5, dash))
        for at, b, p in here:
            low, high = (axes.at(b, v) for v in whisker(p.speedup, p.speedup_ci95))
            lines.append(along(low, high))
            names.append((at, times(p.speedup), kind))
            hint = f"{p.name}, budget {b:g} %: {times(p.speedup)} ({interval(p.speedup_ci95, '.2f')})"
            out.marks += [Stroke([low, high], kind, 1.25), Area(shape("plan", *at), kind, hint=hint)]
    out.marks += named(names, (LEFT, axes.top - LINE, WIDTH, axes.bottom), lines)
    out.y = axes.bottom + LINE + 6
    out.words("", "budget: most that perplexity may rise, %")
    legend_of_lines(out, [f"at {ctx} tokens of context" for ctx in contexts])
    return out


def over_time(gap: Mapping[str, Gap]) -> Drawing:
    """KL from dense along a text: means of some tokens as a line, the middle half of them as an area."""
    found = {name: buckets(series) for name, series in gap.items()}
    out = Drawing(WIDTH, EDGE)
    out.words("KL from dense")
    top, tokens = out.y + LINE, [t for series in gap.values() for t, v in series if known(v)]
    most = max(mean for line in found.values() for _, mean, _, _ in line)
    last = max(max(tokens), min(tokens) + 1)
    axes = Axes(LEFT + 12, RIGHT, top, top + HEIGHT, (min(tokens), last), (0, 1.25 * most if most > 0 else 1.0))
    out.marks += [*axes.rows(), *axes.columns()]
    lines = list(zip(looks(len(found)), found.values(), strict=True))
    for (kind, _), line in lines:
        area = [axes.at(t, high) for t, _, _, high in line] + [axes.at(t, low) for t, _, low, _ in reversed(line)]
        out.marks.append(Area(area, kind, "thin"))
    for (kind, dash), line in lines:
        out.marks.append(Stroke([axes.at(t, mean) for t, mean, _, _ in line], kind, 2, dash))
    out.y = axes.bottom + LINE + 6
    out.words("", "token of the text")
    legend_of_lines(out, list(found))
    return out


def buckets(series: Gap) -> list[tuple[float, float, float, float]]:
    """Token, mean and quartiles of runs of tokens, so few that a line of them can be read."""
    found = [(t, v) for t, v in series if known(v)]
    each = -(-len(found) // BUCKETS) or 1
    runs = [list(zip(*found[i : i + each], strict=True)) for i in range(0, len(found), each)]
    return [(statistics.fmean(t), statistics.fmean(v), *_middle(sorted(v))) for t, v in runs]


def _middle(values: Sequence[float]) -> tuple[float, float]:
    return values[len(values) // 4], values[-1 - len(values) // 4]


def memory(points: Sequence[Point]) -> Drawing:
    """Weights and cache of each way, one bar each."""
    out = Drawing(WIDTH, EDGE)
    top = max((p.nbytes or 0) + (p.cache_nbytes or 0) for p in points) or 1
    out.words("")
    for x, kind, word in ((EDGE + 5, "ralo", "weights"), (EDGE + 78, "peer", "cache")):
        out.marks += [Area(shape("dense", x, out.y - 4), kind), Words(x + 10, out.y, word, kind)]
    out.y += 8
    for p in points:
        out.words(shortened(p.name), f"{size(p.nbytes)} + {size(p.cache_nbytes)}")
        out.bar([(p.nbytes or 0, "ralo"), (p.cache_nbytes or 0, "peer")], (WIDTH - 2 * EDGE) / top)
        out.y += 6
    return out
