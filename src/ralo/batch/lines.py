"""The lines of a batch: questions, all checked before any work, and answers."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_type_hints

from ralo.batch.values import id_of, messages_of, number_of, read_object, shown, stop_of, text_of
from ralo.errors import RaloError
from ralo.options import fields, flag, nearest
from ralo.sampling import Sampling

MOST_BYTES = 8 << 20  # of a line
MOST_TOKENS = 1 << 30


@dataclass(frozen=True)
class SeededSampling(Sampling):
    """Never another text the next time: what was interrupted must go on as if it had not been."""

    seed: int = flag(0, "same seed, same texts: each prompt's own is made of it and its id", low=0, high=(1 << 63) - 1)


@dataclass(frozen=True)
class Defaults:
    """What a line gets that says nothing of it."""

    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    sampling: Sampling = SeededSampling()


@dataclass(frozen=True)
class Question:
    id: str | int | float
    prompt: str
    messages: tuple[Mapping[str, str], ...]  # a chat, in place of a prompt
    max_tokens: int
    stop: tuple[str, ...]
    sampling: Sampling

    @property
    def key(self) -> str:
        """By which ids are told apart: 7 and "7" would be the same in many a reader."""
        return str(self.id)


@dataclass(frozen=True)
class Answer:
    id: str | int | float
    seed: int
    text: str = ""
    finish: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""  # why there is no text

    def line(self) -> bytes:
        if self.error:
            values: dict[str, Any] = {"id": self.id, "error": self.error}
        else:
            counts = {"prompt_tokens": self.prompt_tokens, "tokens": self.tokens, "seed": self.seed}
            values = {"id": self.id, "text": self.text, "finish": self.finish, **counts}
        return json.dumps(values).encode() + b"\n"


class Known(NamedTuple):
    """Of a question that was read: where it stands, and the seed of its answer."""

    line: int
    seed: int


class Questions:
    """A file of questions. It is read twice, so that only ids are held: once to check all of it, once to answer."""

    def __init__(self, path: Path, defaults: Defaults) -> None:
        self.path, self.defaults = path, defaults
        if path.exists() and not path.is_file():
            raise RaloError(f"{path}: is no ordinary file, and it must be read twice")
        self.known: dict[str, Known] = {}
        for number, question in self._read():
            if before := self.known.get(question.key):
                self._bad(number, f"the id {shown(question.id)} is that of line {before.line} too")
            self.known[question.key] = Known(number, question.sampling.seed)
        if not self.known:
            raise RaloError(f"{path}: has no prompts in it")

    def besides(self, answered: Container[str]) -> Iterator[Question]:
        for number, question in self._read():
            if question.key not in self.known:
                self._bad(number, "was not there before: the file must not change while it is answered")
            if question.key not in answered:
                yield question

    def _read(self) -> Iterator[tuple[int, Question]]:
        with self.path.open("rb") as file:
            for number in itertools.count(1):
                if not (line := file.readline(MOST_BYTES + 1)):
                    return
                if len(line) > MOST_BYTES:
                    self._bad(number, f"is longer than {MOST_BYTES >> 20} MB")
                if line.strip():
                    yield number, self._question(number, line)

    def _question(self, number: int, line: bytes) -> Question:
        try:
            return read_question(line, number, self.defaults)
        except RaloError as error:
            self._bad(number, str(error))

    def _bad(self, number: int, why: str) -> NoReturn:
        raise RaloError(f"{self.path}: line {number}: {why}") from None


def read_question(line: bytes, number: int, defaults: Defaults) -> Question:
    values = {name: value for name, value in read_object(line).items() if value is not None}
    own = {field.name: field for field in fields(type(defaults.sampling))}
    known = ("id", "prompt", "messages", "max_tokens", "stop", *own)
    for name in values:
        if name not in known:
            raise RaloError(f"unknown key {name!r:.40}{nearest(name, known)} (keys: {', '.join(known)})")
    if ("prompt" in values) == ("messages" in values):
        raise RaloError('needs either "prompt" or "messages"' + (", not both" if "prompt" in values else ""))
    kinds = get_type_hints(type(defaults.sampling))
    chosen = {n: number_of(n, values[n], kinds[n], f.metadata) for n, f in own.items() if n in values}
    own_id = id_of(values.get("id", str(number)))
    chosen.setdefault("seed", seed_of(defaults.sampling.seed, str(own_id)))
    limits = {"low": 0, "high": MOST_TOKENS}
    return Question(
        own_id,
        text_of("prompt", values["prompt"]) if "prompt" in values else "",
        messages_of(values["messages"]) if "messages" in values else (),
        number_of("max_tokens", values.get("max_tokens", defaults.max_tokens), int, limits),
        stop_of(values["stop"]) if "stop" in values else defaults.stop,
        replace(defaults.sampling, **chosen),
    )


def seed_of(seed: int, key: str) -> int:
    """The same on every machine and in every order. 53 bits: exact in every reader of JSON."""
    digest = hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11
