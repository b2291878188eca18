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
from ralo.proc.about import Made, matrix_from

SETTINGS, BUDGET, DIGESTS = "settings.json", "budget.json", "digests"
Key = tuple[int, str]  # layer, place


class Parts:
    """A folder beside the pack that is to be; it goes when the pack is there."""

    def __init__(self, to: Path, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.folder = to.with_name(to.name + ".building")
        said = json.dumps(dict(settings), indent=1, sort_keys=True)
        try:
            known = (self.folder / SETTINGS).read_text() if self.folder.exists() else None
            if known is None:
                self.folder.mkdir(parents=True)
                (self.folder / SETTINGS).write_text(said)
        except OSError as error:
            raise RaloError(f"{self.folder}: {error.strerror or error}") from error
        if known is not None and known != said:
            differ = _differ(known, settings)
            raise RaloError(f"{self.folder}: is of a pack with other settings ({differ}); use those, or remove it")

    def budget(self, find: Callable[[], dict[Key, int]]) -> dict[Key, int]:
        """Columns of every layer and place, as they were found once."""
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

    def finished(self, layer: int, shapes: Mapping[str, tuple[int, Mapping[str, int]]]) -> dict[str, Made]:
        """The matrices of a layer by place, {} where it is not finished; a damaged file counts as none."""
        path = self._path(layer)
        if not path.is_file():
            return {}
        try:
            tensors = safetensors.open_file(path)
            stored = {name: _own(t.stored()) for name, t in tensors.items()}
            made = {place: _matrix(self.settings, stored, place, *shape) for place, shape in shapes.items()}
            known = json.loads(safetensors.metadata(path)[DIGESTS])
            return made if known == {place: m.digest() for place, m in made.items()} else {}
        except (FormatError, RaloError, KeyError, ValueError):
            return {}

    def keep(self, layer: int, made: Mapping[str, Made]) -> None:
        arrays = {f"{place}.{part}": array for place, m in made.items() for part, array in m.arrays().items()}
        digests = {place: m.digest() for place, m in made.items()}
        safetensors.write_file(self._path(layer), arrays, {DIGESTS: json.dumps(digests)})

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.safetensors"


def _matrix(
    settings: Mapping[str, Any], stored: Mapping[str, NDArray[Any]], place: str, ic: int, parts: Mapping[str, int]
) -> Made:
    return matrix_from(settings, ic, parts, stored.get(f"{place}.bias"), lambda part: stored[f"{place}.{part}"])


def _own(array: NDArray[Any] | None) -> NDArray[Any]:
    if array is None:
        raise KeyError("not aligned")
    return np.array(array)


def _differ(known: str, settings: Mapping[str, Any]) -> str:
    try:
        before = json.loads(known)
        names = [k for k in settings if before.get(k) != settings[k]]
        return ", ".join(f"{k} was {before.get(k)!r:.40}" for k in names) or "of another kind"
    except (ValueError, AttributeError):
        return "unreadable"
