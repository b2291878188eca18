"""Tiles belong to a thread, and others in the process may have shaped theirs before ralo multiplies on it."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from test_matmul_bytes import packed, product

from ralo import _core

LOAD, STORE = b"\xc4\xe2\x78\x49\x07\xc3", b"\xc4\xe2\x79\x49\x07\xc3"  # ldtilecfg [rdi]; ret, and sttilecfg
SHAPE = 64  # bytes


class Instruction:
    """One instruction as a function of an address."""

    def __init__(self, code: bytes) -> None:
        self.page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self.page.write(code)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.page))
        self.run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(start)


def shaped(rows: tuple[int, ...]) -> np.ndarray:
    """Tiles of so many rows of 64 bytes."""
    shape = np.zeros(SHAPE, np.uint8)
    shape[0] = 1
    for i, n in enumerate(rows):
        shape[16 + 2 * i], shape[48 + i] = 64, n
    return shape


@pytest.mark.skipif("amx" not in _core.levels(), reason="no AMX here")
@pytest.mark.parametrize("before", [shaped((3, 5, 16)), np.zeros(SHAPE, np.uint8)], ids=["shaped", "none"])
def test_a_product_leaves_the_tiles_as_they_were(any_level, before):
    rng = np.random.default_rng(0)
    w, _ = packed("int8", rng.standard_normal((128, 256)).astype(np.float32))
    x = rng.standard_normal((37, 256)).astype(np.float32)
    load, store = Instruction(LOAD), Instruction(STORE)
    after, none = np.empty(SHAPE, np.uint8), np.zeros(SHAPE, np.uint8)
    load.run(before.ctypes.data)
    product(w, x, 128)
    store.run(after.ctypes.data)
    load.run(none.ctypes.data)
    assert np.array_equal(after, before)
