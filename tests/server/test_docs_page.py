"""The API's page: every route and field, nothing that is not escaped, no other server."""

from __future__ import annotations

import re
from importlib import resources

import pytest

pytest.importorskip("fastapi")

import ralo
from ralo.drawing import DARK, LIGHT
from ralo.metrics import NAMES
from ralo.server.app import PAGES, create_app
from ralo.server.docs import docs_page
from ralo.server.limits import OPEN
from ralo.server.schema import UNSUPPORTED, ChatAsked, CompletionAsked

FOLDER = resources.files("ralo.server") / "page"


@pytest.fixture(scope="module")
def text() -> str:
    return docs_page(create_app(ralo.load("mini")).openapi())


def test_routes_and_fields_are_listed(text: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/live"):
        assert f"</span> {path}</code>" in text
    for name in [*CompletionAsked.model_fields, *ChatAsked.model_fields, *UNSUPPORTED]:
        assert f"<dt><code>{name}</code></dt>" in text, name
    assert "number (0 to 2)" in text and "at most 256 characters" in text and "too many requests wait already" in text
    assert "422" not in text, "the server answers 400"


def test_links_lead_somewhere(text: str) -> None:
    places = set(re.findall(r'id="([^"]+)"', text))
    links = re.findall(r'href="([^"]+)"', text)
    assert {link[1:] for link in links if link.startswith("#")} <= places
    assert {link for link in links if not link.startswith("#")} <= {*OPEN, "/"}


def test_everything_is_escaped() -> None:
    bad = '<script>"&'
    schema = {"type": bad, "description": bad}
    body = {"content": {"application/json": {"schema": {"properties": {bad: schema, "b": {"enum": [bad]}}}}}}
    route = {"summary": bad, "parameters": [{"name": bad, "schema": schema}], "requestBody": body}
    route["responses"] = {"400": {"description": bad}}
    spec = {"info": {"title": bad, "version": bad, "description": bad}, "paths": {f"/{bad}": {bad: route}}}
    assert bad not in docs_page(spec) and "<script" not in docs_page(spec)


def test_pages_ship_and_are_open() -> None:
    assert {name for name, _ in PAGES.values()} == {file.name for file in FOLDER.iterdir()}
    assert {*PAGES, "/docs"} <= set(OPEN)
    for name, _ in PAGES.values():
        found = re.findall(r"https?://[^\"' )]+", (FOLDER / name).read_text(encoding="utf-8"))
        assert set(found) <= {"http://www.w3.org/2000/svg"}, "a name, not an address"


def test_colours_are_the_drawings() -> None:
    themes = re.findall(r":root \{(.+?)\}", (FOLDER / "page.css").read_text(encoding="utf-8"), re.S)
    for theme, colours in zip(themes, (LIGHT, DARK), strict=True):
        used = dict(re.findall(r"--(\w+): (#\w+)", theme))
        assert used == {kind: colours[kind] for kind in used} and len(used) > 6


def test_shares_are_metrics() -> None:
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    names = re.findall(r'^  "(\w+\.\w+)":', script, re.M)
    assert len(names) == 5 and set(names) <= set(NAMES)
