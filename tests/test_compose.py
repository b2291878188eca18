"""Composition: every pair of modes composes, yields or is refused, by rules that say why."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, permutations
from typing import ClassVar

import pytest

from ralo.compose import REFUSE, RULES, compose
from ralo.errors import RaloError
from ralo.modes import KWTA, MODES, TT, Event, Mix, Proc, StatePack
from ralo.modes.base import Mode

NAMES = ("state-pack", "kwta", "event", "proc", "tt")  # the five of the specification
PAIRS = list(combinations(NAMES, 2))


@dataclass(frozen=True)
class Stand(Mode):
    """A mode that has only what rules look at."""

    name: ClassVar[str] = ""
    block: int = 1
    target: str = "both"
    windows: bool = False
    enabled = True


def stand(mode: str, **settings: object) -> Mode:
    made = type("Stand", (Stand,), {"name": mode})(**settings)
    assert isinstance(made, Mode)
    return made


def notes(*modes: Mode) -> str:
    return "; ".join(compose(modes).notes)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_has_a_rule_that_says_why(pair: tuple[str, str]) -> None:
    rules = [r for r in RULES if {r.a, r.b} == set(pair)]
    assert rules
    for rule in rules:
        assert rule.why and (rule.act != REFUSE or rule.change)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_composes_or_is_refused_with_the_way_out(pair: tuple[str, str]) -> None:
    try:
        plan = compose([stand(name) for name in pair])
    except RaloError as error:
        assert all(name in str(error) for name in pair) and "; " in str(error)
        assert pair == ("proc", "tt")
    else:
        assert {m.name for m in plan.modes} == set(pair)
        assert plan.notes


def test_modes_that_are_there_compose_pairwise() -> None:
    for a, b in combinations(MODES.values(), 2):
        if {a, b} <= {Proc, TT, Mix}:  # one weight backend a layer
            assert compose([a(target="mlp"), b(target="attn")]).modes
        else:
            assert compose([a(), b()]).modes


def test_one_partition_into_blocks() -> None:
    for a, b in combinations(("state-pack", "kwta", "event", "proc"), 2):
        with pytest.raises(RaloError, match=f"{a} and {b} do not go together: all modes share one partition"):
            compose([stand(a, block=32), stand(b, block=16)])
        compose([stand(a, block=32), stand(b, block=32)])
        compose([stand(a, block=1), stand(b, block=32)])


def test_one_ranking_for_kwta_and_event() -> None:
    assert "kwta proposes candidates to event: one ranking" in notes(stand("kwta"), stand("event"))


def test_the_order_they_are_given_in_says_nothing() -> None:
    for given in permutations((StatePack(), KWTA(), Event())):
        assert [mode.name for mode in compose(given).modes] == ["state-pack", "kwta", "event"]


def test_skipping_is_intersected_with_what_exists() -> None:
    for mode in ("kwta", "event"):
        assert f"{mode} is intersected with proc" in notes(stand(mode), stand("proc"))
        assert notes(stand(mode, target="mlp"), stand("proc", target="attn")) == ""
    assert "kwta is intersected with win-attn" in notes(stand("kwta"), stand("win-attn"))


def test_one_weight_backend() -> None:
    with pytest.raises(RaloError, match="proc and tt do not go together: a layer has one weight backend"):
        compose([stand("proc"), stand("tt", target="mlp")])
    assert compose([stand("proc", target="attn"), stand("tt", target="mlp")]).modes
    with pytest.raises(RaloError, match="proc and tt do not go together"):
        compose([Proc(), TT()])
    assert [m.name for m in compose([TT(target="attn"), Proc()]).modes] == ["proc", "tt"]


def test_over_factors_nothing_is_skipped() -> None:
    for mode in ("kwta", "event"):
        assert f"{mode} yields to tt: its factors have no channels" in notes(stand(mode), stand("tt"))
        assert notes(stand(mode, target="attn"), stand("tt", target="mlp")) == ""
    assert "kwta yields to tt" in notes(KWTA(), TT()) and "event yields to tt" in notes(Event(), TT())


def test_event_and_windows() -> None:
    for event in (stand("event"), Event(), Event(target="attn")):
        with pytest.raises(RaloError) as error:
            compose([event, stand("win-attn")])
        said = "deltas of heads do not see windows; use --event-target=mlp, or event on windows"
        assert str(error.value) == f"event and win-attn do not go together: {said}"
    for event in (stand("event", target="mlp"), Event(target="mlp"), stand("event", windows=True)):
        compose([event, stand("win-attn")])


def test_event_and_sparse_codes() -> None:
    with pytest.raises(RaloError, match="event and sdr do not go together: a sparse code is only a top-K filter; use"):
        compose([Event(), stand("sdr", target="attn")])
    compose([Event(target="mlp"), stand("sdr", target="attn")])


def test_event_over_other_weights() -> None:
    assert "event is intersected with proc" in notes(Event(), stand("proc"))
    assert "event yields to tt" in notes(Event(target="attn"), stand("tt", target="attn"))
    assert notes(Event(target="attn"), stand("tt", target="mlp")) == ""


def test_statepack_and_event() -> None:
    for both in ((stand("state-pack"), stand("event")), (StatePack(), Event())):
        assert "state-pack chooses keys instead of event" in notes(*both)
        assert "state-pack gives a zero mask to event" in notes(*both)
    assert "keys" not in notes(StatePack(target="mlp"), Event())
    assert "keys" not in notes(StatePack(), Event(target="mlp"))


def test_event_shares_the_partition_into_blocks() -> None:
    with pytest.raises(RaloError, match="kwta and event do not go together: all modes share one partition"):
        compose([KWTA(block="32"), Event(block="16")])
    compose([KWTA(block="32"), Event(block="32")])
    compose([KWTA(block="32"), Event()])


def test_a_plan_is_verified_where_event_says_so() -> None:
    assert compose([KWTA(), Event(verify="on")]).verified and not compose([KWTA(), Event()]).verified
    assert not compose([KWTA(), Event(verify="on", on="off")]).verified


def test_one_of_statepack_and_kwta_chooses_keys() -> None:
    for target in ("kv", "both"):
        with pytest.raises(RaloError) as error:
            compose([StatePack(target=target), KWTA(keys=0.5)])
        way_out = "both choose keys; use --kwta-keys=1 or --state-pack-target=mlp"
        assert str(error.value) == f"state-pack and kwta do not go together: {way_out}"
    assert "state-pack takes keys and silent neurons from kwta" in notes(StatePack(), KWTA(keys=1.0))
    assert compose([StatePack(target="mlp"), KWTA(keys=0.5)]).modes
    assert compose([StatePack(on="none"), KWTA(keys=0.5)]).modes == (KWTA(keys=0.5),)


def test_codes_work_beside_factors() -> None:
    assert "state-pack works beside tt" in notes(StatePack(), stand("tt"))


def test_modes_that_are_off_are_left_out() -> None:
    assert compose([KWTA(on="off")]).modes == ()
    assert compose([KWTA()]).modes == (KWTA(),)
