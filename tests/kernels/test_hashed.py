"""Weights from a hash and deltas: rebuilt bit for bit as the reference says, and y = x W + bias with them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from kernels.test_linear import inputs
from reference import hashed, linear

from ralo import _core

FEW = _core.FEW_TOKENS
TOKENS = (1, 2, 3, FEW, FEW + 1, 13, 257)
CASES = [  # (ic, oc, block, fanout): one, lanes +- 1, more blocks than there are, a cut by channels, two panels
    (1, 64, 8, 1),
    (1, 64, 32, 2),
    (3, 64, 16, 4),
    (7, 128, 8, 3),
    (8, 128, 16, 20),
    (9, 192, 32, 5),
    (15, 64, 8, 8),
    (17, 256, 16, 7),
    (33, 320, 32, 12),
    (1030, 192, 16, 12),
    (20, 16448, 32, 6),
]
SHAPES = pytest.mark.parametrize("case", CASES, ids=str)
CUT = CASES[-2]


@cache
def storage(ic: int, oc: int, block: int, fanout: int, base_scale: float = 0.05) -> hashed.Stored:
    """Channels with no block, some and all they may have; blocks with no delta, some and all."""
    rng = np.random.default_rng([ic, oc, block, fanout])
    count = oc // block
    blocks, bits = np.full((ic, fanout), hashed.NO_BLOCK, np.uint16), np.zeros((ic, fanout), np.uint32)
    for i in range(ic):
        n = rng.choice([0, 1, min(fanout, count), rng.integers(0, min(fanout, count) + 1)], p=[0.1, 0.1, 0.5, 0.3])
        blocks[i, :n] = np.sort(rng.choice(count, n, replace=False))
        share = rng.choice([0, 0.2, 0.95, 1], size=(n, 1))
        bits[i, :n] = ((rng.random((n, block)) < share) << np.arange(block)).sum(1)
    counts = [sum(word.bit_count() for word in row) for row in bits.tolist()]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    values = linear.bf16_nearest(rng.standard_normal(starts[-1]).astype(np.float32))
    return hashed.Stored(block, base_scale, blocks, bits, starts, values)


@cache
def weights(*case: int) -> np.ndarray:
    return hashed.weights(storage(*case), case[1])


def matrix(s: hashed.Stored, oc: int, bias: np.ndarray | None = None) -> _core.HashedMatrix:
    return _core.HashedMatrix(len(s.blocks), oc, s.block, s.base_scale, s.blocks, s.bits, s.starts, s.values, bias)


def apply(case: tuple[int, ...], x: np.ndarray, bias: np.ndarray | None = None, y: np.ndarray | None = None):
    """`y`: what is added to."""
    s = storage(*case)
    out = np.full((len(x), case[1]), np.nan, np.float32) if y is None else y.copy()
    read = matrix(s, case[1], bias).apply(x, out, y is not None)
    # All that is stored but the last start, which no channel begins at.
    assert read == s.blocks.nbytes + s.bits.nbytes + s.starts[:-1].nbytes + s.values.nbytes
    return out


def alone(case: tuple[int, ...], x: np.ndarray, bias: np.ndarray | None = None, y: np.ndarray | None = None):
    return np.concatenate([apply(case, x[[t]], bias, None if y is None else y[[t]]) for t in range(len(x))])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def near(dense: np.ndarray, x: np.ndarray, got: np.ndarray, start: np.ndarray | float = 0.0, size=0.0) -> bool:
    """Within what float32 sums may be off by; dense (ic, oc)."""
    bound = (len(dense) + 2) * 2.0**-24 * linear.magnitude(dense.T.astype(np.float64), x, size)
    return bool((np.abs(got - linear.apply(dense.T.astype(np.float64), x, start)) <= bound).all())


# ---------------------------------------------------------------- weights


@SHAPES
def test_unpacked_weights_are_the_reference_bit_for_bit(level, case):
    out = np.full((case[0], case[1]), np.nan, np.float32)
    matrix(storage(*case), case[1]).unpack(out)
    assert same(out, weights(*case))


@pytest.mark.parametrize("base_scale", [0.0, 1.0, 1e-42, 3e38])
def test_any_scale(level, base_scale):
    """At zero only deltas are left; a scale may be so small that weights are denormal."""
    case = (*CASES[8], base_scale)
    out = np.empty(case[:2], np.float32)
    matrix(storage(*case), case[1]).unpack(out)
    assert same(out, weights(*case))
    if base_scale == 0:
        deltas = np.sort(out[out != 0])
        assert np.array_equal(deltas, np.sort(linear.bf16_value(storage(*case).values)))


@pytest.mark.parametrize("case", CASES[:9], ids=str)
def test_digest_is_the_reference(level, threads, case):
    assert matrix(storage(*case), case[1]).digest() == hashed.digest(storage(*case), case[1])


def test_digest_tells_every_change():
    s, oc = storage(*CASES[8]), CASES[8][1]
    values = s.values.copy()
    values[-1] ^= 1
    changed = (replace(s, values=values), replace(s, base_scale=0.0501), replace(s, blocks=moved(s.blocks)))
    assert len({matrix(each, oc).digest() for each in (s, *changed)}) == 4


def moved(blocks: np.ndarray) -> np.ndarray:
    """One block elsewhere."""
    at = int(np.flatnonzero((blocks != hashed.NO_BLOCK).sum(1) == 1)[0])
    blocks = blocks.copy()
    blocks[at, 0] ^= 1
    return blocks


@SHAPES
def test_norms(level, case):
    out = np.full(case[0], np.nan, np.float32)
    matrix(storage(*case), case[1]).norms(out)
    want = np.sqrt(np.square(weights(*case).astype(np.float64)).sum(1))
    np.testing.assert_allclose(out, want, rtol=2.0**-23)


# ---------------------------------------------------------------- products


@SHAPES
def test_equals_the_reference(level, case):
    dense = weights(*case)
    for i, tokens in enumerate(TOKENS):
        x, y, b = inputs(tokens, case[0], case[1])
        bias, before = (b if i & 1 else None), (y if i & 2 else None)
        start = (b if i & 1 else 0) + (y.astype(np.float64) if i & 2 else 0)
        size = (np.abs(b) if i & 1 else 0) + (np.abs(y) if i & 2 else 0)
        assert near(dense, x, apply(case, x, bias, before), start, size), tokens


@SHAPES
def test_each_of_a_few_tokens_gets_its_own_bits(level, case):
    x, y, b = inputs(FEW, case[0], case[1])
    for bias, before in ((None, None), (b, None), (None, y), (b, y)):
        want = alone(case, x, bias, before)
        for tokens in (2, 3, 5, FEW):
            assert same(apply(case, x[:tokens], bias, None if before is None else before[:tokens]), want[:tokens])


@SHAPES
def test_same_bits_at_every_level(case):
    """Sums are not fused: this form does not even differ in rounding."""
    before, results = _core.level(), []
    x, _, b = inputs(13, case[0], case[1])
    for name in _core.levels():
        _core.force_level(name)
        results.append([apply(case, x[:tokens], b) for tokens in (1, 3, 13)])
    _core.force_level(before)
    assert all(same(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_same_bits_at_any_number_of_threads(level, threads):
    for case in (CUT, CASES[0], CASES[-1]):
        x, y, b = inputs(13, case[0], case[1])
        got = [apply(case, x[:n], b, y[:n]) for n in (1, 5, 13)]
        _core.set_threads(1)
        want = [apply(case, x[:n], b, y[:n]) for n in (1, 5, 13)]
        _core.set_threads(threads)
        assert all(same(g, w) for g, w in zip(got, want, strict=True))


def test_many_tokens_are_never_rounded(level):
    """There is no product with bytes for this form: not exact is exact."""
    x = inputs(13, CUT[0], CUT[1])[0]
    y = np.empty((13, CUT[1]), np.float32)
    for tokens in (2, 13):
        matrix(storage(*CUT), CUT[1]).apply(x[:tokens], y[:tokens], exact=False)
        assert same(y[:tokens], apply(CUT, x[:tokens]))


def test_a_row_does_not_depend_on_its_neighbours(level):
    x = inputs(257, CUT[0], CUT[1])[0]
    assert same(apply(CUT, x)[240:], apply(CUT, x[240:]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_the_blocks_of_its_channel(level, value):
    case = CASES[8]
    s = storage(*case)
    channel = int(np.flatnonzero((s.blocks != hashed.NO_BLOCK).sum(1) == 1)[0])
    first, _ = s.kept(channel)[0]
    hit = (np.arange(case[1]) >= first) & (np.arange(case[1]) < first + s.block)
    for tokens in (1, 7, 13):
        x = inputs(tokens, case[0], case[1])[0].copy()
        x[-1, channel] = value
        y = apply(case, x)
        assert not np.isfinite(y[-1, hit]).any() and np.isfinite(y[-1, ~hit]).all() and np.isfinite(y[:-1]).all()


def test_no_tokens(level):
    w = matrix(storage(*CASES[3]), CASES[3][1])
    assert w.apply(np.empty((0, 7), np.float32), np.empty((0, 128), np.float32)) == 0


def test_no_blocks_give_the_bias(level):
    bias = inputs(1, 5, 128)[2]
    none = np.full((5, 3), hashed.NO_BLOCK, np.uint16), np.zeros((5, 3), np.uint32), np.zeros(6, np.uint32)
    w = matrix(hashed.Stored(16, 0.05, *none, np.zeros(0, np.uint16)), 128, bias)
    for tokens in (1, 4, 13):
        y = np.full((tokens, 128), np.nan, np.float32)
        w.apply(inputs(tokens, 5, 128)[0], y)
        assert (y == bias).all()


# ---------------------------------------------------------------- some channels, some outputs


def some(ic: int, keep: float) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng(ic).random(ic) < keep).astype(np.uint32)


@SHAPES
def test_some_channels(level, case):
    """What is not in the list is not read, not even x."""
    s, dense = storage(*case), weights(*case)
    x, before, b = inputs(1, case[0], case[1])
    for keep, bias, add in ((0.02, None, False), (0.5, b, False), (0.97, b, True)):
        channels = some(case[0], keep)
        given = np.full_like(x[0], np.nan)
        given[channels] = x[0, channels]
        y = before[0].copy() if add else np.full_like(before[0], np.nan)
        read = matrix(s, case[1], bias).apply_some(given, channels, y, add)
        assert read == hashed.nbytes(s, channels.tolist())
        start = (0 if bias is None else bias) + (before[0].astype(np.float64) if add else 0)
        size = (0 if bias is None else np.abs(bias)) + (np.abs(before[0]) if add else 0)
        assert near(dense[channels], x[:, channels], y[None], start, size)


@SHAPES
def test_all_channels_are_dense_bit_for_bit(level, case):
    s, x, y = storage(*case), inputs(1, case[0], case[1])[0], np.full(case[1], np.nan, np.float32)
    read = matrix(s, case[1]).apply_some(x[0], np.arange(case[0], dtype=np.uint32), y)
    assert same(y, apply(case, x)[0]) and read == hashed.nbytes(s, list(range(case[0])))


@SHAPES
def test_a_part_of_the_outputs(level, case):
    s, (x, _, b) = storage(*case), inputs(1, case[0], case[1])
    whole, pads = apply(case, x, b)[0], case[1] // 64
    for o0, o1 in ((0, 0), (0, 64), (pads // 2 * 64, case[1]), (0, case[1])):
        y = np.full(case[1], 7, np.float32)
        read = matrix(s, case[1], b).apply_part(x[0], y, o0, o1)
        assert read == (hashed.nbytes(s, list(range(case[0])), o0, o1) if o1 > o0 else 0)
        assert same(y[o0:o1], whole[o0:o1]) and (y[:o0] == 7).all() and (y[o1:] == 7).all()


# ---------------------------------------------------------------- refusals


def made(ic=2, oc=64, block=16, base_scale=0.05, blocks=((0, 3), (1, 65535)), bits=((1, 6), (65535, 0)), **others):
    starts, values = others.get("starts", (0, 3, 19)), others.get("values", (0,) * 19)
    kind, bias = others.get("kind", np.uint16), others.get("bias")
    arrays = np.array(blocks, kind), np.array(bits, np.uint32), np.array(starts, np.uint32), np.array(values, np.uint16)
    return _core.HashedMatrix(ic, oc, block, base_scale, *arrays, None if bias is None else np.zeros(bias, np.float32))


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (ValueError, {"block": 0}),
        (ValueError, {"block": 24}),
        (ValueError, {"block": 64}),
        (ValueError, {"oc": 0}),
        (ValueError, {"oc": 65}),
        (ValueError, {"oc": 65536 * 16}),
        (ValueError, {"ic": 3}),
        (ValueError, {"ic": 0, "blocks": np.zeros((0, 2)), "bits": np.zeros((0, 2)), "starts": (0,), "values": ()}),
        (ValueError, {"base_scale": float("nan")}),
        (ValueError, {"base_scale": float("inf")}),
        (ValueError, {"base_scale": -0.05}),
        (ValueError, {"blocks": ((0, 3),)}),
        (ValueError, {"blocks": ((), ()), "bits": ((), ()), "starts": (0, 0, 0), "values": ()}),
        (ValueError, {"blocks": ((0, 4), (1, 65535))}),  # beyond the outputs
        (ValueError, {"blocks": ((3, 0), (1, 65535))}),
        (ValueError, {"blocks": ((3, 3), (1, 65535))}),
        (ValueError, {"blocks": ((0, 3), (65535, 1)), "bits": ((1, 6), (0, 65535))}),
        (ValueError, {"bits": ((1, 6),)}),
        (ValueError, {"bits": ((1, 6), (65535, 1)), "starts": (0, 3, 20), "values": (0,) * 20}),  # of no block
        (ValueError, {"bits": ((1, 6), (65535 << 1, 0))}),  # beyond the block
        (ValueError, {"bits": ((1, 7), (65535, 0))}),  # one more than values
        (ValueError, {"starts": (0, 3)}),
        (ValueError, {"starts": (0, 4, 19)}),
        (ValueError, {"starts": (1, 3, 19)}),
        (ValueError, {"starts": (0, 2**32 - 1, 19)}),
        (ValueError, {"starts": (0, 3, 18)}),
        (ValueError, {"values": (0,) * 18}),
        (ValueError, {"values": (0x7F80,) + (0,) * 18}),
        (ValueError, {"values": (0,) * 18 + (0xFFC0,)}),
        (ValueError, {"bias": 63}),
        (TypeError, {"bias": (1, 64)}),
        (TypeError, {"kind": np.int32}),
        (TypeError, {"ic": -2}),
        (TypeError, {"bits": (1, 6)}),
    ],
)
def test_wrong_matrices_are_refused(error, change):
    made()  # as it should be
    with pytest.raises(error):
        made(**change)


def test_wrong_outputs_are_refused():
    w = made()
    for shape in ((1, 64), (2, 128), (3, 64)):
        with pytest.raises(ValueError, match="out must be"):
            w.unpack(np.empty(shape, np.float32))
    with pytest.raises(TypeError):
        w.unpack(np.empty((2, 64), np.float64))
    with pytest.raises(ValueError, match="x must be"):
        w.apply(np.zeros((1, 3), np.float32), np.zeros((1, 64), np.float32))
