"""What a report is made of, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

from ralo import screen

if TYPE_CHECKING:
    from ralo.accept.rows import Row

NOTHING = "?"  # what stands where no number is known
Gap = Sequence[tuple[int, float]]  # token, KL from dense
TOO_LARGE = 1e9  # to be drawn or to be read


@dataclass(frozen=True)
class Point:
    """One way of running the model. Quality that is None is not known, as a peer's."""

    name: str
    kind: str  # dense, mode, plan or peer
    ctx: int  # tokens of context that the speed was measured at
    speedup: float  # over dense int8 in the same run
    speedup_ci95: tuple[float, float]
    delta_ppl_pct: float | None
    delta_ppl_ci95: tuple[float, float] | None
    kl: float | None = None
    tok_s: float | None = None
    nbytes: int | None = None  # memory of weights
    cache_nbytes: int | None = None  # and of the cache at ctx


@dataclass(frozen=True)
class Cell:
    """One place of one layer: bytes read there / dense int8's, and what runs, for people."""

    keep: float
    text: str


@dataclass(frozen=True)
class Report:
    """What is empty has no section."""

    title: str  # the model
    about: Mapping[str, str]  # "CPU": ..., "threads": ..., "command": ...
    summary: Sequence[tuple[str, str, str]] = ()  # label, big figure, note
    points: Sequence[Point] = ()
    budgets: Sequence[tuple[float, Point]] = ()  # most that perplexity may rise, in percent -> the plan found
    places: Sequence[str] = ()  # columns of the heat map
    layers: Sequence[Sequence[Cell]] = ()  # its rows
    gap: Mapping[str, Gap] = field(default_factory=dict)  # of each mode or plan
    rows: Sequence[Row] = ()  # lines of acceptance


def known(value: float | None) -> TypeGuard[float]:
    """Whether it can be drawn."""
    return value is not None and math.isfinite(value) and abs(value) < TOO_LARGE


def number(value: float | None, form: str) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    return format(value, form) if abs(value) < TOO_LARGE else f"{value:.3g}"


def times(value: float | None) -> str:
    return NOTHING if (text := number(value, ".2f")) == NOTHING else f"{text}x"


def interval(ends: tuple[float, float] | None, form: str) -> str:
    if ends is None or not all(map(math.isfinite, ends)):
        return NOTHING
    return " … ".join(number(end, form) for end in ends)


def size(nbytes: int | None) -> str:
    return NOTHING if nbytes is None or not math.isfinite(nbytes) else screen.size(nbytes)


def tokens(ctx: int) -> str:
    return f"{ctx} tokens of context"
