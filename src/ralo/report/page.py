"""The report as a page: a section for everything that was found, in light and dark, from phones to wide screens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ralo import drawing
from ralo.drawing import Drawing, escape
from ralo.errors import RaloError
from ralo.report import tables
from ralo.report.charts import memory, over_budget, over_time
from ralo.report.data import Point, Report, known, number, times, tokens
from ralo.report.scatter import front, scatter
from ralo.report.style import STYLE

Sections = Iterator[tuple[str, str]]  # a title and what stands below, or nothing


def check(path: Path) -> None:
    """Says early, in one line, that the file cannot be written."""
    if path.suffix != ".html":
        raise RaloError(f"--html FILE must end in .html, got {str(path)!r:.60}")
    try:
        drawing.writable(path)
        drawing.writable(_partial(path))
    except OSError as error:
        raise RaloError(f"{path}: cannot be written: {error.strerror or error}") from error


def write(path: Path, report: Report) -> None:
    """It appears under its name only when it is complete."""
    partial = _partial(path)
    try:
        partial.write_text(_page(report), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise RaloError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # after success it is gone
            partial.unlink()


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _page(report: Report) -> str:
    sections = (_summary, _points, _budgets, _layers, _gap, _memory, _rows)
    found = [_section(title, body) for make in sections for title, body in make(report)]
    about = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>\n" for k, v in report.about.items())
    head = f'<p class="brand">ralo report</p>\n<h1>{escape(report.title)}</h1>'
    head += f'\n<dl class="about">\n{about}</dl>' if about else ""
    body = "\n".join(["<header>", head, "</header>", "<main>", *found, "</main>"])
    return drawing.page(f"ralo: {report.title}", body, STYLE)


def _summary(report: Report) -> Sections:
    if report.summary:
        cards = [
            f'<div><dt>{escape(label)}</dt><dd class="big">{escape(figure)}</dd><dd>{escape(note)}</dd></div>'
            for label, figure, note in report.summary
        ]
        yield "Summary", '<dl class="cards">\n' + "\n".join(cards) + "\n</dl>"


def _points(report: Report) -> Sections:
    if not report.points:
        return
    figures, best = [], list[Point]()
    for ctx, points in _by_context(report.points):
        best += front(points)
        if any(known(p.speedup) for p in points):
            said = ", ".join(f"{p.name} {times(p.speedup)}" for p in points)
            figures.append(_figure(scatter(points), tokens(ctx), f"Speed against quality at {tokens(ctx)}: {said}"))
    note = (
        "Speed-up is over dense int8 in the same run, Δppl the rise of perplexity on held-out text; thin lines are "
        "95 % intervals. The front: no other way is both faster and better. A hollow mark at “?” is a way whose "
        "quality is not known. A name with a figure lies beyond the edge; one that found no room is in the table."
    )
    yield "Speed against quality", _parts(_figures(figures), _note(note), tables.of_points(report.points, best))


def _budgets(report: Report) -> Sections:
    if not report.budgets:
        return
    figures = []
    if any(known(budget) and known(p.speedup) for budget, p in report.budgets):
        said = ", ".join(f"{number(budget, 'g')} % {times(p.speedup)}" for budget, p in report.budgets)
        caption = "Speed-up of the plan found within each budget"
        figures.append(_figure(over_budget(report.budgets), caption, f"Speed-up over quality budget: {said}"))
    yield "Speed for a quality budget", _figures([*figures, tables.of_budgets(report.budgets)], "beside")


def _layers(report: Report) -> Sections:
    if report.layers:
        note = "Bytes read at each place, of what dense int8 reads there, and what runs."
        yield "What each layer reads", _parts(_note(note), tables.heat(report.places, report.layers))


def _gap(report: Report) -> Sections:
    if not report.gap:
        return
    figures = []
    if any(known(value) for series in report.gap.values() for _, value in series):
        caption = "Lines: means over some tokens. Areas: the middle half of them"
        label = f"KL from dense over the tokens of a text: {', '.join(report.gap)}"
        figures.append(_figure(over_time(report.gap), caption, label))
    yield "Distance from dense over time", _figures([*figures, tables.of_gap(report.gap)], "beside")


def _memory(report: Report) -> Sections:
    points = [p for p in report.points if p.nbytes is not None]
    if points:
        figures = [
            _figure(memory(found), tokens(ctx), f"Memory at {tokens(ctx)}: {', '.join(p.name for p in found)}")
            for ctx, found in _by_context(points)
        ]
        yield "Memory", _figures(figures)


def _rows(report: Report) -> Sections:
    if report.rows:
        hold = sum(row.passed for row in report.rows)
        note = f"{hold} of {len(report.rows)} lines hold."
        yield "Acceptance", _parts(_note(note), tables.of_rows(report.rows))


def _by_context(points: Sequence[Point]) -> list[tuple[int, list[Point]]]:
    return [(ctx, [p for p in points if p.ctx == ctx]) for ctx in sorted({p.ctx for p in points})]


def _parts(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>"


def _figure(drawn: Drawing, caption: str, label: str) -> str:
    return f"<figure>\n<figcaption>{escape(caption)}</figcaption>\n{drawn.svg(label)}\n</figure>"


def _figures(figures: Sequence[str], look: str = "") -> str:
    return f'<div class="figures {look}">\n' + "\n".join(figures) + "\n</div>" if figures else ""
