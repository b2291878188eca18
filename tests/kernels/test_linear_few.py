"""A few tokens in one reading of the weights: each gets, bit for bit, what it gets alone."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_linear import QUANTS, SHAPES, inputs, storage

from ralo import _core

FEW = _core.FEW_TOKENS
CUT = (1024, 640)  # cut by channels, rows of several quads and columns


def apply(
    quant: str, shape: tuple[int, int], x: np.ndarray, bias: np.ndarray | None = None, y: np.ndarray | None = None
) -> np.ndarray:
    """`y`: what is added to."""
    data, scales, dense = storage(quant, *shape)
    out = np.full((len(x), len(dense)), np.nan, np.float32) if y is None else y.copy()
    w = _core.Matrix(quant, shape[0], len(dense), data, scales, bias)
    assert w.apply(x, out, y is not None) == data.nbytes + (0 if scales is None else scales.nbytes)
    return out


def alone(
    quant: str, shape: tuple[int, int], x: np.ndarray, bias: np.ndarray | None = None, y: np.ndarray | None = None
) -> np.ndarray:
    rows = [apply(quant, shape, x[t : t + 1], bias, None if y is None else y[t : t + 1]) for t in range(len(x))]
    return np.concatenate(rows)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("shape", [*SHAPES, CUT], ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_each_token_gets_its_own_bits(level, quant, shape):
    x, y, b = inputs(FEW, shape[0], len(storage(quant, *shape)[2]))
    for i, (bias, before) in enumerate(((None, None), (b, None), (None, y), (b, y))):
        want = alone(quant, shape, x, bias, before)
        for tokens in range(2 + i % 2, FEW + 1, 2):  # even ones without bias, odd ones with
            got = apply(quant, shape, x[:tokens], bias, None if before is None else before[:tokens])
            assert same(got, want[:tokens]), tokens


@pytest.mark.parametrize("quant", QUANTS)
def test_same_bits_at_any_number_of_threads(level, threads, quant):
    for shape in (CUT, (40, 4161), (20, 16449)):
        x, y, b = inputs(FEW, shape[0], len(storage(quant, *shape)[2]))
        got = [apply(quant, shape, x[:n], b, y[:n]) for n in (2, 5, FEW)]
        _core.set_threads(1)
        want = alone(quant, shape, x, b, y)
        _core.set_threads(threads)
        assert all(same(few, want[: len(few)]) for few in got)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quant", QUANTS)
def test_what_is_not_finite_stays_with_its_token(level, quant, value):
    for shape in ((257, 200), CUT):
        x = inputs(FEW, shape[0], len(storage(quant, *shape)[2]))[0].copy()
        x[1, 0] = x[4, shape[0] // 2] = x[6, -1] = value
        want = alone(quant, shape, x)
        bad = [1, 4, 6]
        assert not np.isfinite(want[bad, : shape[1]]).any() and np.isfinite(np.delete(want, bad, axis=0)).all()
        for first, last in ((0, FEW), (1, 3), (3, 6), (4, 7)):
            assert np.array_equal(apply(quant, shape, x[first:last]), want[first:last], equal_nan=True)
        none = np.full_like(x, value)
        assert np.array_equal(apply(quant, shape, none), alone(quant, shape, none), equal_nan=True)


@pytest.mark.parametrize("quant", QUANTS)
def test_zeros_and_outliers_beside_others(level, quant):
    x, y, b = inputs(FEW, 257, len(storage(quant, 257, 200)[2]))
    x = x.copy()
    x[0] = x[3] = 0
    x[2, 100] = 1e6
    x[5] *= 1e-35  # less than a unit can say
    x[7] *= 1e30
    got = apply(quant, (257, 200), x, b, y)
    assert same(got, alone(quant, (257, 200), x, b, y)) and same(got[[0, 3]], y[[0, 3]] + b)


@pytest.mark.parametrize("quant", QUANTS)
def test_more_tokens_go_the_way_of_many(level, quant):
    x = inputs(2 * FEW, 257, 256)[0]
    many = apply(quant, (257, 200), x)
    assert same(apply(quant, (257, 200), x[: FEW + 1]), many[: FEW + 1])
    np.testing.assert_allclose(apply(quant, (257, 200), x[:FEW]), many[:FEW], rtol=0, atol=2e-2)
