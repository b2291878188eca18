"""Procedural weights beside other modes: what skips reads the seeds of what is left, and nothing reads their rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_proc import TOKENS, decoded, opened, pack, rebuilt, using, write_model

from ralo import KWTA, Event, RaloError, StatePack
from ralo.compose import compose
from ralo.modes import Proc
from ralo.quality import losses, nll


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("silu") / "model")


@pytest.fixture(scope="module")
def made(model: Path) -> Path:
    return pack(model, model.with_name("pack"))


@pytest.fixture(scope="module")
def relu(tmp_path_factory) -> Path:
    """Whose neurons are often silent: modes read its rows one by one where they can."""
    return write_model(tmp_path_factory.mktemp("relu") / "model", hidden_act="relu")


@pytest.fixture(scope="module")
def relu_made(relu: Path) -> Path:
    return pack(relu, relu.with_name("pack"))


SKIPPING = {
    "kwta": KWTA(k=0.6),
    "renorm": KWTA(k_abs=60, renorm="on"),
    "event": Event(hold=1, topk=0.6, min_ctx=0),
    "event all": Event(hold=1, topk=0.6, deltas="all", min_ctx=0),
}


@pytest.mark.parametrize("mode", SKIPPING.values(), ids=SKIPPING)
def test_skipping_modes_read_the_seeds_of_what_is_left(model, made, mode):
    lm, alone = opened(model, using(made), mode), opened(model, using(made))
    counts = []
    for each in (lm, alone):
        before = each.model.bytes_read
        decoded(each)
        counts.append(each.model.bytes_read - before)
    assert counts[0] < counts[1]
    if mode.name == "kwta":
        assert lm.metrics()["kwta.bytes_skipped"] == counts[1] - counts[0]
    over_rebuilt = rebuilt(lm)
    over_rebuilt.use(compose([mode]))
    ours, theirs = decoded(lm), decoded(over_rebuilt)
    assert np.abs(ours - theirs).mean() < 0.5 * np.abs(ours - decoded(alone)).mean()
    together, one_by_one = losses(lm.model, TOKENS, 60), nll(ours, np.asarray(TOKENS[1:]))
    assert np.abs(together - one_by_one).mean() < 0.05  # now and then another channel wins


def test_a_gate_does_not_go_first(relu, relu_made):
    proc = using(relu_made)
    assert "mlp" in opened(relu, KWTA(k=0.5)).model.slots[0].taken
    assert "mlp" not in opened(relu, proc, KWTA(k=0.5)).model.slots[0].taken
    with pytest.raises(RaloError, match="--kwta-gate=on reads neurons row by row, weights from seeds have none"):
        opened(relu, proc, KWTA(k=0.5, gate="on"))


def test_state_pack_leaves_the_neurons_to_them_and_takes_the_keys(relu, relu_made):
    assert "mlp" in opened(relu, StatePack(target="mlp")).model.slots[0].taken
    for target in ("mlp", "both", "kv"):
        lm = opened(relu, using(relu_made), StatePack(target=target, min_ctx=0, keys=8, recent=4))
        slots = lm.model.slots[0].taken
        assert ("attend" in slots, "mlp" in slots) == (target != "mlp", False)
        assert any("leaves the neurons of the MLP to proc" in note for note in lm.plan.notes) == (target != "kv")
        assert np.isfinite(decoded(lm)).all() and lm.metrics()["guard.nonfinite"] == 0
        if target == "mlp":
            assert np.array_equal(decoded(lm), decoded(opened(relu, using(relu_made))))
    beside = opened(relu, using(relu_made, target="attn"), StatePack(target="mlp")).model.slots[0].taken
    assert "mlp" in beside and "qkv_weights" in beside


@pytest.mark.parametrize(
    "mode", [KWTA(block="16"), KWTA(block="64"), Event(block="16")], ids=lambda m: m.name + m.block
)
def test_weights_from_seeds_go_with_blocks_of_any_size(mode):
    assert compose([mode, Proc()]).modes
