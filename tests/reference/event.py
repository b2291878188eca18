"""Event-driven decode: channels that moved, blocks that keep their results, attention that holds its keys."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from reference.attention import F32, F64
from reference.keys import row_bytes, span

Ints = NDArray[np.int64]


# ---------------------------------------------------------------- channels


@dataclass(frozen=True)
class InputRule:
    """The arguments of _core.EventInput, for one level."""

    n: int
    most: int
    norms: F32 | None = None
    block: int = 1
    track: bool = True
    theta: float = 0.0
    quorum: float = 1.0
    conv_eps: float = 0.0
    conv_j: int = 1
    age_max: int = 1 << 20


def enough(rule: InputRule, scores: F64) -> tuple[int, bool]:
    """How many of the largest scores are sent, and whether that is fewer because enough was sent."""
    energy = float((scores**2).sum())
    moved = int((scores >= rule.theta * np.sqrt(energy / rule.n)).sum())
    least, sent = np.sort(scores)[::-1], 0.0
    for count, score in enumerate(least[: min(moved, rule.most)], 1):
        sent += score**2
        last = least[max(0, count - rule.conv_j) : count]
        small = count >= rule.conv_j and (last < rule.conv_eps * np.sqrt(energy)).all()
        if small and sent >= rule.quorum * energy and count < min(moved, rule.most):
            return count, True
    return min(moved, rule.most), False


def pick(rule: InputRule, x: F32) -> tuple[Ints, bool]:
    """The channels of x that are sent, ascending: the blocks with the largest norm of their scores."""
    scores = np.abs(x * rule.norms if rule.norms is not None else x).astype(np.float64)
    count, stopped = enough(rule, scores) if rule.track else (rule.most, False)
    starts = np.arange(0, rule.n, rule.block)
    strength = np.sqrt(np.add.reduceat(scores**2, starts))
    best = np.argsort(-strength, kind="stable")[: max(1, count // rule.block)]
    return np.flatnonzero(np.isin(np.arange(rule.n) // rule.block, best)), stopped


class Input:
    """x as it was last sent; the map's result is the map of that."""

    def __init__(self, rule: InputRule) -> None:
        self.rule, self.x = rule, np.zeros(0, np.float32)
        self.since = self.sent = self.whole = self.stopped = 0

    def step(self, x: F32) -> F32:
        """What the map is made of for this token (n)."""
        if not self.rule.track:
            channels = self._count(*pick(self.rule, x))
            out = np.zeros_like(x)
            out[channels] = x[channels]
            return out
        if len(self.x) == 0 or self.since >= self.rule.age_max:
            self.x, self.since = x.copy(), 0
            self.whole += 1
            self.sent += self.rule.n
        else:
            channels = self._count(*pick(self.rule, x - self.x))
            self.x[channels] = x[channels]
        self.since += 1
        return self.x

    def _count(self, channels: Ints, stopped: bool) -> Ints:
        self.sent += len(channels)
        self.stopped += stopped
        return channels


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True)
class BlocksRule:
    """The arguments of _core.EventBlocks, for one level."""

    n: int
    block: int
    most: int
    theta: float = 0.0
    beta: float = 0.9
    decay: float = 0.1
    age_max: int = 64


class Blocks:
    """The last result of each block of channels, its age, and the x of the token before."""

    def __init__(self, rule: BlocksRule, w: F64) -> None:
        self.rule, self.w, self.x = rule, w, np.zeros(0)  # w (oc, n)
        self.of = np.arange(rule.n) // rule.block
        self.results, self.age = np.zeros((self.of[-1] + 1, len(w))), np.zeros(self.of[-1] + 1)
        self.sent = 0

    def step(self, x: F32) -> F64:
        """The map's result (oc)."""
        for b in range(len(self.age)):
            if b in self._chosen(x):
                self.results[b], self.age[b] = self.w[:, self.of == b] @ x[self.of == b].astype(np.float64), -1
                self.sent += int((self.of == b).sum())
        self.age += 1
        self.x = x.astype(np.float64)
        weight = np.where(self.age == 0, 1.0, self.rule.beta * np.exp(-self.rule.decay * self.age))
        out: F64 = len(weight) / weight.sum() * (weight @ self.results)
        return out

    def _chosen(self, x: F32) -> set[int]:
        if len(self.x) == 0:
            return set(range(len(self.age)))
        move = np.array([np.linalg.norm((x - self.x)[self.of == b]) for b in range(len(self.age))])
        best = np.argsort(-move, kind="stable")[: self.rule.most]
        old = np.flatnonzero(self.age >= self.rule.age_max)
        return {int(b) for b in best if move[b] >= self.rule.theta * move.mean()} | {int(b) for b in old}


