"""What a pack says of weights that were made for it: of which model, how they were made, and what each of them is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ralo.config import Fields
from ralo.errors import FormatError
from ralo.matrix import F32, Matrix

Stored = Callable[[str], NDArray[Any]]  # an array by its name


@dataclass(frozen=True)
class About:
    """Of one kind of weights; a subclass knows how to put a matrix together and what is written of it."""

    kind: ClassVar[str]  # its table in a pack, and the mode's name
    switch: ClassVar[str]  # of `ralo pack`, that makes them
    words: ClassVar[str]  # for people
    model: str  # fingerprint of the model they were made from
    settings: Mapping[str, Any]
    matrices: dict[str, Any] = field(default_factory=dict)  # by name: what `record` says of each

    @classmethod
    def record(cls, matrix: Any) -> Any:
        """What is written of a matrix, in JSON's words; it tells if an array was damaged."""
        raise NotImplementedError

    @classmethod
    def rebuilt(
        cls, settings: Mapping[str, Any], record: Any, ic: int, parts: Mapping[str, int], bias: F32 | None,
        stored: Stored,
    ) -> Any:  # fmt: skip
        """A matrix from its arrays. ValueError: they do not fit."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        matrices = dict(sorted(self.matrices.items()))
        return {"model": self.model, "settings": dict(self.settings), "matrices": matrices}

    @classmethod
    def read(cls, info: Fields) -> Self:
        table = info.sub(cls.kind)
        if table is None:
            raise info.fail(f"{cls.kind!r} is missing: pack the model again")
        values = table.values
        model, settings, matrices = values.get("model"), values.get("settings"), values.get("matrices")
        if not isinstance(model, str) or not isinstance(settings, dict) or not isinstance(matrices, dict):
            raise info.fail(f"{cls.kind!r} is not what ralo writes: pack the model again")
        return cls(model, settings, dict(matrices))

    def matrix(
        self, source: Path, name: str, ic: int, parts: Mapping[str, int], bias: F32 | None, stored: Stored
    ) -> Matrix:
        """The matrix of that name, looked at once to see that nothing is damaged."""
        record = self.matrices[name]
        try:
            matrix: Matrix = self.rebuilt(self.settings, record, ic, parts, bias, lambda part: stored(f"{name}.{part}"))
        except ValueError as error:
            raise FormatError(source, f"is damaged ({error}); pack the model again", name) from error
        if self.record(matrix) != record:
            raise FormatError(
                source, "is damaged: its weights are not those that were packed; pack the model again", name
            )
        return matrix


def checked(stored: Stored, kinds: Mapping[str, type[np.generic]]) -> dict[str, NDArray[Any]]:
    """Arrays by name, each of its type."""
    arrays = {part: stored(part) for part in kinds}
    for part, kind in kinds.items():
        if arrays[part].dtype != kind:
            raise ValueError(f"{part} is {arrays[part].dtype}, not {np.dtype(kind)}")
    return arrays
