"""What a pack says of its coarser weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ralo import _core
from ralo.matrix import F32, QUANTS, padded
from ralo.mix.matrix import CoarseMatrix
from ralo.remake.about import About, Stored, checked

ARRAYS: dict[str, type[np.generic]] = {"data": np.uint8, "scales": np.uint16}


class AboutMix(About):
    """Of a matrix a pack has its precision, and what its bytes sum up to."""

    kind: ClassVar[str] = "mix"
    switch: ClassVar[str] = "mix"
    words: ClassVar[str] = "coarser weights"

    @classmethod
    def record(cls, matrix: CoarseMatrix) -> dict[str, str]:
        return {"quant": matrix.quant, "digest": matrix.digest()}

    @classmethod
    def rebuilt(
        cls, settings: Mapping[str, Any], record: Any, ic: int, parts: Mapping[str, int], bias: F32 | None,
        stored: Stored,
    ) -> CoarseMatrix:  # fmt: skip
        quant = record.get("quant") if isinstance(record, dict) else None
        if quant not in QUANTS:
            raise ValueError("its precision is not known")
        arrays, oc = checked(stored, ARRAYS), sum(padded(n) for n in parts.values())
        if arrays["data"].shape != (ic, _core.row_bytes(quant, oc)):
            raise ValueError("data of another shape")
        if arrays["scales"].shape != (ic, _core.groups(quant, oc)):
            raise ValueError("scales of another shape")
        return CoarseMatrix(quant, ic, parts, arrays["data"], arrays["scales"], bias)
