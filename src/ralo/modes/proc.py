"""Procedural weights: most are not stored but rebuilt, from seeds that were searched for, where they are multiplied.

Idea: a generator turns a seed of one byte, beside the seed before it, into several weights. Seeds whose weights come
closest are found once, when the model is packed; what they miss is made up for by the channels that follow, and the few
weights that are far off get deltas. Off point: off (the model's own weights). Cost: reads 8 / n bits a weight;
rebuilding takes some ten instructions for 64 weights. Limits: packing takes about two seconds for a million weights;
quality is fixed when it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ralo import _core
from ralo.matrix import Matrix
from ralo.modes.base import SWITCH, TARGETS, LayerSlots, LayerView
from ralo.modes.made import MadeMode
from ralo.options import flag
from ralo.proc.about import AboutProc, Made
from ralo.proc.generator import GENERATORS
from ralo.proc.hashed import HashedMatrix
from ralo.proc.matrix import ProcMatrix
from ralo.remake.about import About


@dataclass(frozen=True)
class Proc(MadeMode):
    """Procedural weights: rebuilt from seeds while they are multiplied. Made by ralo pack."""

    name: ClassVar[str] = "proc"
    about: ClassVar[type[About]] = AboutProc
    matrices: ClassVar[tuple[type[Matrix], ...]] = (ProcMatrix, HashedMatrix)
    fixed: ClassVar[tuple[str, ...]] = ("bits", "deltas", "generator", "fanout", "block", "base_scale", "form")
    metrics: ClassVar[Mapping[str, str]] = {
        "fanout_effective": "deltas (form=seed: blocks) that a channel has on average",
        "trims": "deltas shed because of eps or the watermark",
        "mem_ratio": "memory of these weights over bf16",
        "base_scale": "scale of the hash that the document's form adds to its deltas",
    }

    on: str = flag("on", "procedural weights", choices=SWITCH, name="proc-sparse")
    pack: str = flag("", "pack whose weights stand in for the model's (ralo pack --proc-sparse=on)", metavar="DIR")
    target: str = flag("mlp", "where", choices=tuple(TARGETS))
    bits: float = flag(4.0, "bits a weight, scales included, deltas not", low=2.1, high=8.25)
    deltas: float = flag(0.001, "share of weights, about, that are put right one by one", low=0, high=0.5)
    generator: str = flag("fitted", "tables that seeds are looked up in", choices=GENERATORS)
    watermark: int = flag(
        4096, "most deltas of a channel; lowered at run time it sheds the weakest", low=0, high=1 << 16
    )
    shed_eps: float = flag(1e-3, "deltas below are shed", low=0, high=1e9)
    fanout: int = flag(64, "form=seed: blocks that a channel keeps", low=1, high=1 << 16)
    block: str = flag("32", "form=seed: outputs of a block", choices=("8", "16", "32"))
    base_scale: float = flag(0.05, "form=seed: scale of the hash", low=0, high=1e9)
    form: str = flag("best", "best, or seed: the document's formula, to compare", choices=("best", "seed"))
    trims: tuple[Mapping[str, int], ...] | None = None  # by `prepare`: per layer and place

    @property
    def partition(self) -> int:
        return int(self.block) if self.form == "seed" else 1

    @classmethod
    def off(cls) -> Self:
        return cls(on="off")

    def prepare(self, views: list[LayerView]) -> Proc:
        """Opens the pack and sheds what is to be shed."""
        ready = super().prepare(views)
        assert isinstance(ready, Proc) and ready.loaded is not None
        shed = [{p: self.at(i, p)._shed(m) for p, m in made.items()} for i, made in enumerate(ready.loaded)]
        loaded = tuple({p: m for p, (m, _) in made.items()} for made in shed)
        return replace(ready, loaded=loaded, trims=tuple({p: n for p, (_, n) in made.items()} for made in shed))

    def _shed(self, matrix: Matrix) -> tuple[Made, int]:
        assert isinstance(matrix, ProcMatrix | HashedMatrix)
        return matrix.shed(self.shed_eps, self.watermark)

    def build(self, view: LayerView, slots: LayerSlots) -> None:
        assert self.loaded is not None and self.trims is not None
        for place, matrix in self.loaded[view.index].items():
            assert isinstance(matrix, ProcMatrix | HashedMatrix)
            slot = ProcSlot(matrix, self.trims[view.index][place])
            units = "deltas" if isinstance(matrix, ProcMatrix) else "blocks"
            what = f"{matrix.bits:.2f} bits a weight, {matrix.fanout:.1f} {units} a channel"
            slots.put(f"{place}_weights", slot, self.name, what, matrix.nbytes)

    @classmethod
    def measure(cls, slot: _core.Slot) -> Mapping[str, float]:
        assert isinstance(slot, ProcSlot)
        m = slot.matrix
        return {
            "channels": m.ic,
            "fanout": m.fanout * m.ic,
            "trims": slot.trims,
            "bytes": m.nbytes,
            "dense": 2 * m.ic * m.oc,
            "base_scale": m.base_scale,
            "slots": 1,
        }

    @classmethod
    def totals(cls, counts: Mapping[str, float]) -> dict[str, float]:
        def ratio(a: str, b: str) -> float:
            return counts.get(a, 0) / counts[b] if counts.get(b) else 0.0

        return {
            "fanout_effective": ratio("fanout", "channels"),
            "trims": counts.get("trims", 0),
            "mem_ratio": ratio("bytes", "dense"),
            "base_scale": ratio("base_scale", "slots"),
        }


class ProcSlot(_core.WeightSlot):
    """Holds the matrix, so that its figures can be shown."""

    def __init__(self, matrix: Made, trims: int) -> None:
        super().__init__(matrix.core)
        self.matrix, self.trims = matrix, trims
