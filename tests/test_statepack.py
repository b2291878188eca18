"""StatePack's keys on whole models: dense at its off point, decoding as evaluation measures it, honest counters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from commandline import ralo as command
from tiny import write_hf

import ralo
from ralo import RaloError, _core
from ralo.compose import compose
from ralo.lm import LM
from ralo.modes import StatePack
from ralo.modes.base import Override
from ralo.quality import losses, nll
from ralo.sequence import Sequence

TOKENS = np.random.default_rng(4).integers(2, 97, 221).tolist()
FIRST = 8 + 128 - 1  # the first position that is packed: recent and two blocks of keys
KEYS = StatePack(target="kv", min_ctx=0, recent=8, keys=16, check=0)
SETTINGS = {
    "plain": KEYS,
    "ternary": replace(KEYS, on="ternary"),
    "ternary above a number": replace(KEYS, on="ternary", eps="0.2"),
    "share": replace(KEYS, keys=0.1),
    "top-p": replace(KEYS, keys=32, p=0.6),
    "without rest": replace(KEYS, rest="off"),
    "checks": replace(KEYS, check=9, gap=0.35),
    "seed": replace(KEYS, form="seed"),
    "seed ternary": replace(KEYS, form="seed", on="ternary"),
    "seed mixed": replace(KEYS, form="seed", mix=0.5),
    "int8": KEYS,
}
NAMES = pytest.mark.parametrize("name", SETTINGS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("pack") / "llama", "llama", head_dim=32, max_position_embeddings=256)


def opened(directory, *modes, quant: str = "f32", kv: str = "f16") -> LM:
    return ralo.load(directory, quant, kv, modes=list(modes))


def named(directory, name: str, quant: str = "f32") -> LM:
    return opened(directory, SETTINGS[name], quant=quant, kv="int8" if name == "int8" else "f16")


def decoded(lm: LM, seq: Sequence | None = None, tokens=TOKENS[:-1], dense: bool = False) -> np.ndarray:
    seq = lm.new_sequence() if seq is None else seq
    return np.stack([lm.model.step(t, seq, dense) for t in tokens])


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
def test_off_point_is_dense_bit_for_bit(directory, quant):
    dense = decoded(opened(directory, quant=quant))
    for off in (StatePack.off(), replace(KEYS, keys=1), replace(KEYS, min_ctx=221), replace(KEYS, recent=200)):
        lm = opened(directory, off, quant=quant)
        assert np.array_equal(decoded(lm), dense)
    for off in (StatePack(on="none"), replace(KEYS, target="mlp", rho=0.0)):
        assert not opened(directory, off, quant=quant).model.has_modes


@NAMES
def test_on_differs_from_dense_and_dense_does_not_change(directory, name):
    lm = named(directory, name)
    ours, dense = decoded(lm), decoded(lm, dense=True)
    assert np.array_equal(ours[:FIRST], dense[:FIRST])
    assert (ours[FIRST:] != dense[FIRST:]).any(axis=1).mean() > 0.4  # where checks fail it is dense again
    assert np.array_equal(decoded(opened(directory, kv=lm.kv)), dense)


@NAMES
def test_evaluation_is_what_decoding_gives(directory, name):
    """Several tokens at once, with the mode's state, equal the same tokens one by one. They round differently, so that
    now and then a sign flips and another key is chosen."""
    lm = named(directory, name)
    off = np.abs(losses(lm.model, TOKENS, 220, lm.kv) - nll(decoded(lm), np.asarray(TOKENS[1:])))
    assert (off > 2e-3).mean() < 0.05 and off.mean() < 5e-4


@NAMES
def test_clones_go_on_alike_and_trimming_forgets(directory, name):
    lm = named(directory, name)
    seq = lm.new_sequence()
    decoded(lm, seq, TOKENS[:200])
    copy = seq.clone()
    assert sum(state.nbytes for state in copy.states) > 0
    assert np.array_equal(decoded(lm, seq, TOKENS[200:210]), decoded(lm, copy, TOKENS[200:210]))
    for length in (191, 192):  # a block and what comes after; and a block to the last key
        fresh = lm.new_sequence()
        decoded(lm, fresh, TOKENS[:length])
        other = copy.clone()
        other.trim(length)
        assert np.array_equal(decoded(lm, other, TOKENS[:20]), decoded(lm, fresh, TOKENS[:20]))


@NAMES
def test_two_texts_do_not_disturb_each_other(directory, name):
    lm = named(directory, name)
    a, b = lm.new_sequence(), lm.new_sequence()
    turns = np.stack([(lm.model.step(t, a), lm.model.step(u, b))[0] for t, u in zip(TOKENS, TOKENS[::-1], strict=True)])
    assert np.array_equal(turns, decoded(lm, tokens=TOKENS))


@NAMES
def test_what_is_skipped_is_what_dense_reads_more(directory, name):
    """What is read to code keys, and at checks, included."""
    lm = named(directory, name)
    start = lm.model.bytes_read
    decoded(lm)
    middle = lm.model.bytes_read
    decoded(lm, dense=True)
    less = (lm.model.bytes_read - middle) - (middle - start)
    assert lm.metrics()["pack.bytes_skipped"] == less


def test_metrics(directory):
    lm = opened(directory, replace(SETTINGS["checks"], gap=100, on="ternary", popcnt="lut"))
    decoded(lm)
    m, layers = lm.metrics(), lm.layer_metrics()
    names = "enabled mode density active popcnt recall mass bytes_skipped"
    assert {name for name in m if name.startswith("pack.")} == {f"pack.{name}" for name in names.split()}
    assert m["pack.enabled"] == (220 - FIRST) / 220 and m["pack.mode"] == 2 and m["pack.popcnt"] == 2
    assert 0 < m["pack.density"] < 1 and 0 < m["pack.recall"] <= 1 and 0 < m["pack.mass"] <= 1
    assert m["pack.active"] == pytest.approx(m["pack.density"] * 2 * 2 * 220 * 221 / 2)
    assert len(layers) == 2 and sum(x["pack.bytes_skipped"] for x in layers) == m["pack.bytes_skipped"] > 0
    assert m["guard.nonfinite"] == 0


def test_checks_that_fail_leave_attention_dense(directory):
    """All heads are exact from the first check on; what earlier tokens left in the second layer stays different."""
    lm = opened(directory, replace(KEYS, check=150, gap=0.0, where=(Override(frozenset({1}), None, {"on": "none"}),)))
    ours, dense = decoded(lm), decoded(lm, dense=True)
    same = (ours == dense).all(axis=1)
    assert same[:FIRST].all() and not same[FIRST:150].any()
    assert lm.metrics()["pack.enabled"] == (150 + 1 - FIRST) / 220
    assert lm.model.slots[0].taken["attend"].slot.counts()["checks"] == 1


def test_overrides_hold_where_they_say(directory):
    where = (Override(None, None, {"on": "none"}), Override(frozenset({1}), None, {"on": "binary", "keys": 8}))
    lm = opened(directory, replace(KEYS, where=where))
    assert [list(slots.taken) for slots in lm.model.slots] == [[], ["attend"]]
    decoded(lm)
    first, second = lm.layer_metrics()
    assert first == {} and second["pack.bytes_skipped"] == lm.metrics()["pack.bytes_skipped"] > 0
    with pytest.raises(RaloError, match=r"\[\[state-pack.where\]\] names layer 7, the model has 2"):
        opened(directory, replace(KEYS, where=(Override(frozenset({7}), None, {"keys": 1.0}),)))


def test_a_text_goes_on_when_the_plan_changes(directory):
    """Codes of another form are made anew: the keys are the same, whoever coded them."""
    lm = opened(directory, KEYS)
    seq = lm.new_sequence()
    lm.model.prefill(TOKENS[:200], seq, dense=True)
    other, both = seq.clone(), []
    decoded(lm, seq, TOKENS[200:205])
    seq.trim(200)
    lm.use(compose([SETTINGS["ternary"]]))
    for text in (seq, other):
        both.append(decoded(lm, text, TOKENS[200:]))
    assert np.array_equal(*both)


def test_prompts_are_dense(directory):
    lm = opened(directory, KEYS)
    dense = lm.model.prefill(TOKENS, lm.new_sequence(), dense=True)
    assert np.array_equal(lm.model.prefill(TOKENS, lm.new_sequence()), dense)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_architectures(tmp_path, kind):
    window = {"sliding_window": 200} if kind == "mistral" else {}
    lm = opened(write_hf(tmp_path / kind, kind, max_position_embeddings=256, **window), KEYS)
    assert np.isfinite(decoded(lm)).all() and lm.metrics()["pack.bytes_skipped"] > 0
    assert lm.metrics()["guard.nonfinite"] == 0


def test_ways_to_count_that_are_not_there(directory):
    before = _core.level()
    try:
        _core.force_level("base")
        with pytest.raises(RaloError) as error:
            opened(directory, replace(KEYS, popcnt="vpopcntdq"))
        ways = ", ".join(_core.popcounts())
        assert str(error.value) == f"--state-pack-popcnt=vpopcntdq is not there at ISA level base: use {ways}"
    finally:
        _core.force_level(before)


def test_every_way_to_count_gives_the_same_text(directory):
    first, *others = (decoded(opened(directory, replace(KEYS, popcnt=way))) for way in ("auto", *_core.popcounts()))
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("eps", ["x", "-1", "nan", "inf", ""])
def test_a_wrong_eps_is_said_in_one_line(eps):
    with pytest.raises(RaloError, match=r"^--state-pack-eps must be auto or a number from 0 on, got '"):
        StatePack(eps=eps)


def test_wrong_settings_on_the_command_line(directory):
    done = command("run", "--model", directory, "--state-pack-eps=x", "--prompt", "hello")
    assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1
    assert "--state-pack-eps must be auto or a number from 0 on, got 'x'" in done.err


def test_busy_neurons_are_left_alone(directory):
    """Nearly all are active: dense bit for bit, and looked at once in 256 tokens."""
    lm = opened(directory, StatePack(target="mlp", eps="1e-4"))
    assert np.array_equal(decoded(lm), decoded(opened(directory)))
    counts = [slots.mlp.counts() for slots in lm.model.slots]
    assert all(c["packed"] == 0 and c["neurons"] == lm.model.cfg.d_ff for c in counts)
    assert lm.metrics()["pack.enabled"] == 0 and lm.metrics()["pack.density"] > 0.9
