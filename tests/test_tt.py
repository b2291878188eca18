"""Factors on whole models: off is dense, on is the model of the multiplied weights; what is no number falls back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_proc import CONFIGS, TOKENS, decoded, opened, rebuilt, write_model
from tiny_factors import write_pack

import ralo
from ralo.lm import LM
from ralo.matrix import Matrix
from ralo.model import FEW
from ralo.modes import TT
from ralo.modes.base import LayerSlots, Override
from ralo.modes.tt import FactorSlot
from ralo.quality import losses, nll
from ralo.tt.matrix import FactoredMatrix
from ralo.weights import PLACES


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("tt") / "model")


@pytest.fixture(scope="module")
def made(model: Path) -> Path:
    return write_pack(model, model.with_name("pack"))


@pytest.fixture(scope="module", params=CONFIGS)
def unusual(request, tmp_path_factory) -> Path:
    """A model, its pack beside it."""
    model = write_model(tmp_path_factory.mktemp("tt") / "model", **CONFIGS[request.param])
    write_pack(model, model.with_name("pack"))
    return model


def using(made: Path, **settings) -> TT:
    return TT(pack=str(made), **settings)


def matrices(lm: LM) -> list[FactoredMatrix]:
    return [o.slot.matrix for s in lm.model.slots for o in s.taken.values() if isinstance(o.slot, FactorSlot)]


# ---------------------------------------------------------------- off, on


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
def test_off_point_is_dense_bit_for_bit(model, made, quant):
    dense = decoded(opened(model, quant=quant))
    for off in (TT.off(), using(made, on="off")):
        lm = opened(model, off, quant=quant)
        assert np.array_equal(decoded(lm), dense) and not lm.model.has_modes


@pytest.mark.parametrize("target", ["mlp", "attn", "both"])
def test_on_differs_from_dense_and_dense_does_not_change(model, made, target):
    dense, lm = decoded(opened(model)), opened(model, using(made, target=target))
    assert not np.array_equal(decoded(lm), dense)
    assert np.array_equal(decoded(lm, dense=True), dense)
    places = {"mlp": {"up", "down"}, "attn": {"qkv", "o"}, "both": set(PLACES)}[target]
    assert [set(s.taken) for s in lm.model.slots] == [{f"{p}_weights" for p in places}] * 2


def test_on_is_the_model_of_the_multiplied_weights(level, unusual):
    lm = opened(unusual, using(unusual.with_name("pack")))
    np.testing.assert_allclose(decoded(lm), decoded(rebuilt(lm)), atol=0.02)
    for tokens in (TOKENS[:5], TOKENS):
        ours = lm.model.forward(tokens, lm.new_sequence())
        np.testing.assert_allclose(ours, rebuilt(lm).model.forward(tokens, lm.new_sequence()), atol=0.02)


def test_the_same_again_and_at_any_number_of_threads(model, made, threads):
    lm = opened(model, using(made))
    want = decoded(lm)
    assert np.array_equal(decoded(lm), want)
    ralo._core.set_threads(1)
    assert np.array_equal(decoded(lm), want)


def test_overrides_hold_where_they_say(model, made):
    where = (Override(None, None, {"on": "off"}), Override(frozenset({1}), frozenset({"down"}), {"on": "on"}))
    lm = opened(model, using(made, where=where))
    assert [sorted(s.taken) for s in lm.model.slots] == [[], ["down_weights"]]


# ---------------------------------------------------------------- batches, texts, the pack alone


def test_a_few_tokens_get_their_own_bits_and_evaluation_is_what_decoding_gives(model, made):
    lm = opened(model, using(made))
    alone = decoded(lm)
    together = lm.model.logits(lm.model.forward(TOKENS[:FEW], lm.new_sequence()))
    assert np.array_equal(together, alone[:FEW])
    np.testing.assert_allclose(losses(lm.model, TOKENS, 60), nll(alone, np.asarray(TOKENS[1:])), atol=5e-3)


def test_texts_do_not_disturb_each_other(model, made):
    lm = opened(model, using(made))
    a, b = lm.new_sequence(), lm.new_sequence()
    turns = [(lm.model.step(t, a), lm.model.step(u, b))[0] for t, u in zip(TOKENS, TOKENS[::-1], strict=True)]
    whole = decoded(lm, tokens=TOKENS)
    assert np.array_equal(np.stack(turns), whole)
    copy = a.clone()
    a.trim(20)
    copy.trim(20)
    assert np.array_equal(decoded(lm, a, TOKENS[20:30]), whole[20:30])
    assert np.array_equal(decoded(lm, copy, TOKENS[20:30]), whole[20:30])


@pytest.mark.parametrize("quant", ["int8", "f32"])
def test_the_pack_alone_is_the_pack_over_its_model(model, made, tmp_path, quant):
    made = made if quant == "int8" else write_pack(model, tmp_path / "pack", quant)
    alone, over = ralo.load(made), opened(model, using(made), quant=quant)
    assert np.array_equal(decoded(alone), decoded(over))
    assert alone.quant == quant and not alone.model.has_modes and alone.storage == f"{quant} and tt"
    prompts = [lm.model.forward(TOKENS, lm.new_sequence(), exact=False) for lm in (alone, over)]
    assert np.array_equal(*prompts)
    assert (
        alone.model.nbytes
        < over.model.nbytes
        == opened(model, quant=quant).model.nbytes + sum(m.nbytes for m in matrices(over))
    )
    own = ralo.load(made, modes=[TT()])  # what it has already, under the guard
    assert len(matrices(own)) == 8 and np.array_equal(decoded(own), decoded(over))


def test_a_pack_goes_with_every_precision_of_its_model(model, made):
    lm = opened(model, using(made), quant="f32")
    assert {s.quant for m in matrices(lm) for s in m.steps} == {"int8", "int4"}
    np.testing.assert_allclose(decoded(lm), decoded(ralo.load(made)), atol=0.2)


# ---------------------------------------------------------------- the guard


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80], ids=["nan", "inf"])
@pytest.mark.parametrize("place", PLACES)
def test_a_planted_value_falls_back_to_dense_and_is_counted(model, made, place, bits):
    lm = opened(model, using(made))
    dense = decoded(lm, dense=True)
    m = lm.model.slots[1].taken[f"{place}_weights"].slot.matrix
    first, *rest = m.steps
    scales = first.scales.copy()
    scales[3, 0] = bits
    first = Matrix(first.quant, first.ic, first.parts, first.data, scales, None)
    bad = FactorSlot(FactoredMatrix(m.ic, m.parts, m.train, [first, *rest], m.bias))
    slots = [LayerSlots(), LayerSlots()]
    slots[1].put(f"{place}_weights", bad, "tt", "damaged")
    lm.model.use(slots)
    assert np.array_equal(decoded(lm), dense)
    assert bad.nonfinite == len(dense) == lm.metrics()["guard.nonfinite"]
    together = lm.model.forward(TOKENS[:5], lm.new_sequence())
    assert np.isfinite(together).all() and bad.nonfinite == len(dense) + 1
