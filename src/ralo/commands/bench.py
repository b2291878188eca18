"""Speed of decode and prefill, measured in turns with a peer if asked, beside the memory's read speed."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralo import _core, loader, peer, screen
from ralo.bench import Engine, Ralo, measure, row
from ralo.errors import RaloError
from ralo.lm import LM, LoadOptions, load
from ralo.matrix import QUANTS
from ralo.options import add_flags, flag, read_flags


@dataclass(frozen=True)
class BenchOptions(LoadOptions):
    quant: str = flag("auto", "precisions to measure, with commas: f32, bf16, int8, int4; auto = as packed, else int8")
    ctx: str = flag("0", "tokens of context to measure decode at, with commas")
    prompt_tokens: int = flag(512, "length of the prompt in prefill rows; 0 = no prefill rows", low=0, high=1 << 20)
    tokens: int = flag(32, "tokens per round in decode rows", short="-n", low=1, high=1 << 20)
    rounds: int = flag(7, "rounds; each measures every engine once", low=1, high=1000)
    peer: str = flag("", "measure beside: llama.cpp", choices=("", peer.NAME))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, BenchOptions)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")


def run(args: argparse.Namespace) -> int:
    options = read_flags(BenchOptions, args)
    if options.peer:
        peer.check()
    contexts, quants = _contexts(options.ctx), _quants(options.quant)
    rows: list[dict[str, Any]] = []
    for quant in quants:
        lm = load(options.model, quant, options.kv, options.threads)
        rows += _rows(lm, options, contexts)
    _show(rows, options)
    if args.json:
        screen.json_line({"model": options.model, "rows": rows})
    return 0


def _contexts(text: str) -> list[int]:
    try:
        values = [int(item) for item in text.split(",")]
    except ValueError:
        values = [-1]
    if any(v < 0 for v in values):
        raise RaloError(f"--ctx must be whole numbers with commas, as in 0,4096, got {text!r}")
    return values


def _quants(text: str) -> list[str]:
    values = text.split(",")
    if bad := [v for v in values if v not in ("auto", *QUANTS)]:
        raise RaloError(f"--quant must be of {', '.join(QUANTS)}, with commas, got {bad[0]!r}")
    return values


def _rows(lm: LM, options: BenchOptions, contexts: list[int]) -> Iterator[dict[str, Any]]:
    room = options.tokens + 2
    need = max(*(c + room for c in contexts), options.prompt_tokens)
    if need > lm.model.cfg.max_context:
        raise RaloError(f"{need} tokens are needed, the model's context is {lm.model.cfg.max_context}: lower --ctx")
    ours = Ralo(lm)
    engines: dict[str, Engine] = {"ralo": ours}
    beside: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory() as scratch, screen.progress(f"measuring {lm.quant}") as bar:
        if options.peer:
            path = Path(scratch) / "peer.gguf"
            peer.write_gguf(loader.open_checkpoint(options.model), lm.quant, path)
            engines[peer.NAME] = peer.LlamaCpp(path, _core.threads(), lm.kv, need)
            beside = (peer.NAME, peer.QUANTS[lm.quant])
        phases = [("decode", ctx, options.tokens) for ctx in contexts]
        if options.prompt_tokens:
            phases.append(("prefill", 0, options.prompt_tokens))
        done, steps = 0, len(phases) * (options.rounds + 1)

        def tick() -> None:
            nonlocal done
            done += 1
            if bar:
                bar(done / steps)

        for phase, ctx, tokens in phases:
            samples = measure(engines, phase, ctx, tokens, options.rounds, tick)
            yield row(lm, samples, phase, ctx, ours.bytes_per_token(phase), beside)


def _show(rows: list[dict[str, Any]], options: BenchOptions) -> None:
    columns = ["phase", "ctx", "quant", "tok/s", "min … max", "read/token", "GB/s", "of stream", "RSS"]
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
            f"{r['rss_mb']:.0f} MB",
        ]
        if options.peer:
            a, b = r["vs_peer_ci95"]
            line += [f"{r['peer_quant']} {r['peer_tok_s']:.1f}", f"{r['vs_peer']:.2f}x", f"{a:.2f} … {b:.2f}"]
        shown.append(line)
    screen.table(columns, shown, f"{options.model}: {_core.threads()} threads, {_core.level()}, {options.kv} cache")
