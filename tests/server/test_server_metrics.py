"""/metrics as Prometheus reads it: queue, latencies, tokens, modes by layer; counts that only grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import Server, serving

parser = pytest.importorskip("prometheus_client.parser", reason="Prometheus text is read by prometheus_client")

GAUGES = {"ralo_waiting", "ralo_running", "ralo_cache_bytes"}
COUNTERS = {"ralo_requests", "ralo_prompt_tokens", "ralo_cached_tokens", "ralo_new_tokens"}
COUNTERS |= {"ralo_passes", "ralo_decode_seconds", "ralo_decode_bytes"}
HISTOGRAMS = {"ralo_request_seconds", "ralo_first_token_seconds", "ralo_between_tokens_seconds"}


def families(server: Server) -> dict[str, Any]:
    answer = server.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in parser.text_string_to_metric_families(answer.text)}


def values(found: dict[str, Any], *names: str) -> dict[Any, float]:
    every = (sample for name in names for sample in found[name].samples)
    return {(s.name, *sorted(s.labels.items())): s.value for s in every if not s.name.endswith("_created")}


@pytest.fixture(scope="module")
def moded(chatting: Path) -> Any:
    with serving("-m", chatting, "--threads", 1, "--kwta-k", "0.5") as running:
        yield running


def test_kinds(moded: Server) -> None:
    found = families(moded)
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        assert {name: found[name].type for name in names} == dict.fromkeys(names, kind)
        assert all(found[name].documentation for name in names)


def test_counts_grow_by_what_was_asked(moded: Server) -> None:
    before = families(moded)
    asked = {"prompt": "the house " * 40, "max_tokens": 30, "temperature": 0, "n": 2}
    used = [moded.post("/v1/completions", asked).json()["usage"] for _ in range(3)]
    moded.post("/v1/completions", {"prompt": ""})
    after = families(moded)
    old, new = (values(found, *COUNTERS, *HISTOGRAMS) for found in (before, after))
    assert all(new[name] >= old[name] for name in old)

    def grown(name: str, **labels: str) -> float:
        key = (name, *sorted(labels.items()))
        return new.get(key, 0) - old.get(key, 0)

    assert grown("ralo_new_tokens_total") == 180 == sum(u["completion_tokens"] for u in used)
    assert grown("ralo_prompt_tokens_total") == sum(u["prompt_tokens"] for u in used)
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in used)
    assert grown("ralo_cached_tokens_total") == cached > 0
    assert grown("ralo_passes_total") == 3 * 29
    assert grown("ralo_decode_bytes_total") > 0 and grown("ralo_decode_seconds_total") > 0
    assert grown("ralo_requests_total", path="/v1/completions", status="200") == 3
    assert grown("ralo_requests_total", path="/v1/completions", status="400") == 1
    assert grown("ralo_request_seconds_count") == grown("ralo_first_token_seconds_count") == 3
    assert grown("ralo_between_tokens_seconds_count") == 3 * 28  # the first pass makes two tokens
    assert values(after, *GAUGES)[("ralo_running",)] == values(after, *GAUGES)[("ralo_waiting",)] == 0
    assert values(after, *GAUGES)[("ralo_cache_bytes",)] > 0


def test_modes_by_layer(moded: Server) -> None:
    moded.post("/v1/completions", {"prompt": "the house", "max_tokens": 30, "temperature": 0})
    found = families(moded)
    skipped = {s.labels["layer"]: s.value for s in found["ralo_kwta_bytes_skipped"].samples}
    assert set(skipped) == {"all", "0", "1"} and skipped["all"] == skipped["0"] + skipped["1"] > 0
    kept = [s.value for s in found["ralo_kwta_keep_ratio"].samples]
    assert all(0.3 < share < 0.9 for share in kept)
    assert found["ralo_guard_checks"].samples[0].value > 0
    live = moded.live()
    assert len(live["layers"]) == 2 and "kwta" in live["modes"] and live["metrics"]["kwta.bytes_skipped"] > 0


def test_paths_that_do_not_exist_are_one_label(moded: Server) -> None:
    for path in ("/nowhere", "/v1/models/nothing", '/"}', "/%0a", "/v1/models/" + "x" * 500, "//", "/metrics/x"):
        moded.get(path)
    labels = {s.labels["path"] for s in families(moded)["ralo_requests"].samples}
    assert labels <= {"other", "/v1/completions", "/metrics", "/live"} and "other" in labels


def test_dense_has_no_metrics_of_modes(server: Server) -> None:
    found = families(server)
    assert set(found) >= GAUGES | COUNTERS | HISTOGRAMS
    assert not any(name.startswith("ralo_kwta") for name in found)
