"""Δppl over something, as an SVG with a line per way of running."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, TOP = 640, 400, 60, 30
COLOURS = ("#0a7", "#c60", "#888", "#06c", "#a3a", "#a00")


@dataclass(frozen=True)
class Point:
    x: float
    dppl: float
    label: str = ""


@dataclass(frozen=True)
class Axis:
    """From low to high; ticks as value and what is written there."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str
    log: bool = False

    def share(self, x: float) -> float:
        f = math.log if self.log else float
        return (f(x) - f(self.low)) / (f(self.high) - f(self.low))


def plot(lines: Mapping[str, Sequence[Point]], axis: Axis, most: float) -> str:
    """Points above `most` percent are left out."""

    def at(p: Point) -> tuple[float, float]:
        x = LEFT + axis.share(p.x) * (WIDTH - LEFT - 20)
        return x, TOP + (1 - min(max(p.dppl, -0.5), most) / most) * (HEIGHT - 2 * TOP - 20)

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for i in range(5):
        dppl = most * i / 4
        (x, y), (x2, _) = at(Point(axis.low, dppl)), at(Point(axis.high, dppl))
        out.append(f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{x2:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        out.append(f'<text x="{x - 8:.0f}" y="{y + 4:.0f}" text-anchor="end">+{dppl:g} %</text>')
    for value, text in axis.ticks:
        x, _ = at(Point(value, 0))
        out.append(f'<text x="{x:.0f}" y="{HEIGHT - 24}" text-anchor="middle">{text}</text>')
    for i, (name, points) in enumerate(lines.items()):
        out += _line(name, [(at(p), p.label) for p in points if p.dppl <= most], COLOURS[i % len(COLOURS)], i)
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{axis.title}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _line(name: str, points: Sequence[tuple[tuple[float, float], str]], colour: str, row: int) -> list[str]:
    line = " ".join(f"{x:.1f},{y:.1f}" for (x, y), _ in points)
    out = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for (x, y), label in points:
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        if label:
            out.append(f'<text x="{x + 6:.1f}" y="{y - 6:.1f}" fill="{colour}">{label}</text>')
    return [*out, f'<text x="{WIDTH - 230}" y="{TOP + 16 * (row + 1)}" fill="{colour}">{name}</text>']
