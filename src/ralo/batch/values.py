"""What may stand in a line: JSON values, checked like flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from ralo.errors import RaloError

LONGEST_ID = 256  # characters
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_object(line: bytes) -> dict[str, Any]:
    """One JSON object, as the standard has it."""
    try:
        values = json.loads(line.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise RaloError(f"is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise RaloError("has too many brackets in brackets") from None
    except ValueError as error:
        raise RaloError(f"is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RaloError(f"must be a JSON object, got {shown(values)}")
    return values


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def id_of(value: Any) -> str | int | float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0  # no infinity
    if not (number or isinstance(value, str)) or not 0 < len(str(value)) <= LONGEST_ID:
        raise RaloError(f"id must be a text of at most {LONGEST_ID} characters or a number, got {shown(value)}")
    return value if number else text_of("id", value)


def text_of(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RaloError(f"{name} must be a text that is not empty, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RaloError(f"{name} is not valid Unicode: it has half of a surrogate pair") from None
    return value


def messages_of(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise RaloError(f"messages must be a list of messages, got {shown(value)}")
    for message in value:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise RaloError(f'a message must have "role" and "content" alone, got {shown(message)}')
        if message["role"] not in ROLES:
            raise RaloError(f"a message's role must be one of {', '.join(ROLES)}, got {shown(message['role'])}")
    return tuple({"role": m["role"], "content": text_of("content", m["content"])} for m in value)


def stop_of(value: Any) -> tuple[str, ...]:
    return tuple(text_of("stop", text) for text in (value if isinstance(value, list) else [value]))


def number_of(name: str, value: Any, kind: type, limits: Mapping[str, Any]) -> Any:
    """Like a flag of the same name."""
    low, high = limits["low"], limits["high"]
    fits = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise RaloError(f"{name} must be {what} from {low} to {high}, got {shown(value)}")
    return kind(value)


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
