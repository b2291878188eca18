"""y = x W + bias for every precision: equals the float64 product of what is stored, whatever the sizes and threads."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from reference import linear

from ralo import _core, matrix

QUANTS = ("f32", "bf16", "int8", "int4")
SHAPES = [  # (ic, outputs): around lanes, passes of 16 channels, blocks of 256, groups, padding, panels of 16384
    (1, 1),
    (3, 64),
    (15, 63),
    (16, 65),
    (17, 128),
    (33, 130),
    (255, 31),
    (256, 33),
    (257, 200),
    (513, 64),
    (40, 4161),
    (20, 16449),
]
TOKENS = (1, 2, 3, 4, 5, 6, 7, 13, 257)

# Roundings behind one output, on top of one addition a channel: the product, and the scale where there is one. Each is
# at most 2^-24 of sum |w||x| (the classic bound on a sum in any order): all that float32 may differ from float64 by.
ROUNDINGS = {"f32": 1, "bf16": 1, "int8": 2, "int4": 2}


@cache
def storage(quant: str, ic: int, n: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Random weights packed by the reference, and what they stand for (oc, ic)."""
    rows = np.random.default_rng(ic * n).standard_normal((n, ic)).astype(np.float32)
    data, scales = linear.empty(quant, ic, -(-n // 64) * 64)
    linear.pack(quant, rows, 0, data, scales)
    return data, scales, linear.unpack(quant, data, scales)


@cache
def inputs(tokens: int, ic: int, oc: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (T, ic), what y holds before (T, oc), bias (oc)."""
    rng = np.random.default_rng(tokens + ic)
    return tuple(rng.standard_normal(s).astype(np.float32) for s in ((tokens, ic), (tokens, oc), oc))


def run(
    quant: str, shape: tuple[int, int], tokens: int, bias: bool = False, add: bool = False, exact: bool = True
) -> np.ndarray:
    data, scales, dense = storage(quant, *shape)
    x, y, b = inputs(tokens, shape[0], len(dense))
    y = y.copy() if add else np.full_like(y, np.nan)
    w = _core.Matrix(quant, shape[0], len(dense), data, scales, b if bias else None)
    assert w.apply(x, y, add, exact) == data.nbytes + (0 if scales is None else scales.nbytes)
    return y


def check(
    quant: str, shape: tuple[int, int], tokens: int, got: np.ndarray, bias: bool, add: bool, x: np.ndarray | None = None
) -> None:
    """`x`: where it is not the one of `inputs`."""
    dense = storage(quant, *shape)[2]
    given, y, b = inputs(tokens, shape[0], len(dense))
    x = given if x is None else x
    start = (y.astype(np.float64) if add else 0) + (b if bias else 0)
    size = linear.magnitude(dense, x, (np.abs(y) if add else 0) + (np.abs(b) if bias else 0))
    roundings = shape[0] + ROUNDINGS[quant] + (bias and add)
    error = np.abs(got - linear.apply(dense, x, start))
    by_bytes = () if _core.level() == "base" else ("int8", "int4")
    rounded = tokens <= _core.FEW_TOKENS and quant in by_bytes
    coarse = [[linear.fixed_point(quant, storage(quant, *shape)[1], row) if rounded else 0.0] for row in x]  # (T, 1)
    assert (error <= roundings * 2.0**-24 * size + np.array(coarse)).all(), f"{tokens} tokens: off by {error.max()}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_equals_the_reference(level, quant, shape):
    for i, tokens in enumerate(TOKENS):
        bias, add = bool(i & 1), bool(i & 2)  # each with and without
        check(quant, shape, tokens, run(quant, shape, tokens, bias, add), bias, add)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quant", QUANTS)
def test_bias_and_add(level, quant, bias, add):
    for tokens in (1, 3):
        check(quant, (33, 130), tokens, run(quant, (33, 130), tokens, bias, add), bias, add)


@pytest.mark.parametrize("quant", QUANTS)
def test_same_bits_again_and_at_any_number_of_threads(level, threads, quant):
    for shape in ((257, 200), (40, 4161), (3, 64)):
        for tokens in (1, 2, 7, 257):
            got = run(quant, shape, tokens, bias=True, add=True)
            assert np.array_equal(got, run(quant, shape, tokens, bias=True, add=True))
            check(quant, shape, tokens, got, bias=True, add=True)
            _core.set_threads(1)
            alone = run(quant, shape, tokens, bias=True, add=True)
            _core.set_threads(threads)
            assert np.array_equal(got, alone)  # how the work is cut depends on the shape alone


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("threads", (2, 3, 5, 8))
def test_parts_add_up_to_the_same_bits_whoever_does_them(level, threads, quant):
    shape = (1100, 1000)  # eight parts; a thread that is done takes some of another
    before = _core.threads()
    try:
        _core.set_threads(1)
        alone = run(quant, shape, 1, bias=True, add=True)
        _core.set_threads(threads)
        for _ in range(20):
            assert np.array_equal(run(quant, shape, 1, bias=True, add=True), alone)
    finally:
        _core.set_threads(before)
    check(quant, shape, 1, alone, bias=True, add=True)


@pytest.mark.parametrize("quant", QUANTS)
def test_a_row_does_not_depend_on_its_neighbours(level, quant):
    data, scales, dense = storage(quant, 257, 200)
    w = _core.Matrix(quant, 257, len(dense), data, scales, None)
    x = inputs(257, 257, len(dense))[0]
    whole, part = np.empty((257, len(dense)), np.float32), np.empty((13, len(dense)), np.float32)
    w.apply(x, whole)
    w.apply(x[244:], part)
    assert np.array_equal(whole[244:], part)


def test_no_tokens(level):
    data, scales, dense = storage("int8", 17, 128)
    w = _core.Matrix("int8", 17, len(dense), data, scales, None)
    assert w.apply(np.empty((0, 17), np.float32), np.empty((0, 128), np.float32)) == 0


def test_zero_inputs_give_the_bias(level):
    data, scales, dense = storage("int4", 33, 130)
    bias = inputs(1, 33, len(dense))[2]
    for tokens in (1, 4):
        y = np.full((tokens, len(dense)), np.nan, np.float32)
        _core.Matrix("int4", 33, len(dense), data, scales, bias).apply(np.zeros((tokens, 33), np.float32), y)
        assert (y == bias).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quant", QUANTS)
def test_what_is_not_finite_comes_through(level, quant, value):
    """At one place of x: an infinity times a weight of zero is a NaN, so no output is finite either way."""
    data, scales, dense = storage(quant, 257, 200)
    x = inputs(1, 257, len(dense))[0].copy()
    x[0, 100] = value
    y = np.zeros((1, len(dense)), np.float32)
    _core.Matrix(quant, 257, len(dense), data, scales, None).apply(x, y)
    assert not np.isfinite(y[0, :200]).any()


def test_a_nan_in_one_token_stays_there(level):
    data, scales, dense = storage("bf16", 33, 130)
    x = inputs(7, 33, len(dense))[0].copy()
    x[3, 32] = np.nan
    y = np.zeros((7, len(dense)), np.float32)
    _core.Matrix("bf16", 33, len(dense), data, scales, None).apply(x, y)
    assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, axis=0)).all()


# ---------------------------------------------------------------- ralo.matrix: parts side by side


class Rows:
    """A tensor in memory, as the packer sees one."""

    name, dtype = "w", "f32"

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop]

    def stored(self) -> np.ndarray:
        return self.values

    def release(self) -> None: ...


@pytest.mark.parametrize("chunk", [1, 16 << 20])  # bytes of rows at a time: 64 rows, or all of them
@pytest.mark.parametrize("quant", QUANTS)
def test_fused_parts(level, monkeypatch, quant, chunk):
    monkeypatch.setattr(matrix, "CHUNK_BYTES", chunk)
    rng = np.random.default_rng(5)
    parts = {"q": 200, "k": 1, "v": 64}
    rows = {name: rng.standard_normal((n, 33)).astype(np.float32) for name, n in parts.items()}
    fused = matrix.Matrix.empty(quant, 33, parts, bias=True)
    assert all(fused.pack(name, Rows(values)) for name, values in rows.items())
    fused.bias[fused.slices["k"]] = 3
    assert (fused.oc, fused.slices["k"], fused.slices["v"]) == (256 + 64 + 64, slice(256, 257), slice(320, 384))
    x = rng.standard_normal((13, 33)).astype(np.float32)  # many: their bits do not depend on what lies beside a part
    y, more = fused(x), np.ones((13, fused.oc), np.float32)
    read = fused.core.apply(x, more, True)
    for name, values in rows.items():
        alone = matrix.Matrix.empty(quant, 33, {name: parts[name]}, bias=False)
        assert alone.pack(name, Rows(values))
        want = alone(x)[:, : parts[name]] + (3 if name == "k" else 0)
        np.testing.assert_allclose(y[:, fused.slices[name]], want, atol=1e-5)
        np.testing.assert_allclose(more[:, fused.slices[name]], want + 1, atol=1e-5)
    stored = fused.data.nbytes + (0 if fused.scales is None else fused.scales.nbytes)
    assert fused.bytes_read == read == stored and fused.nbytes == stored + fused.bias.nbytes


def test_a_part_that_is_not_finite_is_told():
    values = np.ones((130, 3), np.float32)
    values[129, 2] = np.nan
    assert not matrix.Matrix.empty("int8", 3, {"a": 130}, bias=False).pack("a", Rows(values))


# ---------------------------------------------------------------- refusals


def int8(data=(4, 64), scales=(4, 1), bias=None, ic=4, oc=64, quant="int8", kind=np.uint8):
    return _core.Matrix(
        quant,
        ic,
        oc,
        np.zeros(data, kind),
        None if scales is None else np.zeros(scales, np.uint16),
        None if bias is None else np.zeros(bias, np.float32),
    )


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (ValueError, {"quant": "int3"}),
        (ValueError, {"oc": 65}),
        (ValueError, {"oc": 0}),
        (ValueError, {"oc": 128}),
        (ValueError, {"ic": 3}),
        (ValueError, {"ic": 0, "data": (0, 64), "scales": (0, 1)}),
        (ValueError, {"data": (4, 63)}),
        (ValueError, {"scales": None}),
        (ValueError, {"scales": (4, 2)}),
        (ValueError, {"scales": (3, 1)}),
        (ValueError, {"quant": "f32", "data": (4, 256)}),  # with scales
        (ValueError, {"bias": 63}),
        (TypeError, {"bias": (1, 64)}),
        (TypeError, {"data": (4, 64, 1)}),
        (TypeError, {"kind": np.int16}),
        (TypeError, {"ic": -4}),
        (TypeError, {"quant": 8}),
    ],
)
def test_wrong_matrices_are_refused(error, change):
    int8()  # as it should be
    with pytest.raises(error):
        int8(**change)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("error", "x", "y"),
    [
        (ValueError, zeros(2, 5), zeros(2, 64)),
        (ValueError, zeros(2, 4), zeros(2, 65)),
        (ValueError, zeros(2, 4), zeros(3, 64)),
        (TypeError, zeros(4), zeros(64)),
        (TypeError, zeros(2, 4).astype(np.float64), zeros(2, 64)),
        (TypeError, zeros(2, 4), zeros(2, 64).astype(np.float64)),
        (TypeError, zeros(2, 8)[:, :4], zeros(2, 64)),
        (TypeError, zeros(2, 4), zeros(2, 128)[:, :64]),
        (TypeError, zeros(2, 4), np.broadcast_to(zeros(64), (2, 64))),  # read-only
        (TypeError, None, zeros(2, 64)),
    ],
)
def test_wrong_inputs_are_refused(error, x, y):
    with pytest.raises(error):
        int8().apply(x, y)
