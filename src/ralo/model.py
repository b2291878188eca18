"""The forward pass: the same code for one token and for many, for every architecture."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.config import ModelConfig
from ralo.modes.base import LayerSlots
from ralo.pace import Pace
from ralo.rope import RopeTable
from ralo.sequence import Sequence
from ralo.weights import LayerWeights, Norm, Weights

F32 = NDArray[np.float32]

PREFILL_CHUNK = 512  # tokens of a prompt computed together: bounds the memory of activations
STRETCH = _core.TILE_TOKENS  # a prompt that is cut at multiples of it gives the bits of one that is not
FEW = _core.FEW_TOKENS  # as many give together, bit for bit, what each gives alone


class Layer:
    """The two halves of one decoder layer."""

    def __init__(self, cfg: ModelConfig, w: LayerWeights, index: int) -> None:
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


class Model:
    """Weights and how to run them. Holds no state of any text: that is in Sequence."""

    def __init__(self, cfg: ModelConfig, weights: Weights) -> None:
        self.cfg, self.weights = cfg, weights
        self.layers = [Layer(cfg, w, i) for i, w in enumerate(weights.layers)]
        positions = None if weights.positions is None else weights.positions[cfg.position_offset :]
        halves = [(layer.attention, layer.mlp) for layer in self.layers]
        self._final_norm = norm(cfg, weights.final_norm)
        self._core = _core.Decoder(*weights.embed.words(), positions, halves, self._final_norm, weights.head.core)
        self._bytes_read = 0  # counted by the kernels
        self.slots = [LayerSlots() for _ in self.layers]
        self.modes_in_prefill = False
        self.pace: Pace | None = None
        self.verified = False
        self._rope = RopeTable(cfg.rope) if cfg.rope else None

    def use(
        self, slots: list[LayerSlots], in_prefill: bool = False, pace: Pace | None = None, verified: bool = False
    ) -> None:
        """Fills the slots of every layer; empty ones are dense. `in_prefill`: prompts go through them too; `pace`:
        keeps a budget of time for each step; `verified`: what the slots give is a draft, the text is dense's."""
        for layer, s in zip(self.layers, slots, strict=True):
            layer.attention.use(s.qkv, s.o, s.attend, s.qkv_weights, s.o_weights)
            layer.mlp.use(s.up, s.down, s.mlp, s.up_weights, s.down_weights)
        self._core.use(slots[-1].head, slots[-1].head_weights)
        self.slots, self.modes_in_prefill, self.pace, self.verified = slots, in_prefill, pace, verified

    @property
    def has_modes(self) -> bool:
        return any(s.taken for s in self.slots)

    def forward(
        self, tokens: Many[int], seq: Sequence, length: int = 0, exact: bool = True, dense: bool = False
    ) -> F32:
        """Runs tokens that follow `seq` and adds them to it; their final hidden states (T, D).

        `length`: of the whole prompt these tokens are part of, which the angles of dynamic RoPE depend on.
        `exact`: several tokens give what they would give one by one; else their activations may be rounded to bytes.
        `dense`: as if no slot were filled.
        """
        return self._run(tokens, seq, length, exact, dense, None)

    def _run(self, tokens: Many[int], seq: Sequence, length: int, exact: bool, dense: bool, logits: F32 | None) -> F32:
        start, stop = len(seq), len(seq) + len(tokens)
        caches, states = seq.reserve(len(tokens)), None if dense else seq.states
        cos, sin = self.angles(start, stop, length)
        hidden, ids = np.empty((len(tokens), self.cfg.d_model), np.float32), np.array(tokens, np.int64)
        self._bytes_read += sum(self._core.run(ids, caches, start, cos, sin, exact, states, hidden, logits))
        seq.tokens.extend(tokens)
        return hidden

    def angles(self, start: int, stop: int, length: int = 0) -> tuple[F32, F32] | tuple[None, None]:
        """Cosines and sines of positions, where there is a rotary embedding."""
        return self._rope(start, stop, length) if self._rope else (None, None)

    def count(self, read: int) -> None:
        """Bytes that were read outside of this class's own steps."""
        self._bytes_read += read

    def finish(self, x: F32) -> F32:
        """What the last layer gave for one token (1, D padded) -> scores of the next (V)."""
        hidden = np.empty((1, self.cfg.d_model), np.float32)
        self._final_norm.run(x[:, : self.cfg.d_model], hidden)
        out: F32 = self.logits(hidden, dense=True)[0]
        return out

    def logits(self, hidden: F32, dense: bool = False) -> F32:
        """Final hidden states (T, D) -> scores of the next token (T, V)."""
        out = np.empty((len(hidden), self.weights.head.oc), np.float32)
        self._bytes_read += self._core.scores(hidden, dense, out)
        return out[:, : self.cfg.vocab]

    def prefill(self, tokens: Many[int], seq: Sequence, dense: bool = False) -> F32:
        """Runs a prompt in chunks; scores of the token after it (V)."""
        hidden, start, length = np.zeros((0, self.cfg.d_model), np.float32), len(seq), len(seq) + len(tokens)
        dense = dense or not self.modes_in_prefill
        for a, b in pieces(start, length, PREFILL_CHUNK):
            chunk = tokens[a - start : b - start]
            hidden = self.forward(chunk, seq, length, exact=False, dense=dense)
        return self.logits(hidden[-1:], dense).reshape(-1)

    def step(self, token: int, seq: Sequence, dense: bool = False) -> F32:
        """One more token; scores of the next (V)."""
        pace = None if dense else self.pace
        if pace:
            pace.begin()
        logits = self._scores((token,), seq, dense)
        if pace:
            pace.end()
        out: F32 = logits[0]
        return out

    def steps(self, tokens: Many[int], texts: Many[Sequence], dense: Many[bool]) -> F32:
        """One more token each of several texts, which share the reading of weights: scores (N, V), of each text bit for
        bit those of its own `step`. `dense`: those that leave the modes aside."""
        if self.pace:  # its clock is one text's
            return np.stack([self._paced(t, s, d) for t, s, d in zip(tokens, texts, dense, strict=True)])
        return self._steps(tokens, texts, dense)

    def _paced(self, token: int, seq: Sequence, dense: bool) -> F32:
        clock = time.perf_counter()
        logits = self.step(token, seq, dense)
        if not dense:
            self.took(time.perf_counter() - clock)
        return logits

    def _steps(self, tokens: Many[int], texts: Many[Sequence], dense: Many[bool]) -> F32:
        caches, pasts = [seq.reserve(1) for seq in texts], [len(seq) for seq in texts]
        states = [None if d else seq.states for d, seq in zip(dense, texts, strict=True)]
        cos = sin = None
        if self._rope:
            angles = [self._rope(past, past + 1) for past in pasts]
            cos, sin = (np.concatenate(rows) for rows in zip(*angles, strict=True))
        hidden = np.empty((len(tokens), self.cfg.d_model), np.float32)
        logits = np.empty((len(tokens), self.weights.head.oc), np.float32)
        ids = np.array(tokens, np.int64)
        self._bytes_read += sum(self._core.run_each(ids, caches, pasts, cos, sin, states, hidden, logits))
        for token, seq in zip(tokens, texts, strict=True):
            seq.tokens.append(token)
        return logits[:, : self.cfg.vocab]

    def verify(self, tokens: Many[int], seq: Sequence) -> F32:
        """A few tokens (at most FEW) in one dense pass: scores (T, V), bit for bit those of dense steps."""
        return self._scores(tokens, seq, dense=True)

    def _scores(self, tokens: Many[int], seq: Sequence, dense: bool) -> F32:
        logits = np.empty((len(tokens), self.weights.head.oc), np.float32)
        self._run(tokens, seq, 0, True, dense, logits)
        return logits[:, : self.cfg.vocab]

    def took(self, seconds: float) -> None:
        """What the last step took, with all that was done around it."""
        if self.pace:
            self.pace.took(seconds)

    @property
    def nbytes(self) -> int:
        """Weights, and what modes keep of them in forms of their own."""
        return self.weights.nbytes + sum(o.nbytes for s in self.slots for o in s.taken.values())

    @property
    def bytes_read(self) -> int:
        """Weights, keys and values read so far, as the kernels counted them."""
        return self._bytes_read


