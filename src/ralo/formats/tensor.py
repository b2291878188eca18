"""One tensor of a checkpoint as the packer sees it: a shape, and float32 rows on demand, whatever the file holds."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


class Tensor(Protocol):
    """A tensor that is read in pieces, so that a checkpoint is never in memory twice."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str:
        """f32, f16, bf16 for plain floats; the GGUF type name in lower case (q4_k, ...) for quantised blocks."""
        ...

    def rows(self, start: int, stop: int) -> F32:
        """Rows [start, stop) of the first axis as float32 (stop - start, *shape[1:]); a copy or a view."""
        ...

    def stored(self) -> NDArray[np.generic] | None:
        """The whole tensor as the file holds it, memory-mapped, if it is plain floats (bf16 as uint16); else None."""
        ...

    def release(self) -> None:
        """Tell the system that the file's pages read so far are not needed: they stop counting as our memory."""
        ...


def read(tensor: Tensor) -> F32:
    """The whole tensor as an owned float32 array: for the small ones (norms, biases)."""
    values = np.array(tensor.rows(0, tensor.shape[0]), dtype=np.float32)
    tensor.release()
    return values


class Transposed:
    """A matrix seen with its two axes swapped (GPT-2 stores its linear maps input-first)."""

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner
        self._values: F32 | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape[::-1]

    @property
    def dtype(self) -> str:
        return self.inner.dtype

    def rows(self, start: int, stop: int) -> F32:
        if self._values is None:
            self._values = self.inner.rows(0, self.inner.shape[0])
        return np.ascontiguousarray(self._values[:, start:stop].T)

    def stored(self) -> None:
        return None

    def release(self) -> None:
        self._values = None
        self.inner.release()


def transpose(tensor: Tensor) -> Tensor:
    """The matrix with its axes swapped; a swap of a swap is the matrix itself, and costs nothing."""
    return tensor.inner if isinstance(tensor, Transposed) else Transposed(tensor)


class RowSlice:
    """Rows [start, stop) of a larger tensor: one part of a fused matrix."""

    def __init__(self, inner: Tensor, start: int, stop: int) -> None:
        self.inner, self.start, self.stop = inner, start, stop

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *rest = self.inner.shape or (0,)
        return max(min(self.stop, rows) - self.start, 0), *rest  # the rows that are there: a short matrix is noticed

    @property
    def dtype(self) -> str:
        return self.inner.dtype

    def rows(self, start: int, stop: int) -> F32:
        return self.inner.rows(self.start + start, self.start + stop)

    def stored(self) -> NDArray[np.generic] | None:
        whole = self.inner.stored()
        return None if whole is None else whole[self.start : self.stop]

    def release(self) -> None:
        self.inner.release()
