"""Hugging Face directories: the tiny ones equal what transformers would make, and bad ones get one clear line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import write_hf
from tiny_models import CONFIGS, make_config, make_weights, to_dtype

from ralo.errors import FormatError
from ralo.formats.hf import LONGEST_CONFIG, open_directory
from ralo.formats.tensor import read

MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"


def refusal(path: Path) -> str:
    """The line with which the directory is refused."""
    with pytest.raises(FormatError) as caught:
        open_directory(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and len(message) < 1000
    return message


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("tied", [True, False])
def test_tiny_models_are_as_transformers_makes_them(model_type: str, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = make_config(model_type, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if tied:
        expected.pop("lm_head.weight")
    assert {name: values.shape for name, values in make_weights(config).items()} == expected


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_tensor_is_read(tmp_path: Path, model_type: str, dtype: str) -> None:
    checkpoint = open_directory(write_hf(tmp_path, model_type, dtype=dtype, seed=3))
    weights = make_weights(make_config(model_type), seed=3)
    assert checkpoint.tensors.keys() == weights.keys() and checkpoint.config["model_type"] == model_type
    for name, values in weights.items():
        tensor = checkpoint.tensor(name, values.shape)
        assert tensor.dtype == dtype and tensor.name == name
        np.testing.assert_array_equal(tensor.stored(), to_dtype(values, dtype))
        np.testing.assert_allclose(read(tensor), values, rtol=2**-8, atol=1e-6)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    whole = open_directory(write_hf(tmp_path / "whole", "llama"))
    parts = open_directory(write_hf(tmp_path / "parts", "llama", shards=3))
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) == 3
    assert parts.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(read(parts.tensors[name]), read(tensor))


def test_config_names_its_file_and_tensors_check_their_shape(tmp_path: Path) -> None:
    checkpoint = open_directory(write_hf(tmp_path, "llama"))
    assert checkpoint.config_path == tmp_path / "config.json"
    with pytest.raises(FormatError, match=r"tensor 'model.norm.weight': has shape \(64,\)"):
        checkpoint.tensor("model.norm.weight", (65,))
    with pytest.raises(FormatError, match="tensor 'absent': missing"):
        checkpoint.tensor("absent", (65,))


@pytest.mark.parametrize(("vocab_size", "text"), [(40, "cat"), (97, "The ring, and the song."), (300, "the ñandú\t{}")])
def test_tiny_tokenizer_works(tmp_path: Path, vocab_size: int, text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write_hf(tmp_path, "llama", vocab_size=vocab_size)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and max(ids) < vocab_size
    assert vocab_size < 97 or len(ids) < len(text.encode())  # some merge was applied
    assert tokenizer.encode("</s>").ids == [1]


def test_tokenizer_opens_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    monkeypatch.setitem(sys.modules, "ralo.tokenizer", SimpleNamespace(from_directory=opened.append))
    checkpoint = open_directory(write_hf(tmp_path, "llama"))
    assert opened == []
    checkpoint.tokenizer()
    assert opened == [tmp_path]


@pytest.mark.skipif(not MODELS.exists(), reason="the shared models are not beside the repository")
def test_real_model() -> None:
    checkpoint = open_directory(MODELS / "mini")
    tensor = checkpoint.tensor("model.layers.7.mlp.down_proj.weight", (384, 1024))
    assert tensor.dtype == "bf16" and 0.001 < float(np.std(read(tensor))) < 1


def test_bad_directories(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    assert "is not a directory" in refusal(tmp_path / "file")
    assert "config.json: cannot be opened: No such file" in refusal(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "config.json: is a directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"a": Infinity}', "Infinity"),
        ('{"a": ' + "[" * 100_000, "too deep"),
        (" " * (LONGEST_CONFIG + 1), "at most"),
    ],
)
def test_bad_config(tmp_path: Path, text: str, reason: str) -> None:
    write_hf(tmp_path, "llama")
    (tmp_path / "config.json").write_text(text)
    message = refusal(tmp_path)
    assert "config.json" in message and reason in message


def test_weights_absent_or_in_pickles(tmp_path: Path) -> None:
    (write_hf(tmp_path, "llama") / "model.safetensors").unlink()
    assert "has neither model.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "can run code when opened; convert to safetensors" in refusal(tmp_path)


def set_index(path: Path, index: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "c:model.safetensors",
        "a\0.safetensors",
        "a\ud800.safetensors",
        "a\n.safetensors",
        "..",
        "",
        "config.json",
        3,
        None,
        ["a.safetensors"],
    ],
)
def test_shard_names_stay_in_the_directory(tmp_path: Path, shard: Any) -> None:
    write_hf(tmp_path, "llama", shards=2)
    set_index(tmp_path, {"weight_map": {"model.norm.weight": shard}})
    message = refusal(tmp_path)
    assert "tensor 'model.norm.weight'" in message and "is not the name of a file in this directory" in message


def test_bad_index(tmp_path: Path) -> None:
    write_hf(tmp_path, "llama", shards=2)
    first = "model-00001-of-00002.safetensors"
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        assert "no weight_map" in refusal(tmp_path)
    set_index(tmp_path, {"weight_map": {"absent": first}})
    assert f"tensor 'absent': is not in {first}" in refusal(tmp_path)
    set_index(tmp_path, {"weight_map": {"w": "gone.safetensors"}})
    assert "shard gone.safetensors is missing" in refusal(tmp_path)
    set_index(tmp_path, {"weight_map": {"w": "w" * 300 + ".safetensors"}})
    assert "is missing" in refusal(tmp_path)
    set_index(tmp_path, {"weight_map": {"model.embed_tokens.weight": first}})
    with open(tmp_path / first, "r+b") as file:
        file.truncate(9000)
    message = refusal(tmp_path)
    assert first in message and "is cut off" in message
