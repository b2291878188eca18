"""Models by name or path: every kind opens, and what is none of them is told so in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_gguf, write_hf

import ralo
from ralo import loader
from ralo.cli import main
from ralo.errors import RaloError
from ralo.formats import random

SHAPE = "random:D=64,L=2,F=128,H=4,K=2,V=256"
needs_mini = pytest.mark.skipif(not (loader.SHIPPED / "mini").is_dir(), reason="needs the model inside the package")


def refusal(name: str | Path, **options: Any) -> str:
    with pytest.raises(RaloError) as caught:
        ralo.load(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@needs_mini
def test_the_shipped_model_is_the_default() -> None:
    lm = ralo.load()
    assert lm.quant == "int8" and lm.model.cfg.arch == "llama"
    first = lm.generate("Once upon a time", 8, temperature=0)
    assert first.text and first.tokens == ralo.load("mini").generate("Once upon a time", 8, temperature=0).tokens


def test_the_same_model_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"vocab_size": 323, "seed": 5}
    hf = write_hf(tmp_path / "hf", "llama", dtype="f32", **shape)
    gguf = write_gguf(tmp_path / "model.gguf", "llama", quant="f32", **shape)
    packed = tmp_path / "packed"
    assert main(["pack", "-m", str(hf), "--quant", "f32", "-o", str(packed)]) == 0
    logits = []
    for path in (hf, gguf, packed, str(packed) + "/"):
        lm = ralo.load(path, "auto" if "packed" in str(path) else "f32")
        logits.append(lm.model.prefill([3, 4, 5], lm.new_sequence()))
    for other in logits[1:]:
        np.testing.assert_array_equal(logits[0], other)


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
def test_a_shape_without_weights_runs_and_is_the_same_each_time(quant: str) -> None:
    first, second = (ralo.load(SHAPE, quant).model for _ in range(2))
    assert (first.cfg.d_model, first.cfg.n_layers, first.cfg.n_kv_heads, first.cfg.vocab) == (64, 2, 2, 256)
    logits = [m.prefill([1, 2], ralo.load(SHAPE, quant).new_sequence()) for m in (first, second)]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert np.ptp(logits[0]) > 0


def test_a_random_tensor_is_the_same_in_pieces_and_differs_from_the_next() -> None:
    tensors = random.checkpoint(SHAPE).tensors
    q, k = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
    np.testing.assert_array_equal(q.rows(0, 64)[10:20], q.rows(10, 20))
    assert not np.array_equal(q.rows(0, 32), k.rows(0, 32))
    assert not np.array_equal(q.rows(0, 1), q.rows(1, 2))


def test_heads_and_context_of_a_shape_follow_or_are_given() -> None:
    assert random.checkpoint("random:D=64,L=1,F=64,H=4").config["num_key_value_heads"] == 4
    config = random.checkpoint("random:D=64,L=1,F=64,H=4,E=32,C=99").config
    assert (config["head_dim"], config["max_position_embeddings"], config["vocab_size"]) == (32, 99, 32000)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("random:", "'' is not one of D, L, F, H, K, V, E, C with a whole number, as in D=2048"),
        ("random:D=64", "L, F, H, K, E missing"),
        ("random:D=64,X=1", "'X=1' is not one of"),
        ("random:D=-64", "'D=-64' is not one of"),
        ("random:D=6.4", "'D=6.4' is not one of"),
        ("random:D=٣", "is not one of"),
        ("random:D=9999999999", "'D=9999999999' is not one of"),
        ("random:D=64,L=4097,F=64,H=4", "L is at most 4096"),
        ("random:D=4194304,L=1,F=64,H=4", "a width of 4194304 or more is not supported"),
        ("random:D=60,L=1,F=64,H=4", "rotary width 15 must be even"),
        ("random:D=64,L=1,F=64,H=4,K=3", "'num_attention_heads' 4 must be a multiple of 'num_key_value_heads' 3"),
    ],
)
def test_wrong_shapes(spec: str, reason: str) -> None:
    message = refusal(spec)
    assert message.startswith(spec) and reason in message


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "dir.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    assert refusal("").startswith("the model's name is empty; give 'mini', ")
    assert "nowhere: no such model; give 'mini', " in refusal(tmp_path / "nowhere")
    assert "nowhere.gguf: no such model" in refusal(tmp_path / "nowhere.gguf")
    assert "notes.txt: is not a model file that ralo reads" in refusal(tmp_path / "notes.txt")
    assert "notes.txt/x: no such model" in refusal(tmp_path / "notes.txt" / "x")
    assert "empty.gguf: is not a GGUF file" in refusal(tmp_path / "empty.gguf")
    assert "dir.gguf: is a directory without config.json" in refusal(tmp_path / "dir.gguf")
    assert "pipe.gguf: is not a regular file" in refusal(tmp_path / "pipe.gguf")
    assert "File name too long" in refusal("x" * 300)


def test_a_directory_of_another_kind(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "bloom"}))
    expected = "config.json: model_type 'bloom' is not supported; supported: gpt2, llama, mistral, opt, qwen2, qwen3"
    assert expected in refusal(model)
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "PyTorch .bin checkpoints can run code when opened; convert to safetensors" in refusal(model)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", "llama", vocab_size=97)
    write_hf(tmp_path / "other", "llama", vocab_size=300)
    (model / "tokenizer.json").write_bytes((tmp_path / "other" / "tokenizer.json").read_bytes())
    lm = ralo.load(model)
    with pytest.raises(RaloError, match="the tokenizer has 278 tokens, the model 97: they do not belong together"):
        lm.encode("x")


def test_a_packed_directory_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_hf(tmp_path / "model", "llama")
    assert main(["pack", "-m", str(model), "-o", str(tmp_path / "packed")]) == 0
    with pytest.raises(RaloError, match="packed: is packed; this needs the checkpoint that it was made from"):
        loader.open_checkpoint(str(tmp_path / "packed"))


def test_wrong_options() -> None:
    assert refusal(SHAPE, quant="int3") == "quant must be one of auto, f32, bf16, int8, int4, got 'int3'"
    assert refusal(SHAPE, kv="f64") == "kv must be one of f32, f16, int8, got 'f64'"
