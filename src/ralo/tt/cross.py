"""Cores from a few entries of a matrix (TT-cross): fibres through chosen places, and what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod

import numpy as np

from ralo.tt.cores import F64, I64, Cores
from ralo.tt.maxvol import maxvol_rect
from ralo.tt.svd import ROUNDING

Entries = Callable[[I64, I64], F64]  # rows, cols, of one shape -> W[rows, cols]

SAMPLE = 4096  # entries by which two sweeps are compared, and where the first fibres are taken from


def entries_of(w: F64) -> Entries:
    return lambda rows, cols: w[rows, cols]


def tt_cross(
    entries: Entries,
    ins: Sequence[int],
    outs: Sequence[int],
    rank: int,
    maxvol_k: int,
    gap: float,
    sweeps: int = 4,
    seed: int = 0,
) -> Cores:
    """Cores of ranks of at most `rank`, normalised, from `maxvol_k` fibres on either side of every bond.

    Sweeps there and back end when the sampled entries change by less than `gap` of their norm; of all half sweeps the
    one whose sample is nearest to W counts. What neither the sample nor the fibres meet is not seen.
    """
    if not 1 <= rank <= maxvol_k or len(ins) != len(outs) or sweeps < 1:
        raise ValueError(f"rank {rank} from {maxvol_k} fibres of digits {tuple(ins)} x {tuple(outs)}, {sweeps} sweeps")
    rng = np.random.default_rng(seed)
    places = np.stack([rng.integers(prod(sizes), size=SAMPLE) for sizes in (ins, outs)], axis=1)  # (SAMPLE, 2)
    sample = _read(entries, places)
    strides = [np.array((prod(ins[k:]), prod(outs[k:])), np.int64) for k in range(1, len(ins) + 1)]
    modes, far = _modes(ins, outs, strides), _first_fibres(places, sample, strides[:-1], maxvol_k)
    before, least, best = np.full(SAMPLE, inf), inf, None
    for half in range(2 * sweeps):
        back = half % 2 == 1
        chain, near = _sweep(entries, modes[::-1] if back else modes, far, rank, maxvol_k)
        cores = _joined([part.T for part in chain[::-1]] if back else chain, ins, outs)
        far = near[::-1]  # the way back starts from what this one chose
        now = cores.at(places[:, 0], places[:, 1])
        error = float(np.linalg.norm(now - sample))
        if best is None or error < least:
            best, least = cores, error
        if np.linalg.norm(now - before) <= gap * np.linalg.norm(now):
            break
        before = now
    assert best is not None  # there is at least one half sweep
    return best.normalised()


def _joined(chain: list[F64], ins: Sequence[int], outs: Sequence[int]) -> Cores:
    shaped = zip(chain, ins, outs, strict=True)
    return Cores(tuple(part.reshape(part.shape[0], n, m, part.shape[2]) for part, n, m in shaped))


def _read(entries: Entries, places: I64) -> F64:
    """The entries at places (.., 2)."""
    found = np.asarray(entries(places[..., 0], places[..., 1]), np.float64)
    if not np.isfinite(found).all():
        raise ValueError("the matrix is not finite")
    return found


def _modes(ins: Sequence[int], outs: Sequence[int], strides: list[I64]) -> list[I64]:
    """For every core (n * m, 2): how far each of its pairs of digits moves the row and the column.

    A place is the sum of its cores' moves: so the part of it that some cores know is a pair of numbers too.
    """
    digits = zip(ins, outs, strides, strict=True)
    return [np.stack(np.divmod(np.arange(n * m), m), axis=1) * stride for n, m, stride in digits]


def _first_fibres(places: I64, sample: F64, strides: list[I64], count: int) -> list[I64]:
    """For every bond at most `count` places in the cores after it: half of them through the strongest entries."""
    strongest = np.argsort(-np.abs(sample), kind="stable")[: count // 2]
    order = np.concatenate([places[strongest], places])
    fibres = []
    for stride in strides:
        after = order % stride
        _, first = np.unique(after, axis=0, return_index=True)
        fibres.append(after[np.sort(first)[:count]])
    return fibres


def _sweep(entries: Entries, modes: list[I64], far: list[I64], rank: int, count: int) -> tuple[list[F64], list[I64]]:
    """Cores (r, mode, r) in the order of `modes`, and for every bond the places chosen in the cores before it."""
    near, chain, chosen = np.zeros((1, 2), np.int64), [], []
    fit = np.ones((1, 1))  # (r, near): values at the near places -> their coefficients, by least squares
    for mode, after in zip(modes, far, strict=False):  # the last mode has no bond after it
        here = (near[:, None] + mode).reshape(-1, 2)
        basis = _basis(_read(entries, here[:, None] + after), rank)  # (near * mode, r)
        chain.append(np.tensordot(fit, basis.reshape(len(near), len(mode), -1), 1))
        rows = maxvol_rect(basis, min(count, len(basis)))
        near, fit = here[rows], np.asarray(np.linalg.pinv(basis[rows]), np.float64)
        chosen.append(near)
    chain.append((fit @ _read(entries, near[:, None] + modes[-1]))[:, :, None])
    return chain, chosen


def _basis(fibres: F64, rank: int) -> F64:
    """Orthonormal columns that come nearest to the fibres: at most `rank`, and fewer where fewer are needed."""
    u, s, _ = np.linalg.svd(fibres, full_matrices=False)
    return u[:, : max(1, min(rank, np.count_nonzero(s > ROUNDING * s[0])))]
