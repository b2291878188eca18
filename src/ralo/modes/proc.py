"""Procedural weights: most are not stored but rebuilt, from seeds that were searched for, where they are multiplied.

Idea: a generator turns a seed of one byte, beside the seed before it, into several weights. Seeds whose weights come
closest are found once, when the model is packed; what they miss is made up for by the channels that follow, and the few
weights that are far off get deltas. Off point: off (the model's own weights). Cost: reads 8 / n bits a weight;
rebuilding takes some ten instructions for 64 weights. Limits: packing takes about two seconds for a million weights;
quality is fixed when it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from ralo import _core
from ralo.errors import RaloError
from ralo.modes.base import SWITCH, TARGETS, LayerSlots, LayerView, Mode
from ralo.options import flag
from ralo.proc.about import Made
from ralo.proc.generator import GENERATORS
from ralo.proc.hashed import HashedMatrix
from ralo.proc.matrix import ProcMatrix
from ralo.weights import LayerWeights

FIXED = ("bits", "deltas", "generator", "fanout", "block", "base_scale", "form")  # when a model is packed


@dataclass(frozen=True)
class Proc(Mode):
    """Procedural weights: rebuilt from seeds while they are multiplied. Made by ralo pack."""

    name: ClassVar[str] = "proc"
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
    loaded: tuple[Mapping[str, tuple[Made, int]], ...] | None = None  # by `prepare`: per layer and place, trims

    @property
    def enabled(self) -> bool:
        return self.on == "on"

    @property
    def partition(self) -> int:
        return int(self.block) if self.form == "seed" else 1

    @classmethod
    def off(cls) -> Self:
        return cls(on="off")

    def prepare(self, views: list[LayerView]) -> Proc:
        """Opens the pack and sheds what is to be shed."""
        layers = self._opened(views) if self.pack else [view.weights for view in views]
        made_at = [
            {p: m for p in TARGETS[self.target] if isinstance(m := getattr(layer, p), ProcMatrix | HashedMatrix)}
            for layer in layers
        ]
        if not any(made_at) and not self.pack:
            made = "ralo pack -m MODEL --proc-sparse=on -o DIR"
            raise RaloError(f"--proc-sparse needs weights that were made for it: {made}, then --proc-pack DIR")
        if not any(made_at):
            raise RaloError(f"{self.pack}: has no procedural weights for --proc-target={self.target}")
        loaded = [
            {p: m.shed(s.shed_eps, s.watermark) for p, m in made.items() if (s := self.at(i, p)).enabled}
            for i, made in enumerate(made_at)
        ]
        return replace(self, loaded=tuple(loaded))

    def _opened(self, views: list[LayerView]) -> Sequence[LayerWeights]:
        """The layers of the pack, which must be one of this model, made as these settings say."""
        from ralo.formats import packed

        about = packed.about_proc(Path(self.pack))
        if about.model != views[0].model:
            raise RaloError(f"{self.pack}: is the pack of another model")
        for name in FIXED:
            asked, made = getattr(self, name), about.settings.get(name)
            if asked not in (made, getattr(type(self), name)):
                flag_name = f"--proc-{name.replace('_', '-')}"
                raise RaloError(f"{self.pack}: was made with {flag_name}={made}, not {asked}: pack the model again")
        return packed.open_directory(Path(self.pack), "auto")[1].layers

    def weights(self, view: LayerView) -> LayerWeights:
        assert self.loaded is not None
        return view.weights.using({place: matrix for place, (matrix, _) in self.loaded[view.index].items()})

    def build(self, view: LayerView, slots: LayerSlots) -> None:
        assert self.loaded is not None
        for place, (matrix, trims) in self.loaded[view.index].items():
            slot = ProcSlot(matrix, trims)
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
