"""From what was asked to jobs for the engine."""

from __future__ import annotations

from dataclasses import dataclass

from ralo.jobs import Job
from ralo.lm import LM
from ralo.sampling import Sampling
from ralo.server.errors import Refusal
from ralo.server.schema import Asked, ChatAsked, CompletionAsked

DENSE = ":dense"  # after a model's name: with the modes left aside
SHORT = 16  # tokens of a completion that says nothing of its length, as OpenAI's


@dataclass(frozen=True)
class Offer:
    """The models of a server: the loaded one and, where it has modes, the same without them."""

    lm: LM
    name: str
    max_tokens: int  # most of one answer

    @property
    def names(self) -> list[str]:
        return [self.name, self.name + DENSE] if self.lm.model.has_modes else [self.name]

    def model(self, asked: str) -> str:
        name = asked or self.name
        if name not in self.names:
            raise Refusal(404, f"there is no model {name!r:.80} here (GET /v1/models)", code="model_not_found")
        return name

    def jobs(self, asked: Asked) -> list[Job]:
        """Checked before any work; tokens of every prompt."""
        dense = self.model(asked.model).endswith(DENSE)
        if isinstance(asked, ChatAsked):
            prompts = [self.lm.tokenizer.talk([message.plain() for message in asked.messages])]
        else:
            assert isinstance(asked, CompletionAsked)
            prompts = [p if isinstance(p, list) else self.lm.encode(p) for p in asked.prompts]
        return [self._job(asked, prompt, dense) for prompt in prompts]

    def _job(self, asked: Asked, prompt: list[int], dense: bool) -> Job:
        limit = self.lm.model.cfg.max_context
        if not prompt:
            raise Refusal(400, "the prompt is empty", param="prompt")
        if len(prompt) > limit:
            what = f"the prompt is {len(prompt)} tokens, the model's context is {limit}: shorten it"
            raise Refusal(400, what, code="context_length_exceeded", param="prompt")
        tokens = min(_length(asked, limit), self.max_tokens)
        requests = [
            self.lm.request(prompt, tokens, stop=asked.stops, sampling=_sampling(asked, i)) for i in range(asked.n or 1)
        ]
        return Job(requests, dense, _top(asked))


def _length(asked: Asked, limit: int) -> int:
    if isinstance(asked, ChatAsked):
        given = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        return limit if given is None else given
    assert isinstance(asked, CompletionAsked)
    return SHORT if asked.max_tokens is None else asked.max_tokens


def _top(asked: Asked) -> int | None:
    if isinstance(asked, ChatAsked):
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (asked.top_logprobs or 0) if asked.logprobs else None
    assert isinstance(asked, CompletionAsked)
    return asked.logprobs


def _sampling(asked: Asked, choice: int) -> Sampling:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        temperature=given(asked.temperature, 1.0),
        top_k=asked.top_k or 0,
        top_p=given(asked.top_p, 1.0),
        min_p=given(asked.min_p, 0.0),
        repeat_penalty=given(asked.repeat_penalty, 1.0),
        presence_penalty=given(asked.presence_penalty, 0.0),
        frequency_penalty=given(asked.frequency_penalty, 0.0),
        seed=-1 if asked.seed is None else (asked.seed + choice) % (1 << 63),
    )
