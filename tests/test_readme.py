"""The README tells the truth: its commands run as they stand, and both languages have the same ones."""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest
from commandline import ralo

from ralo.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
README, SPANISH = ROOT / "README.md", ROOT / "README.es.md"
SHARED = ROOT.parent / "shared"


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)


def commands(path: Path) -> list[str]:
    return [line for block in blocks(path, "sh") for line in block.splitlines() if line.startswith("ralo ")]


def mentioned(path: Path) -> list[str]:
    """Every `ralo ...` inside the text and its tables."""
    return re.findall(r"`(ralo [^`\n]*)`", path.read_text(encoding="utf-8"))


def test_there_are_commands_to_run() -> None:
    assert len(commands(README)) >= 3


@pytest.mark.parametrize("command", commands(README))
def test_command_runs(command: str, tmp_path: Path) -> None:
    args = shlex.split(command, comments=True)[1:]
    if "shared" in command and not SHARED.is_dir():
        pytest.skip(f"needs {SHARED}")
    if "--peer" in args and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("needs llama-cpp-python")
    here = ROOT if "shared" in command else tmp_path
    done = ralo(*args, cwd=here)
    assert done.code == 0, done.err
    assert done.out


@pytest.mark.parametrize("language", ["sh", "python"])
def test_both_languages_have_the_same_blocks(language: str) -> None:
    assert blocks(README, language) == blocks(SPANISH, language) != []


def test_both_languages_mention_the_same_commands() -> None:
    found, spanish = (sorted({" ".join(text.split()[:2]) for text in mentioned(path)}) for path in (README, SPANISH))
    assert found == spanish
    assert {text.split()[1] for text in found} >= set(COMMANDS)


@pytest.mark.parametrize("path", [README, SPANISH, ROOT / "docs/deploy.md"], ids=lambda path: path.name)
def test_every_flag_that_is_mentioned_exists(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (*mentioned(path), *commands(path)):
        words = text.replace("[", " ").replace("]", " ").split()
        name, flags = words[1], {word for word in words if word.startswith("--")}
        if name in COMMANDS and flags:
            main([name, "--help"])
            assert not flags - set(re.findall(r"--[a-z-]+", capsys.readouterr().out)), text


@pytest.mark.parametrize("path", [README, SPANISH], ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    inside = [link for link in links if "://" not in link]
    assert inside and [link for link in inside if not (ROOT / link).exists()] == []


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = blocks(README, "python")
    monkeypatch.chdir(tmp_path)
    text = "It was the best of times, it was the worst of times.\n"
    Path("book.txt").write_text(text * 5)
    printed: list[str] = []
    exec(example, {"print": lambda *values, **_: printed.extend(map(str, values)), "open": open_text})
    assert len("".join(printed[:-1])) > 100 and float(printed[-1]) > 1


def open_text(path: str) -> io.StringIO:
    """open() whose file needs no closing: the example leaves that to the end of the program."""
    return io.StringIO(Path(path).read_text())
