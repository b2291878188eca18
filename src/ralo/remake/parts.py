"""Layers that are finished, kept on disk while a pack is being built, so that a build that was stopped can go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo.errors import FormatError, RaloError
from ralo.formats import safetensors
from ralo.matrix import Matrix
from ralo.remake.about import About
from ralo.remake.layer import Refusal, matrices_of
from ralo.remake.settings import claim

BUDGET, RECORDS = "budget.json", "records"
REFUSED = "refused"
Key = tuple[int, str]  # layer, place


class Parts:
    """A folder beside the pack that is to be; it goes when the pack is there."""

    def __init__(self, to: Path, settings: Mapping[str, Any], about: type[About]) -> None:
        self.settings, self.about = settings, about
        self.folder = to.with_name(to.name + ".building")
        claim(self.folder, settings, "a pack")

    def budget(self, find: Callable[[], dict[Key, int]]) -> dict[Key, int]:
        """Columns, or a rank, of every layer and place, as they were found once."""
        path = self.folder / BUDGET
        try:
            known = json.loads(path.read_text())
            return {(int(i), str(place)): int(n) for i, place, n in known}
        except FileNotFoundError:
            found = find()
            path.write_text(json.dumps([[i, place, n] for (i, place), n in found.items()]))
            return found
        except (ValueError, TypeError) as error:
            raise RaloError(f"{path}: is damaged; remove {self.folder} and pack again") from error

    def finished(self, layer: int, shapes: Mapping[str, tuple[int, Mapping[str, int]]]) -> dict[str, Any]:
        """What was made of a layer by place, {} where it is not finished; a damaged file counts as none."""
        path = self._path(layer)
        if not path.is_file():
            return {}
        try:
            tensors = safetensors.open_file(path)
            stored = {name: _own(t.stored()) for name, t in tensors.items()}
            known = json.loads(safetensors.metadata(path)[RECORDS])
            made = {place: self._matrix(stored, place, known[place], *shape) for place, shape in shapes.items()}
            return made if known == self._records(made) else {}
        except (FormatError, RaloError, KeyError, ValueError):
            return {}

    def keep(self, layer: int, made: Mapping[str, Matrix | Refusal]) -> None:
        matrices = matrices_of(made).items()
        arrays = {f"{place}.{part}": array for place, m in matrices for part, array in m.arrays().items()}
        safetensors.write_file(self._path(layer), arrays, {RECORDS: json.dumps(self._records(made))})

    def _records(self, made: Mapping[str, Any]) -> dict[str, Any]:
        return {p: {REFUSED: m} if isinstance(m, Refusal) else self.about.record(m) for p, m in made.items()}

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.safetensors"

    def _matrix(
        self, stored: Mapping[str, NDArray[Any]], place: str, record: Any, ic: int, parts: Mapping[str, int]
    ) -> Any:
        if isinstance(record, dict) and REFUSED in record:
            return Refusal(record[REFUSED])
        bias = stored.get(f"{place}.bias")
        return self.about.rebuilt(self.settings, record, ic, parts, bias, lambda part: stored[f"{place}.{part}"])


def _own(array: NDArray[Any] | None) -> NDArray[Any]:
    if array is None:
        raise KeyError("not aligned")
    return np.array(array)
