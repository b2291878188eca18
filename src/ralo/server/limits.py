"""What is refused before a request is understood: strangers, other sites' pages, bodies too large or too deep."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ralo.server.errors import Refusal, refuse

MAX_BODY = 8 << 20  # bytes
MAX_DEPTH = 32  # of brackets in brackets
OPEN = (
    "/",
    "/page.css",
    "/page.js",
    "/icon.svg",
    "/health",
    "/docs",
    "/openapi.json",
)  # without a key: nothing of anybody's in them
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


class Limits:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, api_key: str, hosts: frozenset[str]) -> None:
        self.app, self.key, self.hosts = app, api_key.encode(), hosts  # no hosts: any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_origin(headers)
            if self.key and scope["path"] not in OPEN:
                self._check_key(headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                receive = await _whole_body(headers, receive)
        except Refusal as refusal:
            await refuse(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check_origin(self, headers: Headers) -> None:
        """A page of another site in the user's browser must not reach a server on the user's machine."""
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname if host else ""
        if self.hosts and name not in self.hosts:
            raise Refusal(403, "this name of the server is not known here (--allow-host)", code="host_not_allowed")
        origin = headers.get("origin")
        if origin and urlsplit(origin).netloc != host:
            raise Refusal(403, "requests of other sites' pages are refused", code="origin_not_allowed")

    def _check_key(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self.key)
        if scheme.lower() != "bearer" or not same:
            refusal = Refusal(401, "the API key is missing or wrong", code="invalid_api_key")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            raise refusal


async def _whole_body(headers: Mapping[str, str], receive: Receive) -> Receive:
    too_large = Refusal(413, f"the body is larger than {MAX_BODY >> 20} MB", code="body_too_large")
    length = headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 12 or int(length) > MAX_BODY):
        raise too_large
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY:
            raise too_large
    if depth(bytes(body)) > MAX_DEPTH:
        raise Refusal(400, f"the body has more than {MAX_DEPTH} brackets in brackets", code="body_too_deep")
    unread: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def again() -> Message:
        return unread.pop() if unread else await receive()

    return again


def depth(body: bytes) -> int:
    """How deep brackets lie in brackets, without building anything."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return 0
    deepest = now = 0
    for found in BRACKETS.finditer(body):
        mark = found[0]
        now += mark in b"[{"
        now -= mark in b"]}"
        deepest = max(deepest, now)
    return deepest
