"""A packed linear map: input-channel-major weights in one precision, one or more named parts side by side."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.formats.tensor import Tensor
from ralo.memory import Arena
from ralo.remake.values import values

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

QUANTS = ("f32", "bf16", "int8", "int4")
HALVED = "int8"  # whose weights can be read by halves
CHUNK_BYTES = 16 << 20  # of float32 rows in memory while packing


def padded(n: int) -> int:
    return -(-n // _core.PAD) * _core.PAD


class Matrix:
    """y = x W + bias. Each part (q, k, v of one fused matrix) starts at a multiple of PAD outputs."""

    def __init__(
        self, quant: str, ic: int, parts: Mapping[str, int], data: U8, scales: U16 | None, bias: F32 | None
    ) -> None:
        self.quant, self.ic, self.parts = quant, ic, dict(parts)
        self.data, self.scales, self.bias = data, scales, bias
        starts = list(accumulate((padded(n) for n in parts.values()), initial=0))
        self.oc = starts[-1]  # outputs, padding included
        self.slices = {name: slice(at, at + n) for (name, n), at in zip(parts.items(), starts, strict=False)}
        self.bytes_read = 0  # by all calls so far, counted by the kernel
        _ = self.core  # refuses arrays that do not fit

    def halves(self, arena: Arena) -> _core.Halves:
        """int8 weights once more, in two halves of four bits."""
        upper, lower = (arena.zeros((self.ic, self.oc // 2), np.uint8) for _ in range(2))
        return _core.Halves(self.core, upper, lower)

    def tiles(self, arena: Arena, part: str | None = None) -> _core.Tiles:
        """The upper halves of int8 weights, or of a part, once more: in tiles that are read from end to end."""
        start, n = (0, self.oc) if part is None else (self.slices[part].start, padded(self.parts[part]))
        tiles, width = n // _core.PAD, padded(self.ic)
        data, scales = arena.zeros((tiles, width * _core.PAD // 2), np.uint8), arena.zeros((tiles, width), np.uint16)
        return _core.Tiles(self.core, start, data, scales)

    def turned(self, part: str, arena: Arena) -> Matrix:
        """An int8 part with inputs and outputs in each other's place, so that one output's weights lie side by side;
        rounded anew, since they share other scales then."""
        out = Matrix.empty(self.quant, self.parts[part], {part: self.ic}, False, arena)
        step = max(_core.PAD, CHUNK_BYTES // (4 * self.oc) // _core.PAD * _core.PAD)
        for at in range(0, self.ic, step):
            rows = slice(at, at + step)
            assert self.scales is not None
            chunk = values(self.quant, self.data[rows], self.scales[rows])[:, self.slices[part]]
            _core.pack(self.quant, np.ascontiguousarray(chunk), out.oc, at, out.data, out.scales)
        return out

    @cached_property
    def core(self) -> _core.Matrix:
        """What the kernels read. It knows the scales that were there when it was made."""
        return self._core()

    def _core(self) -> _core.Matrix:
        return _core.Matrix(self.quant, self.ic, self.oc, self.data, self.scales, self.bias)

    @classmethod
    def empty(cls, quant: str, ic: int, parts: Mapping[str, int], bias: bool, arena: Arena | None = None) -> Matrix:
        """All weights zero, to be packed into; many matrices share the pages of one arena."""
        arena = arena or Arena()
        oc = sum(padded(n) for n in parts.values())
        groups = _core.groups(quant, oc)
        made = cls(
            quant,
            ic,
            parts,
            data=arena.zeros((ic, _core.row_bytes(quant, oc)), np.uint8),
            scales=arena.zeros((ic, groups), np.uint16) if groups else None,
            bias=np.zeros(oc, np.float32) if bias else None,
        )
        del made.core  # made anew when it is first asked for, which is after packing
        return made

    def pack(self, part: str, tensor: Tensor) -> bool:
        """Quantise a tensor (outputs, ic) into a part, some rows at a time; False: a value is not finite."""
        at, n = self.slices[part].start, tensor.shape[0]
        step = max(_core.PAD, CHUNK_BYTES // (4 * self.ic) // _core.PAD * _core.PAD)
        finite = True
        for start in range(0, n, step):
            rows = np.ascontiguousarray(tensor.rows(start, min(start + step, n)), np.float32)
            finite &= _core.pack(self.quant, rows, self.oc, at + start, self.data, self.scales)
            tensor.release()
        return finite

    def __call__(self, x: F32) -> F32:
        """x (T, ic) -> (T, oc); take a part with `[:, matrix.slices[name]]`."""
        y = np.empty((x.shape[0], self.oc), np.float32)
        self.bytes_read += self.core.apply(x, y, False)
        return y

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays().values())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What is stored, by name."""
        stored = {"data": self.data, "scales": self.scales, "bias": self.bias}
        return {name: array for name, array in stored.items() if array is not None}
