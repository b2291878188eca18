"""How a matrix's sizes are split into digits, and what one token costs in either direction of the chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

Digits = tuple[int, ...]


def choose(inputs: int, outputs: int, count: int = 2) -> tuple[Digits, Digits]:
    """`count` digits of inputs (smallest first) and of outputs, with products n_k * m_k as alike as they can be.

    Their product is given, so they are most alike where their sum, the values of cores of rank 1, is smallest. Of
    equals, the digits that are most alike themselves. A prime size is one digit and ones.
    """
    if min(inputs, outputs, count) < 1:
        raise ValueError(f"{inputs} x {outputs} has no {count} digits")
    # Cores in another order have the same products: inputs in one order are enough.
    ins = [digits for digits in _splits(inputs, count) if list(digits) == sorted(digits)]
    outs = list(_splits(outputs, count))
    sums = np.array(ins) @ np.array(outs).T
    best = min(np.argwhere(sums == sums.min()).tolist(), key=lambda at: (sum(ins[at[0]]) + sum(outs[at[1]]), at))
    return ins[best[0]], outs[best[1]]


def _splits(size: int, count: int) -> Iterator[Digits]:
    """All ways to write `size` as a product of `count` numbers, in order."""
    if count == 1:
        yield (size,)
        return
    for first in range(1, size + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in _splits(size // first, count - 1))


def cost(ins: Sequence[int], outs: Sequence[int], ranks: Sequence[int], backwards: bool = False) -> int:
    """Multiplications of one token, from the first core to the last or backwards; ranks are r_0 .. r_d."""
    # Before step k the outputs of earlier steps stand beside the inputs of later ones: the state has
    # M_{<k} * r_{k-1} * n_k * N_{>k} values, and each goes into m_k * r_k sums.
    if backwards:
        return cost(ins[::-1], outs[::-1], ranks[::-1])
    return sum(
        prod(outs[:k]) * ranks[k] * ins[k] * prod(ins[k + 1 :]) * outs[k] * ranks[k + 1] for k in range(len(ins))
    )


def cheaper_order(ins: Sequence[int], outs: Sequence[int], ranks: Sequence[int]) -> bool:
    """Whether backwards, from the last core to the first, is the cheaper way."""
    return cost(ins, outs, ranks, backwards=True) < cost(ins, outs, ranks)
