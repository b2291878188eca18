"""A matrix as a chain of cores (a TT-matrix): applied core by core, brought to one scale, written and read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Cores:
    """W (inputs, outputs), where W[(i_1..i_d), (o_1..o_d)] = G_1[:, i_1, o_1, :] @ .. @ G_d[:, i_d, o_d, :].

    The first digit of an index is the slowest, of inputs and of outputs.
    """

    cores: tuple[F64, ...]  # G_k (r_{k-1}, n_k, m_k, r_k), with r_0 = r_d = 1

    def __post_init__(self) -> None:
        for k, core in enumerate(self.cores):
            if core.ndim != 4 or core.size == 0:
                raise ValueError(f"core.{k} has shape {core.shape}, not (rank, inputs, outputs, rank)")
        if not self.cores:
            raise ValueError("there are no cores")
        ends = [1, *(core.shape[3] for core in self.cores)]
        starts = [*(core.shape[0] for core in self.cores), 1]
        for k, (end, start) in enumerate(zip(ends, starts, strict=True)):
            if end != start:
                raise ValueError(f"the cores do not fit: rank {end} before core.{k}, where it wants {start}")

    @property
    def ranks(self) -> tuple[int, ...]:
        return (1, *(core.shape[3] for core in self.cores))

    @property
    def ins(self) -> tuple[int, ...]:
        return tuple(core.shape[1] for core in self.cores)

    @property
    def outs(self) -> tuple[int, ...]:
        return tuple(core.shape[2] for core in self.cores)

    @property
    def size(self) -> int:
        """How many values are stored."""
        return sum(core.size for core in self.cores)

    def full(self) -> F64:
        """W (inputs, outputs)."""
        w = np.ones((1, 1, 1))
        for core in self.cores:
            _, n, m, r = core.shape
            i, o = w.shape[:2]
            w = np.tensordot(w, core, 1).transpose(0, 2, 1, 3, 4).reshape(i * n, o * m, r)
        return w[:, :, 0]

    def at(self, rows: I64, cols: I64) -> F64:
        """W[rows, cols], element by element."""
        state = np.ones((rows.size, 1))
        digits = zip(np.unravel_index(rows.ravel(), self.ins), np.unravel_index(cols.ravel(), self.outs), strict=True)
        for core, (i, o) in zip(self.cores, digits, strict=True):
            state = np.einsum("er,res->es", state, core[:, i, o])
        return state.reshape(rows.shape)

    def apply(self, x: F64, backwards: bool = False) -> F64:
        """x (T, inputs) -> (T, outputs), core by core, from the last one if `backwards`; W is never formed."""
        tokens, inputs = x.shape
        if inputs != prod(self.ins):
            raise ValueError(f"{inputs} inputs for cores of {prod(self.ins)}")
        before, after = 1, inputs
        for core in self.cores[::-1] if backwards else self.cores:
            a, n, m, b = core.shape
            after //= n  # inputs that are still to come; `before` are the outputs that are done
            if backwards:
                x, shared = x.reshape(tokens, after, n, b, before), (1, 3)
            else:
                x, shared = x.reshape(tokens, before, a, n, after), (0, 1)
            x = np.tensordot(x, core, ((2, 3), shared)).transpose(0, 1, 3, 4, 2)  # what is left of the core comes last
            before *= m
        return x.reshape(tokens, before)

    def normalised(self) -> Cores:
        """The same W by well-conditioned cores of one norm: all but the last have orthogonal columns of one length.

        However far apart the cores' scales were, quantised cores and the values between two steps stay in range.
        """
        parts: list[F64] = []
        carry, log = np.ones((1, 1)), 0.0  # of all that was divided out
        for k, core in enumerate(self.cores):
            part = np.tensordot(carry, core, 1)
            largest = float(np.abs(part).max())
            if largest == 0:
                return Cores(tuple(np.zeros_like(c) for c in self.cores))
            part, log = part / largest, log + np.log(largest)
            if k < len(self.cores) - 1:
                q, carry = np.linalg.qr(part.reshape(-1, part.shape[3]))
                part = q.reshape(*part.shape[:3], -1)
            norm = float(np.linalg.norm(part))
            parts.append(part / norm)
            log += np.log(norm)
        return Cores(tuple(part * np.exp(log / len(parts)) for part in parts))
