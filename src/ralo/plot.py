"""The rows of a bench as a picture: one drawing, written as a web page or as PNG."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ralo.drawing import LIGHT, LINE, PAD, Axes, Drawing, Stroke, Words, apart, page, writable
from ralo.errors import RaloError

WIDTH = 400  # units; one is a CSS pixel on a phone
LONGEST_BAR = 0.56 * WIDTH  # the figures stand after it
CHART = 190  # height of the chart over context
Row = dict[str, Any]


def check(path: Path) -> None:
    """Says early, in one line, that the file cannot be written."""
    if path.suffix not in (".html", ".png"):
        raise RaloError(f"--plot FILE must end in .html or .png, got {str(path)!r:.60}")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise RaloError("--plot FILE.png needs matplotlib: pip install 'ralo[plot]', or plot into a .html file")
    writable(path)


def write(path: Path, model: str, rows: Sequence[Row]) -> None:
    drawing = Speeds(model, rows)
    if path.suffix == ".png":
        _write_png(path, drawing)
    else:
        title = f"ralo bench: {model}"
        path.write_text(page(title, drawing.svg(title), ""), encoding="utf-8")


class Speeds(Drawing):
    """What a bench found."""

    def __init__(self, model: str, rows: Sequence[Row]) -> None:
        super().__init__(WIDTH)
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

    def figure(self, value: float, spread: Sequence[float], top: float, kind: str, text: str) -> None:
        """A bar, the line of its spread, and what it says."""
        scale = LONGEST_BAR / top
        low, high = (PAD + v * scale for v in spread)
        end, y = self.bar([(value, kind)], scale)
        self.marks.append(Stroke([(low, y), (high, y)], "ink", 1.5))
        self.marks.append(Words(max(high, end) + 6, y + 4, text, kind))

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
                self.figure(value, spread, top, kind, f"{name} {value:.1f}")
            self.y += 4

    def shares(self, rows: Sequence[Row]) -> None:
        self.heading("decode, share of the memory's read speed")
        top = max(1.0, *(r["bandwidth_share"] for r in rows))
        for r in rows:
            share = r["bandwidth_share"]
            self.words(_name(r))
            self.figure(share, (share, share), top, "ralo", f"{share:.0%} of {r['stream_gb_s']:.1f} GB/s")

    def over_context(self, rows: Sequence[Row]) -> None:
        self.heading("decode over context, tokens per second")
        bottom = self.y + LINE + CHART
        top = max(max(s) for r in rows for _, _, s, _ in _engines(r))
        contexts = sorted({r["ctx"] for r in rows})
        axes = Axes(PAD + 34, WIDTH - PAD - 100, bottom - CHART, bottom, (0, contexts[-1]), (0, top))
        self.marks += axes.rows()
        free = 0.0
        for ctx in contexts:
            x, _ = axes.at(ctx, 0)
            if x > free:  # figures closer than that would run into each other
                self.marks.append(Words(x, bottom + LINE, str(ctx), anchor="middle"))
                free = x + 40
        ends = []
        for label, kind, series in _series(rows):
            points = [axes.at(ctx, value) for ctx, value, _ in series]
            self.marks.append(Stroke(points, kind, 2.5))
            self.marks += [Stroke([axes.at(ctx, v) for v in spread], "ink", 1.5) for ctx, _, spread in series]
            ends.append((points[-1][1] + 4, label, kind))
        placed = apart(ends)
        self.marks += [Words(axes.right + 6, y, label, kind) for y, label, kind in placed]
        self.y = max(bottom + LINE, placed[-1][0])


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


def _write_png(path: Path, drawing: Drawing) -> None:
    from matplotlib.figure import Figure

    inch, point = 1 / 96, 72 / 96  # of a unit
    figure = Figure((WIDTH * inch, drawing.height * inch), dpi=192, facecolor=LIGHT["paper"])
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(drawing.height, 0))
    axes.axis("off")
    for m in drawing.marks:
        if isinstance(m, Stroke):
            xs, ys = zip(*m.points, strict=True)
            axes.plot(xs, ys, color=LIGHT[m.kind], linewidth=m.width * point, solid_capstyle="butt")
        elif isinstance(m, Words):
            side = {"start": "left", "middle": "center", "end": "right"}[m.anchor]
            weight = "bold" if m.bold else "normal"
            look: dict[str, Any] = {"color": LIGHT[m.kind], "ha": side, "weight": weight, "parse_math": False}
            axes.text(m.x, m.y, m.text, fontsize=10.5 * point, **look)
    figure.savefig(path)
