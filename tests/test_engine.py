"""Many texts at once: every answer is the one it would be alone, whoever comes and goes beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from desk import CONTEXT, LENGTHS, PATIENCE_S, PROMPTS, TOKENS, Desk, alone, open_endless, prompt_of, write_ending
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_hf

import ralo
from ralo.jobs import Job, chosen_of
from ralo.lm import LM
from ralo.model import FEW, STRETCH


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ending(tmp_path_factory.mktemp("engine") / "ending")


@pytest.fixture(scope="module")
def lm(directory: Path) -> LM:
    return ralo.load(directory, "int8")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> LM:
    return open_endless(tmp_path_factory.mktemp("engine") / "endless")


@pytest.fixture
def desk(endless: LM) -> Desk:
    return Desk(endless)


@pytest.fixture
def started(endless: LM) -> Iterator[Desk]:
    desk = Desk(endless)
    desk.engine.start()
    yield desk
    desk.engine.stop()


@cache
def mini() -> LM:
    return ralo.load()


# ---------------------------------------------------------------- as alone


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_all_at_once(directory: Path, quant: str, kv: str) -> None:
    lm = ralo.load(directory, quant, kv)
    desk = Desk(lm)
    jobs = [desk.ask(prompt) for prompt in PROMPTS]
    desk.finish()
    for job, prompt in zip(jobs, PROMPTS, strict=True):
        assert desk.answer(job) == alone(lm, prompt), len(prompt)
        assert job.cached == 0 and not job.open and job.requests[0].stats.prompt_tokens == len(prompt)
    assert desk.engine.totals.prompt_tokens == sum(LENGTHS)
    assert desk.engine.totals.new_tokens == sum(len(desk.answer(job)[0]) for job in jobs)


def test_every_level(lm: LM, level: str) -> None:
    desk = Desk(lm, texts=5)
    jobs = [desk.ask(prompt, 6) for prompt in PROMPTS]
    desk.finish()
    assert [desk.answer(job) for job in jobs] == [alone(lm, prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize("texts", [1, 2, 3, 32])
def test_one_after_the_other(lm: LM, texts: int) -> None:
    """Each comes while others are at different places; and waits where there is no room."""
    desk, jobs = Desk(lm, texts=texts), []
    for prompt in PROMPTS:
        jobs.append(desk.ask(prompt))
        desk.passes(2)
        assert desk.engine.running <= texts
    desk.finish()
    assert [desk.answer(job) for job in jobs] == [alone(lm, prompt) for prompt in PROMPTS]


def test_the_thread(started: Desk) -> None:
    want = [alone(started.lm, prompt) for prompt in PROMPTS]  # before: one drives the model at a time
    jobs: dict[int, Job] = {}

    def client(i: int) -> None:
        for at in range(i, len(PROMPTS), 3):
            jobs[at] = started.ask(PROMPTS[at])
            started.wait([jobs[at]])

    clients = [threading.Thread(target=client, args=(i,)) for i in range(3)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(PATIENCE_S)
    assert [started.answer(jobs[at]) for at in range(len(PROMPTS))] == want
    assert started.engine.idle


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8, "repeat_penalty": 1.3},
        {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    ],
    ids=str,
)
def test_sampled_answers_follow_their_seeds(lm: LM, options: dict[str, float]) -> None:
    desk = Desk(lm)
    jobs = [desk.ask(prompt, seed=i, **options) for i, prompt in enumerate(PROMPTS)]
    desk.finish()
    for i, (job, prompt) in enumerate(zip(jobs, PROMPTS, strict=True)):
        assert desk.answer(job) == alone(lm, prompt, seed=i, **options)


def test_several_answers_to_one_prompt(endless: LM, desk: Desk) -> None:
    job, other = desk.ask(PROMPTS[4], n=5, seed=40, temperature=1.0), desk.ask(PROMPTS[2])
    desk.finish()
    found = [desk.answer(job, i) for i in range(5)]
    assert found == [alone(endless, PROMPTS[4], seed=40 + i, temperature=1.0) for i in range(5)]
    assert len({tuple(tokens) for tokens, _, _ in found}) == 5 and not job.open
    assert desk.answer(other) == alone(endless, PROMPTS[2])
    assert desk.engine.totals.prompt_tokens == len(PROMPTS[4]) + len(PROMPTS[2])  # the prompt ran once


def test_angles_that_depend_on_the_length(tmp_path: Path) -> None:
    """Beginnings are of no use there, nor can prompts be cut."""
    scaling = {"rope_type": "dynamic", "factor": 8.0}
    lm = ralo.load(write_hf(tmp_path, "llama", max_position_embeddings=128, rope_scaling=scaling), "f32")
    desk = Desk(lm)
    jobs = [desk.ask(PROMPTS[i]) for i in (1, 2, 4, 5, 4)]
    desk.finish()
    assert [desk.answer(job) for job in jobs] == [alone(lm, PROMPTS[i]) for i in (1, 2, 4, 5, 4)]
    assert desk.engine.totals.cached_tokens == desk.engine.cache_bytes == 0


@pytest.mark.parametrize("kind", ["mistral", "gpt2"])
def test_other_architectures(tmp_path: Path, kind: str) -> None:
    longest = {"n_positions": CONTEXT} if kind == "gpt2" else {"max_position_embeddings": CONTEXT}
    lm = ralo.load(write_hf(tmp_path, kind, **longest), "int8")
    desk = Desk(lm)
    jobs = [desk.ask(prompt) for prompt in PROMPTS]
    desk.finish()
    assert [desk.answer(job) for job in jobs] == [alone(lm, prompt) for prompt in PROMPTS]


plans = st.lists(
    st.tuples(st.sampled_from(range(6)), st.integers(0, 4), st.integers(0, 12), st.none() | st.integers(0, 6)),
    min_size=1,
    max_size=12,
)


@given(plan=plans, texts=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_whoever_comes_and_goes(lm: LM, plan: list[tuple[int, int, int, int | None]], texts: int) -> None:
    """Which prompt, passes before it comes, its tokens, and passes after which it is cancelled."""
    desk, jobs, age = Desk(lm, texts=texts), list[tuple[Job, int, int, int | None]](), 0
    for which, passes, tokens, patience in plan:
        for _ in range(passes):
            for job, _, _, leaves in jobs:
                if leaves == age:
                    desk.engine.cancel(job)
            desk.passes()
            age += 1
        jobs.append((desk.ask(PROMPTS[which], tokens), which, tokens, None if patience is None else age + patience))
    desk.finish()
    for job, which, tokens, _ in jobs:
        if not job.cancelled or desk.ended(job):  # it was faster
            assert desk.answer(job) == short(lm, which, tokens)
        else:
            part = [delta.chosen.token for delta in desk.deltas(job) if delta.chosen]
            assert part == short(lm, which, tokens)[0][: len(part)]


@cache
def short(lm: LM, which: int, tokens: int) -> tuple[list[int], str, str]:
    return alone(lm, PROMPTS[which], tokens)


# ---------------------------------------------------------------- where answers end


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens(desk: Desk, endless: LM, tokens: int) -> None:
    jobs = [desk.ask(PROMPTS[i], tokens, n=2) for i in (2, 4)]
    desk.finish()
    for job, i in zip(jobs, (2, 4), strict=True):
        assert desk.answer(job) == desk.answer(job, 1) == alone(endless, PROMPTS[i], tokens)
        assert job.requests[0].stats.finish == "length" and job.requests[0].stats.new_tokens == tokens
    assert desk.engine.totals.new_tokens == 4 * tokens


def test_stop_strings(desk: Desk, endless: LM) -> None:
    text = alone(endless, PROMPTS[2], 40)[1]
    stops = [text[at : at + 3] for at in (2, 9, 17)]
    jobs = [desk.ask(PROMPTS[2], 40, stop=["never said", stop]) for stop in stops]
    desk.finish()
    for job, stop in zip(jobs, stops, strict=True):
        assert desk.answer(job) == alone(endless, PROMPTS[2], 40, stop=[stop])
        assert desk.answer(job)[1:] == (text[: text.find(stop)], "stop")


def test_text_that_may_start_a_stop_string_is_held_back_to_the_end(desk: Desk, endless: LM) -> None:
    text = alone(endless, PROMPTS[2], 10)[1]
    job = desk.ask(PROMPTS[2], 10, stop=[text[-1] + "never"])
    desk.finish()
    assert desk.answer(job)[1:] == (text, "length")


def test_end_of_text(tmp_path: Path, endless: LM) -> None:
    tokens, *_ = alone(endless, PROMPTS[2], 30)
    end = next(token for at, token in enumerate(tokens) if at > 3 and token not in tokens[:at])
    lm = ralo.load(write_hf(tmp_path, "llama", seed=3, eos_token_id=end, max_position_embeddings=CONTEXT), "int8")
    desk = Desk(lm)
    jobs = [desk.ask(PROMPTS[i], 30) for i in (2, 4, 6)]
    desk.finish()
    assert [desk.answer(job) for job in jobs] == [alone(lm, PROMPTS[i], 30) for i in (2, 4, 6)]
    assert desk.answer(jobs[0])[2] == "eos" and desk.deltas(jobs[0])[-1].chosen is None
    assert desk.answer(jobs[0])[0] == tokens[: tokens.index(end)]


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_full_context(desk: Desk, endless: LM, room: int) -> None:
    long, beside = prompt_of(CONTEXT - room), desk.ask(PROMPTS[2], 40)
    job = desk.ask(long, 40)
    desk.finish()
    assert desk.answer(job) == alone(endless, long, 40)
    assert desk.answer(job)[2] == "context" and len(desk.answer(job)[0]) == room + 1
    assert desk.answer(beside) == alone(endless, PROMPTS[2], 40)


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("top", [0, 1, 5, 97, 200])
def test_log_probabilities(desk: Desk, top: int) -> None:
    greedy, sampled = desk.ask(PROMPTS[2], top=top), desk.ask(PROMPTS[4], top=top, temperature=2.0, seed=1)
    desk.finish()
    for job in (greedy, sampled):
        for delta in desk.deltas(job):
            chosen = delta.chosen
            assert chosen is not None and chosen.logprob <= 0 and len(chosen.top) == min(top, 97)
            values = [value for _, value in chosen.top]
            assert values == sorted(values, reverse=True) and len({token for token, _ in chosen.top}) == len(values)
            assert dict(chosen.top).get(chosen.token, chosen.logprob) == chosen.logprob
            if job is greedy and top:
                assert chosen.top[0] == (chosen.token, chosen.logprob)
            if top >= 97:
                assert np.exp(values).sum() == pytest.approx(1, abs=1e-4) and chosen.token in dict(chosen.top)


def test_log_probabilities_are_of_the_models_own_scores(desk: Desk, endless: LM) -> None:
    """Before temperature, limits and penalties."""
    job = desk.ask(PROMPTS[2], 4, top=3, temperature=0.5, top_k=2, repeat_penalty=1.5, seed=3)
    desk.finish()
    seq = endless.new_sequence()
    scores = endless.model.prefill(PROMPTS[2], seq).astype(np.float64)
    for delta in desk.deltas(job):
        assert delta.chosen is not None
        logp = scores - np.log(np.exp(scores).sum())
        order = np.argsort(-logp)[:3]
        assert [token for token, _ in delta.chosen.top] == order.tolist()
        assert [value for _, value in delta.chosen.top] == pytest.approx(logp[order].tolist(), abs=1e-4)
        assert delta.chosen.logprob == pytest.approx(logp[delta.chosen.token], abs=1e-4)
        scores = endless.model.step(delta.chosen.token, seq).astype(np.float64)


@pytest.mark.parametrize("top", [0, 1, 20, 4999, 5000, 9000])
def test_log_probabilities_of_a_large_vocabulary(top: int) -> None:
    """Best first, whatever the order of the tokens is."""
    scores = np.random.default_rng(2).normal(0, 3, 5000).astype(np.float32)
    found = chosen_of(7, scores, top)
    wide = scores.astype(np.float64)
    logp = wide - np.log(np.exp(wide).sum())
    assert [token for token, _ in found.top] == np.argsort(-scores, kind="stable")[:top].tolist()
    assert [value for _, value in found.top] == pytest.approx(np.sort(logp)[::-1][:top].tolist(), abs=1e-4)
    assert found.token == 7 and found.logprob == pytest.approx(logp[7], abs=1e-4)


def test_without_log_probabilities_there_are_none(desk: Desk, endless: LM) -> None:
    job = Job([endless.request(PROMPTS[2], 5, temperature=0)])
    desk.engine.submit([job])
    desk.finish()
    assert [delta.chosen for delta in desk.deltas(job)] == [None] * 5


# ---------------------------------------------------------------- known beginnings


def test_the_second_turn_of_a_chat_does_not_run_the_first_again(desk: Desk, endless: LM) -> None:
    first = desk.ask(PROMPTS[2], 20)
    desk.finish()
    tokens, *_ = desk.answer(first)
    history = PROMPTS[2] + tokens
    second = desk.ask([*history, *TOKENS[500:530]], 20)
    desk.finish()
    known = len(history) - 1  # the last token was never run
    assert second.cached == known and desk.engine.totals.cached_tokens == known
    assert desk.engine.totals.prompt_tokens == 2 * len(PROMPTS[2]) + 20 + 30
    seq = endless.new_sequence()  # as in `ralo chat`, which goes on with its text
    list(endless.run(endless.request(PROMPTS[2], 20, temperature=0), seq))
    ask = endless.request([*history, *TOKENS[500:530]][known:], 20, temperature=0)
    assert desk.answer(second)[0] == [piece.token for piece in endless.run(ask, seq) if piece.token >= 0]


def test_a_chat_with_the_model_that_ships() -> None:
    lm = mini()
    desk, talk = Desk(lm), [{"role": "user", "content": "It was a dark and stormy night, and the old house"}]
    for turn in range(3):
        job = desk.ask(lm.tokenizer.talk(talk), 30)
        desk.finish()
        _, text, finish = desk.answer(job)
        assert finish == "length" and len(text.split()) > 10 and text.isascii() and "\ufffd" not in text
        assert (job.cached > 0) == (turn > 0) and job.cached < len(job.prompt)
        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "Then the door"}]
    assert desk.engine.totals.cached_tokens > 50


@pytest.mark.parametrize("length", [129, 128 + FEW + 1, 200, 257, 385, 700])
def test_a_prompt_that_comes_again_gives_the_same_answer(desk: Desk, endless: LM, length: int) -> None:
    want = alone(endless, prompt_of(length))
    for n in range(3):
        job = desk.ask(prompt_of(length))
        desk.finish()
        assert desk.answer(job) == want
        assert job.cached == (n > 0) * ((length - FEW - 1) // STRETCH * STRETCH)


def test_prompts_that_start_alike(desk: Desk, endless: LM) -> None:
    """Their common part runs once, and each is as alone."""
    prompts = [[*TOKENS[:300], *TOKENS[400 + i : 450 + i]] for i in range(4)]
    first = desk.ask(prompts[0])
    desk.finish()
    jobs = [first, *(desk.ask(prompt) for prompt in prompts[1:])]
    desk.finish()
    assert [job.cached for job in jobs] == [0, 256, 256, 256]
    assert [desk.answer(job) for job in jobs] == [alone(endless, prompt) for prompt in prompts]


def test_without_room_nothing_is_kept(endless: LM) -> None:
    desk = Desk(endless, cache_bytes=0)
    for _ in range(2):
        job = desk.ask(PROMPTS[6])
        desk.finish()
        assert job.cached == 0 and desk.answer(job) == alone(endless, PROMPTS[6])
    assert desk.engine.cache_bytes == 0


def test_of_a_cancelled_text_the_beginning_is_known(desk: Desk, endless: LM) -> None:
    job = desk.ask(PROMPTS[6], 200)
    desk.passes(10)
    desk.engine.cancel(job)
    desk.passes()
    again = desk.ask(PROMPTS[6], 30)
    desk.finish()
    assert again.cached == 128 and desk.answer(again) == alone(endless, PROMPTS[6], 30)
