"""Mixed precision on whole models: off is dense, on is the model of the coarser weights, and figures are true."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_proc import TOKENS, decoded, opened, pack, write_model
from tiny_factors import write_pack

import ralo
from ralo import KWTA, TT, Event, Mix, Proc, RaloError, StatePack
from ralo.compose import compose
from ralo.lm import LM
from ralo.matrix import Matrix
from ralo.memory import Arena
from ralo.mix.matrix import rounded
from ralo.model import FEW, Model
from ralo.modes.base import Override
from ralo.modes.mix import CoarseSlot
from ralo.quality import losses, nll
from ralo.remake.values import values
from ralo.weights import PLACES

NAN, INFINITE = 0x7FC0, 0x7F80  # scales, as bf16
PARTS = {"mlp": {"up", "down"}, "attn": {"qkv", "o"}, "both": set(PLACES)}
BIASED = {"attention_bias": True, "mlp_bias": True}
KINDS = {
    "llama": {},
    "mistral": {},
    "qwen2": {"hidden_size": 80},  # padded, biased
    "qwen3": {},
    "opt": {"hidden_size": 64},
    "gpt2": {},
    "biased": BIASED,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("mix") / "model")


@pytest.fixture(scope="module")
def relu(tmp_path_factory) -> Path:
    """Whose silent neurons modes skip row by row."""
    return write_model(tmp_path_factory.mktemp("mix") / "relu", hidden_act="relu", **BIASED)


def filled(lm: LM) -> list[set[str]]:
    return [set(s.taken) for s in lm.model.slots]


def coarse_slots(lm: LM) -> list[CoarseSlot]:
    return [o.slot for s in lm.model.slots for o in s.taken.values() if isinstance(o.slot, CoarseSlot)]


def at_int4(lm: LM, *modes, places=PLACES, quant="int4") -> LM:
    """A model whose own weights are what the mode would make of this one's."""
    layers = tuple(
        layer.using({place: rounded(getattr(layer, place), quant, Arena()) for place in places})
        for layer in lm.model.weights.layers
    )
    weights = replace(lm.model.weights, layers=layers)
    out = LM(lm.path, Model(lm.model.cfg, weights), lambda: lm.tokenizer, lm.kv, lm.guard.options)
    out.use(compose(modes))
    return out


def bytes_of(lm: LM, **how) -> int:
    before = lm.model.bytes_read
    decoded(lm, **how)
    return lm.model.bytes_read - before


# ---------------------------------------------------------------- off, on


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
def test_off_point_is_dense_bit_for_bit(model, quant):
    dense = decoded(opened(model, quant=quant))
    for off in (Mix.off(), Mix(on="off", target="mlp"), Mix(where=(Override(None, None, {"on": "off"}),))):
        lm = opened(model, off, quant=quant)
        assert np.array_equal(decoded(lm), dense) and not lm.model.has_modes


@pytest.mark.parametrize("target", PARTS)
def test_on_differs_from_dense_and_dense_does_not_change(model, target):
    plain, lm = opened(model), opened(model, Mix(target=target))
    dense = decoded(plain)
    assert not np.array_equal(decoded(lm), dense)
    assert np.array_equal(decoded(lm, dense=True), dense)
    assert filled(lm) == [{f"{p}_weights" for p in PARTS[target]}] * 2
    assert np.array_equal(decoded(lm), decoded(at_int4(plain, places=PARTS[target])))


@pytest.mark.parametrize("k", [0.97, 0.5])
@pytest.mark.parametrize("quant", ["f32", "bf16"])
def test_by_halves_of_what_stands_in(model, quant, k):
    """Channels that are read whole are those of the weights that stand in, not of the model's own."""
    halves = KWTA(k=k, gate="off", head="off")
    lm, own = opened(model, halves, Mix(quant="int8"), quant=quant), opened(model, quant=quant)
    at_int8 = at_int4(own, halves, quant="int8")
    assert any("halves" in o.runs for s in lm.model.slots for o in s.taken.values())
    assert np.array_equal(decoded(lm), decoded(at_int8))
    assert np.array_equal(losses(lm.model, TOKENS, 60), losses(at_int8.model, TOKENS, 60))


def test_prompts_are_dense(model):
    lm = opened(model, Mix())
    dense = lm.model.prefill(TOKENS, lm.new_sequence(), dense=True)
    assert np.array_equal(lm.model.prefill(TOKENS, lm.new_sequence()), dense)


