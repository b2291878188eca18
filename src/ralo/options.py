"""Flags are declared once, as dataclass fields: parser, environment and --help all read the same declaration."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar, get_type_hints

from ralo.errors import RaloError

T = TypeVar("T")


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    short: str | None = None,
    metavar: str | None = None,
    name: str | None = None,
    bare: str | None = None,
) -> Any:
    """A dataclass field that is also a flag `--name`, an environment variable `RALO_NAME`, and a line of help."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "short": short, "metavar": metavar}
    metadata |= {"name": name, "bare": bare}  # bare: what the flag means when it is given without a value
    return dataclasses.field(default=default, metadata=metadata)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest flag where one was misspelt."""

    def error(self, message: str) -> NoReturn:
        known = [s[2:] for a in self._actions for s in a.option_strings if s.startswith("--")]
        words = [word[2:].split("=")[0].rstrip(":") for word in message.split() if word.startswith("--")]
        if words and words[0] not in known:
            near = [s for s in known if s.startswith(words[0])] or difflib.get_close_matches(words[0], known, 1)
            message += f"; did you mean --{near[0]}?" if near else ""
        if message.endswith("expected one argument"):
            message += ", with = where it starts with a dash, as in --flag=-x"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_flags(parser: argparse._ActionsContainer, *records: type[Any], prefix: str = "") -> None:
    for record in records:
        for field in fields(record):
            m = field.metadata
            names = [m["short"]] if m["short"] else []
            shown = "" if field.default in (None, "") else f" [{field.default}]"
            choices = "{" + ",".join(m["choices"]) + "}" if m["choices"] else None
            parser.add_argument(
                *names,
                "--" + flag_name(field, prefix),
                default=None,
                nargs="?" if m["bare"] else None,
                const=m["bare"],
                metavar=m["metavar"] or choices or field.name.upper(),
                help=(m["help"] + shown).replace("%", "%%"),
            )


def add_json(parser: argparse.ArgumentParser) -> None:
    on = os.environ.get("RALO_JSON", "0") not in ("", "0")
    parser.add_argument("--json", action="store_true", default=on, help="the last line is one JSON object")


def read_flags(record: type[T], args: argparse.Namespace) -> T:
    """The record with every value from, in rising precedence: its default, the environment, the command line."""
    return record(**given(record, args))


def given(record: type[Any], args: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """The fields that the command line or else the environment sets."""
    values = {}
    for field in fields(record):
        name = flag_name(field, prefix)
        variable = "RALO_" + name.replace("-", "_").upper()
        text, source = getattr(args, name.replace("-", "_"), None), "--" + name
        if text is None and os.environ.get(variable):
            text, source = os.environ[variable], variable
        if text is not None:
            values[field.name] = parse(record, field, text, source)
    return values


def fields(record: type[Any]) -> list[dataclasses.Field[Any]]:
    """Those of a record that are flags."""
    return [f for f in dataclasses.fields(record) if "help" in f.metadata]


def flag_name(field: dataclasses.Field[Any], prefix: str = "") -> str:
    own: str = field.metadata["name"] or "-".join(filter(None, (prefix, field.name.replace("_", "-"))))
    return own


def parse(record: type[Any], field: dataclasses.Field[Any], text: str, source: str) -> Any:
    """A value as written on a command line, in the environment or in a plan, checked; `source` is named in errors."""
    return _parse(text, get_type_hints(record)[field.name], field.metadata, source)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word, or nothing."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _parse(text: str, kind: Any, m: Any, source: str) -> Any:
    if m["choices"] and text not in m["choices"]:
        hint = nearest(text, m["choices"])
        raise RaloError(f"{source} must be one of {', '.join(m['choices'])}, got {text!r:.60}{hint}")
    if kind not in (int, float):
        return text
    try:
        value = kind(text)
    except ValueError:
        value = None
    low, high = m["low"], m["high"]
    if value is None or value != value or (low is not None and value < low) or (high is not None and value > high):
        what = "a whole number" if kind is int else "a number"
        limits = f" from {low} to {high}" if low is not None and high is not None else ""
        raise RaloError(f"{source} must be {what}{limits}, got {text!r:.60}")
    return value
