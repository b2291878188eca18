"""Comparisons with dense that are spread over tokens: what each finds, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo import KWTA, Event
from ralo.compose import compose
from ralo.guard import PACED, GuardOptions
from ralo.layerwise import Layerwise
from ralo.lm import LM
from ralo.plan import Setup

TOKENS = np.random.default_rng(1).integers(2, 90, 400).tolist()
LAYERS = 2
MODE = Event(budget_ms=1e4, min_ctx=0)
MILD, WILD = Event(budget_ms=1e-3, min_ctx=0, gap_tol=100.0), Event(budget_ms=1e-3, min_ctx=0, gap_tol=1e-9)
EVERY = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("slow") / "tiny", "llama", eos_token_id=None, max_position_embeddings=1024)


def opened(directory, *modes, kv: str = "f16", **options) -> LM:
    return ralo.load(directory, "int8", kv, setup=Setup(compose(modes), GuardOptions(**options)))


def run(lm: LM, seq, tokens: list[int]) -> np.ndarray:
    out = []
    for token in tokens:
        out.append(lm.guard.step(token, seq))
        lm.guard.took(1e-3)
    return np.stack(out)


@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "opt"])
def test_layer_by_layer_is_dense_bit_for_bit_while_the_text_goes_on(tmp_path, kind, kv):
    lm = opened(write_hf(tmp_path / kind, kind, eos_token_id=None), MODE, kv=kv, on="off")
    ours, theirs = lm.new_sequence(), lm.new_sequence()
    for token in TOKENS[:30]:
        lm.model.step(token, ours)
    for layer, own in zip(theirs.layers, ours.layers, strict=True):  # the same text, and dense's own last token
        layer.reserve(30, 0)
        for at in range(29):
            layer.put(at, own.rows(at))
    theirs.tokens = list(TOKENS[:29])
    want = lm.model.step(TOKENS[29], theirs, dense=True)
    slow, read = Layerwise(lm.model, ours, 29), lm.model.bytes_read
    for done in range(lm.model.cfg.n_layers):
        got = slow.go_on()
        assert (got is None) == (done + 1 < lm.model.cfg.n_layers) and slow.holds_for(ours)
        lm.model.step(TOKENS[30 + done], ours)
    assert got is not None and np.array_equal(got, want) and lm.model.bytes_read > read


def test_the_text_keeps_its_own_keys_and_values(directory):
    lm = opened(directory, Event(topk=0.01, hold=1), on="off")
    seq, alone = lm.new_sequence(), lm.new_sequence()
    for token in TOKENS[:20]:
        lm.model.step(token, seq)
        lm.model.step(token, alone)
    slow = Layerwise(lm.model, seq, 19)
    for i, token in enumerate(TOKENS[20:23]):
        if i < LAYERS:
            slow.go_on()
        assert np.array_equal(lm.model.step(token, seq), lm.model.step(token, alone))


@pytest.mark.parametrize("back", ["trim", "rewind"])
def test_it_does_not_hold_for_another_text_or_one_that_was_cut(directory, back):
    lm = opened(directory, MODE, on="off")
    seq = lm.new_sequence()
    for token in TOKENS[:20]:
        lm.model.step(token, seq)
    slow = Layerwise(lm.model, seq, 19)
    assert slow.holds_for(seq) and not slow.holds_for(seq.clone()) and not slow.holds_for(lm.new_sequence())
    getattr(seq, back)(19)
    assert not slow.holds_for(seq)


def test_under_a_budget_a_comparison_takes_a_layer_of_each_token(directory):
    lm = opened(directory, MILD, every=EVERY)
    plain, seq = opened(directory, MILD, on="off"), lm.new_sequence()
    for n, token in enumerate(TOKENS[:100], 1):
        run(lm, seq, [token])
        started = (n - LAYERS) // EVERY if n >= LAYERS else 0
        assert lm.guard.counts["checks"] == started, n
    assert len(seq) == 100 and lm.guard.counts["cost_s"] > 0
    other = plain.new_sequence()
    levels = lm.model.pace.schedule
    plain.model.pace.replay(levels)
    again = run(plain, other, TOKENS[:100])
    assert len(levels) == 100 and all(len(token) == LAYERS for token in levels)
    assert np.array_equal(again, replayed(directory, levels)), "a comparison changes nothing of what the mode gives"


def replayed(directory, levels: list[bytes]) -> np.ndarray:
    lm = opened(directory, MILD, every=EVERY)
    lm.model.pace.replay(levels)
    return run(lm, lm.new_sequence(), TOKENS[: len(levels)])


def test_what_it_finds_is_what_a_comparison_at_once_finds(directory):
    lm = opened(directory, MILD, every=EVERY)
    seq = lm.new_sequence()
    run(lm, seq, TOKENS[: 4 * EVERY + LAYERS])
    levels, found = lm.model.pace.schedule, list(lm.guard.modes["event"].recent)
    once = opened(directory, MILD, every=EVERY)
    once.guard._hurry = True
    once.model.pace.replay(levels)
    other, gaps = once.new_sequence(), []
    for token in TOKENS[: 4 * EVERY]:
        run(once, other, [token])
        once.guard._hurry = True
        gaps = list(once.guard.modes["event"].recent)
    assert len(found) == len(gaps) == 4 and seq.sure == other.sure == 4 * EVERY
    assert found == gaps and max(gaps) > 0


def test_too_far_it_is_off_and_what_it_wrote_is_computed_anew(directory):
    lm = opened(directory, WILD, every=EVERY)
    ours, theirs = lm.new_sequence(), lm.new_sequence()
    found = run(lm, ours, TOKENS[:80])
    off = 2 * EVERY + LAYERS  # two comparisons, the second of which ends so many tokens later
    assert [e.split(":")[0] for e in lm.guard.events] == [f"event off at token {off}"]
    dense = np.stack([lm.model.step(token, theirs, dense=True) for token in TOKENS[:80]])
    np.testing.assert_allclose(found[off - 1 :], dense[off - 1 :], atol=1e-4)
    assert np.abs(found[: off - 1] - dense[: off - 1]).max() > 1e-2


def test_with_several_modes_the_worst_is_found_at_once(directory):
    lm = opened(directory, replace(WILD, target="mlp"), KWTA(k=0.9, target="attn"), every=EVERY, kl=1e-9)
    seq = lm.new_sequence()
    assert len(lm.guard.modes) == 2
    run(lm, seq, TOKENS[: 2 * EVERY + LAYERS + 1])
    assert lm.guard.counts["switched_off"] == 1 and lm.guard.counts["checks"] == 3


def test_a_text_that_is_cut_is_not_compared(directory):
    lm = opened(directory, MILD, every=EVERY)
    seq = lm.new_sequence()
    run(lm, seq, TOKENS[:EVERY])
    seq.trim(EVERY - 1)
    run(lm, seq, TOKENS[EVERY : 2 * EVERY - 1])
    assert lm.guard.counts["checks"] == 0
    run(lm, seq, TOKENS[: 1 + LAYERS])
    assert lm.guard.counts["checks"] == 1


def test_other_modes_begin_anew(directory):
    lm = opened(directory, MILD, every=EVERY)
    seq = lm.new_sequence()
    run(lm, seq, TOKENS[:EVERY])
    lm.use(compose([replace(MILD, keys=8)]))
    run(lm, seq, TOKENS[:EVERY])
    assert lm.guard.counts["checks"] == 0
    run(lm, seq, TOKENS[:LAYERS])
    assert lm.guard.counts["checks"] == 1


@pytest.mark.parametrize(("mode", "every"), [(Event(hold=1, gap_tol=100.0), EVERY), (MILD, LAYERS)])
def test_without_a_budget_or_with_too_little_between_it_comes_at_once(directory, mode, every):
    lm = opened(directory, mode, every=every)
    first = min(8, every) if mode is not MILD else every
    run(lm, lm.new_sequence(), TOKENS[:first])
    assert lm.guard.counts["checks"] == 1 and first < PACED
