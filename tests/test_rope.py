"""Rotary positions: every scaling rule against transformers, in both spellings of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_models import scores
from tiny import write_hf

import ralo
from ralo.config import Fields, Rope
from ralo.errors import FormatError
from ralo.rope import RopeTable, frequencies, read_rope
from ralo.sequence import Sequence

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "plain, other base": {"rope_type": "default", "rope_theta": 200.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 32},
    "llama3, narrow band": LLAMA3 | {"original_max_position_embeddings": 64, "low_freq_factor": 3.5},
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, attention factor": YARN | {"attention_factor": 0.7},
    "yarn, mscale": YARN | {"mscale": 0.9, "mscale_all_dim": 0.4},
    "yarn, small base": YARN | {"rope_theta": 100.0, "original_max_position_embeddings": 1024},
    "yarn, betas": YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "factor": 16.0},
}


def version_4(rope: dict[str, Any]) -> dict[str, Any]:
    """The keys as files of transformers 4 and before have them."""
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    if rope["rope_type"] == "default":
        return {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling | {"type": rope["rope_type"]}}


def read(config: dict[str, Any], head_dim: int = 64, max_context: int = 128) -> Rope:
    return read_rope(Fields(config, Path("config.json")), head_dim, max_context)


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_mean_the_same(case: str) -> None:
    rope = CASES[case]
    assert read({"rope_parameters": rope}) == read(version_4(rope))
    assert read({"rope_theta": rope["rope_theta"], "rope_scaling": rope}) == read({"rope_parameters": rope})


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("plain")])
@pytest.mark.parametrize("length", [32, 128, 400])
def test_frequencies_equal_transformers(case: str, length: int) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason="needs transformers")
    config = pytest.importorskip("transformers").LlamaConfig(
        **SIZES | {"head_dim": 64}, rope_parameters=dict(CASES[case])
    )
    want, magnitude = utils.ROPE_INIT_FUNCTIONS[CASES[case]["rope_type"]](config, "cpu", seq_len=length)
    got, factor = frequencies(read({"rope_parameters": CASES[case]}), length)
    np.testing.assert_allclose(got, want.numpy(), rtol=2e-6)
    assert factor == pytest.approx(magnitude)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spelling", ["version 4", "version 5"])
def test_models_equal_transformers(tmp_path: Path, case: str, spelling: str) -> None:
    """A prompt and 64 decoded tokens; with the dynamic rule both go past the trained length."""
    hf = pytest.importorskip("reference.hf", reason="needs torch and transformers")
    rope = CASES[case]
    context = {"max_position_embeddings": 48} if case == "dynamic" else {}
    expected = hf.random_model("llama", **SIZES | context, rope_parameters=dict(rope))
    hf.save(expected, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == rope["rope_type"]
    if spelling == "version 4":
        del config["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps(config | version_4(rope)))
    found = ralo.load(tmp_path, quant="f32").model
    tokens, want = hf.greedy(expected, np.random.default_rng(0).integers(0, 97, 60).tolist(), 64)
    np.testing.assert_allclose(scores(found, tokens, 60, Sequence.empty(found.cfg, "f32")), want, rtol=0, atol=2e-5)
    np.testing.assert_allclose(scores(found, tokens, 60), want, rtol=0, atol=2e-3)


def test_every_rule_changes_the_scores(tmp_path: Path) -> None:
    """What the tests above compare would otherwise be equal for no reason."""
    tokens = list(range(2, 82))
    found = {}
    for case, rope in CASES.items():
        path = write_hf(tmp_path / case, "llama", dtype="f32", **SIZES, rope_parameters=rope)
        found[case] = scores(ralo.load(path, quant="f32").model, tokens, 80)[-1]
    del found["dynamic"]  # within the trained length it is plain
    names = list(found)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert np.abs(found[a] - found[b]).max() > 1e-3, (a, b)


def test_factors_equal_llama3() -> None:
    """GGUF files hold Llama 3's rule as one divisor per frequency."""
    rope = CASES["llama3"]
    want, _ = frequencies(read({"rope_parameters": rope}), 128)
    plain, _ = frequencies(read({"rope_theta": 500.0}), 128)
    factors = {"rope_type": "factors", "factors": (plain / want).tolist()}
    got, _ = frequencies(read({"rope_theta": 500.0, "rope_scaling": factors}), 128)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_table_does_not_depend_on_how_it_grew(case: str) -> None:
    rope = read({"rope_parameters": CASES[case]})
    whole = RopeTable(rope)(0, 700)
    grown = RopeTable(rope)
    for start, stop in ((0, 1), (1, 256), (256, 257)):
        grown(start, stop)
    for a, b in zip(whole, grown(0, 700), strict=True):
        assert a.shape == (700, 32) and a.dtype == np.float32
        np.testing.assert_array_equal(a, b)
    middle = grown(300, 310) if case != "dynamic" else RopeTable(rope)(300, 700)
    for a, b in zip(whole, middle, strict=True):
        np.testing.assert_array_equal(a[300:310], b[:10])


def test_partial_rotation_is_of_the_first_part() -> None:
    rope = read({"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}})
    assert rope.dim == 32
    assert read({"rope_theta": 10000.0, "partial_rotary_factor": 0.25}).dim == 16


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "supported: default, dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "'factor' must be a number"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "'rope_theta' must be a number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "must differ"),
        ({"rope_scaling": {"type": "factors", "factors": [1.0]}}, "32 positive numbers"),
        ({"partial_rotary_factor": 0.01}, "rotary width 0"),
    ],
)
def test_refusals_are_one_clear_line(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError, match=reason) as caught:
        read(config)
    assert str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)
