"""The routes: OpenAI's, and what an operator needs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ralo.engine import Engine
from ralo.jobs import Closed, Job
from ralo.lm import LM
from ralo.server import answers, errors
from ralo.server.answers import Shape
from ralo.server.asked import Offer
from ralo.server.channel import Channel, Switchboard
from ralo.server.docs import docs_page
from ralo.server.errors import Json, Refusal
from ralo.server.limits import Limits, known_hosts
from ralo.server.options import ServeOptions
from ralo.server.replies import ChatCompletion, Completion, Health, Live, ModelCard, Models, streamed
from ralo.server.schema import Asked, ChatAsked, CompletionAsked, Error
from ralo.server.watch import Watch
from ralo.version import __version__

T = TypeVar("T")

LONG = 20_000  # characters of a request that is prepared beside the event loop
PAGES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'", "Cache-Control": "no-cache"}
Responses = dict[int | str, dict[str, Any]]
REFUSED: Responses = {"4XX": {"model": Error, "description": "refused, and why"}}
REFUSALS: Responses = REFUSED | {
    code: {"model": Error, "description": what}
    for code, what in {
        400: "something is wrong with the request",
        401: "the API key is missing or wrong",
        403: "another host's name, or another site's page",
        404: "no such model",
        408: "the body did not come in time",
        413: "the body is too large",
        429: "too many requests wait already",
        503: "the server is shutting down",
    }.items()
}


class Service:
    """What stands behind the routes."""

    def __init__(self, lm: LM, options: ServeOptions) -> None:
        self.lm, self.options = lm, options
        self.offer = Offer(lm, options.name or model_name(lm), options.max_tokens)
        self.engine: Engine
        self.watch: Watch
        self.board: Switchboard
        self.closing = self.hurried = False
        self.started = int(time.time())
        lm.tokenizer  # noqa: B018 (opened now, so that a bad one is said before a port is taken)

    @contextlib.asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        o = self.options
        self.board = Switchboard(lambda s: self.watch.first_s.observe(s), lambda s: self.watch.between_s.observe(s))
        self.engine = Engine(self.lm, self.board.deliver, o.texts, o.queue, o.cache_mb << 20)
        self.board.engine = self.engine
        self.watch = Watch(self.lm, self.engine)
        self.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.engine.stop)

    async def drain(self) -> None:
        """Nothing new is taken; what is under way has some time to finish, unless someone is in a hurry."""
        self.closing = True
        until = time.perf_counter() + self.options.drain_s
        while not (self.engine.idle or self.hurried) and time.perf_counter() < until:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.engine.stop)

    async def answer(self, asked: Asked, request: Request) -> Response:
        if self.closing:
            raise Closed
        clock = time.perf_counter()
        shape = Shape(isinstance(asked, ChatAsked), self.offer.model(asked.model), self.lm.tokenizer)
        channel = self.board.open(await self._jobs(asked, request))
        if asked.stream:
            with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
            return Events(answers.events(channel, shape, with_usage), lambda: self._close(channel, clock))
        try:
            return Json(await unless_gone(answers.whole(channel, shape), request))
        finally:
            self._close(channel, clock)

    async def _jobs(self, asked: Asked, request: Request) -> list[Job]:
        if len(await request.body()) > LONG:  # it is there already: the headers may say anything
            return await asyncio.to_thread(self.offer.jobs, asked)
        return self.offer.jobs(asked)

    def _close(self, channel: Channel, clock: float) -> None:
        self.board.close(channel)
        self.watch.request_s.observe(time.perf_counter() - clock)


class Events(StreamingResponse):
    """A stream of events that says when it is over: sent, broken off by the client, or never begun."""

    def __init__(self, events: AsyncIterator[str], over: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


async def unless_gone(work: Awaitable[T], request: Request) -> T:
    """The result of `work`, which ends at once where the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal(499, "the client has gone")
        return task.result()
    finally:
        task.cancel()
        left.cancel()


def model_name(lm: LM) -> str:
    return str(lm.path).rstrip("/").rpartition("/")[2] or "model"


def create_app(lm: LM, options: ServeOptions | None = None) -> FastAPI:
    """An ASGI application around a loaded model."""
    options = options or ServeOptions()
    service = Service(lm, options)
    app = FastAPI(
        title="ralo",
        version=__version__,
        description="OpenAI's completions and chats, from a CPU.",
        lifespan=service.running,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    errors.install(app)
    add_routes(app, service)
    add_pages(app)
    app.add_middleware(Limits, api_key=options.api_key, hosts=known_hosts(options.host, options.allow_host))
    count_requests(app, service)
    return app


def add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses={200: streamed(Completion), **REFUSALS})
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        """Goes on from one prompt or several, whole or as a stream of events."""
        return await service.answer(asked, request)

    @app.post("/v1/chat/completions", responses={200: streamed(ChatCompletion), **REFUSALS})
    async def chat_completions(asked: ChatAsked, request: Request) -> Response:
        """The next message of a chat, by the model's own template, whole or as a stream of events."""
        return await service.answer(asked, request)

    @app.get("/v1/models", responses={200: {"model": Models}, **REFUSED})
    async def models() -> Response:
        """The loaded model and, where it has modes, the same one without them (NAME:dense)."""
        return Json({"object": "list", "data": [model_card(service, name) for name in service.offer.names]})

    @app.get("/v1/models/{model:path}", responses={200: {"model": ModelCard}, **REFUSED})
    async def model(model: str) -> Response:
        """One of them."""
        return Json(model_card(service, service.offer.model(model)))

    @app.get("/health", responses={200: {"model": Health}, 503: {"model": Health}, **REFUSED})
    async def health() -> Response:
        """Whether requests are taken: 200, or 503 while the server shuts down."""
        return Json({"status": "closing" if service.closing else "ok"}, 503 if service.closing else 200)

    refused = {"schema": {"$ref": "#/components/schemas/Error"}}  # JSON here too, though the metrics are not
    plain: Responses = {"4XX": {"description": "refused, and why", "content": {"application/json": refused}}}

    @app.get("/metrics", response_class=PlainTextResponse, responses=plain)
    async def metrics() -> Response:
        """Everything that is counted, in Prometheus' text form."""
        return Response(service.watch.text(), media_type="text/plain; version=0.0.4")

    @app.get("/live", responses={200: {"model": Live}, **REFUSED})
    async def live() -> Response:
        """Figures of the last seconds, as the page shows them."""
        return Json(service.watch.live())


def model_card(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.started, "owned_by": "ralo"}


def add_pages(app: FastAPI) -> None:
    """Files that ship, read once: no part of a request names a file. And the API's page, of the routes as they are."""
    folder = resources.files("ralo.server") / "page"

    def show(path: str, name: str, kind: str) -> None:
        text = (folder / name).read_text(encoding="utf-8")

        @app.get(path, include_in_schema=False)
        async def page() -> Response:
            return Response(text, media_type=kind, headers=PAGE_HEADERS)

    for path, (name, kind) in PAGES.items():
        show(path, name, kind)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(docs_page(app.openapi()), media_type="text/html", headers=PAGE_HEADERS)


def count_requests(app: FastAPI, service: Service) -> None:
    """By route, not by what was asked for: paths that do not exist must not become metrics."""
    known = {getattr(route, "path", "") for route in app.routes}

    class Count:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
            async def counted(message: Any) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"] if scope["path"] in known else "other"
                    service.watch.requests.labels(path, str(message["status"])).inc()
                await send(message)

            await self.inner(scope, receive, counted if scope["type"] == "http" else send)

    app.add_middleware(Count)
