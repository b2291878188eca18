"""Learn what skipping costs this model, place by place, and write a plan that stays within a quality budget."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ralo import __version__, screen, texts
from ralo.autotune import Tuned, tune_k
from ralo.calibrate import calibrate
from ralo.commands.run import open_model, read_text
from ralo.errors import RaloError
from ralo.lm import LM, LoadOptions
from ralo.modes import KWTA
from ralo.options import add_flags, add_json, fields, flag, given, read_flags
from ralo.plan import plan_path, write_toml
from ralo.profile import Profile


@dataclass(frozen=True)
class CalibrateOptions:
    text: str = flag("", "file with ordinary text (UTF-8); without one, novels that ship with ralo", metavar="FILE")
    tokens: int = flag(8192, "tokens to look at, and as many again to tune on", low=256, high=1 << 20)
    often: int = flag(2048, "of them, tokens that are run with less and less read", low=64, high=1 << 20)
    max_dppl: float = flag(2.0, "most that perplexity may rise, in percent", low=0, high=1000)
    output: str = flag("", "plan to write; the profile goes beside it", short="-o", metavar="FILE.toml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadOptions, CalibrateOptions)
    add_flags(parser.add_argument_group(KWTA.name), KWTA, prefix=KWTA.name)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options, model = read_flags(CalibrateOptions, args), read_flags(LoadOptions, args)
    mode = KWTA(**given(KWTA, args, KWTA.name))
    path = plan_path(options.output)
    text = read_text(Path(options.text)) if options.text else texts.read("calibration")
    lm = open_model(model)
    look, tune = split(lm.encode(text), options.tokens)
    with screen.progress("measuring what each place can bear") as bar:
        profile = calibrate(lm, look, options.often, bar)
    with screen.progress("tuning k") as bar:
        tuned = tune_k(lm, mode, profile, tune, options.max_dppl, bar)
    save(path, lm, profile, tuned)
    show(path, tuned)
    if args.json:
        q = tuned.quality
        screen.json_line({"plan": str(path), "k": tuned.mode.k, "tokens": len(look) - 1, **q.to_dict()})
    return 0


def split(tokens: list[int], each: int) -> tuple[list[int], list[int]]:
    """Tokens to look at, and others to tune on: what was looked at flatters."""
    if len(tokens) < 512:
        raise RaloError(f"the text has {len(tokens)} tokens; calibration needs at least 512, better 16384")
    each = min(each, len(tokens) // 2 - 1)
    return tokens[: each + 1], tokens[each : 2 * each + 1]


def save(path: Path, lm: LM, profile: Profile, tuned: Tuned) -> None:
    beside = path.with_suffix(".profile")
    profile.save(beside)
    q, mode = tuned.quality, tuned.mode
    changed = {f.name: v for f in fields(KWTA) if (v := getattr(mode, f.name)) != f.default or f.name == "k"}
    about = {"ralo": __version__, "model": profile.model, "quant": lm.quant, "delta_ppl_pct": round(q.delta_ppl_pct, 3)}
    about |= {"kl": round(q.kl, 5), "tokens": q.tokens}
    write_toml(path, {"profile": beside.name, "about": about, KWTA.name: changed})


def show(path: Path, tuned: Tuned) -> None:
    rows = [
        [
            f"{k:.3f}",
            f"{q.delta_ppl_pct:+.2f}",
            "{:+.2f} … {:+.2f}".format(*q.ci95),
            f"{q.kl:.4f}",
            f"{q.top1_agree:.3f}",
        ]
        for k, q in tuned.tried
    ]
    screen.table(["k", "Δppl %", "95 %", "KL", "top-1"], rows)
    print(f"{path}: k = {tuned.mode.k} ({tuned.quality.tokens} tokens that calibration did not look at)")
