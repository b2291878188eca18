"""Drafts verified densely: whatever the modes draft, the text, its tokens and its state are dense's own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo import KWTA, Event
from ralo.lm import LM
from ralo.model import FEW
from ralo.modes.base import Mode
from ralo.sampling import Sampler, Sampling
from ralo.verify import AGAIN, FIRST, LAST, RETRY, Drafting, Verified

VERIFY = Event(verify="on")
ONLY_VERIFY = Event(verify="on", topk=1.0, hold=1)  # drafts are those of the other modes
DRAFTERS = {
    "ruinous": (KWTA(k=0.1), VERIFY),
    "good": (KWTA(k=0.95), ONLY_VERIFY),
    "event alone": (VERIFY,),
    "dense itself": (ONLY_VERIFY,),
}
PROMPTS = ("the house", "a", "once upon a time there was", "0 1 2 3 4 5")
CONFIG = {"eos_token_id": None, "max_position_embeddings": 256}
NAMES = pytest.mark.parametrize("name", DRAFTERS)


@dataclass
class Always(Drafting):
    """Drafts so many, whatever that costs."""

    ahead: int = 3

    def count(self) -> int:
        return self.ahead


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("verify") / "tiny", "llama", **CONFIG)


def opened(directory, *modes: Mode, ahead: int | None = 3, quant: str = "f32", kv: str = "f16") -> LM:
    lm = ralo.load(directory, quant, kv, modes=modes)
    if ahead is not None:
        lm.drafting = Always(ahead=ahead)
    return lm


def texts(lm: LM, tokens: int = 40, **sampling) -> list[list[int]]:
    return [lm.generate(prompt, tokens, **sampling).tokens for prompt in PROMPTS]


@pytest.mark.parametrize("ahead", [1, 3, FEW - 1, None])
@NAMES
def test_greedy_text_is_denses(directory, name, ahead):
    lm = opened(directory, *DRAFTERS[name], ahead=ahead)
    assert texts(lm, temperature=0) == texts(opened(directory), temperature=0)
    assert lm.drafting.drafted > 0


@pytest.mark.parametrize("quant", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
def test_every_precision(directory, quant, kv):
    lm = opened(directory, *DRAFTERS["good"], quant=quant, kv=kv)
    dense = opened(directory, quant=quant, kv=kv)
    assert texts(lm, temperature=0) == texts(dense, temperature=0)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"repeat_penalty": 1.3, "presence_penalty": 0.5},
        {"top_k": 20, "repeat_penalty": 1.5, "temperature": 0.7},
    ],
    ids=str,
)
@NAMES
def test_sampled_text_is_denses_with_the_same_seed(directory, name, sampling):
    lm, dense = opened(directory, *DRAFTERS[name]), opened(directory)
    for seed in range(4):
        options = {"temperature": 1.0, "seed": seed} | sampling
        assert texts(lm, **options) == texts(dense, **options)
    assert lm.drafting.drafted > lm.drafting.accepted or name == "dense itself"


@pytest.mark.parametrize("kv", ["f16", "int8"])
@pytest.mark.parametrize("ahead", [3, FEW - 1])
def test_a_long_text_whose_keys_are_held(directory, ahead, kv):
    """Drafts that are taken back take choices of keys with them."""
    prompt = np.random.default_rng(4).integers(2, 97, 175).tolist()
    lm, dense = (
        opened(directory, replace(VERIFY, min_ctx=0, keys=16, hold=4), ahead=ahead, kv=kv),
        opened(directory, kv=kv),
    )
    for seed in range(4):
        ours, theirs = (x.generate(prompt, 60, temperature=1.0, seed=seed).tokens for x in (lm, dense))
        assert ours == theirs
    assert 0 < lm.drafting.accepted < lm.drafting.drafted and lm.model.slots[1].attend.counts()["held"] > 0


def test_tokens_are_as_frequent_as_denses(directory):
    """The second and the third token over many seeds: one from the pass itself, one that was drafted."""
    found = []
    for lm in (opened(directory, *DRAFTERS["ruinous"]), opened(directory)):
        made = [lm.generate("the house", 3, temperature=1.0, seed=seed).tokens for seed in range(400)]
        found.append([Counter(tokens[at] for tokens in made if len(tokens) > at) for at in (1, 2)])
    assert found[0] == found[1] and all(len(c) > 20 for c in found[0])


def test_a_drafter_that_is_dense_is_always_right(directory):
    lm = opened(directory, *DRAFTERS["dense itself"])
    made = lm.generate("the house", 41, temperature=1.0, seed=5)  # one of the prompt's pass, ten passes of four
    assert len(made.tokens) == 41
    assert (lm.drafting.passes, lm.drafting.drafted, lm.drafting.accepted) == (10, 30, 30)
    assert lm.drafting.metrics() == {"accept_rate": 1.0, "drafts": 3.0, "passes": 10.0}


def test_a_ruinous_drafter_is_mostly_wrong(directory):
    rates = {}
    for name in ("ruinous", "good"):
        lm = opened(directory, *DRAFTERS[name])
        for seed in range(5):
            lm.generate("the house", 60, temperature=1.0, seed=seed)
        rates[name] = lm.drafting.metrics()["accept_rate"]
    assert rates["ruinous"] < 0.2 < 0.5 < rates["good"]


@pytest.mark.parametrize("tokens", [10, 11, 12, 13])
@NAMES
def test_the_sequence_is_denses_and_goes_on(directory, name, tokens):
    """Wherever the text ends among the drafts."""
    lm = opened(directory, *DRAFTERS[name])
    ours, theirs, made = lm.new_sequence(), lm.new_sequence(), []
    for each, seq in ((lm, ours), (opened(directory), theirs)):
        request = each.request("the house", tokens, temperature=1.0, seed=3)
        made.append([piece.token for piece in each.run(request, seq) if piece.token >= 0])
    assert made[0] == made[1] and ours.tokens == theirs.tokens and len(ours) == len(theirs)
    for token in (5, 6, 7):
        assert np.array_equal(lm.model.step(token, ours, dense=True), lm.model.step(token, theirs, dense=True))


@NAMES
def test_a_text_goes_on_with_another_prompt(directory, name):
    """As in a chat: what was drafted for the end of an answer is not there any more."""
    lm, dense = opened(directory, *DRAFTERS[name]), opened(directory)
    made = []
    for each in (lm, dense):
        seq = each.new_sequence()
        for prompt, tokens in (("the house", 10), ("is", 9), ("red", 21)):
            made.append([p.token for p in each.run(each.request(prompt, tokens, temperature=0), seq)])
    assert made[:3] == made[3:]


@pytest.mark.parametrize("on_full", ["stop", "slide"])
@pytest.mark.parametrize("ahead", [1, 3, FEW - 1])
def test_the_context_ends_where_denses_ends(tmp_path, ahead, on_full):
    short = write_hf(tmp_path / "short", "llama", **CONFIG | {"max_position_embeddings": 37})
    made = []
    for lm in (opened(short, *DRAFTERS["good"], ahead=ahead), opened(short)):
        request = lm.request("the house", 70, temperature=0, on_full=on_full)
        made.append(([piece.token for piece in lm.run(request)], request.stats.finish))
    assert made[0] == made[1] and made[0][1] == ("context" if on_full == "stop" else "length")


def test_stop_tokens_and_stop_strings(tmp_path, directory):
    whole = opened(directory).generate("the house", 30, temperature=0)
    end = whole.tokens[17]
    ending = write_hf(tmp_path / "ending", "llama", **CONFIG | {"eos_token_id": end})
    found = []
    for lm in (opened(ending, *DRAFTERS["good"]), opened(ending)):
        made = lm.generate("the house", 30, temperature=0)
        found.append((made.tokens, made.text, made.stats.finish))
    assert found[0] == found[1] and found[0][2] == "eos" and len(found[0][0]) == whole.tokens.index(end)
    stop = whole.text[len(whole.text) // 2 :][:3]
    lm = opened(directory, *DRAFTERS["good"])
    ours, theirs = (x.generate("the house", 30, temperature=0, stop=[stop]) for x in (lm, opened(directory)))
    assert ours.tokens == theirs.tokens and ours.text == theirs.text and ours.stats.finish == "stop"


def test_two_texts_take_turns(directory):
    """Each has drafts of its own."""
    lm, dense = opened(directory, *DRAFTERS["good"]), opened(directory)
    requests = [lm.request(prompt, 20, temperature=1.0, seed=7) for prompt in PROMPTS[:2]]
    turns = list(zip(*(lm.run(request) for request in requests), strict=True))
    want = [dense.generate(prompt, 20, temperature=1.0, seed=7).tokens for prompt in PROMPTS[:2]]
    assert [[piece.token for piece in text] for text in zip(*turns, strict=True)] == want


def test_a_fork_chooses_alike_and_uses_up_nothing():
    sampler, logits = Sampler(Sampling(temperature=1.0, seed=3)), np.linspace(-1, 1, 50, dtype=np.float32)
    sampler(logits)
    fork = sampler.fork()
    ahead = [fork(logits) for _ in range(20)]
    assert [sampler(logits) for _ in range(20)] == ahead and len(set(ahead)) > 5


def test_prompts_are_denses(directory):
    lm = opened(directory, KWTA(k=0.1, prefill="on"), VERIFY)
    runner = Verified(lm.model, lm.drafting, Sampler(Sampling(temperature=0)))
    tokens = lm.encode("the house")
    dense = opened(directory)
    assert np.array_equal(runner.prefill(tokens, lm.new_sequence()), dense.model.prefill(tokens, dense.new_sequence()))


# ---------------------------------------------------------------- how many to draft


def drafting(draft_s: float, verify_s: float, slope: float = 0.1) -> Drafting:
    """One that has seen its first passes, on a machine with these times."""
    d = Drafting()
    for wanted in FIRST:
        assert d.count() == wanted
        d.saw(wanted, wanted * draft_s, verify_s + wanted * slope)
    return d


def test_cheap_drafts_that_are_accepted_become_more():
    d = drafting(0.05, 1.0)
    first = d.count()
    for _ in range(80):
        d.judged(True)
    assert 1 <= first <= d.count() == FEW - 1


def test_dear_drafts_are_fewer():
    counts = [drafting(draft_s, 1.0).count() for draft_s in (0.01, 0.1, 0.3, 1.0)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[2] and counts[3] == 0
    assert drafting(0.01, 1.0, slope=0.9).count() < drafting(0.01, 1.0).count()


def test_drafts_that_are_refused_are_left_for_a_while_and_tried_again():
    d = drafting(0.1, 1.0)
    for _ in range(80):
        d.judged(False)
    ahead = []
    for _ in range(3 * (AGAIN + len(RETRY))):
        ahead.append(d.count())
        d.saw(ahead[-1], 0.1 * ahead[-1], 1.0 + 0.1 * ahead[-1])
        if ahead[-1]:
            d.judged(False)
    tries = [i for i, n in enumerate(ahead) if n]
    assert len(tries) in (4, 6) and tries[0] >= AGAIN and tries[2] - tries[1] > AGAIN
    for _ in range(60 * AGAIN):  # it pays again, which the tries show
        n = d.count()
        d.saw(n, 0.01 * n, 1.0)
        for _ in range(n):
            d.judged(True)
    assert d.count() == FEW - 1


@pytest.mark.parametrize("slow", [0, 1, 3, FEW - 1])
def test_one_slow_moment_changes_nothing(slow):
    """Whatever was being done then, once it has been seen a few times."""
    d = drafting(0.1, 1.0)
    for _ in range(3):
        for n in range(FEW):
            d.saw(n, 0.1 * n, 1.0 + 0.1 * n)
    before = d.count()
    d.saw(slow, 50.0 * slow, 100.0)
    assert 0 < d.count() == before < FEW - 1


def test_the_first_draft_is_not_timed():
    """It sets up what modes remember of the prompt."""
    d = Drafting()
    d.saw(3, 100.0, 1.3)
    assert not d.draft_s and d.verify_s.keys() == {4} and (d.drafted, d.passes) == (3, 1)
    d.saw(2, 0.2, 1.2)
    assert list(d.draft_s) == [0.1]


def test_times_are_medians_of_the_last_ones():
    d = drafting(0.1, 1.0)
    for _ in range(LAST):
        d.saw(2, 2 * 0.1, 1.2)
    before = d._seconds(2)
    for _ in range(LAST // 2):
        d.saw(2, 2 * 9.0, 9.0)
    assert d._seconds(2) == before  # still fewer than half
    d.saw(2, 2 * 9.0, 9.0)
    assert d._verify(3) == 9.0 and d._seconds(2) > 10 * before and len(d.draft_s) == len(d.verify_s[3]) == LAST


def test_times_follow_what_they_are_now():
    d = drafting(0.05, 1.0)
    assert d.count() > 0
    for _ in range(LAST):
        d.saw(3, 3 * 5.0, 1.0)
    assert d.count() == 0


def test_nothing_drafted_nothing_accepted():
    assert Drafting().metrics() == {"accept_rate": 0.0, "drafts": 0.0, "passes": 0.0}
