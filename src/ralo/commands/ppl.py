"""Perplexity of a text on the path that decoding takes, of dense, and of a peer if asked."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ralo import peer, screen
from ralo.commands.run import modes_record, open_model, read_text
from ralo.errors import RaloError
from ralo.lm import LM, LoadOptions
from ralo.options import add_flags, add_json, flag, read_flags
from ralo.plan import add_mode_flags, read_setup
from ralo.quality import perplexity, spans


@dataclass(frozen=True)
class PplOptions:
    text: str = flag("", "file with the text (UTF-8)", metavar="FILE")
    ctx: int = flag(0, "window length; windows do not overlap; 0 = 1024, or the model's context", low=0, high=1 << 30)
    first: int = flag(
        0, "measure only positions from this one of each window on, after a dense prompt", low=0, high=1 << 30
    )
    tokens: int = flag(0, "predictions to measure; 0 = the whole text", low=0, high=1 << 40)
    peer: str = flag("", "engine to measure beside, with the same weights and text", choices=(peer.NAME,))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadOptions, PplOptions)
    add_mode_flags(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options, model = read_flags(PplOptions, args), read_flags(LoadOptions, args)
    setup = read_setup(args)
    if not options.text:
        raise RaloError("--text FILE is missing: the text to measure on")
    text = read_text(Path(options.text))
    if options.peer:
        peer.check()
    lm = open_model(model, setup)
    ctx = options.ctx or min(1024, lm.model.cfg.max_context)
    tokens = lm.encode(text)
    if options.tokens:
        if len(tokens) <= options.tokens:
            need = options.tokens + 1
            raise RaloError(f"{options.text}: has {len(tokens)} tokens, --tokens {options.tokens} needs {need}")
        tokens = tokens[: options.tokens + 1]
    beside: dict[str, object] = {}
    with _peer(lm, options, ctx) as engine:  # what it refuses is said before anything is measured
        with screen.progress("measuring") as bar:
            quality = perplexity(lm.model, tokens, ctx, lm.kv, bar, first=options.first)
        if engine:
            with screen.progress(f"measuring {options.peer}") as bar:
                all_of_them = engine.losses(tokens, ctx, bar)
            measured = [all_of_them[a:b] for a, b in spans(lm.model, tokens, ctx, options.first)]
            theirs = float(np.exp(np.concatenate(measured).mean()))
            beside = {"peer": options.peer, "peer_quant": peer.QUANTS[lm.quant], "peer_ppl": theirs}
            beside["peer_delta_pct"] = 100 * (quality.ppl / theirs - 1)
    low, high = quality.ci95
    columns = ["model", "quant", "kv", "ctx", "tokens", "ppl", "dense", "Δppl %", "95 %", "KL", "top-1"]
    row = [model.model, lm.quant, lm.kv, str(ctx), str(quality.tokens), f"{quality.ppl:.4f}"]
    row += [f"{quality.dense_ppl:.4f}", f"{quality.delta_ppl_pct:+.2f}", f"{low:+.2f} … {high:+.2f}"]
    row += [f"{quality.kl:.5f}", f"{quality.top1_agree:.4f}"]
    if options.first:
        columns.insert(4, "first")
        row.insert(4, str(options.first))
    if beside:
        columns += [options.peer, "ralo / peer %"]
        row += [f"{beside['peer_quant']} {beside['peer_ppl']:.4f}", f"{beside['peer_delta_pct']:+.2f}"]
    screen.table(columns, [row])
    if args.json:
        run_as = {"model": model.model, "quant": lm.quant, "kv": lm.kv, "ctx": ctx, "first": options.first}
        screen.json_line({**quality.to_dict(), **run_as, **beside, **modes_record(lm)})
    return 0


def _peer(lm: LM, options: PplOptions, ctx: int) -> contextlib.AbstractContextManager[peer.LlamaCpp | None]:
    if not options.peer:
        return contextlib.nullcontext()
    peer.check_text(lm.model.cfg)
    return peer.beside(lm, min(ctx, lm.model.cfg.max_context))
