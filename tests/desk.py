"""An engine at a desk: asked and driven by hand, a pass at a time, or with its own thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny import write_hf

import ralo
from ralo.compose import compose
from ralo.engine import Engine
from ralo.guard import GuardOptions
from ralo.jobs import Delta, Job, Made
from ralo.lm import LM
from ralo.modes.base import Mode
from ralo.plan import Setup

CONTEXT = 1024
TOKENS = np.random.default_rng(8).integers(2, 97, CONTEXT).tolist()
LENGTHS = (1, 700, 40, 2, 130, 513, 257, 9, 136, 64)
PATIENCE_S = 60.0
OFF = GuardOptions(on="off")


def prompt_of(length: int, first: int = 2) -> list[int]:
    return [first, *TOKENS[: length - 1]]


PROMPTS = [prompt_of(length, 2 + i) for i, length in enumerate(LENGTHS)]


def write_ending(folder: Path) -> Path:
    """A model whose answers end of themselves now and then."""
    return write_hf(folder, "llama", max_position_embeddings=CONTEXT)


def open_endless(folder: Path, *modes: Mode, guard: GuardOptions = OFF, quant: str = "int8") -> LM:
    """One whose answers end only where they are told to."""
    lm = opened(
        write_hf(folder, "llama", seed=3, eos_token_id=None, max_position_embeddings=CONTEXT),
        *modes,
        guard=guard,
        quant=quant,
    )
    lm.tokenizer.eos_ids = frozenset()
    return lm


def opened(folder: Path, *modes: Mode, guard: GuardOptions = OFF, quant: str = "f32") -> LM:
    return ralo.load(folder, quant, setup=Setup(compose(modes), guard))


class Desk:
    """An engine, what it is asked and what it delivers. Driven by hand, a pass at a time, unless it is started."""

    def __init__(self, lm: LM, **sizes: int) -> None:
        self.lm, self.made, self.new = lm, dict[Job, list[Delta]](), threading.Condition()
        self.engine = Engine(lm, self.deliver, **sizes)

    def deliver(self, made: Made) -> None:
        with self.new:
            for job, delta in made:
                self.made.setdefault(job, []).append(delta)
            self.new.notify_all()

    def ask(
        self,
        prompt: Sequence[int] | str,
        tokens: int = 20,
        n: int = 1,
        dense: bool = False,
        top: int = 0,
        **options: Any,
    ) -> Job:
        """Answers whose seeds follow each other."""
        options = {"temperature": 0} | options
        seeds = [{"seed": options["seed"] + i} if "seed" in options else {} for i in range(n)]
        job = Job([self.lm.request(prompt, tokens, **options | seed) for seed in seeds], dense, top)
        self.engine.submit([job])
        return job

    def passes(self, count: int = 1) -> list[Delta]:
        """What so many passes made."""
        before = sum(map(len, self.made.values()))
        for _ in range(count):
            self.engine._pass()
            self.engine._hand_over()
        return [delta for deltas in self.made.values() for delta in deltas][before:]

    def finish(self, limit: int = 2000) -> int:
        """Passes until nothing is left to do."""
        for n in range(limit):
            if self.engine.idle:
                return n
            self.passes()
        raise AssertionError("it does not end")

    def wait(self, jobs: Sequence[Job]) -> None:
        with self.new:
            assert self.new.wait_for(lambda: all(self.ended(job) for job in jobs), PATIENCE_S)

    def ended(self, job: Job) -> bool:
        return sum(bool(delta.finish) for delta in self.made.get(job, [])) == len(job.requests)

    def answer(self, job: Job, choice: int = 0) -> tuple[list[int], str, str]:
        """Tokens, text and why it ended, which only the last of its deltas says."""
        deltas = [delta for delta in self.made.get(job, []) if delta.choice == choice]
        assert [bool(delta.finish) for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        tokens = [delta.chosen.token for delta in deltas if delta.chosen]
        return tokens, "".join(delta.text for delta in deltas), deltas[-1].finish

    def deltas(self, job: Job) -> list[Delta]:
        return self.made.get(job, [])


def alone(lm: LM, prompt: Sequence[int] | str, tokens: int = 20, **options: Any) -> tuple[list[int], str, str]:
    made = lm.generate(prompt, tokens, **{"temperature": 0} | options)
    return made.tokens, made.text, made.stats.finish
