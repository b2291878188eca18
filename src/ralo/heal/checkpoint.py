"""A training that was stopped goes on where it was: its state in a folder beside what it is to become."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ralo.errors import RaloError
from ralo.remake.settings import claim

STATE = "state.pt"


class Checkpoint:
    """A folder that belongs to one training, told by its settings; whoever asked for the result removes it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        claim(folder, settings, "a healing")

    def load(self) -> dict[str, Any] | None:
        """The state that was saved last, or None."""
        path = self.folder / STATE
        if not path.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return state
        except Exception as error:  # whatever a damaged file makes torch raise
            raise RaloError(f"{path}: is damaged; remove {self.folder} and heal again") from error

    def save(self, state: Mapping[str, Any]) -> None:
        """It appears under its name only when it is complete."""
        partial = self.folder / f"{STATE}.partial"
        try:
            torch.save(dict(state), partial)
            os.replace(partial, self.folder / STATE)
        except (OSError, RuntimeError) as error:
            raise RaloError(f"{self.folder}: cannot be written: {error}") from error
