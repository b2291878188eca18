"""Quantise a checkpoint once, into a directory that opens at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ralo import cpu, loader, screen
from ralo.errors import RaloError
from ralo.formats import packed
from ralo.lm import LoadOptions
from ralo.options import add_flags, add_json, flag, read_flags
from ralo.weights import build


@dataclass(frozen=True)
class PackOptions:
    output: str = flag("", "directory to write; must not exist", short="-o", metavar="DIR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadOptions, PackOptions)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    model, output = read_flags(LoadOptions, args), read_flags(PackOptions, args).output
    if not output:
        raise RaloError("-o DIR is missing: the directory to write")
    to = Path(output)
    packed.unfinished(to)  # before the work, not after it
    if packed.is_packed(Path(model.model)):
        raise RaloError(f"{model.model}: is packed already")
    cpu.setup(model.threads)
    ckpt = loader.open_checkpoint(model.model)
    ckpt.tokenizer()  # likewise
    with screen.progress("packing weights") as bar:
        _, weights = build(ckpt, loader.DEFAULT_QUANT if model.quant == "auto" else model.quant, bar)
    packed.save(ckpt, weights, to)
    bytes_on_disk = sum(f.stat().st_size for f in to.iterdir())
    print(f"{to}: {weights.quant}, {screen.size(bytes_on_disk)}")
    if args.json:
        screen.json_line({"path": str(to), "quant": weights.quant, "bytes": bytes_on_disk})
    return 0
