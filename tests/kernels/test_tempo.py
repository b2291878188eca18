"""The pace at which lines from memory are asked for follows what reading costs, and nothing but time depends on it."""

from __future__ import annotations

import random

import pytest

from ralo import _core

NOISE = 0.03
FIRST = 4


def cost(pace: int, best: int, place: int, noise: random.Random) -> float:
    """A tenth more for every step away from the best one; other places take longer anyway."""
    return (1 + 0.1 * abs(pace - best)) * (1 + place % 3) * noise.gauss(1, NOISE)


def read(tempo: _core.Tempo, best: int, times: int, seed: int = 0) -> list[int]:
    noise, paces = random.Random(seed), []
    for i in range(times):
        pace, side = tempo.next()
        tempo.note(pace, side, i % 5 + 1, cost(pace, best, i % 5, noise))
        paces.append(pace)
    return paces


@pytest.mark.parametrize("best", range(_core.Tempo.fastest, _core.Tempo.slowest + 1))
def test_the_best_pace_is_found(best):
    tempo = _core.Tempo(FIRST)
    read(tempo, best, 3000)
    assert tempo.usual == best


def test_a_settled_pace_is_hardly_left():
    tempo = _core.Tempo(FIRST)
    read(tempo, 4, 3000)
    paces = read(tempo, 4, 3000, seed=1)
    assert 0.01 < sum(pace != 4 for pace in paces) / len(paces) < 0.06


def test_the_pace_follows_a_change():
    tempo = _core.Tempo(FIRST)
    read(tempo, 4, 3000)
    read(tempo, 7, 3000)
    assert tempo.usual == 7


def test_noise_alone_moves_it_little():
    tempo = _core.Tempo(FIRST)
    noise = random.Random(0)
    for i in range(20000):
        tempo.note(*tempo.next(), i % 5 + 1, noise.gauss(1, NOISE))
    assert abs(tempo.usual - 4) <= 1


def test_interrupted_readings_do_not_decide():
    tempo, noise = _core.Tempo(FIRST), random.Random(0)
    for i in range(6000):
        late = 20.0 if noise.random() < 0.02 else 1.0
        pace, side = tempo.next()
        tempo.note(pace, side, i % 5 + 1, late * cost(pace, 6, 0, noise))
    assert tempo.usual == 6


def test_at_the_edge_of_the_range_others_are_hardly_tried():
    """Where what is read lies in a cache, asking fastest is best, and trying another pace costs time."""
    tempo = _core.Tempo(_core.Tempo.fastest)
    read(tempo, _core.Tempo.fastest, 3000)
    paces = read(tempo, _core.Tempo.fastest, 3000, seed=1)
    assert 0 < sum(pace != _core.Tempo.fastest for pace in paces) / len(paces) < 0.03


def test_no_pace_outside_the_range():
    for best in (-5, 40):
        assert set(read(_core.Tempo(FIRST), best, 4000)) <= set(range(_core.Tempo.fastest, _core.Tempo.slowest + 1))
