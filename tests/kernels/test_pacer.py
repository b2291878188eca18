"""The pacer: levels from the time that is left, logged, and the same again when replayed."""

from __future__ import annotations

import time

import pytest

from ralo import _core

LEVELS = 3
TURNS = 13  # tokens in which layers take turns at all levels


def token(pacer: _core.Pacer, seconds: float, layer_s: tuple[float, ...] = (0.0, 0.0, 0.0)) -> list[int]:
    """One token of three layers, which take so long at each level; the levels."""
    pacer.begin(seconds)
    for layer in range(3):
        level = pacer.level(layer)
        time.sleep(layer_s[level])
    pacer.end()
    return list(pacer.used)


def warm() -> _core.Pacer:
    """One that knows what its layers take; a moment in which the machine was busy is forgotten."""
    pacer = _core.Pacer(LEVELS, 3, 1)
    for _ in range(60):
        token(pacer, 1e6)
    return pacer


def test_without_a_budget_the_level_is_still():
    for still in range(3):
        pacer = _core.Pacer(LEVELS, 3, still)
        assert [pacer.level(layer) for layer in (0, 1, 2, 0)] == [still] * 4
        assert list(pacer.used) == [] and pacer.levels == 3 and pacer.least == 0


def test_replayed_levels_are_given_and_logged():
    pacer = _core.Pacer(LEVELS, 3, 1)
    pacer.replay([2, 0, 1])
    assert [pacer.level(layer) for layer in (0, 0, 1, 2, 1)] == [2, 2, 0, 1, 0]
    assert list(pacer.used) == [2, 0, 1] and pacer.end() >= 0
    assert pacer.level(0) == 1 and list(pacer.used) == [2, 0, 1]  # no token is under way
    pacer.replay([0])
    assert [pacer.level(layer) for layer in range(3)] == [0, 1, 1]  # what is not known is still
    pacer.replay([9, 0, 0])
    assert pacer.level(0) == 2  # there is no more


def test_replaying_teaches_nothing():
    pacer = _core.Pacer(LEVELS, 3, 1)
    pacer.replay([0, 0, 0])
    for layer in range(3):
        pacer.level(layer)
    pacer.end()
    assert pacer.least == 0


@pytest.mark.parametrize("seconds", [1e6, 0.0])
def test_layers_take_turns_at_first(seconds):
    """The first token does the least, then every layer is at every level, whatever time there is."""
    pacer = _core.Pacer(LEVELS, 3, 1)
    assert token(pacer, seconds) == [2, 2, 2]
    for t in range(1, TURNS):
        assert list(pacer.seconds) == [0, 0, 0]
        assert token(pacer, seconds) == [t % 3, (t + 1) % 3, (t + 2) % 3]
    assert min(pacer.seconds) > 0 and pacer.least == pytest.approx(3 * pacer.seconds[2])
    assert token(pacer, seconds) == ([0, 0, 0] if seconds else [2, 2, 2])


def test_what_the_turns_show():
    """Medians: a slow moment is none of theirs. A level with less work does not take longer."""
    pacer = _core.Pacer(LEVELS, 3, 1)
    token(pacer, 1e6, (0.05, 0.05, 0.05))  # says nothing
    for t in range(1, TURNS):
        token(pacer, 1e6, (0.2, 0.2, 0.2) if t == 5 else (0.004, 0.008, 0.001))
    all_of_it, less, least = pacer.seconds
    assert 0.004 <= all_of_it == less < 0.008 and 0.001 <= least < 0.004


@pytest.mark.parametrize("layers", [2, 3])
def test_few_layers_and_many_levels(layers):
    """Not every level had its turn; none is taken to cost nothing."""
    pacer = _core.Pacer(13, layers, 6)

    def run(seconds: float) -> list[int]:
        pacer.begin(seconds)
        for layer in range(layers):
            pacer.level(layer)
            time.sleep(0.001)
        pacer.end()
        return list(pacer.used)

    for _ in range(TURNS):
        run(1e6)
    assert min(pacer.seconds) >= 0.001 and list(pacer.seconds) == sorted(pacer.seconds, reverse=True)
    assert run(0.0) == run(1e-4) == [12] * layers and run(1e6) == [0] * layers


def test_plenty_of_time_is_all_of_the_work_and_none_the_least():
    pacer = warm()
    for _ in range(3):
        assert token(pacer, 1e6) == [0, 0, 0]
        assert token(pacer, 0.0) == token(pacer, -1.0) == [2, 2, 2]