@pytest.mark.parametrize(("quant", "share"), [("f32", 0.2), ("bf16", 0.2), ("int8", 0.7)])
def test_it_is_nearly_the_model_at_int4(model, quant, share):
    """Of weights that were rounded to int8 before, one in sixty falls to the other side; else only the head differs."""
    mixed, int4 = opened(model, Mix(), quant=quant), opened(model, quant="int4")
    ours, theirs = decoded(mixed), decoded(int4)
    apart, coarse = np.abs(ours - theirs).mean(), np.abs(decoded(mixed, dense=True) - theirs).mean()
    assert 0 < apart < share * coarse


def test_weights_that_were_never_rounded_are_those_of_the_int4_model(model):
    """The checkpoint is bf16, which f32 and bf16 hold exactly."""
    for quant in ("f32", "bf16"):
        mixed, int4 = opened(model, Mix(), quant=quant), opened(model, quant="int4")
        for slots, layer in zip(mixed.model.slots, int4.model.weights.layers, strict=True):
            for place in PLACES:
                ours, theirs = slots.taken[f"{place}_weights"].slot.matrix, getattr(layer, place)
                here, there = (values("int4", m.data, m.scales) for m in (ours, theirs))
                assert ours.parts == theirs.parts and np.array_equal(here, there)


def test_every_weight_is_about_what_it_was(model):
    lm = opened(model, Mix())
    for slots, layer in zip(lm.model.slots, lm.model.weights.layers, strict=True):
        for place in PLACES:
            made, own = slots.taken[f"{place}_weights"].slot.matrix, getattr(layer, place)
            here, there = (values(m.quant, m.data, m.scales) for m in (made, own))
            assert 0.03 < np.square(here - there).mean() ** 0.5 / np.square(there).mean() ** 0.5 < 0.12


@pytest.mark.parametrize("name", KINDS)
def test_every_architecture(tmp_path, name):
    kind = "llama" if name == "biased" else name
    plain = opened(write_model(tmp_path / name, kind, **KINDS[name]))
    lm = opened(plain.path, Mix())
    ours, same = decoded(lm), at_int4(plain)
    assert np.isfinite(ours).all() and lm.metrics()["guard.nonfinite"] == 0
    assert np.array_equal(ours, decoded(same)) and not np.array_equal(ours, decoded(plain))
    assert bytes_of(lm) == bytes_of(same) < bytes_of(plain)
    for slots, layer in zip(lm.model.slots, plain.model.weights.layers, strict=True):
        for place in PLACES:
            bias, made = getattr(layer, place).bias, slots.taken[f"{place}_weights"].slot.matrix
            assert (bias is None) == (made.bias is None) and (bias is None or np.array_equal(bias, made.bias))


# ---------------------------------------------------------------- where


def test_overrides_hold_where_they_say(model):
    where = (Override(None, None, {"on": "off"}), Override(frozenset({1}), frozenset({"down", "o"}), {"on": "on"}))
    lm = opened(model, Mix(where=where))
    assert filled(lm) == [set(), {"down_weights", "o_weights"}]
    lm = opened(model, Mix(target="mlp", where=where))
    assert filled(lm) == [set(), {"down_weights"}]
    with pytest.raises(RaloError, match=r"\[\[mix.where\]\] names layer 7, the model has 2"):
        opened(model, Mix(where=(Override(frozenset({7}), None, {"on": "off"}),)))


def test_each_place_may_have_its_own_precision(model):
    where = (Override(frozenset({0}), None, {"quant": "int8"}), Override(None, frozenset({"qkv"}), {"on": "off"}))
    lm = opened(model, Mix(where=where), quant="bf16")
    runs = [{name: o.runs for name, o in s.taken.items()} for s in lm.model.slots]
    assert runs == [dict.fromkeys(("o_weights", "up_weights", "down_weights"), q) for q in ("int8", "int4")]
    assert np.isfinite(decoded(lm)).all()


@pytest.mark.parametrize(("quant", "asked"), [("int4", "int4"), ("int8", "int8"), ("int4", "int8")])
def test_a_place_that_is_as_coarse_already_stays(model, quant, asked):
    lm = opened(model, Mix(quant=asked), quant=quant)
    assert not lm.model.has_modes and lm.model.nbytes == opened(model, quant=quant).model.nbytes
    assert np.array_equal(decoded(lm), decoded(opened(model, quant=quant)))


