"""Linear maps that can learn: dense, of several factors, or fixed weights with single ones put right."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ralo.heal.plain import DELTAS, F32, INT4, KEPT, PlainModel


class LinearMap(nn.Module):
    """x (…, ic) -> its parts by name, each (…, outputs)."""

    def __init__(self, model: PlainModel, name: str, frozen: torch.dtype) -> None:
        super().__init__()
        self.name, self.map, self.frozen = name, model.maps[name], frozen
        self._buffer("bias", model.floats(f"{name}.bias"))
        self._buffer("norms", model.floats(f"{name}.norms"))

    def _buffer(self, name: str, values: F32 | None) -> None:
        self.register_buffer(name, None if values is None else torch.tensor(values))

    def _keep(self, part: str, values: F32, scales: F32 | None = None) -> None:
        """Weights under a name of the plain model: to be trained, or as they are. `scales`: they are rounded to."""
        if part in self.map.trained:
            self.register_parameter(f"w{part}", nn.Parameter(torch.tensor(values)))
            self._buffer(f"s{part}", scales)
        else:
            self.register_buffer(f"w{part}", torch.tensor(values).to(self.frozen))

    def _weights(self, part: str) -> Tensor:
        """As they are stored, or will be."""
        weights: Tensor = getattr(self, f"w{part}")
        scales = getattr(self, f"s{part}", None)
        return weights if scales is None else rounded(weights, scales)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self._applied(self._won(x))
        parts = {part: y[..., at : at + n] for part, (at, n) in self.map.parts.items()}
        if self.map.winners and self.map.gate_only:  # the gate decides by what won, the others see everything
            y = self._applied(x)
            parts |= {part: y[..., at : at + n] for part, (at, n) in self.map.parts.items() if part != "gate"}
        return parts

    def _won(self, x: Tensor) -> Tensor:
        """x without the channels that do not win; what wins learns as if there were no others."""
        if not self.map.winners:
            return x
        score = x.detach().abs() * self.norms
        least = score.topk(self.map.winners, dim=-1).values[..., -1:]
        return x * (score >= least)

    def _applied(self, x: Tensor) -> Tensor:
        y = self._product(x)
        return y if self.bias is None else y + self.bias

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def trained_here(self) -> dict[str, Tensor]:
        """What learns, by its full name."""
        return {f"{self.name}.{part}": getattr(self, f"w{part}") for part in self.map.trained}


class Dense(LinearMap):
    def __init__(self, model: PlainModel, name: str, frozen: torch.dtype) -> None:
        super().__init__(model, name, frozen)
        self._keep("0", model.step(name, 0), model.coarse(name, 0))

    def _product(self, x: Tensor) -> Tensor:
        return x @ self._weights("0")


class Factored(LinearMap):
    """Steps one after another, as tt.matrix.FactoredMatrix runs them."""

    def __init__(self, model: PlainModel, name: str, frozen: torch.dtype) -> None:
        super().__init__(model, name, frozen)
        self.ics: list[int] = []
        for k in range(len(self.map.rows)):
            weights, scales = model.step(name, k), model.coarse(name, k)
            self.ics.append(len(weights))
            last = weights.shape[1] - (self.map.kept if k == 0 else 0)
            group = 1 if scales is None else weights.shape[1] // scales.shape[1]
            cut = None if scales is None else scales[:, : last // group]
            self._keep(str(k), weights[:, :last], cut)
            if last < weights.shape[1]:
                self._keep(KEPT, weights[:, last:], None if scales is None else scales[:, last // group :])
            self._order(f"from{k}", model, f"{name}.{k}.from")
        self._order("last", model, f"{name}.to")

    def _order(self, own: str, model: PlainModel, name: str) -> None:
        found = model.arrays.get(name)
        self.register_buffer(own, None if found is None else torch.tensor(found.astype(np.int64)))

    def _product(self, x: Tensor) -> Tensor:
        y = x
        for k, (rows, ic) in enumerate(zip(self.map.rows, self.ics, strict=True)):
            y = _taken(y, getattr(self, f"from{k}"), rows * ic).unflatten(-1, (rows, ic))
            y = (y @ self._weights(str(k))).flatten(-2)
        y = _within(_taken(y, self.last, self.map.outputs), 0, self.map.oc)
        return y + _within(x @ self._weights(KEPT), self.map.oc - self.map.kept, self.map.oc) if self.map.kept else y


class Patched(LinearMap):
    """Fixed weights, and deltas that are added to some of them."""

    def __init__(self, model: PlainModel, name: str, frozen: torch.dtype) -> None:
        super().__init__(model, name, frozen)
        weights, deltas, at = model.step(name, 0), model.floats(f"{name}.{DELTAS}"), model.arrays[f"{name}.at"]
        assert deltas is not None
        self._keep(DELTAS, deltas)
        self._buffer("under", weights.reshape(-1)[at])
        self.register_buffer("at", torch.tensor(at.astype(np.int64)))
        self.register_buffer("fixed", torch.tensor(weights).to(frozen))

    def _product(self, x: Tensor) -> Tensor:
        right = self.under + self._weights(DELTAS)
        weights = self.fixed.flatten().scatter(0, self.at, right.to(self.fixed.dtype))
        return x @ weights.view_as(self.fixed)


KINDS: dict[str, type[LinearMap]] = {"dense": Dense, "factored": Factored, "proc": Patched}


def linear_map(model: PlainModel, name: str, frozen: torch.dtype) -> LinearMap:
    return KINDS[model.maps[name].kind](model, name, frozen)


def rounded(weights: Tensor, scales: Tensor) -> Tensor:
    """Whole steps of 4 bits (ic, oc), of scales (ic, groups): as int4 will be stored. What learns are the weights
    behind it, as if nothing were rounded."""
    steps = weights.unflatten(-1, (scales.shape[1], -1)) / scales[..., None].where(scales[..., None] != 0, 1.0)
    off = (steps.round().clamp(*INT4) - steps).detach()
    return ((steps + off) * scales[..., None]).flatten(-2)


def _taken(x: Tensor, at: Tensor | None, n: int) -> Tensor:
    """n values of every row of x: those at some places, or the first."""
    return x[..., :n] if at is None else x.index_select(-1, at)


def _within(x: Tensor, first: int, n: int) -> Tensor:
    """x as some of n values, from `first` on; the others are zero."""
    return x if x.shape[-1] == n else F.pad(x, (first, n - first - x.shape[-1]))
