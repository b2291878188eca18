"""The API as a page that needs no other server: routes, fields and refusals, from the schema that the routes have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ralo.drawing import escape
from ralo.server.schema import UNSUPPORTED

Schema = dict[str, Any]
NOT_SENT = "422"  # what FastAPI says of every route that takes a body; ralo answers 400
EXAMPLE = """curl http://127.0.0.1:8080/v1/chat/completions \\
  -H 'Content-Type: application/json' -H "Authorization: Bearer $RALO_API_KEY" \\
  -d '{"messages": [{"role": "user", "content": "Once upon a time"}], "stream": true}'"""


def docs_page(spec: Schema) -> str:
    """`spec`: as OpenAPI has it."""
    info, schemas = spec["info"], spec.get("components", {}).get("schemas", {})
    routes = [(m.upper(), path, route) for path, methods in spec["paths"].items() for m, route in methods.items()]
    listed = "".join(f"<li>{_call(m, path, _anchor(m, path))}</li>" for m, path, _ in routes)
    shown = "\n".join(_route(m, path, route, schemas) for m, path, route in routes)
    objects = "\n".join(_object(name, schemas[name]) for name in _inner(routes, schemas))
    refused = _fields((name, f"{escape(what)}: not supported") for name, what in sorted(UNSUPPORTED.items()))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(info["title"])}: the API</title>
<link rel="icon" href="/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/page.css">
</head>
<body>
<main class="docs">
<h1>{escape(info["title"])} {escape(info["version"])}: the API</h1>
<p>{escape(info.get("description", ""))} <a href="/">Chat</a> · <a href="/openapi.json">The same as OpenAPI JSON</a></p>
<nav aria-label="Routes"><ul class="plain">{listed}</ul></nav>
<pre>{_lines(EXAMPLE)}</pre>
<p class="note">The Authorization header is needed where the server was started with a key (RALO_API_KEY).
In square brackets: what is taken where a field is left out.</p>
{shown}
{objects}
<section id="not-supported">
<h2>Fields that are refused</h2>
<p class="note">They would change an answer and are not built; values that ask for nothing are taken.</p>
{refused}
</section>
</main>
</body>
</html>
"""


def _route(method: str, path: str, route: Schema, schemas: Schema) -> str:
    parts = [f'<section id="{_anchor(method, path)}">', f"<h2>{_call(method, path)}</h2>"]
    parts.append(f"<p>{escape(route.get('description') or route.get('summary', ''))}</p>")
    if given := route.get("parameters"):
        parts.append("<h3>Parameters</h3>")
        parts.append(_fields(_field(p["name"], p["schema"], p.get("required", False)) for p in given))
    if body := _body(route):
        parts += ["<h3>Fields of the body</h3>", _properties(_resolved(body, schemas))]
    refusals = [(code, r) for code, r in sorted(route["responses"].items()) if code >= "400" and code != NOT_SENT]
    if refusals:
        shape = '<p class="note">Each is an <a href="#object-Error">Error</a>.</p>'
        parts += ["<h3>Refusals</h3>", shape, _fields((code, escape(r["description"])) for code, r in refusals)]
    return "\n".join([*parts, "</section>"])


def _object(name: str, schema: Schema) -> str:
    about = f"<p>{escape(schema['description'])}</p>" if schema.get("description") else ""
    return f'<section id="object-{escape(name)}">\n<h2>{escape(name)}</h2>\n{about}\n{_properties(schema)}\n</section>'


def _inner(routes: list[tuple[str, str, Schema]], schemas: Schema) -> list[str]:
    """Names of the objects that fields and refusals are made of, in the order they are met."""
    bodies = [_resolved(body, schemas) for *_, route in routes if (body := _body(route))]
    found: dict[str, None] = {}
    waiting: list[Any] = [*bodies, *({"$ref": f"#/{name}"} for name in ("Error",) if name in schemas)]
    while waiting:
        for name in _references(waiting.pop(0)):
            if name not in found:
                found[name] = None
                waiting.append(schemas[name])
    return list(found)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield _name(value)
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _properties(schema: Schema) -> str:
    required, fields = schema.get("required", ()), schema.get("properties", {})
    names = sorted(fields, key=lambda name: name not in required)
    return _fields(_field(name, fields[name], name in required) for name in names)


def _field(name: str, schema: Schema, required: bool) -> tuple[str, str]:
    about = f"<br>{escape(schema['description'])}" if schema.get("description") else ""
    must = ' <span class="note">(required)</span>' if required else ""
    return name, f"{_kind(schema)}{must}{about}"


def _fields(rows: Iterable[tuple[str, str]]) -> str:
    """Names, and HTML that says what they are."""
    inner = "\n".join(f"<div><dt><code>{escape(name)}</code></dt><dd>{what}</dd></div>" for name, what in rows)
    return f'<dl class="fieldlist">\n{inner}\n</dl>'


def _kind(schema: Schema) -> str:
    """A type in words, as HTML; that a field may be null says no more than that it may be left out."""
    if "$ref" in schema:
        name = escape(_name(schema))
        return f'<a href="#object-{name}">{name}</a>'
    if choices := schema.get("anyOf"):
        return "<br>or ".join(_kind(choice) for choice in choices if choice.get("type") != "null")
    if "const" in schema or "enum" in schema:
        return ", ".join(f"<code>{escape(str(v))}</code>" for v in schema.get("enum") or [schema["const"]])
    if schema.get("type") == "array":
        return f"list{_limits(schema, 'minItems', 'maxItems')} of {_kind(schema.get('items', {}))}"
    limits = _limits(schema, "minLength", "maxLength", " characters") or _limits(schema, "minimum", "maximum")
    return escape(str(schema.get("type", "anything"))) + limits


def _limits(schema: Schema, low: str, high: str, what: str = "") -> str:
    least, most = schema.get(low), schema.get(high)
    if most is None and "exclusiveMaximum" in schema and high == "maximum":
        most = schema["exclusiveMaximum"] - 1  # of whole numbers, the only ones that have it
    if most is None:
        return f" (at least {_number(least)}{what})" if least else ""
    return f" ({_number(least)} to {_number(most)}{what})" if least is not None else f" (at most {_number(most)}{what})"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) >= 1e15 else f"{value:,.10g}"


def _body(route: Schema) -> Schema:
    content = route.get("requestBody", {}).get("content", {})
    schema: Schema = content.get("application/json", {}).get("schema", {})
    return schema


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    known: Schema = schemas[_name(schema)] if "$ref" in schema else schema
    return known


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _anchor(method: str, path: str) -> str:
    return escape("".join(c if c.isalnum() else "-" for c in f"{method.lower()}{path}"))


def _call(method: str, path: str, anchor: str = "") -> str:
    shown = f'<a href="#{anchor}">{escape(path)}</a>' if anchor else escape(path)
    return f'<code><span class="method">{escape(method)}</span> {shown}</code>'


def _lines(text: str) -> str:
    return "\n".join(escape(line) for line in text.split("\n"))
