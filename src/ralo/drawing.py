"""What ralo draws with: strokes, areas and words in light and dark, axes, and a page that needs no other file."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PAD = 14  # units; one is a CSS pixel on a phone
LINE, BAR = 15, 9  # height of a line of text, thickness of a bar
KINDS = ("paper", "card", "ink", "soft", "faint", "ralo", "plan", "peer", "good", "bad")
LIGHT = dict(zip(KINDS, ("#ffffff", "#f6f8fa", "#1f2328", "#57606a", "#c4c9d0", "#1f6feb", "#00795a", "#bc4c00",
                         "#00795a", "#c4202c"), strict=True))  # fmt: skip
DARK = dict(zip(KINDS, ("#0d1117", "#161b22", "#e6edf3", "#9da7b1", "#444c56", "#58a6ff", "#3fcf9f", "#f0883e",
                        "#3fcf9f", "#ff7b72"), strict=True))  # fmt: skip
At = tuple[float, float]


@dataclass(frozen=True)
class Stroke:
    points: Sequence[At]
    kind: str
    width: float
    dash: str = ""


@dataclass(frozen=True)
class Area:
    points: Sequence[At]
    kind: str
    look: str = "full"  # full, hollow, or thin for what lies behind a line
    hint: str = ""  # shown where a pointer rests on it


@dataclass(frozen=True)
class Words:
    x: float
    y: float  # of the baseline
    text: str
    kind: str = "ink"
    anchor: str = "start"
    bold: bool = False


Mark = Stroke | Area | Words


class Drawing:
    """Marks from the top down; `y` is where the next thing goes."""

    def __init__(self, width: float, pad: float = PAD) -> None:
        self.marks: list[Mark] = []
        self.width, self.pad, self.y = width, pad, pad

    @property
    def height(self) -> float:
        return self.y + self.pad

    def words(self, text: str, right: str = "", bold: bool = False) -> None:
        """A line of text, and what stands at its right end."""
        self.y += LINE
        self.marks.append(Words(self.pad, self.y, text, bold=bold))
        if right:
            self.marks.append(Words(self.width - self.pad, self.y, right, anchor="end"))

    def heading(self, text: str) -> None:
        self.y += LINE
        self.words(text, bold=True)

    def bar(self, parts: Sequence[tuple[float, str]], scale: float) -> At:
        """Lengths and kinds, one after the other; returns where they end."""
        x, y = float(self.pad), self.y + LINE / 2 + 2
        for value, kind in parts:
            self.marks.append(Stroke([(x, y), (x + value * scale, y)], kind, BAR))
            x += value * scale
        self.y += LINE
        return x, y

    def svg(self, label: str) -> str:
        drawn = "\n".join(map(_element, self.marks))
        box = f'viewBox="0 0 {self.width:g} {self.height:.0f}"'
        return f'<svg {box} role="img" aria-label="{escape(label)}">\n{drawn}\n</svg>'


@dataclass(frozen=True)
class Axes:
    """A place on the paper, and the values at its edges."""

    left: float
    right: float
    top: float
    bottom: float
    xs: tuple[float, float]
    ys: tuple[float, float]

    def at(self, x: float, y: float) -> At:
        """What lies outside is drawn at the edge."""
        (x0, x1), (y0, y1) = self.xs, self.ys
        across, up = (min(max(v, 0.0), 1.0) for v in ((x - x0) / (x1 - x0), (y - y0) / (y1 - y0)))
        return self.left + (self.right - self.left) * across, self.bottom - (self.bottom - self.top) * up

    def rows(self, left: float | None = None, unit: str = "") -> list[Mark]:
        """Lines across at round values, with their numbers."""
        marks: list[Mark] = []
        for value in ticks(*self.ys):
            x, y = self.left if left is None else left, self.at(0, value)[1]
            marks.append(Stroke([(x, y), (self.right, y)], "faint", 1))
            marks.append(Words(x - 6, y + 4, f"{value:g}{unit}", anchor="end"))
        return marks

    def columns(self) -> list[Mark]:
        """Round values below."""
        places = [(self.at(value, 0)[0], value) for value in ticks(*self.xs)]
        return [Words(x, self.bottom + LINE + 3, f"{value:g}", anchor="middle") for x, value in places]


def step(top: float) -> float:
    """Between grid lines: 1, 2 or 5 times a power of ten, so that there are two to five of them."""
    power = 10.0 ** math.floor(math.log10(top))
    return next(power * m for m in (0.2, 0.5, 1, 2) if top < 5 * power * m)


def ticks(low: float, high: float) -> list[float]:
    between = step(high - low)
    return [i * between for i in range(math.ceil(low / between - 1e-6), math.floor(high / between + 1e-6) + 1)]


def apart(ends: Sequence[tuple[float, str, str]], least: float = LINE - 2) -> list[tuple[float, str, str]]:
    """Labels at these heights, moved down where they would lie on each other."""
    placed: list[tuple[float, str, str]] = []
    for y, label, kind in sorted(ends):
        placed.append((max(y, placed[-1][0] + least) if placed else y, label, kind))
    return placed


def escape(text: str) -> str:
    """For a page: what cannot be shown is a space, for some of it no file can hold."""
    return html.escape("".join(c if c.isprintable() else " " for c in text))


def page(title: str, body: str, style: str) -> str:
    def colours(theme: dict[str, str]) -> str:
        return " ".join(f"--{kind}: {colour};" for kind, colour in theme.items())

    kinds = "\n".join(f".{kind} {{ --colour: var(--{kind}) }}" for kind in KINDS)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
:root {{ color-scheme: light dark; {colours(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {colours(DARK)} }} }}
{kinds}
body {{ margin: 0; background: var(--paper); color: var(--ink) }}
svg {{ display: block; width: 100%; max-width: 640px; margin: auto; font: 12px system-ui, sans-serif }}
polyline {{ fill: none; stroke: var(--colour); stroke-linejoin: round }}
polygon {{ fill: var(--colour); stroke: var(--colour) }}
polygon.hollow {{ fill: var(--paper); stroke-width: 1.5 }}
polygon.thin {{ opacity: 0.2; stroke: none }}
text {{ fill: var(--colour) }}
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def writable(path: Path) -> None:
    """What fails here would fail after the work; it is told as any file's error."""
    new = not path.exists()
    with path.open("ab"):
        pass
    if new:
        path.unlink()


def _element(mark: Mark) -> str:
    if isinstance(mark, Words):
        where = f'class="{mark.kind}" x="{mark.x:.1f}" y="{mark.y:.1f}" text-anchor="{mark.anchor}"'
        bold = ' font-weight="bold"' if mark.bold else ""
        return f"<text {where}{bold}>{escape(mark.text)}</text>"
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.points)
    if isinstance(mark, Area):
        hint = f"<title>{escape(mark.hint)}</title>" if mark.hint else ""
        return f'<polygon class="{mark.kind} {mark.look}" points="{points}">{hint}</polygon>'
    dash = f' stroke-dasharray="{mark.dash}"' if mark.dash else ""
    return f'<polyline class="{mark.kind}" stroke-width="{mark.width}"{dash} points="{points}"/>'
