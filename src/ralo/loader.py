"""Models by name or path: the shipped one, Hugging Face directories, GGUF files, packed directories, random shapes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ralo.config import ModelConfig
from ralo.errors import RaloError
from ralo.formats import gguf, hf, packed, random
from ralo.formats.checkpoint import Checkpoint
from ralo.weights import Progress, Weights, build

if TYPE_CHECKING:
    from ralo.tokenizer import Tokenizer

SHIPPED = Path(__file__).parent / "models"
DEFAULT_QUANT = "int8"  # perplexity within 0.1 % of float32 at a quarter of the bytes
ACCEPTED = "'mini', a Hugging Face directory, a .gguf file or a packed directory"


def where(name: str) -> Path:
    """Where a model lies."""
    return SHIPPED / name if name == "mini" else Path(name)


def load(name: str, quant: str, progress: Progress | None) -> tuple[ModelConfig, Weights, Callable[[], Tokenizer]]:
    """A model's shape, its packed weights, and how to open its tokenizer."""
    path = where(name)
    if packed.is_packed(path):
        return packed.open_directory(path, quant)
    ckpt = open_checkpoint(name)
    cfg, weights = build(ckpt, DEFAULT_QUANT if quant == "auto" else quant, progress)
    return cfg, weights, ckpt.tokenizer


def open_checkpoint(name: str) -> Checkpoint:
    """A model whose weights are still to be packed."""
    if name.startswith("random:"):
        return random.checkpoint(name)
    if not name:
        raise RaloError(f"the model's name is empty; give {ACCEPTED}")
    path = where(name)
    if packed.is_packed(path):
        raise RaloError(f"{name}: is packed; this needs the checkpoint that it was made from")
    try:
        if path.is_dir():
            if not os.path.lexists(path / "config.json"):
                raise RaloError(f"{name}: is a directory without config.json; give {ACCEPTED}")
            return hf.open_directory(path)
        if path.suffix == ".gguf" and os.path.exists(path):
            return gguf.open_file(path)
        found = "is not a model file that ralo reads" if os.path.exists(path) else "no such model"
    except OSError as error:
        found = f"cannot be opened: {error.strerror}"
    raise RaloError(f"{name}: {found}; give {ACCEPTED}")
