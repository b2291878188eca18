"""Configs and random weights of tiny models, with the names and shapes that transformers gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": True},
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "pad_token_id": 1,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
}


def make_config(model_type: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model; the vocabulary has an odd size, as real ones may."""
    common = {"model_type": model_type, "vocab_size": 97, "bos_token_id": 0, "eos_token_id": 1}
    return common | CONFIGS[model_type] | overrides


def make_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, F32]:
    """Random weights with the names and shapes that transformers gives a model of this config."""
    shapes = {"opt": _opt_shapes, "gpt2": _gpt2_shapes}.get(config["model_type"], _llama_shapes)(config)
    rng = np.random.default_rng(seed)
    return {name: _random(rng, name, shape, config) for name, shape in shapes}


def to_dtype(values: F32, dtype: str) -> NDArray[Any]:
    """The values rounded to f32, f16 or bf16; bf16 as its bits in uint16."""
    if dtype == "bf16":  # to nearest, ties to even
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype({"f32": np.float32, "f16": np.float16}[dtype])


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> F32:
    """Values of a size that keeps activations near 1, and norms and biases that are not trivial."""
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1 and name.endswith("weight"):
        return 1 + np.float32(0.1) * values
    if len(shape) == 1:
        return np.float32(0.1) * values
    if any(part in name for part in ("embed", "wte", "wpe")):
        return np.float32(0.5) * values
    inputs = shape[0] if config["model_type"] == "gpt2" and ".h." in name else shape[1]
    return np.float32(inputs**-0.5) * values


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _llama_shapes(config: Mapping[str, Any]) -> Shapes:
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    qkv_bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    o_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (width,)
        yield from _linear(f"{at}.self_attn.q_proj", queries, width, qkv_bias)
        yield from _linear(f"{at}.self_attn.k_proj", keys, width, qkv_bias)
        yield from _linear(f"{at}.self_attn.v_proj", keys, width, qkv_bias)
        yield from _linear(f"{at}.self_attn.o_proj", width, queries, o_bias)
        if config["model_type"] == "qwen3":
            yield f"{at}.self_attn.q_norm.weight", (head,)
            yield f"{at}.self_attn.k_norm.weight", (head,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
        yield from _linear(f"{at}.mlp.gate_proj", inner, width, mlp_bias)
        yield from _linear(f"{at}.mlp.up_proj", inner, width, mlp_bias)
        yield from _linear(f"{at}.mlp.down_proj", width, inner, mlp_bias)
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width)


def _norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _opt_shapes(config: Mapping[str, Any]) -> Shapes:
    width, inner = config["hidden_size"], config["ffn_dim"]
    yield "model.decoder.embed_tokens.weight", (config["vocab_size"], width)
    yield "model.decoder.embed_positions.weight", (config["max_position_embeddings"] + 2, width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.decoder.layers.{layer}"
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _linear(f"{at}.self_attn.{part}", width, width, True)
        yield from _norm(f"{at}.self_attn_layer_norm", width)
        yield from _linear(f"{at}.fc1", inner, width, True)
        yield from _linear(f"{at}.fc2", width, inner, True)
        yield from _norm(f"{at}.final_layer_norm", width)
    yield from _norm("model.decoder.final_layer_norm", width)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width)


def _gpt2_shapes(config: Mapping[str, Any]) -> Shapes:
    width = config["n_embd"]
    inner = config["n_inner"] or 4 * width
    yield "transformer.wte.weight", (config["vocab_size"], width)
    yield "transformer.wpe.weight", (config["n_positions"], width)
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        yield from _norm(f"{at}.ln_1", width)
        yield from _norm(f"{at}.ln_2", width)
        sizes = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
        sizes |= {"mlp.c_fc": (width, inner), "mlp.c_proj": (inner, width)}
        for part, (inputs, outputs) in sizes.items():  # input-first, unlike every other model here
            yield f"{at}.{part}.weight", (inputs, outputs)
            yield f"{at}.{part}.bias", (outputs,)
    yield from _norm("transformer.ln_f", width)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width)
