"""Many tokens where exactness is not asked for: the product of bytes, or the exact one where bytes do not pay."""

from __future__ import annotations

import numpy as np
import pytest
from pairwise import pairwise
from reference import linear, rounded
from test_linear import inputs, run, storage

from ralo import _core

QUANTS = ("int8", "int4")
TOKENS = (2, 5, 6, 7, 13, 16, 17, 48, 49, 65, 130)  # around tiles of 6 and 16 tokens, and 48 together
CHANNELS = (4, 63, 64, 127, 128, 129, 300, 640)  # around groups of 128
OUTPUTS = (64, 128, 320)
CASES = pairwise(QUANTS, CHANNELS, OUTPUTS, TOKENS, (False, True), (False, True))
BAD = (np.nan, np.inf, -np.inf)


@pytest.fixture
def level(any_level: str) -> str:
    return any_level


Stored = tuple[str, np.ndarray, np.ndarray]  # precision, bytes, scales


def packed(quant: str, rows: np.ndarray, bias: np.ndarray | None = None) -> tuple[_core.Matrix, Stored]:
    """Weights (oc, ic) as a matrix, and what it holds."""
    data, scales = linear.empty(quant, rows.shape[1], len(rows))
    linear.pack(quant, rows, 0, data, scales)
    return _core.Matrix(quant, rows.shape[1], len(rows), data, scales, bias), (quant, data, scales)


def product(w: _core.Matrix, x: np.ndarray, oc: int, exact: bool = False) -> np.ndarray:
    y = np.full((len(x), oc), np.nan, np.float32)
    w.apply(x, y, False, exact)
    return y


