"""Rotary position embedding: cosines and sines per position, for every scaling rule that checkpoints use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo.config import Fields, Rope, short

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

KINDS = {k: k for k in ("default", "linear", "dynamic", "llama3", "yarn", "factors")}


def read_rope(fields: Fields, head_dim: int, max_context: int) -> Rope:
    """From config.json: `rope_theta` beside `rope_scaling`, or both inside `rope_parameters`."""
    both = fields.sub("rope_parameters")
    if both and (kinds := [key for key, value in both.values.items() if isinstance(value, Mapping)]):
        raise fields.fail(f"'rope_parameters' for each kind of layer ({short(kinds[0])}) are not supported")
    scaling = both or fields.sub("rope_scaling")
    theta = (both or fields).float("rope_theta", 1.0, 1e12, fields.float("rope_theta", 1.0, 1e12, 10000.0))
    rotary = (both or fields).float("partial_rotary_factor", 0.0, 1.0, fields.float("partial_rotary_factor", 0, 1, 1.0))
    dim = int(head_dim * rotary)
    if dim < 2 or dim % 2:
        raise fields.fail(f"rotary width {dim} must be even and at least 2")
    if scaling is None:
        return Rope(theta, dim)
    kind = scaling.one_of("rope_type" if "rope_type" in scaling.values else "type", KINDS, "default")
    if kind == "default":
        return Rope(theta, dim)
    return Rope(theta, dim, kind, _params(kind, scaling, dim, max_context))


def _params(kind: str, f: Fields, dim: int, max_context: int) -> dict[str, Any]:
    if kind == "factors":
        factors = f.values.get("factors")
        good = isinstance(factors, list) and len(factors) == dim // 2
        if not good or any(not isinstance(x, float) or not 1e-6 < x < 1e6 for x in factors or []):
            raise f.fail(f"rope factors must be {dim // 2} positive numbers")
        return {"factors": list(factors or [])}
    params: dict[str, Any] = {"factor": f.float("factor", 1e-3, 1e6)}
    original = f.int("original_max_position_embeddings", 1, 1 << 30, max_context)
    params["original"] = float(original)
    if kind == "dynamic":
        params["original"] = float(max_context)
    if kind == "llama3":
        params["low"] = f.float("low_freq_factor", 1e-6, 1e6)
        params["high"] = f.float("high_freq_factor", 1e-6, 1e6)
        if params["high"] == params["low"]:
            raise f.fail("'high_freq_factor' must differ from 'low_freq_factor'")
    if kind == "yarn":
        params["fast"] = f.float("beta_fast", 1e-3, 1e6, 32.0)
        params["slow"] = f.float("beta_slow", 1e-3, 1e6, 1.0)
        params["truncate"] = f.bool("truncate", True)
        params["magnitude"] = _yarn_magnitude(f, params["factor"])
    return params


def _yarn_magnitude(f: Fields, factor: float) -> float:
    given = f.float("attention_factor", 1e-6, 1e6, None)
    if given is not None:
        return given

    def mscale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    a, b = f.float("mscale", 0, 1e6, 0.0), f.float("mscale_all_dim", 0, 1e6, 0.0)
    return mscale(a) / mscale(b) if a and b else mscale(1.0)


def frequencies(rope: Rope, length: int) -> tuple[F64, float]:
    """Angle per position of each pair (dim / 2), and the factor on cos and sin. `length`: tokens so far (dynamic)."""
    p = dict(rope.params or {})
    theta, dim = rope.theta, rope.dim
    if rope.kind == "dynamic" and length > p["original"]:
        theta *= (p["factor"] * length / p["original"] - (p["factor"] - 1)) ** (dim / max(dim - 2, 1))
    inv: F64 = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "linear":
        return inv / p["factor"], 1.0
    if rope.kind == "factors":
        return inv / np.asarray(p["factors"]), 1.0
    if rope.kind == "llama3":
        turns = p["original"] * inv / (2 * math.pi)  # over the original context
        smooth = np.clip((turns - p["low"]) / (p["high"] - p["low"]), 0.0, 1.0)
        return (1 - smooth) * inv / p["factor"] + smooth * inv, 1.0
    if rope.kind == "yarn":
        keep = 1 - _yarn_ramp(p["fast"], p["slow"], dim, theta, p["original"], p["truncate"])
        return inv / p["factor"] * (1 - keep) + inv * keep, p["magnitude"]
    return inv, 1.0


def _yarn_ramp(fast: float, slow: float, dim: int, theta: float, original: float, truncate: bool) -> F64:
    def pair(turns: float) -> float:  # the pair that makes so many turns over the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(max(theta, 1.0 + 1e-9)))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)


class RopeTable:
    """Cosines and sines of the positions seen so far, grown as needed."""

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self._cos = np.zeros((0, rope.dim // 2), np.float32)  # (positions, dim / 2)
        self._sin = self._cos

    def __call__(self, start: int, stop: int, length: int = 0) -> tuple[F32, F32]:
        if self.rope.kind == "dynamic":  # angles depend on the length so far: nothing to keep
            return self._angles(start, stop, max(stop, length))
        if stop > len(self._cos):
            self._cos, self._sin = self._angles(0, max(stop, 2 * len(self._cos), 256), stop)
        return self._cos[start:stop], self._sin[start:stop]

    def _angles(self, start: int, stop: int, length: int) -> tuple[F32, F32]:
        inv, magnitude = frequencies(self.rope, length)
        # float32 angles, as every reference implementation has them: at long range this is what was trained
        angles = np.arange(start, stop, dtype=np.float32)[:, None] * inv.astype(np.float32)[None, :]
        return (np.cos(angles) * magnitude).astype(np.float32), (np.sin(angles) * magnitude).astype(np.float32)
