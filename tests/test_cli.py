"""The front door: help, version, wrong words with the nearest right one, and how every failure ends."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
from commandline import COMMAND, environment, ralo, refused

import ralo as package
from ralo import screen
from ralo.cli import COMMANDS, main
from ralo.errors import RaloError

SHAPE = "random:D=64,L=1,F=64,H=4,V=64"
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")


@pytest.mark.parametrize("args", [(), ("-h",), ("--help",), ("help",)])
def test_help_lists_every_command(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert all(f"  ralo {name} " in out for name in COMMANDS) and err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: ralo {name} [-h]") and "RALO_QUANT=int4 is --quant int4" in out
    words = (import_module(f"ralo.commands.{name}").__doc__ or "?").split()
    assert " ".join(words) in " ".join(out.split())
    assert "--model PACK" in out if name == "heal" else "--model MODEL" in out and "[mini]" in out
    assert "--json" in out or name == "serve"  # which has no last line


def test_help_and_version_as_a_user_runs_them() -> None:
    for args in (("--help",), ("run", "--help")):
        done = ralo(*args)
        assert (done.code, done.err) == (0, "") and "run" in done.out
    assert ralo("--version") == ralo("-V") == (0, f"ralo {package.__version__}\n", "")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ("rum",),
            "ralo: unknown command 'rum'; did you mean run? (commands: run, chat, ppl, bench, pack, explain, ",
        ),
        (("sing",), "ralo: unknown command 'sing' (commands: "),
        (("--verbose",), "ralo: unknown command '--verbose'"),
        (("",), "ralo: unknown command ''"),
        (
            ("run", "--tempature", "1"),
            "unrecognized arguments: --tempature 1; did you mean --temperature? (see ralo run",
        ),
        (("run", "--sed=1"), "unrecognized arguments: --sed=1; did you mean --seed?"),
        (("bench", "--xyz"), "ralo bench: unrecognized arguments: --xyz (see ralo bench --help)"),
        (("run", "--temp", "1"), "unrecognized arguments: --temp 1; did you mean --temperature?"),
        (
            ("run", "-n"),
            "argument -n/--tokens: expected one argument, with = where it starts with a dash, as in --flag=-x (see",
        ),
        (("run", "--stop"), "ralo run: argument --stop: expected one argument, with ="),
        (("explain", "mini"), "ralo explain: unrecognized arguments: mini (see ralo explain --help)"),
    ],
)
def test_wrong_words(args: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(capsys, *args)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RaloError("two\n  lines "), 2, "ralo explain: two lines"),
        (MemoryError(), 2, "ralo explain: not enough memory: use a smaller --quant or a smaller model"),
        (OSError(13, "Permission denied", "/a/file"), 2, "ralo explain: /a/file: Permission denied"),
        (OSError("odd"), 2, "ralo explain: odd"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_failures_end(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> NoReturn:
        raise error

    monkeypatch.setattr("ralo.commands.explain.run", run)
    assert main(["explain"]) == code
    assert capsys.readouterr() == ("", line + "\n")


def test_a_failed_check_is_the_commands_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ralo.commands.explain.run", lambda args: 1)
    assert main(["explain"]) == 1


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("RALO_ISA", "sse9", "RALO_ISA=sse9: unknown level; use one of base, avx2, avx512"),
        ("RALO_THREADS", "abc", "RALO_THREADS must be a whole number from 0 to 1024, got 'abc'"),
        ("RALO_QUANT", "int5", "RALO_QUANT must be one of auto, f32, bf16, int8, int4, got 'int5'; did you mean"),
        ("RALO_MODEL", "nowhere", "nowhere: no such model"),
    ],
)
def test_wrong_words_in_the_environment(
    name: str, value: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    args = () if name == "RALO_MODEL" else ("-m", SHAPE)
    assert line in refused(capsys, "explain", *args)


@pytest.mark.parametrize("args", [("--help",), ("run", "--help"), ("--version",), ("explain", "-m", SHAPE)])
def test_a_reader_that_leaves_is_no_error(args: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()  # before a word was said
        assert (process.stderr.read(), process.wait(timeout=60)) == (b"", 0)


@needs_full
@pytest.mark.parametrize("args", [("--help",), ("explain", "-m", SHAPE), ("explain", "-m", SHAPE, "--json")])
def test_output_to_a_full_disk(args: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *args], stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert done.returncode == 2
    assert done.stderr == f"{' '.join(('ralo', *args[:1])) if len(args) > 1 else 'ralo'}: No space left on device\n"


@pytest.mark.parametrize(
    ("closed", "args", "code", "line"),
    [
        (">&-", f"explain -m {SHAPE}", 0, ""),
        ("2>&-", "rum", 2, ""),
        ("<&-", "run -p -", 2, "ralo run: the prompt is empty: give some text with -p\n"),
        ("<&- >&- 2>&-", "--help", 0, ""),
    ],
)
def test_closed_streams(closed: str, args: str, code: int, line: str) -> None:
    script = f"exec '{sys.executable}' -m ralo {args} {closed}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stderr) == (code, line)


def test_tables_are_never_cut_and_take_text_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "a/[bold]path[/x]/:smile:" + "y" * 120
    screen.table(["model", "tok/s"], [[name, "12345.6"]], "a title longer than any of the columns below it")
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "a title longer than any of the columns below it"
    assert any(name in line and "12345.6" in line for line in lines)


def test_progress_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with screen.progress("working") as bar:
        assert bar is None
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with screen.progress("working") as bar:
        assert bar is not None
        bar(1.0)
    out, err = capsys.readouterr()
    assert out == "" and "working" in err and "100%" in err


@pytest.mark.parametrize(
    ("n", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (999_600, "1 MB"),
        (1234567, "1.23 MB"),
        (5e9, "5 GB"),
        (5e12, "5 TB"),
    ],
)
def test_sizes(n: float, shown: str) -> None:
    assert screen.size(n) == shown


def test_the_installed_command(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("ralo")
    if not script.exists():
        pytest.skip("ralo is not installed beside this Python")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"ralo {package.__version__}\n")
