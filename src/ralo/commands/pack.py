"""Quantise a checkpoint once, into a directory that opens at once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ralo import cpu, loader, screen, texts
from ralo import profile as profiles
from ralo.commands.run import read_text
from ralo.config import ModelConfig
from ralo.errors import RaloError
from ralo.formats import packed
from ralo.formats.checkpoint import Checkpoint
from ralo.lm import LoadOptions
from ralo.mix.pack import pack_mix
from ralo.modes import TT, Mix, Proc
from ralo.neurons import Order, order_of
from ralo.options import add_flags, add_json, flag, read_flags
from ralo.plan import read_toml, settings_of
from ralo.proc.hashed import HashedMatrix
from ralo.proc.matrix import ProcMatrix
from ralo.proc.pack import bits_a_weight, pack_proc
from ralo.tt.pack import pack_tt
from ralo.weights import Weights, build

M = TypeVar("M", Proc, TT, Mix)


@dataclass(frozen=True)
class PackOptions(LoadOptions):
    model: str = flag("mini", "mini, a Hugging Face directory or a .gguf file", short="-m")
    kv: str = ""  # no flag here: a cache is not packed
    output: str = flag("", "directory to write; must not exist", short="-o", metavar="DIR")
    order: str = flag("", "profile by which neurons that win together are put together", metavar="FILE")
    order_block: int = flag(32, "neurons of a block in that order", low=2, high=1024)
    plan: str = flag("", "TOML file whose [proc], [tt] or [mix] says how, by layer and site too", metavar="FILE")
    text: str = flag("", "text (UTF-8) that weights are made for; without one, novels that ship", metavar="FILE")
    tokens: int = flag(16384, "tokens of it", low=512, high=1 << 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, PackOptions)
    for mode in (Proc, TT, Mix):
        add_flags(parser.add_argument_group(f"{mode.name} (made here, used by run and others)"), mode, prefix=mode.name)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = read_flags(PackOptions, args)
    if not options.output:
        raise RaloError("-o DIR is missing: the directory to write")
    to = Path(options.output)
    packed.unfinished(to)  # before the work, not after it
    if packed.is_packed(Path(options.model)):
        raise RaloError(f"{options.model}: is packed already")
    proc, tt, mix = _asked(Proc, args, options), _asked(TT, args, options), _asked(Mix, args, options)
    if sum(map(bool, (proc, tt, mix))) > 1:
        each = "--proc-sparse, --tt and --mix make a pack each"
        raise RaloError(f"{each}: pack twice, and run with --proc-pack and --tt-pack or --mix-pack")
    cpu.setup(options.threads)
    ckpt = loader.open_checkpoint(options.model)
    tokenizer = ckpt.tokenizer()  # likewise
    orders = _orders(options) if options.order else None
    with screen.progress("packing weights") as bar:
        cfg, weights = build(ckpt, loader.DEFAULT_QUANT if options.quant == "auto" else options.quant, bar, orders)
    said: dict[str, object] = {"path": str(to), "quant": weights.quant}
    if proc or tt or mix:
        tokens = tokenizer.encode(read_text(Path(options.text)) if options.text else texts.read("calibration"))
        if len(tokens) < 512:
            raise RaloError(f"the text has {len(tokens)} tokens; new weights need at least 512, better 16384")
        tokens = tokens[: options.tokens]
        said |= _pack_proc(ckpt, cfg, weights, proc, tokens, to) if proc else {}
        said |= _pack_tt(ckpt, cfg, weights, tt, tokens, to) if tt else {}
        said |= _pack_mix(ckpt, cfg, weights, mix, tokens, to) if mix else {}
    else:
        packed.save(ckpt, weights, to)
    said["bytes"] = sum(f.stat().st_size for f in to.iterdir())
    print(f"{to}: {weights.quant}, {screen.size(int(str(said['bytes'])))}")
    if args.json:
        screen.json_line(said)
    return 0


def _asked(kind: type[M], args: argparse.Namespace, options: PackOptions) -> M | None:
    """The mode that weights are made for, where it is asked for."""
    path = Path(options.plan) if options.plan else None
    values = settings_of(kind, args, read_toml(path) if path else {}, path)
    mode = kind(**values) if values else None
    if mode and mode.pack:
        raise RaloError(f"--{kind.name}-pack is for running; here -o says where the weights go")
    if mode and mode.enabled and options.order:
        raise RaloError(f"--order and --{kind.about.switch} do not go together: such weights have no blocks of neurons")
    return mode if mode and mode.enabled else None


def _pack_proc(
    ckpt: Checkpoint, cfg: ModelConfig, weights: Weights, mode: Proc, tokens: list[int], to: Path
) -> dict[str, object]:
    clock = time.monotonic()
    with screen.progress("searching seeds") as bar:
        built = pack_proc(ckpt, cfg, weights, mode, tokens, to, bar)
    seconds = time.monotonic() - clock
    made = [m for m in built.weights.matrices().values() if isinstance(m, ProcMatrix | HashedMatrix)]
    bits = bits_a_weight(made)
    print(f"{to}: {len(made)} matrices at {bits:.2f} bits a weight, {seconds:.0f} s{_went_on(built.resumed)}")
    return {"bits": bits, "matrices": len(made), "seconds": seconds, "resumed_layers": built.resumed}


def _pack_tt(
    ckpt: Checkpoint, cfg: ModelConfig, weights: Weights, mode: TT, tokens: list[int], to: Path
) -> dict[str, object]:
    clock = time.monotonic()
    with screen.progress("finding factors") as bar:
        built = pack_tt(ckpt, cfg, weights, mode, tokens, to, bar)
    seconds, about = time.monotonic() - clock, built.about
    rows = [
        [name, f"rank {max(r['ranks'])}", f"{r['gap']:.3f}", f"{r['speedup']:.2f}"]
        for name, r in about.matrices.items()
    ]
    rows += [[name, "dense", "", why] for name, why in about.refused.items()]
    screen.table(["matrix", "", "gap", "faster, or why not"], sorted(rows, key=_by_layer), str(to))
    counts = f"{len(about.matrices)} matrices are factors, {len(about.refused)} stay dense"
    print(f"{to}: {counts}, {seconds:.0f} s{_went_on(built.resumed)}")
    said = {"factored": about.matrices, "refused": about.refused}
    return {**said, "seconds": seconds, "resumed_layers": built.resumed}


def _pack_mix(
    ckpt: Checkpoint, cfg: ModelConfig, weights: Weights, mode: Mix, tokens: list[int], to: Path
) -> dict[str, object]:
    clock = time.monotonic()
    with screen.progress("rounding weights") as bar:
        built = pack_mix(ckpt, cfg, weights, mode, tokens, to, bar)
    seconds, made = time.monotonic() - clock, built.about.matrices
    print(f"{to}: {len(made)} matrices are coarser than {weights.quant}, {seconds:.0f} s{_went_on(built.resumed)}")
    return {"matrices": len(made), "seconds": seconds, "resumed_layers": built.resumed}


def _went_on(resumed: int) -> str:
    return f", {resumed} layers were there already" if resumed else ""


def _by_layer(row: Sequence[str]) -> tuple[int, str]:
    _, layer, place = row[0].split(".")
    return int(layer), place


def _orders(options: PackOptions) -> dict[int, Order]:
    """Of every layer's neurons, by what calibration saw win together."""
    profile = profiles.load(Path(options.order))
    widths = {i: len(p.norms) for (i, place), p in profile.places.items() if place == "down"}
    return {i: order_of(bits, widths[i], options.order_block) for i, bits in profile.winners.items()}
