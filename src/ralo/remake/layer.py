"""One layer at a time: the inputs that a text gives, new weights made for them, and on to the next.

Every layer is made for what the layers before it really give, new weights included, so that errors are made up for and
not only added up. In memory are one layer's weights, its inputs' second moments, and the hidden states of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ralo.formats.tensor import Tensor
from ralo.matrix import Matrix, padded
from ralo.remake.windows import Windows
from ralo.weights import LayerWeights

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
M = TypeVar("M", bound=Matrix)


class Refusal(str):
    """Why a place keeps the weights it has."""


def moments_of(inputs: Iterator[F32]) -> F64:
    """Sum of x x^T over all tokens."""
    total: F64 | None = None
    for x in inputs:
        square = (x.T @ x).astype(np.float64)
        total = square if total is None else total + square
    assert total is not None
    return total


def joined(found: Mapping[str, Tensor], parts: Mapping[str, int]) -> tuple[F32, F32 | None]:
    """The weights (ic, oc) of all parts, each padded, and their bias."""
    oc = sum(padded(n) for n in parts.values())
    ic = next(found[s] for s in parts).shape[1]
    weights, at = np.zeros((ic, oc), np.float32), 0
    bias = np.zeros(oc, np.float32) if any(f"{s}_bias" in found for s in parts) else None
    for site, n in parts.items():
        weights[:, at : at + n] = found[site].rows(0, n).T
        found[site].release()
        if bias is not None and f"{site}_bias" in found:
            bias[at : at + n] = found[f"{site}_bias"].rows(0, n).reshape(-1)
        at += padded(n)
    return weights, bias


def build_layer(
    dense: LayerWeights, index: int, windows: Windows, makers: Mapping[str, Callable[[Iterator[F32]], M | Refusal]]
) -> dict[str, M | Refusal]:
    """The matrices of one layer's places that have a maker, each made from the inputs that come there; the windows move
    on through what was made."""
    made: dict[str, M | Refusal] = {}
    layer = dense

    def place(name: str, inputs: Iterator[F32]) -> None:
        nonlocal layer
        if name in makers:
            made[name] = makers[name](inputs)
            layer = layer.using(matrices_of(made))

    place("qkv", windows.normed(layer.attn_norm))
    place("o", windows.attended(layer, index))
    windows.attend(layer, index)
    place("up", windows.normed(layer.mlp_norm))
    place("down", windows.neurons(layer))
    windows.finish(layer)
    return made


def matrices_of(made: Mapping[str, M | Refusal]) -> dict[str, M]:
    return {place: m for place, m in made.items() if not isinstance(m, Refusal)}
