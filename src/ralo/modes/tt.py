"""Factors: a matrix as a product of smaller ones, which are read instead of it.

Idea: weights whose outputs on typical inputs lie in fewer directions than they have are two factors, of a rank that is
shared out by what each place's error is felt; elsewhere factors can stand beside a coarse rest. Off point: off (the
model's own weights). Cost: one or two steps instead of one; reads the factors. Limits: pays at queries, keys and the
attention's output; the other matrices of a language model are nearly of full rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ralo import _core
from ralo.matrix import Matrix
from ralo.modes.base import SWITCH, TARGETS, LayerSlots, LayerView, Mode
from ralo.modes.made import MadeMode
from ralo.options import flag
from ralo.remake.about import About
from ralo.tt.about import AboutTT
from ralo.tt.matrix import FactoredMatrix

FORMS = ("best", "svd", "seed")


@dataclass(frozen=True)
class TT(MadeMode):
    """Factors instead of matrices: low rank, or a tensor train. Made by ralo pack."""

    name: ClassVar[str] = "tt"
    about: ClassVar[type[About]] = AboutTT
    matrices: ClassVar[tuple[type[Matrix], ...]] = (FactoredMatrix,)
    fixed: ClassVar[tuple[str, ...]] = ("share", "rank", "maxvol_k", "gap", "rest", "cores", "form")
    must_have: ClassVar[bool] = False  # where all are refused the model runs dense
    metrics: ClassVar[Mapping[str, str]] = {
        "enabled": "places that run on factors",
        "rank": "mean rank of their factors",
        "gap": "share of typical outputs that they miss, on average",
        "speedup": "over the weights they replace, as measured when they were packed",
        "mem_saved": "bytes that they take less than those",
    }

    on: str = flag("on", "factors", choices=SWITCH, name="tt")
    pack: str = flag("", "pack whose factors stand in for the model's weights (ralo pack --tt=on)", metavar="DIR")
    target: str = flag("both", "where", choices=tuple(TARGETS))
    share: float = flag(0.7, "form=best: share of the weights that is left, shared out by what is felt", low=0, high=1)
    rank: int = flag(
        0, "rank to start from; 0 = what the share gives, 64 beside a rest, 4 of a train", low=0, high=1 << 16
    )
    maxvol_k: int = flag(8, "form=seed: fibres that a cross is made of", low=1, high=1 << 16)
    gap: float = flag(0.0, "most that factors may miss of typical outputs; 0 = 0.3, 0.02 of a train", low=0, high=1)
    rest: str = flag("auto", "what factors miss, kept at int4; auto = in the MLP", choices=("auto", *SWITCH))
    cores: int = flag(2, "of a train", low=2, high=4)
    form: str = flag("best", "best, svd: a train by singular values, or seed: the document's, by cross", choices=FORMS)

    refused: Mapping[str, str] | None = None  # by `prepare`: places that keep their weights, and why

    @classmethod
    def off(cls) -> Self:
        return cls(on="off")

    def prepare(self, views: list[LayerView]) -> Mode:
        said = self.said()
        ready = super().prepare(views)
        assert isinstance(ready, TT)
        return replace(ready, refused=said.refused if isinstance(said, AboutTT) else None)

    def build(self, view: LayerView, slots: LayerSlots) -> None:
        assert self.loaded is not None
        for place in TARGETS[self.target]:
            if why := (self.refused or {}).get(f"layers.{view.index}.{place}"):
                slots.left[f"{place}_weights"] = f"tt {why}"
        for place, matrix in self.loaded[view.index].items():
            assert isinstance(matrix, FactoredMatrix)
            what = f"rank {matrix.rank}" + (" and a rest" if matrix.rest else "")
            what += f", {matrix.nbytes / matrix.replaced:.2f} of the bytes, misses {matrix.gap:.3f}"
            slots.put(f"{place}_weights", FactorSlot(matrix), self.name, what, matrix.nbytes)

    @classmethod
    def measure(cls, slot: _core.Slot) -> Mapping[str, float]:
        assert isinstance(slot, FactorSlot)
        m = slot.matrix
        return {"slots": 1, "rank": m.rank, "gap": m.gap, "speedup": m.speedup, "saved": m.replaced - m.nbytes}

    @classmethod
    def totals(cls, counts: Mapping[str, float]) -> dict[str, float]:
        def mean(name: str, empty: float = 0.0) -> float:
            return counts[name] / counts["slots"] if counts.get("slots") else empty

        return {
            "enabled": counts.get("slots", 0),
            "rank": mean("rank"),
            "gap": mean("gap"),
            "speedup": mean("speedup", 1.0),
            "mem_saved": counts.get("saved", 0),
        }


class FactorSlot(_core.WeightSlot):
    """Holds the matrix, so that its figures can be shown."""

    def __init__(self, matrix: FactoredMatrix) -> None:
        super().__init__(matrix.core)
        self.matrix = matrix
