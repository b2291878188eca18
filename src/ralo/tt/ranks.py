"""Shares ranks out among layers and places: high ones where what is missed is felt, within one budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.remake.felt import Key
from ralo.tt.matrix import STEP

UNIT = _core.PAD  # ranks are whole blocks of outputs of the first factor
DENSE = 0  # the rank of a place that keeps its weights


@dataclass(frozen=True)
class Choice:
    """What a place can do: weights that factors of any rank would take, and what they would cost."""

    singular: NDArray[np.float64]  # values of the weighed weights
    kl: float  # that was felt at rank `probe`
    probe: int
    each: int  # weights of one rank
    dense: int  # weights that factors stand in for

    @classmethod
    def of(cls, shape: tuple[int, ...], singular: NDArray[np.float64] | None = None, probe: int = 0) -> Choice:
        """Of a matrix (ic, oc); what was felt is not known yet."""
        return cls(np.zeros(0) if singular is None else singular, 0.0, probe, sum(shape), shape[0] * shape[1])

    @property
    def most(self) -> int:
        """The highest rank that takes less time than what it replaces."""
        return max(0, self.dense - STEP - 1) // self.each // UNIT * UNIT

    def size(self, rank: int) -> int:
        """Weights, the second step counted as some."""
        return rank * self.each + STEP if rank else self.dense

    def cost(self, rank: int) -> float:
        """KL, which goes with the square of what is missed."""
        if rank == DENSE:
            return 0.0
        missed, probed = (float(np.square(self.singular[r:]).sum()) for r in (rank, self.probe))
        return self.kl * missed / max(probed, 1e-30)


def allotted(share: float, choices: Mapping[Key, Choice]) -> dict[Key, int]:
    """A rank for every place, so that `share` of the weights they replace is left; DENSE where none is worth it.

    All start as low as can be; what is left of the budget goes step by step to where it takes most of the cost away.
    """
    ranks = {key: UNIT if c.most >= UNIT else DENSE for key, c in choices.items()}
    left = share * sum(c.dense for c in choices.values()) - sum(c.size(ranks[k]) for k, c in choices.items())

    def gain(key: Key, rank: int) -> float:
        c = choices[key]
        return (c.cost(ranks[key]) - c.cost(rank)) / max(1, c.size(rank) - c.size(ranks[key]))

    while True:
        steps = [
            (key, rank)
            for key, c in choices.items()
            if ranks[key] != DENSE
            for rank in (ranks[key] + UNIT if ranks[key] + UNIT <= c.most else DENSE, DENSE)
            if c.size(rank) - c.size(ranks[key]) <= left
        ]
        if not steps:
            return ranks
        key, rank = max(steps, key=lambda step: gain(*step))
        left -= choices[key].size(rank) - choices[key].size(ranks[key])
        ranks[key] = rank
