"""y = x W + bias with weights from seeds: what is rebuilt is the reference's, and the product is float64's."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from reference import linear, proc, rounded

from ralo import _core
from ralo.proc.generator import tables

FEW = _core.FEW_TOKENS
SHAPES = [  # (ic, oc, columns): around quads and passes of 16 channels; 1 to 4 blocks a column, alone and mixed
    (1, 64, 1),
    (3, 128, 1),
    (4, 192, 1),
    (5, 256, 1),
    (16, 128, 2),
    (16, 640, 10),
    (17, 192, 2),
    (17, 640, 5),
    (33, 640, 4),
    (257, 64, 1),
    (257, 640, 3),
    (20, 16448, 100),  # longer than a panel of 16384, which ends within a column
    (1024, 640, 5),  # cut by channels
]
CUT = (1024, 640, 5)


class Stored(NamedTuple):
    """What a matrix is made of, in the order that _core.ProcMatrix takes it."""

    data: np.ndarray
    scales: np.ndarray
    tables: np.ndarray
    starts: np.ndarray
    at: np.ndarray
    deltas: np.ndarray


@cache
def stored(ic: int, oc: int, columns: int, deltas: bool = True, kind: str = "fitted") -> Stored:
    """Random seeds, scales of both signs, and deltas in two of three channels."""
    rng = np.random.default_rng(ic * oc + columns)
    data = rng.integers(0, 256, (ic, columns * 64), dtype=np.uint8)
    scales = linear.bf16_nearest(rng.uniform(0.01, 0.04, (ic, columns)) * rng.choice([1, -1], (ic, columns)))
    chosen = (rng.random((ic, oc)) < 0.03) & (np.arange(ic) % 3 != 1)[:, None] & deltas
    starts = np.concatenate([[0], np.cumsum(chosen.sum(1))]).astype(np.uint32)
    at = np.nonzero(chosen)[1].astype(np.uint16)
    return Stored(data, scales, tables(kind), starts, at, linear.bf16_nearest(rng.standard_normal(len(at)) * 4))


def matrix(s: Stored, oc: int, bias: np.ndarray | None = None) -> _core.ProcMatrix:
    return _core.ProcMatrix(len(s.data), oc, s.data, s.scales, bias, *s[2:])


def nbytes(s: Stored) -> int:
    """All that applying it reads: of deltas their place and value, and where a channel's begin."""
    return s.data.nbytes + s.scales.nbytes + (4 * len(s.data) + 4 * len(s.at) if len(s.at) else 0)


@cache
def dense(ic: int, oc: int, columns: int, deltas: bool = True, kind: str = "fitted") -> np.ndarray:
    """The weights (ic, oc) that the reference rebuilds."""
    s = stored(ic, oc, columns, deltas, kind)
    return proc.unpack(s.data, s.scales, s.tables, oc, *s[3:])