@pytest.fixture(scope="module")
def seeds(model) -> Path:
    return pack(model, model.with_name("seeds"), Proc(bits=4.2, target="mlp", shed_eps=0.0))


@pytest.fixture(scope="module")
def factors(model) -> Path:
    return write_pack(model, model.with_name("factors"))


def test_weights_that_another_mode_makes_are_left_alone(model, seeds, factors):
    for made in (Proc(pack=str(seeds), target="mlp", shed_eps=0.0), TT(pack=str(factors), target="mlp")):
        lm, alone = opened(model, made, Mix(target="attn")), opened(model, made)
        kinds = {"qkv_weights": "mix", "o_weights": "mix", "up_weights": made.name, "down_weights": made.name}
        assert [{name: o.mode for name, o in s.taken.items()} for s in lm.model.slots] == [kinds] * 2
        assert np.isfinite(decoded(lm)).all() and bytes_of(lm) < bytes_of(alone)
        assert lm.metrics()["mix.enabled"] == 4


def test_a_pack_by_itself_is_mixed_where_it_has_plain_weights(seeds):
    lm = ralo.load(seeds, modes=[Mix()])
    assert filled(lm) == [{"qkv_weights", "o_weights"}] * 2
    assert np.isfinite(decoded(lm)).all()


@pytest.mark.parametrize("targets", [("mlp", "mlp"), ("both", "attn"), ("mlp", "both")], ids="-".join)
def test_one_weight_backend_a_place(targets):
    mine, theirs = targets
    for other in (Proc(target=theirs), TT(target=theirs)):
        with pytest.raises(RaloError, match=f"{other.name} and mix do not go together: a layer has one weight backend"):
            compose([Mix(target=mine), other])
    assert len(compose([Mix(target="mlp"), TT(target="attn")]).modes) == 2


# ---------------------------------------------------------------- batches, texts


def test_a_few_tokens_get_their_own_bits_and_evaluation_is_what_decoding_gives(model):
    lm = opened(model, Mix())
    alone = decoded(lm)
    together = lm.model.logits(lm.model.forward(TOKENS[:FEW], lm.new_sequence()))
    assert np.array_equal(together, alone[:FEW])
    np.testing.assert_allclose(losses(lm.model, TOKENS, 60), nll(alone, np.asarray(TOKENS[1:])), atol=2e-3)


def test_clones_go_on_alike_and_trimming_forgets(model):
    lm = opened(model, Mix())
    seq = lm.new_sequence()
    decoded(lm, seq, TOKENS[:21])
    copy = seq.clone()
    assert np.array_equal(decoded(lm, seq, TOKENS[21:30]), decoded(lm, copy, TOKENS[21:30]))
    fresh = lm.new_sequence()
    decoded(lm, fresh, TOKENS[:20])
    seq.trim(20)
    assert np.array_equal(decoded(lm, seq, TOKENS[30:40]), decoded(lm, fresh, TOKENS[30:40]))


def test_two_texts_do_not_disturb_each_other(model):
    lm = opened(model, Mix())
    a, b = lm.new_sequence(), lm.new_sequence()
    turns = [(lm.model.step(t, a), lm.model.step(u, b))[0] for t, u in zip(TOKENS, TOKENS[::-1], strict=True)]
    assert np.array_equal(np.stack(turns), decoded(lm, tokens=TOKENS))


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("target", PARTS)
def test_bytes_read_fall_by_what_the_weights_are_smaller(model, target):
    lm = opened(model, Mix(target=target))
    made = coarse_slots(lm)
    smaller = sum(slot.replaced - slot.matrix.nbytes for slot in made)
    own = sum(getattr(w, p).nbytes for w in lm.model.weights.layers for p in PARTS[target])
    assert sum(slot.replaced for slot in made) == own and smaller > 0.4 * own
    assert bytes_of(lm, dense=True) - bytes_of(lm) == len(TOKENS[:-1]) * smaller
    assert bytes_of(lm, dense=True) == bytes_of(opened(model))


def test_metrics_and_memory(model):
    where = (Override(frozenset({0}), frozenset({"qkv"}), {"on": "off"}),)
    lm, plain = opened(model, Mix(where=where)), opened(model)
    made = coarse_slots(lm)
    took, replaced = sum(m.matrix.nbytes for m in made), sum(m.replaced for m in made)
    found = {name: value for name, value in lm.metrics().items() if name.startswith("mix.")}
    assert found == {"mix.enabled": 7, "mix.mem_ratio": took / replaced}
    assert [layer["mix.enabled"] for layer in lm.layer_metrics()] == [3, 4]
    assert lm.model.nbytes == lm.metrics()["weight_bytes"] == plain.model.nbytes + took
    lm.use(compose([]))
    assert lm.model.nbytes == plain.model.nbytes and np.array_equal(decoded(lm), decoded(plain))


