"""How long the places of a model take within a token on this CPU. By itself a matrix is read otherwise than between
the others, and what a choice, a hand-over and a look at the result take is left out: so whole tokens are timed, with a
place read in part and densely in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ralo.lm import LM
from ralo.matrix import HALVED, Matrix
from ralo.modes import KWTA
from ralo.modes.base import LayerSlots, Override, views_of
from ralo.modes.mix import HEAD, CoarseSlot
from ralo.modes.share import FINE, KEEP_ALL
from ralo.profile import Profile
from ralo.weights import PLACES, LayerWeights

F32 = NDArray[np.float32]

TIMED = (0.25, 0.5, 0.75, 1.0)  # shares of a place's channels
CONTEXT, TOKENS = 64, 8  # tokens before those that are timed, and of a turn at most
TURN_S, EACH_S = 0.006, 1.0  # about what a turn takes, and all turns of a comparison
FEWEST, MOST = 9, 81  # turns


class Turns:
    """Tokens of a text, run again and again with some slots filled and with none, in turns. Leaves the model dense."""

    def __init__(self, lm: LM, tokens: Sequence[int]) -> None:
        self.model, self.seq = lm.model, lm.new_sequence()
        self.text = tokens[: min(CONTEXT + TOKENS + 1, lm.model.cfg.max_context)]
        self.context = max(0, len(self.text) - TOKENS - 1)
        self.none = _none(lm)
        for token in self.text[: self.context]:
            self.model.step(token, self.seq, dense=True)
        self.count = TOKENS
        once = min(self._took(self.none) for _ in range(3))
        self.count = max(1, min(TOKENS, int(TURN_S / once)))
        self.turns = max(FEWEST, min(MOST, int(EACH_S / (2 * once * (self.count + 1)))))
        self.dense = statistics.median(self._took(self.none) for _ in range(self.turns))  # seconds of a token

    def more(self, slots: list[LayerSlots]) -> float:
        """Seconds that a token takes more with these slots than densely; below zero where it takes less."""
        found: list[float] = []
        for turn in range(self.turns if any(s.taken for s in slots) else 0):
            took = {filled: self._took(slots if filled else self.none) for filled in (turn % 2 > 0, turn % 2 == 0)}
            found.append(took[True] - took[False])
        self.model.use(self.none)
        return statistics.median(found) if found else 0.0

    def _took(self, slots: list[LayerSlots]) -> float:
        """Seconds of a token. The first of a turn is left out: it finds the caches as the others left them."""
        self.model.use(slots)
        self.seq.trim(self.context)
        first, *rest = self.text[self.context :][: self.count + 1]
        self.model.step(first, self.seq)
        clock = time.perf_counter()
        for token in rest:
            self.model.step(token, self.seq)
        return max(1e-9, time.perf_counter() - clock) / max(1, len(rest))


@dataclass(frozen=True)
class Places:
    """Seconds of a layer's places. By halves: nothing where weights are not int8."""

    whole: Mapping[str, F32]  # (2, levels): share of the channels, time
    halved: Mapping[str, F32]  # the same, most of them by halves
    tiled: Mapping[str, float]  # all of them, by halves in tiles


def seconds(lm: LM, profile: Profile, tokens: Sequence[int]) -> Places:
    turns, layers = Turns(lm, tokens), lm.model.weights.layers
    whole = _over_shares(turns, lm, profile, layers, 1.0)
    if any(getattr(layer, place).quant != HALVED for layer in layers for place in PLACES):
        return Places(whole, {}, {})
    tiled = {place: _all_by_halves(turns, lm, profile, layers, place) for place in PLACES}
    return Places(whole, _over_shares(turns, lm, profile, layers, FINE), tiled)


def head_seconds(lm: LM, tokens: Sequence[int]) -> F32:
    """Of the head, dense and as KWTA reads it; nothing where it cannot be read so."""
    head = lm.model.weights.head
    if head.quant != HALVED:
        return np.empty(0, np.float32)
    turns, views, slots = Turns(lm, tokens), views_of(lm.model.cfg, lm.model.weights), _none(lm)
    KWTA(k=1.0, gate="off", head="on").prepare(views).build(views[-1], slots[-1])
    own = turns.dense * head.nbytes / _bytes_read(lm)
    return np.array([own, max(0.0, own + turns.more(slots))], np.float32)


