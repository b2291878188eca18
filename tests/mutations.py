"""Damage for the fuzz test: the ways in which bytes, JSON, safetensors headers and GGUF metadata go wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from copy import deepcopy
from random import Random
from typing import Any

INTEGERS = (-1, 0, 1, 2, 3, 7, 64, 255, 4097, 2**24 + 1, 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63, 2**64 - 1, 10**30)
FLOATS = (-1.0, 0.0, 0.5, 1e-300, 1e30, 1e308, float("nan"), float("inf"))
TEXTS = ("", "x", "llama", "gelu", "yarn", "</s>", "\n\n", "é🦙", "../../etc/passwd", "F16", "{{ 1/0 }}", "a" * 3000)
NESTED = ([], {}, [[]], [1, 2], [None], {"content": "</s>"}, {"rope_type": "yarn", "factor": 2}, [[["x"] * 9] * 9])
ODD = (None, True, False, *INTEGERS, *FLOATS, *TEXTS, *NESTED)


def damage_bytes(data: bytes, rng: Random, other: bytes = b"") -> bytes:
    """Flipped bits, a run of one byte, a cut, a piece repeated, dropped, moved or taken from another file."""
    size = len(data)
    at = rng.randrange(min(size, rng.choice((16, 512, 8192, size))) or 1)  # headers come first: aim at them more often
    run = min(rng.choice((1, 2, 4, 8, 64, 1000)), size - at)
    kind = rng.randrange(7)
    if kind == 0:
        out = bytearray(data)
        for _ in range(rng.choice((1, 1, 3, 20))):
            place = rng.randrange(at, size)
            out[place] ^= 1 << rng.randrange(8)
        return bytes(out)
    if kind == 1:
        return data[:at] + bytes([rng.choice((0, 0xFF, 0x7F, 0x20, rng.randrange(256)))]) * run + data[at + run :]
    if kind == 2:
        return data[: rng.choice((at, size - run, size // 2))]
    if kind == 3:
        return data[:at] + data[at : at + run] * rng.choice((2, 3)) + data[at + run :]
    if kind == 4:
        return data[:at] + data[at + run :]
    if kind == 5:
        value = rng.choice(INTEGERS) % 2**64
        return data[:at] + struct.pack("<Q", value)[: rng.choice((4, 8))] + data[at + 8 :]
    source = other or data
    start = rng.randrange(len(source) or 1)
    return data[:at] + source[start : start + run] + data[at + (run if rng.random() < 0.5 else 0) :]


def damage_json(data: bytes, rng: Random) -> bytes:
    """One or a few values, keys or entries of a JSON file changed."""
    kind = rng.randrange(12)
    if kind == 0:  # wrong as text
        bad = (b"", b"null", b"[]", b"{", data + data, b"\xff\xfe" + data, b"[" * 100_000, data.replace(b":", b"", 1))
        return rng.choice(bad)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        damage_tree(value, rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if kind == 1 and "," in text:  # the same entry twice
        first, rest = text[1:].split(",", 1)
        text = text[0] + ",".join((first, first, rest))
    return text.encode("utf-8", "replace")


def damage_tree(value: Any, rng: Random) -> None:
    """Changes one place of a parsed JSON object, shallow places more often than deep ones."""
    spot = value
    while (inner := [v for v in _children(spot) if v and isinstance(v, dict | list)]) and rng.random() < 0.6:
        spot = rng.choice(inner)
    if not spot:
        return
    key = rng.choice(list(spot)) if isinstance(spot, dict) else rng.randrange(len(spot))
    kind = rng.randrange(8)
    if kind == 0:
        del spot[key]
    elif kind == 1 and isinstance(spot, dict):
        spot[key + rng.choice(("x", "", "_proj", "\n"))] = spot.pop(key)
    elif kind == 2 and isinstance(spot, list):
        spot.insert(key, spot[key])
    elif kind == 3:
        other = rng.choice(list(spot)) if isinstance(spot, dict) else rng.randrange(len(spot))
        spot[key], spot[other] = spot[other], spot[key]
    elif kind <= 5 and type(spot[key]) in (int, float):
        spot[key] = rng.choice((spot[key] + 1, spot[key] - 1, spot[key] * 2, -spot[key], str(spot[key]), spot[key] / 2))
    else:
        spot[key] = deepcopy(rng.choice(ODD))  # a copy: the next change may go into it


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []


def damage_safetensors(data: bytes, rng: Random) -> bytes:
    """The header's entries changed, or its length, or the bytes as they are."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(8)
    if kind == 0:
        wrong = rng.choice((0, 1, length - 1, length + 1, length * 2, len(data), 10**8, 2**63, 2**64 - 1))
        return wrong.to_bytes(8, "little") + data[8:]
    if kind == 1:  # two tensors change places, or names
        entries = json.loads(header)
        first, second = rng.sample([name for name in entries if name != "__metadata__"], 2)
        entries[first], entries[second] = entries[second], entries[first]
        header = json.dumps(entries).encode()
    elif kind <= 4:
        header = damage_json(header, rng)
    else:
        return damage_bytes(data, rng)
    return len(header).to_bytes(8, "little") + header + body


def damage_metadata(keys: list[str], rng: Random) -> dict[str, Any]:
    """GGUF keys to leave out, or to write with another value of the same or of another type."""
    out: dict[str, Any] = {}
    for key in rng.sample(keys, rng.choice((1, 1, 2, 4))):
        numbers = [v % 2**32 if isinstance(v, int) else v for v in INTEGERS]
        lists = [[1, 2, 3], ["a", "b"], [0.5, float("nan")], ["</s>"] * 2, [2**31 - 1] * 400]
        floats = [v for v in FLOATS if v != 1e308]  # the writer has 32 bits for them
        out[key] = rng.choice(
            (None, True, rng.choice(numbers), rng.choice(floats), rng.choice(TEXTS), rng.choice(lists))
        )
    return out


