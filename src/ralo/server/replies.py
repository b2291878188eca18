"""What is answered, for the description at /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Details(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Details


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]


class Scored(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(Scored):
    top_logprobs: list[Scored]


class ChatLogprobs(BaseModel):
    content: list[ScoredToken]
    refusal: None


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class Reply(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class Completion(Reply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok", "closing"]


class Live(BaseModel):
    """Of the last seconds; the counts since the start."""

    tokens_per_s: float
    bytes_per_token: float
    running: int
    waiting: int
    cache_bytes: int
    tokens: dict[str, int]
    modes: dict[str, Any]
    metrics: dict[str, float]
    layers: list[dict[str, float]]
    events: list[Any]


def streamed(model: type[BaseModel]) -> dict[str, Any]:
    """The answer as a whole, or with stream: true as events."""
    event = {"description": "data: a part of the answer, whose choices have a delta or some text; at last [DONE]"}
    events = {"text/event-stream": {"schema": event}}
    return {"model": model, "description": "the answer, or its parts as they are made", "content": events}
