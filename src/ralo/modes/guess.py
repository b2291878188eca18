"""Which gates are worth computing: factors guess the gate, at the rank with which a layer reads least.

A rank is judged by the winners it finds on inputs that calibration kept: the fewest candidates that hold RECALL of
them, the factors' own bytes, and the time of two more steps. Where no rank takes less than WORTH of what the gate takes
without, nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.matrix import F32, Matrix, padded
from ralo.modes.base import ZEROS
from ralo.profile import Guess
from ralo.remake.quantised import quantised
from ralo.tt.lowrank import wide
from ralo.tt.matrix import RANK, STEP, FactoredMatrix, Train

Bool = NDArray[np.bool_]
RANKS = (8, 16, 32, 64, 128, 256)
RECALL = 0.99  # of winners, that candidates are to hold
WORTH = 0.9  # of what the gate takes without a guess, that it may take with one


@dataclass(frozen=True)
class Chosen:
    """Factors of a gate, and what is expected of them."""

    factors: FactoredMatrix
    slack: float  # a candidate: guess + slack > 0,
    keep: int  # or, not 0, as many by |act(guess)| * norm
    recall: float  # share of winners that are candidates
    candidates: float  # share of neurons that are
    reads: float  # share of the gate's bytes: of the factors, and of the candidates' gates
    takes: float  # the same with what could be read in the time of two more steps

    @property
    def rank(self) -> int:
        return self.factors.train.ranks[0]

    def refused(self, without: float) -> str:
        """Why it does not pay where `without` of the gate is read anyway; empty: it does."""
        if self.takes <= WORTH * without:
            return ""
        return f"{self}, which takes as long as {self.takes:.2f} of it, more than {WORTH * without:.2f}"

    def slot(self, up: Matrix) -> _core.RankGuess:
        """For the MLP with these weights."""
        f = up.parts["gate"]
        rows = _core.neuron_rows(up.core, up.slices["gate"].start, f)
        return _core.RankGuess(self.factors.core, up.quant, up.ic, f, *rows, self.slack, self.keep)

    def __str__(self) -> str:
        found = f"{self.recall:.3f} of winners in {self.candidates:.2f} of gates"
        return f"rank {self.rank} finds {found} and reads {self.reads:.2f} of the gate"


@dataclass(frozen=True)
class Rule:
    """How winners are picked among act(gate), as in KwtaMlp."""

    pick: str  # above, top or mass
    amount: float
    temp: float
    norms: F32  # (F)

    def winners(self, acts: F32) -> Bool:
        """(T, F) -> which ones win."""
        out, room = np.zeros(acts.shape, np.bool_), np.empty(acts.shape[1], np.uint32)
        for a, won in zip(acts, out, strict=True):
            if self.pick == "above":
                count = _core.select_above(a, self.norms, self.amount, room)
            elif self.pick == "top":
                count = _core.select_top(a, self.norms, min(len(a), int(self.amount)), room)
            else:
                count = _core.select_mass(a, self.norms, self.amount, 1 / self.temp, room)
            won[room[:count]] = True
        return out


def best(up: Matrix, act: str, known: Guess, inputs: F32, rule: Rule) -> Chosen:
    """The rank that takes least for an MLP's gate, given factors of the largest one and inputs (T, D)."""
    at, f = up.slices["gate"], up.parts["gate"]
    whole = up.nbytes * padded(f) / up.oc  # of the gate
    won = rule.winners(acts(act, up(inputs)[:, at]))
    bias = np.float32(0) if up.bias is None else up.bias[at]
    most = known[0].shape[1]
    tried = []
    for rank in [*(r for r in RANKS if r < most), most]:
        factors = factored(known, rank, "int8" if up.quant == "int4" else up.quant)
        guess = factors(inputs)[:, :f] + bias
        slack, keep, likely = (
            by_slack(guess, won) if act in ZEROS else by_count(acts(act, guess) * rule.norms, won, int(rule.amount))
        )
        recall = float(likely[won].mean()) if won.any() else 1.0
        reads = factors.nbytes / whole + float(likely.mean())
        takes = reads + 2 * STEP / whole
        tried.append(Chosen(factors, slack, keep, recall, float(likely.mean()), reads, takes))
    return min(tried, key=lambda chosen: chosen.takes)


def factored(known: Guess, rank: int, quant: str) -> FactoredMatrix:
    """The first `rank` of what is known, packed."""
    (d, _), f = known[0].shape, known[1].shape[1]
    first, _ = quantised(quant, wide(known[0][:, :rank].astype(np.float64)), {RANK: rank}, None)
    second, _ = quantised(quant, wide(known[1][:rank].astype(np.float64)), {"gate": f}, None)
    return FactoredMatrix(d, {"gate": f}, Train.two(d, padded(f), rank), [first, second], None)


def acts(act: str, gates: F32) -> F32:
    gates = np.ascontiguousarray(gates)
    out = np.empty_like(gates)
    _core.act(act, gates, None, out)
    return out


def by_slack(guess: F32, won: Bool) -> tuple[float, int, Bool]:
    """How far below zero a guess may be, so that RECALL of the winners are candidates; which ones are."""
    found = guess[won]
    least = np.quantile(found, 1 - RECALL, method="lower") if len(found) else np.float32(1)
    slack = np.float32(0) if least > 0 else np.nextafter(-least, np.float32(np.inf))
    return float(slack), 0, guess + slack > 0


def by_count(scores: F32, won: Bool, least: int) -> tuple[float, int, Bool]:
    """The fewest of the largest scores that hold RECALL of the winners, and as many as are to win; which ones those
    are."""
    place = np.argsort(np.argsort(-np.abs(scores), axis=1, kind="stable"), axis=1)
    needed = int(np.quantile(place[won], RECALL, method="higher")) + 1 if won.any() else 1
    keep = max(least, needed)
    return 0.0, keep, place < keep
