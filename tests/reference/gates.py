"""Gates guessed from two bits a weight: what the packed weights are, x as bit planes, and the counts they give."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from reference.bits import words

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

NEURONS, PLANES = 8, 4


def signs(weights: F64, share: float = 0.7) -> tuple[I64, F64]:
    """Weights (f, d) above `share` of a row's mean magnitude as -1 and 1, the rest 0; the mean of those (f)."""
    size = np.abs(weights)
    kept = size > share * size.mean(1, keepdims=True)
    return np.where(kept, np.sign(weights), 0).astype(np.int64), (size * kept).sum(1) / np.maximum(kept.sum(1), 1)


def pack(sign: I64) -> U64:
    """Signs (f, d) -> bits (f / 8, d / 64, 2, 8): of eight neurons the positive words, then the negative ones."""
    f, d = sign.shape
    out = np.zeros((-(-f // NEURONS), -(-d // 64), 2, NEURONS), np.uint64)
    for j in range(f):
        out[j // NEURONS, :, 0, j % NEURONS] = words(sign[j] > 0)
        out[j // NEURONS, :, 1, j % NEURONS] = words(sign[j] < 0)
    return out


def numbers(x: F32, step: float) -> I64:
    """x as numbers of four bits in two's complement."""
    inverse = np.float32(1) / np.float32(step) if step > 0 else np.float32(0)
    return np.clip(np.rint(x * inverse), -8, 7).astype(np.int64)


def planes(number: I64) -> U64:
    """Their bits (d / 64, 4), the lowest first."""
    return np.stack([words((number >> p & 1).astype(bool)) for p in range(PLANES)], axis=1)
