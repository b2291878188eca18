"""Weights from seeds in memory: deltas that are shed, what a matrix says of itself, and the generator's tables."""

from __future__ import annotations

import numpy as np
import pytest
from reference import linear, proc

from ralo import _core
from ralo.proc.generator import GENERATORS, MOST, SIGMA, bits_of, splitmix64, tables
from ralo.proc.matrix import Deltas, ProcMatrix
from ralo.remake.values import bf16_values, bf16_words


def deltas(*channels: dict[int, float]) -> Deltas:
    """Of each channel: output -> what is added."""
    starts = np.cumsum([0, *map(len, channels)]).astype(np.uint32)
    at = np.array([o for c in channels for o in sorted(c)], np.uint16)
    values = np.array([c[o] for c in channels for o in sorted(c)], np.float32)
    return Deltas(starts, at, bf16_words(values))


def listed(d: Deltas) -> list[dict[int, float]]:
    values = bf16_values(d.values).tolist()
    return [
        dict(zip(d.at[a:b].tolist(), values[a:b], strict=True))
        for a, b in zip(d.starts[:-1], d.starts[1:], strict=True)
    ]


SOME = deltas({3: 0.5, 9: -2.0, 100: 1.0}, {}, {0: -0.25, 63: 4.0}, {5: 1.0, 6: -1.0, 7: 1.0, 8: 0.125})


@pytest.mark.parametrize(
    ("eps", "watermark", "left"),
    [
        (0, 4, listed(SOME)),
        (0.125, 4, listed(SOME)),
        (0.126, 4, [{3: 0.5, 9: -2, 100: 1}, {}, {0: -0.25, 63: 4}, {5: 1, 6: -1, 7: 1}]),
        (1, 4, [{9: -2, 100: 1}, {}, {63: 4}, {5: 1, 6: -1, 7: 1}]),
        (0, 2, [{9: -2, 100: 1}, {}, {0: -0.25, 63: 4}, {5: 1, 6: -1}]),  # of equals the first
        (0, 1, [{9: -2}, {}, {63: 4}, {5: 1}]),
        (1.5, 1, [{9: -2}, {}, {63: 4}, {}]),
        (0, 0, [{}, {}, {}, {}]),
        (100, 4, [{}, {}, {}, {}]),
    ],
)
def test_shed(eps, watermark, left):
    before = listed(SOME)
    found, trimmed = SOME.shed(eps, watermark)
    assert listed(found) == left and listed(SOME) == before
    assert trimmed == len(SOME.at) - len(found.at) == sum(map(len, before)) - sum(map(len, left))
    assert (found.starts.dtype, found.at.dtype, found.values.dtype) == (np.uint32, np.uint16, np.uint16)


def test_shed_of_many_is_that_of_a_plain_loop():
    rng = np.random.default_rng(1)
    many = deltas(*({int(o): float(v) for o, v in zip(rng.choice(640, n, False), rng.standard_normal(n), strict=True)}
                    for n in rng.integers(0, 60, 50)))  # fmt: skip
    for eps, watermark in ((0.3, 20), (0, 7), (1.2, 1000)):
        want = []
        for channel in listed(many):
            strong = sorted((o for o, v in channel.items() if abs(v) >= eps), key=lambda o: (-abs(channel[o]), o))
            want.append({o: channel[o] for o in sorted(strong[:watermark])})
        found, _ = many.shed(eps, watermark)
        assert listed(found) == want


def test_shed_of_none():
    found, trimmed = Deltas.none(5).shed(0.1, 3)
    assert trimmed == 0 and found.starts.tolist() == [0] * 6 and len(found.at) == len(found.values) == 0


# ---------------------------------------------------------------- a matrix


def matrix(d: Deltas, bias: bool = False, parts: dict[str, int] | None = None) -> ProcMatrix:
    """4 channels; gate of 100 and up of 64 outputs are three blocks, in two columns."""
    rng = np.random.default_rng(2)
    parts = parts or {"gate": 100, "up": 64}
    data, scales = rng.integers(0, 256, (4, 128), dtype=np.uint8), linear.bf16_nearest(rng.uniform(0.01, 0.1, (4, 2)))
    return ProcMatrix(4, parts, data, scales, np.ones(192, np.float32) if bias else None, tables("fitted"), d)


