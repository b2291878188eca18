"""A small model and a text to tune, and the command itself in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tiny import write_hf

from ralo.cli import main

FLAGS = ("--ctx", "8", "--threads", "1", "--minutes", "5", "--max-dppl", "20")


def write_tunable(to: Path, **config: Any) -> Path:
    sizes = {"vocab_size": 300, "eos_token_id": None, "max_position_embeddings": 512, "hidden_size": 128}
    model = write_hf(to, "llama", **{**sizes, **config})
    (model / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return model


def write_words(path: Path) -> Path:
    letters = np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz .,"), 2800)
    path.write_text("".join(letters))
    return path


def tune(*flags: object) -> int:
    return main(["tune", *map(str, flags)])
