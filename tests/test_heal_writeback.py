"""What was learned comes back into packed weights: nothing learned changes nothing, and what was is what runs."""

from __future__ import annotations

import numpy as np
import pytest
from heal_models import factored, from_seeds, held, made, tiny_weights, trains, with_rest
from shared_models import scores

from ralo.errors import RaloError
from ralo.heal.plain import PlainModel
from ralo.heal.takeout import ALL, FACTORS, plain_model
from ralo.heal.writeback import written_back
from ralo.matrix import padded
from ralo.model import Model
from ralo.sequence import Sequence

torch = pytest.importorskip("torch", reason="healing needs torch: pip install ralo[heal]")
from ralo.heal.network import Network  # noqa: E402

TOKENS = np.random.default_rng(1).integers(2, 97, 30).tolist()
MAKERS = {"dense": lambda m, p: m, "factors": factored(20), "rest": with_rest(9), "train": trains(False)}
MAKERS |= {"seeds": from_seeds}


def network_scores(plain: PlainModel) -> np.ndarray:
    with torch.no_grad():
        return Network(plain)(torch.tensor([TOKENS]))[0].numpy()


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_learned_changes_nothing(tmp_path, kind, quant):
    """Rounding int8 once more may move a value by a step of its group; all else is the same."""
    cfg, weights = tiny_weights(tmp_path, quant=quant)
    weights = made(weights, MAKERS[kind])
    train = ALL if kind == "dense" else FACTORS
    back = written_back(weights, Network(plain_model(cfg, weights, 8, train)).trained_arrays())
    for name, matrix in weights.matrices().items():
        other = back.matrices()[name]
        assert (other.quant, other.parts, other.ic) == (matrix.quant, matrix.parts, matrix.ic)
        assert (other is matrix) == (name == "head")
        if kind == "seeds" and name != "head":
            assert other.digest() == matrix.digest()
            continue
        for a, b in zip(getattr(matrix, "steps", [matrix]), getattr(other, "steps", [other]), strict=True):
            near = 1.01 * np.abs(held(a)).max() / 127 if quant == "int8" else 0
            np.testing.assert_allclose(held(b), held(a), rtol=0, atol=near)


@pytest.mark.parametrize("train", [FACTORS, ALL])
@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", MAKERS)
def test_what_was_learned_is_what_runs(tmp_path, kind, quant, train):
    cfg, weights = tiny_weights(tmp_path, quant=quant)
    weights = made(weights, MAKERS[kind], ("qkv", "down"))
    plain, rng = plain_model(cfg, weights, 30, train), np.random.default_rng(5)
    student = Network(plain)
    with torch.no_grad():
        for tensor in student.trained().values():
            tensor += 0.3 * tensor.abs().mean() * torch.tensor(rng.standard_normal(tensor.shape), dtype=torch.float32)
        want = student(torch.tensor([TOKENS]))[0].numpy()
    back = written_back(weights, student.trained_arrays())
    got = network_scores(plain_model(cfg, back, 30))
    bound = {"f32": 1e-5, "bf16": 0.03, "int8": 0.06, "int4": 1e-5}[quant] * np.abs(want).max()  # int4 learned rounded
    np.testing.assert_allclose(got, want, rtol=0, atol=max(bound, 0.02 if kind == "seeds" else 0))  # deltas are bf16
    kernels = scores(Model(cfg, back), TOKENS, len(TOKENS), Sequence.empty(cfg, "f32"))
    np.testing.assert_allclose(kernels, got, rtol=0, atol=2e-5 * np.abs(got).max())
    moved = np.abs(got - network_scores(plain)).max()
    assert moved > 0.05 or (kind in ("dense", "rest") and train == FACTORS)  # with a rest, factors say little


def test_what_did_not_learn_is_the_very_same(tmp_path):
    cfg, weights = tiny_weights(tmp_path)
    weights = made(weights, factored(20), ("qkv", "up"))
    learned = Network(plain_model(cfg, weights, 8, FACTORS)).trained_arrays()
    back = written_back(weights, {name: 2 * values for name, values in learned.items() if "qkv.0" in name})
    for i, (a, b) in enumerate(zip(weights.layers, back.layers, strict=True)):
        assert a.up is b.up and a.down is b.down and a.o is b.o and a.attn_norm is b.attn_norm, i
        assert b.qkv.steps[1] is a.qkv.steps[1]
        at = padded(20)
        one, two = held(a.qkv.steps[0]), held(b.qkv.steps[0])
        np.testing.assert_allclose(two[:, :at], 2 * one[:, :at], rtol=0.01, atol=1e-3)
        assert np.array_equal(a.qkv.steps[0].data[:, at:], b.qkv.steps[0].data[:, at:])  # k and v, kept as they are
    assert back.embed is weights.embed and back.head is weights.head


def test_what_is_not_finite(tmp_path):
    _, weights = tiny_weights(tmp_path)
    broken = np.full((64, 192), np.nan, np.float32)
    with pytest.raises(RaloError, match=r"layers.0.qkv.0: what was learned is not finite; heal again with a smaller"):
        written_back(weights, {"layers.0.qkv.0": broken})
