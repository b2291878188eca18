"""A model as plain numbers and arrays: all that training needs to know of it, with ralo's kernels or without."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo.remake.values import values

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
Array = NDArray[Any]

INT4 = (-8, 7)  # steps of a scale
KEPT, DELTAS = "kept", "deltas"  # what a map trains beside its steps, which are 0, 1, …


@dataclass(frozen=True)
class PlainMap:
    """One linear map. Its arrays are NAME.K.data and NAME.K.scales of every step K, and by kind:

    dense: one step. factored: NAME.K.from where a step's values lie in what came before, NAME.to where the outputs lie.
    proc: NAME.at the places of its deltas in the weights, NAME.deltas. All: NAME.bias, NAME.norms where channels win.
    """

    kind: str
    oc: int  # outputs, padding included
    parts: Mapping[str, tuple[int, int]]  # name -> first output, outputs
    quants: tuple[str, ...]  # of its steps
    trained: tuple[str, ...] = ()  # steps and what is beside them, by name
    rows: tuple[int, ...] = (1,)  # of a token through each step
    outputs: int = 0  # of the product
    kept: int = 0  # outputs of the first step, its last, that are added to the last ones of the whole
    winners: int = 0  # input channels that are used, the strongest; 0 = all
    gate_only: bool = False  # they are only for the first part, the gate


@dataclass(frozen=True)
class PlainModel:
    """`arrays` besides those of maps: embed, positions, cos, sin, and norms with their bias, all of `ctx` positions."""

    ctx: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    act: str
    gated: bool
    norm: str  # rms or layer
    eps: float
    windows: tuple[int, ...]  # per layer; 0 = all keys
    maps: Mapping[str, PlainMap]
    arrays: Mapping[str, Array] = field(default_factory=dict, repr=False)

    @property
    def trained(self) -> list[str]:
        """Names of all tensors that training changes."""
        return [f"{name}.{part}" for name, m in self.maps.items() for part in m.trained]

    def floats(self, name: str) -> F32 | None:
        """An array of floats, or None; bf16 comes as words of 16 bits."""
        found = self.arrays.get(name)
        if found is not None and found.dtype == np.uint16:
            return (found.astype(np.uint32) << 16).view(np.float32)
        return None if found is None else np.ascontiguousarray(found, np.float32)

    def step(self, name: str, k: int) -> F32:
        """The weights (ic, oc) of one step of a map."""
        at = f"{name}.{k}"
        return values(self.maps[name].quants[k], self.arrays[f"{at}.data"], self.arrays.get(f"{at}.scales"))

    def coarse(self, name: str, k: int) -> F32 | None:
        """The scales (ic, groups) that a step keeps while it learns: those of int4, which rounds far; else None."""
        return self.floats(f"{name}.{k}.scales") if self.maps[name].quants[k] == "int4" else None

    def digest(self) -> str:
        """Stands for all arrays and numbers."""
        digest = hashlib.blake2b(repr(sorted(self.numbers().items())).encode(), digest_size=16)
        for name, array in sorted(self.arrays.items()):
            digest.update(name.encode() + np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def numbers(self) -> dict[str, Any]:
        """All but the arrays, as JSON can hold it."""
        return asdict(replace(self, arrays={}))

    @classmethod
    def of(cls, numbers: Mapping[str, Any], arrays: Mapping[str, Array]) -> PlainModel:
        """From what `numbers` gave."""
        own = dict(numbers) | {"windows": tuple(numbers["windows"]), "arrays": arrays}
        maps = {name: _map(m) for name, m in own.pop("maps").items()}
        return cls(maps=maps, **own)


def _map(numbers: Mapping[str, Any]) -> PlainMap:
    listed = {name: tuple(numbers[name]) for name in ("quants", "trained", "rows")}
    return PlainMap(**{**numbers, **listed, "parts": {part: tuple(at) for part, at in numbers["parts"].items()}})
