"""y = x W + bias where W is a product: equals the factors one after another, whatever the sizes, tokens and threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from kernels.test_linear import QUANTS, ROUNDINGS
from reference import factors, linear

from ralo import _core
from ralo.matrix import Matrix, padded
from ralo.tt.matrix import FactoredMatrix, Train, step_parts

FEW = _core.FEW_TOKENS


@dataclass(frozen=True)
class Case:
    train: Train
    parts: tuple[tuple[str, int], ...]
    rest: bool = False


ONE, QKV, TWO = (("o", 130),), (("q", 130), ("k", 70), ("v", 40)), (("gate", 100), ("up", 30))
CASES = {
    "two": Case(Train.two(300, 192, 40), ONE),
    "kept": Case(Train.two(96, 192 + 128, 50), QKV),
    "rest": Case(Train.two(96, 128 + 64, 24), TWO, rest=True),
    "train": Case(Train((6, 16), (16, 12), (9,)), TWO),
    "train backwards": Case(Train((6, 16), (16, 12), (9,), backwards=True), TWO),
    "three cores": Case(Train((4, 3, 8), (4, 4, 12), (5, 70)), ONE),
    "three cores backwards": Case(Train((4, 3, 8), (4, 4, 12), (5, 70), backwards=True), ONE),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@cache
def step(quant: str, ic: int, parts: tuple[tuple[str, int], ...], seed: int) -> Matrix:
    """Random weights, also where outputs are only padding."""
    matrix = Matrix.empty(quant, ic, dict(parts), bias=False)
    rows = np.random.default_rng([ic, seed]).standard_normal((matrix.oc, ic)).astype(np.float32)
    linear.pack(quant, rows * np.float32(ic**-0.5), 0, matrix.data, matrix.scales)
    return matrix


def steps(case: Case, quant: str) -> list[Matrix]:
    shapes = zip(case.train.order, step_parts(case.train, dict(case.parts), case.rest), strict=True)
    return [step(quant, case.train.step(k)[0], tuple(p.items()), k) for k, p in shapes]


def made(case: Case, quant: str, bias: np.ndarray | None = None) -> _core.FactoredMatrix:
    ic = int(np.prod(case.train.ins))
    return FactoredMatrix(ic, dict(case.parts), case.train, steps(case, quant), bias).core


def stored(case: Case, quant: str) -> list[np.ndarray]:
    """What the steps hold (ic, oc), in float64."""
    return [linear.unpack(quant, s.data, s.scales).T for s in steps(case, quant)]


def reference(case: Case, x: np.ndarray, dense: list[np.ndarray]) -> np.ndarray:
    train, x = case.train, x.astype(np.float64)
    if train.is_two:
        kept = 0 if len(case.parts) == 1 else 192 if case.rest else 64
        return factors.two(x, *dense, train.ranks[0], kept)
    ranks, cores = (1, *train.ranks, 1), [np.empty(0)] * len(dense)
    for k, w in zip(train.order, dense, strict=True):
        n, m, before, after = train.ins[k], train.outs[k], ranks[k], ranks[k + 1]
        if train.backwards:
            cores[k] = w[:, : m * before].reshape(after, n, m, before).transpose(3, 1, 2, 0)
        else:
            cores[k] = w[:, : m * after].reshape(before, n, m, after)
    return factors.train(x, cores, train.backwards)


def inputs(case: Case, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (T, ic), what y holds before (T, oc), bias (oc)."""
    oc, rng = sum(padded(n) for _, n in case.parts), np.random.default_rng(tokens)
    shapes = ((tokens, int(np.prod(case.train.ins))), (tokens, oc), oc)
    x, y, bias = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, y, bias


def near(case: Case, quant: str, x: np.ndarray, got: np.ndarray, start: np.ndarray | float, exact: bool = True) -> bool:
    """Within what float32 sums may be off by, step after step; coarser where x is rounded beside bytes."""
    dense = stored(case, quant)
    error = np.abs(got - (reference(case, x, dense) + start))
    size = reference(case, np.abs(x), [np.abs(w) for w in dense]) + np.abs(start)
    by_bytes = () if _core.level() == "base" else ("int8", "int4")
    if quant in by_bytes or (not exact and quant in ("int8", "int4")):
        return bool((error <= (0.02 if exact else 0.2) * np.sqrt(np.square(got).mean())).all())
    roundings = sum(len(w) + ROUNDINGS[quant] for w in dense) + 3
    return bool((error <= roundings * 2.0**-24 * size).all())