def check(level: str, stored: Stored, x: np.ndarray, got: np.ndarray, exact: np.ndarray, *added) -> None:
    """The bits of `exact`; or what bytes give, but for roundings: of a factor, of each group's sum, of the last one.

    added: the bias, what y held before.
    """
    if level not in rounded.LEVELS:
        assert np.array_equal(got, exact)
        return
    want, size = rounded.byte_product(*stored, x)
    for a in added:
        want, size = want + a, size + np.abs(a)
    roundings = -(-len(stored[1]) // rounded.BYTE_GROUP) + 2
    error = np.abs(got - want)
    assert (error <= roundings * 2.0**-24 * size + 1e-42).all(), f"off by {error.max()}"


@pytest.mark.parametrize(("quant", "ic", "oc", "tokens", "bias", "add"), CASES)
def test_equals_the_reference(level, quant, ic, oc, tokens, bias, add):
    got, exact = (run(quant, (ic, oc), tokens, bias, add, exact) for exact in (False, True))
    x, y, b = inputs(tokens, ic, oc)
    check(level, (quant, *storage(quant, ic, oc)[:2]), x, got, exact, y * add, b * bias)


@pytest.mark.parametrize("ic", [4, 128, 640])
@pytest.mark.parametrize("quant", QUANTS)
def test_near_the_exact_product_and_not_the_same(level, quant, ic):
    got, exact = (run(quant, (ic, 320), 130, exact=exact) for exact in (False, True))
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    low, high = (1e-4, 1.5e-2) if level in rounded.LEVELS else (0, 0)
    assert low <= error <= high


@pytest.mark.parametrize(("quant", "tokens"), [("f32", 7), ("bf16", 7), ("int8", 1), ("int4", 1)])
def test_what_is_never_rounded(level, quant, tokens):
    got, exact = (run(quant, (300, 128), tokens, bias=True, add=True, exact=exact) for exact in (False, True))
    assert np.array_equal(got, exact)


@pytest.mark.parametrize("quant", QUANTS)
def test_same_bits_again_and_at_any_number_of_threads(level, threads, quant):
    for shape, tokens in (((300, 320), 130), ((129, 64), 7)):
        got = run(quant, shape, tokens, bias=True, add=True, exact=False)
        assert np.array_equal(got, run(quant, shape, tokens, bias=True, add=True, exact=False))
        _core.set_threads(1)
        alone = run(quant, shape, tokens, bias=True, add=True, exact=False)
        _core.set_threads(threads)
        assert np.array_equal(got, alone)


@pytest.mark.parametrize("quant", QUANTS)
def test_a_token_does_not_depend_on_the_others(level, quant):
    data, scales, _ = storage(quant, 300, 128)
    w = _core.Matrix(quant, 300, 128, data, scales, None)
    x = inputs(130, 300, 128)[0]
    whole = product(w, x, 128)
    for first in range(0, 130, 13):  # more than a few, which go another way where bytes do not pay
        assert np.array_equal(whole[first : first + 13], product(w, x[first : first + 13], 128))


@pytest.mark.skipif("amx" not in _core.levels(), reason="this CPU has no AMX")
@pytest.mark.parametrize(("quant", "ic", "oc", "tokens", "bias", "add"), CASES)
def test_amx_gives_the_bits_of_vnni(any_level, quant, ic, oc, tokens, bias, add):
    found = []
    for name in ("amx", "avx512"):
        _core.force_level(name)
        found.append(run(quant, (ic, oc), tokens, bias, add, exact=False))
    assert np.array_equal(*found)


# ---------------------------------------------------------------- numbers at the edge


@pytest.mark.parametrize("at", [(0, 0), (5, 127), (6, 128), (12, 299)], ids=str)  # token, channel
@pytest.mark.parametrize("quant", QUANTS)
def test_what_is_not_finite_takes_its_token_and_no_other(level, quant, at):
    data, scales, _ = storage(quant, 300, 100)  # the last 28 outputs have no weight but zero
    w = _core.Matrix(quant, 300, 128, data, scales, None)
    x = inputs(13, 300, 128)[0].copy()
    clean = product(w, x, 128)
    for value in BAD:
        x[at] = value
        got = product(w, x, 128)
        assert not np.isfinite(got[at[0]]).any()
        assert np.array_equal(np.delete(got, at[0], 0), np.delete(clean, at[0], 0))


@pytest.mark.parametrize("quant", QUANTS)
def test_tokens_of_every_size(level, quant):
    """Zero, subnormal, too small for a unit, just large enough, huge; and beside a group of ordinary ones."""
    data, scales, dense = storage(quant, 300, 128)
    bias = inputs(2, 300, 128)[2]
    x = np.clip(inputs(13, 300, 128)[0], -3, 3)
    x[:12] *= np.repeat(np.array([0, 1e-45, 1e-38, 1e-31, 1e-29, 1e30], np.float32), 2)[:, None]
    x[1:12:2, 128:256] = x[12, 128:256]
    for start in (None, bias):
        w = _core.Matrix(quant, 300, 128, data, scales, start)
        got, exact = (product(w, x, 128, exact) for exact in (False, True))
        check(level, (quant, data, scales), x, got, exact, *(() if start is None else (start,)))
        assert (np.abs(got - exact.astype(np.float64)) <= rounded.byte_error(dense, x) + 1e-6 * np.abs(exact)).all()
    assert np.array_equal(got[0], bias)


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e-20, 1e20])
@pytest.mark.parametrize("quant", QUANTS)
def test_weights_of_every_size(level, quant, size):
    x = inputs(7, 300, 64)[0]
    rows = np.random.default_rng(0).standard_normal((64, 300)).astype(np.float32)
    rows[:, :128] *= np.float32(size)  # one group of channels
    w, stored = packed(quant, rows)
    dense = linear.unpack(*stored)
    got, exact = (product(w, x, 64, exact) for exact in (False, True))
    check(level, stored, x, got, exact)
    assert (np.abs(got - exact.astype(np.float64)) <= rounded.byte_error(dense, x) + 1e-6 * np.abs(exact)).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_weights_of_zero(level, quant):
    x, _, bias = inputs(13, 300, 64)
    rows = np.random.default_rng(0).standard_normal((64, 300)).astype(np.float32)
    rows[:, 128:256] = 0  # a group of channels
    rows[5] = 0  # an output
    w, stored = packed(quant, rows, bias)
    got, exact = (product(w, x, 64, exact) for exact in (False, True))
    check(level, stored, x, got, exact, bias)
    assert (got[:, 5] == bias[5]).all()
    w, _ = packed(quant, np.zeros_like(rows), bias)
    assert (product(w, x, 64) == bias).all()


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("quant", QUANTS)
def test_a_scale_that_is_not_finite_takes_its_outputs(level, quant, value):
    data, scales, _ = storage(quant, 300, 128)
    scales = scales.copy()
    scales[130, 0] = np.array(value, np.float32).view(np.uint32) >> 16
    got = product(_core.Matrix(quant, 300, 128, data, scales, None), inputs(13, 300, 128)[0], 128)
    assert not np.isfinite(got[:, : linear.GROUP[quant]]).any()
    assert np.isfinite(got[:, 64:]).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_scales_far_apart(level, quant):
    """One channel a thousand times the others: their weights are rounded to its words, no more."""
    rows = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    rows[:, 5] *= 1000
    w, stored = packed(quant, rows)
    x = inputs(7, 128, 64)[0].copy()
    x[:, 5] = 0
    got, exact = (product(w, x, 64, exact) for exact in (False, True))
    check(level, stored, x, got, exact)
    assert (np.abs(got - exact.astype(np.float64)) <= rounded.byte_error(linear.unpack(*stored), x) + 1e-6).all()