def test_a_layer_has_one_level():
    pacer = warm()
    pacer.begin(1e6)
    first = pacer.level(0)
    time.sleep(0.01)
    assert pacer.level(0) == first and len(pacer.used) == 1
    assert pacer.level(2) == 0 and len(pacer.used) == 3  # a layer in between that asked for nothing has one too


def test_layers_that_come_late_do_less():
    """The first layers had time, the last has none left."""
    pacer = warm()
    pacer.begin(1.0)
    assert pacer.level(0) == 0
    time.sleep(1.1)
    assert pacer.level(1) == pacer.level(2) == 2
    assert pacer.end() >= 1.1


def test_what_is_left_over_is_not_spent():
    """A token that began with less work goes on with it, though there is time now."""
    pacer = _core.Pacer(LEVELS, 3, 1)
    for _ in range(TURNS):
        token(pacer, 1e6, (0.02, 0.005, 0.001))
    pacer.begin(0.04)
    assert [pacer.level(layer) for layer in range(3)] == [1, 1, 1]
    assert pacer.end() < 0.02  # there was time for all of the work of the last ones


@pytest.mark.parametrize(("seconds", "level"), [(1.0, 0), (0.04, 1), (0.009, 2), (0.001, 2)])
def test_a_token_begins_at_the_first_level_that_fits(seconds, level):
    pacer = _core.Pacer(LEVELS, 3, 1)
    for _ in range(TURNS):
        token(pacer, 1e6, (0.02, 0.005, 0.001))
    pacer.begin(seconds)
    assert pacer.level(0) == level


def test_it_learns_what_layers_take():
    """Slow layers: the least that can be done takes longer, and what is not enough for all of the work is known."""
    pacer = _core.Pacer(LEVELS, 3, 1)
    for _ in range(TURNS + 4):
        token(pacer, 1e6, (0.001, 0.001, 0.001))
    before = pacer.least
    for _ in range(40):
        token(pacer, 1e6, (0.01, 0.01, 0.01))
    assert pacer.least > before and pacer.seconds[0] > 0.004
    assert token(pacer, 0.012) > [0, 0, 0] and token(pacer, 1e6) == [0, 0, 0]


def test_a_slow_moment_makes_the_rest_of_a_token_do_less():
    pacer = _core.Pacer(LEVELS, 8, 1)

    def run(seconds: float, late: float) -> list[int]:
        pacer.begin(seconds)
        for layer in range(8):
            time.sleep((0.004, 0.002, 0.001)[pacer.level(layer)] + (late if layer < 4 else 0))
        pacer.end()
        return list(pacer.used)

    for _ in range(TURNS):
        run(1e6, 0)
    assert run(0.1, 0) == [0] * 8
    levels = run(0.1, 0.015)  # by the clock alone the fourth would have time for all of the work
    assert levels[:3] == [0, 0, 0] and levels[3] > 0
    run(0.1, 0.015)
    assert run(0.08, 0)[0] > 0  # the next token expects it to last
    for _ in range(12):
        run(0.08, 0)
    assert run(0.08, 0)[0] == 0


def test_seconds_of_a_token():
    pacer = warm()
    pacer.begin(1.0)
    pacer.level(0)
    time.sleep(0.02)
    assert pacer.end() >= 0.02


@pytest.mark.parametrize(("levels", "layers", "still"), [(0, 1, 0), (1, 0, 0), (2, 1, 2), (257, 1, 0)])
def test_wrong_arguments_are_refused(levels, layers, still):
    with pytest.raises(ValueError):
        _core.Pacer(levels, layers, still)


@pytest.mark.parametrize("way", ["still", "timed", "replayed"])
def test_a_layer_that_is_not_there_is_refused(way):
    pacer = _core.Pacer(2, 2, 0)
    if way == "timed":
        pacer.begin(1.0)
    elif way == "replayed":
        pacer.replay([0, 1])
    with pytest.raises(ValueError, match="no such layer"):
        pacer.level(2)
    assert list(pacer.used) == [] and pacer.level(1) >= 0


@pytest.mark.parametrize("levels", [[256], [-1], ["a"], 3])
def test_wrong_levels_are_refused(levels):
    with pytest.raises(TypeError):
        _core.Pacer(LEVELS, 1, 0).replay(levels)
