"""Questions through one model, so many at a time that every pass over the weights is full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType

from ralo.batch.lines import Answer, Question
from ralo.engine import Engine
from ralo.errors import RaloError
from ralo.generate import Request
from ralo.jobs import Job, Made
from ralo.lm import LM
from ralo.prefixes import Prefixes

CACHE = 512 << 20  # bytes of texts whose beginning others may share


@dataclass(eq=False)
class _Open:
    """A question that was asked."""

    question: Question
    ready: SimpleQueue[Answer]
    pieces: list[str] = field(default_factory=list)


class Answers:
    """What a model says. Several threads may each ask for some at a time, together no more than `most`."""

    def __init__(self, lm: LM, texts: int, most: int = 0) -> None:
        self.lm, self.most = lm, most or 2 * texts
        self._open: dict[Job, _Open] = {}
        self._engine = Engine(lm, self._deliver, texts, queue=self.most)
        # What an answer is must not depend on what was answered before it.
        self._engine.prefixes = Prefixes(CACHE, answers=False)
        lm.tokenizer  # noqa: B018 (opened now, so that a bad one is said before any work)

    def __enter__(self) -> Answers:
        self._engine.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._engine.stop()

    def of(self, questions: Iterable[Question]) -> Iterator[Answer]:
        """As they get ready, in any order."""
        ready: SimpleQueue[Answer] = SimpleQueue()
        waiting = 0
        for question in questions:
            self._ask(question, ready)
            waiting += 1
            if waiting == self.most:
                yield ready.get()
                waiting -= 1
        for _ in range(waiting):
            yield ready.get()

    def _ask(self, question: Question, ready: SimpleQueue[Answer]) -> None:
        try:
            job = Job([self._request(question)])
        except RaloError as error:  # this question's trouble alone
            ready.put(Answer(question.id, question.sampling.seed, error=str(error)))
            return
        self._open[job] = _Open(question, ready)
        self._engine.submit([job])

    def _request(self, q: Question) -> Request:
        prompt = self.lm.tokenizer.talk(q.messages) if q.messages else self.lm.encode(q.prompt)
        return self.lm.request(prompt, q.max_tokens, stop=q.stop, sampling=q.sampling)

    def _deliver(self, made: Made) -> None:
        """Called by the engine's thread, once a pass."""
        for job, delta in made:
            asked = self._open[job]
            asked.pieces.append(delta.text)
            if delta.finish:
                del self._open[job]
                stats, seed = job.requests[0].stats, asked.question.sampling.seed
                text = "".join(asked.pieces)
                counts = (stats.prompt_tokens, stats.new_tokens)
                asked.ready.put(Answer(asked.question.id, seed, text, delta.finish, *counts, error=delta.error))
