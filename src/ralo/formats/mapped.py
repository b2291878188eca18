"""A file seen through memory: opened once, read in place, and the plain tensors that lie in it."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ralo.errors import FormatError
from ralo.formats.tensor import F32

LFS_POINTER = b"version https://git-lfs.github.com/"

# What numpy makes of each stored dtype; bf16 comes as its bits, and dtypes not here are only listed.
VIEWS: dict[str, np.dtype[np.generic]] = {
    "f64": np.dtype("<f8"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "i64": np.dtype("<i8"),
    "u64": np.dtype("<u8"),
    "i32": np.dtype("<i4"),
    "u32": np.dtype("<u4"),
    "i16": np.dtype("<i2"),
    "u16": np.dtype("<u2"),
    "i8": np.dtype("i1"),
    "u8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
WEIGHTS = ("f32", "f16", "bf16")


class MappedFile:
    """The bytes of a regular file. They are read when touched, so opening costs nothing whatever the size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self.data = memoryview(b"")
        try:
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode):  # asked before opening: opening a pipe would wait for ever
                raise FormatError(path, "is a directory, not a file" if stat.S_ISDIR(mode) else "is not a regular file")
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    self.data = memoryview(self._map)
        except OSError as error:
            raise FormatError(path, f"cannot be opened: {error.strerror or error}") from error
        if self.data[: len(LFS_POINTER)] == LFS_POINTER:
            raise FormatError(path, "is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")

    @property
    def size(self) -> int:
        return len(self.data)

    def release(self, start: int, stop: int) -> None:
        """Drop the pages of bytes [start, stop) from our memory; touching them again reads the file again."""
        if self._map is not None and stop > start and hasattr(self._map, "madvise"):
            first = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)


def read_small(path: Path, limit: int) -> bytes:
    """The whole of a file that has no reason to be large."""
    file = MappedFile(path)
    if file.size > limit:
        raise FormatError(path, f"is {file.size} bytes long; at most {limit} were expected")
    return bytes(file.data)


class StoredTensor:
    """A plain array inside a mapped file. Its bounds were checked by who made it."""

    def __init__(
        self, file: MappedFile, name: str, dtype: str, shape: tuple[int, ...], start: int, nbytes: int
    ) -> None:
        self.file, self.start, self.nbytes = file, start, nbytes
        self.name, self.dtype, self.shape = name, dtype, shape

    def rows(self, start: int, stop: int) -> F32:
        if self.dtype not in WEIGHTS:
            raise FormatError(self.file.path, f"has dtype {self.dtype}; weights are f32, f16 or bf16", self.name)
        if not self.shape:
            raise FormatError(self.file.path, "is a single number and has no rows", self.name)
        part = self._view()[start:stop]
        if self.dtype == "bf16":  # the upper half of a float32
            bits = part.astype(np.uint32)
            bits <<= 16
            return bits.view(np.float32)
        return part.astype(np.float32, copy=not part.flags.aligned)

    def stored(self) -> NDArray[np.generic] | None:
        """None also where the file puts the array at an address that its dtype cannot have; rows() reads it still."""
        if self.dtype not in VIEWS:
            return None
        view = self._view()
        return view if view.flags.aligned else None

    def release(self) -> None:
        self.file.release(self.start, self.start + self.nbytes)

    def _view(self) -> NDArray[np.generic]:
        return np.ndarray(self.shape, VIEWS[self.dtype], buffer=self.file.data, offset=self.start)
