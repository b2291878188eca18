"""Kernel speeds by shape, precision, ISA level and threads: bytes of weights per second beside the plain read speed.
And the time with a random half of the channels, as a share of the time with all of them.

Leaves out: mask building, Python between kernels, attention. Each matrix exists in enough copies to be out of cache.
Run: python benches/kernels.py [--shape 2048x8192] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from ralo import _core
from ralo.bench import STREAM_WORDS, stream_gb_s
from ralo.cpu import default_threads
from ralo.matrix import QUANTS, Matrix

SHAPES = ("2048x8192", "8192x2048", "2048x2048", "640x3456", "1728x640")
OUT_OF_CACHE = 256 << 20  # bytes


def random_matrix(quant: str, ic: int, oc: int) -> Matrix:
    matrix = Matrix.empty(quant, ic, {"w": oc}, bias=False)
    rng = np.random.default_rng(0)
    matrix.data[:] = rng.integers(0, 256, matrix.data.shape, dtype=np.uint8) & (0x7F if quant == "int8" else 0x3F)
    if matrix.scales is not None:
        matrix.scales[:] = 0x3C00  # 2^-7
    return matrix


def seconds(matrices: list[Matrix], x: np.ndarray) -> float:
    clock = time.perf_counter()
    for matrix in matrices:
        matrix(x)
    return (time.perf_counter() - clock) / len(matrices)


def seconds_some(matrices: list[Matrix], x: np.ndarray, channels: np.ndarray) -> float:
    y = np.empty(matrices[0].oc, np.float32)
    clock = time.perf_counter()
    for matrix in matrices:
        matrix.core.apply_some(x[0], channels, y)
    return (time.perf_counter() - clock) / len(matrices)


def seconds_prefill(matrix: Matrix, x: np.ndarray) -> float:
    y = np.empty((len(x), matrix.oc), np.float32)
    clock = time.perf_counter()
    matrix.core.apply(x, y, False, False)  # not exact, as a prompt is run
    return time.perf_counter() - clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", help="ICxOC, repeatable")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    buffer = np.ones(STREAM_WORDS, np.uint64)
    names = ("shape", "quant", "level", "threads", "us", "GB/s", "share", "half", "prefill GMAC/s")
    print("{:>10} {:>5} {:>6} {:>7} {:>8} {:>6} {:>6} {:>6} {:>15}".format(*names))
    for shape in args.shape or SHAPES:
        ic, oc = (int(n) for n in shape.split("x"))
        for quant in QUANTS:
            first = random_matrix(quant, ic, oc)
            copies = [first] + [random_matrix(quant, ic, oc) for _ in range(OUT_OF_CACHE // first.nbytes)]
            for level in _core.levels():
                _core.force_level(level)
                for threads in sorted({1, default_threads()}):
                    _core.set_threads(threads)
                    one, many = np.ones((1, ic), np.float32), np.ones((256, ic), np.float32)
                    half = np.sort(np.random.default_rng(0).permutation(ic)[: ic // 2]).astype(np.uint32)
                    rounds = [
                        (seconds(copies, one), seconds_some(copies, one, half), stream_gb_s(buffer))
                        for _ in range(args.rounds)
                    ]
                    took = statistics.median(t for t, _, _ in rounds)
                    of_dense = statistics.median(h / t for t, h, _ in rounds)
                    share = statistics.median(first.nbytes / t / 1e9 / s for t, _, s in rounds)
                    gmac = 256 * ic * oc / statistics.median(seconds_prefill(first, many) for _ in range(3)) / 1e9
                    speed = (
                        f"{took * 1e6:8.1f} {first.nbytes / took / 1e9:6.1f} {share:6.0%} {of_dense:6.2f} {gmac:15.0f}"
                    )
                    print(f"{shape:>10} {quant:>5} {level:>6} {threads:>7} {speed}", flush=True)


if __name__ == "__main__":
    main()
