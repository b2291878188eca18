"""Decode attention of a layer by head shape and cache precision: time, and bytes of cache read beside the read speed.

Leaves out: the linear maps, storing keys, prefill. Layers enough to be out of the processor's cache.
Run: python benches/attention.py [--keys 4096] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from ralo import _core
from ralo.accept.attention import packed_beside_exact
from ralo.bench import STREAM_WORDS, stream_gb_s
from ralo.cpu import default_threads
from ralo.memory import Arena
from ralo.sequence import KV_BYTES

SHAPES = ((5, 2, 64), (8, 4, 128))  # kv heads, query heads of each, width


def cache(kind: str, heads: int, keys: int, width: int) -> _core.LayerCache:
    arena = Arena()
    rows = [arena.zeros((heads, keys, width * KV_BYTES[kind]), np.uint8) for _ in "kv"]
    scales = [arena.zeros((heads, keys), np.float32) for _ in "kv"] if kind == "int8" else [None, None]
    found = _core.LayerCache(kind, *rows, *scales)
    values = np.random.default_rng(0).standard_normal((keys, heads * width), dtype=np.float32)
    found.store(values, values, 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    _core.set_threads(default_threads())
    buffer = np.ones(STREAM_WORDS, np.uint64)
    for kind in ("f16", "int8"):
        for heads, group, width in SHAPES:
            layers = [cache(kind, heads, args.keys, width) for _ in range(8)]
            q = np.random.default_rng(1).standard_normal((1, heads * group * width), dtype=np.float32)
            out, rounds, read = np.empty_like(q), [], 0
            for _ in range(args.rounds):
                clock = time.perf_counter()
                for layer in layers:
                    read = layer.attend(q, heads * group, args.keys - 1, 0, width**-0.5, out)
                rounds.append(((time.perf_counter() - clock) / len(layers), stream_gb_s(buffer)))
            took = statistics.median(t for t, _ in rounds)
            share = statistics.median(read / t / 1e9 / s for t, s in rounds)
            shape = f"{kind:>5} {heads} x {group} x {width:<4} {args.keys} keys"
            print(f"{shape} {took * 1e6:8.1f} us {read / took / 1e9:6.1f} GB/s {share:6.0%} of the stream", flush=True)
    for heads, group, width in SHAPES:
        for way in _core.popcounts():
            t = packed_beside_exact((heads, group, width), args.keys, args.rounds, way)
            shape = f"  f16 {heads} x {group} x {width:<4} {args.keys} keys"
            print(
                f"{shape} {t.packed * 1e6:8.1f} us packed, counted by {way}: {t.ratio:.2f} of exact's speed", flush=True
            )


if __name__ == "__main__":
    main()
