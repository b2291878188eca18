"""What modes have in common whose weights are made beforehand by `ralo pack`, and stand in for a model's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ralo.errors import RaloError
from ralo.matrix import Matrix
from ralo.modes.base import TARGETS, LayerView, Mode
from ralo.options import fields
from ralo.remake.about import About
from ralo.weights import LayerWeights


@dataclass(frozen=True)
class MadeMode(Mode):
    """Opens a pack, checks that it is of this model and made as the settings say, and takes its weights."""

    about: ClassVar[type[About]]
    matrices: ClassVar[tuple[type[Matrix], ...]]  # kinds of matrix that are this mode's
    fixed: ClassVar[tuple[str, ...]]  # settings that are decided when a model is packed

    must_have: ClassVar[bool] = True  # whether a pack without any is of no use

    pack: str = ""
    target: str = "mlp"
    loaded: tuple[Mapping[str, Matrix], ...] | None = None  # by `prepare`: per layer and place

    @property
    def enabled(self) -> bool:
        return self.on == "on"

    def prepare(self, views: list[LayerView]) -> Mode:
        """Opens the pack, or takes such weights as the model itself has."""
        layers, head = self._opened(views) if self.pack else ([view.weights for view in views], views[-1].head)
        made_at = [
            {p: m for p in TARGETS[self.target] if isinstance(m := getattr(layer, p), self.matrices)}
            for layer in layers
        ]
        made_at[-1] |= self.above(head)
        switch = self.about.switch
        if not any(made_at) and not self.pack:
            made = f"ralo pack -m MODEL --{switch}=on -o DIR"
            raise RaloError(f"--{switch} needs weights that were made for it: {made}, then --{self.name}-pack DIR")
        if not any(made_at) and self.must_have:
            raise RaloError(f"{self.pack}: has no {self.about.words} for --{self.name}-target={self.target}")
        on = [{p: m for p, m in made.items() if self.at(i, p).enabled} for i, made in enumerate(made_at)]
        return replace(self, loaded=tuple(on))

    def above(self, head: Matrix | None) -> dict[str, Matrix]:
        """What is taken of the head, above the last layer."""
        return {}

    def said(self) -> About | None:
        """What the pack says of itself, where one is given."""
        from ralo.formats import packed

        return packed.about(Path(self.pack), self.about) if self.pack else None

    def _opened(self, views: list[LayerView]) -> tuple[Sequence[LayerWeights], Matrix]:
        """The layers and the head of the pack, which must be one of this model, made as these settings say."""
        from ralo.formats import packed

        about = self.said()
        assert about is not None
        if about.model != views[0].model:
            raise RaloError(f"{self.pack}: is the pack of another model")
        defaults = {f.name: f.default for f in fields(type(self))}
        for name in self.fixed:
            asked, made = getattr(self, name), about.settings.get(name)
            if asked not in (made, defaults[name]):
                flag_name = f"--{self.name}-{name.replace('_', '-')}"
                raise RaloError(f"{self.pack}: was made with {flag_name}={made}, not {asked}: pack the model again")
        weights = packed.open_directory(Path(self.pack), "auto")[1]
        return weights.layers, weights.head

    def weights(self, view: LayerView) -> LayerWeights:
        assert self.loaded is not None
        return view.weights.using(self.loaded[view.index])


def packed_settings(mode: MadeMode) -> dict[str, Any]:
    """Settings that say what is built."""
    return {f.name: getattr(mode, f.name) for f in fields(type(mode)) if f.name not in ("on", "pack")}
