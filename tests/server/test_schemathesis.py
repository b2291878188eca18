"""The description at /openapi.json: what it allows is answered as it says, and nothing of it is a server's error."""

from __future__ import annotations

from typing import Any

import pytest
from serving import Server

schemathesis = pytest.importorskip("schemathesis", reason="requests are made from the schema by schemathesis")
hypothesis = pytest.importorskip("hypothesis", reason="schemathesis needs it")

EXAMPLES = 40
ROUTES = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/health", "/live", "/metrics"}


def test_answers_are_as_described(server: Server) -> None:
    described = schemathesis.openapi.from_url(server.url + "/openapi.json")
    checks = schemathesis.checks
    wanted = [checks.not_a_server_error, checks.status_code_conformance]
    wanted += [checks.content_type_conformance, checks.response_schema_conformance]
    seen = {}
    for found in described.get_all_operations():
        operation = found.ok()
        seen[operation.path] = check(operation, wanted)
    assert set(seen) >= ROUTES
    assert all(200 in codes for codes in seen.values()), seen
    assert 400 in seen["/v1/completions"] and 400 in seen["/v1/chat/completions"]


def check(operation: Any, wanted: list[Any]) -> set[int]:
    """The statuses of its answers to requests of all kinds."""
    codes = set()
    modes = schemathesis.GenerationMode

    @hypothesis.given(
        case=operation.as_strategy(generation_mode=modes.POSITIVE)
        | operation.as_strategy(generation_mode=modes.NEGATIVE)
    )
    @hypothesis.settings(
        max_examples=EXAMPLES if operation.method == "post" else 4,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def run(case: Any) -> None:
        if isinstance(case.body, dict):  # valid ones must stay cheap
            case.body = case.body | {"max_tokens": 1, "max_completion_tokens": 1}
        if isinstance(case.body, dict) and case.body.get("model"):
            case.body["model"] = "chatting"
        if case.path_parameters and case.path_parameters.get("model", "").isalnum():
            case.path_parameters["model"] = "chatting"
        codes.add(case.call_and_validate(checks=wanted).status_code)

    run()
    return codes


def test_every_route_says_what_it_answers(server: Server) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert set(paths) >= ROUTES
    for path, methods in paths.items():
        for said in methods.values():
            assert "422" not in said["responses"], path  # refusals have OpenAI's shape, not FastAPI's
            whole = said["responses"]["200"]["content"]
            assert any(kind.get("schema") for kind in whole.values()), path
            error = said["responses"]["4XX"]["content"]["application/json"]["schema"]
            assert error == {"$ref": "#/components/schemas/Error"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert set(paths[path]["post"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert set(paths[path]["post"]["responses"]) >= {"400", "401", "403", "404", "408", "413", "429", "503"}