def test_sizes():
    for m in (matrix(SOME), matrix(SOME, bias=True), matrix(Deltas.none(4))):
        arrays = m.arrays()
        assert set(arrays) - {"bias"} == {"data", "scales", "tables", "starts", "at", "deltas"}
        assert m.nbytes == sum(a.nbytes for a in arrays.values())
        assert m.bits == 8 * m.nbytes / (4 * 164)  # padding is paid for by those that are there
        assert m.fanout == len(m.deltas.at) / 4 and m.base_scale == 0
        assert (m.oc, m.slices["up"], m.quant) == (192, slice(128, 192), "proc")
    assert matrix(SOME).fanout == 9 / 4


def test_unpack_and_call():
    m = matrix(SOME, bias=True)
    want = proc.unpack(m.data, m.scales, m.tables, 192, SOME.starts, SOME.at, SOME.values)
    assert np.array_equal(m.unpack(), want)
    x = np.random.default_rng(3).standard_normal((13, 4)).astype(np.float32)
    np.testing.assert_allclose(m(x), x @ want + 1, rtol=1e-4, atol=1e-4)
    assert m.bytes_read == m.data.nbytes + m.scales.nbytes + 4 * 4 + 4 * len(SOME.at)


def test_shed_makes_another_and_leaves_the_first():
    m = matrix(SOME, bias=True)
    assert m.shed(0, 4) == (m, 0)
    fewer, trimmed = m.shed(0, 1)
    assert trimmed == 6 and fewer.fanout == 3 / 4 and m.fanout == 9 / 4
    assert fewer.nbytes == m.nbytes - 6 * 4 and fewer.data is m.data and fewer.bias is m.bias
    assert fewer.digest() != m.digest() == f"{m.core.digest():016x}"
    none, _ = m.shed(0, 0)
    assert none.digest() == matrix(Deltas.none(4)).digest()


def test_bf16_to_nearest_ties_to_even():
    x = np.concatenate([np.random.default_rng(4).standard_normal(1000) * 1e3, [0, -0.0, 1.00390625, 1.01171875, 1e-40]])
    x = x.astype(np.float32)
    assert np.array_equal(bf16_words(x), linear.bf16_nearest(x))
    assert np.array_equal(bf16_values(bf16_words(x)), linear.bf16_value(linear.bf16_nearest(x)))


# ---------------------------------------------------------------- the generator


@pytest.mark.parametrize("kind", GENERATORS)
def test_tables(kind):
    t = tables(kind)
    assert (t.shape, t.dtype) == ((MOST, MOST, 4, 16), np.int8)
    assert np.array_equal(t[:, :, 3], np.tile(t[:, :, 3, :4], 4)), "two bits of the seed before do not count"
    wide = t.astype(int)
    assert wide.max(3).sum(2).max() <= 127 and wide.min(3).sum(2).min() >= -128, "every sum fits a byte"
    assert tables(kind) is t


def test_tables_are_those_that_packs_were_made_with():
    """Another hash is another generator: packs carry their own tables, but what is made anew would differ."""
    assert splitmix64(np.arange(2, dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    assert proc.mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("kind", GENERATORS)
def test_random_seeds_spread_about_as_weights_do(kind):
    seeds = np.random.default_rng(5).integers(0, 256, (64, 64 * 4), dtype=np.uint8)
    for n in range(2, MOST + 1):
        q = np.concatenate([proc.whole(row, tables(kind), 4 * n * 64) for row in seeds])
        assert abs(q.mean()) < 0.3 * SIGMA and 0.7 * SIGMA < q.std() < 1.3 * SIGMA


def test_bits_of_a_weight():
    assert bits_of(1, 64) == 8.25 and bits_of(1, 256) == 8.25 / 4 and bits_of(3, 640) == 3 * (512 + 16) / 640
    m = matrix(Deltas.none(4), parts={"down": 192})
    assert 8 * (m.data.nbytes + m.scales.nbytes) / (4 * 192) == bits_of(2, 192)
    assert _core.SEED_BLOCKS == MOST == 4 and _core.SEED_TURN == proc.TURN
