"""An engine's line: who runs, who waits, who leaves, what an error does, and that nothing is left behind."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from desk import CONTEXT, OFF, PATIENCE_S, PROMPTS, Desk, alone, open_endless, prompt_of
from tiny import write_hf

import ralo
from ralo import RaloError
from ralo import engine as engine_file
from ralo.engine import Engine
from ralo.generate import Request
from ralo.jobs import Busy, Job
from ralo.lm import LM
from ralo.model import FEW, PREFILL_CHUNK, STRETCH, Model
from ralo.sequence import Sequence as TextState


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> LM:
    return open_endless(tmp_path_factory.mktemp("engine") / "endless")


@pytest.fixture
def desk(endless: LM) -> Desk:
    return Desk(endless)


# ---------------------------------------------------------------- room


def test_busy(endless: LM) -> None:
    desk = Desk(endless, texts=1, queue=2)
    desk.ask(PROMPTS[2], 50)
    desk.passes()
    for _ in range(2):
        desk.ask(PROMPTS[2], 5)
    with pytest.raises(Busy, match="try again later") as busy:
        desk.ask(PROMPTS[2], 5)
    assert busy.value.seconds == pytest.approx(3.0)  # a second a job until one was seen, and two before it
    desk.finish()
    assert len(desk.made) == 3
    for _ in range(2):
        desk.ask(PROMPTS[2], 5)
    with pytest.raises(Busy) as busy:
        desk.ask(PROMPTS[2], 5)
    assert 0 < busy.value.seconds < 3.0  # they took less
    desk.finish()


def test_more_answers_than_texts_that_run_at_once(endless: LM) -> None:
    desk = Desk(endless, texts=3)
    with pytest.raises(RaloError, match="4 answers are more than the 3 texts that run at once"):
        desk.ask(PROMPTS[2], n=4)
    jobs = [desk.ask(PROMPTS[i], 6, n=n, seed=1, temperature=1.0) for i, n in ((2, 2), (3, 2), (7, 3), (0, 1))]
    most = 0
    while not desk.engine.idle:
        desk.passes()
        most = max(most, desk.engine.running)
    assert most == 3 and all(desk.ended(job) for job in jobs)


def test_what_is_under_way_is_seen(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from outside, in the middle of a pass: a server that closes waits for it."""
    seen, engine = [], desk.engine
    prefill, known = Model.prefill, Engine._known

    def look(*args: Any, **options: Any) -> Any:
        seen.append((engine.idle, engine.waiting + engine.running))
        return prefill(*args, **options)

    def look_known(*args: Any) -> Any:
        seen.append((engine.idle, engine.waiting + engine.running))
        return known(*args)

    monkeypatch.setattr(Model, "prefill", look)
    monkeypatch.setattr(Engine, "_known", look_known)
    desk.ask(PROMPTS[1], 2)  # two pieces
    assert (engine.idle, engine.waiting, engine.running) == (False, 1, 0)
    desk.passes()
    assert (engine.idle, engine.waiting, engine.running) == (False, 1, 0)
    desk.finish()
    assert seen == [(False, 1)] * 3 and engine.idle and engine.waiting == engine.running == 0


# ---------------------------------------------------------------- cancelled


@pytest.mark.parametrize("when", ["waiting", "filling", "running"])
def test_cancelled(endless: LM, when: str) -> None:
    """Its place is free with the next pass; others notice nothing."""
    desk = Desk(endless, texts=2)
    other = desk.ask(PROMPTS[6], 30)
    if when == "waiting":
        desk.ask(PROMPTS[2], 30)
        desk.passes()
    job = desk.ask(prompt_of(900), 30)
    desk.passes({"waiting": 1, "filling": 2, "running": 12}[when])
    engine = desk.engine
    assert job in [
        *(engine._waiting if when == "waiting" else ()),
        *(f.job for f in engine._filling if when == "filling"),
        *(a.job for a in engine._running if when == "running"),
    ]
    made = len(desk.deltas(job))
    engine.cancel(job)
    desk.passes()
    assert len(desk.deltas(job)) == made
    assert all(job is not one.job for one in [*engine._filling, *engine._running]) and job not in engine._waiting
    desk.finish()
    assert len(desk.deltas(job)) == made and desk.answer(other) == alone(endless, PROMPTS[6], 30)


