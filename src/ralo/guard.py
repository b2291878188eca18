"""A mode never makes answers silently worse: now and then a token is also computed densely, and a mode that is too far
from that is switched off until it is near again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ralo.config import ModelConfig
from ralo.model import Model
from ralo.options import flag
from ralo.quality import divergence, log_probs
from ralo.sequence import Sequence as TextState

F32 = NDArray[np.float32]

FIRST_CHECK = 8  # tokens; the distance doubles up to `every` while nothing happens
FARTHEST = 100.0  # nats
WINDOW = 4  # checks that are averaged: one odd token is no reason


@dataclass(frozen=True)
class GuardOptions:
    """How closely modes are watched."""

    on: str = flag("on", "watch modes and switch off those that hurt", choices=("on", "off"), name="guard")
    every: int = flag(256, "tokens between two comparisons with dense", low=1, high=1 << 20)
    kl: float = flag(0.25, "mean KL from dense (nats) at which a mode is switched off", low=0, high=100)
    back: float = flag(0.5, "part of that below which it comes back", low=0, high=1)


@dataclass
class Watch:
    """One mode under the guard."""

    on: bool = True
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def mean(self) -> float:
        return sum(self.recent) / len(self.recent) if self.recent else 0.0


class Guard:
    """Runs a model's steps and compares some of them with dense ones. Its cost is part of the step it is paid in."""

    def __init__(self, model: Model, options: GuardOptions) -> None:
        self.model, self.options = model, options
        self.modes: dict[str, Watch] = {}
        self.counts = {"checks": 0.0, "top1": 0.0, "kl": 0.0, "cost_s": 0.0, "switched_off": 0.0, "switched_on": 0.0}
        self.events: list[str] = []
        self._wait = self._left = FIRST_CHECK
        self._tokens = self._compared = 0
        self.attach()

    def attach(self) -> None:
        """Takes over the slots as they are now. A mode that is off stays off until a comparison clears it."""
        names = {o.mode for s in self.model.slots for o in s.taken.values()}
        self.modes = {name: self.modes.get(name, Watch()) for name in sorted(names)}
        for name, watch in self.modes.items():
            watch.recent.clear()
            self._set(name, watch.on)
        self._soon()

    @property
    def cfg(self) -> ModelConfig:
        return self.model.cfg

    @property
    def bytes_read(self) -> int:
        return self.model.bytes_read

    @property
    def nonfinite(self) -> int:
        """Results that were not finite and were computed densely instead."""
        return sum(o.slot.nonfinite for s in self.model.slots for o in s.taken.values())

    def prefill(self, tokens: Sequence[int], seq: TextState) -> F32:
        return self.model.prefill(tokens, seq)

    def step(self, token: int, seq: TextState) -> F32:
        self._tokens += 1
        self._left -= 1
        if not self.modes or self.options.on == "off" or self._left > 0:
            return self.model.step(token, seq)
        self._wait = self._left = min(2 * self._wait, self.options.every)
        return self._check(token, seq)

    def _check(self, token: int, seq: TextState) -> F32:
        """One step with comparisons; what it returns is what the modes that are on afterwards make of it."""
        start, clock = len(seq), time.perf_counter()

        def run(dense: bool = False) -> F32:
            seq.trim(start)
            return self.model.step(token, seq, dense)

        target = log_probs(run(dense=True)[None])
        on = [name for name, watch in self.modes.items() if watch.on]
        off = [name for name in self.modes if name not in on]
        changed = [name for name in off if self._clears(name, self._alone(name, target, run))]
        for name in changed:
            self._switch(name, True)
        spent = time.perf_counter() - clock
        live = run(dense=not on)
        clock = time.perf_counter()
        if on and self._too_far(on, target, log_probs(live[None])):
            worst = max(on, key=lambda name: self._alone(name, target, run)) if len(on) > 1 else on[0]
            self._switch(worst, False)
            changed.append(worst)
        if changed:
            live = run(dense=not any(watch.on for watch in self.modes.values()))
        self.counts["checks"] += 1
        self.counts["cost_s"] += spent + time.perf_counter() - clock
        return live

    def _too_far(self, on: list[str], target: F32, ours: F32) -> bool:
        gap = _gap(target, ours)
        self._compared += 1
        self.counts["kl"] += gap
        self.counts["top1"] += float(target.argmax() == ours.argmax())
        for name in on:
            self.modes[name].recent.append(gap)
        watch = self.modes[on[0]]
        return len(watch.recent) > 1 and watch.mean() > self.options.kl

    def _alone(self, name: str, target: F32, run: Callable[..., F32]) -> float:
        """The gap with only this mode on."""
        for other in self.modes:
            self._set(other, other == name)
        gap = _gap(target, log_probs(run()[None]))
        for other, watch in self.modes.items():
            self._set(other, watch.on)
        return gap

    def _clears(self, name: str, gap: float) -> bool:
        """A mode that is off comes back after a full window of small gaps."""
        watch = self.modes[name]
        watch.recent.append(gap)
        return len(watch.recent) == WINDOW and watch.mean() < self.options.back * self.options.kl

    def _switch(self, name: str, on: bool) -> None:
        watch = self.modes[name]
        what = f"{name} {'on' if on else 'off'} at token {self._tokens}: KL {watch.mean():.3g}"
        self.events.append(what)
        self.counts["switched_on" if on else "switched_off"] += 1
        watch.on = on
        watch.recent.clear()
        self._set(name, on)
        self._soon()

    def _set(self, name: str, on: bool) -> None:
        for slots in self.model.slots:
            for occupant in slots.taken.values():
                if occupant.mode == name:
                    occupant.slot.on = on

    def _soon(self) -> None:
        self._wait = self._left = min(FIRST_CHECK, self.options.every)

    def metrics(self) -> dict[str, float]:
        compared = max(1, self._compared)
        return {
            **self.counts,
            "kl": self.counts["kl"] / compared,
            "top1": self.counts["top1"] / compared,
            "nonfinite": float(self.nonfinite),
            "modes_off": float(sum(not watch.on for watch in self.modes.values())),
        }


def _gap(target: F32, ours: F32) -> float:
    """KL from dense; a prediction that is not finite is as far as can be."""
    gap = float(divergence(target, ours)[0])
    return min(gap, FARTHEST) if np.isfinite(gap) else FARTHEST


METRICS = {
    "checks": "tokens that were also computed densely",
    "kl": "mean KL from dense of the modes that were on at those tokens, in nats",
    "top1": "share of those tokens where the most likely token is dense's",
    "cost_s": "seconds spent on comparisons",
    "switched_off": "times a mode was switched off",
    "switched_on": "times a mode came back",
    "nonfinite": "results that were not finite and were computed densely instead",
    "modes_off": "modes that are switched off now",
}
