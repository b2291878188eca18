"""Continue a text, streaming, and say what it cost."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ralo import _core, screen
from ralo.errors import RaloError
from ralo.generate import ON_FULL, Request, Stats
from ralo.lm import LM, LoadOptions, load
from ralo.options import add_flags, add_json, flag, read_flags
from ralo.plan import Setup, add_mode_flags, read_setup
from ralo.sampling import Sampling

PROMPT = "It was a dark and stormy night, and the old house at the end of the lane"


@dataclass(frozen=True)
class RunOptions:
    prompt: str = flag(PROMPT, "text to continue; - reads standard input", short="-p")
    prompt_file: str = flag("", "file with the text to continue")
    tokens: int = flag(128, "tokens to generate", short="-n", low=0, high=1 << 30)
    on_full: str = flag("stop", "when the context is full: stop, slide (forget the older half), error", choices=ON_FULL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadOptions, RunOptions, Sampling)
    add_mode_flags(parser)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; repeatable")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options, sampling, model = read_flags(RunOptions, args), read_flags(Sampling, args), read_flags(LoadOptions, args)
    setup = read_setup(args)
    if args.prompt is not None and args.prompt_file is not None:
        raise RaloError("--prompt and --prompt-file are both given: choose one")
    prompt = read_prompt(options if args.prompt is None else replace(options, prompt_file=""))
    stop = args.stop or [text for text in [os.environ.get("RALO_STOP")] if text]
    lm = open_model(model, setup)
    request = lm.request(prompt, options.tokens, stop=stop, on_full=options.on_full, sampling=sampling)
    text, interrupted = stream(lm, request, echo=prompt)
    print()
    if lm.model.pace:
        lm.model.pace.save()
    print(stats_line(lm, request.stats), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        screen.json_line(
            {"prompt": prompt, "text": text, "seed": request.sampler.seed, **stats_record(lm, request.stats)}
        )
    return 130 if interrupted else 0


def read_prompt(options: RunOptions) -> str:
    if options.prompt_file:
        prompt = read_text(Path(options.prompt_file))
    else:
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt.strip("\n"):
        raise RaloError("the prompt is empty: give some text with -p")
    return prompt


def read_text(path: Path) -> str:
    """A text file as UTF-8, without the NULs that some corpora put between documents."""
    try:
        return path.read_text(encoding="utf-8").replace("\0", "")
    except UnicodeDecodeError as error:
        raise RaloError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise RaloError(f"{path}: {error.strerror or error}") from error


def open_model(options: LoadOptions, setup: Setup | None = None) -> LM:
    with screen.progress("packing weights") as bar:
        lm = load(options.model, options.quant, options.kv, options.threads, bar, setup=setup)
    for warning in lm.warnings:
        print(f"ralo: {warning}", file=sys.stderr)
    return lm


def stream(lm: LM, request: Request, echo: str = "") -> tuple[str, bool]:
    """Prints the text as it comes; Ctrl-C ends it and leaves what is there. Returns the text, and whether cut."""
    text = ""
    print(echo, end="", flush=True)
    try:
        for piece in lm.run(request):
            text += piece.text
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        request.stats.finish = "interrupted"
        return text, True
    return text, False


def stats_line(lm: LM, stats: Stats) -> str:
    parts = [f"prefill {counted(stats.prompt_tokens, 'token')} at {stats.prefill_tok_s:.0f} tok/s"]
    parts.append(f"decode {counted(stats.new_tokens, 'token')}")
    if stats.steps:  # the first token comes from the prompt's own pass: one alone has no speed
        rate = stats.bytes_per_token * stats.decode_tok_s / 1e9
        parts[-1] += f" at {stats.decode_tok_s:.1f} tok/s"
        parts.append(f"{screen.size(stats.bytes_per_token)}/token ({rate:.1f} GB/s)")
    threads = counted(_core.threads(), "thread")
    parts.append(f"{lm.storage} weights, {lm.kv} cache, {threads}, {_core.level()}, {modes_line(lm, stats)}")
    if stats.finish == "context":
        parts.append(f"stopped: context of {lm.model.cfg.max_context} tokens is full")
    elif stats.finish == "interrupted":
        parts.append("cut short")
    return "[" + " · ".join(parts) + "]"


def modes_line(lm: LM, stats: Stats) -> str:
    """What the modes did, and whether the guard had to act."""
    if not lm.model.has_modes:
        return "dense"
    m = lm.metrics()
    parts = [f"{name} keep {m[f'{name}.keep_ratio']:.2f}" for name in lm.guard.modes if f"{name}.keep_ratio" in m]
    skipped = sum(float(value) for name, value in m.items() if name.endswith(".bytes_skipped"))
    if stats.steps:
        parts.append(f"{screen.size(skipped / stats.steps)}/token skipped")
    if pace := lm.model.pace:
        parts.append(f"budget {1e3 * pace.budget_s:g} ms: mean {pace.mean_ms:.1f}, p99 {stats.p99_ms:.1f}")
        parts += [pace.note] * bool(pace.note)
    if lm.plan.verified:
        drafts = lm.drafting.metrics()
        parts.append(f"verified: {drafts['accept_rate']:.0%} of {drafts['drafts']:.1f} drafts a pass accepted")
    if checks := int(float(m["guard.checks"])):
        parts.append(f"{counted(checks, 'check')}: KL {m['guard.kl']:.3f}, top-1 {m['guard.top1']:.0%}")
    parts += [f"guard switched {event}" for event in lm.guard.events]
    if bad := int(float(m["guard.nonfinite"])):
        parts.append(f"{counted(bad, 'result')} not finite, computed densely")
    return ", ".join(parts)


def counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def stats_record(lm: LM, stats: Stats) -> dict[str, object]:
    figures = asdict(stats)
    del figures["times"]
    return {
        **figures,
        "p99_ms": stats.p99_ms,
        "prefill_tok_s": stats.prefill_tok_s,
        "decode_tok_s": stats.decode_tok_s,
        "bytes_per_token": stats.bytes_per_token,
        **{k: v for k, v in lm.metrics().items() if k in ("quant", "isa", "threads")},
        "kv": lm.kv,
        **modes_record(lm),
    }


def modes_record(lm: LM) -> dict[str, object]:
    """Metrics of the modes, in all and per layer, what was decided between them, and what the guard did."""
    if not lm.model.has_modes:
        return {}
    named = {k: v for k, v in lm.metrics().items() if "." in k}
    if lm.plan.verified:
        named |= {f"verify.{k}": v for k, v in lm.drafting.metrics().items()}
    return {"metrics": named, "layers": lm.layer_metrics(), "notes": lm.plan.notes, "events": lm.guard.events}
