"""Values as bits: the bitmaps of the reference, bit for bit, at every level."""

from __future__ import annotations

import numpy as np
import pytest
from reference import bits

from ralo import _core

SIZES = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 1000]  # words and lanes +- 1
BOUNDS = [0.0, 1e-4, 0.7]


def values(n: int) -> np.ndarray:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    x[::5] = 0
    x[1::7] *= 1e-4
    x[2::11] = np.nan
    x[3::13] = np.float32(0.7)  # the bound itself is not above it
    x[4::17] = -np.inf
    return x


def pack(x: np.ndarray, eps: float, ternary: bool) -> tuple[list[np.ndarray], int, float]:
    words = [np.full(-(-len(x) // 64), 0xDEADBEEF, np.uint64) for _ in range(1 + ternary)]
    return words, *_core.pack_bits(x, eps, words[0], words[1] if ternary else None)


@pytest.mark.parametrize("eps", BOUNDS)
@pytest.mark.parametrize("n", SIZES)
def test_equals_the_reference(any_level, n, eps):
    x = values(n)
    (got,), count, size = pack(x, eps, ternary=False)
    want, count_, size_ = bits.binary(x, eps)
    assert np.array_equal(got, want) and count == count_
    np.testing.assert_allclose(size, size_, rtol=1e-5)
    (pos, neg), count, size = pack(x, eps, ternary=True)
    pos_, neg_, count_, size_ = bits.ternary(x, eps)
    assert np.array_equal(pos, pos_) and np.array_equal(neg, neg_) and count == count_
    np.testing.assert_allclose(size, size_, rtol=1e-5)


def test_wrong_shapes_are_refused():
    x, word = np.zeros(65, np.float32), np.zeros(1, np.uint64)
    for neg in (None, np.zeros(2, np.uint64)):
        with pytest.raises(ValueError, match="bits must be"):
            _core.pack_bits(x, 0.0, word, neg)
    with pytest.raises(ValueError, match="negative"):
        _core.pack_bits(x[:1], -1.0, word, None)
