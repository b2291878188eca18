"""The search: what is on as a whole, then the dial at every place, then a check on text that neither has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ralo.matrix import HALVED
from ralo.modes import KWTA, Event, Mode
from ralo.modes.base import TARGETS, ZEROS, Override
from ralo.modes.kwta import few_are_likely
from ralo.modes.made import MadeMode
from ralo.modes.mix import HEAD
from ralo.tune.frames import FAR, HEAD_HALVED, Frame, frames, joined
from ralo.tune.record import OutOfTime
from ralo.tune.sites import Sites, modes_of
from ralo.tune.trial import UNSEEN, Gain, Loss, Trials, key_of
from ralo.weights import PLACES

MARGIN = 0.9  # of the budget that is aimed at: other text may come out a little worse
WHOLE = 0.4  # of the budget that a mode which is on as a whole may take
STEPS = 6  # of the dial
PERCENT_OF_KL = 100  # points of perplexity that a nat costs, to begin with
CLOSE = 0.93  # of the aim, from which on it is met
FARTHEST = 4  # times more or less in a step
CHECKS, BACK = 4, 0.97  # of one dial; beside what a check that does not hold says, where the next one aims
TOGETHER = "all together"
WORTH = 1.01  # times as fast, from which one plan is better than another
NEAR, FINALISTS = 0.85, 3  # of the best one's speed, and how many: what is compared at the end
ALIKE = 0.97  # of the fastest one's speed, from which on a minute decides which is faster

Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A plan that was tried."""

    name: str
    modes: tuple[Mode, ...]
    loss: Loss
    gains: tuple[Gain, ...]
    goal: str = "latency"

    @property
    def score(self) -> float:
        """Times better than dense at what is asked for."""
        return self.speed if self.goal != "memory" else self.gains[0].dense_nbytes / self.gains[0].nbytes

    @property
    def speed(self) -> float:
        """Geometric mean over the contexts."""
        return math.exp(sum(math.log(g.speedup) for g in self.gains) / len(self.gains))


