"""The document's own form: a channel keeps some blocks of outputs, a weight in them is a hash and a delta.

Idea: what a hash gives need not be stored; where it is off, a bf16 delta puts it right, unless it is too small (eps) or
the channel has too many (watermark). Cost: 6 bytes a block, 4 a channel, 2 a delta. Limits: a hash says nothing about a
weight, so without its delta a weight is noise of base_scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.matrix import F32, U16, Matrix
from ralo.proc.matrix import U32
from ralo.remake.values import bf16_values

BOOL = NDArray[np.bool_]

BITS = 32  # room in a block's bitmap


@dataclass(frozen=True)
class Hashed:
    """What is stored of the weights; the deltas of channel i are [starts[i], starts[i + 1]), by ascending output."""

    block: int  # outputs
    base_scale: float
    blocks: U16  # (ic, fanout) ascending; NO_BLOCK: none
    bits: U32  # (ic, fanout): the outputs of a block that have a delta
    starts: U32  # (ic + 1)
    values: U16  # bf16

    def shed(self, eps: float, watermark: int) -> tuple[Hashed, int]:
        """Without deltas below eps, and with at most `watermark` a channel, the strongest; how many were trimmed."""
        strength = np.abs(bf16_values(self.values))
        kept = strength >= eps
        for i in np.flatnonzero(np.diff(self.starts) > watermark):
            channel = slice(self.starts[i], self.starts[i + 1])
            order = np.argsort(-strength[channel], kind="stable")  # of equal ones the first stays
            kept[channel][order[watermark:]] = False
        there = unpacked(self.bits)
        there[there] = kept
        before = np.concatenate([[0], np.cumsum(kept)]).astype(np.uint32)
        left = replace(self, bits=packed(there), starts=before[self.starts], values=self.values[kept])
        return left, len(kept) - len(left.values)


class HashedMatrix(Matrix):
    """Some blocks of outputs a channel, whose weights are a hash and deltas."""

    core: _core.HashedMatrix

    def __init__(self, ic: int, parts: Mapping[str, int], hashed: Hashed, bias: F32 | None) -> None:
        self.hashed = hashed
        super().__init__("hashed", ic, parts, hashed.blocks.view(np.uint8), None, bias)

    def _core(self) -> _core.Matrix:
        h = self.hashed
        return _core.HashedMatrix(
            self.ic, self.oc, h.block, h.base_scale, h.blocks, h.bits, h.starts, h.values, self.bias
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        h = self.hashed
        stored: dict[str, NDArray[Any]] = {"blocks": h.blocks, "bits": h.bits, "starts": h.starts, "values": h.values}
        return stored if self.bias is None else stored | {"bias": self.bias}

    def unpack(self) -> F32:
        """The weights (ic, oc)."""
        out = np.empty((self.ic, self.oc), np.float32)
        self.core.unpack(out)
        return out

    @property
    def base_scale(self) -> float:
        return self.hashed.base_scale

    @property
    def bits(self) -> float:
        """Of memory, a weight."""
        return 8 * self.nbytes / (self.ic * sum(self.parts.values()))

    @property
    def fanout(self) -> float:
        """Blocks that a channel keeps, on average."""
        return float((self.hashed.blocks != _core.NO_BLOCK).sum(1).mean())

    def digest(self) -> str:
        """Stands for the rebuilt weights: the same on every CPU and with any number of threads."""
        return f"{self.core.digest():016x}"

    def shed(self, eps: float, watermark: int) -> tuple[HashedMatrix, int]:
        """With fewer deltas; how many were trimmed."""
        left, trimmed = self.hashed.shed(eps, watermark)
        return (HashedMatrix(self.ic, self.parts, left, self.bias), trimmed) if trimmed else (self, 0)


def unpacked(bits: U32) -> BOOL:
    """(ic, fanout) -> (ic, fanout, 32)."""
    octets = bits.astype("<u4").view(np.uint8).reshape(*bits.shape, BITS // 8)
    return np.unpackbits(octets, axis=-1, bitorder="little").view(np.bool_)


def packed(there: BOOL) -> U32:
    """(ic, fanout, 32 or fewer) -> (ic, fanout)."""
    whole = np.zeros((*there.shape[:2], BITS), np.bool_)
    whole[..., : there.shape[2]] = there
    found: U32 = np.packbits(whole, axis=-1, bitorder="little").view("<u4")[..., 0].astype(np.uint32)
    return found
