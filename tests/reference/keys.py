"""k winners take all among the keys of attention: which keys a token keeps, attention over those, bytes it reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from reference.attention import F64, padded


@dataclass(frozen=True)
class Rule:
    """The arguments of _core.KwtaKeys."""

    keep: float
    keep_abs: int = 0
    sinks: int = 4
    recent: int = 32
    min_ctx: int = 0
    seed: bool = False

    def wanted(self, n: int) -> int:
        """How many of n keys win: a fixed number, or a share to the nearest whole number."""
        return min(self.keep_abs, n) if self.keep_abs else max(1, int(float(np.float32(self.keep)) * n + 0.5))

    def all(self, low: int, end: int) -> bool:
        """Attention is dense: there are few keys, or nothing to leave out."""
        n = end - low
        between = max(low, end - self.recent) - max(low, self.sinks)  # keys that are not kept in any case
        return n < self.min_ctx or self.wanted(n) == n or between <= 0


def span(position: int, window: int) -> tuple[int, int]:
    """The keys that a token may look at: positions [low, end)."""
    return max(0, position + 1 - window) if window else 0, position + 1


def importance(scores: F64) -> F64:
    """scores (g, n) -> (n): the largest weight that one of the heads gives a key, each head's best key weighing 1."""
    return np.exp((scores - scores.max(1, keepdims=True)).max(0))


def energy(k: F64) -> F64:
    """Keys (n, E) -> (n)."""
    return (k * k).sum(-1)


def kept(rule: Rule, low: int, end: int, importances: F64) -> NDArray[np.int64]:
    """Positions, ascending: the most important of [low, end), of equal ones the first; the sinks; the recent ones."""
    at = np.arange(low, end)
    winners = low + np.argsort(-importances, kind="stable")[: rule.wanted(end - low)]
    return at[np.isin(at, winners) | (at < rule.sinks) | (at >= end - rule.recent)]


def attend_some(scores: F64, v: F64) -> F64:
    """Softmax of scores (g, n) times values (n, E)."""
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights @ v / weights.sum(1, keepdims=True)


def attend(
    rule: Rule, q: F64, k: F64, v: F64, past: int, window: int, scale: float
) -> tuple[F64, list[list[NDArray[np.int64]]]]:
    """q (T, H, E), k and v (positions, K, E) -> (T, H, E), and the kept positions of each token and kv head."""
    out, lists = np.empty(q.shape), []
    kv_heads = k.shape[1]
    for t, token in enumerate(q):
        low, end = span(past + t, window)
        lists.append([])
        for head, queries in enumerate(token.reshape(kv_heads, -1, q.shape[2])):
            scores = scale * queries @ k[:end, head].T  # (g, end)
            important = energy(k[low:end, head]) if rule.seed else importance(scores[:, low:])
            chosen = np.arange(low, end) if rule.all(low, end) else kept(rule, low, end, important)
            g = len(queries)
            out[t, head * g : (head + 1) * g] = attend_some(scores[:, chosen], v[chosen, head])
            lists[-1].append(chosen)
    return out, lists


def counts(rule: Rule, kv: str, e: int, lists: list[list[NDArray[np.int64]]], past: int, window: int) -> dict[str, int]:
    """What the slot counts for tokens that are not dense, less the keys that energies are computed from."""
    row = row_bytes(kv, e)
    sizes = [(np.subtract(*span(past + t, window)[::-1]), len(p)) for t, heads in enumerate(lists) for p in heads]
    keys, won = (int(sum(column)) for column in zip(*sizes, strict=True))
    read, lost = (2 * won, 2 * (keys - won)) if rule.seed else (keys + won, keys - won)
    return {"steps": len(lists), "keys": keys, "kept": won, "bytes_read": read * row, "bytes_skipped": lost * row}


def row_bytes(kv: str, e: int) -> int:
    return padded(e) * {"f32": 4, "f16": 2, "int8": 1}[kv] + (4 if kv == "int8" else 0)
