"""Factors beside other modes: what skips channels leaves factored places alone and works elsewhere; codes go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_proc import TOKENS, decoded, opened, pack, rebuilt, write_model
from test_tt import matrices, using
from tiny_factors import write_pack

from ralo import KWTA, TT, Event, Proc, RaloError, StatePack
from ralo.compose import compose
from ralo.quality import losses, nll

MLP, ATTN = {"up", "down"}, {"qkv", "o"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("silu") / "model")


@pytest.fixture(scope="module")
def made(model: Path) -> Path:
    return write_pack(model, model.with_name("pack"))


@pytest.fixture(scope="module")
def relu(tmp_path_factory) -> Path:
    """Whose neurons are often silent: modes read its rows one by one where they can."""
    return write_model(tmp_path_factory.mktemp("relu") / "model", hidden_act="relu")


def filled(lm) -> list[set[str]]:
    return [set(s.taken) for s in lm.model.slots]


SKIPPING = {"kwta": KWTA(k=0.6), "event": Event(hold=1, topk=0.6, min_ctx=0, deltas="all")}
BOTH = pytest.mark.parametrize("mode", SKIPPING.values(), ids=SKIPPING)


@BOTH
def test_factored_places_are_left_alone(model, made, mode):
    lm, alone = opened(model, using(made), mode), opened(model, using(made))
    weights = {f"{p}_weights" for p in MLP | ATTN}
    assert filled(alone) == [weights] * 2
    assert all(here & (MLP | ATTN) == set() and here >= weights for here in filled(lm))
    assert any(f"{mode.name} yields to tt: its factors have no channels" in note for note in lm.plan.notes)


@BOTH
@pytest.mark.parametrize("target", ["attn", "mlp"])
def test_elsewhere_channels_are_skipped(model, made, mode, target):
    lm, alone = opened(model, using(made, target=target), mode), opened(model, using(made, target=target))
    factored, others = (ATTN, MLP) if target == "attn" else (MLP, ATTN)
    assert all(here >= {f"{p}_weights" for p in factored} | others for here in filled(lm))
    assert not any(here & factored for here in filled(lm))
    counts = []
    for each in (lm, alone):
        before = each.model.bytes_read
        decoded(each)
        counts.append(each.model.bytes_read - before)
    assert counts[0] < counts[1] and lm.metrics()["guard.nonfinite"] == 0
    over_rebuilt = rebuilt(lm)
    over_rebuilt.use(compose([mode.__class__(**{**vars(mode), "target": "mlp" if target == "attn" else "attn"})]))
    ours, theirs = decoded(lm), decoded(over_rebuilt)
    assert np.abs(ours - theirs).mean() < 0.5 * np.abs(ours - decoded(alone)).mean()
    together, one_by_one = losses(lm.model, TOKENS, 60), nll(ours, np.asarray(TOKENS[1:]))
    assert np.abs(together - one_by_one).mean() < 0.05  # now and then another channel wins


def test_a_pack_by_itself_is_left_alone_too(made):
    lm = opened(made, KWTA(k=0.5), quant="auto")
    assert filled(lm) == [set()] * 2
    assert np.array_equal(decoded(lm), decoded(opened(made, quant="auto")))


@pytest.mark.parametrize("kinds", [{"up": "rest", "down": "two"}, {"up": "two"}, {"down": "two"}], ids="+".join)
@pytest.mark.parametrize("mode", [KWTA(k=0.9), StatePack(target="mlp")], ids=lambda m: m.name)
def test_neurons_of_factors_are_not_read_one_by_one(relu, tmp_path, kinds, mode):
    """Not even where only `down` is factored: the MLP has a slot of its own or other weights."""
    made = write_pack(relu, tmp_path / "pack", kinds=kinds)
    assert "mlp" in opened(relu, mode).model.slots[0].taken
    lm = opened(relu, using(made), mode)
    assert not any("mlp" in here for here in filled(lm))
    assert all(here >= {f"{p}_weights" for p in kinds} and not here & set(kinds) for here in filled(lm))
    if mode.name == "state-pack":
        assert np.array_equal(decoded(lm), decoded(opened(relu, using(made))))
    assert np.isfinite(decoded(lm)).all() and lm.metrics()["guard.nonfinite"] == 0


def test_codes_work_beside_factors(model, made):
    lm = opened(model, using(made), StatePack(target="kv", min_ctx=0, keys=8, recent=4))
    assert all("attend" in here and "qkv_weights" in here for here in filled(lm))
    assert any("state-pack works beside tt" in note for note in lm.plan.notes)
    text = TOKENS * 3
    ours, alone = decoded(lm, tokens=text), decoded(opened(model, using(made)), tokens=text)
    assert np.isfinite(ours).all() and lm.metrics()["guard.nonfinite"] == 0
    assert np.array_equal(ours[:8], alone[:8]) and not np.array_equal(ours, alone)
    every = opened(model, using(made), StatePack(target="kv", min_ctx=10_000))
    assert np.array_equal(decoded(every, tokens=text), alone)


def test_seeds_and_factors_share_a_model(model, made, tmp_path):
    seeds = pack(model, tmp_path / "seeds", Proc(bits=4.2, target="mlp", shed_eps=0.0))
    proc = Proc(pack=str(seeds), target="mlp", shed_eps=0.0)
    for target in ("mlp", "both"):
        with pytest.raises(RaloError, match="proc and tt do not go together: a layer has one weight backend; give"):
            opened(model, proc, using(made, target=target))
    lm = opened(model, proc, using(made, target="attn"))
    kinds = [{name: o.mode for name, o in s.taken.items()} for s in lm.model.slots]
    assert kinds == [{"qkv_weights": "tt", "o_weights": "tt", "up_weights": "proc", "down_weights": "proc"}] * 2
    assert len(matrices(lm)) == 4 and {"tt.rank", "proc.mem_ratio"} <= set(lm.metrics())
    np.testing.assert_allclose(decoded(lm), decoded(rebuilt(lm)), atol=0.02)


def test_the_guard_switches_factors_off_that_are_too_far(model, made):
    lm = opened(model, using(made))
    lm.guard.modes["tt"].limit = 0.0
    tokens = TOKENS * 2
    seq = lm.new_sequence()
    for token in tokens:
        lm.guard.step(token, seq)
    assert not lm.guard.modes["tt"].on and lm.metrics()["guard.switched_off"] == 1
    assert np.array_equal(decoded(lm), decoded(lm, dense=True))


def test_modes_are_made_in_the_order_that_lets_others_see_the_factors():
    assert [m.name for m in compose([Event(), KWTA(), StatePack(), TT()]).modes] == [
        "tt",
        "state-pack",
        "kwta",
        "event",
    ]
