"""The search for seeds: the same everywhere, what it says it stored, near the best there is, and not easily upset."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from kernels.test_seeds import same
from reference import linear, proc

from ralo import _core
from ralo.proc.generator import SIGMA, tables

FITTED = tables("fitted")
ROWS = [(64, 1), (128, 1), (192, 1), (256, 1), (192, 2), (640, 3), (640, 4), (640, 10), (2048, 16)]  # oc, columns
Found = tuple[np.ndarray, np.ndarray, np.ndarray]  # seeds, scales, weights


def search(w: np.ndarray, columns: int, kind: str = "fitted", sigma: float = SIGMA) -> Found:
    seeds, scales = np.full(columns * 64, 7, np.uint8), np.full(columns, 7, np.uint16)
    out = np.full(len(w), np.nan, np.float32)
    _core.SeedSearch(tables(kind), sigma).row(w, seeds, scales, out)
    return seeds, scales, out


def normal(oc: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(oc).astype(np.float32)


def lost(w: np.ndarray, found: np.ndarray) -> float:
    """Share of the energy of w that the error makes up."""
    return float(np.square(w - found, dtype=np.float64).sum() / np.square(w, dtype=np.float64).sum())


@cache
def at_the_lowest_level(oc: int, columns: int) -> Found:
    level, threads = _core.level(), _core.threads()
    _core.force_level(_core.levels()[-1])
    _core.set_threads(1)
    found = search(normal(oc), columns)
    _core.force_level(level)
    _core.set_threads(threads)
    return found


@pytest.mark.parametrize(("oc", "columns"), ROWS)
def test_same_seeds_at_every_level_and_number_of_threads(level, threads, oc, columns):
    want = at_the_lowest_level(oc, columns)
    for found in (search(normal(oc), columns), search(normal(oc), columns)):
        assert all(np.array_equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("kind", ["fitted", "hash"])
@pytest.mark.parametrize(("oc", "columns"), ROWS)
def test_gives_what_it_stored(level, oc, columns, kind):
    seeds, scales, out = search(normal(oc, 1), columns, kind)
    none = np.zeros(2, np.uint32), np.zeros(0, np.uint16), np.zeros(0, np.uint16)
    assert same(out, proc.unpack(seeds[None], scales[None], tables(kind), oc, *none)[0])


@pytest.mark.parametrize(("oc", "columns"), ROWS)
def test_scales_are_those_that_fit_best(oc, columns):
    w = np.random.default_rng(2).uniform(-0.05, 0.05, oc).astype(np.float32)  # none sticks out
    seeds, scales, _ = search(w, columns)
    q = proc.whole(seeds, FITTED, oc).astype(np.float64)
    for k, blocks in enumerate(proc.columns(columns, oc)):
        own = slice(blocks[0] * 64, blocks[-1] * 64 + 64)
        best = (w[own] * q[own]).sum() / np.square(q[own]).sum()
        assert scales[k] == linear.bf16_nearest(np.float32(best))


@pytest.mark.parametrize(("blocks", "most"), [(1, 0.0002), (2, 0.0075), (3, 0.037), (4, 0.09)])
def test_error_of_normal_weights(level, blocks, most):
    w = normal(64 * blocks * 16, 3)
    for scale in (1, 1e-6, 1e6):
        assert 0 < lost(w * np.float32(scale), search(w * np.float32(scale), 16)[2]) < most


def test_fitted_tables_lose_less_than_a_hash():
    for blocks in (2, 3, 4):
        w = normal(64 * blocks * 16, 3)
        assert lost(w, search(w, 16)[2]) < 0.8 * lost(w, search(w, 16, "hash")[2])


# ---------------------------------------------------------------- the best there is


def targets(w: np.ndarray, columns: int) -> np.ndarray:
    """Weights in units of the tables, as the search sees them."""
    size = len(w) // columns
    return np.concatenate([w[i : i + size] * (SIGMA / proc.spread(w[i : i + size])) for i in range(0, len(w), size)])


@pytest.mark.parametrize(("blocks", "columns", "most"), [(1, 1, 1.01), (2, 1, 2), (4, 1, 2), (2, 4, 1.1), (3, 4, 1.1)])
def test_near_the_best_seeds_of_a_chain(level, blocks, columns, most):
    """The shorter a chain the more its closing counts, which is only guessed."""
    w = normal(64 * blocks * columns, 4)
    seeds, _, _ = search(w, columns)
    x = proc.chains(targets(w, columns), columns)[:4]
    got = proc.chains(proc.whole(seeds, FITTED, len(w)).astype(np.float64), columns)[:4]
    errors, best = np.square(x - got).sum((1, 2)), np.array([proc.least_error(chain, FITTED) for chain in x])
    assert (errors >= best * (1 - 1e-9)).all() and errors.sum() <= most * best.sum()


def test_better_than_the_best_of_many_random_seeds():
    w, rng = normal(256, 5), np.random.default_rng(6)
    seeds, _, _ = search(w, 1)
    x = targets(w, 1)
    tried = [np.square(x - proc.whole(s, FITTED, 256)) for s in rng.integers(0, 256, (2000, 64), dtype=np.uint8)]
    chains = np.array([proc.chains(e, 1).sum((1, 2)) for e in tried])  # (tries, chains)
    ours = proc.chains(np.square(x - proc.whole(seeds, FITTED, 256)), 1).sum((1, 2))
    assert (ours < chains.min(0)).all()


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_finds_back_weights_that_come_from_seeds(level, blocks):
    for seed in range(8):
        start = np.random.default_rng(seed).integers(0, 256, 64, dtype=np.uint8)
        w = proc.whole(start, FITTED, 64 * blocks).astype(np.float32)
        assert same(search(w * np.float32(0.125), 1, sigma=proc.spread(w))[2], w * np.float32(0.125))


# ---------------------------------------------------------------- rows that are not ordinary


def test_a_row_of_zeros(level):
    for w in (np.zeros(640, np.float32), np.full(640, 1e-38, np.float32)):
        _, scales, out = search(w, 4)
        assert (scales == 0).all() and (out == 0).all()


def test_a_column_of_zeros_leaves_the_others_alone(level):
    w = normal(512, 7)
    w[128:256] = 0
    _, scales, out = search(w, 4)
    assert (out[128:256] == 0).all() and (scales != 0).tolist() == [True, False, True, True]
    assert lost(w, out) < 0.01


@pytest.mark.parametrize("value", [10, 100, 1e6, -1e12])
def test_one_huge_weight_leaves_other_columns_alone(level, value):
    w = normal(2048, 8)
    w[700] = value
    others = np.delete(np.arange(2048), np.arange(640, 768))
    assert lost(w[others], search(w, 16)[2][others]) < 0.0075


@pytest.mark.parametrize("value", [10, 20, 100, -1e4])
def test_one_huge_weight_leaves_its_own_column_alone(value):
    w = normal(2048, 8)
    w[700] = value
    others = np.delete(np.arange(640, 768), 60)
    assert lost(w[others], search(w, 16)[2][others]) < 0.015


@pytest.mark.parametrize(
    ("oc", "seeds", "scales", "out"),
    [(192, 128, 1, 192), (192, 64, 1, 128), (190, 64, 1, 190), (320, 64, 1, 320), (64, 128, 2, 64), (0, 0, 0, 0)],
)
def test_wrong_shapes_are_refused(oc, seeds, scales, out):
    s = _core.SeedSearch(FITTED, SIGMA)
    with pytest.raises(ValueError):
        s.row(normal(oc), np.zeros(seeds, np.uint8), np.zeros(scales, np.uint16), np.zeros(out, np.float32))


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan")])
def test_a_spread_that_is_none_is_refused(sigma):
    with pytest.raises(ValueError, match="sigma must be above zero"):
        _core.SeedSearch(FITTED, sigma)
