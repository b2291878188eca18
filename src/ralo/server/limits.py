"""What is refused before a request is understood: strangers, other sites' pages, bodies too large or too deep."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

import numpy as np
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ralo.server.errors import Refusal, refuse

MAX_BODY = 8 << 20  # bytes
MAX_DEPTH = 32  # of brackets in brackets
BODY_S = 60.0  # in which a body must have come
OPEN = (
    "/",
    "/page.css",
    "/page.js",
    "/icon.svg",
    "/health",
    "/docs",
    "/openapi.json",
)  # without a key: nothing of anybody's in them
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def known_hosts(host: str, allowed: str) -> frozenset[str]:
    """Names that a server at `host` may be asked by; none: by any. One that is reached from this machine alone is asked
    by loopback's names, or another site's page could reach it by a name that leads here."""
    names = {name.strip().lower().strip("[]") for name in allowed.split(",")} - {""}
    if "*" in names or not (names or _is_loopback(host)):
        return frozenset()
    return frozenset({*names, *LOOPBACK, host.lower()})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Limits:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, api_key: str, hosts: frozenset[str]) -> None:
        self.app, self.key, self.hosts = app, api_key.encode("utf-8", "surrogateescape"), hosts  # no hosts: any

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
        name = _hostname(f"//{host}")
        if self.hosts and name not in self.hosts:
            raise Refusal(403, "this name of the server is not known here (--allow-host)", code="host_not_allowed")
        origin = headers.get("origin")
        if origin and (not _hostname(origin) or urlsplit(origin).netloc.lower() != host.lower()):
            raise Refusal(403, "requests of other sites' pages are refused", code="origin_not_allowed")

    def _check_key(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")  # as they were sent
        same = hmac.compare_digest(given.strip(b" \t"), self.key)
        if scheme.lower() != b"bearer" or not same:
            refusal = Refusal(401, "the API key is missing or wrong", code="invalid_api_key")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            raise refusal


def _hostname(url: str) -> str:
    """Of a URL's host; empty where it has none or cannot be read."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


async def _whole_body(headers: Mapping[str, str], receive: Receive) -> Receive:
    try:
        async with asyncio.timeout(BODY_S):
            body = await _read(headers, receive)
    except TimeoutError:
        slow = Refusal(408, f"the body did not come within {BODY_S:.0f} seconds", code="body_too_slow")
        slow.headers["Connection"] = "close"
        raise slow from None
    if depth(body) > MAX_DEPTH:
        raise Refusal(400, f"the body has more than {MAX_DEPTH} brackets in brackets", code="body_too_deep")
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return unread.pop() if unread else await receive()

    return again


async def _read(headers: Mapping[str, str], receive: Receive) -> bytes:
    too_large = Refusal(413, f"the body is larger than {MAX_BODY >> 20} MB", code="body_too_large")
    length = headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 12 or int(length) > MAX_BODY):
        raise too_large
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(499, "the client has gone")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY:
            raise too_large
    return bytes(body)


def depth(body: bytes) -> int:
    """How deep brackets lie in brackets, at a cost that no body can raise: strings are told by counting quotes."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return 0
    marks = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = np.cumsum(marks == ord('"'), dtype=np.int32) % 2 == 0
    opened, closed = (np.isin(marks, np.frombuffer(b, np.uint8)) & outside for b in (b"[{", b"]}"))
    return int(np.cumsum(opened.astype(np.int8) - closed.astype(np.int8), dtype=np.int32).max(initial=0))
