"""GGUF tensors under their Hugging Face names, with rows and axes put back in Hugging Face order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ralo.errors import FormatError
from ralo.formats.gguf_config import ROPE_FACTORS
from ralo.formats.tensor import F32, Tensor, transpose

LLAMA = {  # blk.N.* are layers; the rest stands alone
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.N.attn_norm": "model.layers.N.input_layernorm",
    "blk.N.attn_q": "model.layers.N.self_attn.q_proj",
    "blk.N.attn_k": "model.layers.N.self_attn.k_proj",
    "blk.N.attn_v": "model.layers.N.self_attn.v_proj",
    "blk.N.attn_output": "model.layers.N.self_attn.o_proj",
    "blk.N.attn_q_norm": "model.layers.N.self_attn.q_norm",
    "blk.N.attn_k_norm": "model.layers.N.self_attn.k_norm",
    "blk.N.ffn_norm": "model.layers.N.post_attention_layernorm",
    "blk.N.ffn_gate": "model.layers.N.mlp.gate_proj",
    "blk.N.ffn_up": "model.layers.N.mlp.up_proj",
    "blk.N.ffn_down": "model.layers.N.mlp.down_proj",
}
GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.N.attn_norm": "transformer.h.N.ln_1",
    "blk.N.attn_qkv": "transformer.h.N.attn.c_attn",
    "blk.N.attn_output": "transformer.h.N.attn.c_proj",
    "blk.N.ffn_norm": "transformer.h.N.ln_2",
    "blk.N.ffn_up": "transformer.h.N.mlp.c_fc",
    "blk.N.ffn_down": "transformer.h.N.mlp.c_proj",
}
TABLES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gpt2": GPT2}
LINEAR = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9][0-9]{0,5})\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")


class Unpermuted:
    """Query or key rows that the file holds for interleaved RoPE, given back with each head's two halves in order.

    The file has the rows of a head as 0, E/2, 1, E/2 + 1, ...; Hugging Face has them as 0, 1, 2, ...
    """

    def __init__(self, inner: Tensor, head_dim: int) -> None:
        self.inner, self.head_dim = inner, head_dim

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def dtype(self) -> str:
        return self.inner.dtype

    def rows(self, start: int, stop: int) -> F32:
        width = self.head_dim
        first, last = start // width, -(-stop // width)  # the whole heads that hold the rows asked for
        pairs = self.inner.rows(first * width, last * width).reshape(last - first, width // 2, 2, *self.shape[1:])
        ordered = pairs.swapaxes(1, 2).reshape(-1, *self.shape[1:])  # (heads * E, D)
        return ordered[start - first * width : stop - first * width]

    def stored(self) -> None:
        return None

    def release(self) -> None:
        self.inner.release()


def hf_tensors(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor under its Hugging Face name; one that has none would be left out of the sums, so it is refused."""
    found = {}
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:  # is in the config
            continue
        match = NAME.fullmatch(name)
        hf_name = match and _hf_name(match["layer"], match["part"], match["kind"], config)
        if match is None or hf_name is None:
            raise FormatError(path, f"is not part of a {config['model_type']} model as ralo knows it", name)
        found[hf_name] = _in_hf_order(path, tensor, match["part"], match["kind"], config)
    return found


def _hf_name(layer: str | None, part: str, kind: str, config: Mapping[str, Any]) -> str | None:
    model_type = config["model_type"]
    if kind == "bias" and part not in LINEAR and not (model_type == "gpt2" and part.endswith("_norm")):
        return None
    if layer is None:
        stem = TABLES[model_type].get(part)
    elif int(layer) < config["n_layer" if model_type == "gpt2" else "num_hidden_layers"]:
        stem = TABLES[model_type].get(f"blk.N.{part}", "").replace(".N.", f".{layer}.")
    else:
        return None
    return f"{stem}.{kind}" if stem else None


def _in_hf_order(path: Path, tensor: Tensor, part: str, kind: str, config: Mapping[str, Any]) -> Tensor:
    if config["model_type"] in ("llama", "mistral") and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        rows = heads * config["head_dim"]
        if tensor.shape[0] != rows:
            raise FormatError(path, f"has {tensor.shape[0]} rows, the metadata asks for {rows}", tensor.name)
        return Unpermuted(tensor, config["head_dim"])
    if config["model_type"] == "gpt2" and part in LINEAR and kind == "weight":  # input-first in Hugging Face
        if len(tensor.shape) != 2:
            raise FormatError(path, f"has {len(tensor.shape)} axes, a linear map has 2", tensor.name)
        return transpose(tensor)
    return tensor
