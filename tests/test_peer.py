"""The peer runs the same model: what is written for it, what it computes from that, and what it cannot be given."""

from __future__ import annotations

import builtins
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo import peer
from ralo.errors import RaloError
from ralo.formats.random import checkpoint
from ralo.loader import open_checkpoint
from ralo.quality import losses

needs_peer = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
TOKENS = [0] * 5  # what the engine feeds


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "model", "llama", vocab_size=323, num_hidden_layers=3)


def scores(path: Path, quant: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    lm = ralo.load(path, quant)
    return lm.model.prefill(TOKENS, lm.new_sequence())


@pytest.mark.parametrize("quant", ["f32", "bf16"])
def test_what_is_written_reads_back_as_the_same_model(quant: str, model: Path, tmp_path: Path) -> None:
    peer.write_gguf(open_checkpoint(str(model)), quant, tmp_path / "peer.gguf")
    np.testing.assert_array_equal(scores(tmp_path / "peer.gguf", "f32"), scores(model, "f32"))


@needs_peer
@pytest.mark.parametrize(("quant", "tolerance"), [("f32", 1e-3), ("bf16", 0.01), ("int8", 0.03), ("int4", 0.3)])
def test_the_peer_computes_what_ralo_computes(quant: str, tolerance: float, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "peer.gguf"
    peer.write_gguf(open_checkpoint(str(model)), quant, path)
    engine = peer.LlamaCpp(path, 1, "f16", 64)
    engine.prefill(len(TOKENS))
    theirs = np.ctypeslib.as_array(engine.lib.llama_get_logits(engine.ctx), (323,))
    ours = scores(model, "f32")
    assert np.linalg.norm(theirs - ours) < tolerance * np.linalg.norm(ours)


@needs_peer
@pytest.mark.parametrize("ctx", [7, 32, 100])
def test_the_peer_predicts_what_ralo_predicts(ctx: int, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "BATCH", 16)  # so that windows are more than one batch
    lm = ralo.load(model, "f32", "f32")
    tokens = np.random.default_rng(3).integers(0, 323, 90).tolist()
    shares: list[float] = []
    with peer.beside(lm, ctx) as engine:
        theirs = engine.losses(tokens, ctx, shares.append)
        np.testing.assert_array_equal(engine.losses(tokens, ctx), theirs)  # a window begins with an empty cache
    ours = losses(lm.model, tokens, ctx, "f32")
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=0.01)
    assert np.abs(ours - losses(lm.model, tokens, 1, "f32")).max() > 0.1  # what came before matters
    assert shares == sorted(shares) and shares[-1] == 1


def test_a_peer_that_takes_its_process_with_it_is_one_clear_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(RaloError, match=r"ends with 'Illegal instruction' here; .* CMAKE_ARGS=") as found:
        peer.beside(ralo.load(model, "f32"), 64).__enter__()
    assert "\n" not in str(found.value)


@needs_peer
def test_gives_its_memory_back_however_it_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    freed: list[str] = []
    for name in ("llama_free", "llama_model_free"):
        free = getattr(llama_cpp, name)
        monkeypatch.setattr(llama_cpp, name, lambda held, name=name, free=free: (freed.append(name), free(held)))
    lm = ralo.load(model, "f32")
    with pytest.raises(ZeroDivisionError), peer.beside(lm, 64):
        raise ZeroDivisionError
    assert freed == ["llama_free", "llama_model_free"]
    with pytest.raises(RaloError, match="could not make a context"), peer.beside(ralo.load(model, "f32", "int8"), 64):
        pass
    assert freed[2:] == ["llama_model_free"]


def test_an_activation_that_the_peer_does_not_have(model: Path) -> None:
    cfg = ralo.load(model).model.cfg
    peer.check_text(cfg)
    with pytest.raises(RaloError, match="its Llama is always silu, this model is relu"):
        peer.check_text(dataclasses.replace(cfg, act="relu"))


@needs_peer
@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_starts_again_where_it_is_told(kv: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "peer.gguf"
    wide = write_hf(tmp_path / "wide", "llama", head_dim=32)  # the peer's 8-bit cache comes in blocks of 32
    peer.write_gguf(open_checkpoint(str(wide)), "int8", path)
    engine = peer.LlamaCpp(path, 1, kv, 64)
    lengths = []
    for ctx in (0, 7, 7, 3):
        engine.start(ctx)
        assert engine.decode(4) > 0
        lengths.append(engine.length)
    assert lengths == [5, 12, 12, 8]  # one token to begin with, and four that count


@needs_peer
def test_a_cache_that_the_peer_does_not_have(model: Path, tmp_path: Path) -> None:
    peer.write_gguf(open_checkpoint(str(model)), "int8", tmp_path / "peer.gguf")
    with pytest.raises(RaloError, match="its int8 cache is for heads of a multiple of 32"):
        peer.LlamaCpp(tmp_path / "peer.gguf", 1, "int8", 64)


@needs_peer
def test_a_file_that_the_peer_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "peer.gguf").write_bytes(b"GGUF")
    with pytest.raises(RaloError, match="could not load the model that was written for it"):
        peer.LlamaCpp(tmp_path / "peer.gguf", 1, "f16", 64)


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("gpt2", {}, "--peer llama.cpp is for Llama models; this is 'gpt2'"),
        ("mistral", {}, "this is 'mistral'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaled rotary embeddings are not written"),
        ("llama", {"attention_bias": True}, "biases are not written for the peer"),
        ("llama", {"hidden_size": 48}, "rows of 48 weights do not fill Q8_0 blocks of 32; measure at --quant bf16"),
    ],
)
def test_models_that_are_not_for_the_peer(model_type: str, options: Any, reason: str, tmp_path: Path) -> None:
    ckpt = open_checkpoint(str(write_hf(tmp_path / "model", model_type, **options)))
    with pytest.raises(RaloError) as caught:
        peer.write_gguf(ckpt, "int8", tmp_path / "peer.gguf")
    assert reason in str(caught.value)


def test_a_shape_without_weights_is_written_too(tmp_path: Path) -> None:
    shape = "random:D=64,L=1,F=96,H=4,K=2,V=99"
    peer.write_gguf(checkpoint(shape), "f32", tmp_path / "peer.gguf")
    lm = ralo.load(shape, "f32")
    ours, theirs = lm.model.prefill(TOKENS, lm.new_sequence()), scores(tmp_path / "peer.gguf", "f32")
    np.testing.assert_allclose(ours, theirs, atol=1e-3)  # ours has its embedding in float16


def test_a_package_that_is_missing_or_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def broken(name: str, *args: Any) -> Any:
        if name == "llama_cpp":
            raise OSError("libgomp.so.1: no such file")
        return real(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RaloError, match=r"needs the llama-cpp-python package: pip install 'ralo\[peer\]'"):
        peer.check()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(RaloError, match=r"llama-cpp-python does not load: libgomp\.so\.1: no such file"):
        peer.check()
