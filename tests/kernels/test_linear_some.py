"""One token with some of its input channels: equals the product where the others are zero, and does not read them."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_linear import QUANTS, SHAPES, check, inputs, run, storage

from ralo import _core

KEEPS = (0.02, 0.3, 0.5, 0.97)


def matrix(quant: str, shape: tuple[int, int], bias: np.ndarray | None = None) -> tuple[_core.Matrix, int]:
    """The packed matrix, and the bytes of one input channel."""
    data, scales, dense = storage(quant, *shape)
    size = data[0].nbytes + (0 if scales is None else scales[0].nbytes)
    return _core.Matrix(quant, shape[0], len(dense), data, scales, bias), size


def some(ic: int, keep: float) -> np.ndarray:
    chosen = np.random.default_rng(ic).random(ic) < keep
    return np.flatnonzero(chosen).astype(np.uint32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_equals_the_product_where_the_others_are_zero(level, quant, shape):
    x, before, b = inputs(1, shape[0], len(storage(quant, *shape)[2]))
    for i, keep in enumerate(KEEPS):
        bias, add = bool(i & 1), bool(i & 2)
        channels = some(shape[0], keep)
        w, size = matrix(quant, shape, b if bias else None)
        y = before[0].copy() if add else np.full_like(before[0], np.nan)
        assert w.apply_some(x[0], channels, y, add) == len(channels) * size
        kept = np.zeros_like(x)
        kept[0, channels] = x[0, channels]
        check(quant, shape, 1, y[None], bias, add, kept)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_all_channels_are_dense_bit_for_bit(level, quant, shape):
    w, size = matrix(quant, shape)
    y = np.full(len(storage(quant, *shape)[2]), np.nan, np.float32)
    read = w.apply_some(inputs(1, shape[0], len(y))[0][0], np.arange(shape[0], dtype=np.uint32), y)
    assert np.array_equal(y, run(quant, shape, 1)[0]) and read == shape[0] * size


@pytest.mark.parametrize("quant", QUANTS)
def test_same_bits_at_any_number_of_threads(level, threads, quant):
    for shape in ((513, 64), (257, 200), (40, 4161)):
        w, _ = matrix(quant, shape)
        x, y, _ = inputs(1, shape[0], len(storage(quant, *shape)[2]))
        results = []
        for n in (threads, 1):
            _core.set_threads(n)
            results.append(y[0].copy())
            w.apply_some(x[0], some(shape[0], 0.5), results[-1], True)
        _core.set_threads(threads)
        assert np.array_equal(*results)


@pytest.mark.parametrize("quant", QUANTS)
def test_what_is_left_out_is_not_read(level, quant):
    """Neither a NaN in x nor one in the scales or weights of a channel that is not in the list reaches y."""
    data, scales, dense = storage(quant, 257, 200)
    data, scales = data.copy(), None if scales is None else scales.copy()
    x = inputs(1, 257, len(dense))[0][0].copy()
    channels = some(257, 0.5)
    clean, dirty = np.empty((2, len(dense)), np.float32)
    _core.Matrix(quant, 257, len(dense), data.copy(), scales, None).apply_some(x, channels, clean)
    others = np.setdiff1d(np.arange(257), channels)
    x[others] = np.nan
    data[others] = 0xFF
    if scales is not None:
        scales[others] = 0x7FC0
    _core.Matrix(quant, 257, len(dense), data, scales, None).apply_some(x, channels, dirty)
    assert np.array_equal(clean, dirty) and np.isfinite(clean).all()


def test_no_channels_give_the_bias(level):
    bias = inputs(1, 33, 192)[2]
    w, _ = matrix("int8", (33, 130), bias)
    y = np.full(192, np.nan, np.float32)
    assert w.apply_some(np.ones(33, np.float32), np.empty(0, np.uint32), y) == 0
    assert np.array_equal(y, bias)


@pytest.mark.parametrize(
    ("error", "channels"),
    [
        (ValueError, np.array([0, 33], np.uint32)),
        (ValueError, np.array([5, 4], np.uint32)),
        (ValueError, np.array([7, 7], np.uint32)),
        (TypeError, np.array([1, 2], np.int64)),
        (TypeError, np.array([[1, 2]], np.uint32)),
        (TypeError, np.arange(8, dtype=np.uint32)[::2]),
    ],
    ids=str,
)
def test_wrong_lists_are_refused(error, channels):
    w, _ = matrix("int8", (33, 130))
    with pytest.raises(error):
        w.apply_some(np.ones(33, np.float32), channels, np.empty(192, np.float32))
