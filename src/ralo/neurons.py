"""The order of an MLP's neurons: any order gives the same results, one in which winners sit together suits blocks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ralo.formats.tensor import F32, Tensor

Order = NDArray[np.int64]  # (F): which neuron comes at each place


def order_of(winners: NDArray[np.uint8], neurons: int, block: int) -> Order:
    """Neurons in blocks that win together: the most frequent one that is left, and those that win most often with it.

    `winners` (tokens, F / 8) are bits as a profile has them.
    """
    won = np.unpackbits(winners, axis=1, count=neurons).astype(np.float32)  # (tokens, F)
    together = won.T @ won  # (F, F)
    frequency = together.diagonal().copy()
    lift = together / np.maximum(1.0, np.sqrt(np.outer(frequency, frequency)))
    left, out = np.ones(neurons, bool), []
    for first in np.argsort(-frequency, kind="stable"):
        if left[first]:
            near = np.where(left, lift[first], -1.0)
            near[first] = 2.0
            chosen = np.argsort(-near, kind="stable")[: min(block, int(left.sum()))]
            left[chosen] = False
            out.append(np.sort(chosen))
    return np.concatenate(out)


def reorder(found: Mapping[str, Tensor], order: Order) -> dict[str, Tensor]:
    """The tensors of a layer with its neurons in another order: rows of gate and up, columns of down."""
    rows = ("gate", "up", "gate_bias", "up_bias")
    moved: dict[str, Tensor] = {s: Reordered(found[s], order, 0) for s in rows if s in found}
    return {**found, **moved, "down": Reordered(found["down"], order, 1)}


class Reordered:
    """A tensor whose rows or columns come in another order."""

    def __init__(self, inner: Tensor, order: Order, axis: int) -> None:
        self.inner, self.order, self.axis = inner, order, axis
        self.name, self.shape, self.dtype = inner.name, inner.shape, inner.dtype

    def rows(self, start: int, stop: int) -> F32:
        if self.axis == 1:
            return np.ascontiguousarray(self.inner.rows(start, stop)[:, self.order])
        wanted = self.order[start:stop]
        out = np.empty((len(wanted), *self.shape[1:]), np.float32)
        for at in np.argsort(wanted, kind="stable"):  # in the file's order
            out[at] = self.inner.rows(int(wanted[at]), int(wanted[at]) + 1)[0]
        return out

    def stored(self) -> None:
        return None

    def release(self) -> None:
        self.inner.release()
