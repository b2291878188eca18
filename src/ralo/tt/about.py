"""What a pack says of its factors: the shape of each product, how much it misses, how much faster it was; and which
places kept their weights, and why."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from ralo.config import Fields
from ralo.matrix import F32, QUANTS, Matrix, padded
from ralo.remake.about import About, Stored
from ralo.tt.matrix import FactoredMatrix, Train, step_parts


@dataclass(frozen=True)
class AboutTT(About):
    kind: ClassVar[str] = "tt"
    switch: ClassVar[str] = "tt"
    words: ClassVar[str] = "factors"
    refused: dict[str, str] = field(default_factory=dict)  # by name: why it kept its weights

    @classmethod
    def record(cls, matrix: FactoredMatrix) -> dict[str, Any]:
        t = matrix.train
        return {
            "ins": list(t.ins),
            "outs": list(t.outs),
            "ranks": list(t.ranks),
            "backwards": t.backwards,
            "quants": [step.quant for step in matrix.steps],
            "rest": matrix.rest,
            "gap": matrix.gap,
            "speedup": matrix.speedup,
            "replaced": matrix.replaced,
            "digest": _digest(matrix),
        }

    @classmethod
    def rebuilt(
        cls, settings: Mapping[str, Any], record: Any, ic: int, parts: Mapping[str, int], bias: F32 | None,
        stored: Stored,
    ) -> FactoredMatrix:  # fmt: skip
        try:
            ins, outs, ranks = (tuple(map(int, record[name])) for name in ("ins", "outs", "ranks"))
            train = Train(ins, outs, ranks, bool(record["backwards"]))
            quants, rest = [str(q) for q in record["quants"]], bool(record["rest"])
            said = float(record["gap"]), float(record["speedup"]), int(record["replaced"])
        except (TypeError, KeyError) as error:
            raise ValueError("what is said of its factors is incomplete") from error
        fits = prod(train.ins) == ic and prod(train.outs) <= sum(padded(n) for n in parts.values())
        if not fits or len(quants) != len(train.ins) or not set(quants) <= set(QUANTS):
            raise ValueError("its factors are of another shape")
        shapes = zip(quants, step_parts(train, parts, rest), train.order, strict=True)
        steps = [_step(stored, i, q, train.step(k)[0], p) for i, (q, p, k) in enumerate(shapes)]
        return FactoredMatrix(ic, parts, train, steps, bias, *said)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"refused": dict(sorted(self.refused.items()))}

    @classmethod
    def read(cls, info: Fields) -> Self:
        plain = super().read(info)
        table = info.sub(cls.kind)
        refused = table.values.get("refused") if table else None
        if not isinstance(refused, dict):
            raise info.fail(f"{cls.kind!r} is not what ralo writes: pack the model again")
        return cls(plain.model, plain.settings, plain.matrices, {k: str(v) for k, v in refused.items()})


def _step(stored: Stored, i: int, quant: str, ic: int, parts: Mapping[str, int]) -> Matrix:
    data, scales = stored(f"{i}.data"), stored(f"{i}.scales") if quant in ("int8", "int4") else None
    if data.dtype != np.uint8 or (scales is not None and scales.dtype != np.uint16):
        raise ValueError(f"factor {i} is of another type")
    try:
        return Matrix(quant, ic, parts, data, scales, None)
    except TypeError as error:
        raise ValueError("an array of another shape") from error


def _digest(matrix: FactoredMatrix) -> str:
    """Of all that is stored."""
    found = hashlib.blake2b(digest_size=8)
    for name, array in sorted(matrix.arrays().items()):
        found.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
