"""Plots: every number of the rows is there as text, at the place that its value has, in a page that needs no other."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ralo import drawing, plot
from ralo.errors import RaloError


def row(phase: str, ctx: int, quant: str, tok_s: float, peer: float = 0) -> dict[str, Any]:
    out = {"phase": phase, "ctx": ctx, "quant": quant, "kv": "f16", "threads": 2, "isa": "avx2", "tok_s": tok_s}
    out |= {"tokens": 77, "tok_s_range": [tok_s * 0.9, tok_s * 1.1], "bandwidth_share": 0.42, "stream_gb_s": 20.0}
    if peer:
        out |= {"peer": "llama.cpp", "peer_quant": "Q8_0", "peer_tok_s": peer, "peer_tok_s_range": [peer, peer]}
        out |= {"vs_peer": tok_s / peer, "vs_peer_ci95": [1.25, 3.75]}
    return out


BOTH = [row("decode", 0, "int8", 200, 100), row("decode", 512, "int8", 100, 50), row("prefill", 0, "int8", 999, 333)]
ALONE = [row("decode", 0, "int8", 200), row("decode", 0, "int4", 300)]


def drawn(path: Path, rows: list[dict[str, Any]], model: str = "a/model") -> tuple[str, ElementTree.Element]:
    plot.write(path / "p.html", model, rows)
    page = (path / "p.html").read_text(encoding="utf-8")
    return page, ElementTree.fromstring(re.findall(r"<svg.*</svg>", page, re.S)[0])


def test_the_numbers_are_there_as_text(tmp_path: Path) -> None:
    _, svg = drawn(tmp_path, BOTH)
    texts = {t.text for t in svg.iter("text")}
    assert texts >= {"ralo 200.0", "llama.cpp Q8_0 100.0", "2.00x (1.25 … 3.75)", "3.00x (1.25 … 3.75)"}
    assert texts >= {
        "decode, tokens per second",
        "prefill, tokens per second",
        "42% of 20.0 GB/s",
        "ralo int8",
        "int8, 77 tokens",
    }
    assert texts >= {"threads: 2, avx2, f16 cache", "0", "512", "decode over context, tokens per second"}


def test_lengths_are_the_values(tmp_path: Path) -> None:
    _, svg = drawn(tmp_path, BOTH)
    strokes = [(p.get("class"), float(p.get("stroke-width") or 0), ends(p)) for p in svg.iter("polyline")]
    ours, theirs = (
        [b[0] - a[0] for c, w, (a, b) in strokes if (c, w) == (kind, drawing.BAR)] for kind in ("ralo", "peer")
    )
    assert ours[0] == pytest.approx(2 * theirs[0], abs=0.2) == pytest.approx(2 * ours[1], abs=0.2)
    spread = next(b[0] - a[0] for c, w, (a, b) in strokes if (c, w) == ("ink", 1.5))
    assert spread == pytest.approx(0.2 * ours[0], abs=0.2)
    (left, high), (right, low) = next(e for c, w, e in strokes if (c, w) == ("ralo", 2.5))
    assert left < right and high < low  # slower further to the right: y grows downwards


def ends(line: ElementTree.Element) -> tuple[tuple[float, float], tuple[float, float]]:
    points = [tuple(map(float, p.split(","))) for p in (line.get("points") or "").split()]
    return points[0][:2], points[-1][:2]  # type: ignore[return-value]


def test_everything_lies_on_the_paper(tmp_path: Path) -> None:
    _, svg = drawn(tmp_path, [*BOTH, row("decode", 512, "int4", 49, 48)])
    width, height = map(float, (svg.get("viewBox") or "").split()[2:])
    for text in svg.iter("text"):
        room = 6 * len(text.text or "")  # of a common font
        x = float(text.get("x") or 0) - {"start": 0, "middle": room / 2, "end": room}[text.get("text-anchor") or ""]
        assert x >= 0 and x + room <= width and 0 < float(text.get("y") or 0) < height, text.text
    for line in svg.iter("polyline"):
        assert all(0 <= x <= width and 0 <= y <= height for x, y in ends(line))


def test_one_page_that_asks_for_nothing_else(tmp_path: Path) -> None:
    page, _ = drawn(tmp_path, BOTH, "a<b>&\"c'")
    assert "<b>" not in page and "a&lt;b&gt;&amp;" in page
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", page)


def test_without_a_peer_and_at_one_context(tmp_path: Path) -> None:
    page, _ = drawn(tmp_path, ALONE)
    assert "llama.cpp" not in page and 'class="peer"' not in page and "over context" not in page


@pytest.mark.parametrize(("top", "step"), [(1, 0.5), (3, 1), (5, 2), (754, 200), (1000, 500)])
def test_grid_lines_have_round_numbers(top: float, step: float) -> None:
    assert drawing.step(top) == pytest.approx(step)


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="PNG is drawn by matplotlib")
    plot.check(tmp_path / "p.png")
    plot.write(tmp_path / "p.png", "a $ model $", BOTH)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_told_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RaloError, match=r"needs matplotlib: pip install 'ralo\[plot\]'"):
        plot.check(tmp_path / "p.png")
    for name in ("p.svg", "p", "p.html.gz"):
        with pytest.raises(RaloError, match=r"must end in \.html or \.png"):
            plot.check(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        plot.check(tmp_path / "no" / "p.html")
    (tmp_path / "directory.html").mkdir()
    with pytest.raises(IsADirectoryError):
        plot.check(tmp_path / "directory.html")


def test_asking_early_leaves_no_trace(tmp_path: Path) -> None:
    plot.check(tmp_path / "new.html")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.html").write_text("old")
    plot.check(tmp_path / "old.html")
    assert (tmp_path / "old.html").read_text() == "old"
