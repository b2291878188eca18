"""What dense makes of a token, a layer at a time while its text goes on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ralo.matrix import padded
from ralo.model import Model
from ralo.sequence import Sequence

F32 = NDArray[np.float32]


class Layerwise:
    """The dense scores after a token that is already in the text. The text's own keys and values stay as they are."""

    def __init__(self, model: Model, seq: Sequence, at: int) -> None:
        self.model, self.seq, self.at = model, seq, at
        self._cuts, self._done = seq.cuts, 0
        d = model.cfg.d_model
        self._x = np.zeros((1, padded(d)), np.float32)
        self._x[:, :d] = model.weights.embed.rows([seq.tokens[at]])
        if model.weights.positions is not None:
            self._x[:, :d] += model.weights.positions[model.cfg.position_offset + at]

    def holds_for(self, seq: Sequence) -> bool:
        """It is this text, and nothing of it was taken back since."""
        return seq is self.seq and seq.cuts == self._cuts

    def go_on(self) -> F32 | None:
        """One layer more; after the last the scores of the next token (V)."""
        layer, cache = self.model.layers[self._done], self.seq.layers[self._done]
        own = cache.rows(self.at)
        read = layer.attention.run(self._x, cache.core, self.at, *self.model.angles(self.at, self.at + 1))
        cache.put(self.at, own)
        self.model.count(sum(read) + layer.mlp.run(self._x, self.at))
        self._done += 1
        return self.model.finish(self._x) if self._done == len(self.model.layers) else None
