"""Quantise a checkpoint once, into a directory that opens at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ralo import cpu, loader, screen
from ralo import profile as profiles
from ralo.errors import RaloError
from ralo.formats import packed
from ralo.lm import LoadOptions
from ralo.neurons import Order, order_of
from ralo.options import add_flags, add_json, flag, read_flags
from ralo.weights import build


@dataclass(frozen=True)
class PackOptions(LoadOptions):
    model: str = flag("mini", "mini, a Hugging Face directory or a .gguf file", short="-m")
    kv: str = ""  # no flag here: a cache is not packed
    output: str = flag("", "directory to write; must not exist", short="-o", metavar="DIR")
    order: str = flag("", "profile by which neurons that win together are put together", metavar="FILE")
    order_block: int = flag(32, "neurons of a block in that order", low=2, high=1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, PackOptions)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = read_flags(PackOptions, args)
    if not options.output:
        raise RaloError("-o DIR is missing: the directory to write")
    to = Path(options.output)
    packed.unfinished(to)  # before the work, not after it
    if packed.is_packed(Path(options.model)):
        raise RaloError(f"{options.model}: is packed already")
    cpu.setup(options.threads)
    ckpt = loader.open_checkpoint(options.model)
    ckpt.tokenizer()  # likewise
    orders = _orders(options) if options.order else None
    with screen.progress("packing weights") as bar:
        _, weights = build(ckpt, loader.DEFAULT_QUANT if options.quant == "auto" else options.quant, bar, orders)
    packed.save(ckpt, weights, to)
    bytes_on_disk = sum(f.stat().st_size for f in to.iterdir())
    print(f"{to}: {weights.quant}, {screen.size(bytes_on_disk)}")
    if args.json:
        screen.json_line({"path": str(to), "quant": weights.quant, "bytes": bytes_on_disk})
    return 0


def _orders(options: PackOptions) -> dict[int, Order]:
    """Of every layer's neurons, by what calibration saw win together."""
    profile = profiles.load(Path(options.order))
    widths = {i: len(p.norms) for (i, place), p in profile.places.items() if place == "down"}
    return {i: order_of(bits, widths[i], options.order_block) for i, bits in profile.winners.items()}
