"""Linear maps: what packing writes, bit for bit, what the bytes mean, and the product in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

PAD = 64  # outputs are padded to a multiple of this
GROUP = {"f32": 0, "bf16": 0, "int8": 64, "int4": 32}  # outputs that share a scale
BITS = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4}
INT4_STEPS = (8, 8.5, 7.5, 9, 7, 9.5, 10, 10.5)  # scales tried: the largest value / -step


def empty(quant: str, ic: int, oc: int, fill: int = 0) -> tuple[U8, U16 | None]:
    """Storage of a matrix with oc (padded) outputs: bytes (ic, row_bytes), scales (ic, groups)."""
    data = np.full((ic, oc * BITS[quant] // 8), fill, np.uint8)
    return data, np.full((ic, oc // GROUP[quant]), fill * 257, np.uint16) if GROUP[quant] else None


# ---------------------------------------------------------------- bf16


def bf16_nearest(x: F32) -> U16:
    """To nearest, ties to even."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_up(x: F32) -> U16:
    """The bf16 not below x >= 0."""
    return ((np.asarray(x, np.float32).view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)


def bf16_value(h: U16) -> F32:
    return (np.asarray(h, np.uint16).astype(np.uint32) << 16).view(np.float32)


# ---------------------------------------------------------------- packing


def pack(quant: str, rows: F32, o0: int, data: U8, scales: U16 | None) -> bool:
    """Output-major rows (n, ic) into outputs [o0, o0 + n), whole groups; False: a value is not finite as stored."""
    n = len(rows)
    if quant == "f32":
        data.view(np.float32)[:, o0 : o0 + n] = rows.T
        return bool(np.isfinite(rows).all())
    if quant == "bf16":
        data.view(np.uint16)[:, o0 : o0 + n] = bf16_nearest(rows.T)
        return bool(np.isfinite(rows).all() and np.isfinite(bf16_value(bf16_nearest(rows))).all())
    group = GROUP[quant]
    for start in range(0, n, group):
        w = np.zeros((group, rows.shape[1]), np.float32)  # (group, ic); missing rows are zero
        w[: min(group, n - start)] = rows[start : start + group]
        code = scales_int8(w) if quant == "int8" else scales_int4(w)
        scales[:, (o0 + start) // group] = code
        q = quantise(w, bf16_value(code), *((-127, 127) if quant == "int8" else (-8, 7)))
        at = o0 + start
        if quant == "int8":
            data[:, at : at + group] = q.T + 128
        else:
            nibbles = (q + 8).astype(np.uint8).T  # (ic, 32): byte i holds outputs i (low) and i + 16 (high)
            data[:, at // 2 : at // 2 + 16] = nibbles[:, :16] | nibbles[:, 16:] << 4
    return bool(np.isfinite(rows).all())


def scales_int8(w: F32) -> U16:
    """(group, ic) -> (ic): the largest magnitude becomes 127; rounded up, so that it is never clipped."""
    return bf16_up(np.abs(w).max(0) / np.float32(127))


def scales_int4(w: F32) -> U16:
    """(group, ic) -> (ic): of the scales tried, the first with the least squared error."""
    at = np.abs(w).argmax(0)
    top = w[at, np.arange(w.shape[1])] + np.float32(0)  # with its sign; -0 becomes 0
    best, kept = np.full(len(top), np.inf, np.float32), bf16_nearest(top / np.float32(-8))
    for step in INT4_STEPS:
        code = bf16_nearest(top / np.float32(-step))
        scale = bf16_value(code)
        with np.errstate(over="ignore", under="ignore"):
            d = w - quantise(w, scale, -8, 7) * scale
            error = np.zeros(len(top), np.float32)
            for row in d * d:  # one after the other: the sum rounds as the kernel's does
                error = error + row
        better = error < best
        best, kept = np.where(better, error, best), np.where(better, code, kept)
    return kept


def quantise(w: F32, scale: F32, low: int, high: int) -> F32:
    """Multiples of the scale, ties to even; zero where 1 / scale is not finite."""
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        inverse = np.float32(1) / scale
        inverse = np.where(np.isfinite(inverse), inverse, np.float32(0))
        return np.clip(np.rint(w * inverse), np.float32(low), np.float32(high))


# ---------------------------------------------------------------- reading


def unpack(quant: str, data: U8, scales: U16 | None) -> F64:
    """The dense matrix (oc, ic) that the bytes stand for."""
    if quant == "f32":
        values = data.view(np.float32).astype(np.float64)
    elif quant == "bf16":
        values = bf16_value(data.view(np.uint16)).astype(np.float64)
    else:
        values = steps(quant, data) * scale_of_each(quant, scales).astype(np.float64)
    return np.ascontiguousarray(values.T)


def steps(quant: str, data: U8) -> F64:
    """int8 and int4: the whole numbers (ic, oc) that the bytes hold."""
    if quant == "int8":
        return data - 128.0
    blocks = data.reshape(len(data), -1, 16)
    return np.concatenate([blocks & 15, blocks >> 4], axis=2).reshape(len(data), -1) - 8.0


def scale_of_each(quant: str, scales: U16) -> F32:
    """The scale of every weight (ic, oc)."""
    return np.repeat(bf16_value(scales), GROUP[quant], axis=1)


def apply(dense: F64, x: F32, start: F32 | float = 0.0) -> F64:
    """x (T, ic) -> (T, oc); start: the bias, what y held before, or their sum."""
    return x.astype(np.float64) @ dense.T + start


def fixed_point(quant: str, scales: U16 | None, x: F32) -> float:
    """What one output may be off by where x times its scales is rounded to 16 bits (int8 and int4, a few tokens, VNNI).

    A unit is 1 / 32512 of the largest |x||scale|. A channel is off by half a unit times the largest weight; the sums,
    whole numbers below 2^31, are rounded to float32 three times, each relative to 255 * 32512 units a channel.
    """
    if scales is None:
        return 0.0
    unit = float((np.abs(x)[:, None] * np.abs(bf16_value(scales))).max()) / 32512
    return len(x) * unit * ((127 if quant == "int8" else 8) / 2 + 3 * 2.0**-24 * 255 * 32512)


def magnitude(dense: F64, x: F32, start: F32 | float = 0.0) -> F64:
    """Sum of |w||x| behind every output: what rounding errors are relative to."""
    return apply(np.abs(dense), np.abs(x), np.abs(start))
