"""KWTA on whole models: dense at its off point, what decoding gives is what evaluation measures, honest counters."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo import KWTA, RaloError, _core, texts
from ralo.calibrate import calibrate
from ralo.compose import compose
from ralo.lm import LM
from ralo.modes.base import Override
from ralo.modes.share import KEEP_ALL
from ralo.quality import losses, nll, perplexity
from ralo.sequence import Sequence

TOKENS = np.random.default_rng(4).integers(2, 97, 61).tolist()
SETTINGS = {
    "plain": KWTA(k=0.4),
    "count": KWTA(k_abs=20),
    "top-p": KWTA(p=0.8),
    "top-p by magnitude": KWTA(p=0.8, temp=1.0),
    "duty": KWTA(k=0.4, duty=4),
    "blocks": KWTA(k=0.4, block="16"),
    "renorm": KWTA(k=0.4, renorm="on"),
    "gate first": KWTA(k=0.4, gate="on"),
    "keys": KWTA(k=0.9, keys=0.3, keys_min=8),
    "mlp": KWTA(k=0.4, target="mlp"),
    "attn": KWTA(k=0.4, target="attn"),
    "seed": KWTA(k=0.4, form="seed", duty=2),
    "seed keys": KWTA(k=0.9, form="seed", keys=0.3, keys_min=8),
}


@pytest.fixture(scope="module", params=["silu", "relu"])
def directory(request, tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("kwta") / request.param, "llama", hidden_act=request.param, hidden_size=128)


def opened(directory, *modes, quant: str = "f32") -> LM:
    return ralo.load(directory, quant, modes=list(modes))


def decoded(lm: LM, seq: Sequence | None = None, tokens=TOKENS[:-1], dense: bool = False) -> np.ndarray:
    seq = lm.new_sequence() if seq is None else seq
    return np.stack([lm.model.step(t, seq, dense) for t in tokens])


def everywhere(k: float, **settings) -> KWTA:
    """The same share at every place."""
    return KWTA(gate="off", where=(Override(None, None, {"k": k}),), **settings)


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
def test_off_point_is_dense_bit_for_bit(directory, quant):
    lm = opened(directory, KWTA.off(), quant=quant)
    assert np.array_equal(decoded(lm), decoded(lm, dense=True))
    lm = opened(directory, KWTA(on="off", k=0.1), quant=quant)
    assert not lm.model.has_modes


@pytest.mark.parametrize("name", SETTINGS)
def test_on_differs_from_dense_and_dense_does_not_change(directory, name):
    dense = decoded(opened(directory))
    lm = opened(directory, SETTINGS[name])
    assert not np.array_equal(decoded(lm), dense)
    assert np.array_equal(decoded(lm, dense=True), dense)


@pytest.mark.parametrize("name", SETTINGS)
def test_evaluation_is_what_decoding_gives(directory, name):
    """Several tokens at once, with the mode's state, equal the same tokens one by one."""
    lm = opened(directory, SETTINGS[name])
    together = losses(lm.model, TOKENS, 60)
    np.testing.assert_allclose(together, nll(decoded(lm), np.asarray(TOKENS[1:])), atol=2e-3)


@pytest.mark.parametrize("mode", [KWTA(k=0.7), KWTA(k=0.7, gate="off")], ids=["gate first", "channels"])
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_evaluation_is_what_decoding_gives_of_a_trained_model(mode, quant):
    """One token and many round differently, so that now and then another channel wins: the mean hardly moves."""
    lm = ralo.load("mini", quant, modes=[mode])
    tokens = texts.held_out(lm, 768)
    together, one_by_one = losses(lm.model, tokens, 768), nll(decoded(lm, tokens=tokens[:-1]), np.asarray(tokens[1:]))
    assert np.abs(together - one_by_one).mean() < 0.05
    assert together.mean() == pytest.approx(one_by_one.mean(), abs=0.01)


@pytest.mark.parametrize("name", SETTINGS)
def test_clones_go_on_alike_and_trimming_forgets(directory, name):
    lm = opened(directory, SETTINGS[name])
    seq = lm.new_sequence()
    decoded(lm, seq, TOKENS[:21])
    copy = seq.clone()
    assert copy.nbytes > 0
    assert np.array_equal(decoded(lm, seq, TOKENS[21:30]), decoded(lm, copy, TOKENS[21:30]))
    fresh = lm.new_sequence()
    decoded(lm, fresh, TOKENS[:20])  # 20: where winners of every duty here are chosen anew
    seq.trim(20)
    assert np.array_equal(decoded(lm, seq, TOKENS[30:40]), decoded(lm, fresh, TOKENS[30:40]))


