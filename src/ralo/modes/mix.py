"""Mixed precision: at some places coarser weights stand in for the model's own.

Idea: int4 weights are half the bytes of int8 ones, and some places hardly feel it. Off point: off (the model's own
weights). Cost: beside the model both are in memory, prompts and comparisons read the model's own; a pack has the
coarser ones alone. Limits: a place that is as coarse already, or whose weights another mode makes, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ralo import _core
from ralo.matrix import QUANTS, Matrix
from ralo.memory import Arena
from ralo.mix.about import AboutMix
from ralo.mix.matrix import CoarseMatrix, rounded
from ralo.modes.base import SWITCH, TARGETS, LayerSlots, LayerView, Mode
from ralo.modes.made import MadeMode
from ralo.options import flag
from ralo.remake.about import About

COARSE = ("int8", "int4")
HEAD = "head"


@dataclass(frozen=True)
class Mix(MadeMode):
    """Mixed precision: weights of fewer bits at the places that bear it. Better ones are made by ralo pack."""

    name: ClassVar[str] = "mix"
    about: ClassVar[type[About]] = AboutMix
    matrices: ClassVar[tuple[type[Matrix], ...]] = (CoarseMatrix,)
    fixed: ClassVar[tuple[str, ...]] = ("quant", "head")
    metrics: ClassVar[Mapping[str, str]] = {
        "enabled": "places that read coarser weights",
        "mem_ratio": "their bytes, as a share of those they stand in for",
    }

    on: str = flag("on", "coarser weights at some places", choices=SWITCH, name="mix")
    pack: str = flag("", "pack whose coarser weights stand in for the model's (ralo pack --mix=on)", metavar="DIR")
    quant: str = flag("int4", "how coarse", choices=COARSE)
    target: str = flag("both", "where", choices=tuple(TARGETS))
    head: str = flag("off", "and at the head, which decides the scores", choices=SWITCH)

    finer: tuple[Mapping[str, int], ...] = ()  # by `prepare`: per layer and place, bytes that are stood in for

    @classmethod
    def off(cls) -> Self:
        return cls(on="off")

    def prepare(self, views: list[LayerView]) -> Mode:
        """From the pack; such as the model itself has; or else its own weights, rounded."""
        own = any(isinstance(getattr(v.weights, p), CoarseMatrix) for v in views for p in TARGETS[self.target])
        ready = super().prepare(views) if self.pack or own else self._rounded(views)
        assert isinstance(ready, Mix) and ready.loaded is not None
        finer = tuple(
            {place: own_of(view, place).nbytes for place in made}
            for view, made in zip(views, ready.loaded, strict=True)
        )
        return replace(ready, finer=finer)

    def has_head(self) -> bool:
        """Whether the head can be coarser: a pack must have been made so."""
        about = self.said()
        return about is None or about.settings.get("head") == "on"

    def above(self, head: Matrix | None) -> dict[str, Matrix]:
        return {HEAD: head} if self.head == "on" and isinstance(head, CoarseMatrix) else {}

    def places(self, layer: int, last: bool) -> dict[str, str]:
        """Where a layer's weights are to be coarser, the head being the last one's: place -> how coarse."""
        wanted = {place: self.at(layer, place) for place in TARGETS[self.target]}
        if last and self.head == "on":
            wanted[HEAD] = self.at(layer, HEAD)
        return {place: mode.quant for place, mode in wanted.items() if mode.enabled}

    def _rounded(self, views: list[LayerView]) -> Mode:
        arena, layers = Arena(), []
        for view in views:
            wanted = self.places(view.index, view.head is not None)
            on = {place: quant for place, quant in wanted.items() if coarser_than(quant, own_of(view, place))}
            layers.append({place: rounded(own_of(view, place), quant, arena) for place, quant in on.items()})
        return replace(self, loaded=tuple(layers))

    def build(self, view: LayerView, slots: LayerSlots) -> None:
        assert self.loaded is not None
        for place, matrix in self.loaded[view.index].items():
            slot = CoarseSlot(matrix, self.finer[view.index][place])
            slots.put(f"{place}_weights", slot, self.name, matrix.quant, matrix.nbytes)

    @classmethod
    def measure(cls, slot: _core.Slot) -> Mapping[str, float]:
        assert isinstance(slot, CoarseSlot)
        return {"slots": 1, "bytes": slot.matrix.nbytes, "replaced": slot.replaced}

    @classmethod
    def totals(cls, counts: Mapping[str, float]) -> dict[str, float]:
        replaced = counts.get("replaced", 0)
        return {
            "enabled": counts.get("slots", 0),
            "mem_ratio": counts["bytes"] / replaced if replaced else 1.0,
        }


class CoarseSlot(_core.WeightSlot):
    """Holds the matrix, so that its figures can be shown."""

    def __init__(self, matrix: Matrix, replaced: int) -> None:
        super().__init__(matrix.core)
        self.matrix, self.replaced = matrix, replaced  # bytes of the weights that it stands in for


def own_of(view: LayerView, place: str) -> Matrix:
    found: Matrix | None = view.head if place == HEAD else getattr(view.weights, place)
    assert found is not None
    return found


def coarser_than(quant: str, matrix: Matrix) -> bool:
    return matrix.quant in QUANTS and QUANTS.index(matrix.quant) < QUANTS.index(quant)
