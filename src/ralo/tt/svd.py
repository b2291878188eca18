"""Cores of a matrix that is at hand, by singular values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt

import numpy as np

from ralo.tt.cores import F64, Cores

ROUNDING = 1e-13  # of the norm: singular values that are smaller together are errors of arithmetic


def tt_svd(w: F64, ins: Sequence[int], outs: Sequence[int], rank: int | None = None, gap: float | None = None) -> Cores:
    """Cores of `w` (inputs, outputs), normalised: ranks of at most `rank`, and as small as `gap` of the norm allows.

    The error is at most sqrt(d - 1) times that of the best cores of these ranks.
    """
    if w.shape != (prod(ins), prod(outs)) or len(ins) != len(outs):
        raise ValueError(f"{w.shape} is not of digits {tuple(ins)} x {tuple(outs)}")
    if not np.isfinite(w).all():
        raise ValueError("the matrix is not finite")
    d = len(ins)
    pairs = [axis for k in range(d) for axis in (k, d + k)]
    left = np.asarray(w, np.float64).reshape(*ins, *outs).transpose(pairs)
    cores, r = [], 1
    for n, m in list(zip(ins, outs, strict=True))[:-1]:
        u, s, v = np.linalg.svd(left.reshape(r * n * m, -1), full_matrices=False)
        keep = _keep(s, rank, gap, d)
        cores.append(u[:, :keep].reshape(r, n, m, keep))
        left, r = s[:keep, None] * v[:keep], keep
    cores.append(left.reshape(r, ins[-1], outs[-1], 1))
    return Cores(tuple(cores)).normalised()


def _keep(s: F64, rank: int | None, gap: float | None, d: int) -> int:
    """How many singular values are kept at one of d - 1 cuts, which share the gap."""
    if s[0] == 0:
        return 1
    lost = np.sqrt(np.cumsum(np.square(s[::-1] / s[0])))[::-1]  # if that many are kept
    keep = int(np.count_nonzero(lost > max((gap or 0.0) / sqrt(d - 1), ROUNDING) * lost[0]))
    return max(1, min(keep, keep if rank is None else rank))
