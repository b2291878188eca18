"""Drafts by the modes, verified densely: several tokens for one reading of the weights, and dense's own text.

The modes run a few tokens ahead, choosing each as the sampler will; one dense pass over those tokens then gives the
scores that dense would have given. Every token of the text is chosen from dense scores, with the random numbers it
would have had: greedy or sampled, the text is the one that dense makes.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ralo.model import FEW, Around, Model
from ralo.sampling import Sampler
from ralo.sequence import Sequence

F32 = NDArray[np.float32]
FIRST = (3, 0, 1, 2, 1, 3)  # tokens drafted before anything is known; none: what drafting is compared with
RETRY = (1, 2)  # tokens drafted where it did not pay, to see whether it does now
AGAIN = 64  # tokens between
SMOOTH = 0.05  # of one more token in what is expected
LAST = 15  # times that are remembered of each kind


@dataclass
class Drafting:
    """How many tokens to draft: as many as make the expected time of a token least. Times are medians of the last ones:
    a moment when the machine was busy elsewhere says nothing."""

    accept: float = 0.8  # probability that a drafted token is dense's own
    draft_s: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))  # of one drafted token
    verify_s: dict[int, deque[float]] = field(default_factory=dict)  # of a dense pass, by its tokens
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    plan: list[int] = field(default_factory=lambda: list(FIRST))  # counts that are tried next

    def count(self) -> int:
        if self.plan:
            return self.plan.pop(0)
        best = min(range(FEW), key=self._seconds)
        if best == 0:
            self.plan = [0] * AGAIN + list(RETRY)
        return best

    def _seconds(self, m: int) -> float:
        """Expected time of a token with m drafted."""
        tokens = sum(self.accept**i for i in range(m + 1))
        return (m * statistics.median(self.draft_s) + self._verify(m + 1)) / tokens

    def _verify(self, tokens: int) -> float:
        """Of a pass of so many tokens: a line through those that were seen, nearest ones first."""
        near = sorted(self.verify_s, key=lambda n: abs(n - tokens))[:2]
        a, b = (statistics.median(self.verify_s[n]) for n in near)
        slope = max(0.0, (b - a) / (near[1] - near[0]))
        return a + slope * (tokens - near[0])

    def saw(self, drafts: int, draft_s: float, verify_s: float) -> None:
        self.passes += 1
        self.drafted += drafts
        if drafts and self.passes > 1:  # the first one sets up what modes remember of the prompt
            self.draft_s.append(draft_s / drafts)
        self.verify_s.setdefault(drafts + 1, deque(maxlen=LAST)).append(verify_s)

    def judged(self, good: bool) -> None:
        self.accepted += good
        self.accept += SMOOTH * (good - self.accept)

    def metrics(self) -> dict[str, float]:
        rate = self.accepted / self.drafted if self.drafted else 0.0
        ahead = self.drafted / self.passes if self.passes else 0.0
        return {"accept_rate": rate, "drafts": ahead, "passes": float(self.passes)}


class Verified(Around):
    """Runs one text, whose tokens `sampler` chooses; what it gives is dense, bit for bit."""

    def __init__(self, model: Model, drafting: Drafting, sampler: Sampler) -> None:
        super().__init__(model)
        self.drafting, self.sampler = drafting, sampler
        self._ready: deque[tuple[int, F32]] = deque()  # drafted tokens, and the dense scores after them

    def prefill(self, tokens: Many[int], seq: Sequence) -> F32:
        self._forget(seq)
        return self.model.prefill(tokens, seq, dense=True)

    def step(self, token: int, seq: Sequence) -> F32:
        if self._ready:
            drafted, logits = self._ready[0]
            self.drafting.judged(drafted == token)
            if drafted == token:
                self._ready.popleft()
                seq.accept(token)
                return logits
        self._forget(seq)
        room = self.cfg.max_context - len(seq) - 1
        return self._ahead(token, seq, min(self.drafting.count(), room))

    def _ahead(self, token: int, seq: Sequence, count: int) -> F32:
        start, clock, tokens = len(seq), time.perf_counter(), [token]
        choose = self.sampler.fork()
        for _ in range(count):
            tokens.append(choose(self.model.step(tokens[-1], seq), seq.tokens))
        drafted = time.perf_counter()
        seq.rewind(start)
        logits = self.model.verify(tokens, seq)
        self.drafting.saw(count, drafted - clock, time.perf_counter() - drafted)
        seq.rewind(start + 1)
        self._ready.extend(zip(tokens[1:], logits[1:], strict=True))
        first: F32 = logits[0]
        return first

    def _forget(self, seq: Sequence) -> None:
        self._ready.clear()
        seq.trim(len(seq))  # what modes remember of tokens that were not to be
