"""Attention: how the cache stores rows, causal attention with grouped heads and a window, and the bytes it reads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

HEAD_PAD = 16  # head widths are padded to a multiple of this
FEW_TOKENS = 8  # that give together what each gives alone
TILE_ROWS = 256  # query rows (tokens x heads of a group) that a prefill tile reads keys for, at most
TILE_TOKENS = 128  # and tokens; tiles start at multiples of their tokens, a power of two
EPS = 2.0**-24  # half an ulp of 1.0: the relative error of one float32 operation


def padded(e: int) -> int:
    return -(-e // HEAD_PAD) * HEAD_PAD


def store(kv: str, x: F32) -> tuple[NDArray[np.generic], F32 | None]:
    """Rows (..., e) as the cache holds them: (..., e padded with zeros), and a scale (...) for int8."""
    wide = np.zeros((*x.shape[:-1], padded(x.shape[-1])), np.float32)
    wide[..., : x.shape[-1]] = x
    if kv == "f32":
        return wide, None
    if kv == "f16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16), None
    top = np.abs(wide).max(-1)
    # 127 / top would overflow for the smallest rows: they are stored as zeros
    inverse = np.where(top > np.float32(1e-36), np.float32(127) / np.maximum(top, np.float32(1e-36)), np.float32(0))
    return np.rint(wide * inverse[..., None]).astype(np.int8), top / np.float32(127)


def load(rows: NDArray[np.generic], scales: F32 | None) -> F64:
    """What stored rows stand for."""
    values = rows.astype(np.float64)
    return values if scales is None else values * scales[..., None]


def attend(q: F32, k: F64, v: F64, past: int, window: int, scale: float) -> tuple[F64, F64]:
    """q (T, H, E), k and v (positions, K, E) -> (T, H, E), and a bound on the error of float32 arithmetic.

    Token t is at position past + t; it sees the `window` positions that end with its own (0: all up to its own).
    """
    tokens, heads, e = q.shape
    group = heads // k.shape[1]
    at = past + np.arange(tokens)[:, None]  # (T, 1)
    key = np.arange(past + tokens)[None, :]  # (1, n)
    seen = (key <= at) & ((key > at - window) if window else True)  # (T, n)
    out, bound = np.empty(q.shape), np.empty(q.shape)
    for head in range(heads):
        k_head, v_head = k[: past + tokens, head // group], v[: past + tokens, head // group]  # (n, E)
        q_head = q[:, head].astype(np.float64) * scale
        scores = np.where(seen, q_head @ k_head.T, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out[:, head] = weights @ v_head
        # A score has E + 4 roundings, each relative to sum |q||k|; the exponent turns that into a relative error of a
        # weight, its own few ulp included; the two sums over the keys add one rounding a key each. All once above and
        # once below the fraction bar.
        size = np.where(seen, np.abs(q_head) @ np.abs(k_head).T, 0).max(1)  # (T,)
        roundings = 2 * (padded(e) + 4) * size + 2 * seen.sum(1) + 32
        bound[:, head] = roundings[:, None] * EPS * (weights @ np.abs(v_head))
    return out, bound


def bytes_read(kv: str, tokens: int, past: int, heads: int, kv_heads: int, e: int, window: int) -> int:
    """Keys and values that are read: once a kv head for a few tokens, or by each of them where a window slides; else
    once a tile of queries."""
    row = padded(e) * {"f32": 4, "f16": 2, "int8": 1}[kv] + (4 if kv == "int8" else 0)  # int8: and a float32 scale
    slides = bool(window) and past + tokens > window
    cuts = [*range(past, past + tokens, 1 if slides else tokens), past + tokens]
    if tokens > FEW_TOKENS:
        step = min(TILE_TOKENS, 1 << (max(1, TILE_ROWS // (heads // kv_heads)).bit_length() - 1))
        cuts = [past, *(t for t in range(past + 1, past + tokens) if t % step == 0), past + tokens]
    total = 0
    for first, stop in pairwise(cuts):
        oldest = max(0, first + 1 - window) if window else 0
        total += stop - oldest
    return total * kv_heads * 2 * row
