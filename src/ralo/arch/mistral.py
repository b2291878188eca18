"""Mistral: Llama's shape with a sliding window over all layers where the config gives one."""

from __future__ import annotations

from dataclasses import replace

from ralo.arch.llama import config as llama_config
from ralo.arch.llama import layer, top
from ralo.config import Fields, ModelConfig

__all__ = ["config", "layer", "top"]

DEFAULT_WINDOW = 4096  # of a config that does not mention it; null means none


def config(fields: Fields) -> ModelConfig:
    cfg = llama_config(fields)
    window = fields.int("sliding_window", 1, 1 << 30, 0) if "sliding_window" in fields.values else DEFAULT_WINDOW
    return replace(cfg, windows=(window,) * cfg.n_layers)
