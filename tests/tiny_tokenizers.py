"""Tokenizers for the tests: the vocabularies in shared/, and tiny ones as GGUF metadata or as a directory."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokens import make_bpe, make_spm, make_tokenizer

from ralo.formats.gguf import read_metadata
from ralo.tokenizer import Tokenizer, from_directory, from_gguf

SHARED = Path(__file__).resolve().parents[2] / "shared"
VOCABS = SHARED / "data" / "tokenizers"
needs_shared = pytest.mark.skipif(not VOCABS.is_dir(), reason=f"needs the vocabularies in {VOCABS}")

SPACE = "\u2581"
TEXTS = (
    "Hello, world!",
    " leading and  double   spaces ",
    "tabs\tand\nnew\r\nlines\n\n",
    "Ünïcode, 我想在apple工作, हिन्दी, العربية",
    "🦙🚀 😶\u200d🌫️ ✅",
    "3.14159 and 1000000",
    "it's they'LL I'd",
    "def f(x):\n    return x**2  # squared",
)


@cache
def open_shared(kind: str) -> Tokenizer:
    """SentencePiece with byte tokens (llama-spm), byte-level BPE from a GGUF file (gpt-2) or a directory (mini)."""
    if kind == "mini":
        return from_directory(SHARED / "models" / "mini")
    path = VOCABS / f"ggml-vocab-{kind}.gguf"
    return from_gguf(read_metadata(path), path)


def spm_metadata(size: int = 400, **changes: Any) -> dict[str, Any]:
    tokens, scores, kinds = make_spm(size)
    metadata = {"ggml.model": "llama", "ggml.tokens": tokens, "ggml.scores": np.array(scores, np.float32)}
    metadata |= {"ggml.token_type": np.array(kinds, np.int32), "ggml.bos_token_id": 1, "ggml.eos_token_id": 2}
    return changed(metadata, changes)


def bpe_metadata(size: int = 300, **changes: Any) -> dict[str, Any]:
    tokens, merges = make_bpe(size)
    metadata = {"ggml.model": "gpt2", "ggml.pre": "llama-bpe", "ggml.tokens": tokens, "ggml.merges": merges}
    metadata |= {"ggml.token_type": [3, 3] + [1] * (len(tokens) - 2), "ggml.bos_token_id": 0, "ggml.eos_token_id": 1}
    return changed(metadata, changes)


def changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The metadata under full keys, with some values replaced, or taken out where the new value is None."""
    metadata |= {"chat_template" if key == "chat_template" else f"ggml.{key}": value for key, value in changes.items()}
    return {f"tokenizer.{key}": value for key, value in metadata.items() if value is not None}


def write_directory(folder: Path, tokenizer: Any = None, **configs: Any) -> Path:
    """A model directory: a tiny tokenizer.json, and a JSON file for each keyword."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer or make_tokenizer(300)))
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
