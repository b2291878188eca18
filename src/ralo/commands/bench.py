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
from ralo.commands.run import counted
from ralo.errors import RaloError
from ralo.lm import LM, LoadOptions, load
from ralo.matrix import QUANTS
from ralo.options import add_flags, add_json, flag, read_flags


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, BenchOptions)
    add_json(parser)


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
        raise RaloError(f"--ctx must be whole numbers with commas, as in 0,4096, got {text!r:.60}")
    return values


def _quants(text: str) -> list[str]:
    values = text.split(",")
    if bad := [v for v in values if v not in ("auto", *QUANTS)]:
        raise RaloError(f"--quant must be of {', '.join(QUANTS)}, with commas, got {bad[0]!r:.60}")
    return values


def _rows(lm: LM, options: BenchOptions, contexts: list[int]) -> Iterator[dict[str, Any]]:
    limit, longest = lm.model.cfg.max_context, max(contexts)
    need = longest + options.tokens + 2
    if need > limit:
        asked = f"decode at --ctx {longest} with --tokens {options.tokens}"
        raise RaloError(f"{asked} needs {need} tokens, the model's context is {limit}")
    if options.prompt_tokens > limit:
        raise RaloError(f"--prompt-tokens {options.prompt_tokens} is more than the model's context of {limit}")
    ours = Ralo(lm)
    engines: dict[str, Engine] = {"ralo": ours}
    beside: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory() as scratch, screen.progress(f"measuring {lm.quant}") as bar:
        if options.peer:
            path = Path(scratch) / "peer.gguf"
            peer.write_gguf(loader.open_checkpoint(options.model), lm.quant, path)
            engines[peer.NAME] = peer.LlamaCpp(path, _core.threads(), lm.kv, max(need, options.prompt_tokens))
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
    screen.table(
        columns, shown, f"{options.model}: {counted(_core.threads(), 'thread')}, {_core.level()}, {options.kv} cache"
    )
