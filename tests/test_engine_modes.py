"""Many texts at once with modes on: as alone, watched together, drafts of each its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from desk import LENGTHS, PROMPTS, TOKENS, Desk, alone, open_endless, opened, prompt_of, write_ending
from test_verify import Always

from ralo import KWTA, Event, StatePack
from ralo.guard import GuardOptions
from ralo.model import FEW, Dense
from ralo.modes.base import Mode

MODES: dict[str, tuple[Mode, ...]] = {
    "kwta": (KWTA(k=0.5),),
    "kwta, halves": (KWTA(k=0.5),),  # of int8 weights
    "kwta, duty": (KWTA(k=0.5, duty=3),),
    "kwta, keys": (KWTA(k=0.9, keys=0.3, keys_min=8),),
    "event": (Event(hold=8, keys=16, min_ctx=0),),
    "event, deltas": (Event(deltas="all", hold=1, topk=0.5),),
    "pack": (StatePack(target="both", min_ctx=0, recent=8, keys=16),),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ending(tmp_path_factory.mktemp("engine") / "ending")


@pytest.mark.parametrize("name", MODES)
def test_modes_without_a_guard(directory: Path, name: str) -> None:
    """As alone, beside dense texts; also where a beginning was known."""
    quant = "int8" if "halves" in name else "f32"
    lm, dense = opened(directory, *MODES[name], quant=quant), opened(directory, quant=quant)
    desk = Desk(lm)
    for turn in range(2):
        jobs = [desk.ask(prompt, 30, dense=i % 3 == 1) for i, prompt in enumerate(PROMPTS)]
        desk.finish()
        for i, (job, prompt) in enumerate(zip(jobs, PROMPTS, strict=True)):
            assert desk.answer(job) == alone(dense if i % 3 == 1 else lm, prompt, 30), (turn, len(prompt))
        assert sum(job.cached > 0 for job in jobs) == turn * sum(length > 128 + FEW for length in LENGTHS)
    assert [alone(lm, prompt, 30) for prompt in PROMPTS] != [alone(dense, prompt, 30) for prompt in PROMPTS]


def test_under_a_guard_one_text_is_compared(directory: Path) -> None:
    """A comparison changes nothing of what a good mode gives."""
    lm = opened(directory, KWTA(k=0.95), guard=GuardOptions(kl=100, every=16))
    desk = Desk(lm)
    jobs = [desk.ask(prompt, 30, dense=i == 0) for i, prompt in enumerate(PROMPTS)]
    desk.finish()
    checks, steps = lm.guard.counts["checks"], desk.engine.totals.steps - len(desk.answer(jobs[0])[0]) + 1
    assert 3 <= checks <= 1 + steps // 16 and lm.guard.events == []
    free = opened(directory, KWTA(k=0.95))
    assert [desk.answer(job) for job in jobs[1:]] == [alone(free, prompt, 30) for prompt in PROMPTS[1:]]


def test_a_ruinous_mode_is_switched_off(tmp_path: Path) -> None:
    """And from there on new texts are dense's."""
    lm = open_endless(tmp_path, KWTA(k=0.02), guard=GuardOptions(kl=1e-4, every=64))
    desk = Desk(lm)
    for prompt in PROMPTS:
        desk.ask(prompt, 20)
    desk.finish()
    assert [event.split(" at ")[0] for event in lm.guard.events] == ["kwta off"]
    assert lm.metrics()["guard.modes_off"] == 1
    job, dense = desk.ask(TOKENS[300:340], 20), open_endless(tmp_path)
    desk.finish()
    assert desk.answer(job) == alone(dense, TOKENS[300:340], 20)


@pytest.mark.parametrize("modes", [(), (KWTA(k=0.1),)], ids=["event", "with kwta"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "sampled"])
def test_drafts_that_are_verified_give_denses_text(
    directory: Path, modes: tuple[Mode, ...], options: dict[str, float]
) -> None:
    lm, dense = opened(directory, *modes, Event(verify="on")), opened(directory)
    desk = Desk(lm)
    for _ in range(2):
        jobs = [desk.ask(prompt, 30, **options) for prompt in PROMPTS]
        desk.finish()
        assert [desk.answer(job) for job in jobs] == [alone(dense, prompt, 30, **options) for prompt in PROMPTS]
    assert lm.drafting.drafted > 0 and any(job.cached for job in jobs)


@pytest.mark.parametrize(
    "mode", [KWTA(k=0.5, duty=4), StatePack(target="kv", min_ctx=0, recent=8, keys=16, check=0)], ids=lambda m: m.name
)
def test_what_is_kept_remembers_no_drafts(tmp_path: Path, mode: Mode) -> None:
    """An answer ends among drafts, which another prompt then writes over."""
    lm = open_endless(tmp_path, mode, Event(verify="on", topk=1.0, hold=1), quant="f32")
    lm.drafting = Always(ahead=FEW - 1)
    for length in range(180, 195):
        desk = Desk(lm)
        desk.ask(prompt_of(length), 9)
        desk.finish()
        texts = [desk.engine.prefixes._kept[0].seq.clone() for _ in range(2)]
        texts[1].trim(len(texts[1]))
        for text in texts:
            lm.model.prefill(TOKENS[500:580], text, dense=True)
        assert np.array_equal(*(lm.model.step(5, text) for text in texts))


def test_the_dense_runner_says_nothing_to_a_pace(directory: Path) -> None:
    lm = opened(directory, Event(budget_ms=1e4))
    desk = Desk(lm)
    jobs = [desk.ask(PROMPTS[i], 10, dense=i == 4) for i in (2, 4, 6)]
    desk.finish()
    assert all(desk.ended(job) for job in jobs) and lm.model.pace is not None
    tokens = sum(job.requests[0].stats.steps for job in (jobs[0], jobs[2]))
    assert len(lm.model.pace.times) == tokens
    assert desk.answer(jobs[1]) == alone(opened(directory), PROMPTS[4], 10)
    assert isinstance(desk.engine._runner(jobs[1]), Dense)
