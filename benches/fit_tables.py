"""Fits the generator's tables: seeds are searched for normal weights, then tables fitted to those seeds, in turns.

Writes src/ralo/proc/tables.npy and says how much of the weights' energy is lost, beside the least that any code loses.
    python benches/fit_tables.py
"""

from __future__ import annotations

import numpy as np

from ralo import _core, cpu
from ralo.proc.generator import FITTED, MOST, SIGMA, tables

COLUMNS, TURNS, STARTS = 48, 60, 5
ROWS = {1: 24, 2: 24, 3: 20, 4: 16}


def searched(search: _core.SeedSearch, n: int, rows: int, rng: np.random.Generator):
    """Random weights (rows, columns, n, 64) in units of the tables, their seeds, and the share of energy lost."""
    oc = COLUMNS * n * _core.PAD
    w = rng.standard_normal((rows, oc)).astype(np.float32)
    seeds, scales, out = np.empty((rows, COLUMNS * _core.PAD), np.uint8), np.empty(COLUMNS, np.uint16), np.empty_like(w)
    for i in range(rows):
        search.row(w[i], seeds[i], scales, out[i])
    lost = float(np.square(w - out).mean())
    w = w.reshape(rows, COLUMNS, n, _core.PAD)
    return SIGMA * w / np.sqrt(np.square(w).mean((2, 3), keepdims=True)), seeds.reshape(rows, COLUMNS, _core.PAD), lost


def refitted(w, seeds, n: int):
    """Tables (n, 4, 16) by least squares, from all columns but the first."""
    now, before = seeds[:, 1:].reshape(-1), seeds[:, :-1].reshape(-1)
    places = [now & 15, 16 + (now >> 4), 32 + (before & 15), 48 + (before >> 4 & 3)]
    square, product = np.zeros((64, 64)), np.zeros((64, n))
    y = w[:, 1:].transpose(0, 1, 3, 2).reshape(-1, n)
    for a in places:
        for j in range(n):
            product[:, j] += np.bincount(a, y[:, j], 64)
        for b in places:
            square += np.bincount(64 * a.astype(np.int64) + b, minlength=64 * 64).reshape(64, 64)
    found = np.linalg.solve(square + 1e-3 * np.trace(square) / 64 * np.eye(64), product).T.reshape(n, 4, 16)
    found[:, 3] = np.tile(found[:, 3, :4], 4)
    return found


def in_bytes(four):
    """Four tables (4, 16) whose sums fit a byte: the widest are cut."""
    widest = np.abs(four).max(axis=1)
    while widest.sum() > 127:
        widest[widest.argmax()] -= 1
    return np.clip(four, -widest[:, None], widest[:, None])


def whole_bytes():
    """One weight a seed needs no search: the seed is the weight."""
    found = np.zeros((MOST, 4, 16), np.int8)
    found[0, 0], found[0, 1] = np.arange(16), 16 * (np.arange(16) - 8)
    return found


def fit(n: int, start: int):
    rng = np.random.default_rng(start)
    found = np.zeros((MOST, MOST, 4, 16), np.int8)
    first = np.rint(rng.standard_normal((n, 4, 16)) * SIGMA / 2)
    first[:, 3] = np.tile(first[:, 3, :4], 4)
    found[n - 1, :n] = [in_bytes(four) for four in first]
    for turn in range(TURNS):
        w, seeds, _ = searched(_core.SeedSearch(found, SIGMA), n, ROWS[n] // 2 if turn < TURNS // 2 else ROWS[n], rng)
        exact = refitted(w, seeds, n)
        # Rounded at random until near the end: small moves would be rounded away.
        rounded = np.floor(exact + rng.random(exact.shape)) if turn < TURNS - 6 else np.rint(exact)
        rounded[:, 3] = np.tile(rounded[:, 3, :4], 4)
        found[n - 1, :n] = [in_bytes(four) for four in rounded]
    _, _, lost = searched(_core.SeedSearch(found, SIGMA), n, 24, np.random.default_rng(99))
    return lost, found[n - 1]


def main() -> None:
    cpu.setup(0)
    best = np.zeros((MOST, MOST, 4, 16), np.int8)
    best[0] = whole_bytes()
    for n in range(2, MOST + 1):
        found = [fit(n, start) for start in range(STARTS)]
        lost, best[n - 1] = min(found, key=lambda f: f[0])
        _, _, hashed = searched(_core.SeedSearch(tables("hash"), SIGMA), n, 24, np.random.default_rng(99))
        print(f"{n} weights a seed, {8 / n:.2f} bits: fitted {lost:.5f}, hash {hashed:.5f}, bound {2 ** (-16 / n):.5f}")
    np.save(FITTED, best)


if __name__ == "__main__":
    main()
