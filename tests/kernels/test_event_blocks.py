"""Blocks of channels that keep their last result: the document's form, against the same in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernels.test_event_input import QUANTS, WIDTH, D, Half, near, walk
from pairwise import pairwise
from reference import event as ref

from ralo import _core
from ralo.matrix import padded


def slot(rule: ref.BlocksRule) -> _core.EventBlocks:
    return _core.EventBlocks(rule.n, rule.block, [rule.most], rule.theta, rule.beta, rule.decay, rule.age_max, 0, None)


def rule(place: str = "o", **settings) -> ref.BlocksRule:
    n = D if place == "qkv" else WIDTH
    return ref.BlocksRule(**{"n": n, "block": 16, "most": 2} | settings)


def wanted(half: Half, blocks: ref.Blocks) -> np.ndarray:
    """What the map should give after the step that half has just run."""
    y = blocks.step(half.given[0]) + half.matrix.bias
    return y[None] if half.place == "o" else np.concatenate([y[half.matrix.slices[name]] for name in "kv"])[None]


@pytest.mark.parametrize(
    ("quant", "place", "block", "theta", "fade", "age_max"),
    pairwise(QUANTS, ("qkv", "o"), (1, 16, 30), (0.0, 1.2), ((0.9, 0.1), (1.0, 0.0), (0.5, 1.0)), (3, 64)),
)
def test_it_is_the_documents_form(level, threads, quant, place, block, theta, fade, age_max):
    beta, decay = fade
    settings = rule(place, block=block, theta=theta, beta=beta, decay=decay, age_max=age_max)
    half = Half(place, slot(settings), quant)
    blocks = ref.Blocks(settings, half.w)
    for t, x in enumerate(walk(20)):
        near(half.run(x[None], t), wanted(half, blocks), quant)
    assert half.slot.counts()["sent"] == blocks.sent < 20 * settings.n and half.slot.nonfinite == 0


@pytest.mark.parametrize("place", ["qkv", "o"])
@pytest.mark.parametrize("quant", QUANTS)
def test_all_blocks_are_dense_up_to_rounding(level, quant, place):
    """The weights are made to add up to the number of blocks: to one would make an average of a sum."""
    half = Half(place, slot(rule(place, most=100, beta=0.3)), quant)
    for t, x in enumerate(walk(6)):
        dense = half.run(x[None], t, state=False)
        near(half.run(x[None], t), dense, quant)
    assert half.slot.counts()["sent"] == half.slot.counts()["channels"]


def test_old_results_count_less(level):
    """One block of five moves, and is computed; the four others are as old as the text, and weigh the same."""
    settings = rule(most=1, block=16, beta=0.5, decay=0.25)
    half = Half("o", slot(settings))
    for t, x in enumerate(walk(5)):
        got = half.run(x[None], t)
        given = half.given[0].astype(np.float64)
        if t == 0:
            results = np.stack([half.w[:, b : b + 16] @ given[b : b + 16] for b in range(0, WIDTH, 16)])
            age, before = np.zeros(5), given
            continue
        moved = int(np.argmax([np.linalg.norm((given - before)[b : b + 16]) for b in range(0, WIDTH, 16)]))
        before, age = given, age + 1
        age[moved], results[moved] = 0, half.w[:, 16 * moved :][:, :16] @ given[16 * moved :][:16]
        weight = np.where(age == 0, 1, 0.5 * np.exp(-0.25 * age))
        near(got, (5 / weight.sum() * weight @ results + half.matrix.bias)[None])


@pytest.mark.parametrize("age_max", [1, 2, 5])
def test_a_block_that_is_too_old_is_computed(level, age_max):
    """No block moves enough: all are computed at the first token and whenever they would grow older."""
    half, sent = Half("o", slot(rule(theta=1e9, age_max=age_max))), []
    for t, x in enumerate(walk(13)):
        before = half.slot.counts()["sent"]
        half.run(x[None], t)
        sent.append(half.slot.counts()["sent"] - before)
    assert sent == [WIDTH if t % (age_max + 1) == 0 else 0 for t in range(13)]


@pytest.mark.parametrize("quant", QUANTS)
def test_several_tokens_equal_one_by_one(level, threads, quant):
    x, settings = walk(9), rule("qkv", theta=0.9, age_max=3)
    together, single = Half("qkv", slot(settings), quant), Half("qkv", slot(settings), quant)
    one = np.concatenate([single.run(x[t : t + 1], 3 + t) for t in range(9)])
    assert np.array_equal(together.run(x, 3), one)
    assert together.slot.counts() == single.slot.counts() and together.read == single.read


@pytest.mark.parametrize("place", ["qkv", "o"])
@pytest.mark.parametrize("quant", QUANTS)
def test_counters(level, quant, place):
    settings = rule(place)
    half, x = Half(place, slot(settings), quant), walk(10)
    blocks = ref.Blocks(settings, half.w)
    for t in range(10):
        half.run(x[t : t + 1], t)
        blocks.step(half.given[0])
    n, each = settings.n, half.bytes // settings.n
    assert n < blocks.sent <= n + 9 * 32
    assert half.slot.counts() == {
        "steps": 10, "channels": 10 * n, "sent": blocks.sent,
        "bytes_read": blocks.sent * each, "bytes_skipped": (10 * n - blocks.sent) * each,
    }  # fmt: skip
    assert half.read == blocks.sent * each


def test_state_survives_trim_and_clone(level):
    half, x = Half("o", slot(rule())), walk(8)
    for t in range(4):
        half.run(x[t : t + 1], t)
    copy = half.state.clone()
    assert half.state.nbytes == copy.nbytes == 4 * (WIDTH + 5 * padded(D) + 5)
    half.state.trim(4)
    on = [half.run(x[t : t + 1], t) for t in range(4, 8)]
    half.state = copy.clone()
    half.run(-x[4:5], 4)  # another text
    half.state = copy
    assert np.array_equal([half.run(x[t : t + 1], t) for t in range(4, 8)], on)
    before = half.slot.counts()["sent"]
    half.state.trim(6)
    near(half.run(x[6:7], 6), half.run(x[6:7], 6, state=False))  # all blocks, as at the start of a text
    assert half.slot.counts()["sent"] - before == WIDTH
    near(half.run(x[7:8], 30), half.run(x[7:8], 30, state=False))  # tokens are missing
    assert half.slot.counts()["sent"] - before == 2 * WIDTH


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("place", ["qkv", "o"])
def test_a_planted_nan_is_caught(level, place, tokens):
    half, x = Half(place, slot(rule(place)), "int8"), walk(3 + tokens)
    half.run(x[:3], 0)
    dense = half.run(x[3:], 3, state=False)
    half.slot.plant = True
    assert np.array_equal(half.run(x[3:], 3), dense)
    assert half.slot.nonfinite == 1 and not half.slot.plant and half.state.nbytes == 0


def test_a_broken_input_is_what_dense_makes_of_it(level):
    half, x = Half("o", slot(rule())), walk(3)
    half.run(x[:1], 0)
    x[1, 5] = np.nan
    dense = half.run(x[1:2], 1, state=False)
    np.testing.assert_array_equal(half.run(x[1:2], 1), dense)
    assert np.isnan(dense).any() and half.slot.nonfinite == 1
    near(half.run(x[2:3], 2), half.run(x[2:3], 2, state=False))


def test_a_level_says_how_many(level):
    pacer = _core.Pacer(2, 1, 1)
    occupant = _core.EventBlocks(WIDTH, 16, [5, 1], 0.0, 0.9, 0.1, 64, 0, pacer)
    half = Half("o", occupant)
    sent = []
    for t, x in enumerate(walk(4)):
        pacer.replay([t % 2])
        half.run(x[None], t)
        sent.append(occupant.counts()["sent"])
    assert sent == [WIDTH, WIDTH + 16, 2 * WIDTH + 16, 2 * WIDTH + 32]


@pytest.mark.parametrize("wrong", [{"n": 0}, {"block": 0}, {"age_max": 0}], ids=str)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError):
        slot(replace(rule(), **wrong))
    with pytest.raises(ValueError):
        _core.EventBlocks(8, 4, [1, 2], 0.0, 0.9, 0.1, 4, 0, None)
