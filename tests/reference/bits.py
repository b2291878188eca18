"""Values as bits, 64 to a word."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]


def words(flags: NDArray[np.bool_]) -> U64:
    """Flag i is bit i % 64 of word i / 64; what is missing of the last word is zero."""
    padded = np.zeros(-(-len(flags) // 64) * 64, bool)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view(np.uint64)


def binary(x: F32, eps: float) -> tuple[U64, int, float]:
    """Where |x| > eps, how many that are, and the sum of their magnitudes; a NaN is not above."""
    above = np.abs(x) > np.float32(eps)
    return words(above), int(above.sum()), float(np.abs(x[above]).astype(np.float64).sum())


def ternary(x: F32, eps: float) -> tuple[U64, U64, int, float]:
    """The same by sign: where x > eps, and where x < -eps."""
    _, count, size = binary(x, eps)
    return words(x > np.float32(eps)), words(x < -np.float32(eps)), count, size
