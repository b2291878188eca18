"""Clients that leave at any moment, and clients that do not read: nothing is kept for them."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from serving import Inside, inside, soon

from ralo import LM
from ralo.commands.serve import STALLED_S, _listen
from ralo.server import channel

ENDLESS: dict[str, Any] = {"prompt": "the house", "max_tokens": 1 << 14, "temperature": 0}
POSTS = ("/v1/completions", "/v1/chat/completions")


class Client:
    """One that leaves after so many messages of the answer; None: as soon as it has asked."""

    def __init__(self, app: Inside, body: dict[str, Any], after: int | None, path: str = POSTS[0]) -> None:
        self.app, self.after, self.path = app, after, path
        self.body = json.dumps(body).encode()
        self.sent: list[Any] = []
        self.asked = False
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if not self.asked:
            self.asked = True
            if self.after is None:
                self.gone.set()
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if self.after is not None and len(self.sent) > self.after:
            self.gone.set()
        await asyncio.sleep(0)

    async def run(self) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1"}
        scope |= {"method": "POST", "path": self.path, "raw_path": self.path.encode(), "query_string": b""}
        scope |= {"headers": headers, "scheme": "http", "root_path": "", "server": None, "client": None}
        await self.app.client._transport.app(scope, self.receive, self.send)  # type: ignore[attr-defined]


def nothing_left(app: Inside) -> bool:
    board, engine = app.service.board, app.service.engine
    return engine.idle and not board._channels and not board._latest


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", POSTS)
def test_a_client_that_leaves_leaves_nothing(lm: LM, stream: bool, path: str) -> None:
    async def main() -> None:
        async with inside(lm, max_tokens=1 << 15, texts=8) as app:
            body = ENDLESS | {"messages": [{"role": "user", "content": "a"}], "stream": stream, "n": 2}
            long = body | {"prompt": "the house " * 500}
            for after in (None, 0, 1, 2, 5, 40) if stream else (None,):
                some = [Client(app, asked, after, path) for asked in (body, long, body, long, body, long)]
                await asyncio.gather(*(client.run() for client in some))
                await soon(lambda: nothing_left(app))
            assert app.service.watch.live()["running"] == 0

    asyncio.run(main())


def test_a_client_that_does_not_read_is_given_up(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MOST_UNREAD", 100)

    async def main() -> None:
        async with inside(lm, max_tokens=1 << 15) as app:
            client = Client(app, ENDLESS | {"stream": True}, 1 << 30)
            reading = asyncio.Event()
            send = client.send

            async def stalled(message: Any) -> None:
                await send(message)
                if len(client.sent) > 3:
                    await reading.wait()

            client.send = stalled  # type: ignore[method-assign]
            task = asyncio.create_task(client.run())
            await soon(lambda: app.service.engine.running == 1)
            await soon(lambda: nothing_left(app))
            assert not task.done()
            reading.set()  # and what it reads then says so
            await task
            text = b"".join(message.get("body", b"") for message in client.sent).decode()
            assert "too much of this answer was not read" in text and text.endswith("data: [DONE]\n\n")

    asyncio.run(main())


def test_the_system_gives_up_connections_that_take_nothing() -> None:
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system does not know it")
    with _listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * STALLED_S
