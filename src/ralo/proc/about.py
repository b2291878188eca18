"""What a pack says of its procedural weights: of which model, how they were made, and what they must rebuild to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo.config import Fields
from ralo.errors import FormatError
from ralo.matrix import F32, Matrix
from ralo.proc.hashed import Hashed, HashedMatrix
from ralo.proc.matrix import Deltas, ProcMatrix

Made = ProcMatrix | HashedMatrix
SEEDS: dict[str, type[np.generic]] = {"data": np.uint8, "scales": np.uint16, "tables": np.int8}
SEEDS |= {"starts": np.uint32, "at": np.uint16, "deltas": np.uint16}
HASHED: dict[str, type[np.generic]] = {"blocks": np.uint16, "bits": np.uint32, "starts": np.uint32}
HASHED |= {"values": np.uint16}


@dataclass(frozen=True)
class About:
    model: str  # fingerprint of the model they were made from
    settings: Mapping[str, Any]
    digests: dict[str, str] = field(default_factory=dict)  # name of a matrix -> what its rebuilt weights sum up to

    def to_dict(self) -> dict[str, Any]:
        matrices = dict(sorted(self.digests.items()))
        return {"model": self.model, "settings": dict(self.settings), "matrices": matrices}

    @classmethod
    def read(cls, info: Fields) -> About:
        table = info.sub("proc")
        if table is None:
            raise info.fail("'proc' is missing: pack the model again")
        values = table.values
        model, settings, matrices = values.get("model"), values.get("settings"), values.get("matrices")
        if not isinstance(model, str) or not isinstance(settings, dict) or not isinstance(matrices, dict):
            raise info.fail("'proc' is not what ralo writes: pack the model again")
        return cls(model, settings, {k: str(v) for k, v in matrices.items()})

    def matrix(
        self,
        source: Path,
        name: str,
        ic: int,
        parts: Mapping[str, int],
        bias: F32 | None,
        stored: Callable[[str], NDArray[Any]],
    ) -> Matrix:
        """The matrix of that name, rebuilt once to see that nothing is damaged."""
        try:
            matrix = matrix_from(self.settings, ic, parts, bias, lambda part: stored(f"{name}.{part}"))
        except ValueError as error:
            raise FormatError(source, f"is damaged ({error}); pack the model again", name) from error
        if matrix.digest() != self.digests[name]:
            raise FormatError(
                source, "is damaged: its weights are not those that were packed; pack the model again", name
            )
        return matrix


def matrix_from(
    settings: Mapping[str, Any],
    ic: int,
    parts: Mapping[str, int],
    bias: F32 | None,
    stored: Callable[[str], NDArray[Any]],
) -> Made:
    """A matrix of either form from its arrays; `settings` are those it was made with. ValueError: they do not fit."""
    seed = settings.get("form") == "seed"
    arrays = {part: stored(part) for part in (HASHED if seed else SEEDS)}
    for part, kind in (HASHED if seed else SEEDS).items():
        if arrays[part].dtype != kind:
            raise ValueError(f"{part} is {arrays[part].dtype}, not {np.dtype(kind)}")
    try:
        if seed:
            hashed = Hashed(int(settings["block"]), float(settings["base_scale"]), **arrays)
            return HashedMatrix(ic, parts, hashed, bias)
        deltas = Deltas(arrays["starts"], arrays["at"], arrays["deltas"])
        return ProcMatrix(ic, parts, arrays["data"], arrays["scales"], bias, arrays["tables"], deltas)
    except (TypeError, KeyError) as error:
        raise ValueError("an array of another shape") from error
