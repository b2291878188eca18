"""The dial at every layer and place: which precision and which share of the channels, by what both cost.

All places are priced alike: at a price for time, each takes the option whose cost in quality and in time is least. A
higher price buys more speed for more loss, so that one number is left to be found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ralo.modes import KWTA, Mix, Mode
from ralo.modes.base import TARGETS, Override
from ralo.modes.mix import HEAD
from ralo.modes.share import F64, GRID, Costs, Key, cheapest


@dataclass(frozen=True)
class Option:
    quant: str
    share: float


@dataclass(frozen=True)
class Sites:
    """Every option of every place, with what it costs."""

    own: str  # the model's precision
    mix: Mix  # where the coarser weights are from
    options: Sequence[Option]
    costs: Costs

    def at(self, price: float) -> dict[Key, Option]:
        return {key: self.options[i] for key, i in cheapest(self.costs, price).items()}

    def only(self, places: Collection[str]) -> Sites:
        """The same at some places; the others are not for the dial."""
        c = self.costs
        quality, effort = ({k: v for k, v in each.items() if k[1] in places} for each in (c.quality, c.effort))
        return replace(self, costs=Costs(quality, effort))

    def within(self, loss: float) -> dict[Key, Option]:
        """The fastest choice whose costs in quality add up to no more; the least there is where none does."""
        low, high = 1e-18, 1e15  # KL per second, or per byte
        for _ in range(100):
            price = (low * high) ** 0.5
            low, high = (price, high) if self._loss(price) <= loss else (low, price)
        return self.at(low)

    def _loss(self, price: float) -> float:
        return sum(float(self.costs.quality[key][i]) for key, i in cheapest(self.costs, price).items())


@dataclass(frozen=True)
class Precision:
    """What a precision's options cost: KL over GRID by key, and seconds over GRID by place."""

    quant: str
    kl: Mapping[Key, F64]
    seconds: Mapping[str, F64]

    def options(self, skipping: bool) -> list[int]:
        """Where in GRID; `skipping`: whether less may be read."""
        return [i for i, s in enumerate(GRID) if s >= 1 or skipping]


def sites(own: str, mix: Mix, precisions: Sequence[Precision], skipping: bool) -> Sites:
    """Options from measured costs."""
    kept = [(p, p.options(skipping)) for p in precisions]
    options = [Option(p.quant, float(GRID[i])) for p, at in kept for i in at]
    quality, effort = {}, {}
    for key in precisions[0].kl:
        quality[key] = np.concatenate([p.kl[key][at] for p, at in kept])
        effort[key] = np.concatenate([p.seconds[key[1]][at] for p, at in kept])
    return Sites(own, mix, options, Costs(quality, effort))


def modes_of(choice: Mapping[Key, Option], own: str, mix: Mix) -> tuple[Mode, ...]:
    """The dial's modes: the precision of each place, and the share of its channels."""
    coarse = sorted({o.quant for o in choice.values()} - {own})
    assert len(coarse) <= 1, "one coarser precision beside the model's own"
    out: list[Mode] = []
    if coarse:
        of_layers = {key: o for key, o in choice.items() if key[1] != HEAD}
        fine = [key for key, o in of_layers.items() if o.quant == own]
        target = next(t for t, places in TARGETS.items() if {place for _, place in of_layers} <= set(places))
        head = "on" if any(key[1] == HEAD and o.quant != own for key, o in choice.items()) else "off"
        where = tuple(_overrides({key: ("on", "off") for key in fine}))
        out.append(replace(mix, quant=coarse[0], target=target, head=head, where=where))
    fewer = {key: ("k", o.share) for key, o in choice.items() if o.share < 1}
    if fewer:
        out.append(KWTA(k=1.0, where=tuple(_overrides(fewer))))
    return tuple(out)


def _overrides(values: Mapping[Key, tuple[str, object]]) -> list[Override]:
    """One for every value of a layer."""
    found: dict[tuple[int, tuple[str, object]], set[str]] = {}
    for (layer, place), value in values.items():
        found.setdefault((layer, value), set()).add(place)
    return [
        Override(frozenset((layer,)), frozenset(places), {name: value})
        for (layer, (name, value)), places in sorted(found.items(), key=lambda item: str(item[0]))
    ]
