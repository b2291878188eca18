"""Packing a checkpoint: in pieces, in little memory, the same bits whatever the pieces, and nothing damaged let in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_models import MODELS, needs_models, scores
from tiny import write_gguf, write_hf
from tiny_models import make_config, make_weights, to_dtype

import ralo
from ralo import RaloError, _core, matrix
from ralo.formats import packed, safetensors
from ralo.formats.mapped import StoredTensor
from ralo.loader import open_checkpoint
from ralo.matrix import QUANTS, Matrix
from ralo.weights import HEAD_QUANT, Embedding, build

MB = 1 << 20
STATUS = Path("/proc/self/status")
TOKENS = list(range(2, 42))
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt2"]


def run_python(code: str) -> Any:
    """What the code prints as JSON in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_is_quick() -> None:
    """In CPU time, which a busy machine does not stretch."""
    code = "import time; t = time.process_time(); import ralo; print(time.process_time() - t)"
    times = [run_python(code) for _ in range(3)]
    assert min(times) < 0.3, times


@needs_models
@pytest.mark.skipif(not STATUS.exists(), reason=f"needs {STATUS} of Linux")
def test_peak_memory_of_loading() -> None:
    """By VmHWM: the ru_maxrss of a process starts with that of the one that made it."""
    code = f"""
import json, pathlib, re, ralo
peak = lambda: 1024 * int(re.search("VmHWM:[^0-9]*([0-9]+) kB", pathlib.Path({str(STATUS)!r}).read_text())[1])
before = peak()
lm = ralo.load({str(MODELS / "base")!r}, quant="int8")
print(json.dumps([before, peak(), lm.model.weights.nbytes]))
"""
    before, peak, size = run_python(code)
    assert peak <= 1.3 * size + 150 * MB
    assert peak - before <= size + 40 * MB  # a chunk of float32 rows and what is mapped of it, never the checkpoint


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_rows_are_asked_for_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    folder = write_hf(tmp_path, model_type, vocab_size=323)
    whole = build(open_checkpoint(str(folder)), "int8")[1]
    monkeypatch.setattr(matrix, "CHUNK_BYTES", 1)  # the least: PAD rows at a time
    largest = 0
    rows = StoredTensor.rows

    def watched(self: StoredTensor, start: int, stop: int) -> Any:
        nonlocal largest
        if len(self.shape) == 2 and "positions" not in self.name:
            largest = max(largest, stop - start)
        return rows(self, start, stop)

    monkeypatch.setattr(StoredTensor, "rows", watched)
    pieces = build(open_checkpoint(str(folder)), "int8")[1]
    for name, want in whole.matrices().items():
        np.testing.assert_array_equal(pieces.matrices()[name].data, want.data)
        np.testing.assert_array_equal(pieces.matrices()[name].scales, want.scales)
    if model_type != "gpt2":  # which is stored the other way round and read whole, one matrix at a time
        assert largest == _core.PAD


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130, 200])
def test_packing_in_pieces_changes_no_bit(monkeypatch: pytest.MonkeyPatch, quant: str, rows: int) -> None:
    values = np.random.default_rng(rows).standard_normal((rows, 40), dtype=np.float32)

    class Tensor:
        shape = values.shape

        def rows(self, start: int, stop: int) -> Any:
            return values[start:stop]

        def release(self) -> None:
            pass

    found = []
    for chunk in (16 * MB, 1, 64 * 4 * 40 * 2):
        monkeypatch.setattr(matrix, "CHUNK_BYTES", chunk)
        one = Matrix.empty(quant, 40, {"a": 3, "b": rows}, bias=False)
        assert one.pack("b", Tensor())  # type: ignore[arg-type]
        found.append(one)
    for other in found[1:]:
        np.testing.assert_array_equal(other.data, found[0].data)
        if other.scales is not None:
            np.testing.assert_array_equal(other.scales, found[0].scales)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_nbytes_are_all_that_is_packed(tmp_path: Path, model_type: str, quant: str) -> None:
    _, weights = build(open_checkpoint(str(write_hf(tmp_path, model_type))), quant)
    arrays, _ = packed._arrays(weights)
    assert weights.nbytes == sum(array.nbytes for array in arrays.values())
    for name, found in weights.matrices().items():
        assert found.quant == (HEAD_QUANT[quant] if name == "head" else quant)
        assert found.nbytes == sum(a.nbytes for key, a in arrays.items() if key.rpartition(".")[0] == name)


