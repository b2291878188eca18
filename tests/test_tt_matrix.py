"""Products as matrices: what the steps of a train are, how values change places between them, what they stand for."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from tiny_cores import random_cores

from ralo.matrix import Matrix, padded
from ralo.tt.cores import Cores
from ralo.tt.matrix import RANK, FactoredMatrix, Train, orders, step_parts

SHAPES = {  # digits of inputs and outputs, rank: one, two and more cores, ones among the digits
    "one": ((6,), (64,), 1),
    "two": ((4, 6), (8, 24), 3),
    "factors": ((20, 1), (1, 128), 7),
    "factors the other way": ((1, 20), (128, 1), 7),
    "three": ((3, 4, 5), (4, 8, 6), 3),
    "four": ((2, 3, 2, 3), (2, 4, 4, 2), 2),
}
EVERY = pytest.mark.parametrize(("ins", "outs", "rank"), SHAPES.values(), ids=SHAPES)
BOTH = pytest.mark.parametrize("backwards", [False, True])


def plain(values: np.ndarray, parts: dict[str, int]) -> Matrix:
    """A matrix of floats; what is only padding holds something else."""
    out = Matrix.empty("f32", len(values), parts, bias=False)
    out.data.view(np.float32)[:] = 1000
    out.data.view(np.float32)[:, : values.shape[1]] = values
    return out


def matrix_of(cores: Cores, backwards: bool, parts: dict[str, int], bias: np.ndarray | None = None) -> FactoredMatrix:
    train = Train(cores.ins, cores.outs, cores.ranks[1:-1], backwards)
    steps = []
    for k, named in zip(train.order, step_parts(train, parts, rest=False), strict=True):
        core = cores.cores[k].transpose(3, 1, 2, 0) if backwards else cores.cores[k]
        steps.append(plain(core.reshape(train.step(k)), named))
    return FactoredMatrix(prod(cores.ins), parts, train, steps, bias)


def contracted(cores: Cores, train: Train, x: np.ndarray) -> np.ndarray:
    """As the kernel does it, with `orders`: rows through a step, padding behind each row."""
    rows, gathered, to = orders(train)
    for k, n, at in zip(train.order, rows, gathered, strict=True):
        ic, oc = train.step(k)
        core = cores.cores[k].transpose(3, 1, 2, 0) if train.backwards else cores.cores[k]
        taken = x[: n * ic] if at is None else x[at]
        x = np.pad(taken.reshape(n, ic) @ core.reshape(ic, oc), ((0, 0), (0, padded(oc) - oc))).reshape(-1)
    return x if to is None else x[to]


# ---------------------------------------------------------------- trains


@EVERY
@BOTH
def test_orders_contract_core_by_core(ins, outs, rank, backwards):
    cores = random_cores(ins, outs, rank)
    train = Train(ins, outs, cores.ranks[1:-1], backwards)
    x = np.random.default_rng(3).standard_normal(prod(ins))
    np.testing.assert_allclose(contracted(cores, train, x)[: prod(outs)], x @ cores.full(), rtol=1e-9)
    rows, gathered, to = orders(train)
    assert all(at is None or (at.dtype == np.uint32 and len(at) == n * train.step(k)[0]) for k, n, at in
               zip(train.order, rows, gathered, strict=True))  # fmt: skip
    assert to is None or len(to) == prod(outs)


def test_two_factors_change_no_places():
    assert orders(Train.two(20, 128, 7)) == ([1, 1], [None, None], None)
    rows, gathered, to = orders(Train((4, 6), (8, 24), (3,)))
    assert rows == [6, 8] and gathered[0].tolist() == [6 * i + j for j in range(6) for i in range(4)]
    assert gathered[1].tolist() == [64 * j + 3 * m + r for m in range(8) for r in range(3) for j in range(6)]
    assert to.tolist() == [64 * m + n for m in range(8) for n in range(24)]


def test_the_steps_of_a_train():
    train = Train((3, 4, 5), (4, 8, 6), (2, 7))
    assert list(train.order) == [0, 1, 2] and [train.step(k) for k in range(3)] == [(3, 8), (8, 56), (35, 6)]
    back = Train((3, 4, 5), (4, 8, 6), (2, 7), backwards=True)
    assert list(back.order) == [2, 1, 0] and [back.step(k) for k in range(3)] == [(6, 4), (28, 16), (5, 42)]
    two = Train.two(20, 128, 7)
    assert two.is_two and (two.ins, two.outs, two.ranks) == ((20, 1), (1, 128), (7,))
    assert not any(t.is_two for t in (train, Train((20, 1), (1, 128), (7,), True), Train((20, 2), (1, 128), (7,))))


@pytest.mark.parametrize(
    ("ins", "outs", "ranks"),
    [
        ((), (), ()),
        ((4,), (8, 8), ()),
        ((4, 6), (8,), (3,)),
        ((4, 6), (8, 24), ()),
        ((4, 6), (8, 24), (3, 3)),
        ((4, 0), (8, 24), (3,)),
        ((4, 6), (8, -24), (3,)),
        ((4, 6), (8, 24), (0,)),
    ],
)
def test_trains_that_cannot_be(ins, outs, ranks):
    with pytest.raises(ValueError, match="digits and ranks of a tensor train do not fit each other"):
        Train(ins, outs, ranks)


def test_the_parts_of_the_steps():
    parts = {"q": 130, "k": 70, "v": 40}
    two = Train.two(96, 192 + 128, 50)
    assert step_parts(two, parts, rest=False) == [{RANK: 50, "v": 40}, {"q": 130, "k": 70}]
    assert step_parts(Train.two(96, 384, 50), parts, rest=False) == [{RANK: 50}, parts]
    assert step_parts(Train.two(96, 384, 50), parts, rest=True) == [{RANK: 50, **parts}, parts]
    assert list(step_parts(two, parts, rest=False)[1]) == ["q", "k"]
    train = Train((8, 12), (16, 24), (5,))
    assert step_parts(train, parts, rest=False) == [{"core": 80}, {"core": 24}]
    assert step_parts(Train((8, 12), (16, 24), (5,), True), parts, rest=False) == [{"core": 120}, {"core": 16}]


# ---------------------------------------------------------------- matrices


@EVERY
@BOTH
def test_a_matrix_is_what_its_cores_stand_for(ins, outs, rank, backwards):
    cores, oc = random_cores(ins, outs, rank), prod(outs)
    bias = np.random.default_rng(1).standard_normal(oc).astype(np.float32)
    matrix = matrix_of(cores, backwards, {"o": oc}, bias)
    np.testing.assert_allclose(matrix.unpack(), cores.full(), rtol=1e-4, atol=1e-4)
    x = np.random.default_rng(2).standard_normal((3, prod(ins))).astype(np.float32)
    np.testing.assert_allclose(matrix(x), x @ cores.full() + bias, rtol=1e-3, atol=1e-3)
    assert (matrix.kept, matrix.rest, matrix.rank, matrix.quant) == (0, False, rank, "tt")
    assert matrix.replaced == prod(ins) * oc and (matrix.gap, matrix.speedup) == (0, 1)


def test_what_is_kept_beside_the_product():
    rng, parts = np.random.default_rng(5), {"q": 130, "k": 70, "v": 40}
    first, second = rng.standard_normal((96, 128)), rng.standard_normal((50, 320))
    train = Train.two(96, 320, 50)
    one = plain(first, {RANK: 50, "v": 40})
    some = FactoredMatrix(96, parts, train, [one, plain(second, {"q": 130, "k": 70})], None, 0.1, 2.0, 12345)
    assert (some.kept, some.rest, some.rank) == (64, False, 50)
    assert (some.gap, some.speedup, some.replaced) == (0.1, 2.0, 12345)
    want = np.concatenate([first[:, :50] @ second, first[:, 64:]], axis=1)
    np.testing.assert_allclose(some.unpack(), want, atol=1e-4)


def test_a_rest_is_added_to_the_product():
    rng, parts = np.random.default_rng(5), {"gate": 100, "up": 30}
    first, second = rng.standard_normal((40, 64 + 192)), rng.standard_normal((50, 192))
    rest = FactoredMatrix(40, parts, Train.two(40, 192, 50), [plain(first, {RANK: 50, **parts}), plain(second, parts)],
                          None)  # fmt: skip
    assert (rest.kept, rest.rest) == (192, True)
    np.testing.assert_allclose(rest.unpack(), first[:, :50] @ second + first[:, 64:], atol=1e-4)


def test_what_is_stored():
    cores, bias = random_cores((4, 6), (8, 24), 3), np.zeros(192, np.float32)
    matrix = matrix_of(cores, False, {"o": 192}, bias)
    assert set(matrix.arrays()) == {"0.data", "1.data", "bias"} and matrix.arrays()["bias"] is bias
    assert matrix.nbytes == 4 * (4 * 64 + 18 * 64) + bias.nbytes
    assert set(matrix_of(cores, False, {"o": 192}).arrays()) == {"0.data", "1.data"}
    coarse = [Matrix.empty("int4", s.ic, s.parts, bias=False) for s in matrix.steps]
    names = FactoredMatrix(24, {"o": 192}, matrix.train, coarse, None).arrays()
    assert set(names) == {"0.data", "0.scales", "1.data", "1.scales"}


def test_steps_that_do_not_fit():
    cores = random_cores((4, 6), (8, 24), 3)
    good = matrix_of(cores, False, {"o": 192})
    wrong = [
        (good.train, good.steps[::-1], r"core 0 is \(18, 64\), not \(4, 24\)"),
        (Train((4, 6), (8, 24), (4,)), good.steps, r"core 0 is \(4, 64\), not \(4, 32\)"),
        (good.train, good.steps[:1], "zip"),
    ]
    for train, steps, line in wrong:
        with pytest.raises(ValueError, match=line):
            FactoredMatrix(24, {"o": 192}, train, steps, None)
    with pytest.raises(ValueError, match="a step takes what there is"):
        FactoredMatrix(23, {"o": 192}, good.train, good.steps, None)
    with pytest.raises(ValueError, match="outputs do not fit"):
        FactoredMatrix(24, {"o": 128}, good.train, good.steps, None)
