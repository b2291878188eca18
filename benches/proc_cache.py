"""Matvecs out of the cache, one thread: what the arithmetic of rebuilt weights takes beside int8's and int4's.

Nanoseconds for 64 weights, the least of many runs and their median. Leaves out the memory.
    python benches/proc_cache.py
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from ralo import _core
from ralo.accept.proc_kernel import random_matrix
from ralo.matrix import Matrix

IC, OC, RUNS = 256, 3456, 600


def dense(quant: str) -> Matrix:
    m = Matrix.empty(quant, IC, {"w": OC}, False)
    m.data[:] = np.random.default_rng(0).integers(0, 256, m.data.shape, np.uint8)
    m.scales[:] = 0x3C00  # bf16 1/128
    return m


def main() -> None:
    _core.set_threads(1)
    x, y = np.full((1, IC), 0.25, np.float32), np.empty((1, OC), np.float32)
    rows = {f"{n} weights a seed": random_matrix(IC, OC, n) for n in (2, 3)} | {q: dense(q) for q in ("int8", "int4")}
    for name, matrix in rows.items():
        times = []
        for _ in range(RUNS):
            clock = time.perf_counter()
            matrix.core.apply(x, y)
            times.append(1e9 * (time.perf_counter() - clock) / (IC * OC / _core.PAD))
        print(f"{name}: {min(times):.2f} (median {statistics.median(times):.2f})")


if __name__ == "__main__":
    main()
