"""GGUF metadata as a Hugging Face config: the same facts under the other names, each checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ralo.errors import FormatError
from ralo.formats.tensor import Tensor, read

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
LARGEST = 2**31 - 1
ROPE_FACTORS = "rope_freqs.weight"

REFUSED = (  # unless 0; other architectures use them, and fine-tunes may
    "expert_count",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)


class Settings:
    """The metadata of one architecture, read with its type and range checked."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], prefix: str) -> None:
        self.path, self.metadata, self.prefix = path, metadata, prefix

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= high:  # type() and not isinstance(): True is no count
            raise self.wrong(key, value, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def only(self, key: str, neutral: float) -> None:
        """Refuse a setting that changes what the model computes in a way that ralo does not know."""
        value = self.get(key, neutral)
        if type(value) not in (int, float) or value != neutral:
            raise self.wrong(key, value, f"{neutral}, the only value that ralo computes with")

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(self.prefix + key, default)

    def wrong(self, key: str, value: Any, expected: str) -> FormatError:
        if value is None:
            return FormatError(self.path, f"lacks the key {self.prefix}{key}")
        shown = f"{value!r:.40}" if isinstance(value, (bool, int, float, str)) else "an array"
        return FormatError(self.path, f"{self.prefix}{key} is {shown}, not {expected}")


def hf_config(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config.json that the model would have as a Hugging Face directory."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise FormatError(path, f"has architecture {arch!r:.40}; ralo reads GGUF files of {known}")
    settings = Settings(path, metadata, f"{arch}.")
    for key in REFUSED:
        settings.only(key, 0)
    vocab_size = _vocab_size(path, tensors)
    own = _gpt2(settings) if arch == "gpt2" else _llama(settings, arch, tensors)
    return {
        **own,
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        **_special_tokens(path, metadata, vocab_size),
    }


def _vocab_size(path: Path, tensors: Mapping[str, Tensor]) -> int:
    if "token_embd.weight" not in tensors:
        raise FormatError(path, "missing; the file is incomplete", "token_embd.weight")
    return tensors["token_embd.weight"].shape[0]


def _llama(settings: Settings, arch: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    hidden = settings.integer("embedding_length")
    heads = settings.integer("attention.head_count")
    kv_heads = settings.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise FormatError(settings.path, f"has {heads} heads, not a multiple of its {kv_heads} key and value heads")
    head_dim = _head_dim(settings, hidden, heads)
    config = {
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": settings.integer("feed_forward_length"),
        "num_hidden_layers": settings.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(settings, head_dim, tensors.get(ROPE_FACTORS)),
        "max_position_embeddings": settings.integer("context_length"),
    }
    if window := settings.integer("attention.sliding_window", 0, low=0):
        config["sliding_window"] = window
        if arch == "llama":  # Hugging Face calls a llama with a window a mistral
            config["model_type"] = "mistral"
        else:  # and leaves a qwen's off unless told that it is on, and from which layer
            config |= {"use_sliding_window": True, "max_window_layers": 0}
    return config


def _gpt2(settings: Settings) -> dict[str, Any]:
    width, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    if width % heads:
        raise FormatError(settings.path, f"has width {width}, not a multiple of its {heads} heads")
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": settings.integer("block_count"),
        "n_head": heads,
        "n_positions": settings.integer("context_length"),
        "n_inner": settings.integer("feed_forward_length", 4 * width),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": settings.number("attention.layer_norm_epsilon"),
    }


def _head_dim(settings: Settings, hidden: int, heads: int) -> int:
    rotated = settings.integer("rope.dimension_count", 0, low=0)
    head_dim = settings.integer("attention.key_length", rotated or hidden // heads)
    values = settings.integer("attention.value_length", head_dim)
    if values != head_dim:
        reason = f"has keys of length {head_dim} and values of length {values}; ralo needs them equal"
        raise FormatError(settings.path, reason)
    if rotated not in (0, head_dim):
        reason = f"rotates {rotated} of the {head_dim} positions of a head; ralo rotates all or none"
        raise FormatError(settings.path, reason)
    if head_dim % 2:
        raise FormatError(settings.path, f"has heads of odd width {head_dim}")
    return head_dim


def _rope_scaling(settings: Settings, head_dim: int, factors: Tensor | None) -> dict[str, Any] | None:
    factor = settings.number("rope.scaling.factor", settings.get("rope.scale_linear", 1.0))
    kind = settings.get("rope.scaling.type", "linear")  # the default when only a factor is given
    if not isinstance(kind, str) or kind not in ("none", "linear", "yarn"):
        raise settings.wrong("rope.scaling.type", kind, "one of none, linear, yarn")
    scaled = kind == "yarn" or (kind == "linear" and factor != 1)
    if factors is not None:
        if scaled:
            raise FormatError(settings.path, f"has both {ROPE_FACTORS} and {kind} RoPE scaling")
        return {"rope_type": "factors", "factors": _rope_factors(settings.path, factors, head_dim // 2)}
    if not scaled:
        return None
    return {"rope_type": kind, "factor": factor} | (_yarn(settings) if kind == "yarn" else {})


def _yarn(settings: Settings) -> dict[str, Any]:
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        settings.only(f"rope.scaling.{key}", 1)
    settings.only("rope.scaling.yarn_log_multiplier", 0)
    context = settings.integer("context_length")
    return {
        "original_max_position_embeddings": settings.integer("rope.scaling.original_context_length", context),
        "beta_fast": settings.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": settings.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _rope_factors(path: Path, tensor: Tensor, count: int) -> list[float]:
    """What each RoPE frequency is divided by (Llama 3's scaling comes as this tensor)."""
    if tensor.shape != (count,):
        raise FormatError(path, f"has shape {tensor.shape}, the heads ask for {(count,)}", ROPE_FACTORS)
    factors = read(tensor)  # (count,)
    if not np.all((factors > 0) & np.isfinite(factors)):
        raise FormatError(path, "has a factor that is not a positive number", ROPE_FACTORS)
    return [float(factor) for factor in factors]


def _special_tokens(path: Path, metadata: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The ids that start and end a text; a chat model may end a turn with a second one."""
    settings = Settings(path, metadata, "tokenizer.ggml.")
    ids = {
        name: settings.integer(f"{name}_token_id", low=0, high=vocab_size - 1)
        for name in ("bos", "eos", "eot")
        if settings.get(f"{name}_token_id") is not None
    }
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if name in ids))
    found: dict[str, Any] = {"bos_token_id": ids["bos"]} if "bos" in ids else {}
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found
