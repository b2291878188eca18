"""What may be asked, in OpenAI's words. What would change an answer and is not built is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

MOST_ANSWERS = 16
MOST_PROMPTS = 64
MOST_STOPS = 8
MOST_LOGPROBS = 20
UNSUPPORTED = {
    "audio": "sound",
    "best_of": "best_of other than n",
    "echo": "echo",
    "function_call": "functions",
    "functions": "functions",
    "logit_bias": "logit_bias",
    "modalities": "anything but text",
    "prediction": "predictions",
    "response_format": "a response format other than text",
    "suffix": "suffix",
    "tools": "tools",
    "tool_choice": "tools",
}
HARMLESS: dict[str, tuple[Any, ...]] = {  # values that ask for nothing
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
}

Text = Annotated[str, StringConstraints(max_length=4 << 20)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
# The first problem is told: a million wrong items are not looked at one by one.
Tokens = Annotated[list[Token], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
Lists = Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]


def _kind(prompt: Any) -> str | None:
    """Which of its forms a prompt has."""
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list):
        return None
    first = prompt[0] if prompt else 0
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "tokens"


class StreamOptions(BaseModel):
    include_usage: bool = False


class Asked(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: Annotated[str, StringConstraints(max_length=256)] = Field("", description="of /v1/models; empty: the first")
    temperature: float | None = Field(None, ge=0, le=2, description="0: always the likeliest token [1]")
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 30, description="only the k likeliest tokens; 0: all")
    min_p: float | None = Field(None, ge=0, le=1, description="only tokens so likely beside the likeliest")
    repeat_penalty: float | None = Field(None, ge=0.1, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=1024)] | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, values: Any) -> Any:
        for name, what in UNSUPPORTED.items() if isinstance(values, dict) else ():
            given = values.get(name)
            same = name == "best_of" and given in (1, values.get("n"))
            if given and not same and given not in HARMLESS.get(name, ()):
                raise ValueError(f"{name}: {what} is not supported")
        return values

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class CompletionAsked(Asked):
    """POST /v1/completions"""

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[Tokens, Tag("tokens")]
        | Annotated[Lists, Tag("lists")],
        Discriminator(
            _kind,
            custom_error_type="prompt_kind",
            custom_error_message="must be a text, a list of texts, a list of tokens, or a list of lists of tokens",
        ),
    ]
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31, description="[16]")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class Part(BaseModel):
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: Annotated[str, StringConstraints(max_length=256)] | None = None

    def plain(self) -> dict[str, str]:
        """With one text, whatever parts it has."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class ChatAsked(Asked):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31, description="[as many as fit]")
    max_completion_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(BaseModel):
    """What every refusal looks like."""

    error: ErrorBody