@pytest.mark.parametrize("name", SETTINGS)
def test_two_texts_do_not_disturb_each_other(directory, name):
    lm = opened(directory, SETTINGS[name])
    a, b = lm.new_sequence(), lm.new_sequence()
    turns = np.stack([(lm.model.step(t, a), lm.model.step(u, b))[0] for t, u in zip(TOKENS, TOKENS[::-1], strict=True)])
    assert np.array_equal(turns, decoded(lm, tokens=TOKENS))


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["plain", "top-p", "duty", "gate first", "keys", "seed"])
def test_what_is_skipped_is_what_dense_reads_more(directory, name, quant):
    lm = opened(directory, SETTINGS[name], quant=quant)
    start = lm.model.bytes_read
    decoded(lm)
    middle = lm.model.bytes_read
    decoded(lm, dense=True)
    skipped = (lm.model.bytes_read - middle) - (middle - start)
    assert lm.metrics()["kwta.bytes_skipped"] == skipped > 0


def test_counters(directory):
    lm = opened(directory, KWTA(k_abs=32, target="attn"))
    decoded(lm)
    m, layers = lm.metrics(), lm.layer_metrics()
    assert m["kwta.keep_ratio"] == 32 / 96  # 128 channels of qkv, 64 of o
    assert len(layers) == 2 and sum(x["kwta.bytes_skipped"] for x in layers) == m["kwta.bytes_skipped"]
    assert m["kwta.duty_hits"] == 0 and 0 < m["kwta.flicker"] < 1
    lm.use(compose([KWTA(k_abs=32, target="attn", duty=3)]))
    decoded(lm)
    assert lm.metrics()["kwta.duty_hits"] == 4 * 40  # two of three tokens, four places


def test_flicker_of_winners_that_never_change(directory):
    lm = opened(directory, KWTA(k=0.5))
    decoded(lm, tokens=[5] * 40)
    assert lm.metrics()["kwta.flicker"] < 0.4
    decoded(lm)
    assert lm.metrics()["kwta.flicker"] > 0


def test_prompts_are_dense_unless_asked_for(directory):
    lm = opened(directory, KWTA(k=0.3))
    dense = lm.model.prefill(TOKENS, lm.new_sequence(), dense=True)
    assert np.array_equal(lm.model.prefill(TOKENS, lm.new_sequence()), dense)
    lm = opened(directory, KWTA(k=0.3, prefill="on"))
    assert not np.array_equal(lm.model.prefill(TOKENS, lm.new_sequence()), dense)


def test_overrides_hold_where_they_say(directory):
    where = (
        Override(None, None, {"on": "off"}),
        Override(frozenset({1}), frozenset({"down"}), {"on": "on", "k": 0.25}),
    )
    lm = opened(directory, KWTA(k=0.5, gate="off", where=where))
    assert [sorted(s.taken) for s in lm.model.slots] == [[], ["down"]]
    decoded(lm)
    assert lm.metrics()["kwta.keep_ratio"] <= 0.25  # relu has zeros besides
    with pytest.raises(RaloError, match=r"\[\[kwta.where\]\] names layer 7, the model has 2"):
        opened(directory, KWTA(where=(Override(frozenset({7}), None, {"k": 1.0}),)))


def test_k_decides_how_much_is_kept(directory):
    lm = opened(directory, KWTA(k=0.4, gate="off"))
    decoded(lm)
    counts = {p: o.slot.counts() for p, o in lm.model.slots[0].taken.items()}
    share = {p: c["kept"] / c["channels"] for p, c in counts.items()}
    assert share["qkv"] == pytest.approx(0.82, abs=0.02) and share["o"] == pytest.approx(0.5, abs=0.02)
    assert share["down"] <= 0.51


def test_a_profile_chooses_about_as_many(directory):
    lm = opened(directory)
    lm.use(compose([KWTA(k=0.5, gate="off")]), calibrate(lm, TOKENS, 40))
    decoded(lm)
    assert 0.3 < lm.metrics()["kwta.keep_ratio"] < 0.95
    assert perplexity(lm.model, TOKENS, 60).kl > 0


