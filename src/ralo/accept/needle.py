"""Needles in a long text: somebody who was spoken of far back is asked for at its end, densely and with modes on.

A small model that has read novels does not repeat a password from thousands of tokens before, but a rare name that it
has met becomes far more likely. So a needle is a passage about a person within ordinary prose, and it is found where
that makes the name at least e^FOUND times as likely at the end as the same prose without it. Names that are in no text
show how often this happens by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo import texts
from ralo.errors import RaloError
from ralo.lm import LM
from ralo.quality import nll
from ralo.sequence import Sequence as TextState

F64 = NDArray[np.float64]
Tokens = Mapping[str, Sequence[int]]  # by name

NAMES = (
    "Bartholomew Quillfeather", "Ottilie Threlkeld", "Zebedee Sandpiper", "Ludovic Vandeleur", "Jemima Pomfret",
    "Ignatius Ostrander", "Peregrine Hawtrey", "Philippa Thackwell", "Rosamund Brackenbury", "Wilfrid Cormorant",
    "Araminta Featherstone", "Cuthbert Wolverley", "Dorothea Pennyfold", "Ephraim Gallowglass", "Griselda Murchison",
    "Hezekiah Drummond", "Leopold Castlemaine", "Mehitabel Larkspur", "Septimus Ravenscroft", "Valentine Ormskirk",
)  # fmt: skip
PASSAGE = (
    "\n\n“I am {n},” said the stranger. “{n}!” they cried. “Yes, {n},” said the stranger again; “my name is {n}.” "
    "And nobody was so well known as {n}.\n\n"
)
CUE = "\n\n“I am"
HAYSTACK = ("held_out", "tuning", "calibration")  # novels, one after the other
MOST = len(NAMES) // 2  # depths: for each name in the text one is asked for that is not
ROUNDS = 4  # with other names at every depth
FOUND = 6.0  # nats


@dataclass(frozen=True)
class Needles:
    """How many names were found, and how many of as many that were in no text would have counted as found."""

    trials: int
    dense: int
    ours: int
    guessed: int
    ours_guessed: int
    dense_by_depth: tuple[int, ...]  # from the text's beginning to its end
    ours_by_depth: tuple[int, ...]
    dense_nats: tuple[float, ...]  # mean rise of the log probability
    ours_nats: tuple[float, ...]


def needle(lm: LM, ctx: int, depths: int = MOST) -> Needles:
    """Names at `depths` places of a text that is `ctx` tokens long with the question."""
    if not 1 <= depths <= MOST:
        raise RaloError(f"a needle test has from 1 to {MOST} depths, got {depths}")
    rise, chance = _rises(lm, ctx, depths)
    dense, ours = (tuple(int(n) for n in path) for path in (rise >= FOUND).sum(axis=0).T)
    nats = (tuple(float(x) for x in path) for path in rise.mean(axis=0).T)
    guessed, ours_guessed = (int(n) for n in (chance >= FOUND).sum(axis=(0, 1)))
    return Needles(ROUNDS * depths, sum(dense), sum(ours), guessed, ours_guessed, dense, ours, *nats)


def _rises(lm: LM, ctx: int, depths: int) -> tuple[F64, F64]:
    """How log probabilities rise, dense and ours (ROUNDS, depths, 2): of names in the text, and of others."""
    names = {name: _tokens(lm, f"{CUE} {name}")[len(_tokens(lm, CUE)) :] for name in NAMES}
    passages = {name: _tokens(lm, PASSAGE.format(n=name)) for name in NAMES}
    hay, together = _haystack(lm, ctx, names, passages)
    parts = -(-depths // together)  # texts that the depths are spread over
    before = _asked(lm, hay, names)
    rise, chance = np.zeros((2, ROUNDS, depths, 2))
    for r in range(ROUNDS):
        order = np.roll(NAMES, r * len(NAMES) // ROUNDS).tolist()
        there, absent = order[:depths], order[MOST:]
        for here in (range(part, depths, parts) for part in range(parts)):
            text = _bury(hay, {(d + 0.5) / depths: passages[there[d]] for d in here})
            after = _asked(lm, text, {name: names[name] for d in here for name in (there[d], absent[d])})
            for d in here:
                rise[r, d] = after[there[d]] - before[there[d]]
                chance[r, d] = after[absent[d]] - before[absent[d]]
    return rise, chance


def _tokens(lm: LM, text: str) -> list[int]:
    return lm.tokenizer.encode(text, special=False)


def _haystack(lm: LM, ctx: int, names: Tokens, passages: Tokens) -> tuple[list[int], int]:
    """Prose that leaves room for the question, and how many needles go into it: at least half of it stays prose."""
    question = len(_tokens(lm, CUE)) + max(map(len, names.values()))
    longest = max(map(len, passages.values()))
    hay = lm.encode("\n\n".join(texts.read(name) for name in HAYSTACK))
    least, most = question + 2 * longest, min(lm.model.cfg.max_context, question + len(hay))
    if not least <= ctx <= most:
        raise RaloError(f"a needle test of this model needs {least} to {most} tokens of context, got {ctx}")
    return hay[: ctx - question], (ctx - question) // 2 // longest


def _bury(hay: Sequence[int], needles: Mapping[float, Sequence[int]]) -> list[int]:
    """As many tokens as `hay`, with each needle at its share of the way through."""
    room, text, at = len(hay) - sum(map(len, needles.values())), list[int](), 0
    for share, passage in sorted(needles.items()):
        end = int(share * room)
        text, at = [*text, *hay[at:end], *passage], end
    return [*text, *hay[at:room]]


def _asked(lm: LM, text: Sequence[int], names: Tokens) -> dict[str, F64]:
    """Log probability of each name after the text and the cue: dense, and with the modes that are on (2)."""
    seq = lm.new_sequence()
    lm.model.prefill(text, seq, dense=True)
    dense = _decoded(lm, seq, names, dense=True)
    ours = _decoded(lm, seq, names, dense=False) if lm.model.has_modes else dense
    return {name: np.array([dense[name], ours[name]]) for name in names}


def _decoded(lm: LM, seq: TextState, names: Tokens, dense: bool) -> dict[str, float]:
    """The cue and each name token by token, since modes act while decoding."""
    asked = seq.clone()
    first = [lm.model.step(token, asked, dense) for token in _tokens(lm, CUE)][-1]
    out = {}
    for name, tokens in names.items():
        copy = asked.clone()
        scores = [first, *(lm.model.step(token, copy, dense) for token in tokens[:-1])]
        out[name] = -float(nll(np.stack(scores), np.asarray(tokens)).sum())
    return out