def test_cancelled_answers_to_one_prompt(desk: Desk, endless: LM) -> None:
    job, other = desk.ask(PROMPTS[2], 30, n=3, seed=1, temperature=1.0), desk.ask(PROMPTS[4], 30)
    desk.passes(5)
    assert desk.engine.running == 4
    desk.engine.cancel(job)
    desk.passes()
    assert desk.engine.running == 1
    desk.finish()
    assert desk.answer(other) == alone(endless, PROMPTS[4], 30)


def test_nothing_is_left_of_many_that_were_cancelled(endless: LM) -> None:
    gc.collect()
    others = {id(text) for text in gc.get_objects() if type(text) is TextState}  # of other tests
    desk = Desk(endless, texts=8, queue=300, cache_bytes=1 << 20)
    jobs = [desk.ask(PROMPTS[i % len(PROMPTS)], 40, n=1 + i % 3) for i in range(200)]
    for i, job in enumerate(jobs):
        if i % 3 == 0:
            desk.passes()
        desk.engine.cancel(job)
    desk.passes()
    engine = desk.engine
    assert engine.idle and engine.cache_bytes == engine.prefixes.nbytes <= 1 << 20
    kept = [one.seq for one in engine.prefixes._kept]
    assert kept
    gc.collect()
    texts = [text for text in gc.get_objects() if type(text) is TextState and id(text) not in others]
    assert all(any(text is one for one in kept) for text in texts)
    job = desk.ask(PROMPTS[4])
    desk.finish()
    assert desk.answer(job) == alone(endless, PROMPTS[4])


# ---------------------------------------------------------------- fairness


def test_a_long_prompt_holds_up_nobody(desk: Desk) -> None:
    short = desk.ask(PROMPTS[2], 40)
    desk.passes()
    long = desk.ask(prompt_of(900), 5)
    for n in range(1, 9):
        before = len(long.prompt) - sum(len(long.prompt) - len(f.seq) for f in desk.engine._filling)
        got = len(desk.deltas(short))
        desk.passes()
        assert len(desk.deltas(short)) == got + 1  # a token each pass
        if desk.engine._filling:
            assert 0 < len(desk.engine._filling[0].seq) - (before if n > 1 else 0) <= STRETCH + FEW
    assert desk.deltas(long)  # 900 tokens: eight pieces
    late = desk.ask(PROMPTS[3], 5)
    desk.passes(2)
    assert desk.deltas(late)


def test_short_prompts_pass_long_ones(desk: Desk) -> None:
    desk.ask(PROMPTS[2], 60)
    desk.passes()
    long = [desk.ask(prompt_of(900, 2 + i), 5) for i in range(3)]
    desk.passes(2)
    short = [desk.ask(prompt_of(20, 60 + i), 5) for i in range(5)]
    desk.passes(4)  # a piece of each long one, and then all of the short ones
    assert all(desk.deltas(job) for job in short) and not any(desk.deltas(job) for job in long)
    desk.finish()


def test_a_pass_without_answers_runs_larger_pieces(desk: Desk) -> None:
    desk.ask(prompt_of(900), 5)
    desk.passes()
    assert len(desk.engine._filling[0].seq) == PREFILL_CHUNK
    desk.finish()


def test_in_the_order_they_came(endless: LM) -> None:
    desk = Desk(endless, texts=1)
    jobs = [desk.ask(prompt_of(10 + i), 3) for i in range(5)]
    desk.finish()
    assert list(desk.made) == jobs


# ---------------------------------------------------------------- errors

