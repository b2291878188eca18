"""Rounding with compensation: what one channel's weights lose is made up for by the channels that come after it.

The inputs' second moments say how far one channel can stand in for another. Channels are taken in the order of their
strength, and the error of each is spread over those that are left, so that the products with typical inputs move least
(the optimal-brain-surgeon update, channel by channel).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Rounded = Callable[[int, F32], F32]  # channel, its weights (oc) -> what is stored of them

DAMPING = 0.01  # of the mean second moment, added to all: rarely seen directions are not trusted
BATCH = 64  # channels whose errors are spread to the far ones together


def compensated(weights: F32, moments: F64, store: Rounded) -> None:
    """Stores every channel of `weights` (ic, oc), which are changed on the way, given second moments (ic, ic)."""
    order, spread = _spread(moments)
    left = np.ascontiguousarray(weights[order])
    for first in range(0, len(left), BATCH):
        last = min(first + BATCH, len(left))
        errors = np.empty((last - first, left.shape[1]), np.float32)
        for i in range(first, last):
            error = (left[i] - store(int(order[i]), left[i])) / spread[i, i]
            left[i + 1 : last] -= spread[i, i + 1 : last, None] * error
            errors[i - first] = error
        left[last:] -= spread[first:last, last:].T @ errors


def _spread(moments: F64) -> tuple[NDArray[np.int64], F32]:
    """The order of channels, and an upper triangle whose row i says how channel i's error goes to the later ones."""
    strength = np.diag(moments).copy()
    damped = moments + np.diag(np.where(strength > 0, 0.0, 1.0) + DAMPING * max(float(strength.mean()), 1e-12))
    order = np.argsort(-strength, kind="stable")
    inverse = np.linalg.inv(damped[np.ix_(order, order)])
    return order, np.ascontiguousarray(np.linalg.cholesky(inverse).T, np.float32)
