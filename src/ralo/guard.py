"""A mode never makes answers silently worse: now and then a token is also computed densely, and a mode that is too far
from that is switched off until it is near again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ralo.layerwise import Layerwise
from ralo.model import FEW, Around, Model
from ralo.modes.base import Mode
from ralo.options import flag
from ralo.quality import divergence, log_probs
from ralo.sequence import Sequence as TextState

F32 = NDArray[np.float32]

FIRST_CHECK = 8  # tokens; the distance doubles up to `every` while nothing happens
FARTHEST = 100.0  # nats
WINDOW = 4  # good comparisons after which a mode comes back
TRIAL = 2  # tokens that it runs before each of them
MANY = 32  # comparisons that are averaged
PACED = 128  # tokens before the first comparison under a time budget, of which it takes a part


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

    limit: float  # KL at which it is too far from dense
    on: bool = True
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MANY))
    gap: float = 0.0  # KL summed over `compared` comparisons while it was on
    compared: int = 0

    def mean(self) -> float:
        return sum(self.recent) / len(self.recent) if self.recent else 0.0

    def too_far(self, limit: float) -> bool:
        """Tokens differ by as much as their mean: the fewer were compared, the farther off their mean may be."""
        n = len(self.recent)
        return n > 1 and self.mean() * (1 - n**-0.5) > limit


@dataclass(frozen=True)
class Comparison:
    """A token whose dense scores are still being computed, and what the modes made of it."""

    dense: Layerwise
    ours: F32  # (1, V), logarithms of probabilities


class Guard(Around):
    """Runs a model's steps and compares some of them with dense ones. Its cost is part of the step it is paid in; under
    a time budget it is spread over the steps that follow, a layer in each."""

    def __init__(self, model: Model, options: GuardOptions) -> None:
        super().__init__(model)
        self.options = options
        self.modes: dict[str, Watch] = {}
        self.counts = {"checks": 0.0, "top1": 0.0, "kl": 0.0, "cost_s": 0.0, "switched_off": 0.0, "switched_on": 0.0}
        self.events: list[str] = []
        self._wait = self._left = FIRST_CHECK
        self._tokens = self._compared = 0
        self._every, self._checked = options.every, False
        self._open: Comparison | None = None  # under a budget
        self._hurry = False  # the next one is not to be spread
        self.attach()

    def attach(self, modes: Sequence[Mode] = ()) -> None:
        """Takes over the slots as they are now. A mode that is off stays off until a comparison clears it."""
        names = {o.mode for s in self.model.slots for o in s.taken.values()}
        limits = {mode.name: mode.gap_limit for mode in modes if mode.gap_limit is not None}
        self._every = min([self.options.every, *(mode.gap_spacing for mode in modes if mode.gap_spacing)])
        self.modes = {name: self.modes.get(name, Watch(0.0)) for name in sorted(names)}
        for name, watch in self.modes.items():
            watch.limit = limits.get(name, self.options.kl)
            watch.recent.clear()
            self._set(name, watch.on)
        self._open, self._hurry = None, False  # what other modes made of a token says nothing of these
        self._soon()

    @property
    def nonfinite(self) -> int:
        """Results that were not finite and were computed densely instead."""
        return sum(o.slot.nonfinite for s in self.model.slots for o in s.taken.values())

    def prefill(self, tokens: Sequence[int], seq: TextState) -> F32:
        sure = not self.model.modes_in_prefill and seq.sure == len(seq)  # an answer before it may not be
        logits = self.model.prefill(tokens, seq)
        if sure:
            seq.sure = len(seq)
        return logits

    def step(self, token: int, seq: TextState) -> F32:
        self._tokens += 1
        self._go_on(seq)
        self._left -= 1
        due = bool(self.modes) and self.options.on == "on" and self._left <= 0
        spread = due and not self._hurry and self._spreads()
        self._checked = due and not spread
        if due:
            self._wait = self._left = min(2 * self._wait, self._every)
            self._hurry = False
        if self._checked:
            return self._check(token, seq)
        logits = self.model.step(token, seq)
        if spread:
            self._open = Comparison(Layerwise(self.model, seq, len(seq) - 1), log_probs(logits[None]))
        return logits

    def steps(self, tokens: Sequence[int], texts: Sequence[TextState], dense: Sequence[bool]) -> F32:
        """One more token each of several texts (`Model.steps`). Where a comparison is due one of them is compared."""
        watched = [i for i, d in enumerate(dense) if not d]
        self._tokens += len(watched)
        self._left -= len(watched)
        if not (watched and self.modes and self.options.on == "on" and self._left <= 0):
            return self.model.steps(tokens, texts, dense)
        self._wait = self._left = min(2 * self._wait, self._every)
        one = watched[int(self.counts["checks"]) % len(watched)]  # in turn
        out = np.empty((len(tokens), self.cfg.vocab), np.float32)
        out[one] = self._check(tokens[one], texts[one])
        if rest := [i for i in range(len(tokens)) if i != one]:
            out[rest] = self.model.steps([tokens[i] for i in rest], [texts[i] for i in rest], [dense[i] for i in rest])
        return out

    def took(self, seconds: float) -> None:
        if not self._checked:  # a comparison's time says nothing of the steps to come
            self.model.took(seconds)

    def _spreads(self) -> bool:
        """There is a budget to keep, and a comparison ends before the next."""
        on = all(watch.on for watch in self.modes.values())
        return on and self.model.pace is not None and self._every > self.cfg.n_layers

    def _go_on(self, seq: TextState) -> None:
        """One layer more of the comparison that is open, if there is one and its text goes on."""
        if self._open is None or not self._open.dense.holds_for(seq):
            self._open = None
            return
        clock = time.perf_counter()
        scores = self._open.dense.go_on()
        if scores is not None:
            self._close(self._open, log_probs(scores[None]), seq)
            self._open = None
        spent = time.perf_counter() - clock
        self.counts["cost_s"] += spent
        if self.model.pace:
            self.model.pace.aside(spent)

    def _close(self, comparison: Comparison, target: F32, seq: TextState) -> None:
        self.counts["checks"] += 1
        on = [name for name, watch in self.modes.items() if watch.on]
        if not on:  # switched off since
            return
        if not self._too_far(on, target, comparison.ours):
            if self._good(on):
                seq.sure = comparison.dense.at + 1
        elif len(on) > 1:
            self._left, self._hurry = 0, True  # which of them it is takes a comparison at once
        else:
            self._switch(on[0], False)
            self._repair(seq, len(seq))

    def _check(self, token: int, seq: TextState) -> F32:
        """One step with comparisons; what it returns is what the modes that are on afterwards make of it."""
        start, clock = len(seq), time.perf_counter()

        def run(dense: bool = False) -> F32:
            seq.trim(start)
            return self.model.step(token, seq, dense)

        target = log_probs(run(dense=True)[None])
        on = [name for name, watch in self.modes.items() if watch.on]
        off = [name for name in self.modes if name not in on]
        changed = [name for name in off if self._clears(name, self._trial(name, target, token, seq, start))]
        for name in changed:
            self._switch(name, True)
        spent = time.perf_counter() - clock
        live = run(dense=not on)
        clock = time.perf_counter()
        if on and self._too_far(on, target, log_probs(live[None])):
            worst = max(on, key=lambda name: self._alone(name, target, run)) if len(on) > 1 else on[0]
            self._switch(worst, False)
            changed.append(worst)
        some_on = any(watch.on for watch in self.modes.values())
        if changed and not some_on:
            self._repair(seq, start)
        if changed:
            live = run(dense=not some_on)
        elif self._good(on):
            seq.sure = len(seq)
        self.counts["checks"] += 1
        self.counts["cost_s"] += spent + time.perf_counter() - clock
        return live

    def _repair(self, seq: TextState, length: int) -> None:
        """Computes densely what modes have written since it was last found good: from here on the text is dense's."""
        tokens, first = seq.tokens[:length], min(seq.sure, length)
        seq.trim(first)
        for at in range(first, length, FEW):
            self.model.forward(tokens[at : min(at + FEW, length)], seq, dense=True)

    def _too_far(self, on: list[str], target: F32, ours: F32) -> bool:
        gap = _gap(target, ours)
        self._compared += 1
        self.counts["kl"] += gap
        self.counts["top1"] += float(target.argmax() == ours.argmax())
        watches = [self.modes[name] for name in on]
        for watch in watches:
            watch.recent.append(gap)
            watch.gap += gap
            watch.compared += 1
        limit = max(watch.limit for watch in watches)
        return any(watch.too_far(limit) for watch in watches)

    def _good(self, on: list[str]) -> bool:
        """The last comparison was within the limit: one that was not, and did not switch off yet, clears nothing."""
        return not on or self.modes[on[0]].recent[-1] <= max(self.modes[name].limit for name in on)

    def _alone(self, name: str, target: F32, run: Callable[..., F32]) -> float:
        """The gap with only this mode on."""
        for other in self.modes:
            self._set(other, other == name)
        gap = _gap(target, log_probs(run()[None]))
        for other, watch in self.modes.items():
            self._set(other, watch.on)
        return gap

    def _trial(self, name: str, target: F32, token: int, seq: TextState, start: int) -> float:
        """The gap of a mode that is off, after it ran the few tokens before `start`: at its first it may be dense."""
        first = max(0, start - TRIAL)
        tokens = [*seq.tokens[first:start], token]
        seq.trim(first)
        for other in self.modes:
            self._set(other, other == name)
        logits = [self.model.step(t, seq) for t in tokens][-1]
        for other, watch in self.modes.items():
            self._set(other, watch.on)
        seq.trim(first)
        if first < start:
            self.model.forward(tokens[:-1], seq, dense=True)
        return _gap(target, log_probs(logits[None]))

    def _clears(self, name: str, gap: float) -> bool:
        """A mode that is off comes back after a full window of small gaps."""
        watch = self.modes[name]
        watch.recent.append(gap)
        return len(watch.recent) >= WINDOW and _mean(list(watch.recent)[-WINDOW:]) < self.options.back * watch.limit

    def _switch(self, name: str, on: bool) -> None:
        watch = self.modes[name]
        what = f"{name} {'on' if on else 'off'} at token {self._tokens}: KL {watch.mean():.3g}"
        self.events.append(what)
        self.counts["switched_on" if on else "switched_off"] += 1
        watch.on = on
        watch.recent.clear()
        self._set(name, on)
        if on:
            self._soon()
        else:
            self._wait = self._left = self._every  # it has shown what it does: there is no hurry to look again

    def _set(self, name: str, on: bool) -> None:
        for slots in self.model.slots:
            for occupant in slots.taken.values():
                if occupant.mode == name:
                    occupant.slot.on = on

    def _soon(self) -> None:
        self._wait = self._left = min(PACED if self.model.pace else FIRST_CHECK, self._every)

    def quality_gap(self, name: str) -> float:
        """exp(KL from dense) - 1, mean over the comparisons while the mode was on: so much would the perplexity of
        dense's own text rise."""
        watch = self.modes[name]
        return float(np.expm1(watch.gap / watch.compared)) if watch.compared else 0.0

    def metrics(self) -> dict[str, float]:
        compared = max(1, self._compared)
        return {
            **self.counts,
            "kl": self.counts["kl"] / compared,
            "top1": self.counts["top1"] / compared,
            "nonfinite": float(self.nonfinite),
            "modes_off": float(sum(not watch.on for watch in self.modes.values())),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
