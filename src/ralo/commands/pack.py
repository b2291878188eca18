"""Quantise a checkpoint once, into a directory that opens at once."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from ralo import cpu, loader, screen
from ralo.errors import RaloError
from ralo.formats import packed
from ralo.lm import LoadOptions
from ralo.options import add_flags, flag, read_flags
from ralo.weights import build


@dataclass(frozen=True)
class PackOptions:
    output: str = flag("", "directory to write; must not exist", short="-o", metavar="DIR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadOptions, PackOptions)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")


def run(args: argparse.Namespace) -> int:
    model, to = read_flags(LoadOptions, args), Path(read_flags(PackOptions, args).output)
    if to == Path(""):
        raise RaloError("-o DIR is missing: the directory to write")
    if os.path.lexists(to):
        raise RaloError(f"{to}: already there; choose another directory or remove it")
    if packed.is_packed(Path(model.model)):
        raise RaloError(f"{model.model}: is packed already")
    cpu.setup(model.threads)
    ckpt = loader.open_checkpoint(model.model)
    with screen.progress("packing weights") as bar:
        _, weights = build(ckpt, loader.DEFAULT_QUANT if model.quant == "auto" else model.quant, bar)
    packed.save(ckpt, weights, to)
    bytes_on_disk = sum(f.stat().st_size for f in to.iterdir())
    print(f"{to}: {weights.quant}, {screen.size(bytes_on_disk)}")
    if args.json:
        screen.json_line({"path": str(to), "quant": weights.quant, "bytes": bytes_on_disk})
    return 0
