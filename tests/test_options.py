"""Flags declared once: what the parser, the environment and --help make of a declaration."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

import pytest

from ralo.commands.bench import BenchOptions
from ralo.commands.chat import ChatOptions
from ralo.commands.pack import PackOptions
from ralo.commands.ppl import PplOptions
from ralo.commands.run import RunOptions
from ralo.errors import RaloError
from ralo.lm import LoadOptions
from ralo.options import Parser, add_flags, flag, read_flags
from ralo.sampling import Sampling

RECORDS = (BenchOptions, ChatOptions, LoadOptions, PackOptions, PplOptions, RunOptions, Sampling)


@dataclass(frozen=True)
class Trial:
    keep: float = flag(0.4, "share kept; 100 % = all", low=0, high=1, short="-k")
    deep_count: int = flag(2, "how many", low=1, high=9)
    any_int: int = flag(0, "no limits")
    shape: str = flag("round", "form", choices=("round", "square"))
    name: str = flag("", "free text", metavar="NAME")
    way: str = flag("old", "how", choices=("old", "new"), bare="new")
    seen: int = 5  # not a flag


def read(*args: str) -> Trial:
    parser = Parser(prog="trial")
    add_flags(parser, Trial)
    return read_flags(Trial, parser.parse_args(args))


def test_defaults_environment_flags_in_rising_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read() == Trial()
    monkeypatch.setenv("RALO_DEEP_COUNT", "7")
    monkeypatch.setenv("RALO_SHAPE", "")  # set to nothing is not set
    monkeypatch.setenv("RALO_SEEN", "6")
    assert read() == Trial(deep_count=7)
    assert read("--deep-count", "3", "-k", "1", "--name", "") == Trial(deep_count=3, keep=1.0, name="")
    assert type(read("-k", "1").keep) is float and type(read("--deep-count=3").deep_count) is int


def test_a_flag_that_may_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("--way").way == "new" and read("--way", "-k", "1") == Trial(way="new", keep=1.0)
    assert read("--way=old").way == read().way == "old"
    monkeypatch.setenv("RALO_WAY", "new")
    assert read("--way", "old").way == "old"
    with pytest.raises(RaloError, match="--way must be one of old, new, got 'bold'; did you mean old"):
        read("--way=bold")


def test_an_argument_may_look_like_a_flag() -> None:
    assert read("--name", "-5").name == "-5"
    assert read("--name", "- a list").name == "- a list"
    assert read("--name=--shape").name == "--shape"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-k", "1.1"), "--keep must be a number from 0 to 1, got '1.1'"),
        (("-k", "nan"), "--keep must be a number from 0 to 1, got 'nan'"),
        (("-k", ""), "--keep must be a number from 0 to 1, got ''"),
        (("--keep=-inf",), "--keep must be a number from 0 to 1, got '-inf'"),
        (("--deep-count", "0"), "--deep-count must be a whole number from 1 to 9, got '0'"),
        (("--deep-count", "2.0"), "--deep-count must be a whole number from 1 to 9, got '2.0'"),
        (("--any-int", "x"), "--any-int must be a whole number, got 'x'"),
        (("--shape", "sqare"), "--shape must be one of round, square, got 'sqare'; did you mean square?"),
        (("--shape", "zz"), "--shape must be one of round, square, got 'zz'"),
    ],
)
def test_wrong_values(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(RaloError) as caught:
        read(*args)
    assert str(caught.value) == message


def test_a_wrong_value_is_shown_only_in_part() -> None:
    with pytest.raises(RaloError) as caught:
        read("--shape", "x" * 5000)
    assert len(str(caught.value)) < 200


def test_a_wrong_value_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALO_DEEP_COUNT", "many")
    with pytest.raises(RaloError, match=r"^RALO_DEEP_COUNT must be a whole number from 1 to 9, got 'many'$"):
        read()
    assert read("--deep-count", "4").deep_count == 4


def test_help_shows_choices_defaults_and_percent_signs() -> None:
    parser = Parser(prog="trial")
    add_flags(parser, Trial)
    text = " ".join(parser.format_help().split())
    assert "-k KEEP, --keep KEEP share kept; 100 % = all [0.4]" in text
    assert "--shape {round,square} form [round]" in text
    assert "--name NAME free text --way" in text and "seen" not in text


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("--deepcount", "3"), "; did you mean --deep-count?"),
        (("--dep-count=3",), "; did you mean --deep-count?"),
        (("--sha", "round"), "; did you mean --shape?"),
        (("--zzz",), None),
        (("word",), None),
        (("--shape",), None),
    ],
)
def test_the_nearest_flag_is_named(args: tuple[str, ...], hint: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="trial", allow_abbrev=False)
    add_flags(parser, Trial)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(args)
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.count("\n") == 1
    assert (hint or "(see trial --help)") in err and ("did you mean" in err) == (hint is not None)


@pytest.mark.parametrize("record", RECORDS)
def test_every_default_passes_its_own_check(record: type[object]) -> None:
    fields = [f for f in dataclasses.fields(record) if "help" in f.metadata]  # type: ignore[arg-type]
    assert fields
    args = {f.name: str(f.default) for f in fields if f.default != ""}
    assert read_flags(record, argparse.Namespace(**args)) == record()
