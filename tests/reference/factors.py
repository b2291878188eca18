"""Linear maps that are products of smaller ones: factor by factor and core by core, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def two(x: F64, first: F64, second: F64, rank: int, kept: int) -> F64:
    """x (T, ic) through first (ic, ranks and what is kept, its last columns), then second (rank, outputs).

    The product is the first outputs, what is kept is added to the last ones: they lie side by side, or over each other.
    """
    between, outputs = x @ first, second.shape[1]
    y = np.zeros((len(x), outputs if kept == outputs else outputs + kept))
    y[:, :outputs] += between[:, :rank] @ second
    y[:, y.shape[1] - kept :] += between[:, between.shape[1] - kept :]
    return y


def train(x: F64, cores: Sequence[F64], backwards: bool) -> F64:
    """x (T, n_1 * .. * n_d) through cores (r, n, m, r'), from the first or from the last one.

    Every core takes its input digit and the rank away, and leaves its output digit and the next rank.
    """
    state = x.reshape(len(x), *(core.shape[1] for core in cores), 1)  # (T, digits, rank)
    for k in reversed(range(len(cores))) if backwards else range(len(cores)):
        core = cores[k].transpose(3, 1, 2, 0) if backwards else cores[k]
        state = np.tensordot(state, core, ((1 + k, state.ndim - 1), (1, 0)))  # (T, other digits, m, rank)
        state = np.moveaxis(state, -2, 1 + k)
    return state.reshape(len(x), -1)
