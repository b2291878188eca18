"""How the next token is chosen from the scores: greedy, or sampled within the usual limits, repeatable by seed."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ralo.errors import RaloError
from ralo.options import flag

PENALTY_WINDOW = 64  # latest tokens that the repetition penalties look at


@dataclass(frozen=True)
class Sampling:
    temperature: float = flag(0.8, "randomness; 0 = always the likeliest token", low=0, high=10)
    top_k: int = flag(0, "only the k likeliest tokens; 0 = all", low=0, high=1 << 30)
    top_p: float = flag(0.95, "only the likeliest tokens that together have this probability", low=0, high=1)
    min_p: float = flag(0.0, "only tokens at least this likely relative to the likeliest", low=0, high=1)
    repeat_penalty: float = flag(1.0, "divides scores of recent tokens; 1 = none", low=0.1, high=10)
    presence_penalty: float = flag(0.0, "subtracted from scores of recent tokens; 0 = none", low=-10, high=10)
    frequency_penalty: float = flag(0.0, "the same for each time they occur; 0 = none", low=-10, high=10)
    seed: int = flag(-1, "same seed, same text; -1 = a new one each time", low=-1, high=(1 << 63) - 1)

    def __post_init__(self) -> None:
        for field in fields(self):
            value, low, high = getattr(self, field.name), field.metadata["low"], field.metadata["high"]
            if not low <= value <= high:
                raise RaloError(f"{field.name} must be a number from {low:g} to {high:g}, got {value!r}")


class Sampler:
    """A Sampling with its random numbers; `seed` is the one in use."""

    def __init__(self, options: Sampling) -> None:
        self.options = options
        self.seed = options.seed if options.seed >= 0 else int(np.random.SeedSequence().generate_state(1)[0])
        self._random = np.random.default_rng(self.seed)

    def fork(self) -> Sampler:
        """One that will choose as this one will, without using up its random numbers."""
        other = copy.copy(self)
        if not self.greedy:
            other._random = copy.deepcopy(self._random)
        return other

    @property
    def greedy(self) -> bool:
        return self.options.temperature == 0 or self.options.top_k == 1

    def __call__(self, logits: NDArray[np.float32], recent: Sequence[int] = ()) -> int:
        o = self.options
        if recent and (o.repeat_penalty != 1 or o.presence_penalty or o.frequency_penalty):
            logits = self._penalised(logits, recent)
        best = int(logits.argmax())
        if not math.isfinite(logits[best]):  # NaN or +inf anywhere, or nothing but -inf
            raise RaloError("the model's scores are not finite numbers: its weights are damaged")
        if self.greedy:
            return best
        ids, p = self._candidates(logits)
        total = np.cumsum(p)
        return int(ids[np.searchsorted(total, self._random.random() * total[-1], side="right")])

    def _penalised(self, logits: NDArray[np.float32], recent: Sequence[int]) -> NDArray[np.float32]:
        o = self.options
        seen, times = np.unique(np.asarray(recent[-PENALTY_WINDOW:], np.int64), return_counts=True)
        logits = logits.copy()
        scores = logits[seen]
        with np.errstate(over="ignore"):  # scores near the end of float32's range, of damaged weights
            scores = np.where(scores > 0, scores / o.repeat_penalty, scores * o.repeat_penalty)
        logits[seen] = scores - (o.presence_penalty + times * o.frequency_penalty).astype(np.float32)
        return logits

    def _candidates(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Token ids and their weights after every limit; likeliest first where there is one."""
        o = self.options
        ids = np.arange(len(logits))
        limited = 0 < o.top_k < len(logits)
        if limited:
            ids = np.argpartition(-logits, o.top_k)[: o.top_k]
        if limited or o.min_p > 0 or o.top_p < 1:
            ids = ids[np.argsort(-logits[ids], kind="stable")]
        p = np.exp((logits[ids].astype(np.float64) - float(logits.max())) / o.temperature)
        if o.min_p > 0:
            p = p[p >= o.min_p]
        if o.top_p < 1:
            share = np.cumsum(p) / p.sum()
            p = p[: int(np.searchsorted(share, o.top_p)) + 1]
        return ids[: len(p)], p
