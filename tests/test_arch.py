"""Every architecture against transformers: scores of a prompt and of 64 decoded tokens, random models and trained."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_models import MODELS, books, needs_models, scores

import ralo
from ralo.config import Fields
from ralo.model import Model
from ralo.sequence import Sequence

hf = pytest.importorskip("reference.hf", reason="needs torch and transformers: pip install ralo[reference]")

PROMPT, DECODED = 40, 64
BOUND = 2e-3  # nearly all of the difference is the float16 of the default cache
BOUND_EXACT = 2e-5  # with a float32 cache

IDS = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 1}
LLAMA = IDS | {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.01,
}
OPT = IDS | {
    "hidden_size": 40,
    "ffn_dim": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
}
GPT2 = IDS | {"n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 128, "layer_norm_epsilon": 0.01}
SIZES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA | {"head_dim": 10}, "opt": OPT, "gpt2": GPT2}

SLIDING = {"use_sliding_window": True, "sliding_window": 12}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, as many kv heads as heads": {"num_key_value_heads": 4},
    "llama, one kv head": {"num_key_value_heads": 1},
    "llama, attention biases": {"attention_bias": True},
    "llama, all biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama, wide heads": {"head_dim": 24},
    "llama, narrow heads": {"head_dim": 6, "num_key_value_heads": 1},
    "llama, odd sizes": {"hidden_size": 39, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 14}
    | {"intermediate_size": 77, "vocab_size": 101},
    "llama, wider than a tile": {"hidden_size": 136, "intermediate_size": 300, "head_dim": 34, "vocab_size": 263},
    "llama, relu": {"hidden_act": "relu"},
    "llama, gelu": {"hidden_act": "gelu"},
    "llama, one layer": {"num_hidden_layers": 1},
    "mistral": {"sliding_window": None},
    "mistral, window": {"sliding_window": 16},
    "mistral, window of two": {"sliding_window": 2},
    "mistral, window reached while decoding": {"sliding_window": PROMPT + 10},
    "qwen2": {},
    "qwen2, tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2, windows from layer 1": SLIDING | {"max_window_layers": 1},
    "qwen2, windows by layer": SLIDING | {"num_hidden_layers": 3, "layer_types": MIXED},
    "qwen3": {"head_dim": 18},
    "qwen3, tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16},
    "qwen3, windows by layer": SLIDING | {"num_hidden_layers": 3, "layer_types": MIXED, "head_dim": 8},
    "opt": {},
    "opt, no biases": {"enable_bias": False},
    "opt, untied": {"tie_word_embeddings": False, "seed": 1},
    "opt, odd sizes, gelu": {"hidden_size": 39, "num_attention_heads": 3, "ffn_dim": 77, "activation_function": "gelu"},
    "gpt2": {},
    "gpt2, untied": {"tie_word_embeddings": False, "n_inner": 72},
    "gpt2, odd sizes, relu": {"n_embd": 33, "n_head": 3, "n_inner": 71, "activation_function": "relu"},
    "gpt2, gelu": {"activation_function": "gelu"},
}


def make(case: str, **changes: Any) -> Any:
    model_type = case.partition(",")[0]
    return hf.random_model(model_type, **{**SIZES[model_type], **CASES.get(case, {}), **changes})


def prompt_of(model: Any, length: int = PROMPT) -> list[int]:
    return np.random.default_rng(0).integers(0, model.config.vocab_size, length).tolist()


def assert_same(found: Model, expected: Any, prompt: list[int]) -> None:
    tokens, want = hf.greedy(expected, prompt, DECODED)
    assert want.std() > 0.3, "scores too alike to show a mistake"
    for seq, bound in ((Sequence.empty(found.cfg, "f32"), BOUND_EXACT), (Sequence.empty(found.cfg), BOUND)):
        got = scores(found, tokens, len(prompt), seq)
        np.testing.assert_allclose(got, want, rtol=0, atol=bound)
        np.testing.assert_array_equal(got.argmax(axis=1), want.argmax(axis=1))


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path: Path, case: str) -> None:
    expected = make(case)
    found = ralo.load(hf.save(expected, tmp_path), quant="f32").model
    assert_same(found, expected, prompt_of(expected))


@pytest.mark.parametrize(("case", "window"), [("llama", {}), ("mistral", {"sliding_window": 600}), ("gpt2", {})])
def test_prompts_longer_than_a_chunk(tmp_path: Path, case: str, window: dict[str, int]) -> None:
    """Three chunks of prefill, and decoding over more keys than one task takes."""
    length = {"n_positions": 1300} if case == "gpt2" else {"max_position_embeddings": 1300}
    expected = make(case, **length, **window)
    found = ralo.load(hf.save(expected, tmp_path), quant="f32").model
    tokens, want = hf.greedy(expected, prompt_of(expected, 1200), 20)
    seq = Sequence.empty(found.cfg)
    got = [found.prefill(tokens[:1200], seq), *(found.step(token, seq) for token in tokens[1200:])]
    np.testing.assert_allclose(got, want[1199:], rtol=0, atol=BOUND)
    np.testing.assert_array_equal(np.argmax(got, axis=1), want[1199:].argmax(axis=1))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("case", ["llama, all biases", "gpt2, untied"])
def test_shards_of_every_dtype(tmp_path: Path, case: str, dtype: str) -> None:
    expected = make(case, seed=1)
    hf.save(expected, tmp_path, dtype, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(ralo.load(tmp_path, quant="f32").model, expected, prompt_of(expected))


@pytest.mark.parametrize(("case", "inner"), [("gpt2", "transformer"), ("opt", "model")])
def test_checkpoints_of_the_bare_decoder(tmp_path: Path, case: str, inner: str) -> None:
    expected = make(case, seed=2)
    getattr(expected, inner).save_pretrained(tmp_path)
    assert_same(ralo.load(tmp_path, quant="f32").model, expected, prompt_of(expected))


def test_windows_without_a_list_of_layers(tmp_path: Path) -> None:
    """Files of transformers 4 only say from which layer on."""
    expected = make("qwen2, windows from layer 1", num_hidden_layers=3, max_window_layers=2)
    hf.save(expected, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("layer_types") == ["full_attention", "full_attention", "sliding_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(ralo.load(tmp_path, quant="f32").model, expected, prompt_of(expected))


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_windows_that_are_not_mentioned(model_type: str) -> None:
    asked = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 30, "use_sliding_window": True}
    asked |= {"model_type": model_type, "head_dim": 16, "num_key_value_heads": 4, "vocab_size": 9}
    asked |= {"intermediate_size": 8, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}
    full = hf.transformers.AutoConfig.for_model(**asked).to_dict()
    family = import_module(f"ralo.arch.{model_type}")
    found = family.config(Fields(asked, Path("config.json")))
    assert found == family.config(Fields(full, Path("config.json"))) and 4096 in found.windows
    assert not any(family.config(Fields(asked | {"sliding_window": None}, Path("config.json"))).windows)


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt2"])
def test_configs_with_the_defaults_left_out(tmp_path: Path, case: str) -> None:
    """Older files write only what differs from the defaults of their class."""
    expected = make(case, rms_norm_eps=1e-6) if case not in ("opt", "gpt2") else make(case)
    hf.save(expected, tmp_path)
    defaults = type(expected.config)().to_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    short = {key: value for key, value in config.items() if key == "model_type" or value != defaults.get(key)}
    assert len(short) < len(config)
    (tmp_path / "config.json").write_text(json.dumps(short))
    assert_same(ralo.load(tmp_path, quant="f32").model, expected, prompt_of(expected))


@needs_models
@pytest.mark.parametrize("name", ["base", "mini"])
def test_trained_models_equal_transformers(name: str) -> None:
    """Equal with a float32 cache; the float16 one moves scores by 4e-3 on base and 5e-3 on mini, and no argmax."""
    found = ralo.load(MODELS / name, quant="f32").model
    tokens, want = hf.greedy(hf.load(MODELS / name), list(books(200)), DECODED)
    got = scores(found, tokens, 200, Sequence.empty(found.cfg, "f32"))
    np.testing.assert_allclose(got, want, rtol=0, atol=BOUND / 10)
    np.testing.assert_array_equal(got.argmax(axis=1), want.argmax(axis=1))
    rounded = scores(found, tokens, 200)
    np.testing.assert_allclose(rounded, want, rtol=0, atol=6e-3)
    np.testing.assert_array_equal(rounded.argmax(axis=1), want.argmax(axis=1))
