"""The forward pass: the same code for one token and for many, for every architecture."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.config import ModelConfig
from ralo.matrix import padded
from ralo.rope import RopeTable
from ralo.sequence import Sequence
from ralo.weights import LayerWeights, Norm, Weights

F32 = NDArray[np.float32]

PREFILL_CHUNK = 512  # tokens of a prompt computed together: bounds the memory of activations


class Layer:
    """One decoder layer. `x` is the residual stream (T, D padded), changed in place."""

    def __init__(self, cfg: ModelConfig, weights: LayerWeights, index: int) -> None:
        self.cfg, self.w, self.index = cfg, weights, index
        self.attention_bytes = 0  # of keys and values read so far, counted by the kernel

    def attend(self, x: F32, seq: Sequence, angles: tuple[F32, F32] | None) -> None:
        cfg, w = self.cfg, self.w
        past, cache = len(seq), seq.layers[self.index].core
        qkv = w.qkv(normed(cfg, w.attn_norm, x))  # (T, q|k|v)
        q, k, v = (qkv[:, w.qkv.slices[s]] for s in ("q", "k", "v"))
        if w.q_norm and w.k_norm:
            _core.norm_heads(q, w.q_norm.weight, cfg.norm_eps)
            _core.norm_heads(k, w.k_norm.weight, cfg.norm_eps)
        if angles:
            _core.rope(q, cfg.n_heads, *angles)
            _core.rope(k, cfg.n_kv_heads, *angles)
        cache.store(k, v, past)
        out = np.empty((len(x), cfg.q_width), np.float32)
        window, scale = cfg.windows[self.index], 1 / math.sqrt(cfg.head_dim)
        self.attention_bytes += cache.attend(q, cfg.n_heads, past, window, scale, out)
        w.o.add_to(x, out)

    def mlp(self, x: F32) -> None:
        cfg, w = self.cfg, self.w
        y = w.up(normed(cfg, w.mlp_norm, x))  # (T, gate|up) or (T, up)
        up = y[:, w.up.slices["up"]]
        hidden = np.empty((len(x), cfg.d_ff), np.float32)
        if cfg.gated:
            _core.act(cfg.act, y[:, w.up.slices["gate"]], up, hidden)
        else:
            _core.act(cfg.act, up, None, hidden)
        w.down.add_to(x, hidden)


class Model:
    """Weights and how to run them. Holds no state of any text: that is in Sequence."""

    def __init__(self, cfg: ModelConfig, weights: Weights) -> None:
        self.cfg, self.weights = cfg, weights
        self.layers = [Layer(cfg, w, i) for i, w in enumerate(weights.layers)]
        self._rope = RopeTable(cfg.rope) if cfg.rope else None

    def forward(self, tokens: Many[int], seq: Sequence, length: int = 0) -> F32:
        """Runs tokens that follow `seq` and adds them to it; their final hidden states (T, D).

        `length`: of the whole prompt these tokens are part of, which the angles of dynamic RoPE depend on.
        """
        seq.reserve(len(tokens))
        ids = np.asarray(tokens, np.int64)
        start, stop = len(seq), len(seq) + len(tokens)
        x = np.zeros((len(tokens), padded(self.cfg.d_model)), np.float32)
        x[:, : self.cfg.d_model] = self.weights.embed(ids)
        if self.weights.positions is not None:
            at = self.cfg.position_offset
            x[:, : self.cfg.d_model] += self.weights.positions[at + start : at + stop]
        angles = self._rope(start, stop, length) if self._rope else None
        for layer in self.layers:
            layer.attend(x, seq, angles)
            layer.mlp(x)
        seq.tokens.extend(int(t) for t in tokens)
        return normed(self.cfg, self.weights.final_norm, x)

    def logits(self, hidden: F32) -> F32:
        """Final hidden states (T, D) -> scores of the next token (T, V)."""
        return self.weights.head(hidden)[:, : self.cfg.vocab]

    def prefill(self, tokens: Many[int], seq: Sequence) -> F32:
        """Runs a prompt in chunks; scores of the token after it (V)."""
        hidden, length = np.zeros((0, 0), np.float32), len(seq) + len(tokens)
        for start in range(0, len(tokens), PREFILL_CHUNK):
            hidden = self.forward(tokens[start : start + PREFILL_CHUNK], seq, length)
        return self.logits(hidden[-1:]).reshape(-1)

    def step(self, token: int, seq: Sequence) -> F32:
        """One more token; scores of the next (V)."""
        return self.logits(self.forward((token,), seq)).reshape(-1)

    @property
    def bytes_read(self) -> int:
        """Weights, keys and values read so far, as the kernels counted them."""
        attention = sum(layer.attention_bytes for layer in self.layers)
        return attention + sum(m.bytes_read for m in self.weights.matrices().values())


def normed(cfg: ModelConfig, norm: Norm, x: F32) -> F32:
    """The residual stream (T, D padded) through a norm -> (T, D)."""
    x = x[:, : cfg.d_model]
    out = np.empty(x.shape, np.float32)
    if cfg.norm == "rms":
        _core.norm_rms(x, norm.weight, cfg.norm_eps, out)
    else:
        bias = norm.bias if norm.bias is not None else np.zeros_like(norm.weight)
        _core.norm_layer(x, norm.weight, bias, cfg.norm_eps, out)
    return out
