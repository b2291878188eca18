"""llama2.c's model, tokenizer and forward pass in plain numpy, one token at a time, with nothing taken from ralo."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
BOS = 1
HEADER = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")


class Stories:
    """The legacy format: seven numbers, then every tensor as float32 (L layers, D model, F hidden, V vocabulary)."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        self.sizes = dict(zip(HEADER, struct.unpack_from("<7i", data), strict=True))
        self.tied = self.sizes["vocab_size"] > 0  # a negative size says that the output has a matrix of its own
        d, f, layers, heads, kv_heads, v, context = (abs(size) for size in self.sizes.values())
        self.heads, self.kv_heads, self.width = heads, kv_heads, d // heads
        numbers = np.frombuffer(data, "<f4", offset=28)
        kv = kv_heads * self.width
        shapes: dict[str, tuple[int, ...]] = {"embed": (v, d), "attn_norm": (layers, d), "q": (layers, d, d)}
        shapes |= {"k": (layers, kv, d), "v": (layers, kv, d), "o": (layers, d, d), "mlp_norm": (layers, d)}
        shapes |= {"gate": (layers, f, d), "down": (layers, d, f), "up": (layers, f, d), "final_norm": (d,)}
        shapes |= {"cos": (context, self.width // 2), "sin": (context, self.width // 2)}  # not used: computed below
        if not self.tied:
            shapes["head"] = (v, d)
        self.w: dict[str, F32] = {}
        at = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            self.w[name] = numbers[at : at + size].reshape(shape)
            at += size
        assert at == len(numbers), "the file holds something else"
        self.keys: list[list[F32]] = [[] for _ in range(layers)]
        self.values: list[list[F32]] = [[] for _ in range(layers)]

    def step(self, token: int) -> F32:
        """Scores of what follows the token (V)."""
        w, x, position = self.w, self.w["embed"][token].copy(), len(self.keys[0])
        for i in range(len(self.keys)):
            h = rms_norm(x, w["attn_norm"][i])
            q = rotate((w["q"][i] @ h).reshape(self.heads, -1), position)
            self.keys[i].append(rotate((w["k"][i] @ h).reshape(self.kv_heads, -1), position))
            self.values[i].append((w["v"][i] @ h).reshape(self.kv_heads, -1))
            x += w["o"][i] @ self.attend(q, np.array(self.keys[i]), np.array(self.values[i]))
            h = rms_norm(x, w["mlp_norm"][i])
            gate = w["gate"][i] @ h
            x += w["down"][i] @ (gate / (1 + np.exp(-gate)) * (w["up"][i] @ h))
        return w["embed" if self.tied else "head"] @ rms_norm(x, w["final_norm"])

    def attend(self, q: F32, keys: F32, values: F32) -> F32:
        out = []
        for head in range(self.heads):
            shared = head * self.kv_heads // self.heads
            dots = keys[:, shared] @ q[head] / np.sqrt(np.float32(self.width))  # (T)
            weights = np.exp(dots - dots.max())
            out.append(weights / weights.sum() @ values[:, shared])
        return np.concatenate(out)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        scores = [self.step(token) for token in prompt][-1]
        tokens = []
        for _ in range(count):
            tokens.append(int(scores.argmax()))
            scores = self.step(tokens[-1])
        return tokens


def rms_norm(x: F32, weight: F32) -> F32:
    return weight * (x / np.sqrt(np.mean(x * x) + np.float32(1e-5)))


def rotate(x: F32, position: int) -> F32:
    """Neighbours (0, 1), (2, 3), ... of every head are turned together."""
    heads, width = x.shape
    angle = position * 10000.0 ** (-np.arange(0, width, 2) / width)
    even, odd = x[:, 0::2], x[:, 1::2]
    out = np.stack([even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)], axis=-1)
    return out.reshape(heads, width).astype(np.float32)


@dataclass(frozen=True)
class Vocabulary:
    pieces: list[bytes]
    scores: list[float]

    @classmethod
    def read(cls, path: Path, size: int) -> Vocabulary:
        entries = list(cls._entries(path.read_bytes(), size))
        return cls([piece for piece, _ in entries], [score for _, score in entries])

    @staticmethod
    def _entries(data: bytes, size: int) -> Iterator[tuple[bytes, float]]:
        at = 4  # after the length of the longest piece
        for _ in range(size):
            score, length = struct.unpack_from("<fi", data, at)
            yield data[at + 8 : at + 8 + length], score
            at += 8 + length

    def encode(self, text: str) -> list[int]:
        """BOS, a space, then letters (or their bytes) merged two by two, the best score first."""
        tokens = [BOS, self.pieces.index(b" ")]
        for letter in text:
            data = letter.encode()
            tokens += [self.pieces.index(data)] if data in self.pieces else [byte + 3 for byte in data]
        while True:
            pairs = [self.pieces[a] + self.pieces[b] for a, b in pairwise(tokens)]
            known = [(self.scores[self.pieces.index(p)], -i) for i, p in enumerate(pairs) if p in self.pieces]
            if not known:
                return tokens
            at = -max(known)[1]
            tokens[at : at + 2] = [self.pieces.index(pairs[at])]

    def decode(self, tokens: list[int]) -> str:
        """The text after a BOS, which swallows one space."""
        data = b"".join(bytes([t - 3]) if 3 <= t < 259 else self.pieces[t] for t in tokens)
        return data.removeprefix(b" ").decode()
