"""Row-wise kernels: norms and activations in float64, rotary embedding bit for bit in float32."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def norm_rms(x: F32, w: F32, eps: float) -> F64:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


def norm_layer(x: F32, w: F32, b: F32, eps: float) -> F64:
    x = x.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * w + b


def norm_heads(x: F32, w: F32, eps: float) -> F64:
    """x (T, heads * e), w (e,): each head by itself."""
    return norm_rms(x.reshape(len(x), -1, len(w)), w, eps).reshape(x.shape)


def rope(x: F32, heads: int, cos: F32, sin: F32) -> F32:
    """x (T, heads * e), cos and sin (T, half): pairs (i, i + half) turn, the rest stays. Bit for bit: float32."""
    half = cos.shape[1]
    out = x.reshape(len(x), heads, -1).copy()
    a, b = out[..., :half].copy(), out[..., half : 2 * half].copy()
    c, s = cos[:, None], sin[:, None]
    out[..., :half], out[..., half : 2 * half] = a * c - b * s, b * c + a * s
    return out.reshape(x.shape)


def sigmoid(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def act(name: str, gate: F32, up: F32 | None = None) -> F64:
    y = ACTS[name](gate.astype(np.float64))
    return y if up is None else y * up


erfc = np.vectorize(math.erfc, otypes=[np.float64])  # 1 - erf, exact in the tail too

ACTS = {
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: x / 2 * erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),  # x/2 (1 + tanh)
}
