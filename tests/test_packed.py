"""Packed directories: the same scores as quantising on load, opened at once, and refused when anything is amiss."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_models import MODELS, needs_models, scores
from tiny import write_gguf, write_hf

import ralo
from ralo import RaloError
from ralo.cli import main
from ralo.formats import packed, safetensors
from ralo.loader import open_checkpoint
from ralo.matrix import QUANTS
from ralo.weights import build

TOKENS = np.random.default_rng(6).integers(2, 97, 40).tolist()
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt2"]


def pack(source: Path, to: Path, quant: str = "int8") -> Path:
    ckpt = open_checkpoint(str(source))
    packed.save(ckpt, build(ckpt, quant)[1], to)
    return to


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A packed model with every kind of tensor: biases, norms of heads, and a table of its own for the head."""
    config = {"attention_bias": True, "tie_word_embeddings": False}
    return pack(write_hf(tmp_path / "hf", "qwen3", **config), tmp_path / "packed")


def read_weights(folder: Path) -> dict[str, Any]:
    found = safetensors.open_file(folder / packed.WEIGHTS)
    return {name: np.array(tensor.stored()) for name, tensor in found.items()}


def write_weights(folder: Path, arrays: dict[str, Any]) -> None:
    bf16 = [name for name, array in arrays.items() if array.dtype == np.uint16]
    safetensors.write_file(folder / packed.WEIGHTS, arrays, bf16=bf16)


def assert_refused(path: Path, reason: str, quant: str = "auto") -> None:
    with pytest.raises(RaloError, match=reason) as caught:
        ralo.load(path, quant=quant)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("quant", QUANTS)
def test_round_trip(tmp_path: Path, model_type: str, quant: str) -> None:
    source = write_hf(tmp_path / "hf", model_type, dtype={"f32": "f32", "int4": "f16"}.get(quant, "bf16"))
    path = pack(source, tmp_path / "packed", quant)
    found, want = ralo.load(path), ralo.load(source, quant=quant)
    assert found.quant == quant and found.model.cfg == want.model.cfg
    np.testing.assert_array_equal(scores(found.model, TOKENS, 20), scores(want.model, TOKENS, 20))
    assert found.encode("hello the world") == want.encode("hello the world") and found.stop_ids == want.stop_ids
    assert ralo.load(path, quant=quant).quant == quant


def test_round_trip_of_a_gguf_file(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", "llama", quant="q8_0", rope_scaling={"rope_type": "linear", "factor": 2.0})
    path = pack(source, tmp_path / "packed")
    found, want = ralo.load(path), ralo.load(source)
    np.testing.assert_array_equal(scores(found.model, TOKENS, 20), scores(want.model, TOKENS, 20))
    assert found.generate("hello", 8, temperature=0).text == want.generate("hello", 8, temperature=0).text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, to = write_hf(tmp_path / "hf", "llama"), tmp_path / "new" / "packed"
    assert main(["pack", "-m", str(source), "-o", str(to), "--quant", "int4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == {"path": str(to), "quant": "int4", "bytes": sum(f.stat().st_size for f in to.iterdir())}
    assert main(["pack", "-m", str(to), "-o", str(tmp_path / "again")]) == 2
    assert "is packed already" in capsys.readouterr().err
    assert main(["pack", "-m", str(source), "-o", str(to)]) == 2
    assert "already there" in capsys.readouterr().err


@needs_models
def test_base_opens_at_once(tmp_path: Path) -> None:
    path = pack(MODELS / "base", tmp_path / "packed")
    times = []
    for _ in range(3):
        clock = time.perf_counter()
        lm = ralo.load(path)
        times.append(time.perf_counter() - clock)
    assert min(times) < 0.5, times
    want = ralo.load(MODELS / "base")
    np.testing.assert_array_equal(scores(lm.model, TOKENS, 30), scores(want.model, TOKENS, 30))


@pytest.mark.parametrize("quant", [quant for quant in QUANTS if quant != "int8"])
def test_another_precision_than_packed(folder: Path, quant: str) -> None:
    assert_refused(folder, f"is packed at int8; load the original to run it at {quant}", quant)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"format": 99},
            "is of pack format 99, this ralo reads 1, 2, 3 and 4; take a newer ralo, or pack the model again",
        ),
        ({"format": "1"}, "'format' must be a whole number"),
        ({"quant": "int2"}, "'quant' is 'int2'; supported"),
        ({"config": None}, "'config' is missing"),
        ({"config": {"model_type": "bert"}}, "model_type 'bert' is not supported"),
    ],
)
def test_info_that_is_wrong(folder: Path, changes: dict[str, Any], reason: str) -> None:
    info = json.loads((folder / "ralo.json").read_text())
    (folder / "ralo.json").write_text(json.dumps(info | changes))
    assert_refused(folder, reason)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1, "format": 1}'])
