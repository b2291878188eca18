"""Memory: ralo's own, whatever else this process holds, beside what weights and cache account for."""

from __future__ import annotations

import numpy as np
import pytest

import ralo
from ralo.commands.explain import cache_bytes
from ralo.errors import RaloError
from ralo.footprint import footprints

SHAPE = "random:D=64,L=2,F=128,H=4,K=2,V=256"


def test_is_that_of_a_process_of_its_own() -> None:
    ballast = np.ones(1 << 26)  # half a GB in this process
    phases = [("decode", 0, 2), ("decode", 600, 2), ("prefill", 0, 8)]
    small, large, prompt = footprints(SHAPE, "int8", "f16", 1, phases)
    assert ballast.nbytes > 5e8
    lm = ralo.load(SHAPE)
    for found in (small, large, prompt):
        assert 5 < found["rss_mb"] < 200 and found["rss_ok"] is True
        assert found["weights_mb"] == lm.model.weights.nbytes / 1e6
        assert found["rss_limit_mb"] == pytest.approx(1.1 * (found["weights_mb"] + found["kv_mb"] + 100))
    assert small["kv_mb"] == 256 * cache_bytes(lm) / 1e6  # positions that a cache begins with
    assert large["kv_mb"] == prompt["kv_mb"] >= 602 * cache_bytes(lm) / 1e6


def test_too_much_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ralo.footprint.REST_MB", 1)
    [found] = footprints(SHAPE, "int8", "f16", 1, [("decode", 0, 2)])
    assert found["rss_ok"] is False


def test_a_process_that_fails_says_why_in_one_line() -> None:
    with pytest.raises(RaloError, match=r"^the process that measures ralo's memory failed: .*nowhere: no such model"):
        footprints("nowhere", "int8", "f16", 1, [("decode", 0, 2)])
