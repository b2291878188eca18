"""What the modes and the guard counted, by the names of the specification: in all, per layer, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ralo import guard as guard_module
from ralo.errors import RaloError
from ralo.guard import Guard
from ralo.model import Model
from ralo.modes import MODES
from ralo.modes.base import LayerSlots

WORDS = {mode.name: mode.metric or mode.name for mode in MODES.values()}
NAMES = {f"{WORDS[mode.name]}.{name}": what for mode in MODES.values() for name, what in mode.metrics.items()}
NAMES |= {f"guard.{name}": what for name, what in guard_module.METRICS.items()}


def summed(model: Model, guard: Guard) -> dict[str, float]:
    """Every metric of the modes that are in the slots, and the guard's."""
    if not model.has_modes:
        return {}
    out = _of(model.slots)
    for name, mode in MODES.items():
        if name in guard.modes and "quality_gap" in mode.metrics:
            out[f"{WORDS[name]}.quality_gap"] = guard.quality_gap(name)
        if name in guard.modes and model.pace and "budget_ms_used" in mode.metrics:
            out[f"{WORDS[name]}.budget_ms_used"] = model.pace.mean_ms
            out[f"{WORDS[name]}.level"] = model.pace.mean_level
    return out | {f"guard.{name}": value for name, value in guard.metrics().items()}


def per_layer(model: Model) -> list[dict[str, float]]:
    """The modes' metrics, layer by layer."""
    return [_of([slots]) for slots in model.slots]


def _of(layers: list[LayerSlots]) -> dict[str, float]:
    counts: dict[str, Counter[str]] = {}
    for slots in layers:
        for occupant in slots.taken.values():
            counts.setdefault(occupant.mode, Counter()).update(MODES[occupant.mode].measure(occupant.slot))
    return {f"{WORDS[m]}.{name}": float(v) for m, sums in counts.items() for name, v in MODES[m].totals(sums).items()}


class Collector:
    """All metrics for a Prometheus registry, sums and layers told apart by a label."""

    def __init__(self, model: Model, guard: Guard) -> None:
        self.model, self.guard = model, guard

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        layers = per_layer(self.model)
        for name, value in summed(self.model, self.guard).items():
            family = GaugeMetricFamily("ralo_" + name.replace(".", "_"), NAMES[name], labels=["layer"])
            family.add_metric(["all"], value)
            for i, values in enumerate(layers):
                if name in values:
                    family.add_metric([str(i)], values[name])
            yield family


def prometheus(model: Model, guard: Guard) -> str:
    """All metrics in Prometheus' text form."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise RaloError("Prometheus text needs prometheus-client: pip install 'ralo[metrics]'") from None
    registry = CollectorRegistry()
    registry.register(Collector(model, guard))
    return generate_latest(registry).decode()
