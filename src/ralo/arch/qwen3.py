"""Qwen3: Qwen2 without biases, with a norm on each head of q and k."""

from __future__ import annotations

from ralo.arch.llama import layer as llama_layer
from ralo.arch.llama import top
from ralo.arch.qwen2 import config
from ralo.arch.slots import lookup
from ralo.config import ModelConfig
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor

__all__ = ["config", "layer", "top"]


def layer(ckpt: Checkpoint, cfg: ModelConfig, i: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{i}.self_attn."
    lookup(ckpt, {"q_norm": f"{prefix}q_norm.weight", "k_norm": f"{prefix}k_norm.weight"})  # must be there
    return llama_layer(ckpt, cfg, i)