def embedded(embed: Embedding, ids: np.ndarray) -> np.ndarray:
    """What a model without layers makes of tokens: its embedding, normed."""
    table, kind = embed.words()
    d = embed.table.shape[1]
    head = Matrix.empty("f32", d, {"head": 64}, bias=False)
    core = _core.Decoder(table, kind, None, [], _core.Norm(np.ones(d, np.float32), None, 0.0), head.core)
    hidden = np.empty((len(ids), d), np.float32)
    core.run(ids.astype(np.int64), [], 0, None, None, True, None, hidden, None)
    return hidden


def normed(rows: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1, keepdims=True))


def test_every_half_is_what_it_means() -> None:
    """All finite float16 numbers but zero, 64 of one exponent in a row."""
    bits = np.arange(1, 0x7C00 + 1, dtype=np.uint16)[: 31 * 1024 // 64 * 64].reshape(-1, 64)
    table = np.concatenate([bits, bits | 0x8000]).view(np.float16)
    table[~np.isfinite(table)] = 1
    ids = np.arange(len(table))
    np.testing.assert_allclose(embedded(Embedding(table), ids), normed(table.astype(np.float32)), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_embedding_stays_in_the_file(tmp_path: Path, dtype: str) -> None:
    weights = build(open_checkpoint(str(write_hf(tmp_path, "llama", dtype=dtype))), "int8")[1]
    assert not weights.embed.table.flags.owndata and not weights.embed.table.flags.writeable
    want = to_dtype(make_weights(make_config("llama"))["model.embed_tokens.weight"], dtype)
    ids = np.array([96, 0, 5, 5])
    rows = (want.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else want.astype(np.float32)
    np.testing.assert_allclose(embedded(weights.embed, ids), normed(rows[ids]), rtol=1e-6)


def test_embedding_that_cannot_be_mapped_is_copied(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", quant="q8_0")
    ckpt = open_checkpoint(str(file))
    weights = build(ckpt, "int8")[1]
    want = ckpt.tensors["model.embed_tokens.weight"].rows(0, 323)
    assert weights.embed.table.dtype == np.float16
    np.testing.assert_allclose(embedded(weights.embed, np.arange(323)), normed(want), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"])
@pytest.mark.parametrize("quant", QUANTS)
def test_values_that_are_not_finite(tmp_path: Path, quant: str, name: str, bad: float) -> None:
    folder, full_name = write_hf(tmp_path, "llama", dtype="f32"), f"model.layers.1.{name}"
    arrays = {key: np.array(t.stored()) for key, t in safetensors.open_file(folder / "model.safetensors").items()}
    arrays[full_name].flat[-7] = bad
    safetensors.write_file(folder / "model.safetensors", arrays)
    with pytest.raises(RaloError, match=rf"tensor '{full_name}': has values that are not finite") as caught:
        ralo.load(folder, quant=quant)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_tensor_counts(tmp_path: Path, model_type: str) -> None:
    """Changing any one tensor changes the scores: none is left out, none is used in another's place."""
    config: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if model_type == "llama" else {}
    folder = write_hf(tmp_path, model_type, dtype="f32", **config)
    arrays = {key: np.array(t.stored()) for key, t in safetensors.open_file(folder / "model.safetensors").items()}
    want = scores(ralo.load(folder, quant="f32").model, TOKENS, 40)
    for name, values in arrays.items():
        noise = np.random.default_rng(0).standard_normal(values.shape, dtype=np.float32)
        safetensors.write_file(folder / "model.safetensors", arrays | {name: values + noise * np.float32(0.3)})
        got = scores(ralo.load(folder, quant="f32").model, TOKENS, 40)
        # A bias on keys shifts all scores of a query alike, so that the softmax forgets it (not with RoPE).
        if name.endswith("k_proj.bias") and model_type == "opt":
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-2)
        else:
            assert np.abs(got - want).max() > 5e-3, name
