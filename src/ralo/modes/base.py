"""What a mode is: settings that fill slots of a layer. The model knows slots, never a mode by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.config import ModelConfig
from ralo.errors import RaloError
from ralo.matrix import QUANTS, Matrix
from ralo.options import nearest
from ralo.pace import Pace
from ralo.profile import Profile
from ralo.tt.matrix import FactoredMatrix
from ralo.weights import PLACES, LayerWeights, Weights

MOST_LAYERS = 1 << 16  # of any model; a longer range is a slip of the pen
SWITCH = ("on", "off")
ZEROS = ("relu", "relu2")  # activations that are often exactly zero: skipping those costs nothing
SINKS, RECENT = 4, 32  # keys that are always kept: the first and the last ones
TARGETS = {"mlp": ("up", "down"), "attn": ("qkv", "o"), "both": tuple(PLACES)}


@dataclass(frozen=True)
class Occupant:
    slot: _core.Slot
    mode: str
    runs: str  # what it does, for people
    nbytes: int = 0  # of weights that it keeps in a form of its own
    share: float | None = None  # of channels that it uses, where that is the same for every token


@dataclass
class LayerSlots:
    """The occupants of one layer; None is dense."""

    qkv: _core.Input | None = None
    o: _core.Input | None = None
    up: _core.Input | None = None
    down: _core.Input | None = None
    attend: _core.AttendSlot | None = None
    mlp: _core.MlpSlot | None = None
    qkv_weights: _core.WeightSlot | None = None
    o_weights: _core.WeightSlot | None = None
    up_weights: _core.WeightSlot | None = None
    down_weights: _core.WeightSlot | None = None
    head: _core.Input | None = None  # of the last layer, as the next
    head_weights: _core.WeightSlot | None = None
    taken: dict[str, Occupant] = field(default_factory=dict)  # by slot
    left: dict[str, str] = field(default_factory=dict)  # by slot: why a mode left it dense, or did less there

    def put(
        self, name: str, slot: _core.Slot, mode: str, runs: str, nbytes: int = 0, share: float | None = None
    ) -> None:
        setattr(self, name, slot)
        self.taken[name] = Occupant(slot, mode, runs, nbytes, share)


@dataclass(frozen=True)
class LayerView:
    """What a mode sees of the layer it builds for."""

    index: int
    cfg: ModelConfig
    weights: LayerWeights
    profile: Profile | None
    model: str = ""  # its fingerprint
    head: Matrix | None = None  # above the last layer

    def has_rows(self) -> bool:
        """Whether the MLP's weights can be read neuron by neuron: none of them stand in for others."""
        return self.weights.up.quant in QUANTS and self.weights.down.quant in QUANTS

    def has_channels(self, place: str) -> bool:
        """Whether channels that are not computed are not read."""
        return not isinstance(getattr(self.weights, place), FactoredMatrix)


def views_of(cfg: ModelConfig, weights: Weights, profile: Profile | None = None, model: str = "") -> list[LayerView]:
    views = [LayerView(i, cfg, layer, profile, model) for i, layer in enumerate(weights.layers)]
    views[-1] = replace(views[-1], head=weights.head)
    return views


@dataclass(frozen=True)
class Override:
    """Settings that differ in some layers and places; of several that apply the last counts."""

    layers: frozenset[int] | None  # None: all
    places: frozenset[str] | None
    values: Mapping[str, Any]

    def holds(self, layer: int, place: str) -> bool:
        return (self.layers is None or layer in self.layers) and (self.places is None or place in self.places)


@dataclass(frozen=True)
class Mode:
    """A way to read less. A mode's docstring says: Idea, Off point, Cost, Limits."""

    name: ClassVar[str]  # prefix of its flags, table of a plan
    metric: ClassVar[str] = ""  # first word of its metrics; "" = its name
    metrics: ClassVar[Mapping[str, str]]  # name -> what it says
    on: str = "on"  # the mode's own switch; every mode makes a flag of it
    where: tuple[Override, ...] = ()

    def at(self, layer: int, place: str) -> Self:
        """The settings at one place of one layer."""
        values = {k: v for o in self.where if o.holds(layer, place) for k, v in o.values.items()}
        return replace(self, **values) if values else self

    @property
    def enabled(self) -> bool:
        """Whether the mode's own switch is on."""
        raise NotImplementedError

    @classmethod
    def off(cls) -> Self:
        """Settings at which the result equals dense."""
        raise NotImplementedError

    @property
    def partition(self) -> int:
        """Channels or outputs that are used or left out together."""
        return int(getattr(self, "block", 1))

    @property
    def pace(self) -> Pace | None:
        """Of a mode that keeps a time budget, once it is prepared."""
        return None

    @property
    def gap_limit(self) -> float | None:
        """KL from dense (nats) at which the guard switches it off; None = the guard's own."""
        return None

    @property
    def gap_spacing(self) -> int | None:
        """Tokens between two comparisons with dense; None = the guard's own."""
        return None

    def prepare(self, views: list[LayerView]) -> Mode:
        """Once per model, before building: what depends on all layers together."""
        return self

    def weights(self, view: LayerView) -> LayerWeights:
        """What a layer's weights are with this mode on, once it is prepared; other modes see those."""
        return view.weights

    def build(self, view: LayerView, slots: LayerSlots) -> None:
        """Puts its occupants into a layer's slots."""
        raise NotImplementedError

    @classmethod
    def measure(cls, slot: _core.Slot) -> Mapping[str, float]:
        """What one occupant counted; summed over slots, `totals` makes metrics of it."""
        raise NotImplementedError

    @classmethod
    def totals(cls, counts: Mapping[str, float]) -> dict[str, float]:
        raise NotImplementedError


def norms_of(view: LayerView, place: str) -> NDArray[np.float32]:
    """Norms of the channels' weights: the profile's, or from the weights themselves."""
    if view.profile:
        return view.profile.places[view.index, place].norms
    matrix: Matrix = getattr(view.weights, place)
    out = np.empty(matrix.ic, np.float32)
    matrix.core.norms(out)
    return out


def parse_layers(text: str, source: str) -> frozenset[int]:
    """`0,3,5-8` -> its numbers."""
    out: set[int] = set()
    for part in str(text).split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < MOST_LAYERS):
            raise RaloError(f"{source} must be layers as in 0,3,5-8, got {text!r:.60}")
        out.update(range(int(first), int(last) + 1))
    return frozenset(out)


def parse_places(names: Iterable[str], source: str) -> frozenset[str]:
    """Places by name. A site that shares its input with others cannot be set alone."""
    out = set()
    for name in names:
        if name not in PLACES:
            shared = next((p for p, sites in PLACES.items() if name in sites), None)
            hint = f": it shares its input with {' and '.join(PLACES[shared])}, say {shared}" if shared else ""
            hint = hint or nearest(name, PLACES)
            raise RaloError(f"{source} must be of {', '.join(PLACES)}, got {name!r:.40}{hint}")
        out.add(name)
    return frozenset(out)
