"""Tiny random checkpoints in every format that ralo reads, seeded and made in milliseconds, for everybody's tests.

write_hf(directory, "llama")             a Hugging Face directory with a working tokenizer
write_gguf(path, "llama", quant="q4_0")  the same kind of model as a GGUF file
Equal config and seed give equal weights (before rounding) in both. Config keys can be overridden by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray
from tiny_models import F32, make_config, make_weights, to_dtype
from tiny_tokens import make_bpe, make_spm, make_tokenizer

from ralo.formats import safetensors


def write_hf(
    directory: Path, model_type: str, *, dtype: str = "bf16", shards: int = 1, seed: int = 0, **overrides: Any
) -> Path:
    """A directory with config.json, tokenizer.json and safetensors in the given number of files."""
    config = make_config(model_type, **overrides)
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: to_dtype(values, dtype) for name, values in make_weights(config, seed).items()}
    names = list(stored)
    bf16 = names if dtype == "bf16" else []
    if shards == 1:
        safetensors.write_file(directory / "model.safetensors", stored, {"format": "pt"}, bf16=bf16)
    else:
        files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            part = {name: stored[name] for name in names if files[name] == file}
            safetensors.write_file(directory / file, part, {"format": "pt"}, bf16=bf16)
        _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    dtype_name = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype]
    _write_json(directory / "config.json", config | {"torch_dtype": dtype_name})
    _write_json(directory / "tokenizer.json", make_tokenizer(config["vocab_size"]))
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    _write_json(directory / "tokenizer_config.json", tokens)
    return directory


def write_gguf(
    path: Path,
    model_type: str,
    *,
    quant: str = "f32",
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """A GGUF file of a llama, mistral, qwen2, qwen3 or gpt2 with its vocabulary (llama, mistral: SentencePiece style).

    quant is the type of the matrices whose rows fit its blocks, the rest is f32. The gguf package cannot make K-quants,
    so q2_k to q6_k are random blocks (they need rows of 256: hidden_size=256). metadata adds or replaces raw keys; None
    removes one. rope_scaling may be {"rope_type": "factors", "factors": [...]}, which writes rope_freqs.weight.
    """
    config = make_config(model_type, **{"vocab_size": 323} | overrides)
    arch = "llama" if model_type == "mistral" else model_type
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (_gguf_settings(config, arch) | _gguf_vocabulary(config, arch) | dict(metadata or {})).items():
        if value is not None:
            value_type = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, value_type)
    layers = config["n_layer"] if arch == "gpt2" else config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], layers)
    rng = np.random.default_rng(seed)
    for name, values in make_weights(config, seed).items():
        data, kind = _gguf_data(_gguf_order(name, values, config), quant, rng)
        gguf_name = names.get_name(name, (".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, data, raw_dtype=kind)
    if (scaling := config.get("rope_scaling")) and scaling["rope_type"] == "factors":
        writer.add_tensor("rope_freqs.weight", np.array(scaling["factors"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_settings(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    if arch == "gpt2":
        found = {
            "embedding_length": config["n_embd"],
            "block_count": config["n_layer"],
            "attention.head_count": config["n_head"],
            "context_length": config["n_positions"],
            "feed_forward_length": config["n_inner"] or 4 * config["n_embd"],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        }
    else:
        found = {
            "embedding_length": config["hidden_size"],
            "block_count": config["num_hidden_layers"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "context_length": config["max_position_embeddings"],
            "feed_forward_length": config["intermediate_size"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": config["rope_theta"],
            "attention.sliding_window": config.get("sliding_window"),
        }
        if (scaling := config.get("rope_scaling")) and scaling["rope_type"] != "factors":
            found["rope.scaling.type"] = scaling["rope_type"]
            found["rope.scaling.factor"] = scaling["factor"]
            found["rope.scaling.original_context_length"] = scaling.get("original_max_position_embeddings")
    return {f"{arch}.{key}": value for key, value in found.items()}


def _gguf_vocabulary(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    if arch == "llama":
        tokens, scores, kinds = make_spm(config["vocab_size"])
        own = {"model": "llama", "scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
        own["add_bos_token"] = True
    else:
        tokens, merges = make_bpe(config["vocab_size"])
        tokens += [f"<unused{i}>" for i in range(config["vocab_size"] - len(tokens))]
        kinds = [3, 3] + [1] * (len(tokens) - 2)  # control, normal
        own = {"model": "gpt2", "pre": "gpt-2", "merges": merges, "bos_token_id": 0, "eos_token_id": 1}
    return {f"tokenizer.ggml.{key}": value for key, value in ({"tokens": tokens, "token_type": kinds} | own).items()}


def _gguf_order(name: str, values: F32, config: Mapping[str, Any]) -> F32:
    """Rows and axes as the GGUF conversion leaves them: q and k for interleaved RoPE, linear maps output-first."""
    if config["model_type"] in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    if config["model_type"] == "gpt2" and ".h." in name and values.ndim == 2:
        return np.ascontiguousarray(values.T)
    return values


def _gguf_data(values: F32, quant: str, rng: np.random.Generator) -> tuple[NDArray[Any], gguf.GGMLQuantizationType]:
    kind = gguf.GGMLQuantizationType[quant.upper()]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim == 1 or values.shape[-1] % block:
        return values, gguf.GGMLQuantizationType.F32
    if not quant.endswith("_k"):
        return quantize(values, kind), kind
    blocks = rng.integers(0, 256, (values.size // block, block_bytes), dtype=np.uint8)
    scale_at = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}[quant]
    for position in scale_at:  # any byte is a valid weight, but a random float16 scale may be huge, inf or nan
        scales = rng.uniform(1e-5, 1e-4, len(blocks)).astype(np.float16)
        blocks[:, position : position + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(values.shape[0], -1), kind


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