def damage_settings(settings: Mapping[str, tuple[Any, ...]]) -> Callable[[bytes, Random], bytes]:
    """Sets one to three keys of a JSON file to values that could be meant."""

    def change(data: bytes, rng: Random) -> bytes:
        value = json.loads(data)
        inner = value.get("config") if isinstance(value.get("config"), dict) else value  # ralo.json holds the config
        for key in rng.choices(sorted(settings), k=rng.choice((1, 1, 2, 3))):
            inner[key] = rng.choice((*settings[key], rng.choice(ODD)))
        return json.dumps(value).encode()

    return change


SIZES = (-1, 0, 1, 2, 3, 6, 8, 64, 4096, 2**24, 2**31, 0.5, "2")
ROPES = tuple(
    {key: kind, "factor": factor, **more}
    for key in ("type", "rope_type")
    for kind in ("linear", "dynamic", "llama3", "yarn", "longrope", "factors", "default", None, 1)
    for factor in (2.0, 1e-3, 1e6, 0, "4")
    for more in ({}, {"original_max_position_embeddings": 1, "low_freq_factor": 2, "high_freq_factor": 1})
)
CONFIG: dict[str, tuple[Any, ...]] = {
    "rope_scaling": ROPES,
    "rope_parameters": (
        *ROPES,
        {"rope_theta": 1.0},
        {"rope_type": "yarn", "beta_fast": 1e-3, "mscale": 1e6, "factor": 9},
    ),
    "rope_theta": (1, 1.0, 1e12, 1e-9, 2, -5.0),
    "partial_rotary_factor": (0, 0.1, 0.25, 0.5, 0.75, 1, 2, -1),
    "hidden_act": ("relu", "gelu", "relu2", "gelu_new", "tanh"),
    "activation_function": ("silu", "gelu", "mish"),
    "rms_norm_eps": (0, 1, 1e-45, 1e30),
    "layer_norm_epsilon": (0, 1, 2),
    "sliding_window": (1, 2, 2**30, 0),
    "use_sliding_window": (True, False, 1),
    "max_window_layers": (0, 1, 99),
    "layer_types": (["full_attention", "sliding_attention"], ["full_attention"], [{}, []], "full_attention"),
    "tie_word_embeddings": (True, False),
    "model_type": ("llama", "mistral", "qwen2", "qwen3", "opt", "gpt2", "bloom", "../llama"),
    "eos_token_id": (96, 97, 2**40, [0, 1, 2], [-1], -1),
    "quant": ("f32", "bf16", "int8", "int4"),
    "scale_attn_weights": (False, True),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_attention_heads", "num_key_value_heads", "head_dim"), SIZES),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "vocab_size", "hidden_size", "n_embd", "n_inner"), SIZES
    ),
}
LONG = "a" * 20_000
TOKENIZER: dict[str, tuple[Any, ...]] = {
    "normalizer": (
        {"type": "Lowercase"},
        {"type": "Prepend", "prepend": LONG},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
        {"type": "Replace", "pattern": {"Regex": "(a*)*"}, "content": LONG},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Strip"}]},
        {"type": "BertNormalizer"},
    ),
    "pre_tokenizer": (
        None,
        {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Removed", "invert": True},
        {"type": "Split", "pattern": {"Regex": "[("}, "behavior": "Isolated", "invert": False},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        {"type": "Digits", "individual_digits": True},
    ),
    "post_processor": (
        {"type": "ByteLevel"},
        {"type": "RobertaProcessing", "sep": ["</s>", 2**32 - 1], "cls": ["<s>", 98]},
        {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 500,
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0] * 5000, "tokens": ["<s>"] * 5000}},
        },
    ),
    "decoder": (
        None,
        {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        {"type": "Replace", "pattern": {"String": ""}, "content": LONG},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    ),
    "model": (
        {"type": "WordLevel", "vocab": {"the": 0, "in": 2**32 - 1}, "unk_token": "the"},
        {"type": "WordLevel", "vocab": {}, "unk_token": "none"},
        {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7},
        {"type": "Unigram", "vocab": [["<unk>", 0.0], ["th", -1e308], ["e", 5]], "unk_id": 0, "byte_fallback": True},
        {"type": "Unigram", "vocab": [], "unk_id": None},
        {"type": "WordPiece", "vocab": {"[UNK]": 0}, "unk_token": "x", "max_input_chars_per_word": 0},
        {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "nope", "byte_fallback": True},
        {"type": "BPE", "vocab": {"t": 2**32 - 1, "h": 3}, "merges": [["t", "h"]]},
    ),
    "padding": ({"strategy": {"Fixed": 2**40}, "direction": "Left", "pad_id": 0, "pad_token": "x"},),
    "truncation": ({"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 99},),
}
TEMPLATES = (
    "{{ 'a' * 10**9 }}",
    "{{ messages[5].content }}",
    "{{ ''.__class__.__mro__ }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no\\nroles') }}",
    "{% include 'x' %}",
    "",
    LONG,
)

BY_NAME: dict[str, tuple[Callable[[bytes, Random], bytes], ...]] = {
    "config.json": (damage_json, damage_settings(CONFIG)),
    "ralo.json": (damage_json, damage_settings(CONFIG)),
    "tokenizer.json": (damage_json, damage_settings(TOKENIZER)),
    "tokenizer_config.json": (damage_json, damage_settings({"chat_template": TEMPLATES, "eos_token": ("<s>", "nope")})),
    ".json": (damage_json,),
    ".safetensors": (damage_safetensors,),
}
