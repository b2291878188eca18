"""Models to heal: tiny ones whose layers were made anew, from factors, from longer trains, or from seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from tiny import write_hf

from ralo.config import ModelConfig
from ralo.loader import open_checkpoint
from ralo.matrix import Matrix, padded
from ralo.proc.generator import tables
from ralo.proc.matrix import Deltas, ProcMatrix
from ralo.remake.quantised import beside, quantised, values
from ralo.remake.values import bf16_words
from ralo.tt.matrix import RANK, FactoredMatrix, Train
from ralo.weights import PLACES, Weights, build

Maker = Callable[[Matrix, str], Matrix]


def tiny_weights(folder: Path, kind: str = "llama", quant: str = "int8", **config) -> tuple[ModelConfig, Weights]:
    return build(open_checkpoint(str(write_hf(folder, kind, **config))), quant)


def made(weights: Weights, maker: Maker, places: tuple[str, ...] = tuple(PLACES)) -> Weights:
    """The same with new matrices at some places of every layer, made from the weights that were there."""
    layers = [layer.using({p: maker(getattr(layer, p), p) for p in places}) for layer in weights.layers]
    return replace(weights, layers=tuple(layers))


def factored(rank: int, quant: str | None = None) -> Maker:
    """Two factors; of q, k and v only q is factored, the others are kept beside."""

    def make(matrix: Matrix, place: str) -> Matrix:
        product = {"q": matrix.parts["q"]} if place == "qkv" else matrix.parts
        return two_factors(matrix, rank, quant or matrix.quant, product, rest=False)

    return make


def with_rest(rank: int) -> Maker:
    """Two factors, and beside them what they miss."""
    return lambda matrix, place: two_factors(matrix, rank, matrix.quant, matrix.parts, rest=True)


def two_factors(matrix: Matrix, rank: int, quant: str, goes: Mapping[str, int], rest: bool) -> Matrix:
    """The best for inputs that are all alike, of the parts that go."""
    weights, product = held(matrix), sum(padded(n) for n in goes.values())
    u, s, vt = np.linalg.svd(weights[:, :product], full_matrices=False)
    first = np.zeros((matrix.ic, padded(rank)), np.float32)
    first[:, :rank] = u[:, :rank] * np.sqrt(s[:rank])
    one, left = quantised(quant, first, {RANK: rank}, None)
    two, right = quantised(quant, np.sqrt(s[:rank, None]) * vt[:rank], goes, None)
    stays = matrix.parts if rest else {name: n for name, n in matrix.parts.items() if name not in goes}
    if stays:
        kept = weights - left[:, :rank] @ right if rest else weights[:, product:]
        one = beside([one, quantised(quant, kept, stays, None)[0]], {RANK: rank, **stays})
    return FactoredMatrix(matrix.ic, matrix.parts, Train.two(matrix.ic, product, rank), [one, two], matrix.bias)


def trains(backwards: bool) -> Maker:
    """Three random cores, which have nothing to do with the weights."""

    def make(matrix: Matrix, place: str) -> Matrix:
        ins, outs = digits(matrix.ic), digits(matrix.oc)
        train, rng, steps = Train(ins, outs, (3, 5), backwards), np.random.default_rng(3), []
        for k in train.order:
            ic, oc = train.step(k)
            wide = np.zeros((ic, padded(oc)), np.float32)
            wide[:, :oc] = rng.standard_normal((ic, oc)) * ic**-0.5
            steps.append(quantised(matrix.quant, wide, {"core": oc}, None)[0])
        return FactoredMatrix(matrix.ic, matrix.parts, train, steps, matrix.bias)

    return make


def from_seeds(matrix: Matrix, place: str) -> Matrix:
    """Random seeds, and deltas at every seventh weight."""
    rng, columns = np.random.default_rng(4), -(-matrix.oc // 128)
    data = rng.integers(0, 256, (matrix.ic, 64 * columns), dtype=np.uint8)
    scales = bf16_words(rng.uniform(2e-3, 4e-3, (matrix.ic, columns)).astype(np.float32))
    at = np.arange(0, matrix.ic * matrix.oc, 7)
    starts = np.searchsorted(at, np.arange(matrix.ic + 1) * matrix.oc).astype(np.uint32)
    deltas = Deltas(starts, (at % matrix.oc).astype(np.uint16), bf16_words(rng.normal(0, 0.1, len(at))))
    return ProcMatrix(matrix.ic, matrix.parts, data, scales, matrix.bias, tables("fitted"), deltas)


def held(matrix: Matrix) -> np.ndarray:
    return np.array(values(matrix.quant, matrix.data, matrix.scales))


def digits(n: int) -> tuple[int, int, int]:
    found = (4, 4, n // 16)
    assert prod(found) == n
    return found
