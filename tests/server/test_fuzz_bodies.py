"""Ten thousand bodies, most of them wrong: an answer in its shape or a refusal in its own, never a server's error."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from typing import Any

import httpx
from serving import ERROR, JSON, inside

from ralo import LM

COUNT = 10_000
TOGETHER = 8
TEXTS = ["", "a", "the house", "\0", "\ud800", "\U0001f600", "[" * 50, "</s><s>", "{{ 7 * 7 }}", "\\", '"', "x" * 5000]
NUMBERS = [0, 1, -1, 0.5, 2, 16, 17, 299, 300, 1 << 31, 1 << 63, -(1 << 63), 10**30, 1e308, float("nan"), float("inf")]
NAMES = """model prompt messages temperature top_p top_k min_p repeat_penalty presence_penalty frequency_penalty n seed
stop stream stream_options user max_tokens max_completion_tokens logprobs top_logprobs best_of echo suffix tools
tool_choice response_format logit_bias modalities functions function_call audio prediction store metadata"""
FIELDS = NAMES.split()
VALID: list[dict[str, Any]] = [
    {"prompt": "the house", "temperature": 0},
    {"prompt": [1, 5, 9], "n": 2, "seed": 7, "top_p": 0.9},
    {"prompt": ["a", "b"], "stop": ["x", "y"], "logprobs": 3},
    {"prompt": [[4], [5, 6]], "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": "a"}], "top_k": 5, "min_p": 0.1},
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "b"}]}], "logprobs": True, "top_logprobs": 2},
    {"messages": [{"role": "user", "content": "a", "name": "n"}, {"role": "tool", "content": None}], "stream": True},
]


def anything(pick: random.Random, depth: int = 0) -> Any:
    kind = pick.randrange(8 if depth < 4 else 5)
    if kind == 0:
        return pick.choice([None, True, False])
    if kind in (1, 2):
        return pick.choice(NUMBERS)
    if kind in (3, 4):
        return pick.choice(TEXTS)
    if kind == 5:
        return {pick.choice(FIELDS + TEXTS): anything(pick, depth + 1) for _ in range(pick.randrange(4))}
    return [anything(pick, depth + 1) for _ in range(pick.randrange(5))]


def changed(pick: random.Random) -> dict[str, Any]:
    """A valid body with some of it replaced, taken out or added."""
    body = copy.deepcopy(pick.choice(VALID)) | {"max_tokens": pick.choice([0, 1, 2])}
    for _ in range(pick.randrange(4)):
        change = pick.randrange(4)
        if change == 0 and len(body) > 1:
            del body[pick.choice(list(body))]
        elif change == 1 and isinstance(body.get("messages"), list) and body["messages"]:
            message = pick.choice(body["messages"])
            if isinstance(message, dict):
                message[pick.choice(["role", "content", "name", "tool_calls"])] = anything(pick)
        else:
            body[pick.choice(FIELDS)] = anything(pick)
    # What is left of the valid ones must stay cheap.
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int | float) and not body[name] <= 2:
            body[name] = pick.choice([-1, 2, 1 << 40])
    body.setdefault("max_tokens", 1)
    return body


def broken(pick: random.Random, body: bytes) -> bytes:
    """Bytes of it changed, cut off, doubled or put elsewhere."""
    data = bytearray(body)
    for _ in range(pick.randint(1, 4)):
        at = pick.randrange(len(data) + 1)
        change = pick.randrange(4)
        if change == 0:
            data[at:at] = bytes([pick.randrange(256)])
        elif change == 1:
            del data[at:]
        elif change == 2:
            data[at:at] = pick.choice([b'"', b"[", b"]", b"{", b"}", b"\\", b",", b":", b"\\ud800", b"NaN", b"\xff"])
        else:
            data[at : at + 3] = b""
    return bytes(data)


def make(pick: random.Random) -> bytes:
    kind = pick.random()
    if kind < 0.1:
        return pick.randbytes(pick.randrange(200))
    if kind < 0.3:
        return json.dumps(anything(pick)).encode()
    body = json.dumps(changed(pick)).encode()
    return broken(pick, body) if kind < 0.55 else body


def check(answer: httpx.Response, chat: bool) -> None:
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500
        error = answer.json()["error"]
        assert set(error) == ERROR and error["message"] and "\n" not in error["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in answer.text.split("\n") if line]
        assert lines[-1] == "data: [DONE]"
        parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert all(part["object"] == ("chat.completion.chunk" if chat else "text_completion") for part in parts)
    else:
        body = answer.json()
        assert body["object"] == ("chat.completion" if chat else "text_completion") and body["choices"]
        assert all(choice["finish_reason"] in ("stop", "length") for choice in body["choices"])
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]


def test_no_body_is_too_much(lm: LM) -> None:
    seen: Counter[int] = Counter()

    async def main() -> None:
        async with inside(lm, max_tokens=4, queue=1 << 10) as app:

            async def some(first: int) -> None:
                for i in range(first, COUNT, TOGETHER):
                    body, chat = make(random.Random(i)), bool(i & 8)
                    path = "/v1/chat/completions" if chat else "/v1/completions"
                    try:
                        answer = await app.client.post(path, content=body, headers=JSON)
                        check(answer, chat)
                    except Exception as error:
                        error.add_note(f"body {i}: {body!r:.500}")
                        raise
                    seen[answer.status_code] += 1

            await asyncio.gather(*(some(first) for first in range(TOGETHER)))
            await app.idle()
            assert not app.service.board._channels and not app.service.board._latest

    asyncio.run(main())
    assert sum(seen.values()) == COUNT and seen[200] > COUNT / 50 and seen[400] > COUNT / 2
