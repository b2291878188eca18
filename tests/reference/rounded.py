"""What prefill rounds where the CPU is faster at it: products of bytes, and the precision of attention in words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from reference import linear

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

LEVELS = {"amx", "avx512vbmi", "avx512"}  # that round; the others stay exact
BYTE_GROUP = 128  # channels that share a scale: of a token, and of an output
PANEL = 64  # outputs whose weights become bytes together
TOO_SMALL = np.float32(1e-30)  # a largest magnitude below this counts as zero
TILE_KEYS = 64  # keys whose values share scales, and whose weights are relative to the largest of them
HALF = 0.51  # of a unit: what rounding costs, and the float32 quotient before it


# ---------------------------------------------------------------- bytes


def groups(x: F32) -> F32:
    """(rows, ic) -> (rows, groups, BYTE_GROUP), zero past ic."""
    n = -(-x.shape[1] // BYTE_GROUP)
    wide = np.zeros((len(x), n * BYTE_GROUP), np.float32)
    wide[:, : x.shape[1]] = x
    return wide.reshape(len(x), n, BYTE_GROUP)


def units(top: F32, limit: int = 127) -> F32:
    """Units in 1, where so many of them are the largest magnitude."""
    return np.where(top < TOO_SMALL, np.float32(0), np.float32(limit) / np.maximum(top, TOO_SMALL))


def byte_rows(x: F32) -> tuple[F64, F64]:
    """Activations (T, ic) as whole numbers (T, groups, BYTE_GROUP) and their scales (T, groups)."""
    x = groups(x)
    top = np.abs(x).max(-1)
    return np.rint(x * units(top)[..., None]).astype(np.float64), (top / np.float32(127)).astype(np.float64)


def half_up(x: F64) -> F64:
    return np.floor(x + 0.5)


def byte_weights(quant: str, data: U8, scales: U16) -> tuple[F64, F64]:
    """The same for weights: (oc, groups, BYTE_GROUP) and (oc, groups). First to words, whose unit is the largest scale
    among the group's channels of PANEL outputs, and from these to bytes."""
    every = linear.scale_of_each(quant, scales).T  # (oc, ic)
    full = 256 if quant == "int8" else 16 * 256
    steps, scale = groups(linear.steps(quant, data).T.astype(np.float32)).astype(np.float64), groups(every)
    panels = np.abs(scale).reshape(-1, PANEL, *scale.shape[1:])
    most = np.repeat(panels.max((1, 3)), PANEL, axis=0)  # (oc, groups)
    share = np.rint(scale * units(most, 32767)[..., None]).astype(np.float64)
    words = half_up(full * steps * share / 2**15)
    top = np.abs(words).max(-1)
    factor = np.floor(np.minimum(127 * 2**15 / np.maximum(top, 1), 32767))
    word = np.float32(2**15 / full * 2**15 / 32767)
    return half_up(words * factor[..., None] / 2**15), (most * (word / factor.astype(np.float32))).astype(np.float64)


def byte_product(quant: str, data: U8, scales: U16, x: F32) -> tuple[F64, F64]:
    """x (T, ic) -> (T, oc), and the sum of the magnitudes of what each group of channels adds to it."""
    (a, a_scale), (b, b_scale) = byte_rows(x), byte_weights(quant, data, scales)
    terms = np.einsum("tgi,ogi->gto", a, b, optimize=True)
    terms *= a_scale.T[:, :, None] * b_scale.T[:, None, :]
    return terms.sum(0), np.abs(terms).sum(0)


def byte_error(dense: F64, x: F32) -> F64:
    """What bytes may cost (T, oc): half a unit of every activation times its weight, and the other way round. Words
    before the bytes are within HALF, where an output's weights are not all far below its panel's."""
    x, w = groups(x).astype(np.float64), groups(dense.astype(np.float32)).astype(np.float64)
    x_unit, w_unit = (np.abs(a).max(-1) / 127 for a in (x, w))
    x_sum, w_sum = (np.abs(a).sum(-1) for a in (x, w))
    own = x_unit @ w_sum.T + x_sum @ w_unit.T
    return HALF * own + HALF**2 * BYTE_GROUP * (x_unit @ w_unit.T) + TOO_SMALL * w_sum.sum(-1)


# ---------------------------------------------------------------- words


def word_limit(padded: int) -> int:
    """The largest word: `padded` products of two of them fit 32 bits."""
    return int(((2**31 - 1) / padded) ** 0.5)


def attend_error(q: F32, k: F64, v: F64, past: int, window: int, scale: float) -> F64:
    """What 16-bit words may change in the attention of tests/reference/attention.py (T, H, E), float32 aside.

    Queries and keys are rounded to word_limit(E padded) of their largest, which a weight feels as a power of e, once
    above and once below the fraction bar; the result moves by that share of the values' spread around it. Weights are
    rounded to 2^-14 of the largest among TILE_KEYS, values to 1 / 2047 of the largest of their column there.
    """
    tokens, heads, e = q.shape
    n, group, limit = past + tokens, heads // k.shape[1], word_limit(-(-e // 16) * 16)
    at, key = past + np.arange(tokens)[:, None], np.arange(n)[None, :]
    seen = (key <= at) & ((key > at - window) if window else True)  # (T, n)
    starts = np.arange(0, n, TILE_KEYS)
    out = np.empty(q.shape)
    for head in range(heads):
        k_head, v_head = k[:n, head // group], v[:n, head // group]  # (n, E)
        q_head = q[:, head].astype(np.float64) * scale
        scores = np.where(seen, q_head @ k_head.T, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)

        (q_unit, q_sum), (k_unit, k_sum) = ((np.abs(a).max(1) / limit, np.abs(a).sum(1)) for a in (q_head, k_head))
        off = HALF * (np.outer(q_unit, k_sum) + np.outer(q_sum, k_unit)) + HALF**2 * e * np.outer(q_unit, k_unit)
        off += 4e-6  # the power of two
        power = 2 * np.where(seen, off, 0).max(1, keepdims=True)  # (T, 1)
        spread = np.sqrt(np.maximum(weights @ v_head**2 - (weights @ v_head) ** 2, 0))

        peak = np.repeat(np.maximum.reduceat(weights, starts, axis=1), TILE_KEYS, axis=1)[:, :n]
        top = np.repeat(np.maximum.reduceat(np.abs(v_head), starts, axis=0), TILE_KEYS, axis=0)[:n]
        rounded = HALF * 2.0**-14 * np.where(seen, peak, 0) @ np.abs(v_head) + HALF / 2047 * weights @ top
        out[:, head] = np.expm1(power) * spread + np.exp(power) * rounded
    return out
