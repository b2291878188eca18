"""Answer a file of prompts, here or on a Ray cluster. Answers come in any order, each with its id. What is in the
output stays: after an interruption the same command goes on."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ralo import screen
from ralo.batch.answer import Answers
from ralo.batch.lines import MOST_TOKENS, Defaults, Questions, SeededSampling
from ralo.batch.on_ray import Crew
from ralo.batch.output import Output
from ralo.batch.worker import Work
from ralo.commands.run import counted, open_model
from ralo.errors import RaloError
from ralo.lm import LoadOptions
from ralo.options import add_flags, add_json, flag, read_flags
from ralo.plan import Setup, add_mode_flags, read_setup


@dataclass(frozen=True)
class BatchOptions:
    input: str = flag("", "prompts, a JSON object a line: prompt or messages, and id", short="-i", metavar="FILE.jsonl")
    output: str = flag("", "answers, a JSON object a line; those in it stay", short="-o", metavar="FILE.jsonl")
    tokens: int = flag(128, "most tokens of an answer", short="-n", low=0, high=MOST_TOKENS)
    texts: int = flag(32, "answers that are made at once, on each worker", low=1, high=1024)
    ray: str = flag("", "on a Ray cluster: auto, HOST:PORT, or local for one inside this process", metavar="ADDRESS")
    workers: int = flag(0, "models on the Ray cluster; 0 = one on each machine", low=0, high=4096)


@dataclass
class Tally:
    """What this run did."""

    answers: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadOptions, BatchOptions, SeededSampling)
    add_mode_flags(parser)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; repeatable")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options, sampling = read_flags(BatchOptions, args), read_flags(SeededSampling, args)
    model, setup = read_flags(LoadOptions, args), read_setup(args)
    for name, value in (("-i", options.input), ("-o", options.output)):
        if not value:
            raise RaloError(f"{name} FILE.jsonl is missing: the {'prompts' if name == '-i' else 'answers'}")
    if os.path.exists(options.output) and os.path.samefile(options.input, options.output):
        raise RaloError("-i and -o are the same file: give the answers one of their own")
    stop = args.stop or [text for text in [os.environ.get("RALO_STOP")] if text]
    questions = Questions(Path(options.input), Defaults(options.tokens, tuple(stop), sampling))
    with Output(Path(options.output), questions.known) as output:
        tally, interrupted = Tally(), False
        try:
            if len(output.answered) < len(questions.known):
                answer(questions, output, options, model, setup, tally)
        except KeyboardInterrupt:
            interrupted = True
        return tell(output, len(questions.known), tally, interrupted, args.json)


def answer(
    questions: Questions, output: Output, options: BatchOptions, model: LoadOptions, setup: Setup, tally: Tally
) -> None:
    with opened(options, model, setup) as answers, screen.progress("answering") as bar:
        clock = time.perf_counter()
        for one in answers.of(questions.besides(output.answered)):
            output.write(one)
            tally.answers, tally.errors = tally.answers + (not one.error), tally.errors + bool(one.error)
            tally.prompt_tokens, tally.tokens = tally.prompt_tokens + one.prompt_tokens, tally.tokens + one.tokens
            tally.seconds = time.perf_counter() - clock
            if bar:
                bar((len(output.answered) + tally.errors) / len(questions.known))


@contextlib.contextmanager
def opened(options: BatchOptions, model: LoadOptions, setup: Setup) -> Iterator[Answers | Crew]:
    """What answers: a model here, or many."""
    if options.ray:
        with Crew(options.ray, options.workers, Work(model, setup, options.texts, os.getcwd())) as crew:
            yield crew
        return
    lm = open_model(model, setup)
    with Answers(lm, options.texts) as answers:
        yield answers
    if lm.model.pace:
        lm.model.pace.save()


def tell(output: Output, asked: int, tally: Tally, interrupted: bool, as_json: bool) -> int:
    answered = len(output.answered)
    if interrupted:
        left = f"{answered} of {counted(asked, 'prompt')} answered"
        print(f"\nralo batch: {left}; the same command goes on with the others", file=sys.stderr)
    elif tally.errors:
        failed = f"{tally.errors} of {counted(asked, 'prompt')} could not be answered"
        print(f"ralo batch: {failed}: their lines say why, the same command tries again", file=sys.stderr)
    if answered == asked and not tally.answers:
        print(f"{output.path}: {counted(asked, 'prompt')}, all answered already")
    elif not interrupted:
        before = f" ({answered - tally.answers} before)" if answered > tally.answers else ""
        speed = f"{counted(tally.tokens, 'token')} at {tally.tok_s:.1f} tok/s"
        print(f"{output.path}: {counted(answered, 'prompt')} answered{before}, {speed}")
    if as_json:
        figures = {**vars(tally), "tok_s": tally.tok_s}
        screen.json_line({"output": str(output.path), "prompts": asked, "answered": answered, **figures})
    return 130 if interrupted else 1 if tally.errors else 0
