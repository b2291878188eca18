"""The rows of a bench as a picture: one drawing, written as a web page or as PNG."""

from __future__ import annotations

import html
import importlib.util
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralo.errors import RaloError

WIDTH, PAD = 400, 14  # units; one is a CSS pixel on a phone
LINE, BAR = 15, 9  # height of a line of text, thickness of a bar
LONGEST_BAR = 0.56 * WIDTH  # the figures stand after it
CHART = 190  # height of the chart over context
KINDS = ("ink", "faint", "ralo", "peer")
LIGHT = dict(zip(KINDS, ("#1f2328", "#c4c9d0", "#1f6feb", "#bc4c00"), strict=True))
DARK = dict(zip(KINDS, ("#e6edf3", "#444c56", "#58a6ff", "#f0883e"), strict=True))
PAPER = ("#ffffff", "#0d1117")
Row = dict[str, Any]


@dataclass(frozen=True)
class Stroke:
    points: Sequence[tuple[float, float]]
    kind: str
    width: float


@dataclass(frozen=True)
class Words:
    x: float
    y: float  # of the baseline
    text: str
    kind: str = "ink"
    anchor: str = "start"
    bold: bool = False


def check(path: Path) -> None:
    """Says early, in one line, that the file cannot be written."""
    if path.suffix not in (".html", ".png"):
        raise RaloError(f"--plot FILE must end in .html or .png, got {str(path)!r:.60}")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise RaloError("--plot FILE.png needs matplotlib: pip install 'ralo[plot]', or plot into a .html file")
    new = not path.exists()
    with path.open("ab"):  # what fails here is told as any file's error
        pass
    if new:
        path.unlink()


def write(path: Path, model: str, rows: Sequence[Row]) -> None:
    drawing = Drawing(model, rows)
    if path.suffix == ".png":
        _write_png(path, drawing)
    else:
        path.write_text(_page(model, drawing), encoding="utf-8")


class Drawing:
    """Strokes and words, from the top down; `y` is where the next thing goes."""

    def __init__(self, model: str, rows: Sequence[Row]) -> None:
        self.marks: list[Stroke | Words] = []
        self.y = float(PAD)
        first = rows[0]
        about = f"threads: {first['threads']}, {first['isa']}, {first['kv']} cache"
        for text in (*textwrap.wrap(model, 50), about):
            self.words(text, bold=text != about)
        notes = "Bars: median of the rounds. Thin lines: slowest to fastest round."
        if "peer" in first:
            notes += f" At the right: ralo / {first['peer']}, with its 95 % interval."
        for text in textwrap.wrap(notes, 58):
            self.words(text)
        for phase in dict.fromkeys(r["phase"] for r in rows):
            self.speeds(phase, [r for r in rows if r["phase"] == phase])
        decode = [r for r in rows if r["phase"] == "decode"]
        if len({r["ctx"] for r in decode}) > 1:
            self.over_context(decode)
        self.shares(decode)
        self.height = self.y + PAD

    def words(self, text: str, right: str = "", bold: bool = False) -> None:
        """A line of text, and what stands at its right end."""
        self.y += LINE
        self.marks.append(Words(PAD, self.y, text, bold=bold))
        if right:
            self.marks.append(Words(WIDTH - PAD, self.y, right, anchor="end"))

    def heading(self, text: str) -> None:
        self.y += LINE
        self.words(text, bold=True)

    def bar(self, value: float, spread: Sequence[float], top: float, kind: str, text: str) -> None:
        scale, y = LONGEST_BAR / top, self.y + LINE / 2 + 2
        low, high = (PAD + v * scale for v in spread)
        self.marks.append(Stroke([(PAD, y), (PAD + value * scale, y)], kind, BAR))
        self.marks.append(Stroke([(low, y), (high, y)], "ink", 1.5))
        self.marks.append(Words(max(high, PAD + value * scale) + 6, y + 4, text, kind))
        self.y += LINE

    def speeds(self, phase: str, rows: Sequence[Row]) -> None:
        self.heading(f"{phase}, tokens per second")
        top = max(max(s) for r in rows for _, _, s, _ in _engines(r))
        for r in rows:
            ratio = ""
            if "peer" in r:
                low, high = r["vs_peer_ci95"]
                ratio = f"{r['vs_peer']:.2f}x ({low:.2f} … {high:.2f})"
            self.words(_name(r), ratio)
            for name, value, spread, kind in _engines(r):
                self.bar(value, spread, top, kind, f"{name} {value:.1f}")
            self.y += 4

    def shares(self, rows: Sequence[Row]) -> None:
        self.heading("decode, share of the memory's read speed")
        top = max(1.0, *(r["bandwidth_share"] for r in rows))
        for r in rows:
            share = r["bandwidth_share"]
            self.words(_name(r))
            self.bar(share, (share, share), top, "ralo", f"{share:.0%} of {r['stream_gb_s']:.1f} GB/s")

    def over_context(self, rows: Sequence[Row]) -> None:
        self.heading("decode over context, tokens per second")
        left, right, bottom = PAD + 34, WIDTH - PAD - 100, self.y + LINE + CHART
        top = max(max(s) for r in rows for _, _, s, _ in _engines(r))
        contexts = sorted({r["ctx"] for r in rows})

        def at(ctx: int, tok_s: float) -> tuple[float, float]:
            return left + (right - left) * ctx / contexts[-1], bottom - CHART * tok_s / top

        step = _step(top)
        for tick in range(int(top / step) + 1):
            x, y = at(0, step * tick)
            self.marks.append(Stroke([(x, y), (right, y)], "faint", 1))
            self.marks.append(Words(x - 6, y + 4, f"{step * tick:g}", anchor="end"))
        free = 0.0
        for ctx in contexts:
            x, _ = at(ctx, 0)
            if x > free:  # figures closer than that would run into each other
                self.marks.append(Words(x, bottom + LINE, str(ctx), anchor="middle"))
                free = x + 40
        ends = []
        for label, kind, series in _series(rows):
            points = [at(ctx, value) for ctx, value, _ in series]
            self.marks.append(Stroke(points, kind, 2.5))
            self.marks += [Stroke([at(ctx, v) for v in spread], "ink", 1.5) for ctx, _, spread in series]
            ends.append((points[-1][1] + 4, label, kind))
        y = 0.0
        for end, label, kind in sorted(ends):
            y = max(end, y + LINE - 2)  # labels never lie on each other
            self.marks.append(Words(right + 6, y, label, kind))
        self.y = max(bottom + LINE, y)


