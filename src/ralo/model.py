"""The forward pass: the same code for one token and for many, for every architecture."""

from __future__ import annotations

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

    def __init__(self, cfg: ModelConfig, w: LayerWeights, index: int) -> None:
        self.index = index
        self.attention = _core.Attention(
            norm(cfg, w.attn_norm),
            w.qkv.core,
            w.o.core,
            cfg.n_heads,
            cfg.n_kv_heads,
            cfg.head_dim,
            w.q_norm.weight if w.q_norm else None,
            w.k_norm.weight if w.k_norm else None,
            cfg.windows[index],
        )
        self.mlp = _core.Mlp(norm(cfg, w.mlp_norm), w.up.core, w.down.core, cfg.d_ff, cfg.gated, cfg.act)
        self.bytes_read = 0  # weights, keys and values so far, counted by the kernels

    def run(self, x: F32, seq: Sequence, angles: tuple[F32 | None, F32 | None], exact: bool) -> None:
        self.bytes_read += sum(self.attention.run(x, seq.layers[self.index].core, len(seq), *angles, exact))
        self.bytes_read += self.mlp.run(x, exact)


class Model:
    """Weights and how to run them. Holds no state of any text: that is in Sequence."""

    def __init__(self, cfg: ModelConfig, weights: Weights) -> None:
        self.cfg, self.weights = cfg, weights
        self.layers = [Layer(cfg, w, i) for i, w in enumerate(weights.layers)]
        self._final_norm = norm(cfg, weights.final_norm)
        self._rope = RopeTable(cfg.rope) if cfg.rope else None

    def forward(self, tokens: Many[int], seq: Sequence, length: int = 0, exact: bool = True) -> F32:
        """Runs tokens that follow `seq` and adds them to it; their final hidden states (T, D).

        `length`: of the whole prompt these tokens are part of, which the angles of dynamic RoPE depend on.
        `exact`: several tokens give what they would give one by one; else their activations may be rounded to bytes.
        """
        seq.reserve(len(tokens))
        ids = np.asarray(tokens, np.int64)
        start, stop = len(seq), len(seq) + len(tokens)
        x = np.zeros((len(tokens), padded(self.cfg.d_model)), np.float32)
        x[:, : self.cfg.d_model] = self.weights.embed(ids)
        if self.weights.positions is not None:
            at = self.cfg.position_offset
            x[:, : self.cfg.d_model] += self.weights.positions[at + start : at + stop]
        angles = self._rope(start, stop, length) if self._rope else (None, None)
        for layer in self.layers:
            layer.run(x, seq, angles, exact)
        seq.tokens.extend(int(t) for t in tokens)
        hidden = np.empty((len(tokens), self.cfg.d_model), np.float32)
        self._final_norm.run(x[:, : self.cfg.d_model], hidden)
        return hidden

    def logits(self, hidden: F32) -> F32:
        """Final hidden states (T, D) -> scores of the next token (T, V)."""
        return self.weights.head(hidden)[:, : self.cfg.vocab]

    def prefill(self, tokens: Many[int], seq: Sequence) -> F32:
        """Runs a prompt in chunks; scores of the token after it (V)."""
        hidden, length = np.zeros((0, 0), np.float32), len(seq) + len(tokens)
        for start in range(0, len(tokens), PREFILL_CHUNK):
            hidden = self.forward(tokens[start : start + PREFILL_CHUNK], seq, length, exact=False)
        return self.logits(hidden[-1:]).reshape(-1)

    def step(self, token: int, seq: Sequence) -> F32:
        """One more token; scores of the next (V)."""
        return self.logits(self.forward((token,), seq)).reshape(-1)

    @property
    def bytes_read(self) -> int:
        """Weights, keys and values read so far, as the kernels counted them."""
        return self.weights.head.bytes_read + sum(layer.bytes_read for layer in self.layers)


def norm(cfg: ModelConfig, weights: Norm) -> _core.Norm:
    """The kernels tell the two norms apart by the bias: a layer norm has one, an RMS norm has none."""
    bias = weights.bias if weights.bias is not None else np.zeros_like(weights.weight)
    return _core.Norm(weights.weight, bias if cfg.norm == "layer" else None, cfg.norm_eps)
