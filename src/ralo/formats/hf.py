"""Hugging Face directories: config.json, safetensors in one file or in shards, and the tokenizer beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ralo.errors import FormatError
from ralo.formats import safetensors
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.mapped import StoredTensor, read_small
from ralo.formats.strict_json import parse_object

if TYPE_CHECKING:
    from ralo.tokenizer import Tokenizer

LONGEST_CONFIG = 4_000_000  # bytes
LONGEST_INDEX = 64_000_000
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def open_directory(path: Path) -> Checkpoint:
    """The checkpoint in a directory; tensors keep the names that the files give them."""
    if not os.path.isdir(path):  # of os.path because Path's own raises where a parent may not be entered
        raise FormatError(path, "is not a directory" if os.path.exists(path) else "no such directory")
    config_path = path / "config.json"
    config = parse_object(read_small(config_path, LONGEST_CONFIG), config_path)

    def tokenizer() -> Tokenizer:
        from ralo.tokenizer import from_directory

        return from_directory(path)

    return Checkpoint(path, config, _open_weights(path), tokenizer, config_path)


def _open_weights(path: Path) -> Mapping[str, StoredTensor]:
    if os.path.exists(path / WEIGHTS_NAME):
        return safetensors.open_file(path / WEIGHTS_NAME)
    if os.path.exists(path / INDEX_NAME):
        return _open_shards(path)
    if any(os.path.exists(path / name) for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")):
        raise FormatError(path, "PyTorch .bin checkpoints can run code when opened; convert to safetensors")
    raise FormatError(path, f"has neither {WEIGHTS_NAME} nor {INDEX_NAME}")


def _open_shards(path: Path) -> dict[str, StoredTensor]:
    """The tensors that the index lists, each from the shard where the index says it is."""
    index_path = path / INDEX_NAME
    weight_map = parse_object(read_small(index_path, LONGEST_INDEX), index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(index_path, "has no weight_map from tensor names to file names")
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain(shard):
            raise FormatError(index_path, f"shard {shard!r:.80} is not the name of a file in this directory", name[:80])
        if shard not in shards:
            shards[shard] = _open_shard(path / shard, index_path)
        if name not in shards[shard]:
            raise FormatError(index_path, f"is not in {shard:.80}, where the index puts it", name[:80])
        tensors[name] = shards[shard][name]
    return tensors


def _open_shard(path: Path, index_path: Path) -> dict[str, StoredTensor]:
    if not os.path.exists(path):
        raise FormatError(index_path, f"shard {path.name:.80} is missing; download it beside the index")
    return safetensors.open_file(path)


def _is_plain(name: str) -> bool:
    """Whether a name from a file can only mean a file in the same directory, on any system."""
    return name.endswith(".safetensors") and name.isprintable() and not any(mark in name for mark in "/\\:")
