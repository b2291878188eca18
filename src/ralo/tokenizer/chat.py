"""Turns messages into the prompt that the model's own chat template asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError

from ralo.errors import RaloError
from ralo.tokenizer.guard import one_line
from ralo.tokenizer.sandbox import Sandbox, percent_specs, refuse_wide

MAX_TEMPLATE = 256 << 10  # characters
MAX_PROMPT = 8 << 20


def render(template: str, *, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
    """The prompt; whatever goes wrong in the template comes out as one line."""
    if not all(isinstance(message, Mapping) for message in messages):
        raise RaloError("each chat message must be an object with a role and a content")
    if len(template) > MAX_TEMPLATE:
        raise RaloError(f"the model's chat template is longer than {MAX_TEMPLATE >> 10} KB, which is refused")
    known = {name: value for name, value in names.items() if value is not None}
    plain = [dict(message) for message in messages]
    try:
        return bounded_text(template, messages=plain, tools=None, documents=None, **known)
    except Exception as error:
        raise RaloError(f"the model's chat template failed: {one_line(error)}") from None


def bounded_text(template: str, **names: Any) -> str:
    code = compiled(template)
    sandbox = new_sandbox()  # its clock starts here
    program = Template.from_code(sandbox, code, sandbox.make_globals(None))
    pieces, length = [], 0
    for piece in program.generate(**names):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_PROMPT:
            raise TemplateError(f"the prompt is longer than {MAX_PROMPT >> 20} MB")
    return "".join(pieces)


@lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    return new_sandbox().metered_code(template)


def new_sandbox() -> Sandbox:
    """The sandbox with what chat templates expect to find in it."""
    sandbox = Sandbox()
    sandbox.filters["tojson"] = sandbox.bounded("tojson", to_json)
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = now
    return sandbox


def refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def now(pattern: str) -> str:
    refuse_wide(percent_specs(pattern))
    return datetime.now().strftime(pattern)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: a prompt is not a web page, so nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
