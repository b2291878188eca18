"""Some neurons of a matrix, stored row by row: the same stored values, the products of those chosen and no others."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_linear import QUANTS, ROUNDINGS, inputs, storage
from reference import linear, neurons

from ralo import _core

SHAPES = [(1, 1), (40, 72), (63, 64), (64, 65), (65, 130), (200, 31), (513, 200), (896, 96)]  # (d, neurons)
FUSED = [(33, 130), (257, 200), (600, 640), (20, 16449)]  # several channel parts, several output parts


def fused(quant: str, d: int, f: int, bias: np.ndarray | None = None) -> tuple[_core.Matrix, np.ndarray]:
    """A matrix whose last `padded f` outputs are the part, after 64 others; and what it stands for (oc, d)."""
    data, scales, dense = storage(quant, d, 64 + f)
    return _core.Matrix(quant, d, len(dense), data, scales, bias), dense


def laid_out(quant: str, d: int, f: int) -> tuple[np.ndarray, np.ndarray | None]:
    return _core.neuron_rows(fused(quant, d, f)[0], 64, f)


def some(f: int, keep: float) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng(f).random(f) < keep).astype(np.uint32)


def run(quant: str, d: int, f: int, chosen: np.ndarray | None) -> np.ndarray:
    data, scales = laid_out(quant, d, f)
    y = np.full(f, np.nan, np.float32)
    read = _core.neurons(quant, data, scales, chosen, inputs(1, d, f)[0][0], y)
    assert read == (f if chosen is None else len(chosen)) * neurons.neuron_bytes(quant, d)
    return y


def coarse(level: str, quant: str, d: int, f: int) -> float:
    """What rounding x beside the scales may add: int8 and int4 with VNNI."""
    if level != "avx512":
        return 0.0
    return linear.fixed_point(quant, storage(quant, d, 64 + f)[1], inputs(1, d, f)[0][0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_rows_hold_the_same_values(threads, quant, shape):
    d, f = shape
    data, scales = laid_out(quant, d, f)
    found = neurons.unpack(quant, data, scales)
    assert np.array_equal(found[:, :d], fused(quant, d, f)[1][64 : 64 + f]) and not found[:, d:].any()
    assert (scales is None) == (quant in ("f32", "bf16"))
    stored = {"int8": 128, "int4": 0x88}.get(quant, 0)  # a weight of zero
    assert (data[:, -(-d // 32) * 32 * linear.BITS[quant] // 8 :] == stored).all()
    if scales is not None:
        assert not scales[:, d:].any() and len(scales) == -(-f // 64) * 64 // linear.GROUP[quant]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_equals_the_reference(level, quant, shape):
    d, f = shape
    dense, x = fused(quant, d, f)[1][64 : 64 + f], inputs(1, d, f)[0][0]
    size = linear.magnitude(dense, x[None])[0]
    for keep in (0.05, 0.4, 1.0):
        chosen = some(f, keep)
        got, want = run(quant, d, f, chosen), neurons.apply(dense, x, chosen)
        assert np.array_equal(np.isnan(got), np.isnan(want))  # the others are not written
        error = np.abs(got - want)[chosen]
        assert (error <= (d + ROUNDINGS[quant]) * 2.0**-24 * size[chosen] + coarse(level, quant, d, f)).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_a_neuron_does_not_depend_on_threads_nor_on_the_others(level, threads, quant):
    d, f = 513, 200
    whole, part, chosen = run(quant, d, f, some(f, 1.0)), run(quant, d, f, some(f, 0.3)), some(f, 0.3)
    _core.set_threads(1)
    alone = run(quant, d, f, chosen)
    _core.set_threads(threads)
    assert np.array_equal(part, alone, equal_nan=True) and np.array_equal(part[chosen], whole[chosen])
    assert np.array_equal(run(quant, d, f, None), whole)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("quant", QUANTS)
def test_what_is_not_finite_is_seen(level, quant, bad):
    """Bytes cannot say so: such a group is computed in floats."""
    d, f = 65, 130
    data, scales = laid_out(quant, d, f)
    x, y, chosen = inputs(1, d, f)[0][0].copy(), np.zeros(f, np.float32), some(f, 0.4)
    x[3] = bad
    _core.neurons(quant, data, scales, chosen, x, y)
    assert not np.isfinite(y[chosen]).any()
    _core.neurons(quant, data, scales, None, x, y)
    assert not np.isfinite(y).any()


@pytest.mark.parametrize("quant", QUANTS)
def test_no_neurons(level, quant):
    assert np.isnan(run(quant, 40, 72, np.empty(0, np.uint32))).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_what_is_left_out_is_not_read(level, quant):
    d, f = 65, 130
    x, chosen = inputs(1, d, f)[0][0], np.arange(64, 128, 3, dtype=np.uint32)
    data, scales = laid_out(quant, d, f)
    data[np.setdiff1d(np.arange(f), chosen)] = 0xFF
    if scales is not None:
        group = linear.GROUP[quant]
        scales[np.setdiff1d(np.arange(len(scales)), chosen // group)] = 0x7FC0
    y = np.full(f, np.nan, np.float32)
    _core.neurons(quant, data, scales, chosen, x, y)
    assert np.array_equal(y, run(quant, d, f, chosen), equal_nan=True) and np.isfinite(y[chosen]).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_what_is_not_finite_comes_through(level, quant):
    data, scales = laid_out(quant, 65, 130)
    x, y = inputs(1, 65, 130)[0][0].copy(), np.zeros(130, np.float32)
    x[64] = np.nan
    _core.neurons(quant, data, scales, some(130, 1.0), x, y)
    assert np.isnan(y).all()


# ---------------------------------------------------------------- the outputs of one part


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", FUSED, ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_a_part_is_what_the_whole_gives_there(level, threads, quant, shape, bias):
    d, f = shape
    oc = 64 + -(-f // 64) * 64
    x, _, b = inputs(1, d, oc)
    w, _ = fused(quant, d, f, b if bias else None)
    whole = np.empty((1, oc), np.float32)
    size = w.apply(x, whole) // oc
    for o0, o1 in ((0, oc), (0, 64), (64, oc), (64, 128), (oc - 64, oc), (oc // 128 * 64, oc), (64, 64)):
        y = np.full(oc, np.nan, np.float32)
        assert w.apply_part(x[0], y, o0, o1) // max(o1 - o0, 1) == (size if o1 > o0 else 0)
        assert np.isnan(y[:o0]).all() and np.isnan(y[o1:]).all()
        assert np.array_equal(y[o0:o1], whole[0, o0:o1])


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "call",
    [
        lambda w, rows, x, y: _core.neuron_rows(w, 1, 65),
        lambda w, rows, x, y: _core.neuron_rows(w, 64, 0),
        lambda w, rows, x, y: _core.neuron_rows(w, 64, 129),
        lambda w, rows, x, y: _core.neuron_rows(w, 256, 1),
        lambda w, rows, x, y: _core.neurons("int8", *rows, np.array([1, 65], np.uint32), x, y),
        lambda w, rows, x, y: _core.neurons("int8", *rows, np.array([1, 1], np.uint32), x, y),
        lambda w, rows, x, y: _core.neurons("int8", *rows, some(65, 1), x, y[1:]),
        lambda w, rows, x, y: _core.neurons("int8", *rows, some(65, 1), x.repeat(2), y),
        lambda w, rows, x, y: _core.neurons("int8", rows[0], None, some(65, 1), x, y),
        lambda w, rows, x, y: _core.neurons("int8", rows[0], rows[1][1:], some(65, 1), x, y),
        lambda w, rows, x, y: _core.neurons("int4", *rows, some(65, 1), x, y),
        lambda w, rows, x, y: w.apply_part(x, np.zeros(192, np.float32), 0, 63),
        lambda w, rows, x, y: w.apply_part(x, np.zeros(192, np.float32), 128, 64),
        lambda w, rows, x, y: w.apply_part(x, np.zeros(192, np.float32), 128, 256),
        lambda w, rows, x, y: w.apply_part(x[1:], np.zeros(192, np.float32), 0, 64),
        lambda w, rows, x, y: w.apply_part(x, np.zeros(128, np.float32), 0, 64),
    ],
)
def test_wrong_calls_are_refused(call):
    w, rows = fused("int8", 40, 65)[0], laid_out("int8", 40, 65)
    with pytest.raises(ValueError):
        call(w, rows, np.ones(40, np.float32), np.empty(65, np.float32))
