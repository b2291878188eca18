"""Packed keys: how a block of keys and a query become bits, what common bits say about a score, and a scan over codes.

All arithmetic is float32, in the kernels' order, so that bits, scales and means can be compared exactly. Bits are
booleans (..., words * 64): bit d of word w is column 64 w + d.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from reference.attention import F32, F64

Bits = NDArray[np.bool_]

BLOCK = 64  # keys that are coded together
STEP = 4  # keys STEP apart lie side by side
FLIPS = 0x9E3779B97F4A7C15  # dimensions that change their sign before they are mixed
STEPS = [np.float32(x) for x in (1.596, 0.9957, 0.586, 0.3352)]
SMOOTH, JUMP, MOST = (np.float32(x) for x in (0.1, 4, 1e4))


@dataclass(frozen=True)
class Form:
    """The arguments `code` and `eps` of the kernels; eps below 0 is that many times a key's root mean square."""

    code: str
    eps: float = -1.0
    bits: int = 1  # of a query beside signs

    @property
    def centred(self) -> bool:
        return self.code in ("signs", "ternary")

    @property
    def bitmaps(self) -> int:
        return 1 if self.code in ("signs", "overlap") else 2

    @property
    def planes(self) -> int:
        return self.bits if self.code == "signs" else self.bitmaps

    def words(self, ep: int) -> int:
        return -(-ep // 64) * self.bitmaps

    def threshold(self, square: F32, ep: int, scale: float = 1.0) -> F32:
        """What |x| must exceed, from sums of squares. `scale`: what x was multiplied with."""
        if self.eps >= 0:
            return np.full_like(square, np.float32(self.eps) * np.float32(scale))
        return -np.float32(self.eps) * np.sqrt(square / np.float32(-(-ep // 64) * 64 if self.centred else ep))


@dataclass(frozen=True)
class Encoded:
    """Codes of n keys, n a multiple of BLOCK."""

    bits: Bits  # (n, words * 64)
    scales: NDArray[np.uint16]  # (n) bf16
    means: NDArray[np.float16]  # (blocks, ep)
    values: F32  # (blocks, ep): sums from the first block on


def total(rows: F32) -> F32:
    """Rows (n, ...) added one after another."""
    out = np.zeros(rows.shape[1:], np.float32)
    for row in rows:
        out += row
    return out


def widened(x: F32) -> F32:
    """(n, ep) -> (n, ep padded to 64)."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 64)))


def rotated(x: F32) -> F32:
    """Rows (n, dims), every 64 dimensions mixed with one another: sign flips, then a Hadamard transform."""
    signs = np.array([-0.125 if FLIPS >> d & 1 else 0.125 for d in range(64)], np.float32)
    out = x.reshape(len(x), -1, 64) * signs
    half = 1
    while half < 64:
        pairs = out.reshape(len(x), -1, 64 // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([a + b, a - b], axis=-2)
        half *= 2
    return out.reshape(x.shape)


def bitmaps(code: str, x: F32, eps: F32) -> Bits:
    """Rows (n, dims) and a threshold each -> (n, words * 64)."""
    if code == "signs":
        return x > 0
    if code == "overlap":
        return np.abs(x) > eps[:, None]
    return np.concatenate([x > eps[:, None], -x > eps[:, None]], axis=1)


def to_bf16(x: F32) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(x: NDArray[np.uint16]) -> F32:
    return (x.astype(np.uint32) << 16).view(np.float32)


def smoothed(scales: F32, before: np.float32) -> F32:
    """The document's forms: a scale moves a tenth of the way, from at most a few times the one before."""
    out = np.empty_like(scales)
    for i, scale in enumerate(scales):
        if before > 0:
            scale = before + SMOOTH * (min(scale, JUMP * before) - before)
        before = out[i] = min(scale, MOST)
    return out


def encode_block(form: Form, k: F32, before: np.float32) -> tuple[Bits, NDArray[np.uint16], NDArray[np.float16]]:
    """Keys (BLOCK, ep): their bits, their scales, and their mean. `before`: the scale of the key before, or 0."""
    ep, mean = k.shape[1], np.zeros(k.shape[1], np.float16)
    if form.centred:
        mean = (total(k) * np.float32(1 / BLOCK)).astype(np.float16)
        k = k - mean.astype(np.float32)
    x = rotated(widened(k)) if form.centred else widened(k)
    square = total((x * x).T)
    eps = np.full(BLOCK, -1, np.float32) if form.code == "signs" else form.threshold(square, ep)
    active = np.abs(x) > eps[:, None]
    sizes = total(np.where(active, np.abs(x), np.float32(0)).T)
    above, below = (square, sizes) if form.code == "signs" else (sizes, total(active.astype(np.float32).T))
    scales = np.where(below > 0, above / np.where(below > 0, below, np.float32(1)), np.float32(0))
    scales = np.minimum(scales, MOST) if form.centred else smoothed(scales, before)
    return bitmaps(form.code, x, eps), to_bf16(scales), mean


def encode(form: Form, k: F32, v: F32) -> Encoded:
    """Keys and values (n, ep), as the cache holds them."""
    blocks, before = [], np.float32(0)
    for rows in k.reshape(-1, BLOCK, k.shape[1]):
        blocks.append(encode_block(form, rows, before))
        before = from_bf16(blocks[-1][1])[-1]
    bits, scales, means = (np.stack(part) for part in zip(*blocks, strict=True))
    sums = np.stack([total(rows) for rows in v.reshape(-1, BLOCK, v.shape[1])])
    for b in range(1, len(sums)):
        sums[b] += sums[b - 1]
    return Encoded(bits.reshape(len(k), -1), scales.reshape(-1), means, sums)


@dataclass(frozen=True)
class Query:
    planes: Bits  # (planes, words * 64)
    factor: np.float32
    offset: np.float32


def pack_query(form: Form, q: F32, scale: float) -> Query:
    """A query (ep), already multiplied with `scale`."""
    x = widened(q[None])
    x = rotated(x) if form.centred else x
    if form.code == "signs":
        return numbers(x[0], form.bits)
    square = total((x * x).T)
    eps = form.threshold(square, len(q), scale)
    x, pos, neg = x[0], (x > eps)[0], (-x > eps)[0]
    none = np.zeros_like(pos)
    planes = {
        "overlap": [pos | neg],
        "difference": [np.concatenate([pos, none]), np.concatenate([none, neg])],
        "ternary": [np.concatenate([pos, neg]), np.concatenate([neg, pos])],  # for, and against
    }[form.code]
    active = np.abs(x)[pos | neg]
    factor = total(active) / np.float32(len(active)) if len(active) else np.float32(0)
    return Query(np.stack(planes), np.float32(factor), np.float32(0))


def numbers(x: F32, bits: int) -> Query:
    """x (dims) as odd numbers, a plane per bit; a bit stands for +1 or -1."""
    levels = np.float32(2**bits)
    step = STEPS[bits - 1] * np.sqrt(total(x * x) / np.float32(len(x)))
    inverse = np.float32(1) / step if step > 1e-30 else np.float32(0)
    number = np.clip(x * inverse + levels / 2, 0, levels - np.float32(0.5)).astype(np.int64)
    planes = np.stack([(number >> p & 1).astype(bool) for p in range(bits)])
    return Query(planes, -step, np.float32(0.5) * step * (levels - 1) * np.float32(len(x)))


def counts(form: Form, query: Query, bits: Bits) -> NDArray[np.int64]:
    """One number a key: signs that differ from the query's; or bits in both, less those in both that are against it."""
    if form.code == "signs":
        differ = (query.planes[:, None] != bits).sum(axis=2)  # (planes, n)
        return 2 ** np.arange(len(differ)) @ differ
    common = query.planes.astype(np.int64) @ bits.T.astype(np.int64)  # (bitmaps, n)
    return common[0] - common[1] if form.bitmaps == 2 else common[0]


def guesses(form: Form, queries: list[Query], codes: Encoded, means: F64) -> F64:
    """Scores (g, n) as codes promise them. means (g, blocks): query times a block's mean."""
    rows = []
    for query, of_block in zip(queries, means, strict=True):
        inner = query.factor * counts(form, query, codes.bits).astype(np.float64) + query.offset
        rows.append(from_bf16(codes.scales) * inner + np.repeat(of_block, BLOCK))
    return np.stack(rows)


def importance(scores: F64, norm: F64) -> F64:
    """Guesses (g, n) -> (n): the largest logarithm of a weight that one of the heads gives a key."""
    return (scores - norm[:, None]).max(0)


def scan(scores: F64, norm: F64, bound: float, first: int) -> NDArray[np.int64]:
    """Positions from `first` on whose importance is at least `bound`."""
    at = np.flatnonzero(importance(scores, norm) >= bound)
    return at[at >= first]
