"""The trained models and the texts that lie beside the repository, and ralo's scores of given tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import ralo
from ralo.model import Model
from ralo.sequence import Sequence

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = SHARED / "models"
BOOKS = SHARED / "data" / "books-val.txt"
needs_models = pytest.mark.skipif(not MODELS.is_dir() or not BOOKS.is_file(), reason=f"needs the models in {MODELS}")


@cache
def books(tokens: int) -> tuple[int, ...]:
    """The first tokens of the validation text; all models have the same tokenizer."""
    text = BOOKS.read_text(encoding="utf-8").replace("\0", "")[: 8 * tokens]
    return tuple(ralo.load(MODELS / "mini").encode(text)[:tokens])


def scores(model: Model, tokens: list[int], prompt: int, seq: Sequence | None = None) -> NDArray[np.float32]:
    """Scores after every token (T, V): the first `prompt` tokens at once, the others one by one through the cache."""
    seq = Sequence.empty(model.cfg) if seq is None else seq
    first = model.logits(model.forward(tokens[:prompt], seq))
    return np.concatenate([first, *(model.step(token, seq)[None] for token in tokens[prompt:])])
