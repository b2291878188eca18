"""Weights from seeds: what columns, tables, scales and deltas give, bit for bit, and the best seeds of a tiny chain."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I8 = NDArray[np.int8]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

PAD = 64  # outputs of a block, seeds of a column
TURN = 16  # seeds by which the last column is turned where it stands left of the first
SEEDS, ALIKE = 256, 64  # of the seed before, the two highest bits do not count
OUTSIDE = 3.5  # of a column's spread: weights beyond do not count for it
WORD = (1 << 64) - 1


# ---------------------------------------------------------------- rebuilding


def columns(count: int, oc: int) -> list[range]:
    """The blocks of every column of a row: as many each as can be, the first ones have one more."""
    n, more = divmod(oc // PAD, count)
    starts = [k * n + min(k, more) for k in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def before(seeds: U8) -> U8:
    """(columns, PAD): the seed before each. It is that of the column to the left; left of the first is the last."""
    left = np.roll(seeds, 1, axis=0)
    left[0] = np.roll(left[0], -TURN)
    return left


def whole(seeds: U8, tables: I8, oc: int) -> I64:
    """One row's weights (oc) as whole numbers; a sum that does not fit a byte wraps around."""
    seeds = seeds.reshape(-1, PAD)
    left, out = before(seeds), np.empty((oc // PAD, PAD), np.int64)
    for k, blocks in enumerate(columns(len(seeds), oc)):
        for j, block in enumerate(blocks):
            low, high, left_low, left_high = tables[len(blocks) - 1, j].astype(np.int64)
            out[block] = low[seeds[k] & 15] + high[seeds[k] >> 4] + left_low[left[k] & 15] + left_high[left[k] >> 4]
    return (out.reshape(-1) + 128) % 256 - 128


def bf16_value(words: U16) -> F32:
    return (np.asarray(words, np.uint16).astype(np.uint32) << 16).view(np.float32)


def unpack(data: U8, scales: U16, tables: I8, oc: int, starts: U32, at: U16, deltas: U16) -> F32:
    """The weights (ic, oc): whole numbers times their column's scale, then the deltas."""
    out = np.empty((len(data), oc), np.float32)
    for i, seeds in enumerate(data):
        sizes = [PAD * len(blocks) for blocks in columns(scales.shape[1], oc)]
        out[i] = whole(seeds, tables, oc).astype(np.float32) * np.repeat(bf16_value(scales[i]), sizes)
        own = slice(starts[i], starts[i + 1])
        out[i, at[own]] += bf16_value(deltas[own])
    return out


# ---------------------------------------------------------------- the number that stands for them


def digest(data: U8, scales: U16, tables: I8, oc: int, starts: U32, at: U16, deltas: U16) -> int:
    """Channel by channel: scale and weights of every column, eight bytes at a time, then the deltas; their sum."""
    return (
        sum(_channel(i, data[i], scales[i], tables, oc, *_own(i, starts, at, deltas)) for i in range(len(data))) & WORD
    )


def _own(i: int, starts: U32, at: U16, deltas: U16) -> tuple[list[int], list[int]]:
    own = slice(starts[i], starts[i + 1])
    return at[own].tolist(), deltas[own].tolist()


def _channel(i: int, seeds: U8, scales: U16, tables: I8, oc: int, at: list[int], deltas: list[int]) -> int:
    words = (whole(seeds, tables, oc) + 128).astype(np.uint8).reshape(-1, PAD).view(np.uint64)  # (blocks, 8)
    parts: list[int] = []
    for scale, blocks in zip(scales.tolist(), columns(len(scales), oc), strict=True):
        parts += [scale, *words[list(blocks)].reshape(-1).tolist()]
    parts += [a << 16 | d for a, d in zip(at, deltas, strict=True)]
    h = mixed(i + 1)
    for part in parts:
        h = (h ^ part) * 0x9E3779B97F4A7C15 & WORD
        h ^= h >> 29
    return mixed(h)


def mixed(z: int) -> int:
    """splitmix64's last steps."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


# ---------------------------------------------------------------- the best seeds


def spread(w: F32) -> float:
    """Root mean square without the few weights that stick out."""
    first = float(np.sqrt(np.mean(np.square(w, dtype=np.float64))))
    inside = np.square(w[np.abs(w) <= OUTSIDE * first], dtype=np.float64)
    return float(np.sqrt(inside.mean())) if len(inside) else 0.0


def chains(row: F64, count: int) -> F64:
    """Weights (oc) in the order of their chains (TURN, steps, blocks), where all columns have as many blocks."""
    n, rounds = len(row) // PAD // count, PAD // TURN
    lanes = row.reshape(count, n, PAD)
    out = np.empty((TURN, rounds * count, n))
    for r in range(TURN):
        for step in range(rounds * count):
            out[r, step] = lanes[step % count, :, (r - step // count * TURN) % PAD]
    return out


def least_error(x: F64, tables: I8) -> float:
    """Of one closed chain (steps, blocks): the least squared error that any seeds give. Every way is tried."""
    t = tables[x.shape[1] - 1, : x.shape[1]].astype(np.float64)
    seed = np.arange(SEEDS)
    now, left = t[:, 0, seed & 15] + t[:, 1, seed >> 4], t[:, 2, seed & 15] + t[:, 3, seed >> 4]  # (blocks, SEEDS)
    cost = np.full((SEEDS, SEEDS), np.inf)  # from the chain's last seed to the seed reached so far
    np.fill_diagonal(cost, 0)
    for target in x:
        alike = cost.reshape(SEEDS, -1, ALIKE).min(1)  # (last, seeds before that differ)
        step = np.square(target[:, None, None] - left[:, :ALIKE, None] - now[:, None, :]).sum(0)  # (before, seed)
        cost = np.stack([(row[:, None] + step).min(0) for row in alike])
    return float(np.diag(cost).min())
