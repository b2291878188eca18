"""Texts that are kept after they were answered, so that one that starts alike does not run its beginning again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo.model import FEW, STRETCH
from ralo.sequence import Sequence as TextState

LEAST = 16  # tokens worth copying


@dataclass(eq=False)
class _Kept:
    tokens: NDArray[np.int64]
    seq: TextState
    sure: int  # tokens whose keys and values are those of a prompt; of later ones those of decoding
    kind: tuple[int, ...]  # what a text must have in common with it to be worth a look
    nbytes: int


class Prefixes:
    """The latest texts, within so many bytes.

    A beginning that ran as a prompt is taken up at a multiple of STRETCH, where the rest gives the bits it would give
    alone. A beginning with an answer in it is taken up whole: its keys and values are more exact than a prompt's.
    Without `answers` it is not, and every prompt has the bits it would have alone.
    """

    def __init__(self, room: int, answers: bool = True) -> None:
        self.room, self.answers = room, answers
        self._kept: list[_Kept] = []  # the latest last

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in list(self._kept))

    def find(self, prompt: Sequence[int], dense: bool) -> tuple[TextState, int] | None:
        """A copy of the longest known beginning, and how many of the prompt's tokens will be as alone."""
        tokens, kind = np.asarray(prompt, np.int64), _kind(prompt, dense)
        found, best = None, LEAST - 1
        for kept in self._kept:
            usable = _usable(kept, tokens, self.answers) if kept.kind == kind else 0
            if usable > best:
                found, best = kept, usable
        if found is None:
            return None
        self._kept.remove(found)
        self._kept.append(found)
        return found.seq.clone(best), len(prompt) if best <= found.sure else found.sure

    def keep(self, seq: TextState, sure: int, dense: bool) -> None:
        """A text that is not run any more. One that it continues is not needed beside it."""
        nbytes = seq.nbytes
        if len(seq) < LEAST or nbytes > self.room:
            return
        tokens, kind = np.asarray(seq.tokens, np.int64), _kind(seq.tokens, dense)
        self._kept = [old for old in self._kept if not (old.kind == kind and _starts(tokens, old.tokens))]
        self._kept.append(_Kept(tokens, seq, min(sure, len(seq)), kind, nbytes))
        while self.nbytes > self.room:
            del self._kept[0]


def _kind(tokens: Sequence[int], dense: bool) -> tuple[int, ...]:
    return (dense, *tokens[:LEAST])


def _starts(text: NDArray[np.int64], beginning: NDArray[np.int64]) -> bool:
    return len(beginning) <= len(text) and np.array_equal(text[: len(beginning)], beginning)


def _usable(kept: _Kept, prompt: NDArray[np.int64], answers: bool) -> int:
    """Tokens of a kept text that a prompt need not run again; its last few must run, and not alone (`pieces`)."""
    n = min(len(kept.tokens), len(prompt) - 1)
    differ = np.flatnonzero(kept.tokens[:n] != prompt[:n])
    shared = int(differ[0]) if len(differ) else n
    if shared > kept.sure and answers:
        return shared
    return min(shared, kept.sure, len(prompt) - FEW - 1) // STRETCH * STRETCH
