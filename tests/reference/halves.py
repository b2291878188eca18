"""int8 weights in two halves of four bits, and in tiles: what is written, what a half stands for, a token's product."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from reference import linear
from reference.rounded import HALF

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

BLOCK = 256  # kept channels that share a step, at most, where x is rounded to bytes


def split(data: U8) -> tuple[U8, U8]:
    """Bytes (ic, oc) -> upper and lower halves (ic, oc / 2)."""
    return packed(data >> 4), packed(data & 15)


def join(upper: U8, lower: U8) -> U8:
    """The bytes again."""
    return nibbles(upper) << 4 | nibbles(lower)


def packed(values: U8) -> U8:
    """16 bytes hold 32 outputs: the low nibbles the first 16, the high ones the others."""
    groups = values.reshape(len(values), -1, 2, 16)
    return (groups[:, :, 0] | groups[:, :, 1] << 4).reshape(len(values), -1)


def nibbles(half: U8) -> U8:
    groups = half.reshape(len(half), -1, 16)
    return np.stack([groups & 15, groups >> 4], axis=2).reshape(len(half), -1)


def tiles(data: U8, scales: U16) -> tuple[U8, U16]:
    """Bytes (ic, oc) and scales -> upper halves (tiles, 32 ic) and scales (tiles, ic), ic padded with zeros.

    A tile is 64 outputs. Four channels of it, of 64 those that are 16 apart, are two lines of 64 bytes: byte 4 l + j of
    line m has of the j-th of them output 32 m + l in the low nibble, 32 m + 16 + l in the high one."""
    more = (0, -len(data) % 64), (0, 0)
    upper = np.pad(data >> 4, more)
    parts = upper.reshape(-1, 4, 16, data.shape[1] // 64, 2, 2, 16)  # (block, j, four, tile, m, nibble, l)
    low, high = np.moveaxis(parts.transpose(3, 0, 2, 4, 6, 1, 5), -1, 0)
    return (low | high << 4).reshape(len(low), -1), np.pad(scales, more).T.copy()


def upper_steps(upper: U8) -> F64:
    """Weights without their scales (ic, oc), as the upper halves alone have them: the middle of 16 bytes."""
    return 16.0 * nibbles(upper) + 8 - 128


def lower_steps(lower: U8) -> F64:
    """What the lower halves add to that."""
    return nibbles(lower) - 8.0


def apply(upper: U8, lower: U8, scales: U16, x: F32, kept: U32 | None, fine: U32, start: F32 | float = 0.0) -> F64:
    """x (ic) -> (oc): upper halves of the channels `kept` (None: all), lower ones of `fine`."""
    scale = linear.scale_of_each("int8", scales).astype(np.float64)
    above, below = only(x, kept), only(x, fine)
    return above @ (upper_steps(upper) * scale) + below @ (lower_steps(lower) * scale) + start


def only(x: F32, channels: U32 | None) -> F64:
    """x with zeros elsewhere."""
    out = np.zeros(len(x))
    chosen = slice(None) if channels is None else channels
    out[chosen] = x[chosen]
    return out


def byte_step(scales: U16, x: F32, kept: U32 | None, fine: U32) -> F64:
    """What x times its scale may be off by (ic) where it becomes a byte: the step is up to twice 1 / 127 of the largest
    among channels that are not fine, or 1 / 32512 of the largest fine one, and is rounded to half of it. Blocks may
    start anywhere: a channel shares its step with others less than BLOCK places away."""
    kept = np.arange(len(x), dtype=np.uint32) if kept is None else kept
    whole = np.isin(kept, fine)
    size = largest(scales, x)[kept]
    out = np.zeros(len(x))
    out[kept] = np.where(whole, 0, np.maximum(around(size * ~whole) / 127, around(size * whole) / 32512 / 2))
    return out


def around(size: F64) -> F64:
    """Of every place the largest less than BLOCK away."""
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(size, BLOCK - 1), 2 * BLOCK - 1)
    return windows.max(1) if len(size) else size


def byte_error(step: F64, upper: U8) -> F64:
    """What that may change in the outputs: all of it, or, of many channels, which are rounded up as often as down,
    what is likely."""
    weights = upper_steps(upper)
    return np.minimum(step @ np.abs(weights), 4 * np.sqrt(step**2 @ weights**2))


# ---------------------------------------------------------------- a token and tiles


def apply_tiles(data: U8, scales: U16, x: F32, fine: U32) -> F64:
    """x (ic) -> (oc): whole weights of the channels `fine`, upper halves of the others, beside which x times its scale
    is a byte: 127 stands for the largest of those."""
    share = x.astype(np.float64)[:, None] * linear.scale_of_each("int8", scales)
    whole = np.isin(np.arange(len(x)), fine)[:, None]
    unit = np.where(whole, 0, np.abs(share)).max() / 127 or 1
    steps = np.where(whole, data - 128.0, upper_steps(split(data)[0]))
    return (np.where(whole, share, np.rint(share / unit) * unit) * steps).sum(0)


def tile_step(scales: U16, x: F32, fine: U32) -> F64:
    """What x times its scale may be off by there (ic)."""
    size = largest(scales, x)
    size[fine] = 0
    return np.where(size > 0, HALF * size.max() / 127, 0)


def tile_rounding(scales: U16, x: F32, fine: U32) -> float:
    """What floats may change, likely: a sum of bytes times at most 240, and 120 of each, become a float three times and
    are added once; fine channels are added one by one, up as often as down."""
    size = largest(scales, x)
    one_by_one = 128 * np.sqrt(len(fine) + 1) * np.linalg.norm(size)
    return 4 * 2.0**-24 * float(360 * np.delete(size, fine).sum() + one_by_one)


def tile_error(data: U8, scales: U16, x: F32, fine: U32) -> F64:
    """What an output may be off by (oc)."""
    return byte_error(tile_step(scales, x, fine), split(data)[0]) + tile_rounding(scales, x, fine)


def largest(scales: U16, x: F32) -> F64:
    """Of x times its scales the largest (ic)."""
    return np.abs(x.astype(np.float64)) * np.abs(linear.bf16_value(scales)).max(1)
