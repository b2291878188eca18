"""TT-cross: cores from a few entries, as good as from all of them where ranks are low."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from tiny_cores import off, random_cores

from ralo.tt.cores import Cores
from ralo.tt.cross import SAMPLE, entries_of, tt_cross
from ralo.tt.svd import tt_svd

TWO = (20, 32), (30, 32)
THREE = (8, 8, 10), (8, 10, 12)
FOUR = (3, 4, 2, 5), (2, 3, 4, 3)


@pytest.mark.parametrize(("ins", "outs"), [TWO, THREE, FOUR, ((1, 97), (5, 12)), ((97, 1), (1, 60)), ((30,), (40,))])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_ranks_are_recovered(ins, outs, rank):
    for seed in range(3):
        w = random_cores(ins, outs, rank, seed).full()
        cores = tt_cross(entries_of(w), ins, outs, 4, 8, 0.02, seed=seed)
        assert (cores.ins, cores.outs) == (ins, outs) and max(cores.ranks) <= rank
        assert off(cores.full(), w) < 1e-9


SMALL = [((6, 10), (8, 9)), ((4, 5, 6), (5, 6, 4))]  # singular values of all of it are soon found


def noisy(ins: tuple[int, ...], outs: tuple[int, ...], noise: float, seed: int = 0) -> np.ndarray:
    """Of rank 4 but for `noise` of its norm."""
    clean = random_cores(ins, outs, 4, seed).full()
    return clean + noise * clean.std() * np.random.default_rng(seed).standard_normal(clean.shape)


@pytest.mark.parametrize(("ins", "outs"), SMALL)
@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-3, 0.05])
def test_it_is_near_what_all_entries_give(ins, outs, noise):
    for seed in range(4):
        w = noisy(ins, outs, noise, seed)
        best = tt_svd(w, ins, outs, 4).full()
        found = tt_cross(entries_of(w), ins, outs, 4, 8, 0.02, seed=seed).full()
        assert off(found, best) < max(1.5 * noise, 1e-9)  # the best one's error is `noise` itself


@pytest.mark.parametrize(("ins", "outs"), SMALL)
def test_more_fibres_are_nearer(ins, outs):
    w = noisy(ins, outs, 0.05)
    best = tt_svd(w, ins, outs, 4).full()

    def error(maxvol_k: int) -> float:
        found = [tt_cross(entries_of(w), ins, outs, 4, maxvol_k, 1e-4, seed=seed).full() for seed in range(5)]
        return float(np.mean([off(one, best) for one in found]))

    assert error(16) < 0.5 * error(4)


def test_a_rank_that_is_too_small_gives_something_near_the_best():
    ins, outs = SMALL[1]
    first, second, third = random_cores(ins, outs, 6).cores
    falling = np.exp(-1.5 * np.arange(6))
    w = Cores((first * falling, second * falling, third)).full()
    found = tt_cross(entries_of(w), ins, outs, 3, 8, 1e-4)
    assert max(found.ranks) == 3
    assert off(found.full(), w) < 1.5 * off(tt_svd(w, ins, outs, 3).full(), w)


@pytest.mark.parametrize(("ins", "outs"), [TWO, THREE, ((6,), (5,))])
def test_a_zero_matrix_has_zero_cores(ins, outs):
    cores = tt_cross(lambda rows, cols: np.zeros(rows.shape), ins, outs, 4, 8, 0.02)
    assert set(cores.ranks) == {1} and not any(core.any() for core in cores.cores)


def test_matrices_that_are_mostly_zero():
    """Few fibres meet anything: the first ones go through the strongest entries of the sample."""
    w = np.kron(np.roll(np.eye(20), 3, 1), np.roll(np.eye(32), 5, 1))
    for seed in range(5):
        assert off(tt_cross(entries_of(w), TWO[0], TWO[0], 1, 2, 0.02, seed=seed).full(), w) < 1e-9


def test_scales_do_not_count():
    for scale in (1e-150, 1e150):
        w = random_cores(*TWO, 4).full()
        assert off(tt_cross(entries_of(w * scale), *TWO, 4, 8, 0.02).full() / scale, w) < 1e-9


def test_a_seed_gives_the_same_cores():
    w = np.random.default_rng(1).standard_normal((640, 960))
    one, again, other = (tt_cross(entries_of(w), *TWO, 4, 8, 0.02, seed=seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(one.cores, again.cores, strict=True))
    assert not np.array_equal(one.cores[0], other.cores[0])


@pytest.mark.parametrize(("ins", "outs"), [((32, 64), (64, 64)), ((8, 16, 16), (16, 16, 16))])
def test_few_entries_are_read_and_the_matrix_never_formed(ins, outs):
    right, read = random_cores(ins, outs, 4), 0

    def entries(rows, cols):
        nonlocal read
        read += rows.size
        return right.at(rows, cols)

    cores = tt_cross(entries, ins, outs, 4, 8, 0.02)
    assert read < 0.02 * prod(ins) * prod(outs)
    rows, cols = np.random.default_rng(2).integers([[prod(ins)], [prod(outs)]], size=(2, 5000))
    assert off(cores.at(rows, cols), right.at(rows, cols)) < 1e-9


def test_sweeps_end_when_little_changes():
    w = np.random.default_rng(1).standard_normal((640, 960))
    low = random_cores(*TWO, 4).full()

    def calls(w: np.ndarray, gap: float, sweeps: int) -> int:
        """Half sweeps: a pair of reads each, after that of the sample."""
        count = []
        tt_cross(lambda rows, cols: count.append(rows.size) or w[rows, cols], *TWO, 4, 8, gap, sweeps)
        assert count[0] == SAMPLE
        return len(count) // 2

    assert calls(low, 0.02, 9) == 2
    assert calls(w, 1e-9, 1) == 2 and calls(w, 1e-9, 2) == 4
    assert calls(w, 1e9, 5) == 2


def test_more_sweeps_are_not_worse_where_it_is_checked():
    w = np.random.default_rng(1).standard_normal((240, 240))

    def error(sweeps: int, seed: int) -> float:
        seen = []
        cores = tt_cross(lambda *at: seen.append(at) or w[at], (10, 24), (24, 10), 4, 8, 0.0, sweeps, seed)
        return off(cores.at(*seen[0]), w[seen[0]])

    for seed in range(5):
        errors = [error(sweeps, seed) for sweeps in range(1, 6)]
        assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": 0}, "rank 0 from 8 fibres"),
        ({"rank": 9}, "rank 9 from 8 fibres"),
        ({"outs": (30, 8, 4)}, "digits"),
        ({"sweeps": 0}, "0 sweeps"),
        ({"entries": lambda rows, cols: np.full(rows.shape, np.nan)}, "not finite"),
    ],
)
def test_refusals(change, says):
    good = {"entries": entries_of(np.ones((640, 960))), "ins": TWO[0], "outs": TWO[1], "rank": 4, "maxvol_k": 8}
    with pytest.raises(ValueError, match=says):
        tt_cross(**{**good, "gap": 0.02, **change})
