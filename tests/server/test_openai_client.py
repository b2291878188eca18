"""OpenAI's own client: completions, chats, streams, and every kind of refusal as the error class it belongs to."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, eventually, serving
from tiny import write_hf

import ralo
from ralo import LM

openai = pytest.importorskip("openai", reason="the server is asked with OpenAI's client")

USER = [{"role": "user", "content": "the house"}]
GREEDY: dict[str, Any] = {"model": "chatting", "temperature": 0}


def client_of(server: Server, key: str = "none", **more: Any) -> Any:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=60, **more)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as client:
        yield client


def text_of(client: Any, prompt: Any = "the house", **more: Any) -> str:
    choice = client.completions.create(prompt=prompt, **GREEDY | more).choices[0]
    assert isinstance(choice.text, str)
    return choice.text


def test_completion_is_what_run_gives(client: Any, lm: LM) -> None:
    answer = client.completions.create(prompt="the house", max_tokens=24, **GREEDY)
    assert answer.object == "text_completion" and answer.model == "chatting" and answer.id.startswith("cmpl-")
    assert answer.choices[0].text == lm.generate("the house", 24, temperature=0).text
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].logprobs is None
    prompt = len(lm.encode("the house"))
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (prompt, 24, prompt + 24)


def test_tokens_lists_and_several_answers(client: Any, lm: LM) -> None:
    tokens = lm.encode("the house")
    assert text_of(client, tokens) == text_of(client, [tokens]) == text_of(client, ["the house"]) == text_of(client)
    answer = client.completions.create(prompt=["the house", "a sea", "on it"], n=2, max_tokens=8, **GREEDY)
    assert [choice.index for choice in answer.choices] == list(range(6))
    alone = [text_of(client, prompt, max_tokens=8) for prompt in ("the house", "a sea", "on it") for _ in range(2)]
    assert [choice.text for choice in answer.choices] == alone
    assert answer.usage.completion_tokens == 48


def test_length(client: Any) -> None:
    assert client.completions.create(prompt="the house", **GREEDY).usage.completion_tokens == 16
    none = client.completions.create(prompt="the house", max_tokens=0, **GREEDY)
    assert (none.choices[0].text, none.choices[0].finish_reason, none.usage.completion_tokens) == ("", "length", 0)
    assert text_of(client, [5], max_tokens=3) != ""


def test_seed_repeats_and_answers_differ(client: Any) -> None:
    def texts(seed: int | None) -> list[str]:
        answer = client.completions.create(model="chatting", prompt="the", n=3, seed=seed, temperature=1, max_tokens=16)
        return [choice.text for choice in answer.choices]

    first = texts(11)
    assert len(set(first)) == 3
    assert texts(11) == first != texts(12)
    assert texts(None) != texts(None)


def test_stop_as_text_and_as_a_list_and_across_tokens(client: Any) -> None:
    text = text_of(client, max_tokens=60)
    for length in (1, 2, 5):  # every token is a byte or two: a longer stop comes in pieces
        stop = text[20 : 20 + length]
        for given in (stop, ["never in it", stop]):
            answer = client.completions.create(prompt="the house", max_tokens=60, stop=given, **GREEDY)
            assert answer.choices[0].text == text[: text.index(stop)] and answer.choices[0].finish_reason == "stop"
            streamed = client.completions.create(prompt="the house", max_tokens=60, stop=given, stream=True, **GREEDY)
            assert "".join(part.choices[0].text for part in streamed) == text[: text.index(stop)]


def test_logprobs_of_a_completion(client: Any) -> None:
    answer = client.completions.create(prompt="the house", max_tokens=6, logprobs=4, **GREEDY)
    given = answer.choices[0].logprobs
    assert len(given.tokens) == len(given.token_logprobs) == len(given.top_logprobs) == len(given.text_offset) == 6
    for token, logprob, top in zip(given.tokens, given.token_logprobs, given.top_logprobs, strict=True):
        assert logprob <= 0 and logprob == max(top.values()) == top[token]  # the likeliest was chosen
        assert 0 < len(top) <= 4
    assert given.text_offset[0] == 0 and given.text_offset == sorted(given.text_offset)
    only = client.completions.create(prompt="the house", max_tokens=2, logprobs=0, **GREEDY).choices[0].logprobs
    assert only.token_logprobs == given.token_logprobs[:2] and only.top_logprobs == [{}, {}]


def test_chat_is_the_template(client: Any, lm: LM) -> None:
    answer = client.chat.completions.create(messages=USER, max_tokens=12, **GREEDY)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    message = answer.choices[0].message
    prompt = lm.tokenizer.encode("user: the house\nassistant: ", special=False)
    assert (message.role, message.content) == ("assistant", lm.generate(prompt, 12, temperature=0).text)
    assert answer.usage.prompt_tokens == len(prompt)


def test_chat_parts_roles_and_lengths(client: Any) -> None:
    def ask(*messages: dict[str, Any], **more: Any) -> Any:
        return client.chat.completions.create(messages=messages, **GREEDY | {"max_tokens": 6} | more)

    whole = {"role": "user", "content": "the house"}
    parts = {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "house"}]}
    assert ask(whole).choices[0].message.content == ask(parts).choices[0].message.content
    told = [ask({"role": role, "content": "be brief"}, whole) for role in ("system", "developer")]
    assert told[0].choices[0].message.content == told[1].choices[0].message.content
    assert told[0].usage.prompt_tokens > ask(whole).usage.prompt_tokens
    assert ask(whole, max_completion_tokens=3).usage.completion_tokens == 3
    assert ask(whole, max_completion_tokens=0).choices[0].message.content == ""
    assert ask({"role": "user", "content": ""}).usage.completion_tokens == 6  # the template's own words are a prompt
    assert ask({"role": "assistant", "content": None}, whole).usage.completion_tokens == 6
    many = ask(whole, n=4, temperature=1, seed=5)
    assert len({choice.message.content for choice in many.choices}) > 1
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]


def test_logprobs_of_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(messages=USER, max_tokens=5, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    for token in content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob <= 0
        assert bytes(token.bytes).decode() == token.token
    streamed = client.chat.completions.create(
        messages=USER, max_tokens=5, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    parts = [p.choices[0].logprobs for p in streamed if p.choices[0].logprobs]
    assert [token for part in parts for token in part.content] == content
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs: true"):
        client.chat.completions.create(messages=USER, top_logprobs=3, **GREEDY)


@pytest.mark.parametrize("count", [1, 3])
def test_streams_say_what_whole_answers_say(client: Any, count: int) -> None:
    asked: dict[str, Any] = {"model": "chatting", "max_tokens": 30, "n": count, "seed": 3, "temperature": 0.8}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    whole = client.completions.create(prompt="the house", **asked)
    parts = list(client.completions.create(prompt="the house", **asked, **more))
    check_stream(parts, [c.text for c in whole.choices], whole.usage, lambda choice: choice.text)
    whole = client.chat.completions.create(messages=USER, **asked)
    parts = list(client.chat.completions.create(messages=USER, **asked, **more))
    for index in range(count):  # the role comes first, alone
        first = next(p.choices[0] for p in parts if p.choices and p.choices[0].index == index)
        assert (first.delta.role, first.delta.content) == ("assistant", "")
    check_stream(parts, [c.message.content for c in whole.choices], whole.usage, lambda choice: choice.delta.content)


def check_stream(parts: list[Any], texts: list[str], usage: Any, text: Any) -> None:
    assert len({part.id for part in parts}) == 1
    for index, whole in enumerate(texts):
        choices = [p.choices[0] for p in parts if p.choices and p.choices[0].index == index]
        assert "".join(text(choice) for choice in choices) == whole
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    last = parts.pop()
    assert last.choices == [] and last.usage.completion_tokens == usage.completion_tokens
    assert all(part.usage is None for part in parts)


def test_a_stream_that_is_left_ends_its_work(server: Server, client: Any) -> None:
    stream = client.completions.create(prompt="the house", max_tokens=1 << 14, stream=True, **GREEDY)
    next(iter(stream))
    assert server.live()["running"] == 1
    stream.close()
    eventually(lambda: server.live()["running"] == 0, 1)


def test_sixteen_at_once_as_one_by_one(server: Server, client: Any) -> None:
    prompts = [f"the {word} of house {i}" for i, word in enumerate(["sea", "day", "people", "one"] * 4)]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as asking:

            async def one(i: int) -> str:
                asked: dict[str, Any] = {"prompt": prompts[i], "max_tokens": 20 + i, **GREEDY}
                if i % 2:
                    answer = await asking.completions.create(**asked)
                    return str(answer.choices[0].text)
                stream = await asking.completions.create(**asked, stream=True)
                return "".join([part.choices[0].text async for part in stream])

            return await asyncio.gather(*(one(i) for i in range(16)))

    alone = [text_of(client, prompt, max_tokens=20 + i) for i, prompt in enumerate(prompts)]
    assert asyncio.run(together()) == alone


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["chatting"]
    assert client.models.retrieve("chatting").owned_by == "ralo"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4' here"):
        client.models.retrieve("gpt-4")


def test_what_is_wrong_with_a_request(client: Any) -> None:
    def refused(what: str, kind: type[Exception] = openai.BadRequestError, **asked: Any) -> Any:
        with pytest.raises(kind, match=what) as caught:
            client.completions.create(**{"model": "chatting", "prompt": "a"} | asked)
        return caught.value

    missing = refused("there is no model 'gpt-4' here", openai.NotFoundError, model="gpt-4")
    assert (missing.code, missing.type) == ("model_not_found", "not_found_error")
    refused("there is no model 'chatting:dense' here", openai.NotFoundError, model="chatting:dense")  # it has no modes
    assert refused("temperature: Input should be less than or equal to 2", temperature=3).param == "temperature"
    assert refused("the prompt is empty", prompt="").param == "prompt"
    refused("prompt: must be a text, a list of texts, a list of tokens", prompt={"a": 1})
    refused("at most 64 items", prompt=["a"] * 65)
    refused("token 300 is not in the model's vocabulary of 300", prompt=[300])
    refused("Input should be greater than or equal to 0", prompt=[-1])
    assert refused("the model's context is 32768", prompt=[5] * 32769).code == "context_length_exceeded"
    refused("n: Input should be less than or equal to 16", n=17)
    refused("suffix is not supported", suffix="b")
    refused("best_of other than n is not supported", best_of=2)
    refused("stop: ", stop=["a"] * 9)


def test_a_context_that_is_full_to_the_last_token(tmp_path: Path) -> None:
    small = write_hf(tmp_path / "small", "llama", vocab_size=300, eos_token_id=None)
    (small / "tokenizer_config.json").write_text("{}")  # no token ends a text
    with serving("-m", small, "--threads", 1) as server, client_of(server) as client:
        for prompt, made in ((126, 3), (127, 2), (128, 1)):
            for stream in (False, True):
                asked = {"prompt": [5] * prompt, "max_tokens": 50, "model": "small", "stream": stream}
                given = client.completions.create(**asked, stream_options={"include_usage": True} if stream else None)
                *_, end, usage = given if stream else (given, given)
                assert (usage.usage.completion_tokens, end.choices[0].finish_reason) == (made, "length")
        with pytest.raises(openai.BadRequestError, match="129 tokens, the model's context is 128"):
            client.completions.create(prompt=[5] * 129, model="small")


def test_a_beginning_is_not_run_twice(client: Any) -> None:
    prompt = "it was the house on the sea. " * 20
    first = client.completions.create(prompt=prompt + "one", max_tokens=4, **GREEDY)
    again = client.completions.create(prompt=prompt + "one", max_tokens=4, **GREEDY)
    other = client.completions.create(prompt=prompt + "two", max_tokens=4, **GREEDY)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == other.usage.prompt_tokens_details.cached_tokens >= 128
    assert again.choices[0].text == first.choices[0].text


def test_without_a_template_messages_are_one_text(long: Path) -> None:
    lm = ralo.load(long, threads=1)
    with serving("-m", long, "--threads", 1, "--name", "plain") as server, client_of(server) as client:
        assert [model.id for model in client.models.list()] == ["plain"]
        answer = client.chat.completions.create(model="plain", messages=USER, max_tokens=9, temperature=0)
        assert answer.choices[0].message.content == lm.generate("the house", 9, temperature=0).text
        with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
            client.chat.completions.create(model="plain", messages=[{"role": "user", "content": ""}])


@pytest.mark.parametrize("mode", [("--kwta-k", "0.5"), ("--event-driven", "on"), ("--state-pack", "ternary")])
def test_dense_beside_modes_and_modes_beside_each_other(chatting: Path, lm: LM, mode: tuple[str, str]) -> None:
    dense = lm.generate("the house", 40, temperature=0).text
    with serving("-m", chatting, "--threads", 1, *mode, "--guard", "off") as server, client_of(server) as client:
        assert [model.id for model in client.models.list()] == ["chatting", "chatting:dense"]
        assert text_of(client, max_tokens=40, model="chatting:dense") == dense
        prompts = ["the house", "a sea", "on it", "the day and the people"]
        alone = [text_of(client, prompt, max_tokens=40) for prompt in prompts]
        together = client.completions.create(prompt=prompts * 4, max_tokens=40, **GREEDY)
        assert [choice.text for choice in together.choices] == alone * 4
        if mode[0] == "--kwta-k":
            assert alone[0] != dense


def test_keys_and_other_sites(chatting: Path) -> None:
    with serving("-m", chatting, "--threads", 1, RALO_API_KEY="secret") as server:
        with client_of(server, "secret") as client:
            assert text_of(client)
        with (
            client_of(server, "guessed") as client,
            pytest.raises(openai.AuthenticationError, match="missing or wrong"),
        ):
            text_of(client)
        for name, value in {"Origin": "https://example.com", "Host": "example.com"}.items():
            with (
                client_of(server, "secret", default_headers={name: value}) as client,
                pytest.raises(openai.PermissionDeniedError) as caught,
            ):
                text_of(client)
            assert caught.value.type == "permission_error" and caught.value.code == f"{name.lower()}_not_allowed"


def test_too_many_and_too_late(chatting: Path) -> None:
    flags = ("--threads", 1, "--texts", 1, "--queue", 1, "--max-tokens", 1 << 20)
    with serving("-m", chatting, *flags) as server, client_of(server) as client:
        endless: dict[str, Any] = {"prompt": "the", "max_tokens": 1 << 15, "stream": True, **GREEDY}
        running = client.completions.create(**endless)
        next(iter(running))
        waiting = client.completions.create(**endless)
        eventually(lambda: server.live()["waiting"] == 1)
        with pytest.raises(openai.RateLimitError, match="as many requests as it can take") as caught:
            text_of(client)
        assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.BadRequestError, match="2 answers are more than the 1 texts that run at once"):
            text_of(client, n=2)
        server.signal(signal.SIGTERM)
        eventually(lambda: server.get("/health").status_code == 503)
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as closing:
            text_of(client)
        assert closing.value.status_code == 503 and "retry-after" in closing.value.response.headers
        server.signal(signal.SIGTERM)
        for stream in (running, waiting):
            assert [part.choices[0].finish_reason for part in stream][-1] == "length"
        assert server.process.wait(10) == 0 and server.said == ""