def pieces(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """How a prompt's tokens [start, stop) are cut: at multiples of `size`. A last few (FEW) alone would be computed in
    another way than a prompt's, so they go with those before them."""
    cuts = [start, *range(start // size * size + size, stop, size), stop]
    if len(cuts) > 2 and cuts[-1] - cuts[-2] <= FEW:
        del cuts[-2]
    return list(pairwise(cuts)) if start < stop else []


class Runner(Protocol):
    """What makes text: a model, a model under guard, or a model with its modes left aside."""

    @property
    def cfg(self) -> ModelConfig: ...
    @property
    def bytes_read(self) -> int: ...
    def prefill(self, tokens: Many[int], seq: Sequence) -> F32: ...
    def step(self, token: int, seq: Sequence) -> F32: ...
    def took(self, seconds: float) -> None:
        """What the last step took, with all that was done around it."""
        ...


class Around:
    """What a runner that stands around a model passes on."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def cfg(self) -> ModelConfig:
        return self.model.cfg

    @property
    def bytes_read(self) -> int:
        return self.model.bytes_read

    def took(self, seconds: float) -> None:
        self.model.took(seconds)


class Dense(Around):
    """A model with its modes left aside: what they are compared with."""

    def prefill(self, tokens: Many[int], seq: Sequence) -> F32:
        return self.model.prefill(tokens, seq, dense=True)

    def step(self, token: int, seq: Sequence) -> F32:
        return self.model.step(token, seq, dense=True)

    def took(self, seconds: float) -> None:
        """Says nothing of the modes' pace."""


def norm(cfg: ModelConfig, weights: Norm) -> _core.Norm:
    """The kernels tell the two norms apart by the bias: a layer norm has one, an RMS norm has none."""
    bias = weights.bias if weights.bias is not None else np.zeros_like(weights.weight)
    return _core.Norm(weights.weight, bias if cfg.norm == "layer" else None, cfg.norm_eps)
