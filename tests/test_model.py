"""The forward pass: the same scores however a text is cut into calls, for every kind of checkpoint and precision."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from shared_models import scores
from tiny import write_gguf, write_hf
from tiny_models import make_config, make_weights

import ralo
from ralo import _core
from ralo import model as model_file
from ralo.formats import safetensors
from ralo.matrix import QUANTS
from ralo.sequence import Sequence

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt2"]
TOKENS = np.random.default_rng(1).integers(2, 97, 100).tolist()


def open_tiny(folder: Path, model_type: str = "llama", quant: str = "f32", **config: Any) -> model_file.Model:
    return ralo.load(write_hf(folder, model_type, **config), quant=quant).model


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize(("kv", "bound"), [("f32", 1e-4), ("f16", 5e-3), ("int8", 0.15)])
def test_token_by_token_equals_all_at_once(tmp_path: Path, model_type: str, kv: str, bound: float) -> None:
    """The bound is what a value rounded the other way in the cache may do."""
    model = open_tiny(tmp_path, model_type)
    together = scores(model, TOKENS, len(TOKENS), Sequence.empty(model.cfg, kv))
    one_by_one = scores(model, TOKENS, 1, Sequence.empty(model.cfg, kv))
    assert together.shape == (100, 97)
    np.testing.assert_allclose(one_by_one, together, rtol=0, atol=bound)
    assert np.median(np.abs(one_by_one - together)) < bound / 20


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, chunk: int) -> None:
    model = open_tiny(tmp_path, model_type)
    whole = model.prefill(TOKENS, Sequence.empty(model.cfg))
    monkeypatch.setattr(model_file, "PREFILL_CHUNK", chunk)
    seq = Sequence.empty(model.cfg)
    np.testing.assert_allclose(model.prefill(TOKENS, seq), whole, rtol=0, atol=5e-3)
    assert seq.tokens == TOKENS


def test_prefill_in_chunks_where_angles_depend_on_the_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = {"rope_type": "dynamic", "factor": 8.0}
    model = open_tiny(tmp_path, max_position_embeddings=32, rope_scaling=scaling)
    whole = model.prefill(TOKENS, Sequence.empty(model.cfg))
    monkeypatch.setattr(model_file, "PREFILL_CHUNK", 48)
    np.testing.assert_allclose(model.prefill(TOKENS, Sequence.empty(model.cfg)), whole, rtol=0, atol=5e-3)


@pytest.mark.parametrize("quant", QUANTS)
def test_threads_change_no_bit(tmp_path: Path, quant: str) -> None:
    model = open_tiny(tmp_path, quant=quant, hidden_size=320, intermediate_size=640, num_attention_heads=20)
    before = _core.threads()
    try:
        found = []
        for threads in (1, 2, 3):
            _core.set_threads(threads)
            found.append(scores(model, TOKENS, 60))
    finally:
        _core.set_threads(before)
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.parametrize("quant", QUANTS)
def test_levels_agree(tmp_path: Path, level: str, quant: str) -> None:
    model = open_tiny(tmp_path, "qwen2", quant)
    got = scores(model, TOKENS, 60)
    _core.force_level("base")
    np.testing.assert_allclose(got, scores(model, TOKENS, 60), rtol=0, atol=5e-3)


@pytest.mark.parametrize("quant", QUANTS)
def test_a_call_leaves_no_state_behind(tmp_path: Path, quant: str) -> None:
    """Two texts that take turns get what each gets alone."""
    model = open_tiny(tmp_path, "qwen3", quant)
    texts = TOKENS[:40], TOKENS[40:80]
    alone = [scores(model, text, 20) for text in texts]
    seqs = [Sequence.empty(model.cfg) for _ in texts]
    found = [[model.logits(model.forward(text[:20], seq))] for text, seq in zip(texts, seqs, strict=True)]
    for step in range(20, 40):
        for i, text in enumerate(texts):
            found[i].append(model.step(text[step], seqs[i])[None])
    for a, b in zip(alone, found, strict=True):
        np.testing.assert_array_equal(np.concatenate(b), a)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_precisions_are_near_float32_and_differ(tmp_path: Path, model_type: str) -> None:
    """On random weights, which are harder to round than trained ones; test_quality.py has the trained ones."""
    folder = write_hf(tmp_path, model_type, dtype="f32")
    found = {quant: scores(ralo.load(folder, quant=quant).model, TOKENS, 50) for quant in QUANTS}
    spread = found["f32"].std()
    error = {quant: np.sqrt(np.mean((found[quant] - found["f32"]) ** 2)) / spread for quant in QUANTS}
    assert 0 < error["bf16"] < 0.02 and 0 < error["int8"] < 0.04 and error["int8"] < error["int4"] < 0.5, error


def test_bytes_read_are_those_of_the_matrices_and_of_the_keys(tmp_path: Path) -> None:
    model = open_tiny(tmp_path, "mistral", "int8")  # window 24
    cfg, seq = model.cfg, Sequence.empty(model.cfg)
    model.prefill(TOKENS[:10], seq)
    for token in TOKENS[10:60]:
        before = model.bytes_read
        model.step(token, seq)
        keys = min(len(seq), 24)
        cache = cfg.n_layers * cfg.n_kv_heads * keys * 2 * 2 * cfg.head_dim  # keys and values, 2 bytes each
        weights = sum(
            m.data.nbytes + m.scales.nbytes for m in model.weights.matrices().values() if m.scales is not None
        )
        assert model.bytes_read - before == weights + cache


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_gguf_float32_equals_the_directory(tmp_path: Path, model_type: str) -> None:
    folder = write_hf(tmp_path / "hf", model_type, dtype="f32", vocab_size=323, seed=3)
    file = write_gguf(tmp_path / "model.gguf", model_type, quant="f32", seed=3)
    want, got = (scores(ralo.load(path, quant="f32").model, TOKENS, 50) for path in (folder, file))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("quant", ["f16", "q8_0", "q4_0"])
def test_gguf_equals_a_directory_with_its_rounded_weights(tmp_path: Path, quant: str) -> None:
    original = write_hf(tmp_path / "hf", "llama", dtype="f32", vocab_size=323, seed=4)
    rounded = shutil.copytree(original, tmp_path / "rounded")
    weights = make_weights(make_config("llama", vocab_size=323), seed=4)
    kind = GGMLQuantizationType[quant.upper()]
    arrays = {name: _rounded(values, kind) for name, values in weights.items()}
    safetensors.write_file(rounded / "model.safetensors", arrays, {"format": "pt"})
    file = write_gguf(tmp_path / "model.gguf", "llama", quant=quant, seed=4)
    found = {path.name: scores(ralo.load(path, quant="f32").model, TOKENS, 50) for path in (original, rounded, file)}
    np.testing.assert_allclose(found["model.gguf"], found["rounded"], rtol=0, atol=5e-3)
    assert np.abs(found["model.gguf"] - found["rounded"]).mean() < 0.1 * np.abs(found["rounded"] - found["hf"]).mean()


def _rounded(values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    return values if values.ndim == 1 else dequantize(quantize(values, kind), kind).reshape(values.shape)


@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
@pytest.mark.parametrize("window", [2, 7, 24])
def test_a_few_tokens_together_are_bit_for_bit_those_alone_while_a_window_slides(tmp_path, window, kv):
    model = open_tiny(tmp_path / "mistral", "mistral", "int8", sliding_window=window)
    alone, seq = [], Sequence.empty(model.cfg, kv)
    for token in TOKENS[:40]:
        alone.append(model.step(token, seq))
    for few in (2, 5, model_file.FEW):
        seq, found = Sequence.empty(model.cfg, kv), []
        for start in range(0, 40, few):
            found.append(model.verify(TOKENS[start : min(start + few, 40)], seq))
        assert np.array_equal(np.concatenate(found), np.stack(alone))
