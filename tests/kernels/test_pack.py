"""Packing writes the reference's bytes, at every ISA level, and no others; read back, they are close to the weights."""

from __future__ import annotations

import numpy as np
import pytest
from reference import linear

from ralo import _core

QUANTS = ("f32", "bf16", "int8", "int4")
# (n, ic)
SHAPES = [(1, 1), (31, 15), (32, 16), (33, 17), (63, 33), (64, 1), (65, 65), (96, 64), (130, 129), (200, 300)]


def weights(n: int, ic: int, seed: int = 0) -> np.ndarray:
    """Normal values with some groups all zero, some tiny, subnormal or huge, and exact ties of magnitude."""
    w = np.random.default_rng(seed).standard_normal((n, ic)).astype(np.float32)
    sizes = np.array([1, 0.02, 1e-30, 1e30, 0, 1e-39, 1e-44, 3e20, 1e-36], np.float32)
    w *= sizes[np.arange(ic) % len(sizes)]
    w[: n // 2, 2 % ic] = 0
    w[-1, 0] = -w[0, 0]
    return w


@pytest.mark.parametrize(("n", "ic"), SHAPES)
@pytest.mark.parametrize("quant", QUANTS)
def test_bytes_equal_the_reference(level, quant, n, ic):
    rows, oc, o0 = weights(n, ic), (n + 63) // 64 * 64 + 128, 64
    want, got = linear.empty(quant, ic, oc, fill=0xA5), linear.empty(quant, ic, oc, fill=0xA5)
    assert linear.pack(quant, rows, o0, *want)
    assert _core.pack(quant, rows, oc, o0, *got)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_ties_go_to_even(level, quant):
    """The largest value makes the scale 1 (int4: -1), whole numbers make sure of it; halves lie between two steps."""
    values = [127 if quant == "int8" else 8, *range(-6, 7), *range(-6, 7), -2.5, -1.5, 0.5, 1.5, 2.5]
    rows = np.array(values, np.float32).reshape(32, 1)
    assert (packed_and_read(quant, rows)[:32] == np.rint(rows)).all()


def test_int4_keeps_the_step_with_the_least_error(level):
    """Rows of two values that suit one step or another: every step is the best somewhere (the last one never is)."""
    rng = np.random.default_rng(0)
    rows = np.take_along_axis(rng.integers(-7, 9, (2, 2000)), rng.integers(0, 2, (32, 2000)), 0) / np.float32(10.5)
    rows = rows.astype(np.float32)
    rows[0] = 1
    want, got = linear.empty("int4", 2000, 64), linear.empty("int4", 2000, 64)
    linear.pack("int4", rows, 0, *want)
    _core.pack("int4", rows, 64, 0, *got)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    steps = np.rint(-2 / linear.bf16_value(got[1][:, 0])) / 2
    assert {*steps} >= {*linear.INT4_STEPS[:-1]}


@pytest.mark.parametrize("quant", QUANTS)
def test_bytes_do_not_depend_on_threads(threads, quant):
    rows = weights(70, 201)
    want, got = linear.empty(quant, 201, 128), linear.empty(quant, 201, 128)
    linear.pack(quant, rows, 0, *want)
    _core.pack(quant, rows, 128, 0, *got)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_rows_write_nothing():
    data, scales = linear.empty("int4", 3, 64, fill=7)
    assert _core.pack("int4", np.empty((0, 3), np.float32), 64, 64, data, scales)
    assert (data == 7).all() and (scales == 7 * 257).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quant", QUANTS)
def test_values_that_are_not_finite_are_refused(level, quant, bad):
    for at in [(0, 0), (69, 40), (33, 17)]:
        rows = weights(70, 41)
        rows[at] = bad
        assert not _core.pack(quant, rows, 128, 0, *linear.empty(quant, 41, 128))


def test_a_value_that_is_infinite_in_bf16_is_refused(level):
    rows = np.full((1, 1), np.finfo(np.float32).max)
    assert _core.pack("f32", rows, 64, 0, *linear.empty("f32", 1, 64))
    assert not _core.pack("bf16", rows, 64, 0, *linear.empty("bf16", 1, 64))


def packed_and_read(quant: str, rows: np.ndarray) -> np.ndarray:
    oc = -(-len(rows) // 64) * 64
    data, scales = linear.empty(quant, rows.shape[1], oc)
    assert _core.pack(quant, rows, oc, 0, data, scales)
    return linear.unpack(quant, data, scales)


@pytest.mark.parametrize("size", [1.0, 0.02, 1e-30, 1e30])
def test_round_trip_errors(level, size):
    rows = (np.random.default_rng(1).standard_normal((100, 33)) * size).astype(np.float32)
    exact = rows.astype(np.float64)
    error = {quant: np.abs(packed_and_read(quant, rows)[:100] - exact) for quant in QUANTS}
    assert (error["f32"] == 0).all()
    assert (error["bf16"] <= 2.0**-8 * np.abs(exact)).all()  # 8 bits of mantissa: half a step
    top = np.abs(exact[:64]).max(0)
    assert (error["int8"][:64] <= top / 127 * (1 + 2.0**-7) / 2 * 1.001).all()  # half a step; the scale is rounded up
    assert np.sqrt((error["int4"] ** 2).mean()) < 0.1 * size  # 16 steps over about +-2.1 standard deviations


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_groups_too_small_for_a_scale_become_zero(level, quant):
    rows = np.array([[1e-40, 0], [0, 0], [-3e-41, 1e-45]], np.float32)
    assert (packed_and_read(quant, rows) == 0).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_padding_reads_as_zero(level, quant):
    assert (packed_and_read(quant, np.ones((3, 5), np.float32))[3:] == 0).all()


def test_row_bytes_and_groups():
    for quant in QUANTS:
        data, scales = linear.empty(quant, 1, 192)
        assert _core.row_bytes(quant, 192) == data.shape[1]
        assert _core.groups(quant, 192) == (0 if scales is None else scales.shape[1])


ROWS = np.zeros((64, 4), np.float32)
DATA, SCALES = np.zeros((4, 64), np.uint8), np.zeros((4, 1), np.uint16)


@pytest.mark.parametrize(
    ("error", "args"),
    [
        (ValueError, ("int7", ROWS, 64, 0, DATA, SCALES)),
        (ValueError, ("int8", ROWS, 63, 0, DATA, SCALES)),  # not a multiple of PAD
        (ValueError, ("int8", ROWS, 0, 0, DATA, SCALES)),
        (ValueError, ("int8", ROWS, 64, 64, DATA, SCALES)),  # no room at o0
        (ValueError, ("int8", ROWS, 64, 32, DATA, SCALES)),
        (ValueError, ("int8", ROWS, 128, 0, DATA, SCALES)),  # data too small
        (ValueError, ("int8", ROWS, 64, 0, DATA, None)),
        (ValueError, ("int8", ROWS, 64, 0, DATA, np.zeros((4, 2), np.uint16))),
        (ValueError, ("f32", ROWS, 64, 0, np.zeros((4, 256), np.uint8), SCALES)),
        (ValueError, ("int8", np.zeros((65, 4), np.float32), 64, 0, DATA, SCALES)),
        (ValueError, ("int8", np.zeros((64, 0), np.float32), 64, 0, DATA, SCALES)),
        (TypeError, ("int8", ROWS, -64, 0, DATA, SCALES)),
        (TypeError, ("int8", ROWS[0], 64, 0, DATA, SCALES)),
        (TypeError, ("int8", ROWS.astype(np.float64), 64, 0, DATA, SCALES)),
        (TypeError, ("int8", np.zeros((64, 8), np.float32)[:, ::2], 64, 0, DATA, SCALES)),
        (TypeError, ("int8", ROWS, 64, 0, np.zeros((4, 128), np.uint8)[:, ::2], SCALES)),
        (TypeError, ("int8", ROWS, 64, 0, DATA.astype(np.int32), SCALES)),
        (TypeError, ("int8", ROWS, 64, 0, DATA, SCALES.astype(np.float32))),
        (TypeError, ("int8", None, 64, 0, DATA, SCALES)),
    ],
)
def test_wrong_arguments_are_refused(error, args):
    with pytest.raises(error):
        _core.pack(*args)


def test_read_only_storage_is_refused():
    data = DATA.copy()
    data.flags.writeable = False
    with pytest.raises(TypeError):
        _core.pack("int8", ROWS, 64, 0, data, SCALES)
