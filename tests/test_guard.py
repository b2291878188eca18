"""The guard: it switches off a mode that hurts, lets it back when it is good again, and counts what that costs."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo import KWTA, Event
from ralo.compose import compose
from ralo.guard import FIRST_CHECK, MANY, WINDOW, GuardOptions, Watch
from ralo.lm import LM
from ralo.plan import Setup


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("guard") / "tiny", "llama", eos_token_id=None, max_position_embeddings=4096)


def opened(directory, *modes, **options) -> LM:
    lm = ralo.load(directory, "f32", setup=Setup(compose(modes), GuardOptions(**options)))
    return lm


def steps(lm: LM, n: int, seq=None):
    seq = lm.new_sequence() if seq is None else seq
    rng = np.random.default_rng(1)
    return np.stack([lm.guard.step(int(t), seq) for t in rng.integers(2, 90, n)]), seq


def plain_steps(lm: LM, n: int, dense: bool):
    seq = lm.new_sequence()
    rng = np.random.default_rng(1)
    return np.stack([lm.model.step(int(t), seq, dense) for t in rng.integers(2, 90, n)])


BAD, GOOD = KWTA(k=0.02), KWTA(k=0.99)


def test_without_modes_it_does_nothing(directory):
    lm = opened(directory)
    logits, _ = steps(lm, 40)
    assert np.array_equal(logits, plain_steps(lm, 40, dense=True))
    assert lm.guard.counts["checks"] == 0 and lm.metrics().keys().isdisjoint({"guard.checks"})


@pytest.mark.parametrize("mode", [KWTA(k=0.99), Event(hold=1, gap_tol=100.0)], ids=["kwta", "event"])
def test_a_check_changes_nothing_of_what_the_modes_give(directory, mode):
    lm = opened(directory, mode, kl=100)
    logits, seq = steps(lm, 60)
    assert np.array_equal(logits, plain_steps(lm, 60, dense=False))
    assert lm.guard.counts["checks"] == 3 and len(seq) == 60  # at 8, 24 and 56 tokens
    assert lm.guard.counts["cost_s"] > 0 and lm.guard.events == []


def test_checks_grow_rarer_up_to_the_distance_asked_for(directory):
    lm = opened(directory, GOOD, kl=100, every=16)
    steps(lm, 120)
    assert lm.guard.counts["checks"] == 1 + (120 - FIRST_CHECK) // 16
    lm = opened(directory, GOOD, kl=100, every=2)
    steps(lm, 20)
    assert lm.guard.counts["checks"] == 10


def test_a_ruinous_mode_is_switched_off_within_the_first_checks_and_comes_back_when_raised(directory):
    lm = opened(directory, BAD, kl=1e-4, every=32)
    _, seq = steps(lm, 32)
    assert [e.split(":")[0] for e in lm.guard.events] == ["kwta off at token 24"]
    assert lm.metrics()["guard.modes_off"] == 1 and lm.metrics()["guard.switched_off"] == 1
    dense = lm.model.step(5, seq, True)
    seq.trim(32)
    assert np.array_equal(lm.guard.step(5, seq), dense), "switched off it is dense"
    lm.use(compose([GOOD]))
    assert not lm.guard.modes["kwta"].on, "raised, but not yet cleared"
    lm.guard.options = GuardOptions(kl=100, every=32)
    steps(lm, 32 * (WINDOW + 1))
    assert lm.guard.modes["kwta"].on and lm.guard.events[-1].startswith("kwta on at token")
    assert lm.metrics()["guard.switched_on"] == 1 and lm.metrics()["guard.modes_off"] == 0


@pytest.mark.parametrize(("n", "most"), [(2, 3.414), (4, 2.0), (16, 1.3333), (MANY, 1.2147)])
def test_the_fewer_were_compared_the_farther_off_they_may_be(n, most):
    """`most`: times the limit."""
    watch = Watch(1.0)
    for _ in range(n):
        watch.recent.append(most * 0.999 * 0.5)
    assert not watch.too_far(0.5)
    watch.recent.extend([most * 1.001 * 0.5] * n)
    while len(watch.recent) > n:
        watch.recent.popleft()
    assert watch.too_far(0.5)


def test_one_comparison_switches_nothing_off():
    watch = Watch(1.0)
    assert not watch.too_far(0.0)
    watch.recent.append(100.0)
    assert not watch.too_far(0.0)
    watch.recent.append(0.0)
    assert watch.too_far(0.0) and watch.too_far(14.6) and not watch.too_far(14.7)


def test_after_it_is_switched_off_the_next_look_is_far(directory):
    lm = opened(directory, BAD, kl=1e-4, every=32)
    seq, checks = lm.new_sequence(), []
    for token in range(130):
        before = lm.guard.counts["checks"]
        lm.guard.step(2 + token % 90, seq)
        checks += [token + 1] * int(lm.guard.counts["checks"] - before)
    assert checks == [8, 24, 56, 88, 120] and lm.guard.events[0].startswith("kwta off at token 24")


RUINOUS = {
    "o": Event(hold=1, topk=0.01),
    "all": Event(hold=1, topk=0.01, deltas="all"),
    "seed": Event(hold=1, topk=0.1, form="seed"),
    "keys": Event(topk=1.0, min_ctx=0, keys=1, hold=64, head_gap=100.0, gap_tol=1e-5),
}


@pytest.mark.parametrize("name", RUINOUS)
def test_a_mode_whose_first_token_is_dense_does_not_come_back_blindly(directory, name):
    """Event computes a first token as a whole: it is looked at after a few more, again and again, and stays off."""
    lm = opened(directory, RUINOUS[name], every=8)
    prompt = np.random.default_rng(2).integers(2, 90, 200 if name == "keys" else 5).tolist()
    ours, theirs = lm.new_sequence(), lm.new_sequence()
    lm.guard.prefill(prompt, ours)
    lm.model.prefill(prompt, theirs, dense=True)
    tokens = np.random.default_rng(1).integers(2, 90, 160).tolist()
    found = np.stack([lm.guard.step(t, ours) for t in tokens])
    watch = lm.guard.modes["event"]
    off = 24 if name == "o" else 16
    assert not watch.on and len(lm.guard.events) == 1 and lm.guard.events[0].startswith(f"event off at token {off}:")
    assert len(watch.recent) == (160 - off) // 8 and min(watch.recent) > 0
    assert watch.mean() > lm.guard.options.back * watch.limit
    want = np.stack([lm.model.step(t, theirs, dense=True) for t in tokens])
    np.testing.assert_allclose(found[off - 1 :], want[off - 1 :], atol=1e-4)
    assert ours.tokens == theirs.tokens


def test_event_comes_back_when_it_is_good(directory):
    lm = opened(directory, RUINOUS["o"], every=8)
    _, seq = steps(lm, 40)
    assert not lm.guard.modes["event"].on
    lm.use(compose([Event(hold=1, topk=0.9)]))
    steps(lm, 8 * WINDOW - 1, seq)
    watch = lm.guard.modes["event"]
    assert not watch.on and len(watch.recent) == WINDOW - 1
    assert min(watch.recent) > 0 and max(watch.recent) < lm.guard.options.back * watch.limit
    dense = seq.clone()
    back, want = lm.guard.step(5, seq), lm.model.step(5, dense, dense=True)
    assert watch.on and lm.guard.events[-1].startswith(f"event on at token {40 + 8 * WINDOW}:")
    assert len(seq) == 40 + 8 * WINDOW and np.abs(back - want).max() < 1e-4  # its first token
    later, want = lm.guard.step(6, seq), lm.model.step(6, dense, dense=True)
    assert 0 < np.abs(later - want).max() < 1


def test_a_look_at_the_very_start_of_a_text(directory):
    """There are no tokens before to try a mode with."""
    lm = opened(directory, RUINOUS["o"], every=1)
    steps(lm, 8)
    assert not lm.guard.modes["event"].on
    for n in range(1, 5):
        logits, seq = steps(lm, n)
        np.testing.assert_allclose(logits, plain_steps(lm, n, dense=True), atol=1e-4)
        assert len(seq) == n


def test_two_modes_that_are_off(directory):
    """Each is tried on the same text, which stays dense's."""
    lm = opened(directory, BAD, Event(hold=1, topk=0.01, gap_tol=1e-6), kl=1e-6, every=8)
    logits, seq = steps(lm, 96)
    assert len(lm.guard.events) == 2 and lm.metrics()["guard.modes_off"] == 2 and len(seq) == 96
    at = int(lm.guard.events[1].split(":")[0].split()[-1])
    np.testing.assert_allclose(logits[at:], plain_steps(lm, 96, dense=True)[at:], atol=1e-4)
    assert {len(watch.recent) for watch in lm.guard.modes.values()} <= {(96 - at) // 8, (96 - at) // 8 + 1}


def test_hysteresis(directory):
    """A gap between the two limits neither switches a mode off nor lets it back."""
    lm = opened(directory, BAD, kl=1e-4, every=8)
    steps(lm, 24)
    gap = max(lm.guard.modes["kwta"].mean(), 1e-6)
    lm.guard.options = GuardOptions(kl=1e9, back=gap / 1e9 / 1e6, every=8)
    steps(lm, 100)
    assert not lm.guard.modes["kwta"].on


def test_off(directory):
    lm = opened(directory, BAD, on="off", kl=0)
    logits, _ = steps(lm, 80)
    assert lm.guard.counts["checks"] == 0 and np.array_equal(logits, plain_steps(lm, 80, dense=False))


@pytest.mark.parametrize("slot", ["qkv", "o", "up", "down"])
def test_a_planted_nan_is_caught_and_counted_and_the_text_goes_on(directory, slot):
    lm = opened(directory, KWTA(k=0.8))
    lm.model.slots[1].taken[slot].slot.plant = True
    made = lm.generate("the house", max_tokens=12, temperature=0)
    assert len(made.tokens) == 12
    assert lm.metrics()["guard.nonfinite"] == 1
    seq = lm.new_sequence()
    lm.model.slots[1].taken[slot].slot.plant = True
    assert np.isfinite(lm.model.step(3, seq)).all()


def test_after_a_nan_the_place_was_dense(directory):
    """With one place only, the step whose result was not finite is the dense step bit for bit."""
    from ralo.modes.base import Override

    only = KWTA(k=0.5, where=(Override(None, frozenset({"qkv", "o", "up"}), {"on": "off"}),
                              Override(frozenset({0}), None, {"on": "off"})))  # fmt: skip
    lm = opened(directory, only)
    dense, kept = lm.model.step(7, lm.new_sequence(), True), lm.model.step(7, lm.new_sequence())
    assert not np.array_equal(dense, kept)
    lm.model.slots[1].taken["down"].slot.plant = True
    assert np.array_equal(lm.model.step(7, lm.new_sequence()), dense)


def test_a_mode_may_have_a_limit_of_its_own(directory):
    """exp(KL) - 1 is the gap that it says it bears; the guard's own limit is for those that say nothing."""
    for tol, off in ((1e-6, True), (100.0, False)):
        lm = opened(directory, Event(hold=1, topk=0.01, gap_tol=tol), kl=100 if off else 1e-6, every=8)
        assert lm.guard.modes["event"].limit == pytest.approx(np.log1p(tol))
        steps(lm, 64)
        assert lm.guard.modes["event"].on != off
    both = opened(directory, KWTA(k=0.9), Event(gap_tol=0.5), kl=0.1)
    assert {name: watch.limit for name, watch in both.guard.modes.items()} == {"kwta": 0.1, "event": np.log(1.5)}


def test_a_mode_may_ask_for_more_comparisons(directory):
    lm = opened(directory, Event(hold=1, gap_every=4, gap_tol=100.0), every=256)
    steps(lm, 40)
    assert lm.guard.counts["checks"] == 10
    lm = opened(directory, Event(hold=1, gap_every=300, gap_tol=100.0), every=4)
    steps(lm, 40)
    assert lm.guard.counts["checks"] == 10


def test_the_gap_is_what_was_compared(directory):
    lm = opened(directory, Event(hold=1, topk=0.2, gap_tol=100.0), every=8)
    steps(lm, 80)
    watch = lm.guard.modes["event"]
    assert watch.compared == 10 and watch.gap > 0
    assert lm.metrics()["event.quality_gap"] == pytest.approx(np.expm1(watch.gap / 10))
    assert lm.metrics()["guard.kl"] == pytest.approx(watch.gap / 10)


@pytest.mark.parametrize("mode", [BAD, Event(hold=1, topk=0.01, gap_tol=1e-6)], ids=["kwta", "event"])
@pytest.mark.parametrize("prompt", [0, 30])
def test_after_it_is_switched_off_the_text_is_denses(directory, mode, prompt):
    """What the mode wrote since the last good comparison is computed again: where there is none, all of it."""
    lm = opened(directory, mode, kl=1e-6, every=16)
    rng = np.random.default_rng(1)
    tokens = [int(t) for t in rng.integers(2, 90, prompt + 70)]
    ours, dense = lm.new_sequence(), lm.new_sequence()
    if prompt:
        lm.guard.prefill(tokens[:prompt], ours)
        lm.model.prefill(tokens[:prompt], dense, dense=True)
    found = np.stack([lm.guard.step(t, ours) for t in tokens[prompt:]])
    want = np.stack([lm.model.step(t, dense, dense=True) for t in tokens[prompt:]])
    assert len(lm.guard.events) == 1 and " off at token " in lm.guard.events[0]
    at = int(lm.guard.events[0].split(":")[0].split()[-1]) - 1
    assert not np.allclose(found[:at], want[:at], atol=1e-4)
    np.testing.assert_allclose(found[at:], want[at:], atol=1e-4)
    assert ours.tokens == dense.tokens


def test_only_what_is_not_sure_is_computed_again(directory):
    """Good comparisons, then a limit that the mode breaks: what was found good stays as it is."""
    lm = opened(directory, Event(hold=1, topk=0.3, gap_tol=100.0), every=8)
    _, seq = steps(lm, 40)
    assert seq.sure == 40
    good, dense = seq.clone(), lm.new_sequence()
    lm.guard.modes["event"].limit = 1e-9
    steps(lm, 16, seq)
    assert not lm.guard.modes["event"].on
    for text in (good, dense):
        for token in seq.tokens[len(text) :]:
            lm.model.step(token, text, dense=True)
    ours, kept, other = (lm.model.step(5, text, dense=True) for text in (seq, good, dense))
    np.testing.assert_allclose(ours, kept, atol=1e-4)
    assert np.abs(ours - other).max() > 1e-3


def test_what_is_sure_grows_with_good_comparisons(directory):
    lm = opened(directory, GOOD, kl=100, every=8)
    seq = lm.new_sequence()
    lm.guard.prefill(list(range(2, 12)), seq)
    assert seq.sure == 10  # a prompt is dense
    sure = []
    for token in range(20):
        lm.guard.step(token + 2, seq)
        sure.append(seq.sure)
    assert sure == [10] * 7 + [18] * 8 + [26] * 5
    assert seq.clone().sure == 26
    seq.trim(20)
    assert seq.sure == 20
    seq = lm.new_sequence()
    lm.model.modes_in_prefill = True
    lm.guard.prefill(list(range(2, 12)), seq)
    assert seq.sure == 0


def test_a_prompt_makes_the_answer_before_it_no_surer(directory):
    """As in a chat: what the mode wrote into the first answer is still computed again when it is switched off."""
    lm = opened(directory, BAD, kl=1e-6, every=16)
    tokens = np.random.default_rng(1).integers(2, 90, 100).tolist()
    ours, dense = lm.new_sequence(), lm.new_sequence()
    lm.guard.prefill(tokens[:20], ours)
    for token in tokens[20:26]:  # too few for a comparison
        lm.guard.step(token, ours)
    assert ours.sure == 20
    lm.guard.prefill(tokens[26:40], ours)
    assert ours.sure == 20
    found = [lm.guard.step(token, ours) for token in tokens[40:]]
    assert not lm.guard.modes["kwta"].on
    lm.model.prefill(tokens[:20], dense, dense=True)
    for token in tokens[20:26]:
        lm.model.step(token, dense, dense=True)
    lm.model.prefill(tokens[26:40], dense, dense=True)
    want = [lm.model.step(token, dense, dense=True) for token in tokens[40:]]
    np.testing.assert_allclose(found[-1], want[-1], atol=1e-3)


def test_a_prompt_in_pieces_is_sure(directory):
    lm = opened(directory, GOOD)
    seq = lm.new_sequence()
    for start in range(0, 300, 100):
        lm.guard.prefill(list(range(2, 82)) + [5] * 20, seq)
        assert seq.sure == len(seq) == start + 100


# ---------------------------------------------------------------- several texts in one pass


def begun(lm: LM, count: int) -> list:
    texts = [lm.new_sequence() for _ in range(count)]
    for i, text in enumerate(texts):
        lm.guard.prefill([2 + i, *range(2, 12 + 5 * i)], text)
    return texts


def together(lm: LM, texts: list, rounds: int, dense: list[bool]) -> np.ndarray:
    rng = np.random.default_rng(3)
    return np.stack([lm.guard.steps(rng.integers(2, 90, len(texts)).tolist(), texts, dense) for _ in range(rounds)])


@pytest.mark.parametrize("mode", [KWTA(k=0.9), Event(hold=1, topk=0.6, gap_tol=100.0)], ids=["kwta", "event"])
@pytest.mark.parametrize("dense", [[False] * 3, [True, False, True], [True] * 3], ids=str)
def test_texts_in_one_pass_give_what_the_model_gives(directory, mode, dense):
    """Comparisons, of one text each time, change nothing; a dense text is never compared."""
    lm, free = (opened(directory, mode, kl=100, every=16, on=on) for on in ("on", "off"))
    texts, others = begun(lm, 3), begun(free, 3)
    found, want = together(lm, texts, 40, dense), together(free, others, 40, dense)
    assert np.array_equal(found, want)
    assert [text.tokens for text in texts] == [text.tokens for text in others]
    first, between = (-(-tokens // max(1, dense.count(False))) for tokens in (FIRST_CHECK, 16))  # passes
    assert lm.guard.counts["checks"] == (0 if all(dense) else 1 + (40 - first) // between) and not lm.guard.events
    assert free.guard.counts["checks"] == 0


def test_texts_in_one_pass_without_modes(directory):
    lm = opened(directory)
    texts, copies = begun(lm, 3), begun(lm, 3)
    found = together(lm, texts, 5, [False] * 3)
    rng = np.random.default_rng(3)
    want = np.stack([lm.model.steps(rng.integers(2, 90, 3).tolist(), copies, [True] * 3) for _ in range(5)])
    assert np.array_equal(found, want) and lm.guard.counts["checks"] == 0


def test_comparisons_come_as_often_for_many_texts_as_for_one(directory):
    """By tokens, not by passes; and they go round among the texts."""
    lm = opened(directory, GOOD, kl=100, every=8)
    texts = begun(lm, 4)
    before = [text.sure for text in texts]
    together(lm, texts, 40, [False] * 4)
    assert lm.guard.counts["checks"] == 40 * 4 / 8
    assert all(text.sure > sure for text, sure in zip(texts, before, strict=True)), "each was found good"


def test_a_ruinous_mode_is_switched_off_for_all(directory):
    lm = opened(directory, BAD, kl=1e-4, every=32)
    texts = begun(lm, 3)
    together(lm, texts, 12, [False, True, False])
    assert [e.split(":")[0] for e in lm.guard.events] == ["kwta off at token 24"]
    copies = [text.clone() for text in texts]
    found = lm.guard.steps([5, 6, 7], texts, [False, True, False])
    assert np.array_equal(found, lm.model.steps([5, 6, 7], copies, [True] * 3))


def test_where_a_mode_is_switched_off_its_text_is_computed_again(directory):
    """Of the text that was compared: from there on it is dense's."""
    lm = opened(directory, BAD, kl=1e-4, every=16)
    [text], [dense] = begun(lm, 1), begun(lm, 1)
    rng = np.random.default_rng(5)
    for _ in range(40):
        token = int(rng.integers(2, 90))
        found, want = lm.guard.steps([token], [text], [False])[0], lm.model.step(token, dense, dense=True)
    assert len(lm.guard.events) == 1
    np.testing.assert_allclose(found, want, atol=1e-4)


def test_what_it_says_in_a_run(directory, capsys):
    from ralo.cli import main

    args = ["run", "-m", str(directory), "--kwta-k", "0.02", "--guard-kl", "0.0001", "-n", "60", "--temperature", "0"]
    assert main(args) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "kwta keep" in line and "skipped" in line and "guard switched kwta off at token" in line
