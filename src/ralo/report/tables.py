"""Tables of a report: every number that a chart shows, what each layer reads, and the lines of acceptance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ralo.drawing import DARK, LIGHT, escape
from ralo.report.data import NOTHING, Cell, Gap, Point, interval, known, number, size, times, tokens

if TYPE_CHECKING:
    from ralo.accept.rows import Row

PASS, FAIL = "PASS", "FAIL"
SHADES = 5  # of the heat map, a fifth of dense's bytes each
DEEP, OVER = ("#54aeff", "#1158c7"), ("#ffd2ad", "#7a3e00")  # light and dark: least read; more than dense
SCALE = (("over", "more than dense"), ("s0", "as dense"), ("s1", "80 to 100 %"), ("s2", "60 to 80 %"),
         ("s3", "40 to 60 %"), ("s4", "20 to 40 %"), ("s5", "less than 20 %"))  # fmt: skip
Groups = Mapping[str, Sequence[Sequence[str]]]  # name -> rows


def table(label: str, columns: Sequence[str], groups: Groups, look: str = "", letters: int = 15) -> str:
    """Rows of cells, the first of which is the row's name, so many letters wide; a group's name stands above it.

    It scrolls in a box of its own where it is wider than the page.
    """
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    bodies = []
    for name, rows in groups.items():
        above = f'<tr><th scope="rowgroup" colspan="{len(columns)}">{escape(name)}</th></tr>' if name else ""
        bodies.append("\n".join([f"<tbody>{above}", *(_row(row, letters) for row in rows), "</tbody>"]))
    body, kind = "\n".join(bodies), f' class="{look}"' if look else ""
    return boxed(label, f"<table{kind}>\n<thead><tr>{head}</tr></thead>\n{body}\n</table>")


def boxed(label: str, inner: str) -> str:
    return f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}">\n{inner}\n</div>'


def _row(row: Sequence[str], letters: int) -> str:
    cells = "".join(map(_cell, row[1:]))
    room = f"min-width: calc({min(len(row[0]), letters) + 1}ch + 0.5rem)"
    return f'<tr><th scope="row" style="{room}">{escape(row[0])}</th>{cells}</tr>'


def _cell(text: str) -> str:
    kind = {PASS: ' class="good"', FAIL: ' class="bad"'}.get(text, "")
    return f"<td{kind}>{escape(text)}</td>"


def of_points(points: Sequence[Point], best: Sequence[Point]) -> str:
    columns = ["way", "kind", "speed-up", "95 %", "Δppl %", "95 %", "KL", "tok/s", "weights", "cache", "front"]
    groups: dict[str, list[list[str]]] = {}
    for p in points:
        row = [p.name, p.kind, times(p.speedup), interval(p.speedup_ci95, ".2f")]
        row += [number(p.delta_ppl_pct, "+.2f"), interval(p.delta_ppl_ci95, "+.2f"), number(p.kl, ".3g")]
        row += [number(p.tok_s, ".1f"), size(p.nbytes), size(p.cache_nbytes), "yes" if p in best else ""]
        groups.setdefault(tokens(p.ctx), []).append(row)
    return table("Speed and quality of every way", columns, groups)


def of_budgets(budgets: Sequence[tuple[float, Point]]) -> str:
    columns = ["budget", "plan", "speed-up", "95 %", "Δppl %", "95 %"]
    groups: dict[str, list[list[str]]] = {}
    for budget, p in budgets:
        row = [f"{number(budget, 'g')} %", p.name, times(p.speedup), interval(p.speedup_ci95, ".2f")]
        row += [number(p.delta_ppl_pct, "+.2f"), interval(p.delta_ppl_ci95, "+.2f")]
        groups.setdefault(tokens(p.ctx), []).append(row)
    return table("The plan of every budget", columns, groups)


def of_gap(gap: Mapping[str, Gap]) -> str:
    rows = []
    for name, series in gap.items():
        found = sorted((v, t) for t, v in series if known(v))
        values = [v for v, _ in found]
        most, at = found[-1] if found else (None, None)
        high = values[math.ceil(0.95 * len(values)) - 1] if values else None
        middle, mean = (statistics.median(values), statistics.fmean(values)) if values else (None, None)
        figures = [number(v, ".3g") for v in (mean, middle, high, most)]
        rows.append([name, f"{len(values)} of {len(series)}", *figures, NOTHING if at is None else str(at)])
    columns = ["way", "tokens", "mean KL", "median", "95th %", "highest", "at token"]
    return table("Distance from dense", columns, {"": rows})


def heat(places: Sequence[str], layers: Sequence[Sequence[Cell]]) -> str:
    """A row per layer, a column per place; what is read less is deeper in colour, and says so."""
    head = "".join(f'<th scope="col">{escape(place)}</th>' for place in ("layer", *places))
    rows = []
    for i, layer in enumerate(layers):
        cells = "".join(
            f'<td class="{shade(c.keep)}"><b>{number(c.keep, ".0%")}</b> <span>{escape(c.text)}</span></td>'
            for c in layer
        )
        rows.append(f'<tr><th scope="row">{i}</th>{cells}{"<td></td>" * (len(places) - len(layer))}</tr>')
    body = "\n".join(rows)
    legend = "".join(f'<li class="{name}">{text}</li>' for name, text in SCALE)
    wide = f"--places: {len(places)}"
    grid = f'<table class="heat" style="{wide}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>'
    return f'<ul class="scale">{legend}</ul>\n{boxed("What every layer reads", grid)}'


def shade(keep: float) -> str:
    if not known(keep):
        return ""
    if round(keep, 2) >= 1:
        return "over" if round(keep, 2) > 1 else "s0"
    return f"s{SHADES - int(SHADES * max(keep, 0))}"


def shades(dark: bool) -> dict[str, str]:
    """Colours of the heat map, all of which the ink can be read on."""
    card, deep = (DARK if dark else LIGHT)["card"], DEEP[dark]
    return {f"s{i}": _between(card, deep, i / SHADES) for i in range(SHADES + 1)} | {"over": OVER[dark]}


def _between(a: str, b: str, share: float) -> str:
    pairs = [(int(a[i : i + 2], 16), int(b[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in pairs)


def of_rows(rows: Sequence[Row]) -> str:
    """Lines of acceptance, a group per mode."""
    groups: dict[str, list[list[str]]] = {}
    for row in rows:
        line = [row.line, PASS if row.passed else FAIL, row.target, row.value]
        groups.setdefault(row.mode, []).append(line)
    return table("Lines of acceptance", ["line", "result", "target", "value"], groups, "lines", 12)
