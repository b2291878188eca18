"""int8 weights in two halves: of some channels the upper one is read, of the best of those both."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from kernels.test_linear import int8, storage
from reference import halves, linear
from reference.rounded import LEVELS

from ralo import _core

# Around quads, passes of 16 channels, blocks of 256; half columns of 128 outputs, panels of 16384.
SHAPES = [(ic, oc) for ic in (1, 3, 5, 16, 17, 100, 257, 640) for oc in (64, 128, 192, 640, 16448)]
NONE = np.empty(0, np.uint32)


class Case(NamedTuple):
    kept: np.ndarray
    fine: np.ndarray


def indices(*channels: int) -> np.ndarray:
    return np.array(channels, np.uint32)


def every(ic: int) -> np.ndarray:
    return np.arange(ic, dtype=np.uint32)


def listed(chosen: np.ndarray) -> np.ndarray:
    return np.sort(chosen).astype(np.uint32)


def token(ic: int) -> np.ndarray:
    return np.random.default_rng(ic).standard_normal(ic).astype(np.float32)


@cache
def cases(ic: int) -> list[Case]:
    """All, some and few channels; of each none fine, the largest, some at random, and all of them."""
    rng, x, out = np.random.default_rng(ic + 1), token(ic), []
    for kept in (np.full(ic, True), rng.random(ic) < 0.5, rng.random(ic) < 0.05):
        kept = listed(np.flatnonzero(kept) if kept.any() else [ic - 1])
        n = -(-len(kept) // 4)
        largest = kept[np.argsort(-np.abs(x[kept]), kind="stable")[:n]]
        out += [Case(kept, f) for f in (NONE, listed(largest), listed(rng.permutation(kept)[:n]), kept)]
    return out


@cache
def wanted(ic: int, oc: int) -> tuple[np.ndarray, np.ndarray]:
    """For every case the product, and what bytes of x may change in it: both (cases, oc)."""
    data, scales, _ = storage("int8", ic, oc)
    upper, lower = halves.split(data)
    scale = linear.scale_of_each("int8", scales).astype(np.float64)
    x, all_cases = token(ic), cases(ic)
    above, below = (np.stack([halves.only(x, getattr(c, name)) for c in all_cases]) for name in Case._fields)
    steps = np.stack([halves.byte_step(scales, x, *c) for c in all_cases])
    want = above @ (halves.upper_steps(upper) * scale) + below @ (halves.lower_steps(lower) * scale)
    return want, halves.byte_error(steps, upper)


def halved(data: np.ndarray, scales: np.ndarray) -> tuple[_core.Halves, np.ndarray, np.ndarray]:
    upper, lower = (np.full((len(data), data.shape[1] // 2), 0x5A, np.uint8) for _ in range(2))
    return _core.Halves(_core.Matrix("int8", *data.shape, data, scales, None), upper, lower), upper, lower


def run(h: _core.Halves, x: np.ndarray, case: Case, start: np.ndarray) -> np.ndarray:
    y = start.copy()
    h.apply(x, case.kept, case.fine, y, True)
    return y


def within(got: np.ndarray, want: np.ndarray, by_bytes: np.ndarray | float) -> bool:
    return bool((np.abs(got - want) <= 1e-4 * np.abs(want).max() + (by_bytes if _core.level() in LEVELS else 0)).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_halves_are_the_bytes(level, shape):
    data, scales, _ = storage("int8", *shape)
    _, upper, lower = halved(data, scales)
    assert all(np.array_equal(a, b) for a, b in zip((upper, lower), halves.split(data), strict=True))
    assert np.array_equal(halves.join(upper, lower), data)


def test_the_reference_splits_what_it_joins():
    """So that the two above cannot be wrong alike: all bytes, and where some of them lie."""
    data = np.arange(256, dtype=np.uint8).reshape(2, 128)
    upper, lower = halves.split(data)
    assert (upper[0, 0], lower[0, 0], lower[0, 5]) == (0x10, 0x00, 0x55)  # outputs 0 and 16; 5 and 21
    assert (upper[1, 63], lower[1, 63]) == (0xFE, 0xFF)  # bytes 239 and 255
    assert np.array_equal(halves.join(upper, lower), data)
    assert np.array_equal(halves.upper_steps(upper) + halves.lower_steps(lower), data - 128.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(level, shape):
    ic, oc = shape
    data, scales, _ = storage("int8", ic, oc)
    h, *_ = halved(data, scales)
    before = np.random.default_rng(oc).standard_normal(oc).astype(np.float32)
    for case, want, by_bytes in zip(cases(ic), *wanted(ic, oc), strict=True):
        y, more = np.full(oc, np.nan, np.float32), before.copy()
        assert h.apply(token(ic), case.kept, case.fine, y) == sum(map(len, case)) * (oc // 2 + 2 * oc // 64)
        h.apply(token(ic), case.kept, case.fine, more, True)
        assert within(y, want, by_bytes), [*map(len, case)]
        assert within(more, want + before, by_bytes), [*map(len, case)]


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_nibble_is_wrong(level, shape, some):
    """x and scales that bytes hold exactly: what is off by one in a weight shows.

    x times any scale is a whole number, of channels that are not fine at most 127, which the first of every 16 is: so
    it is the largest wherever a block starts. What is left: sums below 255 * 127 a channel become float32 three times,
    and x beside lower halves is rounded to 1 / 32512 of the largest (16 bits)."""
    ic, oc = shape
    rng = np.random.default_rng([ic, oc, some])
    data = rng.integers(1, 256, (ic, oc), dtype=np.uint8)
    scales = linear.bf16_nearest(rng.choice(np.float32([0.5, 1]), (ic, oc // 64)))
    x = 2 * rng.integers(-63, 64, ic).astype(np.float32)
    kept = listed(np.flatnonzero(rng.random(ic) < 0.6)) if some else every(ic)
    first = kept[::16]
    x[first], scales[first] = rng.choice(np.float32([-127, 127]), len(first)), linear.bf16_nearest(np.float32([1]))[0]
    fine = listed(rng.permutation(np.setdiff1d(kept, first))[: len(kept) // 3])
    h, *_ = halved(data, scales)
    y = np.full(oc, np.nan, np.float32)
    h.apply(x, kept, fine, y)
    want = halves.apply(*halves.split(data), scales, x, kept, fine)
    roundings = len(kept) * (3 * 2.0**-24 * 255 * 127) + len(fine) * 8 / 2 * 127 / 32512
    assert np.abs(y - want).max() <= roundings


def test_an_outlier_makes_its_own_block_coarse_only(level):
    """Other blocks' channels are rounded against their own largest, among which those that are fine do not count."""
    data, scales, _ = storage("int8", 640, 64)
    h, upper, lower = halved(data, scales)
    x, fine = token(640), indices(300)
    x[0], x[1:256], x[300] = 1e4, 0, 100
    step = halves.byte_step(scales, x, None, fine)
    step[:256] = 0  # the largest of a block is 127 steps, exactly, where there is one scale
    got = run(h, x, Case(every(640), fine), np.zeros(64, np.float32))
    assert within(got, halves.apply(upper, lower, scales, x, None, fine), halves.byte_error(step, upper))


