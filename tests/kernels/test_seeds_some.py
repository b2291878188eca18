"""Weights from seeds, some channels or outputs only: the bits and bytes of what is left, and the rest is not read."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_seeds import CUT, SHAPES, Stored, check, inputs, matrix, nbytes, run, same, stored
from reference import proc

from ralo import _core

KEEPS = (0.02, 0.3, 0.5, 0.97)


def some(ic: int, keep: float) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng(ic).random(ic) < keep).astype(np.uint32)


def channel_bytes(s: Stored, channels: np.ndarray) -> int:
    """Seeds and scales of these channels, and where there are deltas their start and their own."""
    each = s.data[0].nbytes + s.scales[0].nbytes
    if not len(s.at):
        return len(channels) * each
    return len(channels) * (each + 4) + 4 * int(np.diff(s.starts)[channels].sum())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_product_where_the_others_are_zero(any_level, shape):
    x, before, b = inputs(1, shape[0], shape[1])
    for i, keep in enumerate(KEEPS):
        bias, add, deltas = bool(i & 1), bool(i & 2), i != 1
        s, channels = stored(*shape, deltas), some(shape[0], keep)
        y = before[0].copy() if add else np.full_like(before[0], np.nan)
        read = matrix(s, shape[1], b if bias else None).apply_some(x[0], channels, y, add)
        assert read == channel_bytes(s, channels)
        kept = np.zeros_like(x)
        kept[0, channels] = x[0, channels]
        check(shape, deltas, kept, y[None], before * add, b * bias)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_whole_list_is_dense_bit_for_bit(any_level, shape):
    x, before, b = inputs(1, shape[0], shape[1])
    for deltas in (True, False):
        s, y = stored(*shape, deltas), before[0].copy()
        read = matrix(s, shape[1], b).apply_some(x[0], np.arange(shape[0], dtype=np.uint32), y, True)
        assert same(y[None], run(s, shape[1], x, b, before)) and read == nbytes(s)


def test_same_bits_at_any_number_of_threads(any_level, threads):
    for shape in ((257, 640, 3), CUT, (20, 16448, 100)):
        x, y, b = inputs(1, shape[0], shape[1])
        results = []
        for n in (threads, 1):
            _core.set_threads(n)
            results.append(y[0].copy())
            matrix(stored(*shape), shape[1], b).apply_some(x[0], some(shape[0], 0.5), results[-1], True)
        _core.set_threads(threads)
        assert same(*results)


def test_what_is_left_out_is_not_read(any_level):
    """Neither a NaN in x nor one in the scales or deltas of a channel that is not in the list reaches y."""
    s, channels = stored(257, 640, 3), some(257, 0.5)
    x = inputs(1, 257, 640)[0][0].copy()
    clean, dirty = np.empty((2, 640), np.float32)
    matrix(s, 640).apply_some(x, channels, clean)
    others = np.setdiff1d(np.arange(257), channels)
    data, scales, deltas = s.data.copy(), s.scales.copy(), s.deltas.copy()
    x[others], data[others], scales[others] = np.nan, 0xFF, 0x7FC0
    deltas[np.isin(np.repeat(np.arange(257), np.diff(s.starts)), others)] = 0x7FC0
    matrix(s._replace(data=data, scales=scales, deltas=deltas), 640).apply_some(x, channels, dirty)
    assert same(clean, dirty) and np.isfinite(clean).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_comes_through(any_level, value):
    channels, x = some(257, 0.5), inputs(1, 257, 640)[0][0].copy()
    for at in (0, len(channels) // 2, -1):
        bad, y = x.copy(), np.empty(640, np.float32)
        bad[channels[at]] = value
        matrix(stored(257, 640, 3), 640).apply_some(bad, channels, y)
        assert not np.isfinite(y).any()


def test_no_channels_give_the_bias(any_level):
    bias, y = inputs(1, 257, 640)[2], np.full(640, np.nan, np.float32)
    w = matrix(stored(257, 640, 3), 640, bias)
    assert w.apply_some(np.ones(257, np.float32), np.empty(0, np.uint32), y) == 0
    assert same(y, bias)


@pytest.mark.parametrize("channels", [[0, 33], [5, 4], [7, 7]], ids=str)
def test_wrong_lists_are_refused(channels):
    w = matrix(stored(33, 640, 4), 640)
    with pytest.raises(ValueError, match="channels must ascend and be below ic"):
        w.apply_some(np.ones(33, np.float32), np.array(channels, np.uint32), np.empty(640, np.float32))


# ---------------------------------------------------------------- some outputs


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[1] > 64], ids=str)
def test_a_part_has_the_bits_of_the_whole(any_level, threads, shape):
    x, _, b = inputs(1, shape[0], shape[1])
    s, blocks = stored(*shape), shape[1] // 64
    w, whole = matrix(s, shape[1], b), run(s, shape[1], x, b)[0]
    cuts = sorted({0, 1, blocks // 3, blocks // 2, blocks - 1, blocks})
    for first in cuts:
        for last in (c for c in cuts if c >= first):
            y = np.full(shape[1], 7, np.float32)
            w.apply_part(x[0], y, first * 64, last * 64)
            inside = slice(first * 64, last * 64)
            assert (np.delete(y, np.arange(shape[1])[inside]) == 7).all()
            assert same(y[inside], whole[inside])


def test_a_part_of_nothing_reads_nothing(any_level):
    y = np.full(640, 7, np.float32)
    assert matrix(stored(17, 640, 5), 640).apply_part(np.ones(17, np.float32), y, 128, 128) == 0 and (y == 7).all()


@pytest.mark.parametrize("shape", [(257, 640, 3), (16, 640, 10), (17, 640, 5)], ids=str)
def test_a_part_counts_the_columns_that_give_it_and_the_one_before(shape):
    x, y = np.ones(shape[0], np.float32), np.empty(shape[1], np.float32)
    columns = proc.columns(shape[2], shape[1])
    for deltas in (True, False):
        s = stored(*shape, deltas)
        w = matrix(s, shape[1])
        for first in range(shape[1] // 64):
            for last in range(first + 1, shape[1] // 64 + 1):
                given = [k for k, blocks in enumerate(columns) if set(blocks) & set(range(first, last))]
                seeds = {s for k in given for s in (k, (k - 1) % shape[2])}
                inside = int(((s.at >= first * 64) & (s.at < last * 64)).sum())
                each = 64 * len(seeds) + 2 * len(given) + (4 if deltas else 0)
                assert w.apply_part(x, y, first * 64, last * 64) == shape[0] * each + 4 * inside
        assert w.apply_part(x, y, 0, shape[1]) == nbytes(s)


@pytest.mark.parametrize(("o0", "o1"), [(32, 64), (0, 96), (128, 64), (0, 704), (704, 704)])
def test_wrong_ranges_are_refused(o0, o1):
    w = matrix(stored(17, 640, 5), 640)
    with pytest.raises(ValueError, match="outputs must be a range of multiples of PAD"):
        w.apply_part(np.ones(17, np.float32), np.empty(640, np.float32), o0, o1)
