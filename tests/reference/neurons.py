"""Neurons one by one: a part of a fused matrix row by row, what the rows mean, and an MLP where some neurons win."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from reference import linear, rows

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]


def unpack(quant: str, data: U8, scales: U16 | None) -> F64:
    """The weights (f, d padded) that rows of neurons and their scales (groups, d padded) stand for."""
    ones = np.full(
        (len(data), data.shape[1] * 8 // linear.BITS[quant] // (linear.GROUP[quant] or 1)), 0x3F80, np.uint16
    )
    values = linear.unpack(quant, data, ones).T  # a neuron's row is packed as a channel's is
    if scales is None:
        return values
    return values * np.repeat(linear.bf16_value(scales), linear.GROUP[quant], axis=0)[: len(data)].astype(np.float64)


def neuron_bytes(quant: str, d: int) -> int:
    """A neuron's row, its inputs padded, and its share of the scales of its group."""
    group = linear.GROUP[quant]
    return -(-d // linear.PAD) * linear.PAD * linear.BITS[quant] // 8 + (2 * d // group if group else 0)


def apply(dense: F64, x: F32, chosen: U32) -> F64:
    """Neurons (f, d), x (d) -> (f): the products of the chosen, NaN where nothing is written."""
    y = np.full(len(dense), np.nan)
    y[chosen] = dense[chosen] @ x.astype(np.float64)
    return y


def top(scores: F64, k: int, block: int = 1) -> U32:
    """The k largest, or those of the k blocks of largest L2 norm; ascending."""
    starts = np.arange(0, len(scores), block)
    strength = np.sqrt(np.add.reduceat(scores**2, starts))
    won = np.sort(np.argsort(-strength, kind="stable")[:k])
    return np.concatenate([np.arange(starts[b], min(starts[b] + block, len(scores))) for b in won]).astype(np.uint32)


def hidden(act: str, gate: F64, up: F64, chosen: U32) -> F64:
    """act(gate) * up of one token where a neuron was chosen, zero elsewhere."""
    h = np.zeros(len(gate))
    h[chosen] = rows.act(act, gate[chosen], up[chosen])
    return h