# ---------------------------------------------------------------- damaged weights


def damage(lm: LM, layer: int, place: str, scale: int, where: slice | tuple[int, int] = (3, 0)) -> CoarseSlot:
    slots, name = lm.model.slots[layer], f"{place}_weights"
    taken = slots.taken[name]
    m, scales = taken.slot.matrix, taken.slot.matrix.scales.copy()
    scales[where] = scale
    bad = CoarseSlot(Matrix(m.quant, m.ic, m.parts, m.data, scales, m.bias), taken.slot.replaced)
    slots.put(name, bad, taken.mode, taken.runs)
    lm.model.use(lm.model.slots)
    return bad


@pytest.mark.parametrize("scale", [NAN, INFINITE], ids=["nan", "inf"])
@pytest.mark.parametrize("place", PLACES)
def test_weights_that_are_not_finite_fall_back_to_the_models_own_and_are_counted(model, place, scale):
    where = (Override(None, None, {"on": "off"}), Override(frozenset({1}), frozenset({place}), {"on": "on"}))
    lm = opened(model, Mix(where=where))
    dense = decoded(lm, dense=True)
    bad = damage(lm, 1, place, scale)
    assert np.array_equal(decoded(lm), dense)
    assert bad.nonfinite == len(dense) == lm.metrics()["guard.nonfinite"]
    together = lm.model.forward(TOKENS[:5], lm.new_sequence())
    assert np.isfinite(together).all() and bad.nonfinite == len(dense) + 1


def test_the_other_places_stay_coarse(model):
    lm = opened(model, Mix())
    bad = damage(lm, 0, "down", NAN)
    where = (Override(frozenset({0}), frozenset({"down"}), {"on": "off"}),)
    assert np.array_equal(decoded(lm), decoded(opened(model, Mix(where=where))))
    assert [slot.nonfinite > 0 for slot in coarse_slots(lm)].count(True) == 1 and bad.nonfinite == len(TOKENS) - 1


@pytest.mark.parametrize("place", PLACES)
def test_damaged_weights_under_winners_fall_back_too(model, place):
    lm = opened(model, Mix(), KWTA(k=0.6, gate="off"))
    damage(lm, 0, place, NAN, where=slice(None))  # whoever wins
    assert np.isfinite(decoded(lm)).all()
    assert lm.model.slots[0].taken[place].slot.nonfinite == len(TOKENS) - 1 == lm.metrics()["guard.nonfinite"]


# ---------------------------------------------------------------- with other modes


GATED = {
    "kwta": KWTA(k=0.6, gate="off"),
    "kwta, blocks": KWTA(k=0.6, block="16"),
    "kwta, gate first": KWTA(k=0.6, gate="on"),
    "kwta, keys": KWTA(k=0.9, keys=0.3, keys_min=8),
    "event": Event(hold=1, topk=0.6, min_ctx=0, deltas="all"),
    "codes of keys": StatePack(target="kv", min_ctx=0, keys=8, recent=4),
    "kwta and event": (KWTA(k=0.7, gate="off"), Event(hold=1, topk=0.6, min_ctx=0, deltas="all")),
}
SILENT = {
    "state-pack": StatePack(target="mlp"),
    "state-pack, guessing": StatePack(target="mlp", predict="on", candidates=0.5),
    "state-pack and kwta": (StatePack(target="mlp"), KWTA(k=0.7, gate="off")),
    "kwta": KWTA(k=1.0),
    "kwta, fewer": KWTA(k=0.6),
    "event": Event(hold=1, topk=0.6, min_ctx=0, deltas="all"),
}


def pair(directory: Path, modes) -> tuple[LM, LM]:
    """Modes on mixed weights, and on a model whose weights are those."""
    modes = modes if isinstance(modes, tuple) else (modes,)
    return opened(directory, Mix(), *modes), at_int4(opened(directory), *modes)


