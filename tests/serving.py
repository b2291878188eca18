"""`ralo serve` as its users meet it: a process of its own at a free port, or the application inside this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from commandline import COMMAND, environment

from ralo import LM
from ralo.server.app import Service, create_app
from ralo.server.options import ServeOptions

ERROR = {"message", "type", "param", "code"}
JSON = {"content-type": "application/json"}


@dataclass
class Server:
    """One that runs."""

    process: subprocess.Popen[bytes]
    host: str
    port: int
    log: Path
    connections: list[socket.socket]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def said(self) -> str:
        """All but the one line that says where it is."""
        return self.log.read_text().partition("\n")[2]

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **more)

    def live(self) -> Any:
        return self.get("/live").json()

    def signal(self, sig: int = signal.SIGTERM) -> None:
        self.process.send_signal(sig)

    def connect(self) -> socket.socket:
        sock = socket.create_connection((self.host.strip("[]"), self.port), timeout=30)
        self.connections.append(sock)
        return sock

    def ask(self, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """A request that is sent, and nothing of its answer read."""
        sock = self.connect()
        sock.sendall(request(body, path))
        return sock

    @property
    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    @property
    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found
        return int(found[1]) / 1024


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


def read_all(sock: socket.socket, until: bytes = b"") -> bytes:
    """What comes until the other side ends, or has sent `until`."""
    got = b""
    while not (until and until in got) and (new := sock.recv(1 << 16)):
        got += new
    return got


@contextlib.contextmanager
def serving(*args: object, **variables: str) -> Iterator[Server]:
    """A server with these flags and variables, gone afterwards whatever happens."""
    with tempfile.TemporaryDirectory() as folder:
        log, connections = Path(folder) / "stderr", list[socket.socket]()
        command = [*COMMAND, "serve", "--port", "0", *map(str, args)]
        with log.open("wb") as err:
            process = subprocess.Popen(command, stdout=err, stderr=err, env=environment(**variables))
        try:
            eventually(lambda: b"\n" in log.read_bytes() or process.poll() is not None, 60)
            found = re.search(r" at http://(\S+):(\d+)/ ", log.read_text())
            assert found, log.read_text()
            yield Server(process, found[1], int(found[2]), log, connections)
        finally:
            for sock in connections:
                sock.close()
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def eventually(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits until it does."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to hold"
        time.sleep(0.02)


async def soon(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    """The same without holding up anybody."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


@dataclass
class Inside:
    """The application in this process, asked without a network."""

    service: Service
    client: httpx.AsyncClient

    async def post(self, path: str, content: bytes | str | dict[str, Any], **headers: str) -> httpx.Response:
        data = json.dumps(content) if isinstance(content, dict) else content
        named = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        raw = {name: value.encode("latin-1") for name, value in (JSON | named).items()}
        return await self.client.post(path, content=data, headers=raw)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.client.get(path, headers=headers)

    async def idle(self) -> None:
        while not self.service.engine.idle:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def inside(lm: LM, **options: Any) -> AsyncIterator[Inside]:
    app = create_app(lm, ServeOptions(**options))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080", timeout=60) as client,
    ):
        yield Inside(app.state.service, client)


def refused(answer: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    """An error in OpenAI's shape, which says so in these words."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == ERROR
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str) and "\n" not in error["message"]
    for word in words:
        assert word in error["message"], error["message"]
    return error
