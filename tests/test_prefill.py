"""Prefill, which may round: near the exact forward pass on random and trained models, and decoding goes on from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pairwise import pairwise
from reference.rounded import LEVELS
from shared_models import MODELS, books, needs_models
from tiny import write_hf

import ralo
from ralo.matrix import QUANTS
from ralo.model import FEW, PREFILL_CHUNK, STRETCH, Model, pieces
from ralo.quality import losses
from ralo.sequence import KV_KINDS, Sequence

F32 = NDArray[np.float32]
TOKENS = np.random.default_rng(1).integers(2, 97, 110).tolist()
PROMPT = 100
LONG = np.random.default_rng(3).integers(2, 97, 620).tolist()
HEADS = ((4, 4), (4, 2), (6, 2), (8, 2), (8, 1))  # query heads, kv heads: 1, 2, 3, 4, 8 of them share keys
LENGTHS = (129, 130, 128 + FEW, 128 + FEW + 1, 257, 300, 514, 512 + FEW + 1)


@pytest.fixture
def level(any_level: str) -> str:
    return any_level


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


# ---------------------------------------------------------------- in pieces


@given(start=st.integers(0, 3000), more=st.integers(0, 3000), size=st.sampled_from([1, 2, 7, STRETCH, PREFILL_CHUNK]))
@settings(deadline=None)
def test_pieces(start: int, more: int, size: int) -> None:
    stop, found = start + more, pieces(start, start + more, size)
    assert [a for piece in found for a in range(*piece)] == list(range(start, stop))  # all of it, in order
    assert all(cut % size == 0 for _, cut in found[:-1])
    assert all(b - a <= size for a, b in found[:-1])
    if len(found) > 1:
        last = found[-1][1] - found[-1][0]
        assert last > FEW or size <= FEW
        assert last <= size + FEW
    if size > FEW:
        assert len(found) >= -(-(more - FEW) // size)


def test_pieces_of_a_size_that_is_a_multiple_of_another() -> None:
    """Cuts of larger pieces are cuts of smaller ones too, but for the last few tokens."""
    for stop in range(1, 1700):
        small, large = ({b for _, b in pieces(0, stop, size)} for size in (STRETCH, PREFILL_CHUNK))
        assert large <= small


def in_pieces(model: Model, tokens: list[int], kv: str, size: int = STRETCH) -> tuple[F32, Sequence]:
    """As a server runs it: a call for each piece."""
    seq, scores = Sequence.empty(model.cfg, kv), np.zeros(0, np.float32)
    for a, b in pieces(0, len(tokens), size):
        scores = model.prefill(tokens[a:b], seq)
    return scores, seq


def assert_as_whole(model: Model, kv: str, length: int) -> None:
    """The scores after a prompt, and those after what follows it."""
    whole, seq = Sequence.empty(model.cfg, kv), Sequence.empty(model.cfg, kv)
    want, after = model.prefill(LONG[:length], whole), []
    for size in (STRETCH, 3 * STRETCH):
        scores, seq = in_pieces(model, LONG[:length], kv, size)
        assert np.array_equal(scores, want), (length, size)
        after.append(model.step(5, seq))
    cuts = range(STRETCH, length - FEW, STRETCH)
    for cut, known in zip(sorted({*cuts[:1], *cuts[-1:]}), (seq, whole), strict=False):  # a known beginning
        copy = known.clone(cut)
        assert copy.tokens == LONG[:cut]
        assert np.array_equal(model.prefill(LONG[cut:length], copy), want), (length, cut)
    assert np.array_equal(after[0], after[1]) and np.array_equal(after[0], model.step(5, whole))


@pytest.mark.parametrize(("quant", "kv", "heads"), pairwise(QUANTS, KV_KINDS, HEADS))
def test_pieces_give_the_bits_of_the_whole(
    tmp_path: Path, level: str, quant: str, kv: str, heads: tuple[int, int]
) -> None:
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 80}
    model = ralo.load(write_hf(tmp_path, "llama", max_position_embeddings=1024, **shape), quant=quant).model
    for length in LENGTHS:
        assert_as_whole(model, kv, length)


@pytest.mark.parametrize(("window", "quant", "kv"), pairwise((1, 24, 128, 200, 600), QUANTS, KV_KINDS))
def test_pieces_under_a_window(tmp_path: Path, level: str, window: int, quant: str, kv: str) -> None:
    folder = write_hf(tmp_path, "mistral", max_position_embeddings=1024, sliding_window=window)
    model = ralo.load(folder, quant=quant).model
    for length in LENGTHS[::2]:
        assert_as_whole(model, kv, length)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "opt", "gpt2"])
@pytest.mark.parametrize("quant", QUANTS)
def test_pieces_of_every_architecture(tmp_path: Path, kind: str, quant: str) -> None:
    longest = {"n_positions": 1024} if kind == "gpt2" else {"max_position_embeddings": 1024}
    model = ralo.load(write_hf(tmp_path, kind, **longest), quant=quant).model
    for length in LENGTHS[1::2]:
        assert_as_whole(model, "f16", length)


def test_a_clone_of_a_beginning_that_was_answered_goes_on_as_the_whole(tmp_path: Path, level: str) -> None:
    """What came after the beginning leaves no trace in the copy."""
    model = ralo.load(write_hf(tmp_path, "llama", max_position_embeddings=1024), quant="int8").model
    seq = Sequence.empty(model.cfg)
    model.prefill(LONG[:200], seq)
    for token in LONG[300:340]:
        model.step(token, seq)
    whole = Sequence.empty(model.cfg)
    want = model.prefill(LONG[:128] + LONG[400:500], whole)
    copy = seq.clone(128)
    assert np.array_equal(model.prefill(LONG[400:500], copy), want)
    for token in LONG[600:610]:
        assert np.array_equal(model.step(token, copy), model.step(token, whole))
    assert seq.tokens == LONG[:200] + LONG[300:340]
