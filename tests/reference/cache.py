"""A layer's key/value cache in float32 with attention in numpy: what the kernels' cache would give without rounding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ralo.config import ModelConfig
from ralo.sequence import Sequence

F32 = NDArray[np.float32]


class ExactCache:
    """Stands in for `_core.LayerCache`."""

    def __init__(self, heads: int, positions: int, head_dim: int) -> None:
        self.k, self.v = np.zeros((2, heads, positions, head_dim), np.float32)

    def store(self, k: F32, v: F32, past: int) -> None:
        heads, _, width = self.k.shape
        for to, rows in ((self.k, k), (self.v, v)):  # rows (T, K * E)
            to[:, past : past + len(rows)] = rows.reshape(len(rows), heads, width).swapaxes(0, 1)

    def attend(self, q: F32, heads: int, past: int, window: int, scale: float, out: F32) -> int:
        tokens, stop = len(q), past + len(q)
        shared = heads // len(self.k)  # query heads of one kv head
        queries = q.reshape(tokens, len(self.k), shared, -1).transpose(1, 2, 0, 3)  # (K, H / K, T, E)
        dots = queries @ self.k[:, None, :stop].swapaxes(2, 3) * np.float32(scale)  # (K, H / K, T, stop)
        key, query = np.arange(stop), np.arange(past, stop)[:, None]
        seen = (key <= query) & ((key > query - window) | (window == 0))
        weights = np.exp(np.where(seen, dots - dots.max(axis=-1, keepdims=True), -np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[:] = (weights @ self.v[:, None, :stop]).transpose(2, 0, 1, 3).reshape(tokens, -1)
        return 0


def exact(cfg: ModelConfig, positions: int) -> Sequence:
    """An empty sequence with caches that round nothing."""
    seq = Sequence.empty(cfg)
    for layer in seq.layers:
        layer.capacity = positions
        layer.core = ExactCache(cfg.n_kv_heads, positions, cfg.head_dim)  # type: ignore[assignment]
    return seq
