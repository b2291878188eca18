"""HTTP/1.1 that waits for no client without end: heads of requests have a size and a time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 << 10  # bytes of a request line and its headers
HEAD_S = 30.0  # from its first byte, or from the connection, to its last


class Protocol(HttpToolsProtocol):
    """uvicorn's, which knows neither limit: a connection that says nothing, or that never stops, would stay."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_bytes = 0
        self._in_head = True
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD:
            self.transport.abort()

    def on_message_begin(self) -> None:
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_is_there()
        self._in_head, self._head_bytes = True, 0
        self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _head_is_there(self) -> None:
        self._in_head = False
        if self._late:
            self._late.cancel()
            self._late = None