FAULTS = {
    "decode": (Model, "steps"),
    "prefill": (Model, "prefill"),
    "known": (Engine, "_known"),
    "begin": (LM, "tokenizer"),
    "choose": (engine_file.Turn, "take"),
}


@pytest.mark.parametrize(
    "error", [RaloError("no more memory"), ZeroDivisionError("oh")], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_ends_what_is_there_and_the_next_is_served(
    endless: LM, monkeypatch: pytest.MonkeyPatch, fault: str, error: Exception
) -> None:
    """Every answer hears of it once: one that runs, one whose prompt is on its way, one that waits."""
    want = alone(endless, PROMPTS[2], 5)
    desk, ready = Desk(endless, texts=2), threading.Event()
    where, name = FAULTS[fault]

    def fail(*args: Any, **options: Any) -> Any:
        ready.wait(PATIENCE_S)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(where, name, property(fail) if name == "tokenizer" else fail)
        jobs = [Job([_request(prompt, 5)], top=0) for prompt in (PROMPTS[2], PROMPTS[1], PROMPTS[3])]
        jobs.append(Job([_request(PROMPTS[4], 5) for _ in range(2)], top=0))
        for job in jobs:
            desk.engine.submit([job])
        desk.engine.start()
        ready.set()
        desk.wait(jobs)
    said = str(error) if isinstance(error, RaloError) else "something went wrong here; the server's log says what"
    for job in jobs:
        last = [delta for delta in desk.deltas(job) if delta.finish]
        assert sorted(delta.choice for delta in last) == list(range(len(job.requests)))
        assert {(delta.finish, delta.error) for delta in last} == {("error", said)}
    after = desk.ask(PROMPTS[2], 5)
    desk.wait([after])
    assert desk.answer(after) == want
    desk.engine.stop()
    assert desk.engine.idle


def _request(prompt: list[int], tokens: int) -> Request:
    """Made by hand: `LM.request` needs the tokenizer, which is what fails."""
    return Request(prompt, ralo.sampling.Sampler(ralo.Sampling(temperature=0)), tokens)


def test_scores_that_are_no_numbers_end_their_own_text_alone(tmp_path: Path) -> None:
    plain = ralo.load(write_hf(tmp_path, "llama", dtype="f32", max_position_embeddings=CONTEXT), "int8")
    weights, bad = plain.model.weights, 1
    table = np.array(weights.embed.table)
    table[bad] = np.nan
    model = Model(plain.model.cfg, replace(weights, embed=replace(weights.embed, table=table)))
    lm = LM(plain.path, model, lambda: plain.tokenizer, plain.kv, OFF)
    desk = Desk(lm)
    good = [desk.ask(PROMPTS[i]) for i in (2, 4)]
    job = desk.ask([*PROMPTS[5], bad])
    desk.finish()
    [delta] = desk.deltas(job)
    assert delta.finish == "error" and "damaged" in delta.error and not job.open
    assert [desk.answer(one) for one in good] == [alone(lm, PROMPTS[i]) for i in (2, 4)]
    again = desk.ask([*PROMPTS[5], bad])  # nothing of it is kept
    desk.finish()
    assert again.cached == 0


def test_stop_ends_all(endless: LM) -> None:
    desk = Desk(endless, texts=2)
    jobs = [desk.ask(PROMPTS[i], 900) for i in (2, 1, 3, 4)]
    desk.engine.start()
    with desk.new:
        assert desk.new.wait_for(lambda: bool(desk.made), PATIENCE_S)
    desk.engine.stop()
    for job in jobs:
        assert desk.ended(job) and (desk.deltas(job)[-1].finish, desk.deltas(job)[-1].error) == ("cancelled", "")
    assert desk.engine.idle
    with pytest.raises(RaloError, match="the server is shutting down"):
        desk.ask(PROMPTS[2])
    desk.engine.stop()  # again


def test_stop_of_an_idle_engine(endless: LM) -> None:
    desk = Desk(endless)
    desk.engine.start()
    desk.engine.stop()
    assert desk.made == {}
