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
from ralo.errors import RaloError
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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Small shapes and few tokens instead of those that acceptance is about."""
    values = {
        "accept.attention.OUT_OF_CACHE": 0,
        "accept.event_budget.TOKENS": 40,
        "accept.event_verify.NEW": 20,
        "accept.event_verify.PROMPTS": 2,
        "accept.event_verify.SAMPLED": 1,
        "accept.kernel.SHAPES": ((64, 64),),
        "accept.kwta.LOOK": 512,
        "accept.kwta.TUNE": 512,
        "accept.mlp.OUT_OF_CACHE": 0,
        "accept.proc.TOKENS": 1024,
        "accept.proc_kernel.SHAPES": {"base": ((64, 128),)},
        "accept.proc_kernel.STREAM_WORDS": 4096,
        "accept.statepack.ATTENTION": {512: 4.0},
        "accept.statepack.SHAPES": ((2, 2, 16),),
        "accept.statepack_mlp.SHAPE": (64, 256),
        "accept.tt.TOKENS": 1024,
        "autotune.ROUNDS": 1,
        "bench.STREAM_WORDS": 4096,
    }
    for name, value in values.items():
        monkeypatch.setattr(f"ralo.{name}", value)
    return monkeypatch


def test_rows(model: Path, small: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_rows_of_event(model: Path, small: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_rows_of_proc(model: Path, small: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_rows_of_tt(model: Path, small: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small.setattr("ralo.tt.build.speedup", lambda made, dense: 1.25)  # so that something is factored
    small.setattr("ralo.tt.ranks.STEP", 0)
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


WANTED = {  # beginnings of what the documents ask for, by mode
    "state-pack": ("decode speed-up over dense", "density of the packed layers", "Δppl % on positions",
                   "Δppl % of two bitmaps", "a way of counting bits", "metrics: pack.enabled", "guard: "),
    "kwta": ("k from 0.4 to 0.6, int8: decode speed-up", "k from 0.4 to 0.6, int8: Δppl %", "winners are stabler",
             "autotune: ", "metrics: kwta.keep_ratio", "the guard switches"),
    "event": ("decode speed-up over dense", "quality_gap % there", "p99 of", "a recorded schedule",
              "metrics: event.enabled", "guard: "),
    "proc": ("memory of these weights / bf16", "decode of the pack / dense bf16", "Δppl % on held-out",
             "rebuilt weights are the same", "a watermark sheds", "metrics: proc.fanout_effective", "guard: "),
    "tt": ("attn at int8", "mlp at int8: factored layers", "mlp at int8: Δppl %", "mlp at int8: most that factors miss",
           "metrics: tt.enabled", "guard: "),
    "mix": ("bytes of int4", "decode speed-up over int8", "metrics: mix.enabled", "guard: "),
}  # fmt: skip


def test_all_modes_at_once(model: Path, small: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small.setattr("ralo.tt.build.speedup", lambda made, dense: 1.25)  # so that something is factored
    small.setattr("ralo.tt.ranks.STEP", 0)
    code = main(["accept", "-m", str(model), "--max-dppl", "1", *QUICK, "--json"])
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert set(found) == {"model", "pass", "rows"} and found["model"] == str(model)
    assert all(set(row) == {"mode", "line", "target", "value", "pass"} for row in found["rows"])
    assert found["pass"] is all(row["pass"] for row in found["rows"]) and code == (0 if found["pass"] else 1)
    for mode, starts in WANTED.items():
        lines = [row["line"] for row in found["rows"] if row["mode"] == mode]
        assert len(lines) == len(set(lines)), mode
        for start in starts:
            assert any(line.startswith(start) for line in lines), (mode, start, lines)
    guarded = [
        row for row in found["rows"] if row["line"].startswith(("guard: ", "metrics: ")) or "planted" in row["line"]
    ]
    assert len(guarded) >= 15 and all(row["pass"] for row in guarded), guarded
    assert f"{sum(row['pass'] for row in found['rows'])} of {len(found['rows'])} lines hold" in table[0]


@pytest.mark.parametrize(
    ("kind", "context", "modes"), [("opt", 128, ["state-pack", "event", "tt"]), ("gpt2", 24, ["kwta", "event"])]
)
def test_a_model_that_lacks_much(
    tmp_path: Path,
    kind: str,
    context: int,
    modes: list[str],
    small: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No gate, two layers, a short context: a row says what cannot be measured."""
    name = {"opt": "max_position_embeddings", "gpt2": "n_positions"}[kind]
    model = write_hf(tmp_path / kind, kind, vocab_size=300, **{name: context})
    assert main(["accept", "-m", str(model), "--only", ",".join(modes), *QUICK, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["mode"] for row in rows} == set(modes)
    lacking = {row["line"]: row for row in rows if row["target"] == "measured"}
    assert not any(row["pass"] for row in lacking.values())
    assert lacking["a budget of time"]["value"] == f"needs 768 tokens of context, this model has {context}"
    assert not any(row["line"] == "all of its lines" for row in rows), rows


def test_all_hold(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCEPT, "kwta", lambda task, opened, say: [Row("kwta", "a line", "holds", "yes", True)])
    assert main(["accept", "-m", str(tiny), "--only", "kwta", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pass"] is True


def test_a_mode_that_gives_up_leaves_the_others(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gives_up(task: object, opened: object, say: object) -> list[Row]:
        raise RaloError("this model has no such thing")

    monkeypatch.setitem(ACCEPT, "kwta", gives_up)
    monkeypatch.setitem(ACCEPT, "mix", lambda task, opened, say: [Row("mix", "a line", "holds", "yes", True)])
    assert main(["accept", "-m", str(tiny), "--only", "kwta,mix", "--json"]) == 1
    one, other = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (one["line"], one["value"], one["pass"]) == ("all of its lines", "this model has no such thing", False)
    assert other["pass"] is True


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


def test_markdown(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("kwta", "a | line", "≥ 2", "1.5", False), Row("kwta", "another", "holds", "yes", True)]
    monkeypatch.setitem(ACCEPT, "kwta", lambda task, opened, say: rows)
    table = tmp_path / "found.md"
    assert main(["accept", "-m", str(tiny), "--only", "kwta", "--md", str(table)]) == 1
    head, rule, first, second = table.read_text(encoding="utf-8").splitlines()
    assert head.count("|") == rule.count("|") == second.count("|") == 6
    assert first == r"| kwta | a \| line | ≥ 2 | 1.5 | **no** |" and second.endswith("| yes |")


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--html", "found.txt", "--html FILE must end in .html"),
        ("--html", "no/found.html", "cannot be written: No such file or directory"),
        ("--md", "found.txt", "--md FILE must end in .md"),
        ("--md", "no/found.md", "cannot be written: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_any_work(tmp_path: Path, flag, name, message, capsys) -> None:
    assert message in refused(capsys, "accept", "-m", tmp_path / "no model", flag, tmp_path / name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--only", "kwtaa"),
            "--only must be of state-pack, kwta, event, proc, tt, mix, got 'kwtaa'; did you mean kwta?",
        ),
        (("--model", "/no/such/model"), "/no/such/model"),
        (("--quant", "int5"), "--quant must be of f32, bf16, int8, int4, with commas, got 'int5'"),
    ],
)
def test_bad_input(tiny: Path, flags: tuple[str, ...], message: str, capsys) -> None:
    assert message in refused(capsys, "accept", "-m", tiny, *flags)
