"""What a place takes within a token: measured as the difference to dense, place by place, at every precision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import write_hf

import ralo
from ralo import KWTA, _core, timing
from ralo.calibrate import calibrate
from ralo.memory import Arena
from ralo.modes import Mix, kwta
from ralo.modes.base import LayerSlots
from ralo.modes.share import FINE
from ralo.timing import TIMED, Turns, coarse_seconds, head_seconds, seconds
from ralo.tune.costs import coarse_weights
from ralo.weights import PLACES

TOKENS = np.random.default_rng(4).integers(2, 97, 101).tolist()
NS = 1e-9  # seconds that a byte takes here


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("timing") / "tiny", "llama", hidden_size=128, intermediate_size=256)


@pytest.fixture
def by_bytes(monkeypatch):
    """A token takes as long as it reads bytes of weights."""

    def took(self: Turns, slots: list[LayerSlots]) -> float:
        self.model.use(slots)
        self.seq.trim(self.context)
        before = self.model.bytes_read
        self.model.step(self.text[self.context], self.seq)
        return NS * (self.model.bytes_read - before)

    monkeypatch.setattr(timing, "CONTEXT", 0)  # no keys to speak of
    monkeypatch.setattr(Turns, "_took", took)


def opened(directory, quant):
    lm = ralo.load(directory, quant)
    return lm, calibrate(lm, TOKENS, 40)


def place_bytes(lm, place):
    return getattr(lm.model.weights.layers[0], place).nbytes


@pytest.mark.parametrize("quant", ["bf16", "int8", "int4"])
def test_a_place_takes_what_is_read_of_it(directory, by_bytes, quant):
    lm, profile = opened(directory, quant)
    found = seconds(lm, profile, TOKENS)
    for place in PLACES:
        size = NS * place_bytes(lm, place)
        np.testing.assert_allclose(found.whole[place][0], TIMED)
        np.testing.assert_allclose(found.whole[place][1], size * np.array(TIMED), atol=0.05 * size)
        if quant == "int8":  # of 64 weights 32 bytes and a scale of two; of the best ones their other half, or all
            part = (32 + 2) / (64 + 2)
            lists = size * part * (np.array(TIMED) + FINE)
            np.testing.assert_allclose(found.halved[place][0], TIMED)
            np.testing.assert_allclose(found.halved[place][1], lists, atol=0.02 * size)
            assert found.tiled[place] == pytest.approx(size * (part + FINE), abs=0.005 * size)
    assert set(found.whole) == set(PLACES)
    assert set(found.halved) == set(found.tiled) == (set(PLACES) if quant == "int8" else set())
    assert (profile.halved.keys(), profile.tiled) == (found.halved.keys(), found.tiled)


def test_lists_of_all_channels_go_on_as_shorter_ones_do(directory, monkeypatch):
    """Nobody reads all channels as a list: the share 1 of it is not what tiles take."""
    lm = ralo.load(directory, "int8")

    def more(self: Turns, slots: list[LayerSlots]) -> float:
        """Tiles take half of a place's time; of lists those of few channels save most."""
        for place, occupant in slots[0].taken.items():  # one, or none: dense
            less = 0.5 if isinstance(occupant.slot, _core.KwtaTiles) else 0.1 * (2 - occupant.share)
            return -less * self.dense * timing._part(lm, place) * len(slots)
        return 0.0

    monkeypatch.setattr(Turns, "_took", lambda *_: 2.0)
    monkeypatch.setattr(Turns, "more", more)
    found = calibrate(lm, TOKENS, 40)
    for place in PLACES:
        dense = 2.0 * timing._part(lm, place)
        assert found.tiled[place] == pytest.approx(0.5 * dense)
        np.testing.assert_allclose(found.halved[place][1], dense * (0.8 + 0.1 * np.array(TIMED)), rtol=1e-5)
        whole = dense * np.array([*(0.8 + 0.1 * np.array(TIMED[:3])), 1.0])  # all of it is dense
        np.testing.assert_allclose(found.seconds[place][1], whole, rtol=1e-5)