def _step(top: float) -> float:
    """Between grid lines: 1, 2 or 5 times a power of ten, so that there are two to five of them."""
    power = 10.0 ** math.floor(math.log10(top))
    return next(power * m for m in (0.2, 0.5, 1, 2) if top < 5 * power * m)


def _name(r: Row) -> str:
    return (
        f"{r['quant']}, {r['ctx']} tokens before" if r["phase"] == "decode" else f"{r['quant']}, {r['tokens']} tokens"
    )


def _engines(r: Row) -> list[tuple[str, float, Sequence[float], str]]:
    """Name, tok/s, slowest and fastest, kind: ralo, and the peer where there is one."""
    found = [("ralo", r["tok_s"], r["tok_s_range"], "ralo")]
    if "peer" in r:
        found.append((f"{r['peer']} {r['peer_quant']}", r["peer_tok_s"], r["peer_tok_s_range"], "peer"))
    return found


def _series(rows: Sequence[Row]) -> list[tuple[str, str, list[tuple[int, float, Sequence[float]]]]]:
    """Label, kind and points (context, tok/s, spread) of every engine at every precision."""
    found: dict[tuple[str, str], list[tuple[int, float, Sequence[float]]]] = {}
    for r in sorted(rows, key=lambda r: int(r["ctx"])):
        for name, value, spread, kind in _engines(r):
            label = f"ralo {r['quant']}" if kind == "ralo" else name
            found.setdefault((label, kind), []).append((r["ctx"], value, spread))
    return [(label, kind, series) for (label, kind), series in found.items()]


def _page(model: str, drawing: Drawing) -> str:
    def colours(theme: dict[str, str]) -> str:
        return " ".join(f".{kind} {{ --colour: {colour} }}" for kind, colour in theme.items())

    marks = []
    for m in drawing.marks:
        if isinstance(m, Stroke):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in m.points)
            marks.append(f'<polyline class="{m.kind}" stroke-width="{m.width}" points="{points}"/>')
        else:
            where = f'class="{m.kind}" x="{m.x:.1f}" y="{m.y:.1f}" text-anchor="{m.anchor}"'
            bold = ' font-weight="bold"' if m.bold else ""
            marks.append(f"<text {where}{bold}>{html.escape(m.text)}</text>")
    title, drawn = html.escape(f"ralo bench: {model}"), "\n".join(marks)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0; background: {PAPER[0]} }}
svg {{ display: block; width: 100%; max-width: 640px; margin: auto; font: 12px system-ui, sans-serif }}
{colours(LIGHT)}
@media (prefers-color-scheme: dark) {{ body {{ background: {PAPER[1]} }} {colours(DARK)} }}
polyline {{ fill: none; stroke: var(--colour) }}
text {{ fill: var(--colour) }}
</style>
<svg viewBox="0 0 {WIDTH} {drawing.height:.0f}" role="img" aria-label="{title}">
{drawn}
</svg>
</html>
"""


def _write_png(path: Path, drawing: Drawing) -> None:
    from matplotlib.figure import Figure

    inch, point = 1 / 96, 72 / 96  # of a unit
    figure = Figure((WIDTH * inch, drawing.height * inch), dpi=192, facecolor=PAPER[0])
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(drawing.height, 0))
    axes.axis("off")
    for m in drawing.marks:
        if isinstance(m, Stroke):
            xs, ys = zip(*m.points, strict=True)
            axes.plot(xs, ys, color=LIGHT[m.kind], linewidth=m.width * point, solid_capstyle="butt")
        else:
            side = {"start": "left", "middle": "center", "end": "right"}[m.anchor]
            weight = "bold" if m.bold else "normal"
            look = {"color": LIGHT[m.kind], "ha": side, "weight": weight, "parse_math": False}
            axes.text(m.x, m.y, m.text, fontsize=10.5 * point, **look)
    figure.savefig(path)
