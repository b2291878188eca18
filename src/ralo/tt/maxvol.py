"""Rows of a tall matrix that span the largest volume: what all its rows are best interpolated from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

NEAR = 1.05  # no row is made up of the chosen ones with a larger coefficient


def maxvol(a: F64) -> I64:
    """(r) rows of `a` (n, r) whose determinant no single exchange makes larger by more than NEAR.

    It is at least the largest one over (NEAR sqrt(r))^r. Where the columns depend on each other every determinant is
    zero; the rows are then those of an orthonormal basis that holds them, and still interpolate all of `a`.
    """
    rows, _ = _swapped(_basis(a))
    return rows


def maxvol_rect(a: F64, k: int) -> I64:
    """(k) rows, those of maxvol and then one by one the row that makes the volume det(S^T S)^(1/2) grow most."""
    n, r = a.shape
    if not r <= k <= n:
        raise ValueError(f"{k} rows asked for of a matrix of {n} x {r}")
    rows, made_of = _swapped(_basis(a))
    inverse = np.eye(r)  # of S^T S, in the coordinates of the first r rows
    gain = np.square(made_of).sum(1)  # the squared volume grows 1 + gain times
    gain[rows] = -1.0
    chosen = rows.tolist()
    while len(chosen) < k:
        i = int(gain.argmax())
        grown, toward = 1 + gain[i], inverse @ made_of[i]
        chosen.append(i)
        inverse -= np.outer(toward, toward) / grown
        gain -= np.square(made_of @ toward) / grown
        gain[chosen] = -1.0
    return np.array(chosen, np.int64)


def _basis(a: F64) -> F64:
    """Orthonormal columns (n, r): the same rows are best, also where the columns of `a` depend on each other."""
    n, r = a.shape
    if n < r:
        raise ValueError(f"a matrix of {n} x {r} is not tall")
    if not np.isfinite(a).all():
        raise ValueError("the matrix is not finite")
    return np.linalg.qr(np.asarray(a, np.float64))[0]


def _swapped(basis: F64) -> tuple[I64, F64]:
    """Rows after the last exchange, and what every row is made of (n, r): coefficients of the chosen ones."""
    rows = _pivots(basis)
    made_of = np.asarray(np.linalg.solve(basis[rows].T, basis.T).T, np.float64)
    while rows.size:
        i, j = divmod(int(np.abs(made_of).argmax()), rows.size)
        if abs(made_of[i, j]) <= NEAR:  # else row i in place of the j-th makes the volume that much larger
            break
        change = made_of[i] / made_of[i, j]
        change[j] -= 1 / made_of[i, j]
        made_of -= np.outer(made_of[:, j], change)
        rows[j] = i
    return rows, made_of


def _pivots(basis: F64) -> I64:
    """Where Gaussian elimination finds its largest elements, column by column."""
    left, rows = basis.copy(), []
    for k in range(basis.shape[1]):
        i = int(np.abs(left[:, k]).argmax())
        left -= np.outer(left[:, k] / left[i, k], left[i])  # row i becomes zero: it is not found again
        rows.append(i)
    return np.array(rows, np.int64)