def run(case: Case, quant: str, tokens: int, bias: bool = False, add: bool = False, exact: bool = True) -> np.ndarray:
    x, y, b = inputs(case, tokens)
    y = y.copy() if add else np.full_like(y, np.nan)
    read = made(case, quant, b if bias else None).apply(x, y, add, exact)
    assert read == sum(s.nbytes for s in steps(case, quant))
    return y


# ---------------------------------------------------------------- the reference, and bits


@EVERY
@pytest.mark.parametrize("quant", QUANTS)
def test_equals_the_reference(level, quant, case):
    for tokens, bias, add in ((1, False, False), (1, True, True), (3, True, False), (3, False, True), (20, True, True)):
        x, y, b = inputs(case, tokens)
        start = (y.astype(np.float64) if add else 0) + (b if bias else 0)
        assert near(case, quant, x, run(case, quant, tokens, bias, add), start), (tokens, bias, add)
    assert near(case, quant, inputs(case, 20)[0], run(case, quant, 20), 0.0)


@EVERY
@pytest.mark.parametrize("quant", QUANTS)
def test_rounded_activations_are_near(level, quant, case):
    for tokens in (3, 20):
        got = run(case, quant, tokens, exact=False)
        assert near(case, quant, inputs(case, tokens)[0], got, 0.0, exact=False)


@EVERY
@pytest.mark.parametrize("quant", QUANTS)
def test_a_few_tokens_get_the_bits_they_get_alone(level, quant, case):
    x, y, bias = inputs(case, FEW)
    w = made(case, quant, bias)
    for add in (False, True):
        alone = y.copy()
        for t in range(FEW):
            w.apply(x[[t]], alone[t : t + 1], add)
        for tokens in (2, 3, FEW):
            together = y[:tokens].copy()
            w.apply(x[:tokens], together, add)
            assert np.array_equal(together, alone[:tokens])


@EVERY
@pytest.mark.parametrize("quant", ["f32", "int4"])
def test_the_same_bits_at_any_number_of_threads(level, threads, quant, case):
    for tokens in (1, 3, 20):
        got = run(case, quant, tokens, bias=True, add=True)
        _core.set_threads(1)
        assert np.array_equal(got, run(case, quant, tokens, bias=True, add=True))
        _core.set_threads(threads)


# ---------------------------------------------------------------- some channels, some outputs, norms


@EVERY
def test_channels_that_are_not_listed_are_zero(level, case):
    (x,), (y,), bias = inputs(case, 1)
    w, size = made(case, "bf16", bias), sum(s.nbytes for s in steps(case, "bf16"))
    for channels in (np.arange(0, len(x), 3), np.arange(len(x)), np.arange(0)):
        some = np.zeros_like(x)
        some[channels] = x[channels]
        for add in (False, True):
            got, want = y.copy(), y[None].copy()
            assert w.apply_some(x, channels.astype(np.uint32), got, add) == size
            w.apply(some[None], want, add)
            assert np.array_equal(got, want[0])


@EVERY
def test_some_outputs(level, case):
    (x,), (y,), bias = inputs(case, 1)
    w, whole = made(case, "int8", bias), np.empty((1, len(y)), np.float32)
    size = w.apply(x[None], whole)
    for o0, o1 in ((0, 64), (64, len(y)), (0, len(y)), (64, 64)):
        got = y.copy()
        assert w.apply_part(x, got, o0, o1) == (size if o1 > o0 else 0)
        assert np.array_equal(got[o0:o1], whole[0, o0:o1])
        assert np.array_equal(got[:o0], y[:o0]) and np.array_equal(got[o1:], y[o1:])


@EVERY
@pytest.mark.parametrize("quant", QUANTS)
def test_norms(level, quant, case):
    ic = int(np.prod(case.train.ins))
    got = np.empty(ic, np.float32)
    made(case, quant, inputs(case, 1)[2]).norms(got)
    want = np.linalg.norm(reference(case, np.eye(ic), stored(case, quant)), axis=1)
    np.testing.assert_allclose(got, want, rtol=1e-3)
