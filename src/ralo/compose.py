"""The only place where two modes meet: what composes, what yields to what, what is refused, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ralo.errors import RaloError
from ralo.modes import MODES
from ralo.modes.base import LayerSlots, LayerView, Mode
from ralo.pace import Pace

REFUSE = "refuse"


def always(a: Any, b: Any) -> bool:
    return True


def blocks_differ(a: Any, b: Any) -> bool:
    """Blocks of one channel fit any partition."""
    one, other = a.partition, b.partition
    return one != other and 1 not in (one, other)


def overlap(a: Any, b: Any) -> bool:
    """Both work on some place."""
    one, other = getattr(a, "target", "both"), getattr(b, "target", "both")
    return one == other or "both" in (one, other)


def chooses_inputs_of_up(event: Any) -> bool:
    everywhere = getattr(event, "budget_ms", 0) > 0 or getattr(event, "deltas", "o") == "all"
    return (everywhere or getattr(event, "form", "best") == "seed") and getattr(event, "target", "both") != "attn"


@dataclass(frozen=True)
class Rule:
    """What happens where modes `a` and `b` are both on and `when` holds."""

    a: str
    b: str
    act: str  # REFUSE, or a verb for people: what a does
    why: str
    change: str = ""  # for a refusal: what to do
    when: Callable[[Any, Any], bool] = always


SKIPPERS, PARTITIONED = ("kwta", "event"), ("state-pack", "kwta", "event", "proc")
WEIGHTS = ("proc", "tt", "mix", "q2-ternary", "statecells")

RULES = (
    *(
        Rule(a, b, REFUSE, "all modes share one partition into blocks", "give both the same block size", blocks_differ)
        for a, b in combinations(PARTITIONED, 2)
    ),
    Rule("kwta", "event", "proposes candidates to", "one ranking, not two: event has its budget and top-K inside them"),
    Rule(
        "kwta",
        "event",
        "guesses no gates beside",
        "where event chooses what the gate sees, that gate decides",
        when=lambda a, b: getattr(a, "predict", "off") == "on" and chooses_inputs_of_up(b),
    ),
    *(
        Rule(a, "proc", "is intersected with", "only blocks that a procedural weight has can be read", when=overlap)
        for a in SKIPPERS
    ),
    Rule("kwta", "win-attn", "is intersected with", "only keys inside a window exist"),
    *(
        Rule(a, b, REFUSE, "a layer has one weight backend", "give them different targets (mlp, attn)", overlap)
        for a, b in combinations(WEIGHTS, 2)
    ),
    *(
        Rule(a, b, "yields to", "its factors have no channels that could be skipped", when=overlap)
        for a in SKIPPERS
        for b in ("tt", "statecells")
    ),
    Rule(
        "state-pack",
        "event",
        "chooses keys instead of",
        "codes choose for every token, which is better than a choice that is held; exact scores refine it",
        when=lambda a, b: getattr(a, "target", "both") != "mlp" and getattr(b, "target", "both") != "mlp",
    ),
    Rule("state-pack", "event", "gives a zero mask to", "neurons that are silent send nothing, whatever moved"),
    Rule(
        "state-pack",
        "kwta",
        REFUSE,
        "both choose keys",
        "use --kwta-keys=1 or --state-pack-target=mlp",
        lambda a, b: getattr(a, "target", "both") != "mlp" and getattr(b, "keys", 1) < 1,
    ),
    Rule("state-pack", "kwta", "takes keys and silent neurons from", "one chooser a place; winners choose channels"),
    Rule(
        "state-pack",
        "proc",
        "leaves the neurons of the MLP to",
        "weights from seeds cannot be read neuron by neuron",
        when=lambda a, b: getattr(a, "target", "both") != "kv" and getattr(b, "target", "both") != "attn",
    ),
    Rule("state-pack", "tt", "works beside", "codes are of keys and activations, factors of weights"),
    *(
        Rule("mix", a, "gives its weights to", "coarser weights have the same channels and neurons")
        for a in ("state-pack", "kwta", "event")
    ),
    Rule("proc", "win-attn", "has a fanout per window and head in", "the pattern must respect the windows"),
    Rule(
        "event",
        "win-attn",
        REFUSE,
        "deltas of heads do not see windows",
        "use --event-target=mlp, or event on windows",
        lambda a, b: getattr(a, "target", "both") != "mlp" and not getattr(a, "windows", False),
    ),
    Rule("event", "sdr", REFUSE, "a sparse code is only a top-K filter", "use --event-target=mlp", overlap),
)


@dataclass(frozen=True)
class Built:
    """A plan in the layers of a model."""

    slots: list[LayerSlots]
    pace: Pace | None = None


@dataclass(frozen=True)
class Plan:
    """Modes that go together, in the order they fill slots, and what was decided between them."""

    modes: tuple[Mode, ...] = ()
    notes: tuple[str, ...] = ()

    def build(self, views: list[LayerView]) -> Built:
        """Every layer's slots, filled, and what keeps the time where a mode has a budget."""
        ready = []
        for mode in self.modes:
            ready.append(mode.prepare(views))
            views = [replace(view, weights=ready[-1].weights(view)) for view in views]
        out = []
        for view in views:
            slots = LayerSlots()
            for mode in ready:
                mode.build(view, slots)
            out.append(slots)
        return Built(out, next((mode.pace for mode in ready if mode.pace), None))

    @property
    def verified(self) -> bool:
        """Whether the modes only draft, and dense has the word."""
        return any(getattr(mode, "verify", "off") == "on" for mode in self.modes)

    @property
    def in_prefill(self) -> bool:
        return any(getattr(mode, "prefill", "off") == "on" for mode in self.modes)


def compose(modes: Iterable[Mode]) -> Plan:
    """The plan of the modes that are on; one that cannot be is refused before any model is loaded."""
    order = list(MODES)  # who proposes comes before who takes, whatever order they are given in
    by_order = sorted(modes, key=lambda mode: order.index(mode.name) if mode.name in order else len(order))
    on = {mode.name: mode for mode in by_order if mode.enabled}
    notes = []
    for rule in RULES:
        a, b = on.get(rule.a), on.get(rule.b)
        if a is None or b is None or not rule.when(a, b):
            continue
        if rule.act == REFUSE:
            raise RaloError(f"{rule.a} and {rule.b} do not go together: {rule.why}; {rule.change}")
        notes.append(f"{rule.a} {rule.act} {rule.b}: {rule.why}")
    return Plan(tuple(on.values()), tuple(notes))
