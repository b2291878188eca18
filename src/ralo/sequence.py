"""All state of one running text: its tokens and each layer's keys and values, with trim, clone and nbytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.config import ModelConfig
from ralo.errors import RaloError
from ralo.memory import Arena

KV_BYTES = {"f32": 4, "f16": 2, "int8": 1}  # per value; int8 has a float32 scale per row besides
KV_KINDS = tuple(KV_BYTES)
FIRST_CAPACITY = 256  # positions; doubled as the text grows


class LayerCache:
    """Keys and values of one layer, grown by doubling: (K, capacity, padded E), int8 with a scale per row."""

    def __init__(self, cfg: ModelConfig, kv: str) -> None:
        self.kv = kv
        self.width = -(-cfg.head_dim // _core.HEAD_PAD) * _core.HEAD_PAD * KV_BYTES[kv]  # bytes
        self.heads = cfg.n_kv_heads
        self.capacity = 0
        self._arrays: list[NDArray[Any]] = []
        self.core: _core.LayerCache

    def reserve(self, positions: int, used: int) -> None:
        """Room for so many positions; the first `used` are kept."""
        if positions <= self.capacity:
            return
        capacity = max(positions, 2 * self.capacity, FIRST_CAPACITY)
        self._replace(capacity, self._arrays, used)

    def _replace(self, capacity: int, old: list[NDArray[Any]], used: int) -> None:
        rows = self.heads * capacity
        arena = Arena(2 * rows * (self.width + 4))  # keys, values and scales together: more of them on huge pages
        new: list[NDArray[Any]] = [arena.zeros((self.heads, capacity, self.width), np.uint8) for _ in range(2)]
        if self.kv == "int8":
            new += [arena.zeros((self.heads, capacity), np.float32) for _ in range(2)]
        for to, source in zip(new, old, strict=False):
            to[:, :used] = source[:, :used]
        self._arrays, self.capacity = new, capacity
        k, v, *scales = new
        self.core = _core.LayerCache(self.kv, k, v, *(scales or (None, None)))

    def rows(self, position: int) -> list[NDArray[Any]]:
        """A copy of what is stored of one position."""
        return [a[:, position].copy() for a in self._arrays]

    def put(self, position: int, rows: list[NDArray[Any]]) -> None:
        for a, row in zip(self._arrays, rows, strict=True):
            a[:, position] = row

    def clone(self, used: int) -> LayerCache:
        other = object.__new__(LayerCache)
        other.kv, other.width, other.heads = self.kv, self.width, self.heads
        other._replace(max(used, 1), self._arrays, used)
        return other

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._arrays)


@dataclass
class Sequence:
    """One text in progress. `tokens` are those whose keys and values are in the caches."""

    cfg: ModelConfig
    kv: str
    tokens: list[int]
    layers: list[LayerCache]
    states: list[_core.LayerState]  # what modes remember, per layer
    sure: int = 0  # tokens up to which nothing is worse than dense: a prompt, or found good by the guard
    room: int = 0  # tokens that fit into `caches` as they are
    caches: list[_core.LayerCache] = field(default_factory=list)
    cuts: int = 0  # times that something was taken back

    @classmethod
    def empty(cls, cfg: ModelConfig, kv: str = "f16") -> Sequence:
        each = range(cfg.n_layers)
        return cls(cfg, kv, [], [LayerCache(cfg, kv) for _ in each], [_core.LayerState() for _ in each])

    def __len__(self) -> int:
        return len(self.tokens)

    def reserve(self, more: int) -> list[_core.LayerCache]:
        """Room for `more` tokens in every layer, or an error when the model's context ends before; the caches."""
        need = len(self.tokens) + more
        if need > self.room:
            if need > self.cfg.max_context:
                raise RaloError(f"{need} tokens are more than the model's context of {self.cfg.max_context}")
            for layer in self.layers:
                layer.reserve(need, len(self))
            self.room = min(self.cfg.max_context, *(layer.capacity for layer in self.layers))
            self.caches = [layer.core for layer in self.layers]
        return self.caches

    def trim(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot trim {len(self)} tokens to {length}")
        self.cuts += 1
        del self.tokens[length:]
        self.sure = min(self.sure, length)
        for state in self.states:
            state.trim(length)

    def rewind(self, length: int) -> None:
        """The tokens after the first `length` are to be run again, or accepted; what modes remember of them stays."""
        self.cuts += 1
        del self.tokens[length:]

    def accept(self, token: int) -> None:
        """One more token, whose keys and values are in the caches since before a `rewind`."""
        self.tokens.append(token)

    def clone(self, length: int | None = None) -> Sequence:
        """An independent copy, of the first `length` tokens where given, that can go on differently."""
        length = len(self) if length is None else length
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot take {length} of {len(self)} tokens")
        layers = [layer.clone(length) for layer in self.layers]
        states = [state.clone() for state in self.states]
        other = Sequence(self.cfg, self.kv, list(self.tokens), layers, states, self.sure)
        if length < len(self):
            other.trim(length)
        return other

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers) + sum(state.nbytes for state in self.states)
