"""What the charts of a report share: their size, marks that tell kinds apart without colour, and legends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ralo.drawing import LINE, Area, At, Drawing, Stroke, Words
from ralo.report.data import known
from ralo.report.labels import shortened, width

WIDTH, EDGE = 360, 4  # units: a chart is as wide as a phone, and the page has margins of its own
HEIGHT = 200  # between the axes
LEFT, RIGHT = 40, WIDTH - 14  # of the axes: numbers stand to the left
NARROWEST = 0.2  # of an axis: a fifth of dense's speed, of a percent of quality
COLOURS = {"dense": "ink", "mode": "ralo", "plan": "plan", "peer": "peer"}
LINES = (("ralo", ""), ("peer", "7 3"), ("plan", "2 3"), ("ink", "9 3 2 3"))  # told apart by colour and by dash


def shape(kind: str, x: float, y: float) -> list[At]:
    """Square, diamond, triangle, or round."""
    if kind == "dense":
        return [(x - 4.5, y - 4.5), (x + 4.5, y - 4.5), (x + 4.5, y + 4.5), (x - 4.5, y + 4.5)]
    if kind == "plan":
        return [(x, y - 6.5), (x + 6.5, y), (x, y + 6.5), (x - 6.5, y)]
    if kind == "peer":
        return [(x, y - 6), (x + 6, y + 5), (x - 6, y + 5)]
    return [(x + 5 * math.cos(a * math.pi / 10), y + 5 * math.sin(a * math.pi / 10)) for a in range(20)]


def whisker(value: float, ci95: tuple[float, float] | None) -> tuple[float, float]:
    """The ends of an interval that is known, else none."""
    return ci95 if ci95 is not None and all(map(known, ci95)) else (value, value)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """From a bit below the least to a bit above the most, and never so narrow that noise looks large."""
    low, high = min(values), max(values)
    room = max(0.08 * (high - low), (NARROWEST - (high - low)) / 2)
    return low - room, high + room


def legend_of_kinds(out: Drawing, kinds: Sequence[str], front: bool) -> None:
    """One line: each mark, and the front's."""
    out.y += LINE
    x = float(LEFT)
    for kind in kinds:
        colour = COLOURS.get(kind, "ralo")
        out.marks += [Area(shape(kind, x, out.y - 4), colour), Words(x + 11, out.y, kind, colour)]
        x += 26 + width(kind)
    if front:
        out.marks += [Stroke([(x - 5, out.y - 4), (x + 11, out.y - 4)], "soft", 1.5)]
        out.marks += [Words(x + 16, out.y, "front", "soft")]


def looks(count: int) -> list[tuple[str, str]]:
    """A colour and a dash for each of so many lines."""
    return [LINES[i % len(LINES)] for i in range(count)]


def legend_of_lines(out: Drawing, names: Sequence[str]) -> None:
    out.y += 5
    for (kind, dash), name in zip(looks(len(names)), names, strict=True):
        out.y += LINE + 1
        out.marks.append(Stroke([(LEFT, out.y - 4), (LEFT + 30, out.y - 4)], kind, 2.5, dash))
        out.marks.append(Words(LEFT + 38, out.y, shortened(name, WIDTH - LEFT - 50), kind))