def test_info_that_is_no_json(folder: Path, text: str) -> None:
    (folder / "ralo.json").write_text(text)
    assert_refused(folder, "JSON")


def test_every_tensor_is_needed(folder: Path) -> None:
    tensors = read_weights(folder)
    assert {"embed", "head.data", "layers.1.qkv.bias", "layers.0.q_norm", "layers.0.up.scales"} <= tensors.keys()
    for name in tensors:
        write_weights(folder, {k: v for k, v in tensors.items() if k != name})
        assert_refused(folder, "pack the model again")


@pytest.mark.parametrize("model_type", ["opt", "gpt2"])
def test_biases_of_norms_are_needed_too(tmp_path: Path, model_type: str) -> None:
    folder = pack(write_hf(tmp_path / "hf", model_type), tmp_path / "packed")
    tensors = read_weights(folder)
    for name in ("final_norm_bias", "layers.0.mlp_norm_bias", "layers.1.down.bias", "positions"):
        write_weights(folder, {k: v for k, v in tensors.items() if k != name})
        assert_refused(folder, "pack the model again")


@pytest.mark.parametrize("name", ["embed", "head.data", "final_norm", "layers.0.qkv.scales", "layers.1.qkv.bias"])
@pytest.mark.parametrize("change", [lambda a: a[1:], lambda a: a.astype(np.float64), lambda a: a[None]])
def test_tensors_of_another_shape_or_type(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    tensors = read_weights(folder)
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    write_weights(folder, tensors)
    assert_refused(folder, f"tensor '{name}': is .*the config asks for")


@pytest.mark.parametrize("left", [0, 7, 200, -1, -5000])
def test_truncated_file(folder: Path, left: int) -> None:
    data = (folder / "weights.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(data[:left])
    assert_refused(folder, "truncated|cut off|is not a safetensors file")


def test_files_that_are_missing(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    lm = ralo.load(folder)
    with pytest.raises(RaloError, match=r"has no tokenizer\.json"):
        lm.generate("hello")
    (folder / "weights.safetensors").unlink()
    assert_refused(folder, "No such file")


def test_existing_output_is_left_alone(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", "llama")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("mine")
    for name in ("there", "link", "file"):
        with pytest.raises(RaloError, match="already there; choose another directory"):
            pack(source, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "there").iterdir())


def test_a_partial_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes").write_text("mine")
    with pytest.raises(RaloError, match=r"out\.partial: already there"):
        pack(write_hf(tmp_path / "hf", "llama"), tmp_path / "out")
    assert (tmp_path / "out.partial" / "notes").read_text() == "mine" and not (tmp_path / "out").exists()


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class FullFile:
    """A file on a disk that is full after its first bytes."""

    def __init__(self, path: Path, mode: str) -> None:
        self.file = open(path, mode)  # noqa: SIM115 (closed by __exit__)
        self.file.write(b"x" * 100)

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    write = staticmethod(full_disk)


@pytest.mark.parametrize("place", ["weights", "info", "tokenizer", "rename"])
def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    source, to = write_hf(tmp_path / "hf", "llama"), tmp_path / "out"
    ckpt = open_checkpoint(str(source))
    _, weights = build(ckpt, "int8")
    tokenizer = ckpt.tokenizer()
    if place == "weights":
        monkeypatch.setattr(safetensors, "open", FullFile, raising=False)
    elif place == "info":
        monkeypatch.setattr(Path, "write_text", full_disk)
    elif place == "tokenizer":
        monkeypatch.setattr(type(tokenizer), "save", full_disk)
    else:
        monkeypatch.setattr(Path, "rename", full_disk)
    with pytest.raises(RaloError, match="No space left on device") as caught:
        packed.save(ckpt, weights, to)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
