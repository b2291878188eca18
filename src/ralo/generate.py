"""The one loop that makes text: run, chat, serve and bench all drive it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ralo.errors import RaloError
from ralo.model import Runner
from ralo.sampling import Sampler
from ralo.sequence import Sequence as TextState

ON_FULL = ("stop", "slide", "error")


class TextStream(Protocol):
    """Turns tokens into text without breaking characters."""

    def feed(self, token: int) -> str: ...
    def flush(self) -> str: ...


@dataclass
class Stats:
    """What a run cost so far."""

    prompt_tokens: int = 0
    prefill_s: float = 0.0
    prefill_bytes: int = 0  # weights, keys and values read for the prompt
    new_tokens: int = 0
    steps: int = 0  # decode passes over the weights
    decode_s: float = 0.0  # time of those passes, of choosing their tokens, and of making room in a full context
    decode_bytes: int = 0  # weights, keys and values read by all that
    finish: str = ""  # length, stop, eos, context
    times: list[float] = field(default_factory=list, repr=False)  # of each pass, with choosing its token

    @property
    def prefill_tok_s(self) -> float:
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        return self.steps / self.decode_s if self.decode_s else 0.0

    @property
    def p99_ms(self) -> float:
        """Milliseconds that 99 in 100 tokens do not take longer than."""
        return 1e3 * float(np.percentile(self.times, 99)) if self.times else 0.0

    @property
    def bytes_per_token(self) -> float:
        return self.decode_bytes / self.steps if self.steps else 0.0


@dataclass
class Request:
    """What to generate: the prompt's tokens, how to choose, when to stop."""

    prompt: Sequence[int]
    sampler: Sampler
    max_tokens: int = 128
    stop_ids: frozenset[int] = frozenset()
    stop: Sequence[str] = ()
    on_full: str = "stop"
    stats: Stats = field(default_factory=Stats)


@dataclass(frozen=True)
class Piece:
    token: int
    text: str  # may be empty while a character or a stop string is incomplete


class Turn:
    """One text in the making, between two passes over the weights: what becomes of the scores, and when it ends."""

    def __init__(self, seq: TextState, request: Request, text: TextStream | None) -> None:
        self.seq, self.request, self.stats = seq, request, request.stats
        self._output = _Output(text, request.stop)
        if request.max_tokens == 0:
            self.stats.finish = "length"

    @property
    def done(self) -> bool:
        return bool(self.stats.finish)

    def choose(self, logits: NDArray[np.float32]) -> int:
        return self.request.sampler(logits, self.seq.tokens)

    def take(self, token: int) -> Piece | None:
        """The token that was chosen, with its text; None where it only says that the text ends."""
        if token in self.request.stop_ids:
            self.stats.finish = "eos"
            return None
        self.stats.new_tokens += 1
        piece = Piece(token, self._output.feed(token))
        if self._output.stopped:
            self.stats.finish = "stop"
        elif self.stats.new_tokens == self.request.max_tokens:
            self.stats.finish = "length"
        return piece

    def rest(self) -> str:
        """Text that was held back when the turn ended."""
        return "" if self.stats.finish == "stop" else self._output.flush()


def generate(model: Runner, seq: TextState, request: Request, text: TextStream | None = None) -> Iterator[Piece]:
    """Runs the prompt after `seq` and yields tokens as they come. `request.stats` is kept up to date throughout."""
    stats, limit = request.stats, model.cfg.max_context
    if not request.prompt:
        raise RaloError("the prompt is empty: give at least one token of text")
    if (have := len(seq) + len(request.prompt)) > limit:
        raise RaloError(f"the prompt is {have} tokens, the model's context is {limit}: shorten it")
    turn = Turn(seq, request, text)
    clock, before = time.perf_counter(), model.bytes_read
    logits = model.prefill(request.prompt, seq)
    stats.prompt_tokens, stats.prefill_s = len(request.prompt), time.perf_counter() - clock
    stats.prefill_bytes = model.bytes_read - before
    seconds = 0.0
    while not turn.done:
        clock = time.perf_counter()
        token = turn.choose(logits)
        if stats.steps:  # the first token comes from the prompt's own pass
            seconds += time.perf_counter() - clock
            stats.decode_s += seconds
            stats.times.append(seconds)
            model.took(seconds)
        if piece := turn.take(token):
            yield piece
        if turn.done:
            break
        clock, before = time.perf_counter(), model.bytes_read
        if len(seq) == limit and not _make_room(model, seq, request.on_full):
            stats.finish = "context"
            break
        logits = model.step(token, seq)
        seconds = time.perf_counter() - clock
        stats.decode_bytes += model.bytes_read - before
        stats.steps += 1
    if rest := turn.rest():
        yield Piece(-1, rest)


def _make_room(model: Runner, seq: TextState, on_full: str) -> bool:
    """The context is full: stop (False), or keep its newer half and run that again (True)."""
    if on_full == "error":
        raise RaloError(
            f"the model's context of {model.cfg.max_context} tokens is full (--on-full stop or slide goes on)"
        )
    if on_full == "stop":
        return False
    kept = seq.tokens[-max(1, model.cfg.max_context // 2) :] if model.cfg.max_context > 1 else []
    seq.trim(0)
    if kept:
        model.prefill(kept, seq)
    return True


class _Output:
    """Text so far held back where it may be the start of a stop string."""

    def __init__(self, text: TextStream | None, stop: Sequence[str]) -> None:
        self.text, self.stop = text, [s for s in stop if s]
        self.held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        return self._release(self.text.feed(token)) if self.text else ""

    def flush(self) -> str:
        if self.text is None:
            return ""
        out = self._release(self.text.flush())
        return out if self.stopped else out + self.held

    def _release(self, new: str) -> str:
        self.held += new
        found = [at for s in self.stop if (at := self.held.find(s)) >= 0]
        if found:
            self.stopped = True
            return self.held[: min(found)]
        keep = max((n for s in self.stop for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out