@dataclass
class Search:
    trials: Trials
    max_dppl: float
    dials: dict[str, Sites]  # joint first; the others are what one mode alone can do
    made: Sequence[Mode] = ()
    always: Sequence[Mode] = ()  # what every plan has: the precision, where one is asked for
    better: Callable[[Found], None] = lambda found: None  # told of every plan that holds and is the fastest so far
    say: Say = lambda what: None
    tried: list[Found] = field(default_factory=list)
    best: Found | None = None
    cut: bool = False  # whether the time was up before everything was tried

    def run(self) -> Found | None:
        """The fastest plan that holds, or None; where the time is up, of those that were tried."""
        try:
            frame = self._frame()
            for name, sites in self.dials.items():
                self._dial(name, sites, frame if name == TOGETHER else ())
            self._on_top(frame)
            self._drafts(frame)
            self._compare()
        except OutOfTime:
            self.cut = True
        return self.best

    def _frame(self) -> tuple[Mode, ...]:
        """Modes that are on as a whole: each alone, then the best ones together."""
        trials, alone = self.trials, []
        without = self._try("mix", self.always, quick=True) if self.always else None
        score, lost = (without.score, without.loss.delta_ppl_pct) if without else (1.0, 0.0)
        halved = trials.lm.quant == HALVED and trials.goal != "memory"
        for f in frames(trials.lm.model.cfg, trials.longest, self.made, self._halves_head(), halved):
            modes = joined(self.always, f.modes)
            if modes is not None:
                self.say(f"trying {f.name}")
                alone.append((f, self._try(f.name, modes, quick=True)))
        chosen: tuple[Mode, ...] = ()
        kinds = set[str]()
        for f, found in sorted(self._in_turns(alone), key=lambda pair: -pair[1].score):
            both = joined(chosen, f.modes)
            if both is None or f.kind in kinds or not self._affordable(found, lost):
                continue
            tried = self._try(f"{f.name} and others", joined(self.always, both) or (), quick=True) if chosen else found
            if tried.score > WORTH * score:
                chosen, score = both, tried.score
                kinds.add(f.kind)
        return chosen

    def _halves_head(self) -> bool:
        """Whether the head by halves is worth a try."""
        return self.trials.goal != "memory" and few_are_likely(self.trials.lm.model.weights.head)

    def _in_turns(self, alone: Sequence[tuple[Frame, Found]]) -> list[tuple[Frame, Found]]:
        """Of each kind one is taken: where that takes little time they are measured once more, in turns."""
        out = list(alone)
        kinds = sorted({f.kind for f, _ in alone}) if self.trials.longest <= FAR else []
        for kind in kinds:
            rivals = [i for i, (f, _) in enumerate(out) if f.kind == kind]
            if len(rivals) < 2:
                continue
            self.say(f"comparing {' and '.join(out[i][0].name for i in rivals)}")
            for i, gains in zip(rivals, self.trials.compare([out[i][1].modes for i in rivals]), strict=True):
                out[i] = (out[i][0], replace(out[i][1], gains=tuple(gains)))
        return out

    def _affordable(self, found: Found, lost: float) -> bool:
        """Of the budget it takes a part; `lost`: what is given up without it."""
        most = lost + max(WHOLE * self.max_dppl, UNSEEN)
        return found.loss.fits(self.max_dppl) and found.loss.delta_ppl_pct <= most

    def _dial(self, name: str, sites: Sites, frame: Sequence[Mode]) -> None:
        """Dialled as far as the budget goes, then checked, and dialled back where the check does not hold."""
        neurons = self.trials.lm.model.cfg.act in ZEROS
        made = {place for mode in frame if isinstance(mode, MadeMode) for place in TARGETS[mode.target]}
        if any(isinstance(mode, KWTA) and mode.head == "on" for mode in frame):
            made.add(HEAD)
        sites = sites.only({*PLACES, HEAD} - made)
        aim = MARGIN * self.max_dppl
        for _ in range(CHECKS):
            modes = self._dialled(name, sites, frame, neurons, aim)
            if not modes:  # none at all is dense, which is no faster than itself
                return
            found = next((found for found in self.tried if found.modes == modes), None)
            if found is None:
                self.say(f"checking {name} dialled to {aim:.2f} %")
                found = self._try(name, modes)
            if found.loss.fits(self.max_dppl):
                return
            aim *= BACK / found.loss.share(self.max_dppl)

    def _dialled(
        self, name: str, sites: Sites, frame: Sequence[Mode], neurons: bool, aim: float
    ) -> tuple[Mode, ...] | None:
        """Perplexity rises about as fast as the costs that were measured place by place: a few steps find the rest."""
        best, most, loss = None, -math.inf, aim / PERCENT_OF_KL
        low, high = 0.0, math.inf  # costs that are known to hold, and not to
        for step in range(STEPS):
            self.say(f"dialling {name}, step {step + 1} of {STEPS}")
            modes = joined(frame, self._modes(sites, loss, neurons))
            if modes is None:
                return None
            delta = self.trials.delta(modes)
            if most < delta <= aim:
                best, most = modes, delta
            if CLOSE * aim <= delta <= aim:
                break
            low, high = (max(low, loss), high) if delta <= aim else (low, min(high, loss))
            straight = loss * min(FARTHEST, max(1 / FARTHEST, 0.5 * (1 + CLOSE) * aim / max(delta, 1e-3)))
            loss = straight if low < straight < high else (low * high) ** 0.5
        return best

    @staticmethod
    def _modes(sites: Sites, loss: float, neurons: bool) -> tuple[Mode, ...]:
        """What the dial says; neurons that are silent are for the frame to skip."""
        found = modes_of(sites.within(loss), sites.own, sites.mix)
        return tuple(replace(m, gate="off") if neurons and isinstance(m, KWTA) else m for m in found)

    def _on_top(self, frame: Sequence[Mode]) -> None:
        """What a mode gained alone, and the coarser precision everywhere, on top of the modes that are on as a whole.
        Costs of places are measured alone and can mislead the dials: here only whole plans are compared."""
        alone = [f for f in self.tried if f.name in self.dials and f.name != TOGETHER and f.score > WORTH]
        plans: list[Sequence[Mode]] = [f.modes for f in alone if f.loss.fits(self.max_dppl)]
        joint = self.dials[TOGETHER]
        whole: list[tuple[Mode, str]] = [(joint.mix, "mix everywhere")]
        if any(place == HEAD for _, place in joint.costs.quality):
            only = (Override(None, frozenset(PLACES), {"on": "off"}),)
            whole.append((replace(joint.mix, head="on"), "mix everywhere and at the head"))
            whole.append((replace(joint.mix, head="on", where=only), "mix at the head"))
        if len({option.quant for option in joint.options}) > 1:
            plans += [(mix,) for mix, _ in whole]
            plans += [(joint.mix, HEAD_HALVED)] * self._halves_head()  # beside int4 the head is much of what is read
        whole.append((HEAD_HALVED, "kwta head"))
        ready = [joined(frame, more) for more in plans]
        if self.best and self._halves_head():  # the less is read of the layers, the more of it is the head
            ready.append(joined(self.best.modes, (HEAD_HALVED,)))
        for modes in ready:
            if modes is None or any(found.modes == modes for found in self.tried):
                continue
            name = " and ".join(next((n for m, n in whole if m == mode), mode.name) for mode in modes)
            self.say(f"trying {name}")
            self._try(name, modes, quick=True)

    def _drafts(self, frame: Sequence[Mode]) -> None:
        """The best plan so far as what drafts, verified densely: dense's own text."""
        modes = joined(self.best.modes if self.best else frame, (Event(verify="on"),))
        if modes is not None:
            self.say("trying verified drafts")
            self._try("verified drafts", modes)

    def _compare(self) -> None:
        """The fastest ones once more, in turns, since each was measured in a minute of its own: the fastest that holds
        is the plan, and of those that are as fast the one that loses least."""
        fits = {key_of(found.modes): found for found in self.tried if found.loss.fits(self.max_dppl)}
        near = [found for found in fits.values() if self.best and found.score > NEAR * self.best.score]
        near = sorted(near, key=lambda found: -found.score)[:FINALISTS]
        if len(near) < 2 or self.trials.goal == "memory":
            return
        self.say("comparing the fastest")
        gains = self.trials.compare([found.modes for found in near])
        again = {key_of(found.modes): tuple(each) for found, each in zip(near, gains, strict=True)}
        self.tried = [replace(f, gains=again.get(key_of(f.modes), f.gains)) for f in self.tried]
        compared = [i for i, found in enumerate(self.tried) if key_of(found.modes) in again]
        for i in compared:
            self.tried[i] = replace(self.tried[i], loss=self.trials.loss(self.tried[i].modes))
        alike = ALIKE * max(self.tried[i].score for i in compared)

        def order(found: Found) -> tuple[bool, float]:
            return (False, found.loss.delta_ppl_pct) if found.score >= alike else (True, -found.score)

        for found in sorted((self.tried[i] for i in compared), key=order):
            if found.loss.fits(self.max_dppl):
                self.best = found
                self.better(found)
                return

    def _try(self, name: str, modes: Sequence[Mode], quick: bool = False) -> Found:
        """`quick`: whether it holds is only looked at closely where it would be the best."""
        loss, gains = self.trials.loss(modes, quick), tuple(self.trials.gains(modes))
        found = Found(name, tuple(modes), loss, gains, self.trials.goal)
        if loss.fits(self.max_dppl) and found.score > WORTH * (self.best.score if self.best else 1.0):
            found = replace(found, loss=self.trials.loss(modes))
            if found.loss.fits(self.max_dppl):
                self.best = found
                self.better(found)
        self.tried.append(found)
        return found
