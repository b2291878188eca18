"""Builds the document's form: the blocks of a channel that weigh most, and how far the hash is off there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ralo.errors import RaloError
from ralo.formats.tensor import Tensor
from ralo.matrix import F32, padded
from ralo.proc.generator import splitmix64
from ralo.proc.hashed import BOOL, Hashed, HashedMatrix, packed
from ralo.remake.layer import joined
from ralo.remake.values import bf16_words
from ralo.weights import FUSED

I64 = NDArray[np.int64]

BLOCKS = (8, 16, 32)  # outputs
CHANNELS = 64  # built at a time


def build_hashed(
    found: Mapping[str, Tensor], place: str, fanout: int, block: int, base_scale: float, eps: float, watermark: int
) -> tuple[HashedMatrix, int]:
    """The blocks that weigh most of every channel of a place's sites, and how many of their deltas were trimmed.

    Padding is no weight: blocks of nothing else are not kept, and the others have no deltas there.
    """
    if block not in BLOCKS or fanout < 1 or not 0 <= base_scale < np.inf:
        raise RaloError(
            "hashed weights have blocks of 8, 16 or 32 outputs, at least one a channel, and a scale from 0 on"
        )
    parts = {s: found[s].shape[0] for s in FUSED[place] if s in found}
    weights, bias = joined(found, parts)
    if not np.isfinite(weights).all():
        raise RaloError(f"{place} has weights that are not finite (NaN or infinity): mend the model first")
    real = np.concatenate([np.arange(padded(n)) < n for n in parts.values()]).reshape(-1, block)  # (blocks, block)
    fanout = min(fanout, int(real.any(1).sum()))
    made = [_channels(weights[i : i + CHANNELS], i, real, fanout, base_scale) for i in range(0, len(weights), CHANNELS)]
    blocks, there, values = (np.concatenate(each) for each in zip(*made, strict=True))
    starts = np.concatenate([[0], np.cumsum(there.sum((1, 2)))]).astype(np.uint32)
    hashed = Hashed(block, base_scale, blocks.astype(np.uint16), packed(there), starts, bf16_words(values))
    return HashedMatrix(len(weights), parts, hashed, bias).shed(eps, watermark)


def _channels(weights: F32, first: int, real: BOOL, fanout: int, base_scale: float) -> tuple[I64, BOOL, F32]:
    """Of channels from `first` on: blocks kept (n, fanout), where they have deltas (n, fanout, block), the deltas."""
    w = weights.reshape(len(weights), *real.shape)
    weight = np.where(real.any(1), np.square(w, dtype=np.float64).sum(2), -1)
    blocks = np.sort(np.argsort(-weight, axis=1, kind="stable")[:, :fanout], axis=1)
    channels = np.arange(first, first + len(w))[:, None, None]
    outputs = blocks[..., None] * real.shape[1] + np.arange(real.shape[1])
    deltas = np.take_along_axis(w, blocks[..., None], 1) - base(channels, outputs, base_scale)
    there = real[blocks]
    return blocks, there, deltas[there]


def base(channel: I64, output: I64, scale: float) -> F32:
    """What the hash gives: the top 24 bits as a number in [-1, 1), times the scale."""
    top = splitmix64(channel.astype(np.uint64) << np.uint64(32) | output.astype(np.uint64)) >> np.uint64(40)
    return (top.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)) * np.float32(scale)
