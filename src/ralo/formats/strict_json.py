"""JSON from files of unknown origin: one object, no repeated keys, no NaN, and one clear line for anything else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from ralo.errors import FormatError


def parse_object(text: bytes, path: Path, what: str = "the file") -> dict[str, Any]:
    """The JSON object in text; path and what are named when it is not one."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise FormatError(path, f"{what} is not UTF-8 text") from None
    except RecursionError:
        raise FormatError(path, f"{what} nests JSON too deeply") from None
    except ValueError as error:
        raise FormatError(path, f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(path, f"{what} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {repeated[:80]!r} appears twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
