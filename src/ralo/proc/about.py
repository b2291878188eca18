"""What a pack says of its procedural weights: how they were made, and what they must rebuild to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ralo.matrix import F32
from ralo.proc.hashed import Hashed, HashedMatrix
from ralo.proc.matrix import Deltas, ProcMatrix
from ralo.remake.about import About, Stored, checked

Made = ProcMatrix | HashedMatrix
SEEDS: dict[str, type[np.generic]] = {"data": np.uint8, "scales": np.uint16, "tables": np.int8}
SEEDS |= {"starts": np.uint32, "at": np.uint16, "deltas": np.uint16}
HASHED: dict[str, type[np.generic]] = {"blocks": np.uint16, "bits": np.uint32, "starts": np.uint32}
HASHED |= {"values": np.uint16}


class AboutProc(About):
    """Of a matrix a pack has what its rebuilt weights sum up to."""

    kind: ClassVar[str] = "proc"
    switch: ClassVar[str] = "proc-sparse"
    words: ClassVar[str] = "procedural weights"

    @classmethod
    def record(cls, matrix: Made) -> str:
        return matrix.digest()

    @classmethod
    def rebuilt(
        cls, settings: Mapping[str, Any], record: Any, ic: int, parts: Mapping[str, int], bias: F32 | None,
        stored: Stored,
    ) -> Made:  # fmt: skip
        seed = settings.get("form") == "seed"
        arrays = checked(stored, HASHED if seed else SEEDS)
        try:
            if seed:
                hashed = Hashed(int(settings["block"]), float(settings["base_scale"]), **arrays)
                return HashedMatrix(ic, parts, hashed, bias)
            deltas = Deltas(arrays["starts"], arrays["at"], arrays["deltas"])
            return ProcMatrix(ic, parts, arrays["data"], arrays["scales"], bias, arrays["tables"], deltas)
        except (TypeError, KeyError) as error:
            raise ValueError("an array of another shape") from error