@cache
def inputs(tokens: int, ic: int, oc: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (T, ic), what y holds before (T, oc), bias (oc)."""
    rng = np.random.default_rng(tokens + ic)
    return tuple(rng.standard_normal(s).astype(np.float32) for s in ((tokens, ic), (tokens, oc), oc))


def run(
    s: Stored,
    oc: int,
    x: np.ndarray,
    bias: np.ndarray | None = None,
    y: np.ndarray | None = None,
    exact: bool = True,
) -> np.ndarray:
    """`y`: what is added to."""
    out = np.full((len(x), oc), np.nan, np.float32) if y is None else y.copy()
    assert matrix(s, oc, bias).apply(x, out, y is not None, exact) == nbytes(s)
    return out


def alone(s: Stored, oc: int, x: np.ndarray, bias: np.ndarray | None = None, y: np.ndarray | None = None) -> np.ndarray:
    rows = [run(s, oc, x[t : t + 1], bias, None if y is None else y[t : t + 1]) for t in range(len(x))]
    return np.concatenate(rows)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def check(shape: tuple[int, int, int], deltas: bool, x: np.ndarray, got: np.ndarray, *added: np.ndarray) -> None:
    """Every addition, product and delta is one rounding; with VNNI x times its scale has 16 bits, see reference."""
    s, w = stored(*shape, deltas), dense(*shape, deltas).T.astype(np.float64)
    without = dense(*shape, False).T.astype(np.float64)
    size = linear.magnitude(np.abs(without) + np.abs(w - without), x, sum(np.abs(a) for a in added))
    by_bytes = len(x) <= FEW and _core.level() in rounded.LEVELS
    coarse = [[linear.fixed_point("int8", s.scales, row) * 128 / 127 if by_bytes else 0.0] for row in x]
    error = np.abs(got - linear.apply(w, x, sum(a.astype(np.float64) for a in added)))
    bound = (2 * shape[0] + 4) * 2.0**-24 * size + np.array(coarse)
    assert (error <= bound).all(), f"{len(x)} tokens: off by {error.max()}"


@pytest.mark.parametrize("kind", ["fitted", "hash"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_is_the_reference_bit_for_bit(any_level, threads, shape, kind):
    for deltas in (True, False):
        out = np.full(shape[:2], np.nan, np.float32)
        matrix(stored(*shape, deltas, kind), shape[1]).unpack(out)
        assert same(out, dense(*shape, deltas, kind))


def test_sums_that_do_not_fit_a_byte_wrap_alike(any_level):
    s = stored(17, 640, 5)
    wide = np.random.default_rng(1).integers(-128, 128, s.tables.shape).astype(np.int8)
    wide[:, :, 3] = np.tile(wide[:, :, 3, :4], 4)
    s, out = s._replace(tables=wide), np.empty((17, 640), np.float32)
    matrix(s, 640).unpack(out)
    assert same(out, proc.unpack(s.data, s.scales, s.tables, 640, *s[3:]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(any_level, shape):
    for i, tokens in enumerate((1, 2, FEW, FEW + 1, 13, 257)):
        x, y, b = inputs(tokens, shape[0], shape[1])
        bias, add, deltas = i % 2 == 1, i % 3 == 1, i % 4 < 3
        got = run(stored(*shape, deltas), shape[1], x, b if bias else None, y if add else None)
        check(shape, deltas, x, got, y * add, b * bias)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_bias_and_add(any_level, bias, add):
    for tokens in (1, 3, 13):
        x, y, b = inputs(tokens, 257, 640)
        got = run(stored(257, 640, 3), 640, x, b if bias else None, y if add else None)
        check((257, 640, 3), True, x, got, y * add, b * bias)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_of_a_few_tokens_gets_its_own_bits(any_level, shape):
    x, y, b = inputs(FEW, shape[0], shape[1])
    for i, (bias, before) in enumerate(((None, None), (b, y))):
        s = stored(*shape, deltas=i == 0 or shape != CUT)
        want = alone(s, shape[1], x, bias, before)
        for tokens in range(2 + i, FEW + 1, 1 if shape[1] < 1000 else 3):
            got = run(s, shape[1], x[:tokens], bias, None if before is None else before[:tokens])
            assert same(got, want[:tokens]), tokens


@pytest.mark.parametrize("shape", [(16, 640, 10), (257, 640, 3), CUT], ids=str)
def test_rounded_to_bytes_it_is_near(any_level, shape):
    """Where bytes pay; elsewhere the exact bits."""
    for tokens in (2, 7, 13, 130):
        x, y, b = inputs(tokens, shape[0], shape[1])
        got, exact = (run(stored(*shape), shape[1], x, b, y, exact) for exact in (False, True))
        w, start = dense(*shape).T.astype(np.float64), y.astype(np.float64) + b
        bound = rounded.byte_error(w, x) + shape[0] * 2.0**-23 * linear.magnitude(w, x, np.abs(y) + np.abs(b))
        assert (np.abs(got - linear.apply(w, x, start)) <= bound).all()
        assert same(got, exact) == (any_level not in rounded.LEVELS)
    one = inputs(1, shape[0], shape[1])[0]
    assert same(run(stored(*shape), shape[1], one, exact=False), run(stored(*shape), shape[1], one))


def test_same_bits_again_and_at_any_number_of_threads(any_level, threads):
    for shape in ((257, 640, 3), CUT, (20, 16448, 100)):
        for tokens in (1, 3, FEW, 13):
            x, y, b = inputs(tokens, shape[0], shape[1])
            for exact in (True, False):
                got = run(stored(*shape), shape[1], x, b, y, exact)
                _core.set_threads(1)
                want = run(stored(*shape), shape[1], x, b, y, exact)
                _core.set_threads(threads)
                assert same(got, want)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("exact", [True, False])
def test_what_is_not_finite_comes_through_and_stays_with_its_token(any_level, exact, value):
    for shape, tokens in (((257, 640, 3), 1), ((257, 640, 3), FEW), ((257, 640, 3), 13), (CUT, FEW)):
        x = inputs(tokens, shape[0], shape[1])[0].copy()
        clean = run(stored(*shape), shape[1], x, exact=exact)
        bad = [0] if tokens == 1 else [1, 4, 6]
        for t, channel in zip(bad, (shape[0] - 1, 0, 100), strict=False):
            x[t, channel] = value
        got = run(stored(*shape), shape[1], x, exact=exact)
        assert not np.isfinite(got[bad]).any()
        assert same(np.delete(got, bad, 0), np.delete(clean, bad, 0))


def test_zeros_give_the_bias_and_outliers_their_own(any_level):
    x, y, b = inputs(FEW, 257, 640)
    x = x.copy()
    x[0] = x[3] = 0
    x[2, 100], x[5], x[7] = 1e6, x[5] * 1e-35, x[7] * 1e30
    got = run(stored(257, 640, 3), 640, x, b, y)
    assert same(got, alone(stored(257, 640, 3), 640, x, b, y)) and same(got[[0, 3]], y[[0, 3]] + b)
    assert (run(stored(257, 640, 3), 640, np.zeros((13, 257), np.float32), b) == b).all()


def test_no_tokens(any_level):
    w = matrix(stored(17, 640, 5), 640)
    assert w.apply(np.empty((0, 17), np.float32), np.empty((0, 640), np.float32)) == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(any_level, shape):
    for deltas in (True, False):
        out = np.empty(shape[0], np.float32)
        matrix(stored(*shape, deltas), shape[1]).norms(out)
        np.testing.assert_allclose(out, np.linalg.norm(dense(*shape, deltas).astype(np.float64), axis=1), rtol=1e-5)