@pytest.mark.parametrize("shape", [(640, 640), (640, 64), (100, 16448), (640, 16448)], ids=str)
def test_same_bits_at_any_number_of_threads(level, shape):
    ic, oc = shape
    data, scales, _ = storage("int8", ic, oc)
    h, *_ = halved(data, scales)
    start, found, before = token(oc), [], _core.threads()
    try:
        for n in (1, 2, 3):
            _core.set_threads(n)
            found.append([run(h, token(ic), case, start) for case in cases(ic)])
    finally:
        _core.set_threads(before)
    assert all(np.array_equal(found[0], others) for others in found[1:])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("channel", [0, 100, 256])
def test_what_is_not_finite_comes_through(level, channel, value):
    data, scales, _ = storage("int8", 257, 192)
    h, *_ = halved(data, scales)
    x = token(257)
    others, zeros = listed(np.setdiff1d(np.arange(257), channel)), np.zeros(192, np.float32)
    without = Case(others, others[::3].copy())
    clean = run(h, x, without, zeros)
    x[channel] = value
    for fine in (NONE, without.fine, indices(channel), every(257)):
        assert not np.isfinite(run(h, x, Case(every(257), fine), zeros)).any()
    assert np.isfinite(clean).all() and np.array_equal(run(h, x, without, zeros), clean)


def test_only_what_is_asked_for_is_read(level):
    """Neither channels that are not kept, nor lower halves of those that are not fine."""
    data, scales, _ = storage("int8", 257, 192)
    case, zeros = cases(257)[6], np.zeros(192, np.float32)
    h, upper, lower = halved(data, scales)
    clean = run(h, token(257), case, zeros)
    left, coarse = (np.setdiff1d(np.arange(257), c) for c in case)
    dirty = scales.copy()
    dirty[left] = 0x7FC0  # NaN
    h, upper, lower = halved(data, dirty)
    upper[left], lower[coarse] = ~upper[left], ~lower[coarse]
    assert np.array_equal(run(h, token(257), case, zeros), clean)
    lower[case.fine[0]] = ~lower[case.fine[0]]
    assert not np.array_equal(run(h, token(257), case, zeros), clean)


@pytest.mark.parametrize("size", [1e-20, 1e30])
def test_sizes_of_x(level, size):
    data, scales, _ = storage("int8", 257, 192)
    h, *_ = halved(data, scales)
    x = token(257) * np.float32(size)
    for case, want, by_bytes in zip(cases(257), *wanted(257, 192), strict=True):
        assert within(run(h, x, case, np.zeros(192, np.float32)) / size, want, by_bytes)