def check_alike(mixed: LM, same: LM, text=TOKENS) -> None:
    dense = decoded(mixed, tokens=text, dense=True)
    ours, plain = decoded(mixed, tokens=text), decoded(same, tokens=text)
    assert np.array_equal(ours, plain) and not np.array_equal(ours, dense)
    assert np.array_equal(decoded(mixed, tokens=text, dense=True), dense)
    assert bytes_of(mixed, tokens=text) == bytes_of(same, tokens=text)
    many = [lm.model.forward(text, lm.new_sequence(), exact=exact) for lm in (mixed, same) for exact in (True, False)]
    assert np.array_equal(many[0], many[2]) and np.array_equal(many[1], many[3])
    assert mixed.metrics()["guard.nonfinite"] == 0
    skipped = {
        name: value for name, value in same.metrics().items() if name.endswith((".bytes_skipped", ".keep_ratio"))
    }
    assert {name: mixed.metrics()[name] for name in skipped} == skipped


@pytest.mark.parametrize("name", GATED)
def test_modes_work_on_the_coarser_weights(model, name):
    check_alike(*pair(model, GATED[name]), TOKENS * 2)


@pytest.mark.parametrize("name", SILENT)
def test_modes_that_skip_neurons_work_on_the_coarser_weights(relu, name):
    mixed, same = pair(relu, SILENT[name])
    if name != "event":
        assert all("mlp" in here for here in filled(mixed))
    check_alike(mixed, same)


def test_only_half_of_an_mlp_may_be_coarser(relu):
    for place in ("up", "down"):
        where = (Override(None, frozenset(PLACES) - {place}, {"on": "off"}),)
        for mode in (StatePack(target="mlp"), KWTA(k=1.0)):
            mixed, same = opened(relu, Mix(where=where), mode), at_int4(opened(relu), mode, places=[place])
            assert np.array_equal(decoded(mixed), decoded(same))


def test_what_the_modes_say_to_each_other():
    notes = compose([Mix(), KWTA(), StatePack(target="mlp"), Event()]).notes
    for other in ("kwta", "state-pack", "event"):
        assert any(note.startswith(f"mix gives its weights to {other}: ") for note in notes)
    assert next(m.name for m in compose([Event(), KWTA(), StatePack(), Mix()]).modes) == "mix"


@pytest.mark.parametrize("place", ["up", "down"])
@pytest.mark.parametrize("mode", [StatePack(target="mlp"), KWTA(k=1.0)], ids=lambda m: m.name)
def test_damaged_weights_under_an_mlps_slot_fall_back_too(relu, mode, place, monkeypatch):
    monkeypatch.setattr("ralo.modes.kwta.FROM_MEMORY", 0)  # the gate has no rows of its own
    lm = opened(relu, Mix(target="mlp"), mode)
    damage(lm, 0, place, NAN, where=slice(None))
    assert np.isfinite(decoded(lm)).all() and lm.metrics()["guard.nonfinite"] > 0


# ---------------------------------------------------------------- the guard


def switched_off(lm: LM, mode: str) -> None:
    """Runs text under a guard that bears nothing until it has switched this mode off."""
    for watch in lm.guard.modes.values():
        watch.limit = 0.0
    seq = lm.new_sequence()
    for token in TOKENS * 4:
        assert np.isfinite(lm.guard.step(token, seq)).all()
        if not lm.guard.modes[mode].on:
            return
    raise AssertionError(f"{mode} is still on")


def test_the_guard_switches_it_off(model):
    lm = opened(model, Mix())
    switched_off(lm, "mix")
    assert lm.metrics()["guard.switched_off"] == 1
    assert np.array_equal(decoded(lm), decoded(lm, dense=True))


@pytest.mark.parametrize("mode", [StatePack(target="mlp"), KWTA(k=1.0)], ids=lambda m: m.name)
def test_an_mlps_slot_goes_on_without_it(relu, mode):
    """Its rows are of the coarser weights, everything else of the model's own: nearer to dense than with both."""
    lm = opened(relu, Mix(), mode)
    before, dense = decoded(lm), decoded(lm, dense=True)
    switched_off(lm, "mix")
    assert lm.guard.modes[mode.name].on
    ours = decoded(lm)
    assert np.isfinite(ours).all() and lm.metrics()["guard.nonfinite"] == 0
    assert np.abs(ours - dense).mean() < np.abs(before - dense).mean()
    together = lm.model.logits(lm.model.forward(TOKENS, lm.new_sequence()))
    assert np.isfinite(together).all()
    for slots in lm.model.slots:
        for occupant in slots.taken.values():
            occupant.slot.on = True
    assert np.array_equal(decoded(lm), before)
