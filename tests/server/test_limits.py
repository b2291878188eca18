"""What is refused: bodies, keys, hosts, origins, paths and clients that hang; each refusal in the error shape."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from serving import JSON, Inside, Server, inside, read_all, refused, request

from ralo import LM
from ralo.server import limits
from ralo.server.limits import MAX_BODY, MAX_DEPTH, depth, known_hosts

POSTS = ("/v1/completions", "/v1/chat/completions")
GETS = ("/v1/models", "/v1/models/chatting", "/health", "/metrics", "/live", "/openapi.json", "/")
CHEAP: dict[str, Any] = {"prompt": "a", "max_tokens": 1}


def ask(lm: LM, work: Callable[[Inside], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with inside(lm, **options) as app:
            await work(app)

    asyncio.run(main())


@pytest.mark.parametrize("path", POSTS)
def test_bodies_too_large(lm: LM, path: str) -> None:
    async def work(app: Inside) -> None:
        big = b'{"prompt":"' + b"a" * MAX_BODY + b'"}'
        error = refused(await app.post(path, big), 413, "larger than 8 MB")
        assert error["code"] == "body_too_large"

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(big), 1 << 20):
                yield big[at : at + (1 << 20)]

        answer = await app.client.post(path, content=pieces(), headers=JSON)
        assert "content-length" not in answer.request.headers
        refused(answer, 413)
        refused(await app.post(path, b"{}", content_length="9" * 5000), 413)
        for odd in ("-1", "x", "1e3", "\u00b2", ""):  # told by nobody but a broken server in front
            assert (await app.post(POSTS[0], CHEAP, content_length=odd)).status_code == 200, odd

    ask(lm, work)


@pytest.mark.parametrize("path", POSTS)
def test_bodies_too_deep(lm: LM, path: str) -> None:
    async def work(app: Inside) -> None:
        for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
            for levels in (MAX_DEPTH + 1, 100_000):
                body = b'{"prompt":' + opening * levels + closing * levels + b"}"
                assert refused(await app.post(path, body), 400, "brackets")["code"] == "body_too_deep"
        text = json.dumps(
            {"prompt": "[" * 100, "messages": [{"role": "user", "content": '\\"{' * 100}], "max_tokens": 1}
        )
        assert (await app.post(path, text)).status_code == 200  # brackets of a text are no brackets
        wide = {**CHEAP, "messages": [{"role": "user", "content": "a"}], "more": [[], {}] * 100}
        assert (await app.post(path, wide)).status_code == 200

    ask(lm, work)


def test_depth_is_what_reading_letter_by_letter_finds() -> None:
    pick = random.Random(0)
    for _ in range(3000):
        body = bytes(pick.choice(b'[]{}"\\a') for _ in range(pick.randint(0, 40)))
        if (slow := read_depth(body)) is not None:
            assert depth(b"[" * (MAX_DEPTH + 1) + body) == MAX_DEPTH + 1 + slow, body


def read_depth(body: bytes) -> int | None:
    """None where a backslash is outside of a text, which is no JSON."""
    deepest = now = at = 0
    inside_text = False
    while at < len(body):
        letter = body[at : at + 1]
        if letter == b"\\":
            if not inside_text:
                return None
            at += 1
        elif letter == b'"':
            inside_text = not inside_text
        elif not inside_text:
            now += (letter in b"[{") - (letter in b"]}")
            deepest = max(deepest, now)
        at += 1
    return deepest


@pytest.mark.parametrize("filling", [b'\\"', b'"', b"[],", b"\\", b'""', b"[{"])
def test_no_body_takes_long_to_look_at(filling: bytes) -> None:
    clock = time.perf_counter()
    depth(b"[" * 40 + filling * (MAX_BODY // len(filling)))
    assert time.perf_counter() - clock < 3  # some tenths; reading again from every quote took hours


def test_many_wrong_items_are_one_problem(lm: LM) -> None:
    async def work(app: Inside) -> None:
        many = 400_000
        for path, body in (
            (POSTS[0], {"prompt": ["a"] * many}),
            (POSTS[0], {"prompt": [{}] * many}),
            (POSTS[0], {"prompt": [[[]] * many]}),
            (POSTS[0], {"prompt": "a", "stop": [0] * many}),
            (POSTS[1], {"messages": [0] * many}),
            (POSTS[1], {"messages": [{"role": "user", "content": [0] * many}]}),
        ):
            clock = time.perf_counter()
            refused(await app.post(path, body), 400)
            assert time.perf_counter() - clock < 3  # tenths; a message of every item took five

    ask(lm, work)


@pytest.mark.parametrize("path", POSTS)
def test_what_is_no_request(lm: LM, path: str) -> None:
    async def work(app: Inside) -> None:
        for body in (b"{", b'{"prompt": }', b"nonsense", b'{"prompt": "a"} {}', b"{'prompt': 1}"):
            assert refused(await app.post(path, body), 400, "the body is not JSON")["code"] == "invalid_json"
        for body in (b"\xff\xfe\x00", b'{"prompt":"\xff"}', b'{"prompt":"a","seed":' + b"9" * 5000 + b"}"):
            refused(await app.post(path, body), 400)
        for body in (b"", b"[]", b"null", b"1", b'"a"', b"NaN"):
            refused(await app.post(path, body), 400, "the body must be a JSON object")
        for kind in ("text/plain", "application/x-www-form-urlencoded", "x", "", "application/json\u00ff"):
            refused(await app.post(path, CHEAP, content_type=kind), 400, "Content-Type application/json")

    ask(lm, work)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("top_p", "-Infinity"),
        ("presence_penalty", "1e400"),
        ("min_p", '"x"'),
        ("n", "1.5"),
        ("n", "0"),
        ("n", "NaN"),
        ("seed", "9223372036854775808"),
        ("seed", "1" * 4000),
        ("max_tokens", "-1"),
        ("max_tokens", "2147483648"),
        ("top_k", "[]"),
        ("stop", '""'),
        ("stop", "{}"),
        ("stop", '"\\ud800"'),
        ("model", '"\\ud83d"'),
        ("model", "7"),
        ("stream", '"perhaps"'),
        ("stream_options", "[]"),
        ("user", '"\\udc00"'),
        ("tools", "[{}]"),
        ("logit_bias", '{"5": 1}'),
        ("response_format", '{"type": "json_object"}'),
    ],
)
def test_values_that_cannot_be(lm: LM, field: str, value: str) -> None:
    async def work(app: Inside) -> None:
        for path, what in zip(POSTS, ('"prompt":"a"', '"messages":[{"role":"user","content":"a"}]'), strict=True):
            error = refused(await app.post(path, f'{{{what},"{field}":{value}}}'), 400, field)
            assert error["type"] == "invalid_request_error"

    ask(lm, work)


def test_texts_that_are_no_unicode(lm: LM) -> None:
    async def work(app: Inside) -> None:
        refused(await app.post(POSTS[0], rb'{"prompt":"\ud800"}'), 400, "prompt")
        refused(await app.post(POSTS[0], rb'{"prompt":["a","\udfff"]}'), 400, "prompt")
        for content in (rb'"\ud800"', rb'[{"type":"text","text":"\ud800"}]'):
            refused(await app.post(POSTS[1], b'{"messages":[{"role":"user","content":%s}]}' % content), 400, "messages")
        assert (await app.post(POSTS[0], rb'{"prompt":"\ud83d\ude00","max_tokens":1}')).status_code == 200
        refused(await app.get("/v1/models/%ED%A0%80"), 404)
        refused(await app.post(POSTS[0], json.dumps(CHEAP | {"model": "x" * 257})), 400, "model")

    ask(lm, work)


def test_unknown_routes_and_wrong_methods(lm: LM) -> None:
    async def work(app: Inside) -> None:
        for path in ("/nowhere", "/v1", "/v1/", "/v1/embeddings", "/docs/x", "/%00", "/v2/completions", "/page.css/x"):
            refused(await app.get(path), 404)
            refused(await app.post(path, b"{}"), 404)
        for path in POSTS:
            for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
                refused(await app.client.request(method, path), 405)
        for path in GETS:
            refused(await app.post(path, b"{}"), 405)

    ask(lm, work)


def test_no_path_reaches_a_file(server: Server) -> None:
    up = ("../", "%2e%2e/", "..%2f", "..%5c", "....//", "%252e%252e%252f")
    starts = ("/", "/v1/models/", "/page.css/", "/live/", "/health/", "/metrics/", "/openapi.json/", "/docs/", "/v1/")
    with server.connect() as sock:
        for start in starts:
            for step in up:
                for to in ("etc/passwd", "app.py", "config.json", "proc/self/environ"):
                    line = f"GET {start}{step * 6}{to} HTTP/1.1\r\nHost: localhost\r\n\r\n"
                    sock.sendall(line.encode())
                    answer = read_all(sock, b"}}")
                    assert answer.startswith(b"HTTP/1.1 404 ") and b"root:" not in answer, line
    refused(server.post(POSTS[0], CHEAP | {"model": "/etc/passwd"}), 404, "there is no model")


def test_keys(lm: LM) -> None:
    async def work(app: Inside) -> None:
        for path in ("/v1/models", "/v1/models/chatting", "/metrics", "/live", "/nowhere"):
            for header in ("", "Bearer", "Bearer ", "Bearer wrong", "Basic schlüssel", "bearer: x", "x" * 10_000):
                answer = await app.client.get(path, headers={"Authorization": header.encode()})
                assert refused(answer, 401, "missing or wrong")["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            refused(await app.get(path), 401)
        for odd in (b"Bearer \xff\xfe", b"Bearer schl\xfcssel", b"\xff"):
            refused(await app.client.get("/v1/models", headers={"Authorization": odd}), 401)
        for path in POSTS:
            refused(await app.post(path, CHEAP), 401)
            refused(await app.post(path, b"x" * (MAX_BODY + 1)), 401)
        for scheme in ("Bearer", "bearer", "BEARER"):
            right = {"Authorization": f"{scheme} schlüssel à".encode()}
            assert (await app.client.get("/v1/models", headers=right)).status_code == 200
        for path in ("/", "/page.css", "/page.js", "/health", "/openapi.json"):  # nothing of anybody's in them
            assert (await app.get(path)).status_code == 200

    ask(lm, work, api_key="schlüssel à")


def test_keys_are_compared_in_constant_time(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    class Watched:
        @staticmethod
        def compare_digest(a: bytes, b: bytes) -> bool:
            compared.append((a, b))
            return a == b

    monkeypatch.setattr(limits, "hmac", Watched)

    async def work(app: Inside) -> None:
        await app.get("/live", Authorization="Bearer guess")

    ask(lm, work, api_key="key")
    assert compared == [(b"guess", b"key")]


@pytest.mark.parametrize(
    ("host", "fine"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:8080", True),
        ("localhost:9", True),
        ("LOCALHOST", True),
        ("[::1]:8080", True),
        ("::1", False),  # without brackets it is a name "" and a port
        ("example.com", False),
        ("localhost.example.com", False),
        ("localhost@example.com", False),
        ("127.0.0.1.nip.io", False),
        ("0.0.0.0", False),
        ("[::1", False),
        ("[x]", False),
        ("[", False),
        ("\u00bd", False),
        ("a:b:c", False),
        ("", False),
    ],
)
def test_names_that_a_local_server_is_asked_by(lm: LM, host: str, fine: bool) -> None:
    async def work(app: Inside) -> None:
        answer = await app.client.get("/live", headers={"Host": host.encode()})
        if fine:
            assert answer.status_code == 200
        else:
            assert refused(answer, 403, "--allow-host")["code"] == "host_not_allowed"
            refused(await app.client.get("/", headers={"Host": host.encode()}), 403)

    ask(lm, work)


def test_known_hosts() -> None:
    local = {"127.0.0.1", "localhost", "::1"}
    assert known_hosts("127.0.0.1", "") == local == known_hosts("::1", "") == known_hosts("localhost", "")
    assert known_hosts("127.0.0.1", "My.Host, [::2],") == {*local, "my.host", "::2"}
    assert known_hosts("127.0.0.3", "") == {*local, "127.0.0.3"}  # loopback too
    assert known_hosts("0.0.0.0", "") == known_hosts("127.0.0.1", "*") == frozenset()  # any
    assert known_hosts("0.0.0.0", "my.host") == {*local, "my.host", "0.0.0.0"}


def test_allowed_names(lm: LM) -> None:
    async def work(app: Inside) -> None:
        assert (await app.get("/live", Host="Box.Lan:80")).status_code == 200
        assert (await app.get("/live", Host="localhost")).status_code == 200
        refused(await app.get("/live", Host="other.lan"), 403)

    for host in ("127.0.0.1", "0.0.0.0"):
        ask(lm, work, host=host, allow_host="box.lan")

    async def anybody(app: Inside) -> None:
        assert (await app.get("/live", Host="other.lan")).status_code == 200

    ask(lm, anybody, host="0.0.0.0")
    ask(lm, anybody, allow_host="*")


def test_pages_of_other_sites(lm: LM) -> None:
    async def work(app: Inside) -> None:
        for origin in (
            "https://example.com",
            "null",
            "http://localhost",
            "http://127.0.0.1:8081",
            "http://[",
            "x",
            "//",
        ):
            for path in ("/live", "/v1/models"):
                assert refused(await app.get(path, Origin=origin), 403)["code"] == "origin_not_allowed"
            refused(await app.post(POSTS[0], CHEAP, Origin=origin), 403)
        for origin in ("http://127.0.0.1:8080", "HTTP://127.0.0.1:8080"):
            assert (await app.post(POSTS[0], CHEAP, Origin=origin)).status_code == 200
        answer = await app.get("/live", Origin="http://127.0.0.1:8080")
        assert not any(name.startswith("access-control") for name in answer.headers)

    ask(lm, work)


def test_headers_of_pages(lm: LM) -> None:
    async def work(app: Inside) -> None:
        for path, kind in {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}.items():
            answer = await app.get(path)
            assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
            assert answer.headers["cache-control"] == "no-cache"

    ask(lm, work)


def test_many_answers_of_many_prompts_all_or_nothing(lm: LM) -> None:
    async def work(app: Inside) -> None:
        most = {"prompt": ["a"] * 64, "n": 16, "max_tokens": 1, "temperature": 0}
        answer = (await app.post(POSTS[0], most)).json()  # nothing waits: it is taken whole, whatever --queue says
        assert [choice["index"] for choice in answer["choices"]] == list(range(1024))
        assert answer["usage"]["completion_tokens"] == 1024
        engine, endless = app.service.engine, {"prompt": "a", "max_tokens": 1 << 14, "n": 16, "temperature": 0}
        running = asyncio.create_task(app.post(POSTS[0], endless))
        while engine.running < 16:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(app.post(POSTS[0], {"prompt": ["a"] * 3, "max_tokens": 1, "temperature": 0}))
        while engine.waiting < 3:
            await asyncio.sleep(0.01)
        refused(await app.post(POSTS[0], {"prompt": ["a"] * 6}), 429)
        assert engine.waiting == 3  # none of the six
        app.service.engine.stop()
        for task in (running, waiting):
            assert (await task).json()["choices"][0]["finish_reason"] == "length"

    ask(lm, work, texts=16, queue=8, max_tokens=1 << 15)


def test_hanging_clients_hold_up_nobody(server: Server) -> None:
    whole = request({"prompt": "a", "max_tokens": 1 << 14})
    cut = [b"", whole[:1], whole[:40], whole[: whole.index(b"\r\n\r\n") + 4], whole[:-3]]
    before = server.open_files
    hanging = [server.connect() for _ in range(50)]
    try:
        for i, sock in enumerate(hanging):
            sock.sendall(cut[i % len(cut)])
        clock = time.perf_counter()
        assert server.post(POSTS[0], CHEAP).status_code == 200
        assert time.perf_counter() - clock < 5
        live = server.live()
        assert (live["running"], live["waiting"]) == (0, 0)
    finally:
        for sock in hanging:
            sock.close()
    until = time.monotonic() + 5
    while server.open_files > before and time.monotonic() < until:
        time.sleep(0.02)
    assert server.open_files <= before


def test_endless_heads_are_cut_off(server: Server) -> None:
    for start in (b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"):
        with server.connect() as sock, pytest.raises(OSError):
            sock.sendall(start)
            for _ in range(1000):
                sock.sendall((b"a: b\r\n" if start.endswith(b"\n") else b"aaaaaa") * 10_000)


def test_what_is_no_http(server: Server) -> None:
    for line in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 100):
        with server.connect() as sock:
            sock.sendall(line)
            assert read_all(sock).startswith(b"HTTP/1.1 400 ")
    upgrade = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(upgrade)
        assert read_all(sock, b"}").startswith(b"HTTP/1.1 200 ")


def test_a_body_that_does_not_come(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.1)

    async def never() -> AsyncIterator[bytes]:
        yield b'{"prompt":'
        await asyncio.sleep(60)

    async def work(app: Inside) -> None:
        answer = await app.client.post(POSTS[0], content=never(), headers=JSON)
        assert refused(answer, 408)["code"] == "body_too_slow" and answer.headers["connection"] == "close"

    ask(lm, work)
