"""The network that learns gives the scores that ralo's own kernels give, of every architecture and kind of weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from heal_models import factored, from_seeds, made, tiny_weights, trains, with_rest
from shared_models import scores

import ralo
from ralo.config import ModelConfig
from ralo.heal.plain import PlainModel
from ralo.heal.takeout import ALL, FACTORS, plain_model
from ralo.matrix import Matrix
from ralo.model import Model
from ralo.modes import KWTA
from ralo.sequence import Sequence
from ralo.weights import PLACES, Weights

torch = pytest.importorskip("torch", reason="healing needs torch: pip install ralo[heal]")
from ralo.heal.network import Network  # noqa: E402

torch.set_num_threads(1)
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt2"]
TOKENS = np.random.default_rng(1).integers(2, 97, 60).tolist()
MAKERS = {
    "factors": factored(20),
    "factors and rest": with_rest(9),
    "train": trains(False),
    "train backwards": trains(True),
    "seeds": from_seeds,
}
# Both add up the same floats, in another order: rounding of 2^-24 a sum, through a few layers.
NEAR = 2e-5


def kernels(cfg: ModelConfig, weights: Weights) -> np.ndarray:
    return scores(Model(cfg, weights), TOKENS, len(TOKENS), Sequence.empty(cfg, "f32"))


def network(plain: PlainModel) -> np.ndarray:
    """Scores of the second of two texts: a batch does not mix them."""
    other = TOKENS[::-1]
    with torch.no_grad():
        return Network(plain)(torch.tensor([other, TOKENS]))[1].numpy()


def assert_near(got: np.ndarray, want: np.ndarray, bound: float = NEAR) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=bound * np.abs(want).max())


@pytest.mark.parametrize("quant", ["f32", "int8"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_dense(tmp_path, kind, quant):
    cfg, weights = tiny_weights(tmp_path, kind, quant)
    assert_near(network(plain_model(cfg, weights, 60)), kernels(cfg, weights))


@pytest.mark.parametrize("quant", ["bf16", "int4"])
def test_other_precisions(tmp_path, quant):
    cfg, weights = tiny_weights(tmp_path, quant=quant)
    assert_near(network(plain_model(cfg, weights, 60)), kernels(cfg, weights))


@pytest.mark.parametrize("quant", ["f32", "int8"])
@pytest.mark.parametrize("made_of", MAKERS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_made_weights(tmp_path, kind, made_of, quant):
    small = {"n_inner": 80} if kind == "gpt2" else {}
    cfg, weights = tiny_weights(tmp_path, kind, quant, **small)
    new = made(weights, MAKERS[made_of])
    want = kernels(cfg, new)
    assert made_of == "factors and rest" or not np.allclose(want, kernels(cfg, weights), atol=1e-2)
    for train in (FACTORS, ALL):  # what learns starts as it is stored
        assert_near(network(plain_model(cfg, new, 60, train)), want)


CONFIGS = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "part of a head turns": {"partial_rotary_factor": 0.5},
    "one head of keys": {"num_key_value_heads": 1},
    "odd widths": {"hidden_size": 80, "head_dim": 24, "intermediate_size": 100},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "relu": {"hidden_act": "relu"},
    "relu2": {"hidden_act": "relu2"},
    "gelu": {"hidden_act": "gelu"},
    "gelu_tanh": {"hidden_act": "gelu_new"},
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_configs(tmp_path, config):
    cfg, weights = tiny_weights(tmp_path, quant="f32", **CONFIGS[config])
    cfg = replace(cfg, max_context=128)  # of `dynamic`, to look beyond what it was trained for
    assert_near(network(plain_model(cfg, weights, 60)), kernels(cfg, weights))


def test_shorter_texts_and_each_layers_window(tmp_path):
    cfg, weights = tiny_weights(tmp_path, "mistral", "f32")
    assert cfg.windows == (24, 24)
    plain = plain_model(cfg, weights, 60)
    seen = [network(replace(plain, windows=windows)) for windows in ((24, 24), (24, 0), (0, 0), (60, 99))]
    assert_near(seen[0], kernels(cfg, weights))
    assert not np.allclose(seen[0], seen[1], atol=1e-3) and not np.allclose(seen[1], seen[2], atol=1e-3)
    np.testing.assert_array_equal(seen[2], seen[3])
    with torch.no_grad():
        short = Network(plain)(torch.tensor([TOKENS[:10]]))[0].numpy()
    assert_near(short, seen[0][:10])


# ---------------------------------------------------------------- what learns


def names(plain: PlainModel) -> set[str]:
    learn = Network(plain)
    assert sum(p.numel() for p in learn.parameters()) == sum(a.size for a in learn.trained_arrays().values())
    assert set(learn.trained()) == set(plain.trained)
    return {name.removeprefix("layers.0.") for name in plain.trained if name.startswith("layers.0.")}


def test_what_learns(tmp_path):
    cfg, weights = tiny_weights(tmp_path)
    assert names(plain_model(cfg, weights, 8)) == names(plain_model(cfg, weights, 8, FACTORS)) == set()
    assert names(plain_model(cfg, weights, 8, ALL)) == {"qkv.0", "o.0", "up.0", "down.0"}
    pairs = made(weights, factored(8), ("qkv", "down"))
    assert names(plain_model(cfg, pairs, 8, FACTORS)) == {"qkv.0", "qkv.1", "down.0", "down.1"}
    assert names(plain_model(cfg, pairs, 8, ALL)) >= {"qkv.kept", "o.0", "up.0"}
    seeds = made(weights, from_seeds, ("up",))
    assert names(plain_model(cfg, seeds, 8, FACTORS)) == {"up.deltas"}
    assert Network(plain_model(cfg, seeds, 8, ALL)).trained()["layers.1.up.deltas"].ndim == 1


def test_padding_learns_nothing(tmp_path):
    cfg, weights = tiny_weights(tmp_path, intermediate_size=100)
    plain = plain_model(cfg, made(weights, factored(9)), 60, ALL)
    learn = Network(plain)
    learn(torch.tensor([TOKENS])).square().mean().backward()
    gradients = {name: tensor.grad for name, tensor in learn.trained().items()}
    assert gradients["layers.0.up.0"][:, 9:].abs().max() == 0 < gradients["layers.0.up.0"][:, :9].abs().min()
    assert gradients["layers.0.up.1"][:, 100:128].abs().max() == 0


# ---------------------------------------------------------------- with KWTA in the loop


@pytest.mark.parametrize("config", [{}, {"hidden_act": "relu"}], ids=["silu", "relu: gate first"])
def test_winners_are_those_of_the_mode(tmp_path, config, monkeypatch):
    """Where heads share keys a first token has channels that are exactly alike, of which the kernels take some and the
    network all: here none do. A channel that is nearly the last winner may still fall the other way, rarely."""
    monkeypatch.setattr("ralo.modes.kwta.FROM_MEMORY", 0)  # a gate that is large: only its winning channels are read
    cfg, weights = tiny_weights(tmp_path / "model", quant="f32", num_key_value_heads=4, **config)
    lm = ralo.load(tmp_path / "model", "f32", "f32", modes=[KWTA(k=0.5)])
    want = scores(lm.model, TOKENS, 1, lm.new_sequence())
    plain = plain_model(cfg, weights, 60, ALL, k=0.5)
    got, dense = network(plain), network(plain_model(cfg, weights, 60))
    assert np.median(np.abs(got - want)) < NEAR < 0.02 < np.median(np.abs(dense - want))
    assert_near(got[:20], want[:20])
    gates = [m.gate_only for name, m in plain.maps.items() if name.endswith(".up")]
    assert gates == [bool(config)] * 2 and all(plain.maps[f"layers.0.{p}"].winners for p in PLACES if p != "down")


def test_what_does_not_win_learns_nothing(tmp_path):
    cfg, weights = tiny_weights(tmp_path, quant="f32", num_key_value_heads=4)
    plain = plain_model(cfg, weights, 60, ALL, k=0.3)
    share = plain.maps["layers.0.o"].winners
    learn = Network(plain)
    learn(torch.tensor([TOKENS[:1]])).square().mean().backward()  # one token: its winners alone
    moved = learn.trained()["layers.0.o.0"].grad.abs().amax(dim=1) > 0
    assert int(moved.sum()) == share < len(moved)


def test_a_matrix_is_not_changed(tmp_path):
    cfg, weights = tiny_weights(tmp_path, quant="f32")
    before: Matrix = weights.layers[0].up
    data = before.data.copy()
    learn = Network(plain_model(cfg, weights, 8, ALL))
    with torch.no_grad():
        learn.trained()["layers.0.up.0"].zero_()
    np.testing.assert_array_equal(before.data, data)
