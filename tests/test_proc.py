"""Procedural weights on whole models: off is dense, on is the model of the rebuilt weights, and figures are true."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo import metrics
from ralo.compose import compose
from ralo.formats import packed
from ralo.lm import LM
from ralo.loader import open_checkpoint
from ralo.matrix import Matrix
from ralo.model import FEW, Model
from ralo.modes import Proc
from ralo.modes.base import LayerSlots, Override
from ralo.modes.proc import ProcSlot
from ralo.proc.matrix import ProcMatrix
from ralo.proc.pack import build_proc
from ralo.quality import losses, nll, perplexity
from ralo.sequence import Sequence
from ralo.weights import PLACES, build

TOKENS = np.random.default_rng(4).integers(2, 97, 61).tolist()
TEXT = np.random.default_rng(5).integers(2, 97, 1100).tolist()
MADE = Proc(bits=4.2, target="both", deltas=0.01, shed_eps=0.0)


def write_model(to: Path, kind: str = "llama", **config) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 160, "max_position_embeddings": 1024}
    return write_hf(to, kind, **{**sizes, **config})


def pack(model: Path, to: Path, mode: Proc = MADE, quant: str = "int8") -> Path:
    ckpt = open_checkpoint(str(model))
    cfg, weights = build(ckpt, quant)
    made, parts = build_proc(ckpt, cfg, weights, mode, TEXT, to, None)
    packed.save(ckpt, made.weights, to, made.about)
    parts.remove()
    return to


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("proc") / "model")


@pytest.fixture(scope="module")
def made(model: Path) -> Path:
    return pack(model, model.with_name("pack"))


CONFIGS = {
    "plain": {},
    "padded, biased": {"kind": "qwen2", "hidden_size": 80},
    "relu, biased": {"mlp_bias": True, "hidden_act": "relu"},
}


@pytest.fixture(scope="module", params=CONFIGS)
def unusual(request, tmp_path_factory) -> Path:
    """A model, its pack beside it."""
    model = write_model(tmp_path_factory.mktemp("proc") / "model", **CONFIGS[request.param])
    pack(model, model.with_name("pack"))
    return model


def opened(model: Path, *modes, quant: str = "int8") -> LM:
    return ralo.load(model, quant, modes=list(modes))


def using(made: Path, **settings) -> Proc:
    return Proc(pack=str(made), **{"target": "both", "shed_eps": 0.0, **settings})


def decoded(lm: LM, seq: Sequence | None = None, tokens=TOKENS[:-1], dense: bool = False) -> np.ndarray:
    seq = lm.new_sequence() if seq is None else seq
    return np.stack([lm.model.step(t, seq, dense) for t in tokens])


def matrices(lm: LM) -> list[ProcMatrix]:
    return [o.slot.matrix for s in lm.model.slots for o in s.taken.values() if isinstance(o.slot, ProcSlot)]


def rebuilt(lm: LM) -> LM:
    """The same model with its procedural weights unpacked to f32, and no mode."""
    layers = []
    for layer, slots in zip(lm.model.weights.layers, lm.model.slots, strict=True):
        plain = {}
        for place in PLACES:
            if f"{place}_weights" in slots.taken:
                m = slots.taken[f"{place}_weights"].slot.matrix
                plain[place] = Matrix("f32", m.ic, m.parts, m.unpack().view(np.uint8), None, getattr(layer, place).bias)
        layers.append(layer.using(plain))
    weights = replace(lm.model.weights, layers=tuple(layers))
    return LM(lm.path, Model(lm.model.cfg, weights), lambda: lm.tokenizer, lm.kv, lm.guard.options)


# ---------------------------------------------------------------- off, on


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
def test_off_point_is_dense_bit_for_bit(model, made, quant):
    dense = decoded(opened(model, quant=quant))
    for off in (Proc.off(), using(made, on="off")):
        lm = opened(model, off, quant=quant)
        assert np.array_equal(decoded(lm), dense) and not lm.model.has_modes


@pytest.mark.parametrize("target", ["mlp", "attn", "both"])
def test_on_differs_from_dense_and_dense_does_not_change(model, made, target):
    dense, lm = decoded(opened(model)), opened(model, using(made, target=target))
    assert not np.array_equal(decoded(lm), dense)
    assert np.array_equal(decoded(lm, dense=True), dense)
    places = {"mlp": {"up", "down"}, "attn": {"qkv", "o"}, "both": set(PLACES)}[target]
    assert [set(s.taken) for s in lm.model.slots] == [{f"{p}_weights" for p in places}] * 2


def test_on_is_the_model_of_the_rebuilt_weights(level, unusual):
    lm = opened(unusual, using(unusual.with_name("pack")))
    np.testing.assert_allclose(decoded(lm), decoded(rebuilt(lm)), atol=0.02)
    for tokens in (TOKENS[:5], TOKENS):
        ours = lm.model.forward(tokens, lm.new_sequence())
        np.testing.assert_allclose(ours, rebuilt(lm).model.forward(tokens, lm.new_sequence()), atol=0.02)


def test_it_predicts_about_what_dense_does(model, made):
    assert 0 < perplexity(opened(model, using(made)).model, TOKENS, 60).kl < 0.05


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
    np.testing.assert_allclose(losses(lm.model, TOKENS, 60), nll(alone, np.asarray(TOKENS[1:])), atol=2e-3)


def test_texts_do_not_disturb_each_other(model, made):
    lm = opened(model, using(made))
    a, b = lm.new_sequence(), lm.new_sequence()
    turns = [(lm.model.step(t, a), lm.model.step(u, b))[0] for t, u in zip(TOKENS, TOKENS[::-1], strict=True)]
    assert np.array_equal(np.stack(turns), decoded(lm, tokens=TOKENS))
    copy = a.clone()
    a.trim(20)
    copy.trim(20)
    assert np.array_equal(decoded(lm, a, TOKENS[20:30]), decoded(lm, copy, TOKENS[20:30]))


@pytest.mark.parametrize("quant", ["int8", "f32"])
def test_the_pack_alone_is_the_pack_over_its_model(model, made, tmp_path, quant):
    made = made if quant == "int8" else pack(model, tmp_path / "pack", quant=quant)
    alone, over = ralo.load(made), opened(model, using(made), quant=quant)
    assert np.array_equal(decoded(alone), decoded(over))
    assert alone.quant == quant and not alone.model.has_modes
    prompts = [lm.model.forward(TOKENS, lm.new_sequence(), exact=False) for lm in (alone, over)]
    assert np.array_equal(*prompts)
    assert alone.model.nbytes < opened(model, quant=quant).model.nbytes < over.model.nbytes


def test_a_pack_goes_with_every_precision_of_its_model(model, made):
    np.testing.assert_allclose(decoded(opened(model, using(made), quant="f32")), decoded(ralo.load(made)), atol=0.2)


# ---------------------------------------------------------------- the guard


@pytest.mark.parametrize("place", PLACES)
def test_a_nan_in_the_weights_falls_back_to_dense_and_is_counted(model, made, place):
    lm = opened(model, using(made))
    dense = decoded(lm, dense=True)
    m = lm.model.slots[1].taken[f"{place}_weights"].slot.matrix
    scales = m.scales.copy()
    scales[3, 0] = 0x7FC0
    bad = ProcSlot(ProcMatrix(m.ic, m.parts, m.data, scales, m.bias, m.tables, m.deltas), 0)
    slots = [LayerSlots(), LayerSlots()]
    slots[1].put(f"{place}_weights", bad, "proc", "damaged")
    lm.model.use(slots)
    assert np.array_equal(decoded(lm), dense)
    assert bad.nonfinite == len(dense) == lm.metrics()["guard.nonfinite"]
    together = lm.model.forward(TOKENS[:5], lm.new_sequence())
    assert np.isfinite(together).all() and bad.nonfinite == len(dense) + 1


# ---------------------------------------------------------------- figures


def test_metrics(model, made):
    lm = opened(model, using(made, target="mlp"))
    found, all_of_them = lm.metrics(), matrices(lm)
    proc = {name: value for name, value in found.items() if name.startswith("proc.")}
    assert proc == {
        "proc.fanout_effective": sum(len(m.deltas.at) for m in all_of_them) / sum(m.ic for m in all_of_them),
        "proc.trims": 0,
        "proc.mem_ratio": sum(m.nbytes for m in all_of_them) / sum(2 * m.ic * m.oc for m in all_of_them),
        "proc.base_scale": 0,
    }
    assert proc["proc.fanout_effective"] > 0.5 and proc["proc.mem_ratio"] < 0.45
    assert set(proc) == {name for name in metrics.NAMES if name.startswith("proc.")}
    assert [set(layer) for layer in lm.layer_metrics()] == [set(proc)] * 2
    assert found["weight_bytes"] == opened(model).model.nbytes + sum(m.nbytes for m in all_of_them)


def test_a_lower_watermark_sheds_and_counts(model, made):
    full = opened(model, using(made))
    want, each = decoded(full), [np.diff(m.deltas.starts.astype(int)) for m in matrices(full)]
    assert any((counts > 1).any() for counts in each)
    lm = opened(model, using(made, watermark=1))
    assert lm.metrics()["proc.trims"] == sum(np.maximum(counts - 1, 0).sum() for counts in each) > 0
    assert all(np.diff(m.deltas.starts).max() <= 1 for m in matrices(lm))
    assert not np.array_equal(decoded(lm), want)
    lm.use(compose([using(made)]))
    assert np.array_equal(decoded(lm), want) and lm.metrics()["proc.trims"] == 0
    none = opened(model, using(made, shed_eps=1e9))
    assert none.metrics()["proc.trims"] == sum(counts.sum() for counts in each)
    assert none.metrics()["proc.fanout_effective"] == 0


def test_bytes_read_are_those_of_the_seeds(model, made):
    lm = opened(model, using(made))
    counts = []
    for dense in (False, True):
        before = lm.model.bytes_read
        decoded(lm, dense=dense)
        counts.append(lm.model.bytes_read - before)
    ours = sum(m.data.nbytes + m.scales.nbytes + 4 * m.ic + 4 * len(m.deltas.at) for m in matrices(lm))
    theirs = sum(getattr(w, p).nbytes for w in lm.model.weights.layers for p in PLACES)
    assert counts[1] - counts[0] == len(TOKENS[:-1]) * (theirs - ours) > 0
