"""ralo accept: a row per line, exit 1 where one fails, JSON that says the same."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from commandline import refused
from tiny import write_hf

from ralo import __version__
from ralo.accept import ACCEPT, Row
from ralo.cli import main
from ralo.modes import MODES

QUICK = ("--tokens", "64", "--rounds", "1", "--ctx", "4")


def test_every_mode_has_its_lines() -> None:
    assert set(ACCEPT) == set(MODES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_hf(tmp_path_factory.mktemp("accept") / "tiny", "llama", vocab_size=300, eos_token_id=None,
                     max_position_embeddings=1024, hidden_size=128)  # fmt: skip
    (model / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return model


def test_rows(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["accept", "-m", str(model), "--only", "kwta", "--speedup", "99", *QUICK, "--json"])
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    rows = {row["line"]: row for row in found["rows"]}
    assert all(set(row) == {"mode", "line", "target", "value", "pass"} for row in found["rows"])
    assert code == 1 and found["pass"] is False, "a speed-up of 99 was asked for"
    assert not rows["decode speed-up over dense, int8, context 4"]["pass"]
    for line in (
        "every channel wins: dense bit for bit",
        "fewer win: not dense",
        "bytes skipped are bytes not read",
        "a planted NaN is caught, counted, and the text goes on",
    ):
        assert rows[line]["pass"], rows[line]
    assert "PASS" in out and "FAIL" in out


def test_rows_of_event(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["accept", "-m", str(model), "--only", "event", *QUICK, "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["line"]: row for row in found["rows"]}
    assert {row["mode"] for row in found["rows"]} == {"event"} and code == (0 if found["pass"] else 1)
    for line in (
        "a recorded schedule gives the same tokens again",
        "… and the same sampled text by seed",
        "then dense bit for bit",
        "everything sent, nothing held: dense bit for bit",
        "bytes skipped are bytes not read",
    ):
        assert rows[line]["pass"] is True, rows[line]


def test_rows_of_proc(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["accept", "-m", str(model), "--only", "proc", *QUICK, "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["line"]: row for row in found["rows"]}
    assert {row["mode"] for row in found["rows"]} == {"proc"} and code == (0 if found["pass"] else 1)
    for line in (
        "memory of these weights / bf16",
        "interrupted and resumed: the same bytes",
        "off: dense bit for bit",
        "on: not dense",
        "rebuilt weights are the same at every ISA level and number of threads",
        "a damaged pack is refused",
        "a pack of a newer ralo is refused",
    ):
        assert rows[line]["pass"] is True, rows[line]
    assert "decode of the pack / dense int4, context 4" in rows


def test_rows_of_tt(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ralo.tt.build.speedup", lambda made, dense: 1.25)  # so that something is factored
    monkeypatch.setattr("ralo.tt.ranks.STEP", 0)
    code = main(["accept", "-m", str(model), "--only", "tt", "--max-dppl", "1", *QUICK, "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["line"]: row for row in found["rows"]}
    assert {row["mode"] for row in found["rows"]} == {"tt"} and code == (0 if found["pass"] else 1)
    for line in (
        "off: dense bit for bit",
        "on: not dense",
        "a planted Inf falls back to dense and is counted",
        "the document's rank 4, maxvol_k 8, gap 0.02: every place refused, the model runs dense",
        "the same settings on a matrix of TT rank 4: error",
        "TT-cross beside TT-SVD on a noisy one: apart by",
        "contraction at every ISA level beside numpy: error",
    ):
        assert rows[line]["pass"] is True, rows[line]
    assert {"mlp at int8: factored layers / the same dense", "mlp at int8: Δppl % on held-out text"} < set(rows)


def test_page(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("kwta", "a <line>", "≥ 2", "1.5", False), Row("kwta", "another", "holds", "yes", True)]
    monkeypatch.setitem(ACCEPT, "kwta", lambda task, opened, say: rows)
    page = tmp_path / "found.html"
    assert main(["accept", "-m", str(tiny), "--only", "kwta", "--html", str(page)]) == 1
    assert "1 of 2 lines hold" in capsys.readouterr().out
    text = html.unescape(re.sub(r"<[^>]*>", "\n", page.read_text(encoding="utf-8")))
    lines = [line for line in text.splitlines() if line]
    assert {"a <line>", "FAIL", "another", "PASS", "1 of 2", "1 FAIL", str(tiny), __version__} < set(lines)
    assert f"ralo accept -m {tiny} --only kwta --html {page}" in lines


@pytest.mark.parametrize(
    ("name", "message"),
    [("found.txt", "--html FILE must end in .html"), ("no/found.html", "cannot be written: No such file or directory")],
)
def test_a_page_that_cannot_be_written_is_told_before_any_work(tmp_path: Path, name: str, message: str, capsys) -> None:
    assert message in refused(capsys, "accept", "-m", tmp_path / "no model", "--html", tmp_path / name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--only", "kwtaa"), "--only must be of state-pack, kwta, event, proc, tt, got 'kwtaa'; did you mean kwta?"),
        (("--quant", "int5"), "--quant must be of f32, bf16, int8, int4, with commas, got 'int5'"),
    ],
)
def test_bad_input(tiny: Path, flags: tuple[str, ...], message: str, capsys) -> None:
    assert message in refused(capsys, "accept", "-m", tiny, *flags)
