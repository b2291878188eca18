"""The dial at every place: as fast as its budget allows by one price for all, and a plan that says it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo.calibrate import calibrate
from ralo.compose import compose
from ralo.lm import LM
from ralo.modes import KWTA, Mix
from ralo.modes.base import TARGETS
from ralo.modes.share import GRID, KEEP_ALL, Costs, Ways, share_cost, share_time
from ralo.plan import read_plan, tables_of, write_toml
from ralo.profile import Profile
from ralo.timing import TIMED
from ralo.tune.record import Record
from ralo.tune.search import TOGETHER
from ralo.tune.sites import Option, Precision, Sites, modes_of, sites
from ralo.tune.task import NEVER, Wish, dials
from ralo.weights import PLACES

KEYS = [(layer, place) for layer in range(2) for place in PLACES]


def random_sites(seed: int, keys=KEYS, options: int = 6, effort: float = 1e-5) -> Sites:
    """Options that cost more quality the less effort they are; the first costs no quality."""
    rng = np.random.default_rng(seed)
    quality = {key: np.concatenate([[0.0], np.sort(10 ** rng.uniform(-5, -1, options - 1))]) for key in keys}
    times = {key: effort * np.sort(rng.uniform(0.1, 1, options))[::-1] for key in keys}
    return Sites("int8", Mix(), [Option("int8", float(GRID[-1 - i])) for i in range(options)], Costs(quality, times))


def cost(dial: Sites, choice) -> tuple[float, float]:
    """Quality and effort of a choice."""
    at = {key: dial.options.index(option) for key, option in choice.items()}
    return tuple(sum(float(each[key][i]) for key, i in at.items()) for each in (dial.costs.quality, dial.costs.effort))


# ---------------------------------------------------------------- within


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("effort", [1e-6, 1e-3, 1e8], ids=["microseconds", "milliseconds", "bytes"])
def test_a_larger_budget_is_never_slower_and_never_overdrawn(seed, effort):
    dial = random_sites(seed, effort=effort)
    budgets = [0.0, *np.geomspace(1e-6, 1.0, 20)]
    found = [cost(dial, dial.within(budget)) for budget in budgets]
    assert all(quality <= budget for (quality, _), budget in zip(found, budgets, strict=True))
    assert found == sorted(found, key=lambda pair: (pair[0], -pair[1])), "more loss, less effort"
    assert found[0][0] == 0 and found[-1][1] == pytest.approx(sum(e[-1] for e in dial.costs.effort.values()))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("places", [2, 3])
def test_it_is_on_the_convex_hull(seed, places):
    """Of all choices there are, none is better by both; and none lies below the line to the next one it finds."""
    dial = random_sites(seed, KEYS[:places], options=4)
    every = np.array(
        [cost(dial, dict(zip(KEYS, each, strict=False))) for each in product(dial.options, repeat=places)]
    )  # (choices, 2)
    corners = sorted({cost(dial, dial.within(quality)) for quality in every[:, 0]})
    assert len(corners) > 2
    for (q0, e0), (q1, e1) in pairwise(corners):
        price = (q1 - q0) / (e0 - e1)
        assert (every @ (1, price) >= (q0 + price * e0) * (1 - 1e-9)).all()
    for budget in np.geomspace(1e-5, 0.3, 23):
        fastest = every[every[:, 0] <= budget][:, 1].min()
        quality, effort = cost(dial, dial.within(budget))
        beyond = min((c for c in corners if c[0] > quality), default=None)
        assert effort >= fastest, "faster than what there is"
        assert beyond is None or (beyond[0] > budget and beyond[1] <= fastest), "off by no more than one place's step"


def test_where_nothing_fits_the_least_there_is():
    quality = {key: np.array([0.3, 0.2, 0.5]) for key in KEYS}
    for effort in (1e-6, 1e9):
        times = {key: effort * np.array([3.0, 2.0, 1.0]) for key in KEYS}
        dial = Sites("int8", Mix(), [Option("int8", share) for share in (1.0, 0.5, 0.1)], Costs(quality, times))
        assert {o.share for o in dial.within(0.0).values()} == {0.5}


def test_equal_places_get_equal_options():
    curve, times = np.array([0.0, 1e-4, 1e-2]), np.array([3e-6, 2e-6, 1e-6])
    dial = Sites(
        "int8",
        Mix(),
        [Option("int8", s) for s in (1.0, 0.6, 0.2)],
        Costs(dict.fromkeys(KEYS, curve), dict.fromkeys(KEYS, times)),
    )
    for budget in (1e-5, 1e-3, 1e-1):
        assert len(set(dial.within(budget).values())) == 1


def test_a_place_that_feels_more_gives_less():
    times = np.array([3e-6, 2e-6, 1e-6])
    quality = {(0, "up"): np.array([0.0, 1e-4, 1e-3]), (1, "up"): np.array([0.0, 1e-2, 1e-1])}
    dial = Sites(
        "int8", Mix(), [Option("int8", s) for s in (1.0, 0.6, 0.2)], Costs(quality, dict.fromkeys(quality, times))
    )
    assert dial.within(2e-3) == {(0, "up"): Option("int8", 0.2), (1, "up"): Option("int8", 1.0)}


def test_only_some_places():
    dial = random_sites(1)
    some = dial.only({"up", "o"})
    assert set(some.costs.quality) == set(some.costs.effort) == {(i, p) for i in range(2) for p in ("up", "o")}
    assert set(dial.costs.quality) == set(KEYS), "the dial itself is left as it was"
    full = dial.at(1e3)
    assert some.at(1e3) == {key: option for key, option in full.items() if key[1] in ("up", "o")}
    assert dial.only(()).within(1.0) == {} and modes_of({}, "int8", Mix()) == ()


# ---------------------------------------------------------------- options from measured costs


def measured(skipping: bool = True, quants=("int8", "int4")) -> Sites:
    shares = {key: np.where(GRID >= 1, 0.0, (1 - GRID) * (1 + key[0])) for key in KEYS}
    found = {
        "int8": Precision("int8", shares, {place: (10 + i) * GRID for i, place in enumerate(PLACES)}),
        "int4": Precision(
            "int4",
            {key: curve + 0.25 + key[0] for key, curve in shares.items()},
            {place: (5 + i) * GRID for i, place in enumerate(PLACES)},
        ),
    }
    return sites("int8", Mix(), [found[quant] for quant in quants], skipping)


def test_costs_add_up():
    dial = measured()
    assert [(o.quant, o.share) for o in dial.options] == [(q, s) for q in ("int8", "int4") for s in GRID]
    assert 1.0 in GRID and 0.98 in GRID, "all by halves"
    for (layer, place), quality in dial.costs.quality.items():
        effort = dial.costs.effort[layer, place]
        for i, option in enumerate(dial.options):
            coarse = option.quant == "int4"
            skipped = 0.0 if option.share == 1 else (1 - option.share) * (1 + layer)
            assert quality[i] == pytest.approx(coarse * (0.25 + layer) + skipped)
            assert effort[i] == pytest.approx(((5 if coarse else 10) + list(PLACES).index(place)) * option.share)


def test_some_options_only():
    assert [(o.quant, o.share) for o in measured(skipping=False).options] == [("int8", 1.0), ("int4", 1.0)]
    assert {o.quant for o in measured(quants=["int8"]).options} == {"int8"}
    int4 = measured(quants=["int4"], skipping=False)
    assert set(int4.within(0.0).values()) == {Option("int4", 1.0)}, "the least there is"


def test_a_free_choice_is_the_models_own():
    assert set(measured().within(0.0).values()) == {Option("int8", 1.0)}
    assert modes_of(measured().within(0.0), "int8", Mix()) == ()


# ---------------------------------------------------------------- options of a model


TOKENS = np.random.default_rng(4).integers(2, 97, 101).tolist()


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> dict[str, tuple[LM, Profile]]:
    """Models by activation, and times of their places: whole channels by how many they are, and less by halves."""
    seconds = {place: np.array([TIMED, TIMED], np.float32) * [[1], [4 + i]] for i, place in enumerate(PLACES)}
    halved = {place: took * [[1], [0.6]] for place, took in seconds.items()}
    tiled = {place: 0.55 * float(took[1, -1]) for place, took in seconds.items()}
    out = {}
    for act in ("silu", "relu"):
        directory = write_hf(tmp_path_factory.mktemp("sites") / act, "llama", hidden_act=act, hidden_size=128)
        lm = ralo.load(directory, "int8")
        out[act] = lm, replace(calibrate(lm, TOKENS, 40), seconds=seconds, halved=halved, tiled=tiled)
    return out


def dial_of(lm: LM, profile: Profile, goal: str = "latency") -> Sites:
    wish, record = Wish("int8", goal, (8,)), Record(None, {}, 1e9)
    return dials(lm, profile, wish, Mix(), TOKENS, record, lambda share: None)[TOGETHER]


@pytest.mark.parametrize("act", ["silu", "relu"])
def test_options_are_as_the_profile_says(known, act):
    """But for neurons that relu shuts: they are skipped as a whole, and of the gate all is read, at most by halves."""
    lm, profile = known[act]
    dial, both = dial_of(lm, profile), Ways(True, True)
    assert [o.share for o in dial.options] == GRID.tolist() and {o.quant for o in dial.options} == {"int8"}
    open_neurons = np.mean([(gates > 0).mean() for gates in profile.gates.values()])
    for key, quality in dial.costs.quality.items():
        kl, took = share_cost(profile, key, both), share_time(profile, key[1], both)
        if act == "relu" and key[1] == "up":
            kl, took = np.where(GRID < KEEP_ALL, NEVER, kl), (took + open_neurons * took[-1]) / 2
        if act == "relu" and key[1] == "down":
            kl, took = np.where(GRID < 1, NEVER, kl), open_neurons * took
        np.testing.assert_array_equal(quality, kl)
        np.testing.assert_allclose(dial.costs.effort[key], took)
    assert act == "silu" or 0.1 < open_neurons < 0.9


def test_of_gates_that_shut_neurons_all_is_read(known):
    """Whatever the budget: whole or by halves, and the neurons that are open whole."""
    seen: dict[str, dict[str, set[float]]] = {act: {place: set() for place in PLACES} for act in known}
    for act, loss in product(known, (0.0, *np.geomspace(1e-4, 10, 30))):
        for (_, place), option in dial_of(*known[act]).within(loss).items():
            seen[act][place].add(option.share)
    assert seen["relu"]["up"] == {0.98, 1.0} and seen["relu"]["down"] == {1.0}
    assert min(map(len, [seen["relu"]["qkv"], seen["relu"]["o"], *seen["silu"].values()])) > 3
    lm, profile = known["relu"]
    modes = modes_of(dial_of(lm, profile).within(10), "int8", Mix())
    lm.use(compose(modes), profile)
    assert [s.taken["mlp"].runs for s in lm.model.slots] == ["gate first by halves, neurons it does not block"] * 2


@pytest.mark.parametrize("act", ["silu", "relu"])
def test_where_memory_counts_nothing_is_skipped(known, act):
    assert {o.share for o in dial_of(*known[act], goal="memory").options} == {1.0}


# ---------------------------------------------------------------- as modes, as a plan


def settings_at(modes, layer: int, place: str) -> tuple[str, float]:
    """What modes make of a place: its precision and share."""
    quant, share = "int8", 1.0
    for mode in modes:
        here = mode.at(layer, place)
        if isinstance(mode, Mix) and here.enabled and place in TARGETS[mode.target]:
            quant = here.quant
        if isinstance(mode, KWTA):
            share = here.k
    return quant, share


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_says_what_was_chosen(seed, tmp_path):
    rng = np.random.default_rng(seed)
    keys = [(layer, place) for layer in range(12) for place in list(PLACES)[: 2 if seed % 3 == 0 else 4]]
    quants = (["int8"], ["int4"], ["int8", "int4"])[seed % 4 % 3]
    shares = [1.0] if seed % 5 == 0 else [0.1, 0.54, 0.9, 1.0]
    choice = {key: Option(str(rng.choice(quants)), float(rng.choice(shares))) for key in keys}
    modes = modes_of(choice, "int8", Mix())
    for (layer, place), option in choice.items():
        assert settings_at(modes, layer, place) == (option.quant, option.share)
    write_toml(tmp_path / "plan.toml", {"about": {}, **tables_of(modes)})
    read = read_plan(tmp_path / "plan.toml").plan
    assert read.modes == compose(modes).modes == modes
    assert tables_of(read.modes) == tables_of(modes)
    assert modes == modes_of(dict(reversed(choice.items())), "int8", Mix()), "in whatever order places are named"


def test_places_that_are_not_the_dials_are_left_alone():
    (mode,) = modes_of({(0, "up"): Option("int4", 1.0), (0, "down"): Option("int4", 1.0)}, "int8", Mix())
    assert mode == Mix(target="mlp")
    (mode,) = modes_of({(0, "qkv"): Option("int4", 1.0), (0, "o"): Option("int8", 1.0)}, "int8", Mix())
    assert isinstance(mode, Mix) and mode.target == "attn" and not mode.at(0, "o").enabled


def test_one_mode_says_nothing_of_what_the_other_does():
    assert modes_of(dict.fromkeys(KEYS, Option("int4", 1.0)), "int8", Mix()) == (Mix(),)
    (mode,) = modes_of(dict.fromkeys(KEYS, Option("int8", 0.5)), "int8", Mix())
    assert isinstance(mode, KWTA) and mode.k == 1.0 and all(mode.at(*key).k == 0.5 for key in KEYS)
    (mode,) = modes_of(dict.fromkeys(KEYS, Option("int4", 0.5)), "int4", Mix())
    assert isinstance(mode, KWTA), "an int4 model has nothing to mix"
