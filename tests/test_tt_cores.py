"""Chains of cores: what they stand for, one scale for all, and the nearest chain to a matrix."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_cores import off, random_cores

from ralo.tt.cores import Cores
from ralo.tt.svd import tt_svd

SHAPES = [((6,), (5,)), ((4, 6), (5, 3)), ((9, 1), (1, 8)), ((3, 4, 5), (4, 2, 3)), ((2, 3, 2, 3), (3, 2, 2, 1))]
SOME = random_cores((3, 4, 5), (4, 2, 3), 3)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def unfolded(w: np.ndarray, ins: tuple[int, ...], outs: tuple[int, ...], k: int) -> np.ndarray:
    """The matrix whose rank is that of the bond after core k - 1: first k digits of both against the others."""
    i, o = prod(ins[:k]), prod(outs[:k])
    return w.reshape(i, prod(ins[k:]), o, prod(outs[k:])).transpose(0, 2, 1, 3).reshape(i * o, -1)


def test_every_entry_is_a_product_of_its_digits():
    ins, outs = SOME.ins, SOME.outs
    assert (ins, outs, SOME.ranks) == ((3, 4, 5), (4, 2, 3), (1, 3, 3, 1))
    assert SOME.size == 3 * 4 * 3 + 3 * 4 * 2 * 3 + 3 * 5 * 3
    w, (first, second, third) = SOME.full(), SOME.cores
    assert w.shape == (60, 24)
    for row, (a, b, c) in enumerate(np.ndindex(*ins)):
        for col, (p, q, r) in enumerate(np.ndindex(*outs)):
            assert w[row, col] == pytest.approx((first[:, a, p] @ second[:, b, q] @ third[:, c, r]).item())
    rows, cols = np.random.default_rng(1).integers(24, size=(2, 5, 7))
    np.testing.assert_allclose(SOME.at(rows, cols), w[rows, cols])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 5),
    st.booleans(),
)
def test_apply_is_a_product_with_the_matrix(digits, rank, tokens, backwards):
    cores = random_cores(*zip(*digits, strict=True), rank)
    x = normal(tokens, prod(cores.ins))
    before = x.copy()
    y = cores.apply(x, backwards)
    assert y.shape == (tokens, prod(cores.outs)) and np.array_equal(x, before)
    np.testing.assert_allclose(y, x @ cores.full(), atol=1e-9)


# ---------------------------------------------------------------- one scale


def scaled(cores: Cores, *scales: float | np.ndarray) -> Cores:
    return Cores(tuple(core * scale for core, scale in zip(cores.cores, scales, strict=True)))


def skewed(cores: Cores) -> Cores:
    """The same matrix: what one core of a bond is multiplied by, the next one is divided by."""
    parts = list(cores.cores)
    for k, r in enumerate(cores.ranks[1:-1]):
        skew = normal(r, r, seed=k) * 10.0 ** np.linspace(-2, 2, r)
        parts[k], parts[k + 1] = np.tensordot(parts[k], skew, 1), np.tensordot(np.linalg.inv(skew), parts[k + 1], 1)
    return Cores(tuple(parts))


STRETCH = 10.0 ** np.array([6, 0, -6])  # of a bond: one side longer, the other shorter
BAD = {
    "as they are": SOME,
    "large and small": scaled(SOME, 1e6, 1e-6, 1),
    "very large and small": scaled(SOME, 1e200, 1e-200, 1e-100),
    "a stretched bond": scaled(SOME, STRETCH, 1 / STRETCH[:, None, None, None], 1),
    "ranks larger than they can be": random_cores((2, 2, 2), (1, 3, 1), 9),
    "one core": random_cores((6,), (5,), 1),
}


@pytest.mark.parametrize("name", BAD)
def test_normalised_cores_are_the_same_matrix_and_of_one_norm(name):
    cores = BAD[name].normalised()
    w, want = cores.full(), BAD[name].full()
    np.testing.assert_allclose(w, want, rtol=1e-9, atol=1e-9 * np.abs(want).max())
    norms = [np.linalg.norm(core) for core in cores.cores]
    assert norms == pytest.approx([norms[0]] * len(norms))
    for core, norm in zip(cores.cores[:-1], norms, strict=False):
        r = core.shape[3]
        columns = core.reshape(-1, r)
        np.testing.assert_allclose(columns.T @ columns, np.eye(r) * norm**2 / r, atol=1e-9 * norm**2)
    for k, r in enumerate(cores.ranks):
        assert r <= min(prod(cores.ins[:k]) * prod(cores.outs[:k]), BAD[name].ranks[k])


@pytest.mark.parametrize("name", ["large and small", "a stretched bond"])
def test_only_normalised_cores_fit_half_precision(name):
    def half(cores: Cores) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return Cores(tuple(core.astype(np.float16).astype(np.float64) for core in cores.cores)).full()

    want = BAD[name].full()
    assert off(half(BAD[name].normalised()), want) < 2e-3
    assert not off(half(BAD[name]), want) < 0.1


def test_zero_stays_zero():
    zero = scaled(SOME, 1.0, 0.0, 1.0).normalised()
    assert not any(core.any() for core in zero.cores) and zero.full().shape == (60, 24)


# ---------------------------------------------------------------- refusals


def spoilt(k: int, *core: np.ndarray) -> tuple[np.ndarray, ...]:
    """`SOME` with another core in place of core k, or without it."""
    return (*SOME.cores[:k], *core, *SOME.cores[k + 1 :])


@pytest.mark.parametrize(
    ("cores", "says"),
    [
        ((), "there are no cores"),
        (spoilt(2), "rank 3 before core.2, where it wants 1"),
        (spoilt(0, normal(2, 3, 4, 3)), "rank 1 before core.0, where it wants 2"),
        (spoilt(1, normal(2, 4, 2, 3)), "rank 3 before core.1, where it wants 2"),
        (spoilt(2, normal(3, 5, 3, 2)), "rank 2 before core.3, where it wants 1"),
        (spoilt(1, normal(3, 8, 3)), r"core.1 has shape \(3, 8, 3\), not"),
        (spoilt(1, normal(3, 0, 2, 3)), r"core.1 has shape \(3, 0, 2, 3\), not"),
    ],
)
def test_what_is_no_chain(cores, says):
    with pytest.raises(ValueError, match=says) as error:
        Cores(cores)
    assert "\n" not in str(error.value)


def test_inputs_of_another_size():
    with pytest.raises(ValueError, match="59 inputs for cores of 60"):
        SOME.apply(normal(2, 59))


# ---------------------------------------------------------------- singular values


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e150])
def test_all_singular_values_are_exact(ins, outs, scale):
    w = normal(prod(ins), prod(outs))
    cores = tt_svd(w * scale, ins, outs)
    assert (cores.ins, cores.outs) == (ins, outs)
    assert off(cores.full() / scale, w) < 1e-12


@pytest.mark.parametrize(("ins", "outs"), SHAPES[1:])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_ranks_that_are_there_are_found(ins, outs, rank):
    right = random_cores(ins, outs, rank)
    w = right.full()
    ranks = tuple(np.linalg.matrix_rank(unfolded(w, ins, outs, k)) for k in range(len(ins) + 1))
    cores = tt_svd(w, ins, outs)
    assert cores.ranks == ranks and off(cores.full(), w) < 1e-12


@pytest.mark.parametrize(("ins", "outs"), SHAPES[1:])
@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_the_error_is_between_that_of_one_bond_and_of_all(ins, outs, rank):
    w = normal(prod(ins), prod(outs))
    bonds = [np.linalg.svd(unfolded(w, ins, outs, k), compute_uv=False) for k in range(1, len(ins))]
    lost = [np.linalg.norm(values[rank:]) for values in bonds]
    cores = tt_svd(w, ins, outs, rank)
    assert max(cores.ranks) <= rank
    error = np.linalg.norm(cores.full() - w)
    assert max(lost) - 1e-9 <= error <= np.linalg.norm(lost) + 1e-9


@pytest.mark.parametrize(("ins", "outs"), SHAPES[1:])
@pytest.mark.parametrize("gap", [0.01, 0.2, 0.5, 0.9])
def test_the_gap_is_kept_to_and_used(ins, outs, gap):
    w = normal(prod(ins), prod(outs)) * 0.8 ** np.arange(prod(outs))
    exact = tt_svd(w, ins, outs)
    cores = tt_svd(w, ins, outs, gap=gap)
    assert off(cores.full(), w) <= gap
    if len(ins) == 2:
        assert off(tt_svd(w, ins, outs, cores.ranks[1] - 1).full(), w) > gap or cores.ranks[1] == 1
    if gap >= 0.2:
        assert cores.size < exact.size


def test_rank_and_gap_both_count():
    w = normal(24, 15)
    assert tt_svd(w, (4, 6), (5, 3), 2, 1e-9).ranks == (1, 2, 1)
    assert tt_svd(w, (4, 6), (5, 3), 12, 0.9).ranks[1] < 4


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_a_zero_matrix_has_zero_cores(ins, outs):
    zero = scaled(random_cores(ins, outs, 3), *[0.0] * len(ins))
    cores = tt_svd(zero.full(), ins, outs)
    assert set(cores.ranks) == {1} and not any(core.any() for core in cores.cores)


@pytest.mark.parametrize(
    ("w", "ins", "outs", "says"),
    [
        (np.ones((6, 4)), (2, 2), (2, 2), r"\(6, 4\) is not of digits \(2, 2\) x \(2, 2\)"),
        (np.ones((4, 4)), (2, 2), (4,), "is not of digits"),
        (np.full((4, 4), np.nan), (2, 2), (2, 2), "not finite"),
    ],
)
def test_refusals(w, ins, outs, says):
    with pytest.raises(ValueError, match=says):
        tt_svd(w, ins, outs)
