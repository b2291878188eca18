"""Time of one layer's decode attention: packed keys beside all keys, by head shape and length of the text."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from ralo import _core
from ralo.memory import Arena
from ralo.modes.statepack import StatePack, counts_by

OUT_OF_CACHE = 128 << 20  # bytes of keys and values: layers enough that none finds its own still there
SHAPES = ((5, 2, 64), (8, 4, 128))  # kv heads, query heads of each, width: base's, and an 8 B model's


@dataclass(frozen=True)
class Timing:
    """Seconds of a layer over all keys and over packed ones, and the median of the rounds' ratios."""

    exact: float
    packed: float
    ratio: float


def packed_beside_exact(shape: tuple[int, int, int], keys: int, rounds: int, popcnt: str = "auto") -> Timing:
    heads, group, width = shape
    rng = np.random.default_rng(0)
    layers = 1 + OUT_OF_CACHE // (4 * heads * keys * width)
    caches = [_cache(heads, keys, width, rng) for _ in range(layers)]
    queries = rng.standard_normal((rounds + 1, 1, heads * group * width), dtype=np.float32)
    slots = [_core.PackKeys(popcount=counts_by(popcnt), keep_abs=round(StatePack().keys)) for _ in caches]
    states, out = [_core.LayerState() for _ in caches], np.empty_like(queries[0])
    past, scale = keys - 20, width**-0.5  # not at the end of a block, whose keys would be coded every time

    def exact(q: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        for cache in caches:
            cache.attend(q, heads * group, past, 0, scale, out)

    def packed(q: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        for cache, slot, state in zip(caches, slots, states, strict=True):
            slot.attend(cache, q, heads * group, past, 0, scale, state, out)

    took = []
    for q in queries:
        clock = [time.perf_counter()]
        for way in (exact, packed):
            way(q)
            clock.append(time.perf_counter())
        took.append(((clock[1] - clock[0]) / layers, (clock[2] - clock[1]) / layers))
    a, b = ([t[i] for t in took[1:]] for i in (0, 1))  # the first round codes the keys
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    return Timing(statistics.median(a), statistics.median(b), statistics.median(ratios))


def _cache(heads: int, keys: int, width: int, rng: np.random.Generator) -> _core.LayerCache:
    arena = Arena(4 * heads * keys * width)
    k, v = (arena.zeros((heads, keys, 2 * width), np.uint8) for _ in "kv")
    cache = _core.LayerCache("f16", k, v, None, None)
    for start in range(0, keys, 4096):
        n = min(4096, keys - start)
        key, value = (rng.standard_normal((n, heads * width), dtype=np.float32) for _ in "kv")
        cache.store(key, value, start)
    return cache
