"""Single rows of int8 weights times x, and a matrix with inputs and outputs in each other's place."""

from __future__ import annotations

import numpy as np
import pytest

from ralo import _core
from ralo.matrix import Matrix
from ralo.memory import Arena
from ralo.remake.values import values


def packed(rows: np.ndarray, quant: str = "int8") -> Matrix:
    out = Matrix.empty(quant, rows.shape[1], {"part": len(rows)}, False)
    _core.pack(quant, rows, out.oc, 0, out.data, out.scales)
    return out


def weights_of(matrix: Matrix) -> np.ndarray:
    return values(matrix.quant, matrix.data, matrix.scales)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 384, 640])
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 300])
def test_chosen_rows(level, threads, width, count):
    rng = np.random.default_rng(width + count)
    m = packed(rng.standard_normal((width, 300)).astype(np.float32))
    x = rng.standard_normal(m.oc).astype(np.float32)
    chosen = np.sort(rng.permutation(300)[:count]).astype(np.uint32)
    y = np.full(300, 7.0, np.float32)
    read = m.core.row_dots(x, chosen, y)
    assert read == count * (m.oc + 2 * m.oc // 64)
    want = weights_of(m).astype(np.float64) @ x
    np.testing.assert_allclose(y[chosen], want[chosen], rtol=0, atol=1e-5 * np.abs(want).max())
    assert (np.delete(y, chosen) == 7.0).all()


def test_a_row_is_the_same_whatever_is_chosen_beside_it(level, threads):
    rng = np.random.default_rng(0)
    m = packed(rng.standard_normal((640, 200)).astype(np.float32))
    x, every, one = rng.standard_normal(m.oc).astype(np.float32), np.zeros(200, np.float32), np.zeros(200, np.float32)
    m.core.row_dots(x, np.arange(200, dtype=np.uint32), every)
    for i in (0, 7, 199):
        m.core.row_dots(x, np.array([i], np.uint32), one)
        assert one[i] == every[i]


@pytest.mark.parametrize("shape", [(5, 7), (64, 64), (130, 300), (97, 65)])
def test_turned(shape, monkeypatch):
    rng = np.random.default_rng(1)
    m = packed(rng.standard_normal(shape).astype(np.float32))  # outputs, inputs
    for chunk in (16 << 20, 1):  # rows at once
        monkeypatch.setattr("ralo.matrix.CHUNK_BYTES", chunk)
        other = m.turned("part", Arena())
        assert (other.quant, other.ic, other.parts) == ("int8", shape[0], {"part": shape[1]})
        before, after = weights_of(m)[:, : shape[0]], weights_of(other)[:, : shape[1]]
        np.testing.assert_allclose(after.T, before, rtol=0, atol=np.abs(before).max() / 127 * 0.51)
        assert (weights_of(other)[:, shape[1] :] == 0).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x, y: m.core.row_dots(x[:-1], np.array([0], np.uint32), y),
        lambda m, x, y: m.core.row_dots(x, np.array([0], np.uint32), y[:-1]),
        lambda m, x, y: m.core.row_dots(x, np.array([9], np.uint32), y),
        lambda m, x, y: m.core.row_dots(x, np.array([1, 1], np.uint32), y),
        lambda m, x, y: packed(np.ones((5, 9), np.float32), "bf16").core.row_dots(x, np.array([0], np.uint32), y),
    ],
)
def test_wrong_calls_are_refused(call):
    m = packed(np.ones((5, 9), np.float32))
    with pytest.raises(ValueError):
        call(m, np.ones(m.oc, np.float32), np.ones(9, np.float32))
