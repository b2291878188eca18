"""What an operator sees: Prometheus metrics, and the live figures of the page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ralo import metrics
from ralo.engine import Engine
from ralo.lm import LM

FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
SLOW = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
RECENT_S = 5.0  # over which the live figures are taken
EVENTS = 20  # of the guard, the latest


class Watch:
    def __init__(self, lm: LM, engine: Engine) -> None:
        self.lm, self.engine = lm, engine
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "ralo_requests", "requests that were answered", ["path", "status"], registry=self._registry
        )
        seconds = [
            ("request", "from a request to its last token", SLOW),
            ("first_token", "from a request to its first token", FAST),
            ("between_tokens", "between two parts of an answer, most of them one token", FAST),
        ]
        self.request_s, self.first_s, self.between_s = (
            Histogram(f"ralo_{name}_seconds", what, buckets=buckets, registry=self._registry)
            for name, what, buckets in seconds
        )
        self._registry.register(metrics.Collector(lm.model, lm.guard))
        self._registry.register(_Totals(engine))
        self._recent: deque[tuple[float, int, int, int]] = deque()  # time, tokens, steps, bytes

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def live(self) -> dict[str, Any]:
        """What the page shows, of the last seconds."""
        totals, engine, lm = self.engine.totals, self.engine, self.lm
        now = (time.perf_counter(), totals.new_tokens, totals.steps, totals.decode_bytes)
        self._recent.append(now)
        while now[0] - self._recent[0][0] > RECENT_S:
            self._recent.popleft()
        seconds, tokens, steps, read = (b - a for a, b in zip(self._recent[0], now, strict=True))
        named = {name: value for name, value in lm.metrics().items() if "." in name}
        modes = {name: {"on": w.on, "gap": lm.guard.quality_gap(name)} for name, w in lm.guard.modes.items()}
        return {
            "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
            "bytes_per_token": read / steps if steps else 0.0,
            "running": engine.running,
            "waiting": engine.waiting,
            "cache_bytes": engine.cache_bytes,
            "tokens": {"prompt": totals.prompt_tokens, "cached": totals.cached_tokens, "new": totals.new_tokens},
            "modes": modes,
            "metrics": named,
            "layers": lm.layer_metrics() if lm.model.has_modes else [],
            "events": lm.guard.events[-EVENTS:],
        }


class _Totals:
    """The engine's counts, for a registry."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Any]:
        engine, totals = self.engine, self.engine.totals
        yield GaugeMetricFamily("ralo_waiting", "requests that wait or whose prompt is on its way", engine.waiting)
        yield GaugeMetricFamily("ralo_running", "answers that are being made", engine.running)
        yield GaugeMetricFamily("ralo_cache_bytes", "keys, values and states of all texts", engine.cache_bytes)
        yield CounterMetricFamily("ralo_prompt_tokens", "tokens of prompts", totals.prompt_tokens)
        yield CounterMetricFamily("ralo_cached_tokens", "those of them that were known already", totals.cached_tokens)
        yield CounterMetricFamily("ralo_new_tokens", "tokens of answers", totals.new_tokens)
        yield CounterMetricFamily("ralo_passes", "decode passes over the weights", totals.passes)
        yield CounterMetricFamily("ralo_decode_seconds", "seconds of those passes", totals.decode_s)
        yield CounterMetricFamily("ralo_decode_bytes", "weights, keys and values they read", totals.decode_bytes)
