"""The generator that turns seeds into weights: its tables, and how a row's outputs are shared out among seeds."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ralo import _core

I8 = NDArray[np.int8]
U64 = NDArray[np.uint64]

SIGMA = 28.0  # spread of weights in units of the tables: 4.5 of it fit a byte
SCALE_BITS = 16  # of a column
MOST = _core.SEED_BLOCKS  # blocks of 64 weights that a column of seeds gives
FITTED = Path(__file__).with_name("tables.npy")  # written by benches/fit_tables.py
GENERATORS = ("fitted", "hash")


@cache
def tables(kind: str) -> I8:
    """(n - 1, j, table, half byte) -> what it adds to weight j of n: low and high half of the seed, of the one before.

    fitted: to seeds found for normally distributed weights, in turns. hash: as splitmix64 gives them.
    """
    if kind == "fitted":
        found: I8 = np.load(FITTED, allow_pickle=False)
        return found
    count = MOST * MOST * 4 * 16
    uniform = (splitmix64(np.arange(2 * count, dtype=np.uint64)) >> np.uint64(11)).astype(np.float64) / 2.0**53
    normal = np.sqrt(-2 * np.log(uniform[:count] + 2.0**-54)) * np.cos(2 * np.pi * uniform[count:])
    each = normal.reshape(MOST, MOST, 4, 16) * SIGMA / 2  # four of them add up to SIGMA
    each[:, :, 3] = np.tile(each[:, :, 3, :4], 4)  # two bits of the seed before do not count
    hashed: I8 = np.clip(np.rint(each), -31, 31).astype(np.int8)
    return hashed


def splitmix64(x: U64) -> U64:
    """The document's hash."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def bits_of(columns: int, oc: int) -> float:
    """A weight, of a row of `oc` outputs, scales included."""
    return columns * (8 * _core.PAD + SCALE_BITS) / oc
