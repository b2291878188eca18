"""Ranks that are shared out: within the budget, more where it is felt, and none where factors save nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ralo.tt.ranks import DENSE, UNIT, Choice, allotted


@pytest.fixture(autouse=True)
def second_step_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes in time is too much for matrices as small as these."""
    monkeypatch.setattr("ralo.tt.ranks.STEP", 0)


def choice(ic: int = 512, oc: int = 768, kl: float = 1.0, fall: float = 0.01) -> Choice:
    each = ic + oc
    return Choice(np.exp(-fall * np.arange(min(ic, oc))), kl, 128, each, ic * oc)


CHOICES = {
    (i, place): choice(*size, kl=3.0**i)
    for i in range(4)
    for place, size in {"qkv": (512, 768), "o": (512, 512)}.items()
}


def spent(ranks: dict[tuple[int, str], int], choices: dict[tuple[int, str], Choice]) -> int:
    return sum(c.size(ranks[key]) for key, c in choices.items())


def whole(choices: dict[tuple[int, str], Choice]) -> int:
    return sum(c.dense for c in choices.values())


def test_what_a_place_can_do():
    c = choice()
    assert c.most == 256 and c.most * c.each < c.dense <= (c.most + UNIT) * c.each
    assert (c.size(DENSE), c.size(64)) == (512 * 768, 64 * 1280)
    assert (c.cost(DENSE), c.cost(c.probe)) == (0, pytest.approx(c.kl))
    costs = [c.cost(rank) for rank in range(UNIT, c.most + 1, UNIT)]
    assert costs == sorted(costs, reverse=True)
    missed = [np.square(c.singular[r:]).sum() for r in (64, 128)]
    assert c.cost(64) == pytest.approx(c.kl * missed[0] / missed[1])
    assert choice(128, 128).most == 0 and choice(256, 256).most == UNIT  # two factors of 128 save nothing
    assert replace(c, singular=np.zeros(512)).cost(64) == 0


@pytest.mark.parametrize("share", [0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_the_budget_is_kept_to_and_used(share):
    ranks = allotted(share, CHOICES)
    assert ranks.keys() == CHOICES.keys()
    assert all(r == DENSE or (r % UNIT == 0 and UNIT <= r <= CHOICES[k].most) for k, r in ranks.items())
    assert share - 0.1 < spent(ranks, CHOICES) / whole(CHOICES) <= share
    left = share * whole(CHOICES) - spent(ranks, CHOICES)
    for key, rank in ranks.items():  # there is no step that could still be paid
        if rank != DENSE:
            c = CHOICES[key]
            assert c.dense - c.size(rank) > left
            assert rank == c.most or c.each * UNIT > left


def test_more_goes_to_what_is_felt_more():
    ranks = allotted(0.55, CHOICES)
    for place in ("qkv", "o"):
        of_layers = [ranks[i, place] or 10_000 for i in range(4)]  # dense is the most
        assert of_layers == sorted(of_layers) and of_layers[0] < of_layers[-1]
    alike = {key: replace(c, kl=1.0) for key, c in CHOICES.items()}
    assert allotted(0.55, alike) != ranks


def test_all_of_the_budget_leaves_all_dense():
    assert set(allotted(1.0, CHOICES).values()) == {DENSE}


def test_too_small_a_budget_gives_the_lowest_ranks():
    assert set(allotted(0.0, CHOICES).values()) == {UNIT}
    assert allotted(0.5, {}) == {}


def test_places_that_are_too_small_stay_dense_and_count():
    choices = {(0, "o"): choice(128, 128), (1, "o"): choice(512, 512)}
    ranks = allotted(0.7, choices)
    assert ranks[0, "o"] == DENSE and ranks[1, "o"] >= UNIT
    assert spent(ranks, choices) <= 0.7 * whole(choices)
    assert allotted(0.0, choices) == {(0, "o"): DENSE, (1, "o"): UNIT}


def test_what_costs_nothing_gets_nothing():
    """Dense is where it is felt, though the other could be paid as well."""
    choices = {(0, "o"): choice(kl=0.0), (1, "o"): choice(kl=1.0)}
    ranks = allotted(0.65, choices)
    assert ranks == {(0, "o"): UNIT, (1, "o"): DENSE}
