"""A folder for work that may be stopped and go on: it belongs to the settings it was begun with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ralo.errors import RaloError

SETTINGS = "settings.json"


def claim(folder: Path, settings: Mapping[str, Any], what: str) -> None:
    """Makes the folder, or sees that it is of the same work; `what` it is, for people."""
    said = json.dumps(dict(settings), indent=1, sort_keys=True)
    try:
        known = (folder / SETTINGS).read_text() if folder.exists() else None
        if known is None:
            folder.mkdir(parents=True)
            (folder / SETTINGS).write_text(said)
    except OSError as error:
        raise RaloError(f"{folder}: {error.strerror or error}") from error
    if known is not None and known != said:
        differ = _differ(known, settings)
        raise RaloError(f"{folder}: is of {what} with other settings ({differ}); use those, or remove it")


def _differ(known: str, settings: Mapping[str, Any]) -> str:
    try:
        before = json.loads(known)
        names = [k for k in settings if before.get(k) != settings[k]]
        return ", ".join(f"{k} was {before.get(k)!r:.40}" for k in names) or "of another kind"
    except (ValueError, AttributeError):
        return "unreadable"