@dataclass(frozen=True)
class Coarse:
    """Of other weights: the seconds of a layer's places, and of the head, the model's own and the other one."""

    places: Mapping[str, F32]
    own_head: float
    head: float


def coarse_seconds(
    lm: LM, profile: Profile, tokens: Sequence[int], layers: Sequence[LayerWeights], head: Matrix | None
) -> Coarse:
    """Of other layers' weights and another head. In the minutes of the profile: what is measured is how much more or
    less of a dense token they take."""
    turns, slots = Turns(lm, tokens), _none(lm)
    token = float(profile.seconds["down"][1, -1]) / _part(lm, "down")
    own = token * lm.model.weights.head.nbytes / _bytes_read(lm)
    if head is not None:
        slots[-1].put(f"{HEAD}_weights", CoarseSlot(head, 0), "timing", "")
    other = own + turns.more(slots) * token / turns.dense
    return Coarse(_over_shares(turns, lm, profile, layers, 1.0, token), own, max(0.0, other))


def _over_shares(
    turns: Turns, lm: LM, profile: Profile, layers: Sequence[LayerWeights], fine: float, token: float = 0.0
) -> dict[str, F32]:
    """A place read densely takes its part of a token by its bytes; read otherwise, as much more or less as the whole
    token does. `token`: seconds that a dense one is said to take; 0: what it takes now. Of halves all channels are no
    list: what is said of them goes on as the others do."""
    out, token = {}, token or turns.dense
    for place in PLACES:
        more, read = [], []
        for share in TIMED if fine == 1 else TIMED[:-1]:
            slots = _slots(lm, profile, layers, place, share, fine)
            more.append(turns.more(slots))
            read.append(any(s.taken for s in slots))
        differ = _straight(more, read)
        if fine < 1:
            differ = np.append(differ, differ[-1] + differ[-1] - differ[-2])
        took = token * (_part(lm, place) + differ / turns.dense / len(layers))
        out[place] = np.array([TIMED, np.maximum(took, 0.0)], np.float32)
    return out


def _all_by_halves(turns: Turns, lm: LM, profile: Profile, layers: Sequence[LayerWeights], place: str) -> float:
    more = turns.more(_slots(lm, profile, layers, place, KEEP_ALL, FINE))
    return max(0.0, turns.dense * _part(lm, place) + more / len(layers))


def _straight(more: Sequence[float], read: Sequence[bool]) -> NDArray[np.float64]:
    """What was `read` otherwise than densely, on a straight line over TIMED: a choice and what is read after it. All of
    them together say what a busy machine does not let one of them say."""
    found, on, shares = np.array(more), np.array(read), np.array(TIMED[: len(more)])
    if on.any():
        slope = max(0.0, float(np.polyfit(shares[on], found[on], 1)[0]))
        found[on] = found[on].mean() + slope * (shares[on] - shares[on].mean())
    return found


def _none(lm: LM) -> list[LayerSlots]:
    return [LayerSlots() for _ in lm.model.layers]


def _part(lm: LM, place: str) -> float:
    """Of a token's bytes those of a place of one layer."""
    return float(getattr(lm.model.weights.layers[0], place).nbytes) / _bytes_read(lm)


def _bytes_read(lm: LM) -> int:
    """Of a token's weights."""
    weights = lm.model.weights
    layers: list[Matrix] = [getattr(layer, place) for layer in weights.layers for place in PLACES]
    return sum(matrix.nbytes for matrix in [*layers, weights.head])


def _slots(
    lm: LM, profile: Profile, layers: Sequence[LayerWeights], place: str, share: float, fine: float
) -> list[LayerSlots]:
    """One place of all layers read as KWTA reads it, from the weights of these layers."""
    own = views_of(lm.model.cfg, lm.model.weights, profile)
    used = [view.weights.using({place: getattr(layer, place)}) for view, layer in zip(own, layers, strict=True)]
    views = [replace(view, weights=weights) for view, weights in zip(own, used, strict=True)]
    where = (Override(None, frozenset((place,)), {"k": share}),)
    mode = KWTA(k=1.0, gate="off", fine=fine, where=where).prepare(views)
    slots = [LayerSlots() for _ in views]
    for before, view, at in zip(own, views, slots, strict=True):
        matrix: Matrix = getattr(view.weights, place)
        if matrix is not getattr(before.weights, place):
            at.put(f"{place}_weights", CoarseSlot(matrix, 0), "timing", "")
        mode.build(view, at)
    return slots
