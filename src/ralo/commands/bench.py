"""Speed of decode and prefill, measured in turns with a peer if asked, beside the memory's read speed."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralo import _core, peer, plot, screen
from ralo.bench import Engine, Phase, Ralo, measure, row
from ralo.commands.run import counted, modes_record
from ralo.errors import RaloError
from ralo.footprint import footprints
from ralo.lm import LM, LoadOptions, load
from ralo.matrix import QUANTS
from ralo.model import Dense
from ralo.options import add_flags, add_json, flag, read_flags
from ralo.plan import Setup, add_mode_flags, read_setup
from ralo.quality import perplexity
from ralo.sampling import Sampler, Sampling
from ralo.texts import held_out, sample


@dataclass(frozen=True)
class BenchOptions(LoadOptions):
    model: str = flag(
        "mini",
        "mini, a Hugging Face directory, a .gguf file, a packed directory,"
        " or a shape without weights as random:D=2048,L=16,F=8192,H=32,K=8,V=32000",
        short="-m",
    )
    quant: str = flag("auto", "precisions to measure, with commas: f32, bf16, int8, int4; auto = as packed, else int8")
    ctx: str = flag("0", "tokens of context to measure decode at, with commas")
    prompt_tokens: int = flag(512, "length of the prompt in prefill rows; 0 = no prefill rows", low=0, high=1 << 20)
    tokens: int = flag(32, "tokens per round in decode rows", short="-n", low=1, high=1 << 20)
    rounds: int = flag(7, "rounds; each measures every engine once", low=1, high=1000)
    peer: str = flag("", "engine to measure beside, with the same weights", choices=(peer.NAME,))
    quality_tokens: int = flag(4096, "tokens of held-out text that a mode's quality is measured on", low=64, high=16384)
    plot: str = flag("", "draw the rows into this file, .html or .png", metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, BenchOptions)
    add_mode_flags(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options, setup = read_flags(BenchOptions, args), read_setup(args)
    if options.peer:
        peer.check()
    if options.plot:
        plot.check(Path(options.plot))
    contexts, quants = _contexts(options.ctx), _quants(options.quant)
    phases: list[Phase] = [("decode", ctx, options.tokens) for ctx in contexts]
    if options.prompt_tokens:
        phases.append(("prefill", 0, options.prompt_tokens))
    rows: list[dict[str, Any]] = []
    for quant in quants:
        speeds = _speeds(options, quant, phases, setup)
        sizes = footprints(options.model, quant, options.kv, options.threads, phases, setup)
        rows += [speed | size for speed, size in zip(speeds, sizes, strict=True)]
    _show(rows, options)
    if options.plot:
        plot.write(Path(options.plot), options.model, rows)
    if args.json:
        screen.json_line({"model": options.model, "rows": rows})
    return 0


def _contexts(text: str) -> list[int]:
    try:
        values = [int(item) for item in text.split(",")]
    except ValueError:
        values = [-1]
    if any(v < 0 for v in values):
        raise RaloError(f"--ctx must be whole numbers with commas, as in 0,4096, got {text!r:.60}")
    return values


def _quants(text: str) -> list[str]:
    values = text.split(",")
    if bad := [v for v in values if v not in ("auto", *QUANTS)]:
        raise RaloError(f"--quant must be of {', '.join(QUANTS)}, with commas, got {bad[0]!r:.60}")
    return values


def _speeds(options: BenchOptions, quant: str, phases: list[Phase], setup: Setup) -> list[dict[str, Any]]:
    lm = load(options.model, quant, options.kv, options.threads, setup=setup)
    room = _room(lm, phases)
    text = sample(lm) if lm.model.has_modes else [0]  # dense speed does not depend on what a text says
    ours = Ralo(lm, lm.runner(Sampler(Sampling(temperature=0))), text)
    engines: dict[str, Engine] = {"ralo": ours}
    if lm.model.has_modes:
        engines["dense"] = Ralo(lm, Dense(lm.model), text)
    beside = (options.peer, peer.QUANTS[lm.quant]) if options.peer else ()
    rows, done, steps = [], 0, len(phases) * (options.rounds + 1)

    def tick() -> None:
        nonlocal done
        done += 1
        if bar:
            bar(done / steps)

    theirs = peer.beside(lm, room) if options.peer else contextlib.nullcontext()
    with theirs as engine, screen.progress(f"measuring {lm.quant}") as bar:
        if engine:
            engines[options.peer] = engine
        for phase, ctx, tokens in phases:
            samples = measure(engines, phase, ctx, tokens, options.rounds, tick)
            rows.append(row(lm, samples, (phase, ctx, tokens), ours.bytes_per_token(phase), beside))
    if not lm.model.has_modes:
        return rows
    with screen.progress("measuring quality") as bar:  # a speed without its quality is not shown
        tokens_held_out = held_out(lm, options.quality_tokens)
        quality = perplexity(lm.model, tokens_held_out, min(1024, lm.model.cfg.max_context), lm.kv, bar)
    said = {"delta_ppl_pct": quality.delta_ppl_pct, "delta_ppl_ci95": quality.ci95, "kl": quality.kl}
    said |= {"top1_agree": quality.top1_agree, "quality_tokens": quality.tokens, **modes_record(lm)}
    return [r | said for r in rows]


def _room(lm: LM, phases: list[Phase]) -> int:
    """Tokens that the longest phase takes, or an error where the model's context ends before."""
    limit, longest = lm.model.cfg.max_context, 0
    for phase, ctx, tokens in phases:
        need = tokens if phase == "prefill" else ctx + tokens + 2
        if need > limit and phase == "prefill":
            raise RaloError(f"--prompt-tokens {tokens} is more than the model's context of {limit}")
        if need > limit:
            asked = f"decode at --ctx {ctx} with --tokens {tokens}"
            raise RaloError(f"{asked} needs {need} tokens, the model's context is {limit}")
        longest = max(longest, need)
    return longest


def _show(rows: list[dict[str, Any]], options: BenchOptions) -> None:
    columns = ["phase", "ctx", "quant", "tok/s", "min … max", "read/token", "GB/s", "of stream", "RSS / limit"]
    if any("kl" in r for r in rows):
        columns += ["speed-up", "95 %", "Δppl %", "95 %", "KL"]
    if options.peer:
        columns += [options.peer, "ralo / peer", "95 %"]
    shown = []
    for r in rows:
        low, high = r["tok_s_range"]
        line = [r["phase"], str(r["ctx"]), r["quant"], f"{r['tok_s']:.1f}", f"{low:.1f} … {high:.1f}"]
        line += [
            screen.size(r["bytes_per_token"]),
            f"{r['gb_s']:.1f}",
            f"{r['bandwidth_share']:.0%}",
            f"{r['rss_mb']:.0f} / {r['rss_limit_mb']:.0f} MB",
        ]
        if "kl" in r:
            (a, b), (c, d) = r["ci95"], r["delta_ppl_ci95"]
            line += [f"{r['speedup']:.2f}x", f"{a:.2f} … {b:.2f}", f"{r['delta_ppl_pct']:+.2f}"]
            line += [f"{c:+.2f} … {d:+.2f}", f"{r['kl']:.4f}"]
        if options.peer:
            a, b = r["vs_peer_ci95"]
            line += [f"{r['peer_quant']} {r['peer_tok_s']:.1f}", f"{r['vs_peer']:.2f}x", f"{a:.2f} … {b:.2f}"]
        shown.append(line)
    screen.table(
        columns, shown, f"{options.model}: {counted(_core.threads(), 'thread')}, {_core.level()}, {options.kv} cache"
    )