def test_other_weights_take_what_is_read_of_them(directory, by_bytes):
    lm, profile = opened(directory, "int8")
    layers, head = coarse_weights(lm, Mix())
    twice = {place: found * [[1], [2]] for place, found in profile.seconds.items()}  # a slower minute
    profile = replace(profile, seconds=twice)
    found = coarse_seconds(lm, profile, TOKENS, layers, head)
    for place in PLACES:
        size = 2 * NS * getattr(layers[0], place).nbytes
        np.testing.assert_allclose(found.places[place][1], size * np.array(TIMED), atol=0.06 * size)
    assert found.own_head == pytest.approx(2 * NS * lm.model.weights.head.nbytes, rel=0.01)
    assert found.head == pytest.approx(2 * NS * head.nbytes, rel=0.01) and head.nbytes < lm.model.weights.head.nbytes
    alone = coarse_seconds(lm, profile, TOKENS, layers, None)
    assert alone.head == alone.own_head == found.own_head


@pytest.mark.parametrize("quant", ["bf16", "int8", "int4"])
def test_the_head_by_halves(directory, by_bytes, quant, monkeypatch):
    monkeypatch.setattr(kwta, "LIKELY", 1.0)  # no token is
    lm = ralo.load(directory, quant)
    found, head = head_seconds(lm, TOKENS), lm.model.weights.head
    assert not lm.model.has_modes
    if quant == "bf16":
        assert found.tolist() == []
        return
    whole = max(1, round(kwta.HEAD_FINE * head.ic)) * head.nbytes / head.ic
    assert found.tolist() == pytest.approx([NS * head.nbytes, NS * (head.tiles(Arena()).nbytes + whole)], rel=5e-3)
    assert found[1] < 0.55 * found[0]


def test_what_is_read_in_part_lies_on_a_line():
    found = timing._straight([-8.0, -7.0, -3.0, 0.0], [True, True, True, False])
    np.testing.assert_allclose(found, [-8.5, -6.0, -3.5, 0.0])
    np.testing.assert_allclose(timing._straight([1.0, 2.0, 3.0, 4.0], [True] * 4), [1, 2, 3, 4])
    np.testing.assert_allclose(timing._straight([3.0, 2.0, 1.0, 0.0], [True] * 4), [1.5] * 4)  # more never takes less
    np.testing.assert_allclose(timing._straight([0.0] * 4, [False] * 4), [0] * 4)
    np.testing.assert_allclose(timing._straight([-8.0, -7.0, -3.0], [True] * 3), [-8.5, -6.0, -3.5])  # of fewer shares


def test_turns_are_few_where_tokens_are_slow(directory, monkeypatch):
    lm = ralo.load(directory, "f32")
    for once, count, turns in ((1e-5, timing.TOKENS, timing.MOST), (1e-3, 6, 71), (1.0, 1, timing.FEWEST)):
        monkeypatch.setattr(Turns, "_took", lambda *_, once=once: once)
        found = Turns(lm, TOKENS)
        assert (found.count, found.turns, found.dense) == (count, turns, once)


def test_half_of_the_turns_begin_densely_and_a_slow_moment_says_nothing(directory, monkeypatch):
    lm, order = ralo.load(directory, "f32", modes=[KWTA(k=0.5)]), []
    filled = lm.model.slots

    def took(self: Turns, slots: list[LayerSlots]) -> float:
        order.append(slots is filled)
        return (0.75 if slots is filled else 1.0) + 9 * (len(order) % 7 == 0)

    monkeypatch.setattr(Turns, "_took", took)
    turns = Turns(lm, TOKENS)
    order.clear()
    assert turns.more(filled) == -0.25 and len(order) == 2 * turns.turns
    begins = order[::2]
    assert abs(begins.count(True) - begins.count(False)) <= 1 and order[1::2] == [not b for b in begins]
    assert turns.more([LayerSlots() for _ in filled]) == 0.0 and len(order) == 2 * turns.turns  # dense itself


def test_by_the_clock(directory):
    """Whatever the clock says, times are numbers that are not below zero, and the model is dense afterwards."""
    lm, profile = opened(directory, "int8")
    for found in (profile.seconds, profile.halved, profile.tiled):
        assert set(found) == set(PLACES)
        assert all(np.isfinite(took).all() and (np.asarray(took) >= 0).all() for took in found.values())
    seconds(lm, profile, TOKENS[:3])  # a text of a few tokens
    assert not lm.model.has_modes
