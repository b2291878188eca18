"""Find the fastest plan for this model on this CPU whose perplexity stays within a budget."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ralo import _core, cpu, profile, report, screen
from ralo.commands.run import counted, open_model, read_text
from ralo.errors import RaloError
from ralo.lm import LM, LoadOptions
from ralo.modes import TT, Mix, Mode, Proc
from ralo.modes.made import MadeMode
from ralo.options import add_flags, add_json, flag, read_flags
from ralo.plan import plan_path, tables_of, write_toml
from ralo.tune import shown
from ralo.tune.record import Record
from ralo.tune.search import Found, Search
from ralo.tune.task import COARSE, ENOUGH, GOALS, Wish, dials, known_profile, shipped, split
from ralo.tune.trial import TOKENS, Texts, Trials
from ralo.version import __version__

SHORT, FAR, ROOM = 128, 8000, 256  # contexts that plans are made for by default, and what is left after them


@dataclass(frozen=True)
class TuneOptions(LoadOptions):
    quant: str = flag("auto", "int8, int4, or auto: of both, place by place", choices=("auto", "int8", "int4"))
    text: str = flag("", "ordinary text (UTF-8) to tune on; without one, novels that ship with ralo", metavar="FILE")
    max_dppl: float = flag(2.0, "most that perplexity may rise, in percent", low=0, high=100)
    ctx: str = flag("auto", "contexts to be fast at, with commas; auto = 128, and 8000 where the model has as many")
    goal: str = flag("latency", "what is to be least", choices=GOALS, name="profile")
    minutes: float = flag(10.0, "time to take; the best plan so far is kept", low=0.01, high=10000)
    seed: int = flag(0, "where the text is cut", low=0, high=1 << 30)
    output: str = flag("", "plan to write; what was measured goes beside it", short="-o", metavar="FILE.toml")
    record: str = flag("", "measurements to go on from, and to add to; without it, beside the plan", metavar="FILE")
    tt_pack: str = flag("", "factors that may stand in for weights (ralo pack --tt=on)", metavar="DIR")
    mix_pack: str = flag("", "int4 weights that make up for their rounding (ralo pack --mix=on)", metavar="DIR")
    html: str = flag("", "write what was found into this page too, .html", metavar="FILE")
    proc_pack: str = flag("", "procedural weights that may (ralo pack --proc-sparse=on)", metavar="DIR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, TuneOptions)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = read_flags(TuneOptions, args)
    path = plan_path(options.output)
    if Path(options.record).suffix == ".profile":
        raise RaloError(f"--record {options.record!r:.60}: the profile is written there; choose another name")
    if options.html:
        report.check(Path(options.html))
    text = read_text(Path(options.text)) if options.text else ""
    # A checkpoint is tuned at int8, and int4 is one of the options.
    lm = open_model(LoadOptions(options.model, "auto", options.kv, options.threads))
    wish = Wish(options.quant, options.goal, contexts(options.ctx, lm))
    parts = split(lm.encode(text), options.seed) if options.text else shipped(lm)
    warn(parts)
    measured = Path(options.record or path.with_suffix(".tune.json"))
    record = Record(measured, about(lm, options, text), 60 * options.minutes)
    search = prepared(lm, wish, parts, record, options, path)
    with screen.steps() as say:
        search.say = say
        best = search.run()
    kind = f"{options.quant} for {options.goal}"
    if best:
        shown.remember(record, options.max_dppl, kind, best)
    else:
        save(path, record, None, options)
    show(path, search, options)
    if options.html:
        report.write(Path(options.html), shown.report(search, options.model, facts(lm, args.command), kind))
    if args.json:
        screen.json_line(said(path, lm, search))
    return 0


def contexts(text: str, lm: LM) -> tuple[int, ...]:
    most = lm.model.cfg.max_context - ROOM
    try:
        auto = {max(0, min(SHORT, most)), *([min(FAR, most)] if most >= FAR / 2 else [])}
        values = tuple(sorted(auto) if text == "auto" else (int(item) for item in text.split(",")))
    except ValueError:
        values = (-1,)
    if any(v < 0 for v in values):
        raise RaloError(f"--ctx must be auto, or whole numbers with commas, as in 128,8000, got {text!r:.60}")
    if (longest := max(values)) + TOKENS + 2 > lm.model.cfg.max_context:
        raise RaloError(f"--ctx {longest} leaves no room in the model's context of {lm.model.cfg.max_context}")
    return values


def warn(parts: Texts) -> None:
    for what, tokens in (("to tune on", parts.dial), ("to check with", parts.check)):
        if len(tokens) < ENOUGH / 2:
            said = f"only {counted(len(tokens), 'token')} {what}: the cost in quality is known roughly, give more text"
            print(f"ralo tune: {said}", file=sys.stderr)


def about(lm: LM, options: TuneOptions, text: str) -> dict[str, Any]:
    """What measurements depend on: a record of others is of no use."""
    return {
        "model": profile.fingerprint(lm.model.weights),
        "cpu": cpu.name(),
        "isa": _core.level(),
        "threads": _core.threads(),
        "quant": lm.quant,
        "kv": lm.kv,
        "ralo": __version__,
        "ctx": options.ctx,
        "text": options.text,
        "text_hash": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "seed": options.seed,
    }


def prepared(lm: LM, wish: Wish, parts: Texts, record: Record, options: TuneOptions, path: Path) -> Search:
    made = [as_packed(kind(pack=pack)) for kind, pack in ((TT, options.tt_pack), (Proc, options.proc_pack)) if pack]
    mix = Mix(pack=options.mix_pack)
    with screen.progress("measuring what each place can bear") as bar:
        tick = bar or (lambda share: None)
        beside = profile_path(path, options)
        found = known_profile(lm, beside, parts.look, record, tick)
        sites = dials(lm, found, wish, mix, parts.look, record, tick)
    trials = Trials(lm, record, parts, wish.contexts, wish.goal, found)
    always = [mix] if wish.quant == COARSE and wish.mixes(lm.quant) else []
    search = Search(trials, options.max_dppl, sites, made, always)
    search.better = lambda best: save(path, record, best, options)
    return search


def as_packed(mode: MadeMode) -> Mode:
    """At the places that the pack was made for."""
    said = mode.said()
    return replace(mode, target=str(said.settings.get("target", mode.target))) if said else mode


def profile_path(path: Path, options: TuneOptions) -> Path:
    return Path(options.record).with_suffix(".profile") if options.record else path.with_suffix(".profile")


def save(path: Path, record: Record, best: Found | None, options: TuneOptions) -> None:
    """The plan, with what was measured of it; None: no mode on."""
    told = record.about | {"max_dppl": options.max_dppl, "profile": options.goal}
    if best:
        told |= {"found": best.name, "speed": round(best.speed, 4)}
        told |= {name: round(value, 5) for name, value in asdict(best.loss).items()}
        told["measured"] = [{k: round(v, 4) for k, v in asdict(gain).items()} for gain in best.gains]
    modes = tables_of(best.modes) if best else {}
    for table in modes.values():
        if table.get("pack"):
            table["pack"] = os.path.relpath(table["pack"], path.parent)
    beside = os.path.relpath(profile_path(path, options), path.parent)
    write_toml(path, {"profile": beside, "about": told, **modes})


def show(path: Path, search: Search, options: TuneOptions) -> None:
    columns = ["plan", *(f"at {ctx}" for ctx in search.trials.contexts), "Δppl %", "95 %", "KL", "top-1", ""]
    rows = []
    for found in search.tried:
        loss = found.loss
        row = [found.name, *(f"{g.speedup:.2f}x ({g.low:.2f} … {g.high:.2f})" for g in found.gains)]
        row += [f"{loss.delta_ppl_pct:+.2f}", f"{loss.low:+.2f} … {loss.high:+.2f}", f"{loss.kl:.4f}"]
        kept = "kept" if found is search.best else "" if loss.fits(options.max_dppl) else "over the budget"
        rows.append([*row, f"{loss.top1_agree:.3f}", kept])
    record = search.trials.record
    if search.cut:
        print(f"the time was up after {options.minutes:g} minutes; --minutes gives more, and the record goes on")
    screen.table(columns, rows, f"{options.model}: at most {options.max_dppl:g} % above dense {search.trials.lm.quant}")
    if search.best is None:
        print(f"{path}: nothing is faster than dense within {options.max_dppl:g} %; the plan has no mode on")
    else:
        print(f"{path}: {search.best.name}, {search.best.speed:.2f}x dense")
    print(f"{record.spent:.0f} s of measurements, {record.fresh} of them new; ralo run --plan {path} runs it")


def facts(lm: LM, command: str) -> dict[str, str]:
    """What the figures were measured with."""
    out = {"CPU": cpu.name(), "threads": f"{_core.threads()}, {_core.level()}", "precision": lm.quant}
    return out | {"cache": lm.kv, "ralo": __version__, "command": command}


def said(path: Path, lm: LM, search: Search) -> dict[str, Any]:
    def row(found: Found) -> dict[str, Any]:
        gains: Sequence[dict[str, Any]] = [asdict(gain) for gain in found.gains]
        return {"name": found.name, "speed": found.speed, "gains": gains, **asdict(found.loss),
                "kept": found is search.best, "modes": tables_of(found.modes)}  # fmt: skip

    best = row(search.best) if search.best else None
    return {"plan": str(path), "quant": lm.quant, "best": best, "rows": [row(found) for found in search.tried],
            "spent_s": search.trials.record.spent}  # fmt: skip
