"""Kernel speeds by shape, precision, ISA level and threads: bytes of weights per second beside the plain read speed.
And as a share of that time: with a random half of the channels; of int8 with all by halves in tiles, some whole.

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
from ralo.matrix import HALVED, QUANTS, Matrix
from ralo.memory import Arena
from ralo.modes.share import FINE

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


def seconds_tiles(tiles: list[_core.Tiles], x: np.ndarray, fine: np.ndarray, oc: int) -> float:
    y = np.empty(oc, np.float32)
    clock = time.perf_counter()
    for matrix in tiles:
        matrix.apply(x[0], fine, y)
    return (time.perf_counter() - clock) / max(1, len(tiles))


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
    names = ("shape", "quant", "level", "threads", "us", "GB/s", "share", "half", "tiles", "prefill GMAC/s")
    print("{:>10} {:>5} {:>6} {:>7} {:>8} {:>6} {:>6} {:>6} {:>6} {:>15}".format(*names))
    for shape in args.shape or SHAPES:
        ic, oc = (int(n) for n in shape.split("x"))
        for quant in QUANTS:
            first = random_matrix(quant, ic, oc)
            copies = [first] + [random_matrix(quant, ic, oc) for _ in range(OUT_OF_CACHE // first.nbytes)]
            arena = Arena()
            tiles = [m.tiles(arena) for m in copies] if quant == HALVED else []
            for level in _core.levels():
                _core.force_level(level)
                for threads in sorted({1, default_threads()}):
                    _core.set_threads(threads)
                    one, many = np.ones((1, ic), np.float32), np.ones((256, ic), np.float32)
                    half = np.sort(np.random.default_rng(0).permutation(ic)[: ic // 2]).astype(np.uint32)
                    fine = half[:: round(0.5 / FINE)].copy()
                    rounds = [
                        (
                            seconds(copies, one), seconds_some(copies, one, half),
                            seconds_tiles(tiles, one, fine, oc), stream_gb_s(buffer),
                        )
                        for _ in range(args.rounds)
                    ]  # fmt: skip
                    took = statistics.median(t for t, *_ in rounds)
                    some, in_tiles = (statistics.median(r[i] / r[0] for r in rounds) for i in (1, 2))
                    of_dense = f"{some:6.2f} {in_tiles:6.2f}" if tiles else f"{some:6.2f} {'':>6}"
                    share = statistics.median(first.nbytes / t / 1e9 / s for t, *_, s in rounds)
                    gmac = 256 * ic * oc / statistics.median(seconds_prefill(first, many) for _ in range(3)) / 1e9
                    speed = f"{took * 1e6:8.1f} {first.nbytes / took / 1e9:6.1f} {share:6.0%} {of_dense} {gmac:15.0f}"
                    print(f"{shape:>10} {quant:>5} {level:>6} {threads:>7} {speed}", flush=True)


if __name__ == "__main__":
    main()
