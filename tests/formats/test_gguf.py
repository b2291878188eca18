"""GGUF files: equal to the same model as a Hugging Face directory; test_gguf_refusals.py has the bad ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from tiny import write_gguf, write_hf
from tiny_models import make_config, make_weights

from ralo.errors import FormatError
from ralo.formats.gguf import open_file, read_metadata
from ralo.formats.hf import open_directory
from ralo.formats.tensor import Transposed, read, transpose

VOCABULARY = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers" / "ggml-vocab-llama-spm.gguf"
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "gpt2"]
QUANTS = ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]


@pytest.mark.skipif(not VOCABULARY.exists(), reason="the shared tokenizers are not beside the repository")
def test_metadata_equals_the_library() -> None:
    found = read_metadata(VOCABULARY)
    expected = {name: field.contents() for name, field in gguf.GGUFReader(VOCABULARY).fields.items()}
    for name, value in found.items():
        assert type(value) in (int, float, str, bool, list, np.ndarray)
        np.testing.assert_array_equal(value, expected[name])
    assert isinstance(found["tokenizer.ggml.tokens"], list) and found["tokenizer.ggml.scores"].dtype == np.float32
    with pytest.raises(FormatError, match="only a vocabulary"):
        open_file(VOCABULARY)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_equals_hugging_face(tmp_path: Path, model_type: str, tied: bool) -> None:
    same: dict[str, Any] = {"vocab_size": 323, "tie_word_embeddings": tied, "seed": 5}
    expected = open_directory(write_hf(tmp_path / "hf", model_type, dtype="f32", **same))
    found = open_file(write_gguf(tmp_path / "a.gguf", model_type, **same))
    assert found.tensors.keys() == expected.tensors.keys()
    for name, want in expected.tensors.items():
        assert found.tensors[name].shape == want.shape
        np.testing.assert_array_equal(read(found.tensors[name]), read(want))
    for key, value in found.config.items():
        if key in expected.config and key not in ("bos_token_id", "eos_token_id", "n_inner"):
            assert value == pytest.approx(expected.config[key]), key
    assert found.config_path == found.path == tmp_path / "a.gguf"


def test_biases_of_queries_and_keys_are_put_in_order_too(tmp_path: Path) -> None:
    found = open_file(write_gguf(tmp_path / "a.gguf", "llama", attention_bias=True, mlp_bias=True))
    weights = make_weights(make_config("llama", attention_bias=True, mlp_bias=True, vocab_size=323))
    assert found.tensors.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(read(found.tensors[name]), values)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("quant", QUANTS)
def test_rows_equal_the_library(tmp_path: Path, model_type: str, quant: str) -> None:
    width: dict[str, Any] = {"n_embd": 256} if model_type == "gpt2" else {"hidden_size": 256}
    path = write_gguf(tmp_path / "a.gguf", model_type, quant=quant, **width)
    stored = {entry.name: entry for entry in gguf.GGUFReader(path).tensors}
    for found in open_file(path).tensors.values():
        entry = stored[found.name]
        assert found.dtype == entry.tensor_type.name.lower()
        want = dequantize(entry.data, entry.tensor_type)
        if found.name.endswith(("attn_q.weight", "attn_k.weight")) and model_type == "llama":
            want = want.reshape(-1, 8, 2, 256).swapaxes(1, 2).reshape(-1, 256)  # heads of 16
        want = want.T if isinstance(found, Transposed) else want
        np.testing.assert_array_equal(read(found), want)
        for start, stop in ((0, 1), (3, 21), (found.shape[0] - 5, found.shape[0]), (4, 4)):
            np.testing.assert_array_equal(found.rows(start, stop), want[start:stop])
        found.release()


def test_quantised_weights_are_near_the_originals(tmp_path: Path) -> None:
    found = open_file(write_gguf(tmp_path / "a.gguf", "qwen2", quant="q8_0"))
    for name, values in make_weights(make_config("qwen2", vocab_size=323)).items():
        np.testing.assert_allclose(read(found.tensors[name]), values, atol=0.02)


def test_stored_is_for_plain_floats_in_order(tmp_path: Path) -> None:
    found = open_file(write_gguf(tmp_path / "a.gguf", "llama", quant="bf16")).tensors
    stored = found["model.embed_tokens.weight"].stored()
    assert stored is not None and stored.dtype == np.uint16 and stored.shape == (323, 64)
    assert found["model.layers.0.self_attn.q_proj.weight"].stored() is None
    found = open_file(write_gguf(tmp_path / "b.gguf", "llama", quant="q8_0")).tensors
    assert found["model.embed_tokens.weight"].stored() is None


def test_transpose_of_transpose_is_the_tensor(tmp_path: Path) -> None:
    found = open_file(write_gguf(tmp_path / "a.gguf", "gpt2")).tensors["transformer.h.0.mlp.c_fc.weight"]
    assert isinstance(found, Transposed) and transpose(found) is found.inner
    assert transpose(transpose(found.inner)) is found.inner


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "factors", "factors": [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1},
    ],
)
def test_rope_scaling(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    found = open_file(write_gguf(tmp_path / "a.gguf", "llama", rope_scaling=scaling))
    assert found.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in found.tensors


CONFIGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 8.0}, {"rope_scaling": None}),
    ({"llama.rope.scale_linear": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ({"llama.rope.freq_base": None}, {"rope_theta": 10000.0}),
    ({"llama.attention.key_length": None, "llama.attention.value_length": None}, {"head_dim": 16}),
    ({"llama.attention.key_length": None, "llama.rope.dimension_count": 16}, {"head_dim": 16}),
    ({"tokenizer.ggml.eot_token_id": 7}, {"bos_token_id": 1, "eos_token_id": [2, 7]}),
    ({"tokenizer.ggml.eot_token_id": 2}, {"eos_token_id": 2}),
    ({"llama.expert_count": 0, "split.count": 1}, {"model_type": "llama"}),
    ({"llama.attention.sliding_window": 9}, {"model_type": "mistral", "sliding_window": 9}),
]


@pytest.mark.parametrize(("metadata", "expected"), CONFIGS)
def test_config(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    found = open_file(write_gguf(tmp_path / "a.gguf", "llama", metadata=metadata)).config
    assert {key: found[key] for key in expected} == expected


def test_qwen_window_is_on_for_all_layers(tmp_path: Path) -> None:
    found = open_file(write_gguf(tmp_path / "a.gguf", "qwen2", sliding_window=8)).config
    assert (found["sliding_window"], found["use_sliding_window"], found["max_window_layers"]) == (8, True, 0)


def test_tokenizer_opens_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    fake = SimpleNamespace(from_gguf=lambda metadata, path: opened.append((metadata["tokenizer.ggml.model"], path)))
    monkeypatch.setitem(sys.modules, "ralo.tokenizer", fake)
    checkpoint = open_file(write_gguf(tmp_path / "a.gguf", "llama"))
    assert opened == []
    checkpoint.tokenizer()
    assert opened == [("llama", checkpoint.path)]