def test_zeros_and_what_is_as_good_as_zero(level):
    data, scales, _ = storage("int8", 257, 192)
    h, *_ = halved(data, scales)
    start = token(192)
    for case in cases(257):
        assert np.array_equal(run(h, np.zeros(257, np.float32), case, start), start)
        tiny = run(h, token(257) * np.float32(1e-38), case, np.zeros(192, np.float32))
        assert np.abs(tiny).max() < 1e-34  # the largest product is about 1e-36


def test_fine_and_other_channels_far_apart(level):
    """Where one kind is as good as zero beside the other, the other is as good as alone."""
    data, scales, _ = storage("int8", 257, 192)
    h, upper, lower = halved(data, scales)
    fine = listed(np.random.default_rng(1).permutation(257)[:80])
    for large, small in ((fine, np.setdiff1d(np.arange(257), fine)), (np.setdiff1d(np.arange(257), fine), fine)):
        x = token(257)
        x[small] *= np.float32(1e-38)
        want = halves.apply(upper, lower, scales, x, None, fine)
        by_bytes = halves.byte_error(halves.byte_step(scales, x, None, fine), upper)
        assert within(run(h, x, Case(every(257), fine), np.zeros(192, np.float32)), want, by_bytes), len(large)


def test_no_channels_give_zeros(level):
    data, scales, _ = storage("int8", 17, 128)
    h, *_ = halved(data, scales)
    y, start = np.full(128, np.nan, np.float32), token(128)
    assert h.apply(token(17), NONE, NONE, y) == 0 and (y == 0).all()
    assert np.array_equal(run(h, token(17), Case(NONE, NONE), start), start)


# ---------------------------------------------------------------- refusals


def u8(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("upper", "lower"), [((4, 64), (4, 32)), ((4, 32), (4, 64)), ((3, 32), (4, 32)), ((4, 32), (5, 32))], ids=str
)
def test_wrong_storage_is_refused(upper, lower):
    with pytest.raises(ValueError, match=r"halves must be \(ic, oc / 2\)"):
        _core.Halves(int8(), u8(*upper), u8(*lower))


@pytest.mark.parametrize(
    "matrix",
    [
        lambda: int8(quant="int4", data=(4, 32), scales=(4, 2)),
        lambda: int8(quant="f32", data=(4, 256), scales=None),
        lambda: int8(quant="bf16", data=(4, 128), scales=None),
    ],
    ids=["int4", "f32", "bf16"],
)
def test_only_int8_has_halves(matrix):
    _core.Halves(int8(), u8(4, 32), u8(4, 32))  # as it should be
    with pytest.raises(ValueError, match="only int8 weights have halves"):
        _core.Halves(matrix(), u8(4, 32), u8(4, 32))


@pytest.mark.parametrize("wrong", [indices(0, 4), indices(2, 1), indices(1, 1), indices(2**32 - 1)], ids=str)
@pytest.mark.parametrize("place", ["kept", "fine"])
def test_wrong_lists_are_refused(place, wrong):
    h = _core.Halves(int8(), u8(4, 32), u8(4, 32))
    lists = {"kept": every(4), "fine": NONE} | {place: wrong}
    with pytest.raises(ValueError, match="channels must ascend and be below ic"):
        h.apply(np.zeros(4, np.float32), lists["kept"], lists["fine"], np.zeros(64, np.float32))


def test_fine_channels_that_are_not_kept_are_refused():
    h = _core.Halves(int8(), u8(4, 32), u8(4, 32))
    with pytest.raises(ValueError, match="fine"):
        h.apply(np.ones(4, np.float32), indices(0, 3), indices(1), np.zeros(64, np.float32))


@pytest.mark.parametrize(
    ("error", "x", "kept", "y"),
    [
        (ValueError, np.zeros(5, np.float32), every(4), np.zeros(64, np.float32)),
        (ValueError, np.zeros(4, np.float32), every(4), np.zeros(63, np.float32)),
        (TypeError, np.zeros((1, 4), np.float32), every(4), np.zeros(64, np.float32)),
        (TypeError, np.zeros(4), every(4), np.zeros(64, np.float32)),
        (TypeError, np.zeros(4, np.float32), every(4), np.zeros(64)),
        (TypeError, np.zeros(4, np.float32), None, np.zeros(64, np.float32)),
    ],
)
def test_wrong_inputs_are_refused(error, x, kept, y):
    h = _core.Halves(int8(), u8(4, 32), u8(4, 32))
    with pytest.raises(error, match=r"x must be \(ic,\), y \(oc,\)" if error is ValueError else None):
        h.apply(x, kept, NONE, y)
