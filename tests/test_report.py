"""The report: every number of it is there as text, in a page that is well formed, complete and needs no other."""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from example_report import BROKEN, NASTY, PLACES, REPORT, SHORT

from ralo import drawing, report
from ralo.drawing import DARK, LIGHT, Words
from ralo.errors import RaloError
from ralo.report import Cell, Report, tables
from ralo.report.charts import buckets
from ralo.report.data import interval, number, size, times
from ralo.report.labels import named, shortened, width
from ralo.report.marks import COLOURS, shape
from ralo.report.scatter import front, scatter

HEADINGS = {
    "summary": "Summary",
    "points": "Speed against quality",
    "budgets": "Speed for a quality budget",
    "layers": "What each layer reads",
    "gap": "Distance from dense over time",
    "rows": "Acceptance",
}
VOID = {"meta"}


class Page(HTMLParser):
    """Elements with their attributes and the text inside them; what is opened must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str], list[str]]] = []
        self.found: list[tuple[str, dict[str, str], str]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append((tag, {k: v or "" for k, v in attrs}, []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {k: v or "" for k, v in attrs}, ""))

    def handle_endtag(self, tag: str) -> None:
        name, attrs, text = self.open.pop()
        assert name == tag, f"{name} is closed by {tag}"
        self.found.append((tag, attrs, " ".join("".join(text).split())))

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str], str]]:
        return [(attrs, text) for name, attrs, text in self.found if name == tag]

    def texts(self, *tags: str) -> list[str]:
        return [text for name, _, text in self.found if name in tags]


def written(path: Path, what: Report) -> str:
    report.write(path / "r.html", what)
    return (path / "r.html").read_text(encoding="utf-8")


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(written(tmp_path, REPORT))


def test_it_is_a_page(page: Page) -> None:
    [(root, _)] = page.all("html")
    assert root == {"lang": "en"}
    assert page.texts("title")[0] == "ralo: shared/models/base" and page.texts("h1") == ["shared/models/base"]
    assert page.texts("h2") == [*list(HEADINGS.values())[:-1], "Memory", "Acceptance"]
    assert all(svg["role"] == "img" and svg["aria-label"] for svg, _ in page.all("svg"))
    assert len(page.all("svg")) == len(page.all("figure")) == len(page.all("figcaption")) == 6
    assert all(th["scope"] in ("col", "row", "rowgroup") for th, _ in page.all("th"))
    assert dict(REPORT.about).items() <= dict(zip(page.texts("dt"), page.texts("dd"), strict=False)).items()


def test_every_figure_is_there_as_text(page: Page) -> None:
    rows = page.texts("tr")
    for p in REPORT.points:
        shown = [p.name, p.kind, times(p.speedup), interval(p.speedup_ci95, ".2f"), number(p.delta_ppl_pct, "+.2f"),
                 interval(p.delta_ppl_ci95, "+.2f"), number(p.kl, ".3g"), number(p.tok_s, ".1f"), size(p.nbytes),
                 size(p.cache_nbytes)]  # fmt: skip
        assert any(row.removesuffix("yes") == "".join(shown) for row in rows), shown
    for budget, p in REPORT.budgets:
        assert any(row.startswith(f"{budget:g} %{p.name}{times(p.speedup)}") for row in rows)
    for layer in REPORT.layers:
        for cell in layer:
            assert f"{cell.keep:.0%} {cell.text}" in page.texts("td")
    for row in REPORT.rows:
        assert f"{row.line}{'PASS' if row.passed else 'FAIL'}{row.target}{row.value}" in rows
    for _, figure, note in REPORT.summary:
        assert figure in page.texts("dd") and note in page.texts("dd")
    series = REPORT.gap["kwta"]
    highest, at = max((v, t) for t, v in series)
    mean = sum(v for _, v in series) / len(series)
    assert any(re.match(rf"kwta500 of 500{mean:.3g}.*{highest:.3g}{at}$", row) for row in rows)


def test_charts_name_what_they_show(page: Page) -> None:
    texts = page.texts("text")
    for p in REPORT.points:
        assert p.name in texts
    assert {"dense", "mode", "plan", "peer", "front", "?", "1x", "kwta", "plan 2 %", "62 MB + 6.29 MB"} <= set(texts)
    assert {times(p.speedup) for _, p in REPORT.budgets} <= set(texts)
    assert "38 of 40 lines hold." in page.texts("p")


@pytest.mark.parametrize("field", HEADINGS)
def test_what_is_empty_has_no_section(tmp_path: Path, field: str) -> None:
    alone = Report("m", {}, **{field: getattr(REPORT, field)}, **({"places": PLACES} if field == "layers" else {}))
    expected = [HEADINGS[field], *(["Memory"] if field == "points" else [])]
    assert Page(written(tmp_path, alone)).texts("h2") == expected
    without = replace(REPORT, **{field: {} if field == "gap" else ()})
    assert HEADINGS[field] not in Page(written(tmp_path, without)).texts("h2")


def test_an_empty_report_is_a_page(tmp_path: Path) -> None:
    page = Page(written(tmp_path, Report("m", {})))
    assert page.texts("h1") == ["m"] and not page.all("section") and not page.all("dl")


def test_words_cannot_become_markup(tmp_path: Path) -> None:
    text = written(tmp_path, BROKEN)
    page = Page(text)
    assert "<script" not in text and "</script" not in text and "<!--" not in text and "\x00" not in text
    assert page.texts("h1")[0].startswith(NASTY) and page.texts("title")[0].startswith(f"ralo: {NASTY}")
    assert NASTY in page.texts("dt") and NASTY in page.texts("dd") and f"? {NASTY}" in page.texts("td")
    assert NASTY in page.texts("th") and any(NASTY in svg["aria-label"] for svg, _ in page.all("svg"))


def test_numbers_that_are_none_break_nothing(tmp_path: Path) -> None:
    text = written(tmp_path, BROKEN)
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        drawn = " ".join(re.findall(r'(?:points|x|y|viewBox)="([^"]*)"', svg))
        assert not re.search(r"nan|inf|e[+-]?\d", drawn), drawn
        assert all(-1 <= float(v) <= 1000 for v in re.split(r"[ ,]+", drawn.strip()))
    assert "nan" not in " ".join(Page(text).texts("td"))
    unknown = replace(SHORT[0], speedup=float("nan"))
    nothing = Report("m", {}, points=[unknown], budgets=[(1.0, unknown)], gap={"a": [(0, float("nan"))]})
    assert not Page(written(tmp_path, nothing)).all("svg")[1:], "memory is known, and nothing else"


def test_one_page_that_asks_for_nothing_else(tmp_path: Path) -> None:
    text = written(tmp_path, REPORT)
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|xmlns", text)
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert len(text) < 100_000


def contrast(a: str, b: str) -> float:
    """As WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((light(a), light(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_light_and_dark(dark: bool) -> None:
    theme = DARK if dark else LIGHT
    for kind in set(theme) - {"paper", "card", "faint"}:
        assert contrast(theme[kind], theme["paper"]) >= 4.5, kind
    assert contrast(theme["soft"], theme["card"]) >= 4.5
    shades = tables.shades(dark)
    assert all(contrast(theme["ink"], colour) >= 4.5 for colour in shades.values()), shades
    assert len(set(shades.values())) == len(shades) == len(tables.SCALE)


@pytest.mark.parametrize(
    ("keep", "name"),
    [(0, "s5"), (0.19, "s5"), (0.2, "s4"), (0.5, "s3"), (0.79, "s2"), (0.8, "s1"), (0.98, "s1"), (1.0, "s0"),
     (1.002, "s0"), (1.2, "over"), (-1, "s5"), (float("nan"), ""), (float("inf"), "")],
)  # fmt: skip
def test_shades(keep: float, name: str) -> None:
    assert tables.shade(keep) == name
    assert f'class="{name}"' in tables.heat(["up"], [[Cell(keep, "x")]])


def test_a_layer_that_says_less_leaves_cells_empty() -> None:
    page = Page(tables.heat(["up", "down"], [[Cell(0.5, "a"), Cell(0.1, "b")], [Cell(0.5, "c")]]))
    assert page.texts("td") == ["50% a", "10% b", "50% c", ""]


def test_the_front_is_what_nothing_beats() -> None:
    chance = random.Random(3)
    for _ in range(50):
        points = [replace(SHORT[0], name=str(i), speedup=chance.randint(1, 6), delta_ppl_pct=chance.randint(0, 5))
                  for i in range(8)]  # fmt: skip
        values = {(p.speedup, p.delta_ppl_pct) for p in points}
        best = {(s, d) for s, d in values if not any((a >= s and b <= d and (a, b) != (s, d)) for a, b in values)}
        assert {(p.speedup, p.delta_ppl_pct) for p in front(points)} == best
    assert front([replace(SHORT[0], delta_ppl_pct=None), replace(SHORT[0], speedup=float("nan"))]) == []


def polygons(svg: str, kind: str) -> list[tuple[float, float]]:
    """Where the marks with a hint of this colour are."""
    found = re.findall(rf'<polygon class="{kind} (?:full|hollow)" points="([^"]*)"><title>', svg)
    corners = [[tuple(map(float, p.split(","))) for p in points.split()] for points in found]
    return [(sum(c[0] for c in cs) / len(cs), sum(c[1] for c in cs) / len(cs)) for cs in corners]


def test_points_lie_where_their_values_are() -> None:
    svg = scatter(SHORT).svg("")
    (x0, one), (x1, fast) = polygons(svg, "ink")
    assert x0 < x1 and fast < one, "further right is worse, further up is faster"
    marks = polygons(svg, "plan")
    deltas = [p.delta_ppl_pct for p in SHORT if p.kind == "plan"]
    (ax, ay), (bx, by), (cx, cy) = marks
    assert (bx - ax) / (cx - ax) == pytest.approx((deltas[1] - deltas[0]) / (deltas[2] - deltas[0]), abs=0.01)
    assert (ay - by) / (ay - cy) == pytest.approx((1.24 - 1.14) / (1.38 - 1.14), abs=0.01)
    [(unknown, _)] = polygons(svg, "peer")
    assert unknown < x0 - 20 and 'class="peer hollow"' in svg, "unknown quality stands at the left, hollow"


def test_kinds_differ_in_shape_and_colour() -> None:
    svg = scatter(SHORT).svg("")
    drawn = {
        kind: re.findall(rf'<polygon class="{kind} [a-z]+" points="([^"]*)"', svg) for kind in set(COLOURS.values())
    }
    corners = {kind: {len(points.split()) for points in found} for kind, found in drawn.items()}
    assert corners == {"ink": {4}, "ralo": {20}, "plan": {4}, "peer": {3}}
    assert shape("dense", 0, 0) != shape("plan", 0, 0) and len({LIGHT[kind] for kind in corners}) == 4


def test_what_is_far_off_stands_at_the_edge_with_its_figure() -> None:
    off = replace(SHORT[2], name="broken", delta_ppl_pct=812.0, delta_ppl_ci95=(700.0, 900.0))
    svg = scatter([*SHORT, off]).svg("")
    assert ">broken +812 %</text>" in svg
    assert max(x for x, _ in polygons(svg, "ralo")) <= 360
    near = sorted(x for x, _ in polygons(svg, "plan"))
    assert near[-1] - near[0] > 60, "the others are still told apart"


@pytest.mark.parametrize("seed", range(20))
def test_names_never_lie_on_each_other(seed: int) -> None:
    chance = random.Random(seed)
    room = (40.0, 10.0, 350.0, 210.0)
    points = [((chance.uniform(50, 340), chance.uniform(20, 200)), f"way number {i}", "ink") for i in range(25)]
    boxes = []
    for mark in named(points, room, []):
        if isinstance(mark, Words):
            left = mark.x - width(mark.text) * {"start": 0, "middle": 0.5, "end": 1}[mark.anchor]
            boxes.append((left, mark.y - 11, left + width(mark.text), mark.y + 4))
    assert len(boxes) > 8
    for i, a in enumerate(boxes):
        assert a[0] >= room[0] and a[1] >= room[1] and a[2] <= room[2] and a[3] <= room[3]
        for b in boxes[:i]:
            assert a[0] >= b[2] - 0.1 or b[0] >= a[2] - 0.1 or a[1] >= b[3] - 0.1 or b[1] >= a[3] - 0.1


def test_long_names_are_shortened() -> None:
    assert shortened("kwta") == "kwta"
    for name in ("w" * 500, "i" * 500, "中" * 500, "a b " * 100):
        assert shortened(name).endswith("…") and width(shortened(name)) <= 170
    assert shortened("wwww", 5) == ""


def test_time_is_told_in_few_points() -> None:
    found = buckets([(t, float(t % 2)) for t in range(10_000)])
    assert len(found) == 40 and all(v == pytest.approx((mean, 0.5, 0.0, 1.0)[1:]) for mean, *v in found)
    assert buckets([(3, 0.25)]) == [(3, 0.25, 0.25, 0.25)] and buckets([]) == []


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.5, 1]),
        (0.94, 2.31, [1, 1.5, 2]),
        (-0.3, 0.31, [-0.2, 0, 0.2]),
        (1000, 1003, [1000, 1001, 1002, 1003]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert drawing.ticks(low, high) == pytest.approx(expected)


def test_what_no_file_can_hold_is_a_space() -> None:
    assert drawing.escape("a\udcff\x00\n\x1bb & é中") == "a    b &amp; é中"


def test_it_appears_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RaloError, match=r"r\.html: cannot be written: No space left on device$"):
        report.write(path, REPORT)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    report.write(path, REPORT)
    assert path.read_text(encoding="utf-8").endswith("</html>\n") and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_told_early(tmp_path: Path) -> None:
    for name in ("r.htm", "r", "r.html.gz", "r.png"):
        with pytest.raises(RaloError, match=r"--html FILE must end in \.html"):
            report.check(tmp_path / name)
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("")
    missing, folder, file = "No such file or directory", "Is a directory", "Not a directory"
    for path, why in (("no/r.html", missing), ("folder.html", folder), ("file/r.html", file)):
        with pytest.raises(RaloError, match=rf"{path}: cannot be written: {why}"):
            report.check(tmp_path / path)
        with pytest.raises(RaloError, match=rf"{path}: cannot be written: {why}"):
            report.write(tmp_path / path, REPORT)
    assert {p.name for p in tmp_path.iterdir()} == {"folder.html", "file"}


def test_asking_early_leaves_no_trace(tmp_path: Path) -> None:
    report.check(tmp_path / "new.html")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.html").write_text("old")
    report.check(tmp_path / "old.html")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]
