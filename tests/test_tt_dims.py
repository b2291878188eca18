"""Digits of sizes, and the cost of a token: against all splits and against multiplications that are counted."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_cores import random_cores

from ralo.tt.cores import Cores
from ralo.tt.dims import cheaper_order, choose, cost

SIZES = [1, 2, 3, 7, 12, 64, 97, 288, 576, 641, 768, 896, 1536, 2048, 4864, 11008]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_products_match(count):
    for inputs, outputs in product(SIZES, SIZES):
        ins, outs = choose(inputs, outputs, count)
        assert len(ins) == len(outs) == count and prod(ins) == inputs and prod(outs) == outputs
        assert list(ins) == sorted(ins)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("inputs", "outputs"), [(12, 18), (16, 30), (24, 7), (13, 13), (60, 36), (1, 30)])
def test_no_split_is_more_balanced(count, inputs, outputs):
    def splits(size):
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        return [digits for digits in product(divisors, repeat=count) if prod(digits) == size]

    def key(ins, outs):
        return sum(n * m for n, m in zip(ins, outs, strict=True)), sum(ins) + sum(outs)

    assert key(*choose(inputs, outputs, count)) == min(key(*both) for both in product(splits(inputs), splits(outputs)))


@pytest.mark.parametrize(
    ("sizes", "digits"),
    [
        ((640, 640, 2), ((20, 32), (32, 20))),
        ((1024, 1024, 2), ((32, 32), (32, 32))),
        ((512, 512, 3), ((8, 8, 8), (8, 8, 8))),
        ((97, 97, 2), ((1, 97), (97, 1))),
        ((97, 1, 2), ((1, 97), (1, 1))),
    ],
)
def test_known_digits(sizes, digits):
    assert choose(*sizes) == digits


def test_sizes_of_models_are_split_evenly():
    for inputs, outputs in ((640, 960), (576, 1536), (896, 4864), (4096, 11008), (11008, 4096), (2048, 32000)):
        pairs = [n * m for n, m in zip(*choose(inputs, outputs, 2), strict=True)]
        assert max(pairs) < 1.5 * min(pairs)


@pytest.mark.parametrize("sizes", [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_refusals(sizes):
    with pytest.raises(ValueError, match=f"has no {sizes[2]} digits"):
        choose(*sizes)


# ---------------------------------------------------------------- cost


def counted(cores: Cores, x: np.ndarray, backwards: bool) -> tuple[np.ndarray, int]:
    """x (inputs) -> outputs, one multiplication after the other, and how many there were.

    A state is a value for every (digits of inputs left, digits of outputs done, rank).
    """
    count = 0
    state = {(digits, (), 0): x[at] for at, digits in enumerate(np.ndindex(*cores.ins))}
    for core in cores.cores[::-1] if backwards else cores.cores:
        after: dict = {}
        for (left, done, r), value in state.items():
            rest, i = (left[:-1], left[-1]) if backwards else (left[1:], left[0])
            weights = core[:, i, :, r].T if backwards else core[r, i]  # (outputs, ranks)
            for (o, s), weight in np.ndenumerate(weights):
                key = (rest, (o, *done) if backwards else (*done, o), s)
                after[key] = after.get(key, 0.0) + value * weight
                count += 1
        state = after
    return np.array([state[(), digits, 0] for digits in np.ndindex(*cores.outs)]), count


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3), st.integers(1, 3))
def test_cost_is_what_is_counted(digits, rank):
    ins, outs = zip(*digits, strict=True)
    cores = random_cores(ins, outs, rank)
    x = np.random.default_rng(1).standard_normal(prod(ins))
    for backwards in (False, True):
        y, count = counted(cores, x, backwards)
        np.testing.assert_allclose(y, x @ cores.full(), atol=1e-9)
        assert cost(ins, outs, cores.ranks, backwards) == count
    assert cheaper_order(ins, outs, cores.ranks) == (
        cost(ins, outs, cores.ranks, True) < cost(ins, outs, cores.ranks, False)
    )


def test_the_cheaper_order_is_the_one_that_shrinks_the_state_early():
    assert cost((4, 8), (2, 32), (1, 3, 1)) == 4 * 8 * 2 * 3 + 2 * 3 * 8 * 32
    assert cost((4, 8), (2, 32), (1, 3, 1), backwards=True) == 4 * 8 * 32 * 3 + 32 * 3 * 4 * 2
    assert not cheaper_order((4, 8), (2, 32), (1, 3, 1)) and cheaper_order((8, 4), (32, 2), (1, 3, 1))
    assert not cheaper_order((8, 8), (8, 8), (1, 3, 1))  # of equals the first
