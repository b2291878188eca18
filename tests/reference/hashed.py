"""Weights from a hash and deltas: what is stored, what it stands for, and how it is chosen."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from reference.linear import bf16_nearest, bf16_value

F32 = NDArray[np.float32]
NO_BLOCK = 0xFFFF
WORD = (1 << 64) - 1


@dataclass
class Stored:
    block: int
    base_scale: float
    blocks: NDArray[np.uint16]  # (ic, fanout)
    bits: NDArray[np.uint32]  # (ic, fanout)
    starts: NDArray[np.uint32]  # (ic + 1)
    values: NDArray[np.uint16]  # bf16

    def kept(self, channel: int) -> list[tuple[int, int]]:
        """First output and bits of every block that a channel keeps."""
        pairs = zip(self.blocks[channel].tolist(), self.bits[channel].tolist(), strict=True)
        return [(block * self.block, bits) for block, bits in pairs if block != NO_BLOCK]


def splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def base(channel: int, output: int, scale: float) -> np.float32:
    top = splitmix64(channel << 32 | output) >> 40  # 24 bits: a float32 holds them
    return np.float32(top / 2**23 - 1) * np.float32(scale)


def weights(s: Stored, oc: int) -> F32:
    """(ic, oc)."""
    out = np.zeros((len(s.blocks), oc), np.float32)
    values = iter(bf16_value(s.values))
    for channel in range(len(out)):
        for first, bits in s.kept(channel):
            for j in range(s.block):
                delta = next(values) if bits >> j & 1 else np.float32(0)
                out[channel, first + j] = base(channel, first + j, s.base_scale) + delta
    return out


def digest(s: Stored, oc: int) -> int:
    """Over the bits of the rebuilt weights of every kept block; sums up over channels."""
    words, total = weights(s, oc).view(np.uint32), 0
    for channel in range(len(words)):
        h = splitmix64(channel)
        for first, _ in s.kept(channel):
            for output in range(first, first + s.block):
                h = splitmix64(h ^ (output << 32 | int(words[channel, output])))
        total += splitmix64(h)
    return total & WORD


def nbytes(s: Stored, channels: list[int], o0: int = 0, o1: int = 1 << 32) -> int:
    """What is read for some channels and outputs [o0, o1): blocks, bits and a start of each, and the deltas there."""
    deltas = sum(bits.bit_count() for c in channels for first, bits in s.kept(c) if o0 <= first < o1)
    return len(channels) * (s.blocks[0].nbytes + s.bits[0].nbytes + s.starts[0].nbytes) + deltas * s.values.itemsize


def build(
    w: F32, real: NDArray[np.bool_], fanout: int, block: int, base_scale: float, eps: float, watermark: int
) -> tuple[Stored, int]:
    """Of weights (ic, oc), of which `real` (oc) are no padding: the storage, and how many deltas were trimmed."""
    there = [b for b in range(w.shape[1] // block) if real[b * block : (b + 1) * block].any()]
    fanout, trimmed = min(fanout, len(there)), 0
    blocks, bits, counts, values = [], [], [], []
    for channel, row in enumerate(w):
        energy = {b: float(np.square(row[b * block : (b + 1) * block].astype(np.float64)).sum()) for b in there}
        kept = sorted(heapq.nlargest(fanout, there, key=energy.__getitem__))
        at = [o for b in kept for o in range(b * block, (b + 1) * block) if real[o]]
        words = {o: bf16_nearest(np.float32(row[o] - base(channel, o, base_scale))) for o in at}
        strength = {o: abs(float(bf16_value(words[o]))) for o in at}
        strong = heapq.nlargest(watermark, [o for o in at if strength[o] >= eps], key=strength.__getitem__)
        trimmed += len(at) - len(strong)
        blocks.append(kept)
        bits.append([sum(1 << o % block for o in strong if o // block == b) for b in kept])
        counts.append(len(strong))
        values += [words[o] for o in sorted(strong)]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    stored = np.array(blocks, np.uint16), np.array(bits, np.uint32), starts, np.array(values, np.uint16)
    return Stored(block, base_scale, *stored), trimmed
