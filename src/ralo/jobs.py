"""What is asked of the engine, and what it gives back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ralo.errors import RaloError
from ralo.generate import Request
from ralo.quality import log_probs


class Busy(RaloError):
    """No room for one more: try again after so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__("the server has as many requests as it can take: try again later")
        self.seconds = seconds


class Closed(RaloError):
    """Nothing is taken any more."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(frozen=True)
class Chosen:
    """A token's log-probability and the likeliest ones', best first, of the scores before sampling's limits."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Delta:
    """What one pass added to one answer. `finish`: length, stop, eos, context, cancelled, or "" while it goes on."""

    choice: int
    text: str
    finish: str = ""
    chosen: Chosen | None = None
    error: str = ""  # why it could not go on


@dataclass(eq=False)
class Job:
    """One prompt and the answers wanted of it, which differ in their random numbers."""

    requests: Sequence[Request]
    dense: bool = False  # leave the modes aside
    top: int | None = None  # log-probabilities of so many likeliest tokens
    cached: int = 0  # tokens of the prompt that were known already
    cancelled: bool = False
    open: set[int] = field(init=False)  # answers that are not finished
    asked_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.open = set(range(len(self.requests)))

    @property
    def prompt(self) -> Sequence[int]:
        return self.requests[0].prompt


Made = list[tuple[Job, Delta]]


def chosen_of(token: int, logits: NDArray[np.float32], top: int) -> Chosen:
    logp = log_probs(logits[None])[0]
    best = np.sort(np.argpartition(-logits, min(top, len(logits) - 1))[:top])
    best = best[np.argsort(-logits[best], kind="stable")]
    return Chosen(token, float(logp[token]), [(int(i), float(logp[i])) for i in best])
