"""The report in a real browser: nothing is cut off, nothing lies on anything else, on a phone and on a wide screen."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from browsers import browser
from example_report import BROKEN, CLOSE, CROWDED, REPORT

from ralo import report
from ralo.drawing import DARK, LIGHT
from ralo.report import Report
from ralo.report.data import interval, number, times

DARKLY = "--blink-settings=preferredColorScheme=0"
PHONE, WIDE = 390, 1200  # CSS pixels
# A frame is as wide as it is told to be; a window has a least width of its own.
FRAME = """<!doctype html><meta charset="utf-8">
<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{page}"></iframe>
<pre id="measured"></pre>
<script>{script}</script>"""
SCRIPT = """
addEventListener("load", () => {
  const view = document.querySelector("iframe").contentWindow, page = view.document, root = page.documentElement
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] }
  const meet = (a, b) => a[0] < b[2] - 1 && b[0] < a[2] - 1 && a[1] < b[3] - 2 && b[1] < a[3] - 2
  const all = (name, under = page) => [...under.querySelectorAll(name)]
  const outside = [], overlapping = [], sizes = [], wide = []
  for (const svg of all("svg")) {
    const [left, top, right, bottom] = box(svg), texts = all("text", svg).filter(t => t.textContent)
    for (const t of texts) {
      const b = box(t)
      if (b[0] < left - 1 || b[1] < top - 1 || b[2] > right + 1 || b[3] > bottom + 1) outside.push(t.textContent)
      sizes.push(parseFloat(view.getComputedStyle(t).fontSize) * svg.getScreenCTM().a)
    }
    texts.forEach((t, i) => texts.slice(0, i).forEach(
      o => meet(box(t), box(o)) && overlapping.push([o.textContent, t.textContent])))
  }
  for (const e of all("body *:not(svg *)")) {
    if ([...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
      sizes.push(parseFloat(view.getComputedStyle(e).fontSize))
    if (!e.parentElement.closest(".wide") && box(e)[2] > root.clientWidth + 1) wide.push(e.outerHTML.slice(0, 80))
  }
  const style = view.getComputedStyle(page.body)
  document.querySelector("#measured").textContent = JSON.stringify({
    width: view.innerWidth, scroll: root.scrollWidth, client: root.clientWidth, outside, overlapping, wide,
    svgs: all("svg").map(box), smallest: Math.min(...sizes), text: page.body.innerText,
    paper: style.backgroundColor, ink: style.color, fill: view.getComputedStyle(all("text.ralo")[0] ?? page.body).fill,
    cell: view.getComputedStyle(all("td.s4")[0] ?? page.body).backgroundColor,
    scrolling: all(".wide").filter(e => e.scrollWidth > e.clientWidth).length,
  })
})
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the browser finds of a report in a frame of this width; each is looked at once."""
    known: dict[Any, dict[str, Any]] = {}

    def look(what: Report = REPORT, width: int = PHONE, *flags: str) -> dict[str, Any]:
        key = (id(what), width, flags)
        if key not in known:
            known[key] = measure(tmp_path_factory.mktemp("browser"), what, width, flags)
        return known[key]

    return look


def measure(folder: Path, what: Report, width: int, flags: tuple[str, ...]) -> dict[str, Any]:
    report.write(folder / "report.html", what)
    page = html.escape((folder / "report.html").read_text(encoding="utf-8"))
    (folder / "frame.html").write_text(FRAME.format(width=width, page=page, script=SCRIPT), encoding="utf-8")
    (folder / "user").mkdir()
    alone = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    alone += ["--disable-background-networking", f"--user-data-dir={folder / 'user'}"]
    shown = ["--window-size=1400,1000", "--hide-scrollbars", *flags]  # on a phone they take no room
    command = [browser(), *alone, *shown, "--dump-dom", (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, "HOME": str(folder)})
    found = re.search(r'<pre id="measured">(.+?)</pre>', done.stdout.decode(), re.S)
    assert found, done.stderr.decode()[-2000:]
    values: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert values["width"] == width
    return values


def rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))


@pytest.mark.parametrize("width", [PHONE, WIDE])
@pytest.mark.parametrize("what", [REPORT, BROKEN, CLOSE, CROWDED], ids=["report", "broken", "close", "crowded"])
def test_nothing_is_cut_off_or_on_top_of_another(measured: Any, what: Report, width: int) -> None:
    found = measured(what, width)
    assert found["scroll"] <= found["client"] and found["wide"] == []
    assert found["outside"] == [] and found["overlapping"] == []
    assert found["smallest"] >= 11.5, "CSS pixels of the smallest letters"


def test_charts_are_drawn(measured: Any) -> None:
    for width in (PHONE, WIDE):
        boxes = measured(REPORT, width)["svgs"]
        assert len(boxes) == 6
        assert all(right - left > 300 and bottom - top > 150 for left, top, right, bottom in boxes)
    (a, top, *_), (b, beside, *_) = measured(REPORT, WIDE)["svgs"][:2]
    assert a < b and top == beside, "two contexts stand beside each other where there is room"


def test_tables_fit_a_wide_screen_and_scroll_alone_on_a_phone(measured: Any) -> None:
    assert measured(REPORT, WIDE)["scrolling"] == 0
    assert measured(REPORT, PHONE)["scrolling"] >= 1


def test_light_and_dark(measured: Any) -> None:
    light, dark = measured(), measured(REPORT, PHONE, DARKLY)
    assert (light["paper"], light["ink"], light["fill"]) == tuple(
        map(rgb, (LIGHT["paper"], LIGHT["ink"], LIGHT["ralo"]))
    )
    assert (dark["paper"], dark["ink"], dark["fill"]) == tuple(map(rgb, (DARK["paper"], DARK["ink"], DARK["ralo"])))
    assert light["cell"] != dark["cell"] != dark["paper"]


def test_figures_can_be_read(measured: Any) -> None:
    text = measured()["text"]
    for p in REPORT.points:
        figures = (p.name, times(p.speedup), interval(p.speedup_ci95, ".2f"), number(p.delta_ppl_pct, "+.2f"))
        assert all(figure in text for figure in figures), figures
    assert all(f"{cell.keep:.0%}" in text for layer in REPORT.layers for cell in layer)
    assert text.count("PASS") == 38 and text.count("FAIL") == 2 + 1, "the summary says it once more"


def test_a_page_of_acceptance_alone(tmp_path: Path) -> None:
    alone = Report("m", {"command": "ralo accept " + "x" * 400}, rows=REPORT.rows)
    found = measure(tmp_path, alone, PHONE, ())
    assert found["scroll"] <= found["client"] and found["svgs"] == [] and found["scrolling"] == 0
    assert all(row.line in found["text"] for row in REPORT.rows)
