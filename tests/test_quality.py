"""Perplexity: the known values of the trained models at every precision, and that it is what decoding gives."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_models import BOOKS, MODELS, books, needs_models
from tiny import write_hf

import ralo
from ralo import KWTA, RaloError
from ralo import quality as quality_file
from ralo.cli import main
from ralo.quality import losses, nll, perplexity
from ralo.sequence import Sequence

TOKENS = np.random.default_rng(4).integers(2, 97, 150).tolist()
LATE = [KWTA(k=0.4), KWTA(k=0.4, duty=4), KWTA(k=0.9, keys=0.3, keys_min=8)]


@cache
def measured(name: str, quant: str, kv: str = "f16") -> float:
    """Over 16384 predictions in windows of 1024, as `ralo ppl` does it."""
    model = ralo.load(MODELS / name, quant=quant, kv=kv).model
    return perplexity(model, books(16385), 1024, kv).ppl


@needs_models
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--text", str(BOOKS), "--ctx", "1024", "--tokens", "16384", "--quant", "f32", "--json"]
    assert main(["ppl", "-m", str(MODELS / "base"), *flags]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ppl"] == pytest.approx(19.174, abs=0.02)
    assert found["tokens"] == 16384 and found["quant"] == "f32" and found["kv"] == "f16" and found["ctx"] == 1024
    assert (
        found["dense_ppl"] == found["ppl"] and found["delta_ppl_pct"] == found["kl"] == 0 and found["top1_agree"] == 1
    )
    assert measured("base", "int4") == pytest.approx(found["ppl"], rel=0.025)
    assert measured("base", "int4") > found["ppl"]


@needs_models
def test_mini_at_every_precision() -> None:
    dense = measured("mini", "f32")
    assert dense == pytest.approx(21.894, abs=0.02)
    assert measured("mini", "bf16") == dense  # the checkpoint is bf16 itself
    assert measured("mini", "int8") == pytest.approx(dense, rel=0.003) and measured("mini", "int8") != dense
    assert measured("mini", "int4") == pytest.approx(dense, rel=0.025) and measured("mini", "int4") > dense


@needs_models
def test_mini_with_an_int8_cache() -> None:
    assert measured("mini", "int8", "int8") == pytest.approx(measured("mini", "int8"), rel=0.003)
    assert measured("mini", "int8", "int8") != measured("mini", "int8")


@needs_models
def test_trained_model_batched_equals_token_by_token() -> None:
    """A float16 cache rounds now and then the other way: single losses move by 1e-3, their mean does not."""
    model, tokens = ralo.load(MODELS / "mini", quant="f32").model, list(books(300))
    np.testing.assert_allclose(losses(model, tokens, 150, "f32"), decoded(model, tokens, 150, "f32"), rtol=0, atol=1e-4)
    rounded = losses(model, tokens, 150) - decoded(model, tokens, 150)
    assert abs(rounded.mean()) < 1e-4 and np.quantile(np.abs(rounded), 0.99) < 1e-3


@needs_models
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantised_batched_equals_token_by_token(quant: str) -> None:
    """One token at a time rounds activations to 16 bits where the CPU has VNNI, many at a time do not round them."""
    model, tokens = ralo.load(MODELS / "mini", quant=quant).model, list(books(300))
    gap = losses(model, tokens, 150, "f32") - decoded(model, tokens, 150, "f32")
    assert np.abs(gap).max() < 1e-2 and abs(gap.mean()) < 2e-4, (np.abs(gap).max(), gap.mean())


def decoded(model: Any, tokens: list[int], ctx: int, kv: str = "f16") -> list[float]:
    """Minus log probability of each token, from the scores of decoding one token after another."""
    found = []
    for start in range(0, len(tokens) - 1, ctx):
        seq = Sequence.empty(model.cfg, kv)
        for at in range(start, min(start + ctx, len(tokens) - 1)):
            scores = model.step(tokens[at], seq).astype(np.float64)
            found.append(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[tokens[at + 1]])
    return found


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt2"])
@pytest.mark.parametrize(("ctx", "chunk"), [(128, 512), (50, 512), (120, 32), (1, 512)])
def test_batched_equals_token_by_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, ctx: int, chunk: int
) -> None:
    monkeypatch.setattr(quality_file, "PREFILL_CHUNK", chunk)
    model = ralo.load(write_hf(tmp_path, model_type), quant="f32").model
    found = losses(model, TOKENS, ctx)
    assert found.shape == (149,)
    np.testing.assert_allclose(found, decoded(model, TOKENS, ctx), rtol=0, atol=1e-3)
    if ctx > 1:
        assert np.abs(found - losses(model, TOKENS, 1)).max() > 0.1  # what came before matters


def test_nll_of_any_size_of_score() -> None:
    scores = np.array([[0, 0, 0, 0], [1e4, 0, -1e4, 0], [-np.inf, 0, 0, -np.inf]], np.float32)
    found = nll(scores, np.array([2, 1, 2]))
    np.testing.assert_allclose(found, [np.log(4), 1e4, np.log(2)], rtol=1e-6)


def test_progress_ends_at_one(tmp_path: Path) -> None:
    model = ralo.load(write_hf(tmp_path, "llama"), quant="f32").model
    seen: list[float] = []
    found = perplexity(model, TOKENS, 50, progress=seen.append)
    assert len(seen) == 3 and seen == sorted(seen) and seen[-1] == 1.0
    assert found.ppl == pytest.approx(np.exp(losses(model, TOKENS, 50).mean())) and found.tokens == 149


def test_late_positions_without_a_mode(tmp_path: Path) -> None:
    """Windows of 50, 50 and 49: ten positions of two of them, nine of the last; nothing to compare with dense."""
    model = ralo.load(write_hf(tmp_path, "llama"), quant="f32").model
    seen: list[float] = []
    found = perplexity(model, TOKENS, 50, "f32", progress=seen.append, first=40)
    whole = losses(model, TOKENS, 50, "f32")
    late = np.concatenate([whole[40:50], whole[90:100], whole[140:149]])
    np.testing.assert_allclose(losses(model, TOKENS, 50, "f32", first=40), late, rtol=0, atol=1e-4)
    assert found.tokens == 29 and found.ppl == found.dense_ppl == pytest.approx(np.exp(late.mean()), rel=1e-4)
    assert found.delta_ppl_pct == found.kl == 0 and found.ci95 == (0, 0) and found.top1_agree == 1
    assert len(seen) == 3 and seen[-1] == 1.0


def test_a_last_window_that_is_shorter_than_the_prompt_is_left_out(tmp_path: Path) -> None:
    model = ralo.load(write_hf(tmp_path, "llama"), quant="f32").model
    seen: list[float] = []
    assert perplexity(model, TOKENS[:131], 60, progress=seen.append, first=20).tokens == 80 and seen[-1] == 1.0
    assert perplexity(model, TOKENS[:142], 60, first=20).tokens == 81


@pytest.mark.parametrize("mode", LATE, ids=["channels", "duty", "keys"])
@pytest.mark.parametrize("chunk", [512, 16])
def test_late_positions_are_what_decoding_gives_after_a_dense_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: KWTA, chunk: int
) -> None:
    monkeypatch.setattr(quality_file, "PREFILL_CHUNK", chunk)
    model = ralo.load(write_hf(tmp_path, "llama", hidden_size=128), quant="f32", modes=[mode]).model
    found = perplexity(model, TOKENS, 75, "f32", first=35)
    ours, dense = late(model, 75, 35), late(model, 75, 35, dense=True)
    np.testing.assert_allclose(losses(model, TOKENS, 75, "f32", first=35), ours, rtol=0, atol=2e-3)
    assert found.tokens == len(ours) == 79
    assert found.ppl == pytest.approx(np.exp(ours.mean()), rel=1e-4) and found.kl > 0
    assert found.dense_ppl == pytest.approx(np.exp(dense.mean()), rel=1e-4) != found.ppl
    everywhere = losses(model, TOKENS, 75, "f32")
    assert np.abs(ours - np.concatenate([everywhere[35:75], everywhere[110:]])).max() > 1e-3, "a dense prompt matters"


def late(model: Any, ctx: int, first: int, dense: bool = False) -> Any:
    """Losses of decoding from position `first` of each window on, after a prompt without modes."""
    found = []
    for start in range(0, len(TOKENS) - 1, ctx):
        seq, stop = Sequence.empty(model.cfg, "f32"), min(start + ctx, len(TOKENS) - 1)
        model.prefill(TOKENS[start : start + first], seq, dense=True)
        scores = np.stack([model.step(token, seq, dense) for token in TOKENS[start + first : stop]])
        found.append(nll(scores, np.asarray(TOKENS[start + first + 1 : stop + 1])))
    return np.concatenate(found)


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    model = ralo.load(write_hf(tmp_path, "llama"), quant="f32").model
    for ctx in (0, 129):
        with pytest.raises(RaloError, match="from 1 to the model's context of 128"):
            losses(model, TOKENS, ctx)
    with pytest.raises(RaloError, match="at least two tokens"):
        losses(model, [5], 10)
    for first in (-1, 50):
        with pytest.raises(RaloError, match=f"--first {first} must be from 0 to 49, within a window of --ctx 50"):
            perplexity(model, TOKENS, 50, first=first)
    with pytest.raises(RaloError, match="the text is too short: --first 30 needs at least 32 tokens, it has 31"):
        perplexity(model, TOKENS[:31], 50, first=30)
    assert perplexity(model, TOKENS[:32], 50, first=30).tokens == 1
    model.weights.final_norm.weight[0] = np.nan
    with pytest.raises(RaloError, match="perplexity is not a finite number"):
        perplexity(model, TOKENS, 50)
