"""ralo tune: what cannot be done is said in one line, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import refused
from tuning import FLAGS, tune, write_tunable, write_words


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tunable(tmp_path_factory.mktemp("tune") / "model")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("words") / "text.txt")


BAD = {
    "no plan": ((), "-o FILE.toml is missing: the plan to write"),
    "suffix": (("-o", "plan.json"), "-o must name a .toml file, got 'plan.json'"),
    "folder": (("-o", "{tmp}/no/plan.toml"), "/no: no such directory"),
    "short": (("--text", "{short}"), " tokens; tuning needs at least 2048, better 49152"),
    "empty": (("--text", "{empty}"), "the text has 0 tokens; tuning needs at least 2048"),
    "no text": (("--text", "nowhere"), "nowhere: No such file or directory"),
    "no number": (("--ctx", "many"), "--ctx must be auto, or whole numbers with commas, as in 128,8000, got 'many'"),
    "empty item": (("--ctx", "8,,9"), "--ctx must be auto, or whole numbers with commas, as in 128,8000, got '8,,9'"),
    "negative": (("--ctx=-1",), "--ctx must be auto, or whole numbers with commas, as in 128,8000, got '-1'"),
    "far": (("--ctx", "8,500"), "--ctx 500 leaves no room in the model's context of 512"),
    "quant": (("--quant", "f32"), "--quant must be one of auto, int8, int4, got 'f32'"),
    "goal": (("--profile", "fast"), "--profile must be one of latency, throughput, memory, got 'fast'"),
    "budget": (("--max-dppl", "-1"), "--max-dppl must be a number from 0 to 100, got '-1'"),
    "minutes": (("--minutes", "0"), "--minutes must be a number from 0.01 to 10000, got '0'"),
    "over the profile": (
        ("--record", "a.profile"),
        "--record 'a.profile': the profile is written there; choose another name",
    ),
    "record": (("--record", "{empty}"), "empty.txt: is not a record of measurements; choose another --record"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(model: Path, words: Path, tmp_path: Path, name: str, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags, message = BAD[name]
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty.txt").write_text("")
    filled = [f.format(tmp=tmp_path, short=tmp_path / "short.txt", empty=tmp_path / "empty.txt") for f in flags]
    given = [] if name == "no plan" else ["-o", "plan.toml"]
    code = tune("-m", model, "--text", words, "--threads", "1", *given, *filled)
    out, err = capsys.readouterr()
    *warnings, error = err.splitlines()
    assert (code, out) == (2, "") and message in error and error.startswith("ralo tune: "), err
    assert all("give more text" in line for line in warnings)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt", "short.txt"], "nothing was written"


def test_a_record_that_cannot_be_written(model: Path, words: Path, tmp_path: Path, capsys) -> None:
    flags = ("--record", tmp_path / "no" / "record.json", "-o", tmp_path / "plan.toml")
    assert tune("-m", model, "--text", words, *FLAGS, *flags) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_said_before_any_work(model: Path, tmp_path: Path, capsys) -> None:
    said = refused(capsys, "tune", "-m", model, "-o", tmp_path / "p.toml", "--html", tmp_path / "no" / "page.html")
    assert "No such file or directory" in said and not (tmp_path / "p.tune.json").exists()
    assert "must end in .html" in refused(capsys, "tune", "-m", model, "-o", tmp_path / "p.toml", "--html", "page.txt")
