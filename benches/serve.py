"""Many streaming clients beside one at a time: tokens per second, first-token and inter-token times, answers compared.

A server in a process of its own, clients in another. Rounds of both kinds take turns. Every greedy answer must be the
one that the same prompt gives alone.
Leaves out: the network.
Run: python benches/serve.py [-m mini] [--clients 32] [--seconds 20] [--rounds 3] [--tokens 128] [-- flags of serve]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

from ralo import texts


@dataclass
class Seen:
    """What clients saw."""

    answers: dict[str, set[str]] = field(default_factory=dict)  # by prompt
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def length_of(prompt: str, tokens: int) -> int:
    """Half as many to half as many again: were all answers equally long, all clients would ask again at once."""
    return tokens // 2 + zlib.crc32(prompt.encode()) % tokens


class Client(asyncio.Protocol):
    """Keeps what comes and when, and reads it later: clients share the cores with the server."""

    def __init__(self, request: bytes) -> None:
        self.request, self.came, self.clock = request, [], time.perf_counter()
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.came.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set_result(error)


async def ask(port: int, prompt: str, tokens: int) -> Client:
    """One streaming request, to its end."""
    asked = {"prompt": prompt, "max_tokens": length_of(prompt, tokens), "temperature": 0}
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(request), "127.0.0.1", port)
    await client.over
    return client


def read(prompt: str, client: Client, seen: Seen) -> None:
    """What the client was sent: text, tokens and times."""
    whole, latest, text = b"".join(data for _, data in client.came), 0.0, ""
    try:
        if b" 200 " not in whole.partition(b"\r\n")[0]:
            raise ConnectionError(whole.partition(b"\r\n")[0].decode() or str(client.over.result()))
        events = [json.loads(line[6:]) for line in whole.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        made = events[-1]["usage"]["completion_tokens"]
    except (OSError, KeyError, IndexError, json.JSONDecodeError) as error:
        seen.errors.append(f"{type(error).__name__}: {error}")
        return
    for at, data in client.came:
        for _ in range(data.count(b"data: {")):
            if latest:
                seen.between_s.append(at - latest)
            else:
                seen.first_s.append(at - client.clock)
            latest = at
    seen.tokens += made
    seen.answers.setdefault(prompt, set()).add(text)


async def load(port: int, prompts: list[str], clients: int, seconds: float, tokens: int) -> tuple[float, Seen]:
    """So many clients, each asking again when it is answered; tokens per second of complete answers."""
    seen, answered, start, at = Seen(), [], time.perf_counter(), iter(range(1 << 30))

    async def client() -> None:
        while time.perf_counter() - start < seconds:
            prompt = prompts[next(at) % len(prompts)]
            try:
                answered.append((prompt, await ask(port, prompt, tokens)))
            except OSError as error:
                seen.errors.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(client() for _ in range(clients)))
    took = time.perf_counter() - start
    for prompt, one in answered:
        read(prompt, one, seen)
    return seen.tokens / took, seen


def memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def some_prompts(count: int) -> list[str]:
    words = texts.read("held_out").split()
    pick = random.Random(0)
    starts = [pick.randrange(len(words) - 100) for _ in range(count)]
    return [" ".join(words[s : s + pick.randint(5, 20)]) for s in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="mini")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    command = [sys.executable, "-m", "ralo", "serve", "-m", args.model, "--port", "0", *args.flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r":(\d+)/ ", server.stderr.readline())[1])
        report(args, port, server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        print("server ended with", server.wait(60))


def report(args: argparse.Namespace, port: int, pid: int) -> None:
    prompts, ratios, seen, alone = some_prompts(64), [], Seen(), Seen()
    uvloop.run(load(port, prompts, 4, 2, args.tokens))
    for _ in range(args.rounds):
        one, few = uvloop.run(load(port, prompts, 1, args.seconds / 2, args.tokens))
        before = memory_mb(pid)
        many, all_ = uvloop.run(load(port, prompts, args.clients, args.seconds, args.tokens))
        ratios.append(many / one)
        print(f"{one:7.0f} tok/s one by one, {many:7.0f} with {args.clients}: {many / one:.2f}x; "
              f"memory {before:.0f} -> {memory_mb(pid):.0f} MB", flush=True)  # fmt: skip
        for total, part in ((alone, few), (seen, all_)):
            total.errors += part.errors
            total.first_s += part.first_s
            total.between_s += part.between_s
            for prompt, given in part.answers.items():
                total.answers.setdefault(prompt, set()).update(given)
    for prompt in prompts:
        if prompt not in alone.answers:
            read(prompt, uvloop.run(ask(port, prompt, args.tokens)), alone)
    wrong = [p for p in prompts if p in seen.answers and seen.answers[p] != alone.answers[p]]
    times = {"first token": seen.first_s, "between tokens": seen.between_s}
    print(f"throughput {statistics.median(ratios):.2f}x ({min(ratios):.2f} ... {max(ratios):.2f})")
    for name, values in times.items():
        p50, p99 = 1e3 * np.percentile(values, [50, 99])
        print(f"{name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    print(f"errors: {len(seen.errors)} {seen.errors[:2]}")
    print(f"prompts answered otherwise than alone: {len(wrong)} of {len(seen.answers)}")
    if seen.errors or wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
