"""How a training goes, and what is told of it when it is over."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ralo.errors import RaloError

HELD_WINDOWS = 16  # of the text, the last, that are only measured on
HELD_PART = 0.1  # of a short text
WARM_UP = 0.05  # of the training, while the step size rises
LAST = 0.05  # of the step size, where it ends


@dataclass(frozen=True)
class Settings:
    ctx: int = 512  # tokens of a window
    batch: int = 16  # windows of a step
    lr: float = 3e-4
    minutes: float = 10.0
    steps: int = 0  # instead of minutes
    seed: int = 0
    mix: float = 0.0  # weight of the text's own next token; the rest is the teacher's

    def done(self, step: int, seconds: float) -> float:
        """Share of the training that is behind, 0 to 1."""
        return min(1.0, step / self.steps if self.steps else seconds / max(1e-9, 60 * self.minutes))

    def rate(self, step: int, seconds: float) -> float:
        """Size of the next step: up in a line, then down along a cosine."""
        done = self.done(step + 1, seconds)
        if done < WARM_UP:
            return self.lr * done / WARM_UP
        along = (done - WARM_UP) / (1 - WARM_UP)
        return self.lr * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * along)))


@dataclass
class Record:
    """What a training did."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    kl_before: float = math.nan  # from the dense model, on text that was not trained on
    kl_after: float = math.nan
    losses: list[tuple[int, float]] = field(default_factory=list)  # step, mean since the one before

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "losses": [(int(step), float(loss)) for step, loss in values["losses"]]})


def split(tokens: NDArray[Any], ctx: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens to train on, and windows (n, ctx) from the end of the text to measure on."""
    if len(tokens) < (need := 4 * ctx):
        raise RaloError(f"the text has {len(tokens)} tokens; healing needs at least {need}, better some millions")
    windows = max(1, min(HELD_WINDOWS, int(HELD_PART * len(tokens) / ctx)))
    whole = np.ascontiguousarray(tokens, np.int32)
    cut = len(tokens) - windows * ctx
    return whole[:cut], whole[cut:].reshape(windows, ctx)


def starts(settings: Settings, step: int, tokens: int) -> NDArray[np.int64]:
    """Where the windows of a step begin: said by the seed and the step alone, so a resumed training sees the same."""
    return np.random.default_rng((settings.seed, step)).integers(0, tokens - settings.ctx + 1, settings.batch)


def digest(tokens: NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.uint32).tobytes(), digest_size=8).hexdigest()
