"""A few tokens through a linear map beside one: time(T) / time(1), medians of rounds in which they take turns.

Leaves out: attention and all else of a step. Each matrix exists in enough copies to be out of cache.
Run: python benches/few.py [--shape 640x3456] [--quant int8] [--rounds 15] [--level avx2]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from kernels import random_matrix

from ralo import _core
from ralo.cpu import default_threads
from ralo.matrix import QUANTS, Matrix

SHAPES = ("640x3456", "1728x640", "640x1280", "640x640", "640x8192")  # a model of 60M parameters
TOKENS = (1, 2, 3, 4, 6, 8)
OUT_OF_CACHE = 160 << 20  # bytes


def seconds(matrices: list[Matrix], x: np.ndarray, y: np.ndarray) -> float:
    clock = time.perf_counter()
    for matrix in matrices:
        matrix.core.apply(x, y)
    return (time.perf_counter() - clock) / len(matrices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", help="ICxOC, repeatable")
    parser.add_argument("--quant", action="append", choices=QUANTS, help="repeatable")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--level", default=_core.level())
    args = parser.parse_args()
    _core.force_level(args.level)
    _core.set_threads(default_threads())
    print(f"{'shape':>10} {'quant':>5} {'us':>8} " + " ".join(f"{f'x{t}':>5}" for t in TOKENS[1:]))
    for shape in args.shape or SHAPES:
        ic, oc = (int(n) for n in shape.split("x"))
        x = np.random.default_rng(0).standard_normal((max(TOKENS), ic)).astype(np.float32)
        y = np.empty((max(TOKENS), oc), np.float32)
        for quant in args.quant or QUANTS:
            first = random_matrix(quant, ic, oc)
            copies = [first] + [random_matrix(quant, ic, oc) for _ in range(OUT_OF_CACHE // first.nbytes)]
            rounds = [[seconds(copies, x[:t], y[:t]) for t in TOKENS] for _ in range(args.rounds)]
            ratios = [statistics.median(r[i] / r[0] for r in rounds) for i in range(1, len(TOKENS))]
            one = statistics.median(r[0] for r in rounds)
            print(f"{shape:>10} {quant:>5} {one * 1e6:8.1f} " + " ".join(f"{r:5.2f}" for r in ratios), flush=True)


if __name__ == "__main__":
    main()
