"""What ralo says when the input is at fault: one clear line, never a traceback."""

from __future__ import annotations

from pathlib import Path


class RaloError(Exception):
    """Bad usage or input. The message is one line that says what is wrong and what to do; commands exit 2 with it."""


class FormatError(RaloError):
    """A model file that cannot be read as it stands: names the file, the tensor where there is one, and the reason."""

    def __init__(self, path: Path | str, reason: str, tensor: str | None = None) -> None:
        where = f"{path}: tensor {tensor!r:.120}" if tensor else str(path)
        super().__init__(f"{where}: {reason}")
