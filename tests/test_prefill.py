"""Prefill, which may round: near the exact forward pass on random and trained models, and decoding goes on from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from reference.rounded import LEVELS
from shared_models import MODELS, books, needs_models
from tiny import write_hf

import ralo
from ralo.quality import losses
from ralo.sequence import Sequence

F32 = NDArray[np.float32]
TOKENS = np.random.default_rng(1).integers(2, 97, 110).tolist()
PROMPT = 100


def cosines(a: F32, b: F32) -> F32:
    return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt2"])
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_near_the_exact_scores(tmp_path: Path, level: str, model_type: str, quant: str) -> None:
    model = ralo.load(write_hf(tmp_path, model_type), quant=quant).model
    hidden = [model.forward(TOKENS, Sequence.empty(model.cfg), exact=exact) for exact in (True, False)]
    exact, rounded = map(model.logits, hidden)
    assert cosines(exact, rounded).min() > 0.999
    assert (exact.argmax(1) == rounded.argmax(1)).mean() > 0.9
    assert np.array_equal(exact, rounded) == (level not in LEVELS)
    got = model.prefill(TOKENS, Sequence.empty(model.cfg))
    assert np.array_equal(got, model.logits(hidden[1][-1:])[0])  # the bits of the rounded one


@pytest.mark.parametrize("kv", ["f16", "int8"])
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_decoding_goes_on_from_it(tmp_path: Path, level: str, quant: str, kv: str) -> None:
    model = ralo.load(write_hf(tmp_path, "llama"), quant=quant).model
    seq, exact = (Sequence.empty(model.cfg, kv) for _ in range(2))
    model.prefill(TOKENS[:PROMPT], seq)
    model.forward(TOKENS[:PROMPT], exact)
    for token in TOKENS[PROMPT:]:
        assert cosines(model.step(token, seq), model.step(token, exact)) > 0.999
    assert seq.tokens == exact.tokens == TOKENS


@needs_models
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_the_trained_model_predicts_as_well(quant: str) -> None:
    model = ralo.load(MODELS / "base", quant=quant).model
    exact, rounded = (losses(model, list(books(1025)), 1024, exact=which) for which in (True, False))
    assert np.exp(rounded.mean()) == pytest.approx(np.exp(exact.mean()), rel=0.003)
    assert np.abs(rounded - exact).mean() < 0.03
