"""Speed against quality: every way of running a model at one context, and the front that nothing beats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from ralo.drawing import LINE, Area, At, Axes, Drawing, Mark, Stroke, Words
from ralo.report.data import Point, interval, known, number, times
from ralo.report.labels import Box, along, named
from ralo.report.marks import COLOURS, EDGE, HEIGHT, LEFT, RIGHT, WIDTH, legend_of_kinds, shape, spread, whisker

UNKNOWN = 40  # width of the band for ways of unknown quality
FAR = 4  # times the median: what is further off stands at the edge, so that the others can be told apart


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in speed without losing quality, or in quality without losing speed."""
    best: list[Point] = []
    for p in sorted(_placed(points), key=lambda p: (p.delta_ppl_pct or 0.0, -p.speedup)):
        if not best or p.speedup > best[-1].speedup:
            best.append(p)
    return best


def scatter(points: Sequence[Point]) -> Drawing:
    drawn = [p for p in points if known(p.speedup)]
    out, best = Drawing(WIDTH, EDGE), front(points)
    kinds = [kind for kind in COLOURS if any(p.kind == kind for p in drawn)]
    legend_of_kinds(out, kinds, len(best) > 1)
    out.y += 5
    out.words("speed-up over dense int8")
    axes = _axes(drawn, out.y + LINE)
    one = axes.at(0, 1)[1]
    out.marks += [*axes.rows(LEFT, "x"), Stroke([(LEFT, one), (RIGHT, one)], "soft", 1), *axes.columns()]
    if axes.left > LEFT:
        edge = axes.left - 8
        out.marks.append(Stroke([(edge, axes.top), (edge, axes.bottom)], "faint", 1, "3 3"))
        out.marks.append(Words((LEFT + edge) / 2, axes.bottom + LINE + 3, "?", anchor="middle"))
    steps = _steps([axes.at(p.delta_ppl_pct or 0.0, p.speedup) for p in best])
    if len(best) > 1:
        out.marks.append(Stroke(steps, "soft", 1.5))
    lines = [along(a, b) for a, b in pairwise(steps)]
    for p in drawn:
        bars = _whiskers(axes, p)
        out.marks += [Stroke(bar, COLOURS.get(p.kind, "ralo"), 1.25) for bar in bars]
        lines += [along(*bar) for bar in bars]
    room: Box = (LEFT + 2, axes.top - 4, WIDTH - 2, axes.bottom - 1)
    first = sorted(drawn, key=lambda p: p not in best)
    out.marks += named([(_at(axes, p), _name(axes, p), COLOURS.get(p.kind, "ralo")) for p in first], room, lines)
    out.marks += [_mark(axes, p) for p in drawn]  # on top of the lines that lead to names
    out.y = axes.bottom + LINE + 6
    out.y += LINE
    out.marks.append(Words(RIGHT, out.y, "Δ perplexity, %: less is better", anchor="end"))
    return out


def _placed(points: Sequence[Point]) -> list[Point]:
    return [p for p in points if known(p.speedup) and known(p.delta_ppl_pct)]


def _axes(drawn: Sequence[Point], top: float) -> Axes:
    """Speed-ups with their intervals, within reason; quality without what is far off."""
    speeds = [p.speedup for p in drawn]
    ends = [v for p in drawn for v in whisker(p.speedup, p.speedup_ci95)]
    rises = [p.delta_ppl_pct or 0.0 for p in _placed(drawn)]
    far = FAR * max(statistics.median(rises), 0.5) if rises else 1.0
    falls = [v for p in _placed(drawn) for v in whisker(p.delta_ppl_pct or 0.0, p.delta_ppl_ci95)]
    low, high = min(speeds) / 2, 1.5 * max(speeds)
    ys = spread([1.0, *speeds, *(v for v in ends if low <= v <= high)])
    xs = spread([0.0, *(v for v in falls if abs(v) <= far), *(v for v in rises if abs(v) <= far)])
    left = LEFT + UNKNOWN if len(rises) < len(drawn) else LEFT
    return Axes(left, RIGHT, top, top + HEIGHT, xs, ys)


def _at(axes: Axes, p: Point) -> At:
    if known(p.delta_ppl_pct):
        return axes.at(p.delta_ppl_pct, p.speedup)
    return LEFT + (UNKNOWN - 8) / 2, axes.at(0, p.speedup)[1]


def _name(axes: Axes, p: Point) -> str:
    off = known(p.delta_ppl_pct) and not axes.xs[0] <= p.delta_ppl_pct <= axes.xs[1]
    return f"{p.name} {number(p.delta_ppl_pct, '+.3g')} %" if off else p.name


def _mark(axes: Axes, p: Point) -> Mark:
    quality = f"Δppl {number(p.delta_ppl_pct, '+.2f')} %" if known(p.delta_ppl_pct) else "quality not known"
    hint = f"{p.name}: {times(p.speedup)} ({interval(p.speedup_ci95, '.2f')}), {quality}"
    look = "full" if known(p.delta_ppl_pct) else "hollow"
    return Area(shape(p.kind, *_at(axes, p)), COLOURS.get(p.kind, "ralo"), look, hint)


def _whiskers(axes: Axes, p: Point) -> list[tuple[At, At]]:
    x, y = _at(axes, p)
    low, high = (axes.at(0, v)[1] for v in whisker(p.speedup, p.speedup_ci95))
    bars = [((x, low), (x, high))]
    if known(p.delta_ppl_pct):
        left, right = (axes.at(v, 0)[0] for v in whisker(p.delta_ppl_pct, p.delta_ppl_ci95))
        bars.append(((left, y), (right, y)))
    return bars


def _steps(places: Sequence[At]) -> list[At]:
    """A stair: nothing is promised between two points."""
    stair: list[At] = []
    for x, y in places:
        stair += [(x, stair[-1][1]), (x, y)] if stair else [(x, y)]
    return stair
