"""Measure what each mode promises on a model, one row per line; exit 1 where one does not hold."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ralo import __version__, _core, cpu, drawing, report, screen
from ralo.accept import ACCEPT, Row, Task
from ralo.accept.rows import Progress, markdown, tried
from ralo.commands.run import open_model
from ralo.errors import RaloError
from ralo.lm import LM, LoadOptions
from ralo.matrix import QUANTS
from ralo.options import add_flags, add_json, flag, nearest, read_flags
from ralo.plan import Setup
from ralo.report import Report

ANY = 1.10  # what the documents ask of any model
# What this project asks of its own reference models, by the name of their directory: precision -> speed-up, and Δppl.
REFERENCE = {"base": ({"int8": 1.30, "int4": 1.20}, 2.0), "mini": ({"int8": 1.40}, 1.0)}


@dataclass(frozen=True)
class AcceptOptions(LoadOptions):
    quant: str = flag("auto", "precisions to accept at, with commas; auto = int8, or what the model's targets name")
    only: str = flag("", f"modes to accept, with commas: {', '.join(ACCEPT)}; without it all", metavar="MODES")
    max_dppl: float = flag(
        0.0, "most that perplexity may rise, in percent; 0 = 2, or the model's own target", low=0, high=100
    )
    speedup: float = flag(0.0, f"least speed-up; 0 = {ANY}, or the model's own target", low=0, high=100)
    tokens: int = flag(16384, "tokens of held-out text to measure quality on", low=64, high=16384)
    ctx: int = flag(128, "tokens of context to measure decode at", low=0, high=1 << 20)
    rounds: int = flag(15, "rounds of every speed measurement", low=1, high=1000)
    profile: str = flag(
        "", "calibration profile of the model; without it, one beside the model or a new one", metavar="FILE"
    )
    html: str = flag("", "write the lines into this page too, .html", metavar="FILE")
    md: str = flag("", "write them as a table in Markdown too, .md", metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, AcceptOptions)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = read_flags(AcceptOptions, args)
    modes = [_mode(name) for name in options.only.split(",")] if options.only else list(ACCEPT)
    task = _task(options)
    if options.html:
        report.check(Path(options.html))
    if options.md:
        _check_md(Path(options.md))

    def opened(quant: str) -> LM:
        return _open(options, quant)

    opened(task.quants[0])  # a model that cannot be opened is said before any work
    rows: list[Row] = []
    for name in modes:
        with screen.steps() as say:
            rows += tried(name, "all of its lines", partial(_lines, name, task, opened, say))
    passed = all(row.passed for row in rows)
    columns = ["mode", "line", "target", "value", ""]
    shown = [[r.mode, r.line, r.target, r.value, "PASS" if r.passed else "FAIL"] for r in rows]
    screen.table(columns, shown, f"{options.model}: {sum(r.passed for r in rows)} of {len(rows)} lines hold")
    if options.html:
        report.write(Path(options.html), _report(task, rows, args.command))
    if options.md:
        Path(options.md).write_text(markdown(rows), encoding="utf-8")
    if args.json:
        screen.json_line({"model": options.model, "pass": passed, "rows": [r.to_dict() for r in rows]})
    return 0 if passed else 1


def _lines(name: str, task: Task, opened: Callable[[str], LM], say: Progress) -> list[Row]:
    return ACCEPT[name](task, opened, lambda what: say(f"{name}: {what}"))


def _report(task: Task, rows: Sequence[Row], command: str) -> Report:
    hold = sum(row.passed for row in rows)
    about = {"CPU": cpu.name(), "threads": f"{_core.threads()}, {_core.level()}", "precision": ", ".join(task.quants)}
    about |= {"quality": f"{task.tokens} tokens of held-out text", "ralo": __version__, "command": command}
    note = "all of them" if hold == len(rows) else f"{len(rows) - hold} FAIL"
    return Report(task.model, about, [("lines that hold", f"{hold} of {len(rows)}", note)], rows=rows)


def _check_md(path: Path) -> None:
    """Says early, in one line, that the file cannot be written."""
    if path.suffix != ".md":
        raise RaloError(f"--md FILE must end in .md, got {str(path)!r:.60}")
    try:
        drawing.writable(path)
    except OSError as error:
        raise RaloError(f"{path}: cannot be written: {error.strerror or error}") from error


def _mode(name: str) -> str:
    """A mode by its name, with its hyphen or without."""
    known = {mode.replace("-", ""): mode for mode in ACCEPT}
    if name.replace("-", "") not in known:
        raise RaloError(f"--only must be of {', '.join(ACCEPT)}, got {name!r:.40}{nearest(name, ACCEPT)}")
    return known[name.replace("-", "")]


def _task(options: AcceptOptions) -> Task:
    wanted, max_dppl = REFERENCE.get(Path(options.model).name, ({}, 2.0))
    quants = tuple(wanted or ("int8",)) if options.quant == "auto" else tuple(options.quant.split(","))
    if bad := [q for q in quants if q not in QUANTS]:
        raise RaloError(f"--quant must be of {', '.join(QUANTS)}, with commas, got {bad[0]!r:.40}")
    minimum = {q: options.speedup or wanted.get(q, ANY) for q in quants}
    limit = options.max_dppl or max_dppl
    return Task(options.model, quants, options.tokens, options.rounds, options.ctx, minimum, limit)


def _open(options: AcceptOptions, quant: str) -> LM:
    model = LoadOptions(options.model, quant, options.kv, options.threads)
    return open_model(model, Setup(profile=Path(options.profile) if options.profile else None))
