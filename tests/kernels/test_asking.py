"""How rows are asked for ahead of being read changes no bit: into which cache, and at which pace."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kernels.test_linear import check, inputs, run, storage
from kernels.test_linear_some import matrix, some

from ralo import _core

SMALL, MEDIUM = (300, 640), (1044, 4096)
LARGE, WIDE = (1044, 8192), (600, 16384)  # of the large ones weights come from memory, 4 MB and more at int4 too
QUANTS = ("f32", "int8", "int4")
READINGS = 3  # some at another pace than the usual one


@pytest.fixture
def usual() -> Iterator[None]:
    before = _core.near_rows()
    yield
    _core.set_near_rows(before)


def results(quant: str, shape: tuple[int, int]) -> list[np.ndarray]:
    """All channels, half of them, a part of the outputs, and halves of the weights."""
    w, _ = matrix(quant, shape)
    x, _, _ = inputs(1, shape[0], shape[1])
    out = [run(quant, shape, 1)[0], np.zeros(shape[1], np.float32), np.zeros(shape[1], np.float32)]
    w.apply_some(x[0], some(shape[0], 0.5), out[1])
    w.apply_part(x[0], out[2], 64, 320)
    if quant == "int8":
        fine = some(shape[0], 0.05)
        for kept in (np.arange(shape[0], dtype=np.uint32), np.union1d(fine, some(shape[0], 0.5)).astype(np.uint32)):
            out.append(np.empty(shape[1], np.float32))
            upper, lower = np.empty((2, shape[0], shape[1] // 2), np.uint8)
            _core.Halves(w, upper, lower).apply(x[0], kept, fine, out[-1])
    return out


@pytest.mark.parametrize("shape", [SMALL, MEDIUM, LARGE, WIDE], ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_every_way_gives_the_same_bits(level, usual, quant, shape):
    found = []
    for nearer in (True, False):
        _core.set_near_rows(nearer)
        assert _core.near_rows() is nearer
        found += [results(quant, shape) for _ in range(READINGS)]
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))
    check(quant, shape, 1, found[0][0][None], False, False)


@pytest.mark.parametrize("quant", ("int8", "int4"))
def test_a_large_matrix_equals_the_reference(level, quant):
    x, _, _ = inputs(1, *LARGE)
    dense = storage(quant, *LARGE)[2]
    whole, half, part = results(quant, LARGE)[:3]
    kept = np.zeros_like(x)
    kept[0, some(LARGE[0], 0.5)] = x[0, some(LARGE[0], 0.5)]
    check(quant, LARGE, 1, half[None], False, False, kept)
    assert np.array_equal(part[64:320], whole[64:320]) and not part[:64].any() and not part[320:].any()
    assert np.abs(whole - dense @ x[0]).max() < 1e-3 * np.abs(whole).max()
