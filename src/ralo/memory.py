"""Memory for weights and caches: large anonymous maps on huge pages, handed out in aligned pieces."""

from __future__ import annotations

import mmap
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64  # one cache line, one AVX-512 vector
CHUNK = 64 << 20  # bytes; what is not used of one is never touched and costs nothing


class Arena:
    """Zeroed arrays out of shared chunks: single matrices are too small for huge pages, many together are not."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._free: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        kind = np.dtype(dtype)
        size = prod(shape) * kind.itemsize
        step = -(-size // ALIGNMENT) * ALIGNMENT
        if step > len(self._free):
            self._free = _chunk(max(step, self._chunk))
        piece, self._free = self._free[:size], self._free[step:]
        return piece.view(kind).reshape(shape)


def _chunk(size: int) -> NDArray[np.uint8]:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared maps get no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
