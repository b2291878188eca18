"""A text on its way through a model, half a layer at a time: what comes to each linear map, and what is given on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.config import ModelConfig
from ralo.matrix import padded
from ralo.model import Layer, norm
from ralo.rope import RopeTable
from ralo.sequence import Sequence as TextState
from ralo.weights import LayerWeights, Norm, Weights

F32 = NDArray[np.float32]
WINDOW = 512  # tokens that see each other


class Windows:
    """Hidden states of every window, which move on from half layer to half layer."""

    def __init__(self, cfg: ModelConfig, weights: Weights, texts: Sequence[Sequence[int]]) -> None:
        self.cfg = cfg
        self.hidden = [self._embedded(weights, tokens) for tokens in texts]
        self.rope = RopeTable(cfg.rope) if cfg.rope else None
        self.text = TextState.empty(cfg, "f32")  # of whichever window is attended to
        self.text.reserve(max(len(x) for x in self.hidden))

    @classmethod
    def of(cls, cfg: ModelConfig, weights: Weights, tokens: Sequence[int]) -> Windows:
        """Of a text that is cut into windows one after another."""
        width = min(WINDOW, cfg.max_context)
        return cls(cfg, weights, [tokens[i : i + width] for i in range(0, len(tokens), width)])

    def _embedded(self, weights: Weights, tokens: Sequence[int]) -> F32:
        x = np.zeros((len(tokens), padded(self.cfg.d_model)), np.float32)
        x[:, : self.cfg.d_model] = weights.embed.rows(tokens)
        if weights.positions is not None:
            first = self.cfg.position_offset
            x[:, : self.cfg.d_model] += weights.positions[first : first + len(tokens)]
        return x

    def normed(self, weights: Norm) -> Iterator[F32]:
        """What comes out of a norm, window by window."""
        norm_of = norm(self.cfg, weights)
        for x in self.hidden:
            out = np.empty((len(x), self.cfg.d_model), np.float32)
            norm_of.run(x[:, : self.cfg.d_model], out)
            yield out

    def attended(self, layer: LayerWeights, index: int) -> Iterator[F32]:
        """What attention gives to `o`."""
        for x in self.hidden:
            tap = _core.Tap(layer.o.ic)
            self._attend(layer, index, x.copy(), tap)
            yield tap.take()

    def attend(self, layer: LayerWeights, index: int) -> None:
        for x in self.hidden:
            self._attend(layer, index, x, None)

    def _attend(self, layer: LayerWeights, index: int, x: F32, tap: _core.Tap | None) -> None:
        half = Layer(self.cfg, layer, index).attention
        half.use(None, tap, None)
        cos, sin = self.rope(0, len(x), len(x)) if self.rope else (None, None)
        half.run(x, self.text.caches[index], 0, cos, sin, True, self.text.states[index])

    def neurons(self, layer: LayerWeights) -> Iterator[F32]:
        """What an MLP gives to `down`."""
        gated, f = self.cfg.gated, self.cfg.d_ff
        for x in self.normed(layer.mlp_norm):
            both = layer.up(x)
            up = both[:, layer.up.slices["up"]]
            out = np.empty((len(x), f), np.float32)
            _core.act(self.cfg.act, both[:, layer.up.slices["gate"]] if gated else up, up if gated else None, out)
            yield out

    def finish(self, layer: LayerWeights) -> None:
        for x, neurons in zip(self.hidden, self.neurons(layer), strict=True):
            x += layer.down(neurons)
