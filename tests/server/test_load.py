"""Many clients: every answer its own, nothing left of those that are gone, and signals under load."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, eventually, read_all, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and open files are read from /proc")

BENCH = Path(__file__).parents[2] / "benches" / "serve.py"
TOKENS = 32
ENDLESS: dict[str, Any] = {"prompt": "the house", "max_tokens": 1 << 15, "temperature": 0}

STREAM = ENDLESS | {"stream": True, "stream_options": {"include_usage": True}}


def bench() -> Any:
    """The clients of benches/serve.py."""
    spec = importlib.util.spec_from_file_location("serve_bench", BENCH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_bench"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mini() -> Iterator[Server]:
    with serving("-m", "mini", "--cache-mb", 16) as running:
        yield running
        assert running.said == ""


def settled(server: Server) -> bool:
    live = server.live()
    return bool((live["running"], live["waiting"]) == (0, 0))


def test_thirty_two_streams_each_as_alone(mini: Server) -> None:
    clients = bench()
    prompts = clients.some_prompts(24)
    alone = clients.Seen()
    for prompt in prompts:
        clients.read(prompt, asyncio.run(clients.ask(mini.port, prompt, TOKENS)), alone)
    assert not alone.errors and len(alone.answers) == len(prompts)
    memory = []
    for _ in range(2):
        _, seen = asyncio.run(clients.load(mini.port, prompts, 32, 5, TOKENS))
        assert seen.errors == []
        assert len(seen.answers) == len(prompts) and all(seen.answers[p] == alone.answers[p] for p in seen.answers)
        eventually(lambda: settled(mini), 1)
        memory.append((mini.memory_mb, mini.open_files, mini.threads))
    (before, files, threads), (after, files_after, threads_after) = memory
    assert after - before < 8 and abs(files_after - files) <= 1 and threads_after == threads, memory


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_clients_that_are_killed_leave_nothing(mini: Server, path: str) -> None:
    kill(mini, path, 16)  # what is kept of them for later is kept from here on
    eventually(lambda: settled(mini), 2)
    files, memory = mini.open_files, mini.memory_mb
    kill(mini, path, 100)
    eventually(lambda: settled(mini), 1)
    eventually(lambda: mini.open_files <= files + 1)
    assert mini.memory_mb - memory < 16
    assert mini.post(path, {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}).is_success


def kill(server: Server, path: str, count: int) -> None:
    """Before the first token and in the middle, with an end and with a reset, streams and whole answers."""
    clients: list[tuple[socket.socket, int]] = []
    for i in range(count):
        text = "it was the house " * (1 if i % 3 else 60)
        asked = {"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 2000, "temperature": 0}
        clients.append((server.ask({**asked, "stream": i % 4 < 2}, path), i))
        if i % 16 < 15:
            continue
        for sock, n in clients:
            if n % 4 == 0:
                read_all(sock, b"data: ")
        for sock, n in clients:
            if n % 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            elif n % 8:
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        clients.clear()
    for sock, _ in clients:
        sock.close()


def test_a_connection_that_is_kept_and_one_that_asks_ahead(mini: Server) -> None:
    body = json.dumps({"prompt": "the house", "max_tokens": 8, "temperature": 0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    one = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with mini.connect() as sock:
        texts = []
        for _ in range(3):
            sock.sendall(one)
            texts.append(read_all(sock, b"}}").partition(b"\r\n\r\n")[2])
        sock.sendall(one * 5)  # before any answer is there
        got = b""
        while got.count(b'"finish_reason":"length"') < 5:
            got += sock.recv(1 << 16)
    answers = {json.loads(text)["choices"][0]["text"] for text in texts}
    assert len(answers) == 1 and got.count(b"HTTP/1.1 200 ") == 5
    assert got.count(json.dumps(answers.pop()).encode()) == 5


def events(data: bytes) -> list[Any]:
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1].strip() == b"[DONE]", data[-300:]
    return [json.loads(line) for line in lines[:-1]]


def begun(server: Server, count: int, **more: Any) -> list[tuple[socket.socket, bytes]]:
    """Streams that have their first token."""
    socks = [server.ask({**STREAM, **more}) for _ in range(count)]
    return [(sock, read_all(sock, b"data: ")) for sock in socks]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_finish(long: Path, sig: int) -> None:
    with serving("-m", long, "--threads", 1, "--texts", 4, "--max-tokens", 1 << 20) as server:
        running = begun(server, 4, max_tokens=1500)
        waiting = server.ask({**STREAM, "max_tokens": 40})
        whole = server.ask({**ENDLESS, "max_tokens": 40})
        eventually(lambda: server.live()["waiting"] == 2)
        server.signal(sig)
        eventually(lambda: b" 503 " in late(server))
        for sock, start in running:
            assert check_end(start + read_all(sock)) == 1500
        assert check_end(read_all(waiting)) == 40
        assert b'"completion_tokens":40,' in read_all(whole)
        assert server.process.wait(10) == 0 and server.said == ""


def late(server: Server) -> bytes:
    """What a client hears that comes after the signal."""
    try:
        with server.ask(ENDLESS) as sock:
            return read_all(sock, b"}}")
    except ConnectionError:
        return b" 503 "


def check_end(data: bytes) -> int:
    """Tokens that came, of a stream that ends as it should."""
    *parts, usage = events(data)
    ends = [part["choices"][0]["finish_reason"] for part in parts]
    assert ends == [None] * (len(ends) - 1) + ["length"]
    return int(usage["usage"]["completion_tokens"])


@pytest.mark.parametrize(("drain", "second"), [(0, 0), (1, 0), (600, signal.SIGTERM), (600, signal.SIGINT)])
def test_a_signal_ends_answers_that_take_too_long(long: Path, drain: int, second: int) -> None:
    with serving("-m", long, "--threads", 1, "--max-tokens", 1 << 20, "--drain-s", drain) as server:
        running = begun(server, 6)
        whole = server.ask(ENDLESS)
        eventually(lambda: server.live()["running"] == 7)
        clock = time.monotonic()
        server.signal()
        if second:
            time.sleep(0.3)
            assert server.process.poll() is None
            server.signal(second)
        for sock, start in running:
            check_end(start + read_all(sock))
        assert b'"finish_reason":"length"' in read_all(whole)
        assert server.process.wait(10) == 0
        assert time.monotonic() - clock < drain % 600 + 4
        assert server.said == ""


def test_a_prompt_that_is_being_read_finishes_too(long: Path) -> None:
    with serving("-m", long, "--threads", 1) as server:
        sock = server.ask({"prompt": [5] * 20_000, "max_tokens": 7, "temperature": 0})
        eventually(lambda: server.live()["waiting"] == 1)
        server.signal()
        assert b'"completion_tokens":7,' in read_all(sock)
        assert server.process.wait(10) == 0 and server.said == ""


def test_clients_that_do_not_read_hold_up_no_end(long: Path) -> None:
    with serving("-m", long, "--threads", 1, "--drain-s", 0, "--max-tokens", 1 << 20) as server:
        socks = [server.connect() for _ in range(3)]
        for sock in socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = json.dumps({**ENDLESS, "stream": True, "n": 4, "logprobs": 20}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for sock in socks:
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: server.live()["running"] == 12)
        time.sleep(2)
        server.signal()
        assert server.process.wait(15) == 0 and server.said == ""
        for sock in socks:
            sock.close()
