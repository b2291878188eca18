"""The state of a text: trimming, cloning and growing it change nothing about what comes next, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo import RaloError, _core
from ralo.model import Model
from ralo.sequence import FIRST_CAPACITY, KV_KINDS, LayerCache, Sequence

TOKENS = np.random.default_rng(2).integers(2, 97, 120).tolist()
every_cache = pytest.mark.parametrize("kv", KV_KINDS)


def open_tiny(folder: Path, model_type: str = "llama", **config: Any) -> Model:
    return ralo.load(write_hf(folder, model_type, **config), quant="int8").model


@every_cache
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("length", [0, 1, 40, 79])
def test_trim_then_redo(tmp_path: Path, model_type: str, kv: str, length: int) -> None:
    model = open_tiny(tmp_path, model_type)
    seq = Sequence.empty(model.cfg, kv)
    if length:
        model.forward(TOKENS[:length], seq)
    want = model.forward(TOKENS[length:80], seq)
    after = model.step(TOKENS[80], seq)
    model.forward(TOKENS[81:], seq)
    seq.trim(length)
    assert seq.tokens == TOKENS[:length] and len(seq) == length
    np.testing.assert_array_equal(model.forward(TOKENS[length:80], seq), want)
    np.testing.assert_array_equal(model.step(TOKENS[80], seq), after)


def test_trim_with_angles_that_depend_on_the_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    model = open_tiny(tmp_path, max_position_embeddings=32, rope_scaling=scaling)
    seq = Sequence.empty(model.cfg)
    want = [model.step(token, seq) for token in TOKENS[:100]]
    seq.trim(20)
    for at in range(20, 100):
        np.testing.assert_array_equal(model.step(TOKENS[at], seq), want[at])


@pytest.mark.parametrize("length", [-1, 11])
def test_trim_to_what_is_not_there(tmp_path: Path, length: int) -> None:
    model = open_tiny(tmp_path)
    seq = Sequence.empty(model.cfg)
    model.forward(TOKENS[:10], seq)
    with pytest.raises(ValueError, match="cannot trim 10 tokens"):
        seq.trim(length)
    assert seq.tokens == TOKENS[:10]


@every_cache
def test_clone_goes_its_own_way(tmp_path: Path, kv: str) -> None:
    model = open_tiny(tmp_path)
    first = Sequence.empty(model.cfg, kv)
    model.forward(TOKENS[:30], first)
    second = first.clone()
    other = [96 - token for token in TOKENS]
    mixed = [(model.step(TOKENS[at], first), model.step(other[at], second)) for at in range(30, 60)]
    assert first.tokens == TOKENS[:60] and second.tokens == TOKENS[:30] + other[30:60]
    for column, tokens in enumerate((TOKENS, other)):
        alone = Sequence.empty(model.cfg, kv)
        model.forward(TOKENS[:30], alone)
        for at in range(30, 60):
            np.testing.assert_array_equal(model.step(tokens[at], alone), mixed[at - 30][column])


def test_clone_of_an_empty_sequence(tmp_path: Path) -> None:
    model = open_tiny(tmp_path)
    first = Sequence.empty(model.cfg)
    second = first.clone()
    want = model.forward(TOKENS[:5], first)
    assert len(second) == 0
    np.testing.assert_array_equal(model.forward(TOKENS[:5], second), want)


@every_cache
@pytest.mark.parametrize("length", [0, 1, 29, 30])
def test_clone_of_a_beginning(tmp_path: Path, kv: str, length: int) -> None:
    """It goes on as a text that was never longer, and takes no more room than it needs."""
    model = open_tiny(tmp_path)
    first, short = Sequence.empty(model.cfg, kv), Sequence.empty(model.cfg, kv)
    for token in TOKENS[:30]:
        model.step(token, first)
    for token in TOKENS[:length]:
        model.step(token, short)
    first.sure = 20
    copy = first.clone(length)
    assert copy.tokens == TOKENS[:length] and copy.sure == min(20, length)
    assert copy.nbytes * FIRST_CAPACITY == first.nbytes * max(length, 1)
    for token in TOKENS[50:60]:
        np.testing.assert_array_equal(model.step(token, copy), model.step(token, short))
    assert first.tokens == TOKENS[:30] and first.sure == 20
    whole = Sequence.empty(model.cfg, kv)
    for token in TOKENS[:30]:
        model.step(token, whole)
    np.testing.assert_array_equal(model.step(5, first), model.step(5, whole))


@pytest.mark.parametrize("length", [-1, 31, 1000])
def test_clone_of_what_is_not_there(tmp_path: Path, length: int) -> None:
    model = open_tiny(tmp_path)
    seq = Sequence.empty(model.cfg)
    model.forward(TOKENS[:30], seq)
    with pytest.raises(ValueError, match=f"cannot take {length} of 30 tokens"):
        seq.clone(length)


@every_cache
def test_growth_changes_nothing(tmp_path: Path, kv: str) -> None:
    """Over three doublings, against a cache that had the room from the start."""
    model = open_tiny(tmp_path, max_position_embeddings=8 * FIRST_CAPACITY)
    tokens = np.random.default_rng(3).integers(2, 97, 4 * FIRST_CAPACITY + 3).tolist()
    grown, roomy = Sequence.empty(model.cfg, kv), Sequence.empty(model.cfg, kv)
    for layer in roomy.layers:
        layer.reserve(len(tokens), 0)
    capacities = set()
    for start in range(0, len(tokens), 61):
        part = tokens[start : start + 61]
        np.testing.assert_array_equal(model.forward(part, grown), model.forward(part, roomy))
        capacities.add(grown.layers[0].capacity)
    assert sorted(capacities) == [FIRST_CAPACITY << n for n in range(4)]


@every_cache
@pytest.mark.parametrize("head_dim", [16, 24])
def test_nbytes_are_those_of_the_arrays(tmp_path: Path, kv: str, head_dim: int) -> None:
    model = open_tiny(tmp_path, head_dim=head_dim)
    cfg, seq = model.cfg, Sequence.empty(model.cfg, kv)
    assert seq.nbytes == 0
    model.forward(TOKENS[:3], seq)
    width = -(-head_dim // _core.HEAD_PAD) * _core.HEAD_PAD
    row = {"f32": 4 * width, "f16": 2 * width, "int8": width + 4}[kv]
    assert seq.nbytes == 2 * cfg.n_layers * cfg.n_kv_heads * FIRST_CAPACITY * row
    clone = seq.clone()
    assert clone.nbytes == 2 * cfg.n_layers * cfg.n_kv_heads * 3 * row
    seq.trim(0)
    assert seq.nbytes > clone.nbytes  # the room stays for what comes next


def test_context_overflow(tmp_path: Path) -> None:
    model = open_tiny(tmp_path, max_position_embeddings=50)
    seq = Sequence.empty(model.cfg)
    want = model.forward(TOKENS[:49], seq)
    with pytest.raises(RaloError, match="51 tokens are more than the model's context of 50"):
        model.forward(TOKENS[49:51], seq)
    assert seq.tokens == TOKENS[:49]
    model.step(TOKENS[49], seq)
    with pytest.raises(RaloError, match="51 tokens"):
        model.step(TOKENS[50], seq)
    seq.trim(0)
    np.testing.assert_array_equal(model.forward(TOKENS[:49], seq), want)


def test_int8_cache_is_smaller_and_near(tmp_path: Path) -> None:
    model = open_tiny(tmp_path)
    found = {}
    for kv in KV_KINDS:
        seq = Sequence.empty(model.cfg, kv)
        found[kv] = model.forward(TOKENS, seq), seq.nbytes
    error = np.abs(found["int8"][0] - found["f16"][0]).mean()
    assert 0 < error < 0.02 * found["f16"][0].std()
    assert found["int8"][1] < 0.7 * found["f16"][1]


def test_reserve_keeps_what_is_there(tmp_path: Path) -> None:
    model = open_tiny(tmp_path)
    seq = Sequence.empty(model.cfg)
    model.forward(TOKENS[:10], seq)
    layer: LayerCache = seq.layers[0]
    before = [array[:, :10].copy() for array in layer._arrays]
    layer.reserve(FIRST_CAPACITY + 1, 10)
    assert layer.capacity == 2 * FIRST_CAPACITY
    for old, new in zip(before, layer._arrays, strict=True):
        np.testing.assert_array_equal(new[:, :10], old)
        assert old.any() and not new[:, 10:].any()