# ---------------------------------------------------------------- keys

SUM_KEYS = 64  # keys that become choosable together
FADE = 0.7  # of what was known, from choice to choice


@dataclass(frozen=True)
class KeysRule:
    """The arguments of _core.EventKeys, for one level."""

    keys: int
    limit: float = float("inf")
    sinks: int = 4
    recent: int = 32
    min_ctx: int = 0
    age_max: int = 32
    turn: int = 0  # of the layer
    turns: int = 1  # of all layers
    query_theta: float = 0.0
    reuse_theta: float = 0.0
    beta: float = 1.0
    decay: float = 0.0
    half: bool | None = None  # whether the better half of the keys is read; None: it is not known either

    def dense(self, position: int, window: int) -> bool:
        """All keys are read: there are few, a window hides some, or that is the rule."""
        least = max(self.min_ctx, self.sinks + self.recent + 2 * SUM_KEYS + self.keys)
        return self.limit < 0 or position + 1 < least or bool(window and position + 1 > window)


@dataclass
class Head:
    """What is held of a kv head."""

    importance: F64 = field(default_factory=lambda: np.zeros(0))
    start: int = 0  # position of its choice
    until: int = 0  # keys before it were choosable
    choices: int = 0
    q: F64 = field(default_factory=lambda: np.zeros(0))
    all: Choice = field(default_factory=lambda: Choice())
    half: Choice = field(default_factory=lambda: Choice())
    error: float = 0.0


@dataclass
class Choice:
    """Keys that are read, and what stands for the rest."""

    chosen: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    key: F64 = field(default_factory=lambda: np.zeros(0))  # (E): means of the rest
    value: F64 = field(default_factory=lambda: np.zeros(0))
    offset: F64 | None = None  # (g)


def softmax(scores: F64) -> F64:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out: F64 = weights / weights.sum(-1, keepdims=True)
    return out


