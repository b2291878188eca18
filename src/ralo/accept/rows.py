"""What each mode promises, measured: one row per line of acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ralo.errors import RaloError
from ralo.lm import LM

Progress = Callable[[str], None]  # what is being measured now


@dataclass(frozen=True)
class Row:
    """One line: what was promised, what was measured."""

    mode: str
    line: str
    target: str
    value: str
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self)
        row["pass"] = row.pop("passed")
        return row


@dataclass(frozen=True)
class Task:
    """What to accept and how."""

    model: str
    quants: tuple[str, ...]
    tokens: int  # of held-out text
    rounds: int
    ctx: int  # tokens of context that decode speed is measured at
    minimum: dict[str, float]  # speed-up wanted per precision
    max_dppl: float


def at_most(mode: str, line: str, value: float, limit: float, shown: str) -> Row:
    return Row(mode, line, f"≤ {limit:g}", shown, value <= limit)


def at_least(mode: str, line: str, value: float, limit: float, shown: str) -> Row:
    return Row(mode, line, f"≥ {limit:g}", shown, value >= limit)


def holds(mode: str, line: str, ok: bool, shown: str = "") -> Row:
    return Row(mode, line, "holds", shown or ("yes" if ok else "no"), ok)


def shown(mode: str, line: str, value: str) -> Row:
    """To be seen beside the others; nothing was promised."""
    return Row(mode, line, "shown", value, True)


def unmeasured(mode: str, line: str, why: str) -> Row:
    """What cannot be measured on this model is not accepted."""
    return Row(mode, line, "measured", why, False)


def tried(mode: str, line: str, rows: Callable[[], list[Row]]) -> list[Row]:
    """Those rows, or one that says why this model has none of them."""
    try:
        return rows()
    except RaloError as error:
        return [unmeasured(mode, line, str(error))]


def needs_context(lm: LM, tokens: int) -> None:
    """Refuses a model whose texts cannot be that long."""
    if (most := lm.model.cfg.max_context) < tokens:
        raise RaloError(f"needs {tokens} tokens of context, this model has {most}")


def markdown(rows: Sequence[Row]) -> str:
    """The lines as a table for a page of documentation."""
    cells = [(r.mode, r.line, r.target, r.value, "yes" if r.passed else "**no**") for r in rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join(["| mode | line | target | measured | holds |", "|---|---|---|---|---|", *lines]) + "\n"


Acceptance = Callable[[Task, Callable[[str], LM], Progress], list[Row]]
