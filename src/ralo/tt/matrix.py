"""A linear map whose weights are a product of smaller ones, applied one after another and never multiplied out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.matrix import F32, Matrix, padded

U32 = NDArray[np.uint32]
STEP = 96 << 10  # weights that could be read in the time that one more step takes
RANK = "rank"  # the part of a first step that the product goes on with


@dataclass(frozen=True)
class Train:
    """Shape of a tensor train: digits of inputs and outputs, core by core, and the ranks between the cores.

    Two factors are the train (ic, 1) x (1, oc). `backwards`: the last core is contracted first.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    ranks: tuple[int, ...]
    backwards: bool = False

    def __post_init__(self) -> None:
        whole = all(n > 0 for n in (*self.ins, *self.outs, *self.ranks))
        if not (whole and len(self.ins) == len(self.outs) == len(self.ranks) + 1 >= 1):
            raise ValueError("digits and ranks of a tensor train do not fit each other")

    @classmethod
    def two(cls, ic: int, oc: int, rank: int) -> Train:
        return cls((ic, 1), (1, oc), (rank,))

    @property
    def is_two(self) -> bool:
        return len(self.ins) == 2 and self.ins[1] == self.outs[0] == 1 and not self.backwards

    @property
    def order(self) -> Sequence[int]:
        """Cores as they are contracted."""
        cores = range(len(self.ins))
        return cores[::-1] if self.backwards else cores

    def step(self, k: int) -> tuple[int, int]:
        """Inputs and outputs of core k as a step: (rank before, n_k) and (m_k, rank after)."""
        left, right = (1, *self.ranks)[k], (*self.ranks, 1)[k]
        before, after = (right, left) if self.backwards else (left, right)
        return before * self.ins[k], self.outs[k] * after


def orders(train: Train) -> tuple[list[int], list[U32 | None], U32 | None]:
    """Rows of a token through every step, where a step's values lie in what came before, and where the outputs lie.

    None: as they lie. What a step gives is padded.
    """
    d = len(train.ins)
    where = np.arange(prod(train.ins)).reshape(1, *train.ins)
    axes = [-1, *range(d)]  # of `where`: -1 the rank, k the input digit k, d + k the output digit k
    rows, gathered = [], list[U32 | None]()
    for k in train.order:
        rest = sorted((a for a in axes if a not in (-1, k)), key=lambda a: (a < d, a % d))
        at = where.transpose([axes.index(a) for a in (*rest, -1, k)])
        shape = at.shape[: len(rest)]
        ic, oc = train.step(k)
        rows.append(prod(shape))
        gathered.append(_unless_plain(at))
        emitted = np.arange(oc).reshape(train.outs[k], oc // train.outs[k])
        where = np.arange(rows[-1]).reshape(*shape, 1, 1) * padded(oc) + emitted
        axes = [*rest, d + k, -1]
        assert ic == at.shape[-1] * at.shape[-2]
    last = where.transpose([axes.index(a) for a in (*range(d, 2 * d), -1)])
    return rows, gathered, _unless_plain(last)


def _unless_plain(at: NDArray[np.int64]) -> U32 | None:
    flat = at.reshape(-1).astype(np.uint32)
    return None if (flat == np.arange(len(flat))).all() else flat


def step_parts(train: Train, parts: Mapping[str, int], rest: bool) -> list[dict[str, int]]:
    """Parts of every step's matrix, in the order of contraction."""
    if not train.is_two:
        return [{"core": train.step(k)[1]} for k in train.order]
    starts = accumulate((padded(n) for n in parts.values()), initial=0)
    product = {name for name, start in zip(parts, starts, strict=False) if start < train.outs[1]}
    kept = {name: n for name, n in parts.items() if rest or name not in product}
    return [{RANK: train.ranks[0], **kept}, {name: n for name, n in parts.items() if name in product}]


class FactoredMatrix(Matrix):
    """Matrices that x goes through one after another. The first parts are the product's; what the first step gives
    beside the rank is kept: parts that are not factored, or what the product misses."""

    core: _core.FactoredMatrix

    def __init__(
        self, ic: int, parts: Mapping[str, int], train: Train, steps: Sequence[Matrix], bias: F32 | None,
        gap: float = 0.0, speedup: float = 1.0, replaced: int = 0,
    ) -> None:  # fmt: skip
        self.train, self.steps = train, tuple(steps)
        self.gap = gap  # share of typical outputs that it misses
        self.speedup = speedup  # over the weights it replaces, as measured when it was packed
        self.replaced = replaced or ic * sum(padded(n) for n in parts.values())  # their bytes
        super().__init__("tt", ic, parts, np.zeros((0, 0), np.uint8), None, bias)

    def _core(self) -> _core.Matrix:
        rows, gathered, to = orders(self.train)
        for k, step in zip(self.train.order, self.steps, strict=True):
            ic, oc = self.train.step(k)
            if step.ic != ic or oc not in (step.parts.get(RANK), sum(step.parts.values()), step.oc):
                raise ValueError(f"core {k} is ({step.ic}, {step.oc}), not ({ic}, {oc})")
        cores = tuple(step.core for step in self.steps)
        return _core.FactoredMatrix(
            self.ic, self.oc, cores, rows, gathered, to, prod(self.train.outs), self.kept, self.bias
        )

    @property
    def kept(self) -> int:
        """Outputs of the first step that are added to the last ones of the whole."""
        first = self.steps[0]
        return first.oc - padded(first.parts[RANK]) if len(first.parts) > 1 else 0

    def arrays(self) -> dict[str, NDArray[Any]]:
        stored = {f"{k}.{name}": array for k, step in enumerate(self.steps) for name, array in step.arrays().items()}
        return stored if self.bias is None else stored | {"bias": self.bias}

    def unpack(self) -> F32:
        """The weights (ic, oc)."""
        y = np.zeros((self.ic, self.oc), np.float32)
        self.core.apply(np.eye(self.ic, dtype=np.float32), y)
        return y if self.bias is None else y - self.bias

    @property
    def rest(self) -> bool:
        """Whether what the product misses is kept beside it."""
        return self.kept == self.oc

    @property
    def rank(self) -> int:
        """The largest."""
        return max(self.train.ranks, default=1)
