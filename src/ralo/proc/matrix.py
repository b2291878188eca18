"""A linear map whose weights are rebuilt from seeds while it is applied, and deltas that put single weights right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.matrix import F32, U8, U16, Matrix
from ralo.proc.generator import I8
from ralo.remake.values import bf16_values

U32 = NDArray[np.uint32]


@dataclass(frozen=True)
class Deltas:
    """What is added to single weights; those of channel i are [starts[i], starts[i + 1]), by ascending output."""

    starts: U32  # (ic + 1)
    at: U16  # outputs
    values: U16  # bf16

    @classmethod
    def none(cls, ic: int) -> Deltas:
        return cls(np.zeros(ic + 1, np.uint32), np.zeros(0, np.uint16), np.zeros(0, np.uint16))

    def shed(self, eps: float, watermark: int) -> tuple[Deltas, int]:
        """Without those below eps, and with at most `watermark` a channel, the strongest; how many were trimmed."""
        strength = np.abs(bf16_values(self.values))
        channel = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        kept = strength >= eps
        order = np.lexsort((np.arange(len(kept)), -strength, channel))  # by channel, the strongest first
        rank = np.empty(len(kept), np.int64)
        rank[order] = np.arange(len(kept)) - self.starts[channel[order]]
        kept &= rank < watermark
        starts = np.zeros_like(self.starts)
        np.cumsum(np.bincount(channel[kept], minlength=len(starts) - 1), out=starts[1:])
        return Deltas(starts, self.at[kept], self.values[kept]), int((~kept).sum())


class ProcMatrix(Matrix):
    """Seeds (ic, columns * 64), a scale a column, the generator's tables, deltas."""

    core: _core.ProcMatrix

    def __init__(
        self, ic: int, parts: Mapping[str, int], data: U8, scales: U16, bias: F32 | None, tables: I8, deltas: Deltas
    ) -> None:
        self.tables, self.deltas = tables, deltas
        super().__init__("proc", ic, parts, data, scales, bias)

    def _core(self) -> _core.Matrix:
        d = self.deltas
        assert self.scales is not None
        return _core.ProcMatrix(
            self.ic, self.oc, self.data, self.scales, self.bias, self.tables, d.starts, d.at, d.values
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        d = self.deltas
        return super().arrays() | {"tables": self.tables, "starts": d.starts, "at": d.at, "deltas": d.values}

    def unpack(self) -> F32:
        """The weights (ic, oc)."""
        out = np.empty((self.ic, self.oc), np.float32)
        self.core.unpack(out)
        return out

    base_scale = 0.0  # no hash is added to what seeds give

    @property
    def fanout(self) -> float:
        """Deltas of a channel, on average."""
        return len(self.deltas.at) / self.ic

    @property
    def bits(self) -> float:
        """Of memory, a weight."""
        return 8 * self.nbytes / (self.ic * sum(self.parts.values()))

    def digest(self) -> str:
        """Stands for the rebuilt weights: the same on every CPU and with any number of threads."""
        return f"{self.core.digest():016x}"

    def shed(self, eps: float, watermark: int) -> tuple[ProcMatrix, int]:
        """With fewer deltas; how many were trimmed."""
        assert self.scales is not None
        deltas, trimmed = self.deltas.shed(eps, watermark)
        if not trimmed:
            return self, 0
        return ProcMatrix(self.ic, self.parts, self.data, self.scales, self.bias, self.tables, deltas), trimmed
