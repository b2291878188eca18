"""Answers in OpenAI's shape, whole or as a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ralo.jobs import Chosen, Delta, Job
from ralo.server.channel import Channel
from ralo.server.errors import Refusal, dumps, error_body
from ralo.tokenizer import Tokenizer
from ralo.version import __version__

LEAST_LOGPROB = -9999.0  # as OpenAI's: JSON has no infinity
FINISH = {"eos": "stop", "stop": "stop"}  # every other end is one before its time: "length"


@dataclass
class Answer:
    """One choice as it grows."""

    text: str = ""
    finish: str = ""
    chosen: list[Chosen] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # where each token's text starts

    def add(self, delta: Delta) -> None:
        if delta.chosen:
            self.chosen.append(delta.chosen)
            self.offsets.append(len(self.text))
        self.text += delta.text
        self.finish = delta.finish


@dataclass
class Shape:
    """How completions and chats differ."""

    chat: bool
    model: str
    tokenizer: Tokenizer
    id: str = ""
    created: int = 0

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())

    def body(self, stream: bool, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        if stream and self.chat:
            kind += ".chunk"
        out = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**out, "system_fingerprint": f"ralo-{__version__}", "choices": choices}

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        text: dict[str, Any] = {"text": answer.text}
        if self.chat:
            text = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        return {"index": index, **text, "logprobs": self._logprobs(answer), "finish_reason": _finish(answer.finish)}

    def part(self, delta: Delta, before: int) -> dict[str, Any]:
        """A delta's own share; `before`: characters that came before it."""
        choice: dict[str, Any] = {"index": delta.choice, "logprobs": None}
        choice |= {"delta": {"content": delta.text}} if self.chat else {"text": delta.text}
        if delta.chosen:
            choice["logprobs"] = self._logprobs(Answer(chosen=[delta.chosen], offsets=[before]))
        choice["finish_reason"] = _finish(delta.finish) if delta.finish else None
        return choice

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not answer.chosen:
            return None
        if self.chat:
            return {"content": [self._chat_token(c) for c in answer.chosen], "refusal": None}
        return {
            "tokens": [self._token(c.token) for c in answer.chosen],
            "token_logprobs": [_number(c.logprob) for c in answer.chosen],
            "top_logprobs": [self._top(c) for c in answer.chosen],
            "text_offset": answer.offsets,
        }

    def _top(self, chosen: Chosen) -> dict[str, float]:
        """Of tokens that look alike, such as halves of characters, the likeliest."""
        return {self._token(token): _number(logprob) for token, logprob in reversed(chosen.top)}

    def _chat_token(self, chosen: Chosen) -> dict[str, Any]:
        top = [self._scored(token, logprob) for token, logprob in chosen.top]
        return {**self._scored(chosen.token, chosen.logprob), "top_logprobs": top}

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token(token)
        return {"token": text, "logprob": _number(logprob), "bytes": list(text.encode("utf-8", "replace"))}

    def _token(self, token: int) -> str:
        return self.tokenizer.decode([token]) or self.tokenizer.piece(token) or ""


def _number(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def usage(jobs: list[Job]) -> dict[str, Any]:
    prompt = sum(len(job.prompt) for job in jobs)
    new = sum(request.stats.new_tokens for job in jobs for request in job.requests)
    cached = {"cached_tokens": sum(job.cached for job in jobs)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": cached,
    }


async def whole(channel: Channel, shape: Shape) -> dict[str, Any]:
    answers = [Answer() for _ in range(channel.count)]
    async for deltas in channel.deltas():
        for delta in deltas:
            if delta.error:
                raise Refusal(500, delta.error)
            answers[delta.choice].add(delta)
    choices = [shape.whole(i, answer) for i, answer in enumerate(answers)]
    return {**shape.body(False, choices), "usage": usage(channel.jobs)}


async def events(channel: Channel, shape: Shape, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events: what came since the last time is sent in one piece."""
    before, after = _frame(shape.body(True, []) | ({"usage": None} if with_usage else {}))
    sent = [0] * channel.count  # characters
    if shape.chat:
        yield "".join(f"{before}{dumps(shape.opening(i))}{after}" for i in range(len(sent)))
    async for deltas in channel.deltas():
        out = ""
        for delta in deltas:
            if delta.error:
                out += _event(error_body(500, delta.error))
            elif delta.text or delta.finish or delta.chosen:
                out += f"{before}{dumps(shape.part(delta, sent[delta.choice]))}{after}"
                sent[delta.choice] += len(delta.text)
        if out:
            yield out
    if with_usage:
        yield _event(shape.body(True, []) | {"usage": usage(channel.jobs)})
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {dumps(body)}\n\n"


def _frame(body: dict[str, Any]) -> tuple[str, str]:
    """What stands before and after the one choice of every event of a stream, written once. The mark is in no string:
    there quotes are escaped."""
    before, mark, after = _event(body).partition('"choices":[')
    return before + mark, after


def _finish(finish: str) -> str:
    return FINISH.get(finish, "length")