def apart(a: F64, b: F64) -> float:
    """|a - b| beside |b|."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


class Keys:
    """Attention of one text, token by token: k and v (positions, K, E) are those that the cache stands for."""

    def __init__(self, rule: KeysRule, k: F64, v: F64, heads: int, kv: str = "f16", window: int = 0) -> None:
        self.rule, self.k, self.v, self.window = rule, k, v, window
        self.kv_heads, self.e, self.g = k.shape[1], k.shape[2], heads // k.shape[1]
        self.row = row_bytes(kv, self.e)
        self.held = [Head() for _ in range(self.kv_heads)]
        self.blocks = 0
        self.last, self.next = np.zeros(0), -1
        self.move, self.age = np.full(self.kv_heads, np.inf), np.zeros(self.kv_heads, int)
        names = ("tokens", "heads", "held", "reused", "choices", "keys", "kept", "error", "bytes_read", "bytes_skipped")
        self.counts = dict.fromkeys(names, 0.0)
        self.kinds: list[str] = []  # of each token: dense, choice, held
        self.chose: list[list[int]] = []  # of each token: kv heads

    def step(self, q: F32, position: int, scale: float) -> F64:
        """q (H, E) -> (H, E)."""
        low, n = span(position, self.window)
        queries = q.astype(np.float64).reshape(self.kv_heads, self.g, self.e) * scale
        scores = np.einsum("hge,nhe->hgn", queries, self.k[low:n])
        exact = np.einsum("hgn,nhe->hge", softmax(scores), self.v[low:n])
        dense_bytes, before = 2 * self.kv_heads * (n - low) * self.row, self.counts["bytes_read"]
        self._add(tokens=1, heads=self.kv_heads, keys=self.kv_heads * (n - low))
        if self.rule.dense(position, self.window):
            self.kinds.append("dense")
            self.chose.append([])
            self._add(kept=self.kv_heads * (n - low), bytes_read=dense_bytes)
            out = exact
        else:
            self._grow(n)
            due = [h for h in range(self.kv_heads) if self._due(h, queries[h], position)]
            self.kinds.append("choice" if due else "held")
            self.chose.append(due)
            out = self._hold(queries, exact, position, due)
            for h in due:
                self._choose(h, queries[h], scores[h], exact[h], position)
        self._add(bytes_skipped=dense_bytes - (self.counts["bytes_read"] - before))
        return out.reshape(q.shape)

    def _add(self, **more: float) -> None:
        for name, value in more.items():
            self.counts[name] += value

    def _grow(self, n: int) -> None:
        """Sums of keys and values, a block at a time."""
        blocks = max(self.blocks, (n - self.rule.recent) // SUM_KEYS)
        self._add(bytes_read=2 * self.kv_heads * (blocks - self.blocks) * SUM_KEYS * self.row)
        self.blocks = blocks

    def _due(self, h: int, queries: F64, position: int) -> bool:
        """Heads take turns."""
        rule, head = self.rule, self.held[h]
        if not head.choices or position >= head.start + rule.age_max:
            return True
        turn = (rule.turn * self.kv_heads + h) * rule.age_max // (rule.turns * self.kv_heads)
        if position % rule.age_max == turn % rule.age_max:
            return True
        return rule.query_theta > 0 and apart(queries, head.q) > rule.query_theta

    def _choose(self, h: int, queries: F64, scores: F64, exact: F64, position: int) -> None:
        n, rule, head = position + 1, self.rule, self.held[h]
        if head.choices:
            shown, read = self._with_held(queries, h, n, self.held[h].all)
            error = apart(shown, exact)
            self._add(error=error, kept=read, bytes_read=2 * read * self.row)
            head.error = error if head.choices == 1 else FADE * head.error + (1 - FADE) * error
        head.until = (n - rule.recent) // SUM_KEYS * SUM_KEYS
        self._choose_for(head, h, queries, scores)
        head.start, head.q, head.choices = position, queries, head.choices + 1
        self._add(choices=1, bytes_read=(n + 2 * (rule.sinks + len(head.all.chosen))) * self.row)
        if rule.half is not None:
            self._add(bytes_read=2 * (rule.sinks + len(head.half.chosen)) * self.row)

    def _choose_for(self, head: Head, h: int, queries: F64, scores: F64) -> None:
        sinks, until = self.rule.sinks, head.until
        importance = softmax(scores).max(0)
        importance[: len(head.importance)] += FADE * head.importance
        order = sinks + np.argsort(-importance[sinks:until], kind="stable")[: self.rule.keys]
        head.importance = importance
        for choice, best in ((head.all, order), (head.half, order[: (len(order) + 1) // 2])):
            choice.chosen = np.sort(best)
            rest = np.setdiff1d(np.arange(sinks, until), best)
            choice.key, choice.value = self.k[rest, h].mean(0), self.v[rest, h].mean(0)
            offset = np.log(np.exp(scores[:, rest]).sum(1)) - queries @ choice.key
            choice.offset = offset if choice.offset is None else FADE * choice.offset + (1 - FADE) * offset

    def _with_held(self, queries: F64, h: int, n: int, choice: Choice) -> tuple[F64, int]:
        """Attention over held keys, with one more that stands for the rest; how many keys were read."""
        at = np.concatenate([np.arange(self.rule.sinks), choice.chosen, np.arange(self.held[h].until, n)])
        one = (choice.offset + queries @ choice.key)[:, None]
        weights = softmax(np.concatenate([queries @ self.k[at, h].T, one], axis=1))
        return weights @ np.concatenate([self.v[at, h], choice.value[None]]), len(at)

    def _hold(self, queries: F64, exact: F64, position: int, due: list[int]) -> F64:
        rule, out, read = self.rule, exact.copy(), 0
        known = self.next == position
        for h, head in enumerate(self.held):
            if (
                h not in due
                and rule.reuse_theta
                and known
                and self.age[h] < rule.age_max
                and self.move[h] < rule.reuse_theta
            ):
                self.age[h] += 1
                out[h] = rule.beta * np.exp(-rule.decay * self.age[h]) * self.last[h]
                self._add(reused=1)
                continue
            if h in due or head.error > rule.limit:
                read += position + 1
            else:
                choice = head.half if rule.half else head.all
                out[h], keys = self._with_held(queries[h], h, position + 1, choice)
                read += keys
                self._add(held=1)
            self.move[h] = apart(self.last[h], out[h]) if known else np.inf
            self.age[h] = 0
        fresh = self.age == 0
        self.last = np.where(fresh[:, None, None], out, self.last) if known else out.copy()
        self.next = position + 1
        self._add(kept=read, bytes_read=2 * read * self.row)
        return out
