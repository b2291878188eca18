"""Rows of more than 8192 outputs are read in parts: the same sums as of narrow ones, whole, by lists and in part."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.test_block import normal, packed
from reference import linear

from ralo import _core

IC = 530  # two blocks of channels that share a step, and a rest that is no whole pass
WIDE = (8256, 12352, 16384)  # a part and a little, three parts and a little, whole parts


@pytest.fixture(scope="module", params=[(quant, oc) for quant in ("int8", "int4") for oc in WIDE], ids=str)
def wide(request):
    quant, oc = request.param
    matrix = packed({"up": normal(oc, IC, seed=oc)}, quant)
    return matrix, linear.unpack(quant, matrix.data, matrix.scales)


def near(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got - want).max() <= 2e-4 * np.abs(want).max()


def test_wide_rows_equal_the_reference(level, threads, wide):
    matrix, dense = wide
    x = normal(1, IC, seed=3)
    near(matrix(x)[0], dense @ x[0] + matrix.bias)


def test_a_list_of_channels_equals_the_reference(level, wide):
    matrix, dense = wide
    x, y = normal(1, IC, seed=3)[0], np.empty(matrix.oc, np.float32)
    for share in (0.1, 0.5, 0.9):
        some = np.flatnonzero(np.random.default_rng(4).random(IC) < share).astype(np.uint32)
        matrix.core.apply_some(x, some, y)
        near(y, dense[:, some] @ x[some] + matrix.bias)
    matrix.core.apply_some(x, np.arange(IC, dtype=np.uint32), y)
    assert np.array_equal(y, matrix(x[None])[0]), "all channels of a list are dense bit for bit"


def test_part_of_the_outputs_has_the_bits_of_the_whole(level, wide):
    matrix, _ = wide
    x, y = normal(1, IC, seed=3)[0], np.zeros(matrix.oc, np.float32)
    whole = matrix(x[None])[0]
    for first, last in ((0, 4096), (64, matrix.oc), (4096, 8192 + 64), (matrix.oc - 64, matrix.oc)):
        matrix.core.apply_part(x, y, first, last)
        assert np.array_equal(y[first:last], whole[first:last])


def test_the_number_of_threads_changes_no_bit(level, wide):
    matrix, _ = wide
    x, before, got = normal(1, IC, seed=3), _core.threads(), []
    for n in (1, 2, 3):
        _core.set_threads(n)
        got.append(matrix(x))
    _core.set_threads(before)
    assert all(np.array_equal(got[0], other) for other in got[1:])
