"""Refusals in OpenAI's shape, one clear line each."""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ralo.errors import RaloError
from ralo.jobs import Busy, Closed

RESTART_S = 5  # after which a server that is shutting down may be there again
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


# ASCII: whatever a request holds can be said back, half a surrogate pair too.
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


class Refusal(Exception):
    """An answer that is not given, and why."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers: dict[str, str] = {}


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refuse(refusal: Refusal) -> Json:
    body = error_body(refusal.status, refusal.message, refusal.code, refusal.param)
    return Json(body, refusal.status, headers=refusal.headers)


def refusal_of(error: RaloError) -> Refusal:
    """What is worth trying again says when; anything else that was said of a request is the request's own fault."""
    if isinstance(error, Busy):
        return later(429, error, "queue_full", error.seconds)
    if isinstance(error, Closed):
        return later(503, error, "shutting_down", RESTART_S)
    return Refusal(400, str(error))


def later(status: int, error: RaloError, code: str, seconds: float) -> Refusal:
    refusal = Refusal(status, str(error), code=code)
    refusal.headers["Retry-After"] = str(math.ceil(min(max(seconds, 1), 600)))
    return refusal


def first_problem(error: RequestValidationError) -> Refusal:
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"] if part != "body"]
    if problem["type"] == "json_invalid":
        return Refusal(400, "the body is not JSON", code="invalid_json")
    if not place and problem["type"] in ("missing", "model_attributes_type"):
        return Refusal(400, "the body must be a JSON object, and its Content-Type application/json")
    message = problem["msg"].removeprefix("Value error, ")
    name = place[0] if place else None
    return Refusal(400, f"{name}: {message}" if name and not message.startswith(name) else message, param=name)


def install(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def _refusal(_: Request, error: Refusal) -> Json:
        return refuse(error)

    @app.exception_handler(RaloError)
    async def _ralo(_: Request, error: RaloError) -> Json:
        return refuse(refusal_of(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Json:
        return refuse(first_problem(error))

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> Json:
        refusal = Refusal(error.status_code, str(error.detail))
        refusal.headers = dict(error.headers or {})
        return refuse(refusal)

    @app.exception_handler(Exception)
    async def _unforeseen(_: Request, error: Exception) -> Json:
        return refuse(Refusal(500, "something went wrong here; the server's log says what"))
