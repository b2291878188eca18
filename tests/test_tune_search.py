"""The search on constructed worlds, without a model: the fastest plan that holds, and nothing that does not."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_tune_sites import settings_at

from ralo.modes import KWTA, TT, Event, Mix, Mode, StatePack
from ralo.modes.base import TARGETS, Override
from ralo.modes.share import KEEP_ALL, Costs
from ralo.tune.frames import GATE_HALVED, HEAD_HALVED, joined
from ralo.tune.record import OutOfTime
from ralo.tune.search import CHECKS, MARGIN, TOGETHER, WORTH, Found, Search
from ralo.tune.sites import Option, Sites
from ralo.tune.trial import UNSEEN, Gain, Loss
from ralo.weights import PLACES

KEYS = [(layer, place) for layer in range(3) for place in PLACES]
OPTIONS = [Option(quant, share) for quant in ("int8", "int4") for share in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
REST = 0.3  # of a dense token's time, what no dial changes
ALONE = {"kwta alone": ["int8"], "mix alone": ["int8", "int4"]}


@dataclass
class World:
    """What every plan would cost and gain. Percent of perplexity add up, speeds multiply."""

    seed: int = 0
    feel: float = 1.0  # percent of perplexity by KL, beside what the search expects
    worse: float = 1.0  # the text to check with, beside the text to tune on
    slow: float = 1.0  # speed of the dial's modes, beside what the costs promise
    skips: bool = True  # whether channels that are skipped save the time that the costs promise, or none
    spread: float = 0.1  # from a loss to the end of its interval
    whole: dict[str, tuple[float, float]] = field(default_factory=dict)  # frame -> percent, times as fast
    head: tuple[float, float] | None = None  # coarser: percent, times as fast
    head_seen: bool = True  # whether its costs say how fast
    drafts: float = 0.5  # speed of verified drafts beside their plan's
    act: str = "silu"
    gated: bool = True
    quant: str = "int8"
    goal: str = "latency"
    contexts: tuple[int, ...] = (128,)
    lucky: set[str] = field(default_factory=set)  # modes of the plans that are measured in a better moment than others
    luck: float = 1.3
    time: int = 10**9  # questions that may be asked
    asked: list[tuple[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        head = SimpleNamespace(quant="int8", oc=8192 if "kwta head" in self.whole else 64)
        cfg = SimpleNamespace(act=self.act, gated=self.gated)
        model = SimpleNamespace(cfg=cfg, weights=SimpleNamespace(head=head))
        self.lm = SimpleNamespace(quant=self.quant, model=model)
        share, coarse = np.array([o.share for o in OPTIONS]), np.array([o.quant == "int4" for o in OPTIONS])
        self.quality, self.effort = {}, {}
        for key in KEYS:
            skipping, rounding = 10 ** rng.uniform(-3, -1, 2)
            self.quality[key] = skipping * (1 - share) ** 2 + 0.1 * rounding * coarse
            self.effort[key] = 1e-5 * rng.uniform(0.5, 2) * share * np.where(coarse, 0.55, 1.0)
        self.dense_s = sum(e[OPTIONS.index(Option("int8", 1.0))] for e in self.effort.values())

    def dials(self) -> dict[str, Sites]:
        quality, effort = dict(self.quality), dict(self.effort)
        if self.head:
            coarse = np.array([o.quant == "int4" for o in OPTIONS])
            quality[1, "head"] = np.array([1e9 * (o.share < 1) for o in OPTIONS]) + self.head[0] / 60 * coarse
            effort[1, "head"] = self.dense_s * (1 - (1 - 1 / self.head[1]) * coarse * self.head_seen)
        out = {TOGETHER: Sites("int8", Mix(), OPTIONS, Costs(quality, effort))}
        for name, quants in ALONE.items():
            some = [i for i, o in enumerate(OPTIONS) if o.quant in quants and (name == "kwta alone" or o.share == 1)]
            costs = [{key: each[key][some] for key in KEYS} for each in (self.quality, self.effort)]
            out[name] = Sites("int8", Mix(), [OPTIONS[i] for i in some], Costs(*costs))
        return out

    # what the search asks

    @property
    def longest(self) -> int:
        return max(self.contexts)

    def loss(self, modes, quick: bool = False) -> Loss:
        self._ask("quick loss" if quick else "loss", modes)
        found = self.percent(modes) * (1 if quick else self.worse)
        return Loss(found, found - self.spread, found + self.spread, found / 60, 0.9, 1000)

    def delta(self, modes) -> float:
        self._ask("delta", modes)
        return self.percent(modes)

    def gains(self, modes) -> list[Gain]:
        self._ask("gains", modes)
        return self._gains(modes, self.speed(modes) * (self.luck if set(names(modes)) == self.lucky else 1.0))

    def compare(self, plans) -> list[list[Gain]]:
        for modes in plans:
            self._ask("compare", modes)
        return [self._gains(modes, self.speed(modes)) for modes in plans]

    def _gains(self, modes, speed: float) -> list[Gain]:
        return [
            Gain(ctx, speed, speed - 0.01, speed + 0.01, 100 * speed, 100.0, self.nbytes(modes), 1000, 0)
            for ctx in self.contexts
        ]

    def _ask(self, what: str, modes) -> None:
        if len(self.asked) >= self.time:
            raise OutOfTime
        self.asked.append((what, tuple(modes)))

    # what is true

    def percent(self, modes) -> float:
        if any(isinstance(m, Event) and m.verify == "on" for m in modes):
            return 0.0
        dialled = sum(self.quality[key][i] for key, i in self._options(modes).items())
        dialled += self.head[0] / 60 if self.head and self._coarse_head(modes) else 0.0
        return 60 * self.feel * float(dialled) + sum(self.whole[name][0] for name in self._whole(modes))

    def speed(self, modes) -> float:
        options = {key: OPTIONS[i] for key, i in self._options(modes).items()}
        read = {key: o if self.skips else replace(o, share=1.0) for key, o in options.items()}
        took = sum(self.effort[key][OPTIONS.index(o)] for key, o in read.items()) / self.dense_s
        dialled = any(isinstance(m, Mix) or m.where for m in modes if m != GATE_HALVED)
        speed = (self.slow if dialled else 1.0) / (REST + (1 - REST) * float(took))
        for name in self._whole(modes):
            speed *= self.whole[name][1]
        speed *= self.head[1] if self.head and self._coarse_head(modes) else 1.0
        return speed * (self.drafts if any(isinstance(m, Event) and m.verify == "on" for m in modes) else 1.0)

    def nbytes(self, modes) -> int:
        coarse = sum(OPTIONS[i].quant == "int4" for i in self._options(modes).values())
        return 1000 - 40 * coarse + 50 * len(self._whole(modes))

    def _options(self, modes) -> dict[tuple[int, str], int]:
        made = {place for m in modes if isinstance(m, TT) for place in TARGETS[m.target]}
        dialled = [m for m in modes if isinstance(m, Mix | KWTA)]
        here = {key: Option(*settings_at(dialled, *key)) for key in KEYS if key[1] not in made}
        here = {key: replace(o, share=1.0) if o.share == KEEP_ALL else o for key, o in here.items()}  # of a frame
        return {key: OPTIONS.index(option) for key, option in here.items()}

    @staticmethod
    def _coarse_head(modes) -> bool:
        return any(isinstance(m, Mix) and m.head == "on" for m in modes)

    def _whole(self, modes) -> list[str]:
        out = []
        for mode in modes:
            if isinstance(mode, StatePack):
                out += ["state-pack mlp"] * (mode.target != "kv")
                out += [f"state-pack {mode.keys:g} keys"] * (mode.target != "mlp")
            out += ["kwta head"] * (isinstance(mode, KWTA) and mode.head == "on")
            if isinstance(mode, KWTA) and mode.gate != "off" and self.act == "relu":
                halved = any(mode.at(*key).k == KEEP_ALL for key in KEYS)
                out.append("kwta gate by halves" if halved else "kwta gate")
            out += ["event"] * (isinstance(mode, Event) and mode.verify == "off")
            out += ["tt"] * isinstance(mode, TT)
        return out


SLOWER = {"event": (0.0, 0.9), "kwta gate by halves": (0.0, 0.9)}


def search(world: World, budget: float = 2.0, **settings) -> Search:
    world.whole = SLOWER | world.whole
    out = Search(world, budget, world.dials(), **settings)
    out.kept = []  # every plan that was told of
    out.better = out.kept.append
    return out


def told(world: World, budget: float = 2.0, **settings) -> tuple[Found | None, Search]:
    looking = search(world, budget, **settings)
    return looking.run(), looking


def names(modes: tuple[Mode, ...]) -> list[str]:
    return [mode.name for mode in modes]


# ---------------------------------------------------------------- the fastest within the budget


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("feel", [0.3, 1.0, 3.0])
def test_the_fastest_within_the_budget(seed, feel):
    """However far off the first guess of what a nat costs is: about as fast as the dial goes with the budget spent."""
    world = World(seed, feel)
    best, looking = told(world)
    assert best is not None and best.loss.fits(2.0) and best is looking.best
    assert world.percent(best.modes) <= MARGIN * 2.0
    (dial,) = [d for name, d in world.dials().items() if name == TOGETHER]
    spent = {}
    for share in (0.7, 1.0):
        choice = dial.within(share * 2.0 / (60 * feel))
        took = sum(world.effort[key][OPTIONS.index(o)] for key, o in choice.items()) / world.dense_s
        spent[share] = 1 / (REST + (1 - REST) * took)
    assert spent[0.7] <= best.speed * 1.001 and best.speed <= spent[1.0] * 1.02  # the hull leaves some to luck
    assert best.speed == pytest.approx(world.speed(best.modes)) and set(names(best.modes)) == {"mix", "kwta"}
    assert best.speed >= max(found.speed for found in looking.tried if found.loss.fits(2.0)) / WORTH


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("whole", [{}, {"event": (0.3, 1.2)}], ids=["dial", "dial and event"])
def test_a_larger_budget_is_never_slower(seed, whole):
    budgets = 0.25 * 1.5 ** np.arange(9)
    found = [told(World(seed, whole=dict(whole)), budget)[0] for budget in budgets]
    speeds = [best.speed if best else 1.0 for best in found]
    assert all(later >= earlier for earlier, later in itertools.pairwise(speeds)), speeds
    assert speeds[-1] > 1.2 * speeds[0]


def test_it_is_found_again():
    whole = {"event": (0.3, 1.2), "state-pack mlp": (0.0, 1.3), "kwta gate": (0.0, 1.1)}
    runs = [told(World(3, worse=1.3, act="relu", whole=dict(whole))) for _ in range(2)]
    (a, one), (b, other) = runs
    assert a == b and one.tried == other.tried and one.kept == other.kept
    assert one.trials.asked == other.trials.asked


def test_several_contexts_count_alike():
    world = World(contexts=(128, 512))
    found = Found(
        "x", (), Loss(0, 0, 0, 0, 1, 1), tuple(Gain(c, s, s, s, 1, 1, 1, 1, 0) for c, s in ((128, 4.0), (512, 1.0)))
    )
    assert found.speed == pytest.approx(2.0)
    best, _ = told(world)
    assert best is not None and [g.ctx for g in best.gains] == [128, 512]


# ---------------------------------------------------------------- the comparison at the end


def test_costs_of_places_that_mislead_do_not_decide():
    keys = {f"state-pack {n} keys": (0.2, 1 + n / 1000) for n in (256, 384, 768)}
    world = World(whole=keys, contexts=(128, 4000), skips=False)
    best, looking = told(world)
    assert names(best.modes) == ["mix", "state-pack"]
    joint = next(found for found in looking.tried if found.name == TOGETHER)
    assert "kwta" in names(joint.modes) and joint.speed < best.speed == world.speed(best.modes)


def test_a_plan_that_was_measured_in_a_lucky_moment_loses_in_the_comparison():
    best, looking = told(World(1, lucky={"mix"}, luck=1.4))
    assert best is not None and set(names(best.modes)) == {"mix", "kwta"} and looking.kept[-1] is best
    (mix,) = [f for f in looking.tried if f.name == "mix alone"]
    assert set(names(looking.kept[-2].modes)) == {"mix"}, "until then it was the fastest"
    assert mix.speed < best.speed, "what is shown of it is what it had beside the others"
    compared = [modes for what, modes in looking.trials.asked if what == "compare"]
    assert best.modes in compared and mix.modes in compared


def test_what_wins_the_comparison_is_checked_too():
    """A mode that had only a quick look, since another was measured in a lucky moment before it."""
    whole = {"state-pack mlp": (0.0, 1.3), "kwta gate": (0.0, 0.9), "event": (0.5, 1.5)}
    world = World(1, worse=8.0, slow=0.3, act="relu", whole=whole, lucky={"state-pack"})
    best, looking = told(world)
    (event,) = [f for f in looking.tried if f.name == "event"]
    assert event.speed == pytest.approx(1.5) and event.loss.delta_ppl_pct == pytest.approx(4.0), (
        "it won, and was checked"
    )
    assert best is not None and best.name == "state-pack mlp" and best.speed == pytest.approx(1.3)
    assert all(found.loss.fits(2.0) for found in looking.kept)


def test_one_plan_is_not_compared_with_itself():
    _, looking = told(World(1, slow=0.3, whole={"event": (0.0, 1.3)}))
    assert looking.best is not None and not [what for what, _ in looking.trials.asked if what == "compare"]


# ---------------------------------------------------------------- the check


@pytest.mark.parametrize(("worse", "most"), [(1.0, 1), (1.2, 2), (1.6, 3), (2.4, 3), (4.0, 3)])
def test_a_plan_that_does_not_hold_is_dialled_back_as_far_as_it_takes(worse, most):
    best, looking = told(World(1, worse=worse))
    together = [f for f in looking.tried if f.name == TOGETHER]
    assert [f.loss.fits(2.0) for f in together] == [False] * (len(together) - 1) + [True]
    assert (len(together) == 1) == (worse == 1) and len(together) <= most
    assert together[0].loss.delta_ppl_pct <= MARGIN * 2.0 * worse + 1e-9
    assert best is not None and best in together and 0.8 * 2.0 < best.loss.delta_ppl_pct <= 2.0 + UNSEEN
    losses = [f.loss.delta_ppl_pct for f in together]
    assert losses == sorted(losses, reverse=True)


def test_a_plan_whose_interval_ends_too_high_is_dialled_back():
    best, looking = told(World(1, worse=1.1, spread=0.7))
    together = [f for f in looking.tried if f.name == TOGETHER]
    assert len(together) == 2 and together[0].loss.delta_ppl_pct < 2.0 < 2.5 < together[0].loss.high
    assert best is not None and best in together and best.loss.high > 0.87 * 2.5 and best.loss.fits(2.0)


def test_a_plan_that_never_holds_is_not_kept():
    best, looking = told(World(1, worse=1.5, spread=2.6))
    assert best is None and looking.kept == [] and looking.best is None
    assert 1 < len([f for f in looking.tried if f.name == TOGETHER]) <= CHECKS


def test_an_interval_that_is_too_wide_does_not_hold():
    assert told(World(1, spread=0.5))[0] is not None
    best, looking = told(World(1, spread=2.4))
    assert best is None and all(f.loss.delta_ppl_pct < 2 and not f.loss.fits(2.0) for f in looking.tried[1:-1])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("worse", [1.0, 1.3, 2.0])
def test_what_is_kept_holds_and_gets_faster(seed, worse):
    whole = {"event": (0.2, 1.1), "state-pack mlp": (0.3, 1.15), "kwta gate": (0.0, 1.05)}
    best, looking = told(World(seed, worse=worse, act="relu", whole=whole))
    assert looking.kept and looking.kept[-1] is best
    assert all(found.loss.fits(2.0) and found in looking.tried for found in looking.kept)
    speeds = [1.0, *(found.speed for found in looking.kept)]
    before, (*_, last) = itertools.takewhile(lambda pair: pair[1] > WORTH * pair[0], itertools.pairwise(speeds)), speeds
    assert len(list(before)) >= len(speeds) - 2 and last == max(speeds), "the last is the one that was compared"
    checked = [modes for what, modes in looking.trials.asked if what == "loss"]
    assert all(found.modes in checked for found in looking.kept), "kept without a look at the text to check with"


def test_a_mode_that_only_seems_to_hold_is_not_kept():
    """A quick look at the text that plans are tuned on is not the check."""
    best, looking = told(World(1, worse=8.0, slow=0.5, whole={"event": (0.5, 1.5)}))
    assert best is None and looking.kept == []
    (event,) = [f for f in looking.tried if f.name == "event"]
    assert event.loss.delta_ppl_pct == pytest.approx(4.0)


# ---------------------------------------------------------------- nothing pays


@pytest.mark.parametrize("budget", [0.0, 2.0, 100.0])
def test_where_nothing_pays(budget):
    best, looking = told(World(1, slow=0.3), budget)
    assert best is None and looking.kept == []


def test_dense_is_no_faster_than_itself():
    """With no budget the dial says dense; what a noisy moment measures of that is not kept."""
    world = World(1)
    world.speed = lambda modes: 1.2 if not modes else 0.8  # type: ignore[method-assign]
    best, looking = told(world, 0.0)
    assert best is None and looking.kept == [] and all(found.modes for found in looking.tried)


def test_without_a_budget_only_what_is_lossless():
    best, _ = told(World(1, spread=0.0), 0.0)
    assert best is None
    best, _ = told(World(1, spread=0.0, whole={"event": (0.0, 1.3)}), 0.0)
    assert best is not None and names(best.modes) == ["event"] and best.loss.delta_ppl_pct == 0
    best, _ = told(World(1, spread=0.0, drafts=1.4), 0.0)
    assert best is not None and best.name == "verified drafts" and best.loss.delta_ppl_pct == 0


# ---------------------------------------------------------------- modes that are on as a whole


RELU = {"state-pack mlp": (0.0, 1.3), "kwta gate": (0.0, 1.2)}
FAR = {"state-pack 256 keys": (0.9, 1.6), "state-pack 384 keys": (0.2, 1.4), "state-pack 768 keys": (0.1, 1.2)}


def test_one_of_a_kind():
    best, looking = told(World(2, act="relu", whole=dict(RELU)))
    assert best is not None and "state-pack" in names(best.modes)
    dialled = [mode for mode in best.modes if isinstance(mode, KWTA)]
    assert all(mode.gate == "off" for mode in dialled), "neurons that are silent are skipped by one mode only"
    best, _ = told(World(2, act="relu", whole={**RELU, "kwta gate": (0.0, 1.4)}))
    assert best is not None and "state-pack" not in names(best.modes)
    (mode,) = [mode for mode in best.modes if isinstance(mode, KWTA)]
    assert mode.gate == "auto" and mode.where, "which neurons, from the frame; which channels, from the dial"
    assert {f.name for f in looking.tried} >= {"state-pack mlp", "kwta gate", "event"}


def test_of_a_kind_the_faster_one_whatever_the_minute_it_was_tried_in():
    whole = {**RELU, "state-pack mlp": (0.0, 1.35), "kwta gate": (0.0, 1.2)}
    best, looking = told(World(2, act="relu", whole=whole, lucky={"kwta"}))
    alone = {found.name: found.speed for found in looking.tried}
    assert alone["kwta gate"] > alone["state-pack mlp"] and "state-pack" in names(best.modes)


HALVED = "kwta gate by halves"


@pytest.mark.parametrize(
    ("world", "tried"),
    [
        ({}, {"kwta gate", HALVED}),
        ({"goal": "throughput"}, {"kwta gate", HALVED}),
        ({"goal": "memory"}, {"kwta gate"}),  # tiles take more of it
        ({"quant": "int4"}, {"kwta gate"}),
        ({"act": "silu"}, set()),
        ({"gated": False}, set()),
    ],
    ids=str,
)
def test_gates_by_halves_are_tried_where_there_are_gates_and_halves(world, tried):
    _, looking = told(World(2, **{"act": "relu", "whole": dict(RELU)} | world))
    frames = {found.name: found.modes for found in looking.tried if "gate" in found.name}
    assert set(frames) == tried
    for name, (mode,) in frames.items():
        least = {"up": KEEP_ALL} if name == HALVED else {}
        assert mode.gate == "auto" and all(mode.at(*key).k == least.get(key[1], 1.0) for key in KEYS)


@pytest.mark.parametrize(("percent", "speed", "taken"), [(0.5, 1.5, True), (0.5, 1.1, False), (0.9, 1.5, False)])
def test_a_gate_by_halves_is_one_of_its_kind(percent, speed, taken):
    """It loses something, which the budget must have room for, and it must be faster than what loses nothing."""
    _, looking = told(World(2, act="relu", whole={**RELU, HALVED: (percent, speed)}))
    (alone,) = [found for found in looking.tried if found.name == HALVED]
    assert alone.modes == (GATE_HALVED,) and alone.speed == pytest.approx(speed)
    joint = [found for found in looking.tried if found.name == TOGETHER]
    assert joint and all(("state-pack" not in names(found.modes)) == taken for found in joint)
    gates = [mode.gate for found in joint for mode in found.modes if isinstance(mode, KWTA)]
    assert set(gates) == {"auto" if taken else "off"}


def test_of_a_gate_by_halves_and_a_dial_the_dial_has_the_channels():
    dialled = KWTA(k=1.0, gate="off", where=(Override(frozenset({0}), frozenset({"o"}), {"k": 0.5}),))
    assert joined((GATE_HALVED,), (dialled,)) == (replace(dialled, gate="auto"),)
    both = (replace(GATE_HALVED, head="on"),)
    assert joined((GATE_HALVED,), (HEAD_HALVED,)) == joined((HEAD_HALVED,), (GATE_HALVED,)) == both
    assert joined((GATE_HALVED,), (Mix(),)) == (Mix(), GATE_HALVED)


def test_kinds_are_combined():
    whole = {**RELU, **FAR, "event": (0.1, 1.1)}
    best, _ = told(World(2, act="relu", contexts=(128, 8000), whole=whole))
    assert best is not None
    (pack,) = [mode for mode in best.modes if isinstance(mode, StatePack)]
    assert pack.target == "both" and pack.keys == 384, "256 keys alone would take more than a mode may"
    assert "event" in names(best.modes)
    assert best.speed > 1.3 * 1.4 * 1.1


def test_keys_are_tried_where_the_context_is_long_enough():
    for longest, tried in ((1024, set()), (1100, {256, 384}), (8000, {256, 384, 768})):
        _, looking = told(World(2, contexts=(longest,), whole=dict(FAR)))
        assert {f"state-pack {keys} keys" for keys in tried} == {f.name for f in looking.tried if "keys" in f.name}


def test_a_mode_that_slows_another_down_is_left_out():
    """Alone each is faster; together they are not."""
    world = World(2, whole={**FAR, "event": (0.0, 1.2)}, contexts=(8000,))
    plain = World.speed
    world.speed = lambda modes: plain(world, modes) * (0.8 if {"state-pack", "event"} <= set(names(modes)) else 1)  # type: ignore[method-assign]
    best, _ = told(world)
    assert best is not None and "state-pack" in names(best.modes) and "event" not in names(best.modes)


@pytest.mark.parametrize(("percent", "taken"), [(0.7, True), (0.9, False)])
def test_a_mode_that_takes_too_much_of_the_budget_is_left_out(percent, taken):
    best, _ = told(World(2, whole={"event": (percent, 1.1)}))
    assert best is not None and ("event" in names(best.modes)) == taken


def test_of_plans_that_are_as_fast_the_one_that_loses_least_is_taken():
    best, looking = told(World(2, whole={"event": (0.7, 1.02)}))
    faster = next(found for found in looking.tried if "event" in names(found.modes) and found.name == TOGETHER)
    assert "event" not in names(best.modes) and best.speed < faster.speed < best.speed / 0.97
    assert best.loss.delta_ppl_pct < faster.loss.delta_ppl_pct
    assert best.loss.fits(2.0)


@pytest.mark.parametrize("seen", [True, False])
def test_a_head_that_pays_is_coarser(seen):
    world = World(1, head=(0.3, 1.4), head_seen=seen)
    best, looking = told(world)
    assert any(isinstance(m, Mix) and m.head == "on" for m in best.modes)
    tried = {found.name for found in looking.tried}
    assert {"mix at the head", "mix everywhere and at the head"} <= tried
    assert best.speed > told(World(1))[0].speed and best.loss.fits(2.0)
    joint = next(found for found in looking.tried if found.name == TOGETHER)
    assert any(isinstance(m, Mix) and m.head == "on" for m in joint.modes) == seen


@pytest.mark.parametrize("act", ["silu", "relu"])
def test_a_head_by_halves_is_on_beside_everything_else(act):
    whole = {"kwta head": (0.1, 1.1), "kwta gate": (0.0, 1.3), "state-pack mlp": (0.0, 1.2)}
    best, looking = told(World(1, act=act, whole=dict(whole), head=(0.3, 1.05)))
    (dialled,) = [m for m in best.modes if isinstance(m, KWTA)]
    assert dialled.head == "on" and dialled.where and (act == "silu" or dialled.gate == "auto")
    joint = next(found for found in looking.tried if found.name == TOGETHER)
    assert not any(isinstance(m, Mix) and m.head == "on" for m in joint.modes)  # there is one head


def test_a_head_by_halves_is_tried_beside_coarser_weights():
    _, looking = told(World(1, slow=0.5, whole={"kwta head": (0.1, 1.005)}))
    (found,) = [found for found in looking.tried if found.name == "mix everywhere and kwta head"]
    assert names(found.modes) == ["mix", "kwta"] and found.modes[1].head == "on" and not found.modes[1].where
    assert not any("kwta head" in found.name for found in told(World(1))[1].tried)


def test_a_head_by_halves_is_tried_on_top_of_the_best_plan():
    keys = {f"state-pack {n} keys": (0.1, 1.3 - n / 1e4) for n in (256, 384, 768)}
    whole = {"kwta head": (0.0, 1.005), **keys}  # by itself it is not worth a frame
    best, looking = told(World(1, whole=whole, contexts=(128, 4096)))
    assert {"state-pack", "kwta"} <= set(names(best.modes))
    with_head = [f for f in looking.tried if any(isinstance(m, KWTA) and m.head == "on" and m.where for m in f.modes)]
    assert with_head and all("state-pack" in names(f.modes) for f in with_head)


def test_a_head_by_halves_that_gains_nothing_is_left_dense():
    best, looking = told(World(1, whole={"kwta head": (0.1, 1.0)}))
    assert "kwta head" in {found.name for found in looking.tried}
    assert not any(isinstance(m, KWTA) and m.head == "on" for m in best.modes)


def test_a_head_that_costs_too_much_stays_as_it_is():
    best, looking = told(World(1, head=(2.6, 1.4)))
    assert not any(isinstance(m, Mix) and m.head == "on" for m in best.modes)
    assert "mix at the head" in {found.name for found in looking.tried}


def test_an_interval_may_end_a_quarter_above_the_budget():
    for budget in (0.5, 1.0, 2.0):
        assert Loss(0.9 * budget, 0.0, 1.24 * budget, 0, 1, 1).fits(budget)
        assert not Loss(0.9 * budget, 0.0, 1.27 * budget, 0, 1, 1).fits(budget)
        assert not Loss(1.02 * budget, 0.0, 1.1 * budget, 0, 1, 1).fits(budget)


def test_places_whose_weights_are_made_are_not_for_the_dial():
    best, _ = told(World(2, whole={"tt": (0.2, 1.5)}), made=[TT(target="mlp")])
    assert best is not None and best.name == TOGETHER and set(names(best.modes)) == {"tt", "mix", "kwta"}
    for mode in best.modes:
        if isinstance(mode, Mix):
            assert mode.target == "attn"
        if isinstance(mode, KWTA):
            assert all(o.places <= set(TARGETS["attn"]) for o in mode.where)


def test_verified_drafts_are_made_by_the_best_plan():
    best, looking = told(World(2, drafts=1.3))
    assert best is not None and best.name == "verified drafts" and best.loss.delta_ppl_pct == 0
    drafting = looking.kept[-2]
    assert [m for m in best.modes if m.name != "event"] == list(drafting.modes)
    (event,) = [m for m in best.modes if isinstance(m, Event)]
    assert event.verify == "on"


def test_where_memory_counts_the_smallest():
    """A plan that is slower is better where its weights are smaller, and a faster one that keeps more is not."""
    best, looking = told(World(2, goal="memory", slow=0.5, whole={"event": (0.0, 1.5)}))
    assert best is not None and names(best.modes)[0] == "mix" and best.speed < 1
    assert best.score == 1000 / best.gains[0].nbytes > 1
    assert best.score >= max(f.score for f in looking.tried if f.loss.fits(2.0)) / WORTH
    scores = [1.0, *(found.score for found in looking.kept)]
    assert all(later > WORTH * earlier for earlier, later in itertools.pairwise(scores))


# ---------------------------------------------------------------- time


def test_where_the_time_is_up_the_best_so_far_is_kept():
    def world(time: int) -> World:
        whole = {"event": (0.2, 1.1), **RELU}
        return World(1, worse=1.3, act="relu", whole=whole, time=time)

    full, looking = told(world(10**9))
    asked = len(looking.trials.asked)
    assert full is not None and asked > 20
    speeds, kept = [], []
    for time in range(asked + 1):
        best, cut = told(world(time))
        assert best is (cut.kept[-1] if cut.kept else None)
        assert cut.tried == looking.tried[: len(cut.tried)], "a search that is cut is the beginning of the whole one"
        assert cut.trials.asked == looking.trials.asked[:time]
        speeds.append(best.speed if best else 1.0)
        kept.append(len(cut.kept))
    assert speeds == sorted(speeds) and kept[0] == 0 and kept[-1] == len(looking.kept) and best == full


def test_it_says_so():
    lines: list[str] = []
    looking = search(World(1, time=5))
    looking.say = lines.append
    looking.run()
    assert looking.cut and lines[0] == "trying event"
    whole = search(World(1))
    whole.run()
    assert not whole.cut
