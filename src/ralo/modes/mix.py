"""Mixed precision: at some places coarser weights stand in for the model's own.

Idea: int4 weights are half the bytes of int8 ones, and some places hardly feel it. Off point: off (the model's own
weights). Cost: the coarser weights are kept beside the model's own, which prompts and comparisons still read. Limits: a
place that is as coarse already, or whose weights another mode makes, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from ralo import _core
from ralo.matrix import QUANTS, Matrix
from ralo.memory import Arena
from ralo.modes.base import SWITCH, TARGETS, LayerSlots, LayerView, Mode
from ralo.options import flag
from ralo.remake.values import values
from ralo.weights import LayerWeights

COARSE = ("int8", "int4")


@dataclass(frozen=True)
class Coarse:
    matrix: Matrix
    replaced: int  # bytes of the weights that it stands in for


@dataclass(frozen=True)
class Mix(Mode):
    """Mixed precision: weights of fewer bits at the places that bear it."""

    name: ClassVar[str] = "mix"
    metrics: ClassVar[Mapping[str, str]] = {
        "enabled": "places that read coarser weights",
        "mem_ratio": "their bytes, as a share of those they stand in for",
    }

    on: str = flag("on", "coarser weights at some places", choices=SWITCH, name="mix")
    quant: str = flag("int4", "how coarse", choices=COARSE)
    target: str = flag("both", "where", choices=tuple(TARGETS))

    made: tuple[Mapping[str, Coarse], ...] | None = None  # by `prepare`: per layer and place

    @property
    def enabled(self) -> bool:
        return self.on == "on"

    @classmethod
    def off(cls) -> Self:
        return cls(on="off")

    def prepare(self, views: list[LayerView]) -> Mode:
        arena = Arena()
        return replace(self, made=tuple(self._layer(view, arena) for view in views))

    def _layer(self, view: LayerView, arena: Arena) -> dict[str, Coarse]:
        out = {}
        for place in TARGETS[self.target]:
            here, matrix = self.at(view.index, place), getattr(view.weights, place)
            if here.enabled and matrix.quant in QUANTS and QUANTS.index(matrix.quant) < QUANTS.index(here.quant):
                out[place] = Coarse(coarser(matrix, here.quant, arena), matrix.nbytes)
        return out

    def weights(self, view: LayerView) -> LayerWeights:
        assert self.made is not None
        return view.weights.using({place: made.matrix for place, made in self.made[view.index].items()})

    def build(self, view: LayerView, slots: LayerSlots) -> None:
        assert self.made is not None
        for place, made in self.made[view.index].items():
            matrix = made.matrix
            slots.put(f"{place}_weights", CoarseSlot(made), self.name, matrix.quant, matrix.nbytes)

    @classmethod
    def measure(cls, slot: _core.Slot) -> Mapping[str, float]:
        assert isinstance(slot, CoarseSlot)
        return {"slots": 1, "bytes": slot.made.matrix.nbytes, "replaced": slot.made.replaced}

    @classmethod
    def totals(cls, counts: Mapping[str, float]) -> dict[str, float]:
        replaced = counts.get("replaced", 0)
        return {
            "enabled": counts.get("slots", 0),
            "mem_ratio": counts["bytes"] / replaced if replaced else 1.0,
        }


class CoarseSlot(_core.WeightSlot):
    """Holds the matrix, so that its figures can be shown."""

    def __init__(self, made: Coarse) -> None:
        super().__init__(made.matrix.core)
        self.made = made


def coarser(matrix: Matrix, quant: str, arena: Arena) -> Matrix:
    """The same weights, rounded once more."""
    out = Matrix.empty(quant, matrix.ic, matrix.parts, matrix.bias is not None, arena)
    rows = np.ascontiguousarray(values(matrix.quant, matrix.data, matrix.scales).T)
    _core.pack(quant, rows, matrix.oc, 0, out.data, out.scales)
    if matrix.bias is not None and out.bias is not None:
        out.bias[:] = matrix.bias
    return out
