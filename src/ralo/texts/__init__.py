"""Short texts that ship with ralo: to calibrate a mode and measure its quality without looking for one."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ralo.errors import RaloError

if TYPE_CHECKING:
    from ralo.lm import LM

HERE = Path(__file__).parent
SAMPLE = 2048  # tokens


def read(name: str) -> str:
    """calibration, tuning and held_out (novels), or other (encyclopaedia)."""
    return lzma.decompress((HERE / f"{name}.txt.xz").read_bytes()).decode()


def tokens_of(lm: LM, name: str, tokens: int) -> list[int]:
    """The first tokens of a text and the one after them, or all there are. A shape without weights gets random ones."""
    if str(lm.path).startswith("random:"):
        return [int(t) for t in np.random.default_rng(0).integers(0, lm.model.cfg.vocab, tokens + 1)]
    found = lm.encode(read(name))
    if len(found) < 2:
        raise RaloError(f"{lm.path}: its tokenizer makes no tokens of plain text")
    return found[: tokens + 1]


def held_out(lm: LM, tokens: int) -> list[int]:
    return tokens_of(lm, "held_out", tokens)


def sample(lm: LM) -> list[int]:
    """Text to run while speed is measured."""
    return tokens_of(lm, "held_out", SAMPLE)
