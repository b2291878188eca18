"""Qwen2 and Qwen2.5: Llama's shape with biases on q, k, v, and a sliding window in the later layers where asked for."""

from __future__ import annotations

from dataclasses import replace

from ralo.arch.llama import config as llama_config
from ralo.arch.llama import layer, top
from ralo.arch.mistral import DEFAULT_WINDOW
from ralo.config import Fields, ModelConfig

__all__ = ["config", "layer", "top"]

LAYER_TYPES = {"full_attention", "sliding_attention"}


def config(fields: Fields) -> ModelConfig:
    cfg = llama_config(fields)
    return replace(cfg, windows=_windows(fields, cfg.n_layers))


def _windows(fields: Fields, layers: int) -> tuple[int, ...]:
    window = fields.int("sliding_window", 1, 1 << 30, 0) if "sliding_window" in fields.values else DEFAULT_WINDOW
    if not fields.bool("use_sliding_window", False) or not window:
        return (0,) * layers
    types = fields.values.get("layer_types")
    if types is None:
        full = fields.int("max_window_layers", 0, 4096, 28)
        return tuple(0 if i < full else window for i in range(layers))
    if not isinstance(types, list) or len(types) != layers or any(t not in LAYER_TYPES for t in map(str, types)):
        raise fields.fail(f"'layer_types' must be {layers} entries of {', '.join(sorted(LAYER_TYPES))}")
    return tuple(window if t == "sliding_attention" else 0 for t in types)
