"""Upper halves of int8 weights in tiles: all channels are read, of most of them four bits, of some the whole weight."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from kernels.test_block import normal, packed
from kernels.test_halves import NONE, every, indices, listed, token, u8
from kernels.test_linear import int8, storage
from reference import halves, linear

from ralo import _core

# Around vectors, blocks of 64 channels and chunks of 4096; one tile, a few, and as many as are shared out.
SHAPES = [(ic, oc) for ic in (1, 63, 64, 65, 130, 640, 4096 + 65) for oc in (64, 128, 192, 1088)]


def tiled(data: np.ndarray, scales: np.ndarray) -> tuple[_core.Tiles, np.ndarray, np.ndarray]:
    (ic, oc), width = data.shape, -(-len(data) // 64) * 64
    lines, of_lines = np.full((oc // 64, 32 * width), 0x5A, np.uint8), np.full((oc // 64, width), 0x7FC0, np.uint16)
    return _core.Tiles(_core.Matrix("int8", ic, oc, data, scales, None), 0, lines, of_lines), lines, of_lines


def made(ic: int, oc: int) -> tuple[np.ndarray, np.ndarray, _core.Tiles]:
    data, scales, _ = storage("int8", ic, oc)
    return data, scales, tiled(data, scales)[0]


def run(t: _core.Tiles, x: np.ndarray, fine: np.ndarray, start: np.ndarray) -> np.ndarray:
    y = start.copy()
    t.apply(x, fine, y, True)
    return y


@cache
def fines(ic: int) -> list[np.ndarray]:
    """No channels, the largest, some at random, and all."""
    rng, x, n = np.random.default_rng(ic + 1), token(ic), -(-ic // 4)
    largest = np.argsort(-np.abs(x), kind="stable")[:n]
    return [NONE, listed(largest), listed(rng.permutation(ic)[:n]), every(ic)]


@cache
def wanted(ic: int, oc: int) -> tuple[np.ndarray, np.ndarray]:
    """For every choice of fine channels the product, and what may be off in it: both (choices, oc)."""
    data, scales, _ = storage("int8", ic, oc)
    want = [halves.apply(*halves.split(data), scales, token(ic), None, fine) for fine in fines(ic)]
    return np.stack(want), np.stack([halves.tile_error(data, scales, token(ic), fine) for fine in fines(ic)])


@cache
def by_bytes(ic: int, oc: int) -> list[np.ndarray]:
    """The same with x as it is rounded."""
    data, scales, _ = storage("int8", ic, oc)
    return [halves.apply_tiles(data, scales, token(ic), fine) for fine in fines(ic)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_are_the_upper_halves(threads, shape):
    data, scales, _ = storage("int8", *shape)
    t, *stored = tiled(data, scales)
    assert all(np.array_equal(a, b) for a, b in zip(stored, halves.tiles(data, scales), strict=True))
    assert t.nbytes == sum(a.nbytes for a in stored)


def test_tiles_of_a_part_of_a_matrix():
    m, seen = packed({"gate": normal(100, 65), "up": normal(70, 65), "v": normal(64, 65)}, "int8"), []
    arena = SimpleNamespace(zeros=lambda shape, kind: seen.append(np.zeros(shape, kind)) or seen[-1])
    for part, first, last in ((None, 0, 320), ("gate", 0, 128), ("up", 128, 256), ("v", 256, 320)):
        seen.clear()
        t = m.tiles(arena, part)
        want = halves.tiles(m.data[:, first:last], m.scales[:, first // 64 : last // 64])
        assert all(np.array_equal(a, b) for a, b in zip(seen, want, strict=True))
        assert t.nbytes == (last - first) // 64 * 128 * (32 + 2)


def test_the_reference_lays_tiles_out_as_is_written():
    """So that the ones above cannot be wrong alike: channel by channel, output by output."""
    rng = np.random.default_rng(3)
    data, scales = rng.integers(0, 256, (65, 128), dtype=np.uint8), rng.integers(0, 9, (65, 2), dtype=np.uint16)
    lines, of_lines = halves.tiles(data, scales)
    lines = lines.reshape(2, 2, 16, 2, 64)  # tiles, blocks of channels, fours, lines, bytes
    for c, o in np.ndindex(data.shape):
        four, j, m, high, place = c % 16, c % 64 // 16, o % 64 // 32, o % 32 // 16, o % 16
        assert lines[o // 64, c // 64, four, m, 4 * place + j] >> 4 * high & 15 == data[c, o] >> 4, (c, o)
        assert of_lines[o // 64, c] == scales[c, o // 64]
    assert not lines[:, 1, 1:].any() and not of_lines[:, 65:].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(level, threads, shape):
    (ic, oc), (_, _, t) = shape, made(*shape)
    before = np.random.default_rng(oc).standard_normal(oc).astype(np.float32)
    for fine, want, off in zip(fines(ic), *wanted(ic, oc), strict=True):
        y = np.full(oc, np.nan, np.float32)
        assert t.apply(token(ic), fine, y) == t.nbytes + len(fine) * (oc + 2 * oc // 64)
        assert (np.abs(y - want) <= off).all(), len(fine)
        assert (np.abs(run(t, token(ic), fine, before) - want - before) <= off + 2.0**-20).all(), len(fine)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_nibble_is_wrong(level, threads, shape):
    """x and scales that bytes hold exactly: the same numbers as the reference's. x times any scale is a whole number,
    127 in one channel that is not fine and at most 10 in the others: all sums are whole and below 2^24."""
    ic, oc = shape
    rng = np.random.default_rng(shape)
    data = rng.integers(1, 256, shape, dtype=np.uint8)
    scales = linear.bf16_nearest(rng.choice(np.float32([0.5, 1]), (ic, oc // 64)))
    x = 2 * rng.integers(-5, 6, ic).astype(np.float32)
    largest = rng.integers(ic)
    x[largest], scales[largest] = rng.choice([-127, 127]), linear.bf16_nearest(np.float32([1]))[0]
    t, *_ = tiled(data, scales)
    for n in (0, ic // 3, ic - 1):
        fine = listed(rng.permutation(np.delete(every(ic), largest))[:n])
        want = halves.apply(*halves.split(data), scales, x, None, fine)
        assert np.array_equal(run(t, x, fine, np.zeros(oc, np.float32)), want), n


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("byte", [0x00, 0x0F, 0xF0, 0xFF])
def test_the_largest_sums_fit(level, byte, sign):
    data, scales = u8(4096 + 65, 128) + np.uint8(byte), np.full((4096 + 65, 2), 0x3F80, np.uint16)  # scales: 1
    t, *_ = tiled(data, scales)
    got = run(t, np.full(4096 + 65, 127 * sign, np.float32), NONE, np.zeros(128, np.float32))
    want = (4096 + 65) * 127.0 * sign * ((byte & 0xF0) + 8 - 128)
    np.testing.assert_allclose(got, want, rtol=2.0**-21)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_rounded_alike_at_every_level(any_level, shape):
    """But for one that lies in the middle between two, which may go the other way."""
    (ic, oc), (_, scales, t) = shape, made(*shape)
    for fine, want in zip(fines(ic), by_bytes(ic, oc), strict=True):
        of_a_byte = 128 * 2 * halves.tile_step(scales, token(ic), fine).max()
        off = np.abs(run(t, token(ic), fine, np.zeros(oc, np.float32)) - want)
        floats = halves.tile_rounding(scales, token(ic), fine)
        assert off.max() <= of_a_byte + floats and np.median(off) <= floats, len(fine)


@pytest.mark.parametrize("shape", [(65, 64), (64, 1088), (640, 192), (640, 1088), (4096 + 65, 1088)], ids=str)
def test_same_bits_at_any_number_of_threads(level, shape):
    (ic, oc), (_, _, t) = shape, made(*shape)
    found, before = [], _core.threads()
    try:
        for n in (1, 2, 3, 5):
            _core.set_threads(n)
            found.append([run(t, token(ic), fine, token(oc)) for fine in fines(ic)])
    finally:
        _core.set_threads(before)
    assert all(np.array_equal(found[0], others) for others in found[1:])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("channel", [0, 100, 256])
def test_what_is_not_finite_comes_through(level, channel, value):
    _, _, t = made(257, 192)
    x, zeros, some = token(257), np.zeros(192, np.float32), listed(np.setdiff1d(every(257)[::3], channel))
    assert np.isfinite(run(t, x, some, zeros)).all()
    x[channel] = value
    for fine in (NONE, some, indices(channel), every(257)):
        assert not np.isfinite(run(t, x, fine, zeros)).any()


def test_scales_that_are_not_finite_come_through(level):
    data, scales, _ = storage("int8", 257, 192)
    for value in (0x7FC0, 0x7F80, 0xFF80):  # NaN, infinity, and less than all
        wrong = scales.copy()
        wrong[100, 1] = value
        t, *_ = tiled(data, wrong)
        for fine in (NONE, indices(100), every(257)):
            assert not np.isfinite(run(t, token(257), fine, np.zeros(192, np.float32))[64:128]).any()


def test_lower_halves_are_read_of_fine_channels_alone(level):
    """And upper ones of the others: the whole weights have them once more."""
    data, scales, _ = storage("int8", 257, 192)
    fine, zeros = fines(257)[2], np.zeros(192, np.float32)
    coarse, data = np.setdiff1d(every(257), fine), data.copy()
    t, lines, _ = tiled(data, scales)
    clean = run(t, token(257), fine, zeros)
    data[coarse] = ~data[coarse]
    four = lines.reshape(3, 5, 16, 2, 16, 4)  # tiles, blocks, fours, lines, outputs, channels of a four
    for c in fine:
        four[:, c // 64, c % 16, :, :, c % 64 // 16] ^= 0xFF
    assert np.array_equal(run(t, token(257), fine, zeros), clean)
    data[fine[0]] ^= 1
    assert not np.array_equal(run(t, token(257), fine, zeros), clean)
    data[fine[0]] ^= 1
    four[:, 0, coarse[0] % 16, :, :, coarse[0] % 64 // 16] ^= 0x11
    assert coarse[0] < 64 and not np.array_equal(run(t, token(257), fine, zeros), clean)


@pytest.mark.parametrize("size", [1e-20, 1e30])
def test_sizes_of_x(level, size):
    _, _, t = made(257, 192)
    x = token(257) * np.float32(size)
    for fine, want, off in zip(fines(257), *wanted(257, 192), strict=True):
        got = run(t, x, fine, np.zeros(192, np.float32)).astype(np.float64) / size
        assert (np.abs(got - want) <= off).all(), len(fine)


def test_zeros_and_what_is_as_good_as_zero(level):
    _, _, t = made(257, 192)
    start, zeros = token(192), np.zeros(192, np.float32)
    for fine in fines(257):
        assert np.array_equal(run(t, np.zeros(257, np.float32), fine, start), start)
        y = np.full(192, np.nan, np.float32)
        t.apply(np.zeros(257, np.float32), fine, y)
        assert (y == 0).all()
        tiny = run(t, token(257) * np.float32(1e-38), fine, zeros)
        assert np.abs(tiny).max() < 1e-34  # the largest product is about 1e-36


def test_fine_and_other_channels_far_apart(level):
    """Fine ones do not count for the step of the others; where one kind is as good as zero the other is as alone."""
    data, scales, t = made(257, 192)
    fine = listed(np.random.default_rng(1).permutation(257)[:80])
    for part in (fine, np.setdiff1d(every(257), fine)):
        for by in (30, 1e-38, 0):
            x = token(257)
            x[part] *= np.float32(by)
            want = halves.apply(*halves.split(data), scales, x, None, fine)
            off = np.abs(run(t, x, fine, np.zeros(192, np.float32)) - want)
            assert (off <= halves.tile_error(data, scales, x, fine)).all(), (len(part), by)


# ---------------------------------------------------------------- refusals


def empty(tiles: int, bytes_of: int, of_scales: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    return u8(tiles, bytes_of), np.zeros((of_scales, width), np.uint16)


SIZES, OUTPUTS = r"data must be \(tiles, 32 ic\), scales \(tiles, ic\)", "tiles are outputs of the matrix"


@pytest.mark.parametrize(
    ("o0", "shapes", "message"),
    [
        (0, (1, 2047, 1, 64), SIZES),
        (0, (1, 32 * 4, 1, 4), SIZES),  # not padded
        (0, (2, 2048, 1, 64), SIZES),
        (0, (1, 2048, 2, 64), SIZES),
        (0, (1, 2048, 1, 65), SIZES),
        (0, (3, 2048, 3, 64), OUTPUTS),
        (64, (2, 2048, 2, 64), OUTPUTS),
        (32, (1, 2048, 1, 64), OUTPUTS),
        (128, (1, 2048, 1, 64), OUTPUTS),
        (2**64 - 64, (1, 2048, 1, 64), OUTPUTS),
    ],
)
def test_wrong_storage_is_refused(o0, shapes, message):
    m = int8(data=(4, 128), scales=(4, 2), oc=128)
    _core.Tiles(m, 0, *empty(2, 2048, 2, 64)), _core.Tiles(m, 64, *empty(1, 2048, 1, 64))  # as it should be
    with pytest.raises(ValueError, match=message):
        _core.Tiles(m, o0, *empty(*shapes))


@pytest.mark.parametrize(("quant", "row", "scales"), [("int4", 32, (4, 2)), ("f32", 256, None), ("bf16", 128, None)])
def test_only_int8_has_tiles(quant, row, scales):
    with pytest.raises(ValueError, match="only int8 weights have upper halves"):
        _core.Tiles(int8(quant=quant, data=(4, row), scales=scales), 0, *empty(1, 2048, 1, 64))


X, Y = np.zeros(4, np.float32), np.zeros(64, np.float32)
SHAPE, ORDER = r"x must be \(ic,\), y \(oc,\)", "channels must ascend and be below ic"


@pytest.mark.parametrize(
    ("error", "message", "x", "fine", "y"),
    [
        (ValueError, SHAPE, np.zeros(5, np.float32), NONE, Y),
        (ValueError, SHAPE, X, NONE, np.zeros(63, np.float32)),
        (ValueError, SHAPE, X, NONE, np.zeros(128, np.float32)),
        *((ValueError, ORDER, X, indices(*wrong), Y) for wrong in ((0, 4), (2, 1), (1, 1), (2**32 - 1,))),
        (TypeError, None, X[None], NONE, Y),
        (TypeError, None, np.zeros(4), NONE, Y),
        (TypeError, None, X, NONE, np.zeros(64)),
        (TypeError, None, X, None, Y),
    ],
)
def test_wrong_inputs_are_refused(error, message, x, fine, y):
    t = _core.Tiles(int8(), 0, *empty(1, 2048, 1, 64))
    t.apply(X, indices(0, 3), Y)  # as it should be
    with pytest.raises(error, match=message):
        t.apply(x, fine, y)


def test_tiles_of_some_outputs_are_not_applied():
    t = _core.Tiles(int8(data=(4, 128), scales=(4, 2), oc=128), 64, *empty(1, 2048, 1, 64))
    for outputs in (64, 128):
        with pytest.raises(ValueError, match="tiles all outputs"):
            t.apply(X, NONE, np.zeros(outputs, np.float32))