def test_relu_reads_no_neuron_that_its_gate_blocks(tmp_path):
    lm = opened(write_hf(tmp_path / "relu", "llama", hidden_act="relu"), KWTA(k=1.0))
    dense, kept = decoded(lm, dense=True), decoded(lm)
    np.testing.assert_allclose(kept, dense, rtol=1e-4, atol=1e-4)
    assert lm.metrics()["kwta.keep_ratio"] == pytest.approx(0.5, abs=0.1)  # random weights block about half


def test_gate_first_needs_a_gate(tmp_path):
    opt = write_hf(tmp_path / "opt", "opt")
    with pytest.raises(RaloError, match="--kwta-gate=on needs an MLP with a gate"):
        opened(opt, KWTA(gate="on"))
    assert opened(opt, KWTA(k=0.5)).model.has_modes


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "opt", "gpt2"])
def test_every_architecture(tmp_path, kind):
    lm = opened(write_hf(tmp_path / kind, kind), KWTA(k=0.5, keys=0.5, keys_min=8))
    assert np.isfinite(decoded(lm)).all() and lm.metrics()["kwta.bytes_skipped"] > 0
    assert lm.metrics()["guard.nonfinite"] == 0


def test_the_seed_form_is_dense_between_its_steps(directory):
    lm = opened(directory, KWTA(k=0.2, form="seed", duty=3, gate="off"))
    first = lm.new_sequence()
    assert not np.array_equal(decoded(lm, first, TOKENS[:1]), decoded(lm, tokens=TOKENS[:1], dense=True))
    second = first.clone()
    assert np.array_equal(decoded(lm, first, TOKENS[1:2]), decoded(lm, second, TOKENS[1:2], dense=True))


# ---------------------------------------------------------------- sides


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Channels enough for two sides at every place."""
    return write_hf(
        tmp_path_factory.mktemp("kwta") / "wide", "llama", hidden_size=512, intermediate_size=1040, head_dim=64
    )


@pytest.fixture
def run_on():
    """run_on(n): from now on by n threads."""
    before = _core.threads()
    yield _core.set_threads
    _core.set_threads(before)


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("fine", [0.05, 1.0], ids=["halves", "whole"])
@pytest.mark.parametrize("k", [0.5, KEEP_ALL], ids=["fewer", "nearly all"])
def test_sides_give_the_same_bits_on_any_number_of_threads(wide, run_on, quant, fine, k):
    lm = opened(wide, everywhere(k, fine=fine), quant=quant)
    found = []
    for n in (1, 2, 3):
        run_on(n)
        found.append(decoded(lm, tokens=TOKENS[:20]))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
def test_sides_are_counted_as_one(wide, run_on, quant):
    """Bytes not read, winners and their change, whoever chose them."""
    counts = []
    for n in (1, 2):
        run_on(n)
        lm = opened(wide, KWTA(k=0.5), quant=quant)
        decoded(lm, tokens=TOKENS[:40])
        slots = [layer.taken[place].slot for layer in lm.model.slots for place in ("qkv", "o", "down")]
        counts.append([slot.counts() for slot in slots])
    assert counts[0] == counts[1]
    assert all(c["steps"] == 40 and c["bytes_skipped"] > 0 for c in counts[0])
    lists = [isinstance(slot, _core.KwtaInput) for slot in slots]  # who keeps all has no winners that change
    assert lists == [quant != "int8", True, True] * 2
    assert [c["compared"] > 0 for c in counts[0]] == lists


def test_each_side_has_winners_in_proportion():
    """The largest |x| * norm of the first 272 channels of 512, and of the others."""
    n, k, middle = 512, 128, 272
    slot = _core.KwtaInput(n, None, 1, "top", k, 1.0, 1, False, False, 0.0, None, 0, 0.0)
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    shares = (k * middle // n, k - k * middle // n)
    sides = np.split(np.abs(x), [middle])
    want = np.concatenate([np.sort(np.argsort(-s)[:share]) for s, share in zip(sides, shares, strict=True)])
    want[shares[0] :] += middle
    assert slot.winners(x) == want.tolist()
