"""What was measured, by name, in a file: a search that is cut goes on from there, and one that is run again on the same
measurements finds the same plan."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ralo.errors import RaloError

FORMAT = 1
Measured = Mapping[str, Any]


class OutOfTime(Exception):
    """The time that a search may take is spent."""


class Record:
    """Measurements and the seconds each took. Time that is in the record counts as spent, so that a search that is run
    again stops where it stopped."""

    def __init__(self, path: Path | None, about: Mapping[str, Any], seconds: float) -> None:
        self.path, self.about, self.seconds = path, dict(about), seconds
        self.known: dict[str, dict[str, Any]] = self._read() if path and path.exists() else {}
        self.spent = 0.0
        self.used: set[str] = set()
        self.fresh = 0  # measured now, not found in the record

    def get(self, name: str, measure: Callable[[], Measured], must: bool = False) -> dict[str, Any]:
        """What was measured under this name, now or before. `must`: even where the time is up."""
        if name not in self.known:
            if self.spent > self.seconds and not must:
                raise OutOfTime
            clock = time.monotonic()
            found = dict(measure())
            self.known[name] = {"took": round(time.monotonic() - clock, 3), "found": found}
            self.fresh += 1
            self.save()
        elif name not in self.used and self.spent > self.seconds and not must:
            raise OutOfTime
        if name not in self.used:
            self.used.add(name)
            self.spent += float(self.known[name]["took"])
        return dict(self.known[name]["found"])

    def note(self, name: str, found: Measured) -> None:
        """Something to be remembered that took no measurement."""
        self.known[name] = {"took": 0.0, "found": dict(found)}
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            partial.write_text(json.dumps({"format": FORMAT, "about": self.about, "measured": self.known}, indent=1))
            os.replace(partial, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise RaloError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def _read(self) -> dict[str, dict[str, Any]]:
        assert self.path is not None
        try:
            held = json.loads(self.path.read_text(encoding="utf-8"))
            known, about = dict(held["measured"]), dict(held["about"])
            sound = all(e["took"] >= 0 and isinstance(e["found"], dict) for e in known.values())
            ok = held["format"] == FORMAT and sound
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RaloError(f"{self.path}: is not a record of measurements; choose another --record") from error
        if not ok:
            raise RaloError(f"{self.path}: is a record of another ralo; choose another --record")
        for what, value in self.about.items():
            if about.get(what) != value:
                had = f"{about.get(what)!r:.60}, not {value!r:.60}"
                raise RaloError(f"{self.path}: was measured with {what} {had}; choose another --record")
        return known
