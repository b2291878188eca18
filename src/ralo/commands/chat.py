"""Talk with a model in the terminal. /reset forgets, /exit or Ctrl-D ends, Ctrl-C cuts an answer short."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ralo import screen
from ralo.commands.run import open_model, stats_line, stats_record
from ralo.errors import RaloError
from ralo.generate import Stats
from ralo.lm import LM, LoadOptions
from ralo.options import add_flags, add_json, flag, read_flags
from ralo.plan import add_mode_flags, read_setup
from ralo.sampling import Sampling
from ralo.sequence import Sequence


@dataclass(frozen=True)
class ChatOptions:
    system: str = flag("", "instructions that open the conversation")
    tokens: int = flag(512, "most tokens in an answer", short="-n", low=1, high=1 << 30)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadOptions, ChatOptions, Sampling)
    add_mode_flags(parser)
    add_json(parser)


class Conversation:
    """Messages and the sequence that already holds their tokens: a turn pays only for what is new."""

    def __init__(self, lm: LM, options: ChatOptions, sampling: Sampling) -> None:
        self.lm, self.options, self.sampling = lm, options, sampling
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.options.system}] if self.options.system else []
        self.seq: Sequence = self.lm.new_sequence()

    def answer(self, said: str) -> tuple[str, Stats]:
        """Prints the answer as it comes; a cut or failed turn leaves the conversation as it was up to there."""
        tokens = self.lm.tokenizer.talk([*self.messages, {"role": "user", "content": said}])
        if not tokens:
            raise RaloError("the model's chat template and tokenizer make no tokens of this")
        if len(tokens) > (limit := self.lm.model.cfg.max_context):
            raise RaloError(f"the conversation is {len(tokens)} tokens, the model's context is {limit}: /reset it")
        shared = next((i for i, (a, b) in enumerate(zip(self.seq.tokens, tokens, strict=False)) if a != b), None)
        shared = min(len(self.seq), len(tokens) - 1) if shared is None else shared
        self.seq.trim(shared)
        request = self.lm.request(tokens[shared:], self.options.tokens, sampling=self.sampling)
        text = ""
        try:
            for piece in self.lm.run(request, self.seq):
                text += piece.text
                print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            request.stats.finish = "interrupted"
        print(flush=True)
        self._remember(said, text)
        return text, request.stats

    def _remember(self, said: str, text: str) -> None:
        self.messages += [{"role": "user", "content": said}, {"role": "assistant", "content": text}]


def run(args: argparse.Namespace) -> int:
    options, sampling = read_flags(ChatOptions, args), read_flags(Sampling, args)
    lm = open_model(read_flags(LoadOptions, args), read_setup(args))
    talk = Conversation(lm, options, sampling)
    if not lm.tokenizer.has_chat:
        print("This model has no chat template: it goes on with your text.", file=sys.stderr)
    turns = []
    for said in lines():
        if said.strip() == "/reset":
            talk.reset()
            continue
        try:
            _, stats = talk.answer(said)
        except RaloError as error:
            print(f"ralo chat: {error}", file=sys.stderr)
            continue
        print(stats_line(lm, stats), file=sys.stderr)
        turns.append(stats_record(lm, stats))
    if lm.model.pace:
        lm.model.pace.save()
    if args.json:
        screen.json_line({"messages": talk.messages, "turns": turns})
    return 0


def lines() -> Iterator[str]:
    """What the user says, line by line, until /exit or the end; with editing and a prompt on a terminal."""
    watched = sys.stdin.isatty() and sys.stdout.isatty()
    if watched:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() its editing and history)
    while True:
        try:
            said = input("> " if watched else "")
        except (EOFError, KeyboardInterrupt):
            if watched:
                print()
            return
        if said.strip() in ("/exit", "/quit"):
            return
        if said.strip():
            yield said
