"""Many texts at once: each pass over the weights makes one token of every running text.

Results do not depend on who else is running: texts that go together get the bits they would get alone (`Model.steps`),
and prompts are cut where it changes nothing (`STRETCH`). One thread drives the model; what it makes is handed to
`deliver`, once a pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo.errors import RaloError
from ralo.generate import Turn
from ralo.jobs import Busy, Chosen, Closed, Delta, Job, Made, chosen_of
from ralo.lm import LM
from ralo.model import PREFILL_CHUNK, STRETCH, Dense, Runner, pieces
from ralo.prefixes import Prefixes
from ralo.sequence import Sequence as TextState

F32 = NDArray[np.float32]


@dataclass(eq=False)
class _Filling:
    """A prompt on its way through the model."""

    job: Job
    seq: TextState
    sure: int  # tokens of it that are as a prompt alone would have them


@dataclass(eq=False)
class _Running:
    """An answer on its way."""

    job: Job
    choice: int
    turn: Turn
    sure: int
    runner: Runner | None = None  # of its own, where texts cannot go together
    token: int = -1  # to run next


@dataclass
class Totals:
    """Counted since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0  # tokens that a decode pass was run for
    passes: int = 0
    decode_s: float = 0.0
    decode_bytes: int = 0


class Engine:
    """The thread that runs a model for many."""

    def __init__(
        self, lm: LM, deliver: Callable[[Made], None], texts: int = 32, queue: int = 64, cache_bytes: int = 512 << 20
    ) -> None:
        self.lm, self.deliver, self.texts, self.queue = lm, deliver, texts, queue
        self.totals = Totals()
        self.prefixes = Prefixes(cache_bytes)
        self._reuse = lm.model.cfg.rope is None or lm.model.cfg.rope.kind != "dynamic"  # else keys depend on the length
        self._plain = Dense(lm.model)
        self._waiting: deque[Job] = deque()
        self._filling: list[_Filling] = []
        self._running: list[_Running] = []
        self._made: Made = []
        self._change = threading.Condition()
        self._stop = False
        self._passing = False  # a pass is under way, and jobs may be on their way from one list to the next
        self._cache_bytes, self._weigh = 0, False  # and whether somebody asked
        self._seconds = 1.0  # that a job takes, about
        self._thread = threading.Thread(target=self._run, name="ralo-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes all of them, or raises `Busy` or `Closed`. Answers come through `deliver`. Where nothing waits, jobs
        that belong together may be more than the queue: later they would be no fewer."""
        most = max(len(job.requests) for job in jobs)
        if most > self.texts:
            raise RaloError(f"{most} answers are more than the {self.texts} texts that run at once")
        with self._change:
            if self._stop:
                raise Closed
            if self._waiting and len(self._waiting) + len(jobs) > self.queue:
                raise Busy(self._seconds * (1 + len(self._waiting) / self.texts))
            self._waiting.extend(jobs)
            self._change.notify()

    def cancel(self, job: Job) -> None:
        """Its work ends with the pass that is under way."""
        job.cancelled = True

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._filling)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        with self._change:
            return not (self._passing or self._has_work)

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._filling or self._running)

    @property
    def cache_bytes(self) -> int:
        """Of running texts, and of those that are kept, after the latest pass: within one what modes remember of a text
        is on the move."""
        with self._change:
            if self._passing:
                self._weigh = True
            else:
                self._cache_bytes = self._weighed()
            return self._cache_bytes

    def _weighed(self) -> int:
        self._weigh = False
        return self.prefixes.nbytes + sum(answer.turn.seq.nbytes for answer in self._running)

    def stop(self) -> None:
        """Ends what is running, and the thread."""
        with self._change:
            self._stop = True
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                self._passing = False
                if self._weigh:
                    self._cache_bytes = self._weighed()
                while not (self._has_work or self._stop):
                    self._change.wait()
                if self._stop:
                    break
                self._passing = True
            self._pass()
            self._hand_over()
        self._end([*self._waiting, *(f.job for f in self._filling), *(a.job for a in self._running)])
        self._hand_over()

    def _pass(self) -> None:
        self._drop_cancelled()
        self._admit()
        self._fill()
        if self._running:
            try:
                self._decode()
            except Exception as error:  # whatever it is, the next request must find a server
                self._end([a.job for a in self._running], error)

    def _hand_over(self) -> None:
        if self._made:
            made, self._made = self._made, []
            try:
                self.deliver(made)
            except Exception:  # whoever was to have it: the others go on
                logging.getLogger("ralo").exception("answers could not be handed over")

    def _drop_cancelled(self) -> None:
        with self._change:
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
        self._filling = [f for f in self._filling if not f.job.cancelled]
        for answer in [a for a in self._running if a.job.cancelled]:
            self._running.remove(answer)
            self._keep(answer)

    def _admit(self) -> None:
        """The next ones in turn, while there is room."""
        while self._waiting:
            taken = len(self._running) + sum(len(f.job.requests) for f in self._filling)
            if taken + len(self._waiting[0].requests) > self.texts:
                return
            job = self._waiting[0]  # in one of the lists at any time: what is in none would never be answered
            try:
                seq, sure = self._known(job)
            except Exception as error:  # no memory for it: its own trouble alone
                self._end([job], error)
                continue
            job.cached = len(seq)
            self._filling.append(_Filling(job, seq, sure))
            with self._change:
                self._waiting.popleft()

    def _known(self, job: Job) -> tuple[TextState, int]:
        known = self.prefixes.find(job.prompt, job.dense) if self._reuse else None
        return known or (self.lm.new_sequence(), len(job.prompt))

    def _fill(self) -> None:
        """Pieces of prompts in turn: few tokens where answers wait for their next one."""
        size = room = STRETCH if self._running else PREFILL_CHUNK
        while self._filling and room > 0:
            filling = self._filling[0]
            try:
                room -= self._fill_piece(filling, size)
            except Exception as error:  # this prompt's trouble alone
                self._end([filling.job], error)

    def _fill_piece(self, filling: _Filling, size: int) -> int:
        """The prompt's next tokens; how many they were. It goes to the end of the line until it is complete.

        It stays in line while they run: whoever looks must see that there is work, and an error must find it."""
        job, seq, clock = filling.job, filling.seq, time.perf_counter()
        start, stop = pieces(len(seq), len(job.prompt), size)[0] if self._reuse else (0, len(job.prompt))
        logits = self._runner(job).prefill(job.prompt[start:stop], seq)
        for request in job.requests:
            request.stats.prefill_s += time.perf_counter() - clock
        if stop == len(job.prompt):
            self.totals.prompt_tokens += len(job.prompt)
            self.totals.cached_tokens += job.cached
            self._begin(filling, logits)
        else:
            self._filling = [*self._filling[1:], filling]
        return stop - start

    def _begin(self, filling: _Filling, logits: F32) -> None:
        job, own = filling.job, self.lm.plan.verified and not filling.job.dense
        seqs, answers = [filling.seq, *(filling.seq.clone() for _ in job.requests[1:])], []
        for i, (request, seq) in enumerate(zip(job.requests, seqs, strict=True)):
            request.stats.prompt_tokens = len(job.prompt)
            turn = Turn(seq, request, self.lm.tokenizer.stream(after=job.prompt))
            answers.append(_Running(job, i, turn, filling.sure, self.lm.runner(request.sampler) if own else None))
        self._running += answers
        self._filling.remove(filling)
        for answer in answers:
            if answer.turn.done:
                self._finish(answer, "")
            else:
                self._take(answer, logits)

    def _runner(self, job: Job) -> Runner:
        return self._plain if job.dense or self.lm.plan.verified else self.lm.guard

    def _decode(self) -> None:
        limit = self.lm.model.cfg.max_context
        for answer in [a for a in self._running if len(a.turn.seq) == limit]:
            answer.turn.stats.finish = "context"
            self._finish(answer, "")
        answers = list(self._running)
        if not answers:
            return
        clock, before = time.perf_counter(), self.lm.model.bytes_read
        logits = self._scores(answers)
        seconds = time.perf_counter() - clock
        self.totals.passes += 1
        self.totals.steps += len(answers)
        self.totals.decode_s += seconds
        self.totals.decode_bytes += self.lm.model.bytes_read - before
        for answer, scores in zip(answers, logits, strict=True):
            answer.turn.stats.steps += 1
            answer.turn.stats.decode_s += seconds
            self._take(answer, scores)

    def _scores(self, answers: list[_Running]) -> list[F32]:
        """Of all that can go together in one pass, and of the others one by one."""
        together = [(a.token, a.turn.seq, a.job.dense) for a in answers if not a.runner]
        rows = iter(self.lm.guard.steps(*zip(*together, strict=True)) if together else ())
        return [a.runner.step(a.token, a.turn.seq) if a.runner else next(rows) for a in answers]

    def _take(self, answer: _Running, logits: F32) -> None:
        turn = answer.turn
        try:
            answer.token = turn.choose(logits)
            piece = turn.take(answer.token)
        except RaloError as error:  # scores that are not numbers: this text's trouble alone
            self._finish(answer, "", error=str(error))
            return
        chosen = chosen_of(answer.token, logits, answer.job.top) if answer.job.top is not None else None
        self.totals.new_tokens += piece is not None
        text = piece.text if piece else ""
        if turn.done:
            self._finish(answer, text, chosen if piece else None)
        else:
            self._made.append((answer.job, Delta(answer.choice, text, chosen=chosen)))

    def _finish(self, answer: _Running, text: str, chosen: Chosen | None = None, error: str = "") -> None:
        self._running.remove(answer)
        answer.turn.stats.finish = "error" if error else answer.turn.stats.finish
        rest = "" if error else answer.turn.rest()
        self._made.append((answer.job, Delta(answer.choice, text + rest, answer.turn.stats.finish, chosen, error)))
        answer.job.open.discard(answer.choice)
        if not answer.job.open:
            self._seconds += 0.2 * (time.perf_counter() - answer.job.asked_s - self._seconds)
        if not error:
            self._keep(answer)

    def _keep(self, answer: _Running) -> None:
        if self._reuse and answer.choice == 0:
            seq = answer.turn.seq
            seq.trim(len(seq))  # what modes remember of drafts that were not to be
            self.prefixes.keep(seq, answer.sure, answer.job.dense)

    def _end(self, jobs: list[Job], error: Exception | None = None) -> None:
        """Every answer of these ends here: with an error, or cut short."""
        with self._change:
            self._waiting = deque(job for job in self._waiting if job not in jobs)
        self._filling = [f for f in self._filling if f.job not in jobs]
        self._running = [a for a in self._running if a.job not in jobs]
        finish, told = ("error", _told(error)) if error else ("cancelled", "")
        for job in jobs:
            self._made += [(job, Delta(i, "", finish, error=told)) for i in sorted(job.open)]
            job.open.clear()


def _told(error: Exception) -> str:
    """What a client hears of it; what nobody foresaw is told the log alone."""
    if isinstance(error, RaloError):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory for this request"
    logging.getLogger("ralo").error("an answer could not go on", exc_info=error)
    return "something went wrong here; the server's log says what"
