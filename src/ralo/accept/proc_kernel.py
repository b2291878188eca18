"""How near a matvec with weights from seeds comes to the time that reading its bytes takes alone."""

from __future__ import annotations

import statistics
import time

import numpy as np

from ralo import _core
from ralo.bench import STREAM_WORDS, stream_gb_s
from ralo.proc.generator import tables
from ralo.proc.matrix import Deltas, ProcMatrix

SHAPES = {"base": ((640, 3456), (1728, 640)), "1.1 B": ((2048, 16384), (8192, 2048))}  # gate and up, down
COPIES = {"base": 12, "1.1 B": 3}  # together more than any cache
SHARE = {2: "4.1 bits", 3: "2.8 bits"}  # blocks a column


def share_of_stream(rounds: int) -> dict[str, float]:
    """Bytes a second of matvecs over those of a plain read, by shape and bits a weight."""
    buffer, out = np.ones(STREAM_WORDS, np.uint64), {}
    for model, shapes in SHAPES.items():
        for blocks, bits in SHARE.items():
            made = [random_matrix(ic, oc, blocks) for ic, oc in shapes for _ in range(COPIES[model])]
            inputs = [np.full((1, m.ic), 0.25, np.float32) for m in made]
            outputs = [np.empty((1, m.oc), np.float32) for m in made]
            shares = []
            for _ in range(rounds + 1):
                clock, read = time.perf_counter(), 0
                for m, x, y in zip(made, inputs, outputs, strict=True):
                    read += m.core.apply(x, y)
                seconds = time.perf_counter() - clock
                shares.append(read / seconds / 1e9 / stream_gb_s(buffer))
            out[f"{model} shapes, {bits}"] = statistics.median(shares[1:])
    return out


def random_matrix(ic: int, oc: int, blocks: int) -> ProcMatrix:
    rng = np.random.default_rng(ic)
    columns = -(-oc // _core.PAD // blocks)
    data = rng.integers(0, 256, (ic, columns * _core.PAD), np.uint8)
    scales = np.full((ic, columns), 0x3C00, np.uint16)  # bf16 1/128
    return ProcMatrix(ic, {"w": oc}, data, scales, None, tables("fitted"), Deltas.none(ic))
