"""Architectures: one file each, named after the checkpoint's `model_type`.

A file has three functions. `config(fields)` reads the shape; `top(ckpt, cfg)` and `layer(ckpt, cfg, i)` say which
tensor of the checkpoint fills which of ralo's slots (slots.py lists them with their shapes).
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from ralo.config import Fields, ModelConfig
from ralo.errors import FormatError
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor

SUPPORTED = ("gpt2", "llama", "mistral", "opt", "qwen2", "qwen3")


class Architecture(Protocol):
    def config(self, fields: Fields) -> ModelConfig: ...
    def top(self, ckpt: Checkpoint, cfg: ModelConfig) -> dict[str, Tensor]: ...
    def layer(self, ckpt: Checkpoint, cfg: ModelConfig, i: int) -> dict[str, Tensor]: ...


def find(ckpt: Checkpoint) -> Architecture:
    name = ckpt.config.get("model_type")
    if not isinstance(name, str) or name not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        raise FormatError(ckpt.config_path, f"model_type {str(name)[:40]!r} is not supported; supported: {known}")
    return cast(Architecture, import_module(f"ralo.arch.{name}"))
