"""k winners take all: of the inputs of each linear map only the ones that matter most are used, and only their weights
are read.

Idea: a channel's share in a result is at most |x| times the norm of its weights; most channels of most tokens hardly
count. Off point: k = 1 (every channel wins; bit for bit dense). Cost: reads `keep` of the weights of each place, plus a
choice of well under a microsecond. Limits: short rows (a place with few outputs) save less time than bytes; prompts
are not faster, many tokens together need all weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.errors import RaloError
from ralo.matrix import HALVED, Matrix
from ralo.memory import Arena
from ralo.modes.base import RECENT, SINKS, SWITCH, TARGETS, ZEROS, LayerSlots, LayerView, Mode, norms_of
from ralo.modes.guess import Chosen, Rule, best
from ralo.modes.share import FINE, KEEP_ALL, Key, Ways, head_pays, plain_share, shares, ways
from ralo.options import flag
from ralo.profile import Profile

F32 = NDArray[np.float32]
BLOCKS = ("1", "16", "32", "64")
SEED_BLOCK = 32  # the document's own
FROM_MEMORY = 4 << 20  # bytes of `up` from which on fewer channels of the gate are faster than all of its rows
HEAD_FINE = 0.01  # of the head's channels that are read whole: what more of them would tell, likely tokens' own rows do
LIKELY = 0.0003  # how likely a token must be for a score from whole weights
MANY = 4096  # tokens of a vocabulary, of which those are few
ALIKE = 0.1  # norms of weights that differ by less than this part of their mean are left out of the score


@dataclass(frozen=True)
class KWTA(Mode):
    """k winners take all: read only the weights of the input channels that matter most for this token."""

    name: ClassVar[str] = "kwta"
    metrics: ClassVar[Mapping[str, str]] = {
        "keep_ratio": "share of channels used where the mode is on",
        "fine_ratio": "share of channels used with all their bits, where weights are read by halves",
        "duty_hits": "tokens whose choice was spared by duty",
        "temp": "temperature of the top-p budget",
        "flicker": "share of winners that had not won a step before",
        "scores": "scores a step that are computed from whole weights, where the head is read by halves",
        "recall": "share of winning neurons that guessed gates find, at checks; 1 where none are guessed",
        "bytes_skipped": "weights and values not read while decoding",
    }

    on: str = flag("on", "k winners take all", choices=SWITCH, name="kwta")
    k: float = flag(
        0.4,
        "how much is kept: 1 = all; 0.4 = half of `down` and `o`, .82 elsewhere, or as a profile says",
        low=0.01,
        high=1,
    )
    fine: float = flag(
        FINE,
        "share of channels that int8 weights are read whole of; of other winners the upper four bits; 1 = all whole",
        low=0,
        high=1,
    )
    k_abs: int = flag(0, "channels kept at every place instead of a share; 0 = by k", low=0, high=1 << 20)
    p: float = flag(0.0, "keep as many channels as hold this share of score^(1/temp) instead; 0 = by k", low=0, high=1)
    temp: float = flag(0.5, "shapes the budget of p: 0.5 = energy, 1 = magnitude", low=0.05, high=10)
    duty: int = flag(1, "steps that a choice is held for", low=1, high=1024)
    target: str = flag("both", "where", choices=tuple(TARGETS))
    block: str = flag("1", "channels that win or lose together", choices=BLOCKS)
    renorm: str = flag("off", "scale results by 1 / share kept", choices=SWITCH)
    gate: str = flag("auto", "gate first, then winning neurons of up; auto = on relu models", choices=("auto", *SWITCH))
    predict: str = flag("off", "guess by factors which gates may win, and read only those", choices=SWITCH)
    head: str = flag(
        "auto",
        "int8 heads by halves, scores of likely tokens from whole weights; auto = where k is below 1 and it is faster",
        choices=("auto", *SWITCH),
    )
    keys: float = flag(1.0, "share of keys whose values are read", low=0.01, high=1)
    keys_min: int = flag(512, "tokens of context below which all keys are", low=0, high=1 << 30)
    prefill: str = flag("off", "prompts too (no faster: shows what it would do)", choices=SWITCH)
    form: str = flag("best", "best, or seed: the document's formula, to compare", choices=("best", "seed"))
    allotted: Mapping[Key, float] | None = None  # by `prepare`: share per layer and place
    arena: Arena = field(default_factory=Arena, compare=False, repr=False)  # where halves lie

    def __post_init__(self) -> None:
        if self.k_abs and self.p:
            raise RaloError("--kwta-k-abs and --kwta-p both say how many win: choose one")
        if self.predict == "on" and self.target == "attn":
            raise RaloError("--kwta-predict=on guesses gates of the MLP, which --kwta-target=attn leaves out")

    @property
    def enabled(self) -> bool:
        return self.on == "on"

    @classmethod
    def off(cls) -> Self:
        return cls(k=1.0, gate="off")

    def prepare(self, views: list[LayerView]) -> KWTA:
        """Turns k into a share per layer and place."""
        if self.form == "seed":
            return self
        sizes = {(v.index, p): int(getattr(v.weights, p).nbytes) for v in views for p in TARGETS[self.target]}
        parts = dict.fromkeys(sizes, 1.0)
        for view in views:
            if self.target != "attn" and self._gate_first(view):
                parts[view.index, "up"] = 0.5  # only the gate is skipped by channels
            if self.target != "attn" and self._gate_decides(view):
                del sizes[view.index, "down"], parts[view.index, "down"]
            if self.target != "attn" and self._gate_by_rows(view):
                del sizes[view.index, "up"], parts[view.index, "up"]
        by = {key: self.at(*key)._ways(views[key[0]], key[1]) for key in sizes}
        plain = {(v.index, p): plain_share(p, self.k) for v in views for p in TARGETS[self.target]}
        found = shares(self.k, sizes, views[0].profile, parts, by)
        return replace(self, allotted=plain | found, arena=Arena())

    def build(self, view: LayerView, slots: LayerSlots) -> None:
        for place in TARGETS[self.target]:
            settings = self.at(view.index, place)
            if not settings.enabled or not view.has_channels(place):
                continue
            if place == "up" and settings._gate_first(view) and settings._put_neurons(view, slots):
                continue  # the gate is not read by channels
            if place != "down" or not settings._gate_decides(view):
                settings._put_input(view, slots, place)
        attention = self.at(view.index, "o")
        if attention.enabled and self.target != "mlp" and attention.keys < 1:
            attention._put_keys(slots)
        if view.head is not None and self._takes_head(view.head, view.profile, slots):
            self._put_head(view.head, view.profile, slots)

    def _takes_head(self, head: Matrix, profile: Profile | None, slots: LayerSlots) -> bool:
        if self.head == "on" and head.quant != HALVED:
            raise RaloError(
                f"--kwta-head=on reads an {HALVED} head by halves, this one is {head.quant}: leave it at auto"
            )
        if not self.enabled or self.head == "off" or head.quant != HALVED:
            return False
        if slots.head_weights is not None:
            slots.left["head"] = f"kwta leaves it to {slots.taken['head_weights'].mode}"
            return False
        plain = self._one_by_one() and self.k < 1 and self.target == "both"
        return self.head == "on" or (plain and few_are_likely(head) and head_pays(profile))

    def _put_head(self, head: Matrix, profile: Profile | None, slots: LayerSlots) -> None:
        (part,) = head.parts
        rows, tiles, fine = head.turned(part, self.arena), head.tiles(self.arena), max(1, round(HEAD_FINE * head.ic))
        norms = np.empty(head.ic, np.float32)
        head.core.norms(norms)
        slot = _core.KwtaHead(head.ic, norms, tiles, fine, 1.0, rows.core, LIKELY)
        what = f"by halves, {fine} of its channels whole; whole scores of tokens from {LIKELY:g} on"
        slots.put("head", slot, self.name, what, tiles.nbytes + rows.nbytes)

    def _put_input(self, view: LayerView, slots: LayerSlots, place: str) -> None:
        matrix: Matrix = getattr(view.weights, place)
        share = self._share(view.index, place)
        pick, amount, guess = self._rule(view, place, share, matrix.ic)
        if pick in ("top", "near") and amount >= self._blocks(matrix.ic):
            return  # everything wins: dense
        fine = self._fine(view, place, share)
        known = view.profile.places[view.index, place] if view.profile else None
        fine_guess = known.quantile(1 - self.fine) if known and fine and guess else 0.0
        seed, norms = self.form == "seed", None if self.form == "seed" else norms_of(view, place)
        mean = float(norms.mean()) if norms is not None else 1.0
        if norms is not None and norms.std() < ALIKE * mean:  # reading them would cost more than they tell
            norms, guess, fine_guess = None, guess / mean, fine_guess / mean
        if fine and share >= KEEP_ALL:
            amount = float(matrix.ic)
        seen = place == "up" and slots.mlp is not None  # by whoever has the MLP, who asks for a list
        if fine and share >= KEEP_ALL and self._ways(view, place).tiles and not seen:
            tiles = matrix.tiles(self.arena)
            all_kept = _core.KwtaTiles(matrix.ic, norms, tiles, fine, fine_guess or 1.0)
            slots.put(place, all_kept, self.name, f"keep all, {fine} whole, the others by halves", tiles.nbytes, 1.0)
            return
        slot = _core.KwtaInput(
            matrix.ic, norms, self._block, pick, amount, self.temp, self.duty, seed, self.renorm == "on", guess,
            matrix.halves(self.arena) if fine else None, fine, fine_guess,
        )  # fmt: skip
        fixed = amount / self._blocks(matrix.ic) if pick in ("top", "near") and self.duty == 1 else None
        copied = matrix.data.nbytes if fine else 0
        slots.put(place, slot, self.name, self._describe(share, pick, amount, fine), copied, fixed)

    def _ways(self, view: LayerView, place: str) -> Ways:
        """How a place is read by halves, if it is."""
        if not self._one_by_one() or getattr(view.weights, place).quant != HALVED:
            return Ways()
        way = ways(view.profile, place)
        if place == "up" and self.target != "attn" and self._gate_first(view):  # its gate is read, and not all of it
            return replace(way, tiles=way.tiles and self._gate_decides(view) and self.predict == "off")
        return way

    def _one_by_one(self) -> bool:
        """Whether a number of channels is chosen at every token, each by itself, as halves need it."""
        alone = self._block == 1 and self.duty == 1 and self.form == "best" and self.renorm == "off"
        return alone and not self.k_abs and not self.p and self.fine < 1

    def _fine(self, view: LayerView, place: str, share: float) -> int:
        """Channels that are read whole; 0: all winners are."""
        n = getattr(view.weights, place).ic
        most, way = max(1, round(self.fine * n)), self._ways(view, place)
        by_halves = way.halves or (way.tiles and share >= KEEP_ALL)
        return most if by_halves and round(share * n) > 1.1 * most else 0

    def _put_neurons(self, view: LayerView, slots: LayerSlots) -> bool:
        """The neurons of `up` that act(gate) lets through; what exactly zero blocks is never read. True: nor is all of
        the gate."""
        if slots.mlp is not None:
            if self.predict == "on":
                slots.left["mlp"] = f"kwta guesses no gates: {slots.taken['mlp'].mode} has the MLP"
            return False
        guess = self._guess(view, slots)
        f, up = view.cfg.d_ff, view.weights.up
        zeros = view.cfg.act in ZEROS
        data, scales = _core.neuron_rows(up.core, up.slices["up"].start, f)
        by_rows = self._gate_by_rows(view)
        share = self._share(view.index, "up")
        by_halves = share < 1 and (by_rows or share >= KEEP_ALL) and self._ways(view, "up").tiles
        tiles = up.tiles(self.arena, "gate") if by_halves else None
        whole = by_rows and not by_halves
        gate, of_gate = _core.neuron_rows(up.core, up.slices["gate"].start, f) if whole else (None, None)
        block, norms = self._block if not zeros else 1, norms_of(view, "down")
        slot = _core.KwtaMlp(
            up.quant, up.ic, f, data, scales, norms, block, *self._neuron_rule(view), self.temp,
            self.duty if not zeros else 1, self.form == "seed", zeros, guess.slot(up) if guess else None, gate,
            of_gate, tiles, max(1, round(self.fine * up.ic)),
        )  # fmt: skip
        won = "neurons it does not block" if zeros else f"{self._share(view.index, 'down'):.2f} of neurons win"
        copied = (data.nbytes + (0 if scales is None else scales.nbytes)) * (2 if whole or guess else 1)
        what = f"gate first{' by halves' if tiles else ''}, {won}" + (f", {guess}" if guess else "")
        copied += (guess.factors.nbytes if guess else 0) + (tiles.nbytes if tiles else 0)
        slots.put("mlp", slot, self.name, what, copied)
        return by_rows or by_halves or guess is not None

    def _neuron_rule(self, view: LayerView) -> tuple[str, float]:
        """How neurons win by act(gate)."""
        if view.cfg.act in ZEROS:
            return "above", 1e-30
        return self._rule(replace(view, profile=None), "down", self._share(view.index, "down"), view.cfg.d_ff)[:2]

    def _guess(self, view: LayerView, slots: LayerSlots) -> Chosen | None:
        """What tells which gates may win, where it pays."""
        if self.predict == "off":
            return None
        if view.cfg.act not in ZEROS and (self.duty > 1 or self._block > 1):
            raise RaloError("--kwta-predict=on chooses neurons one by one at every token: use no duty and no blocks")
        known = view.profile.guesses.get(view.index) if view.profile else None
        if view.profile is None or known is None:
            raise RaloError("--kwta-predict=on needs a profile with factors of the gates: make one with ralo calibrate")
        up = view.weights.up
        pick, amount, _ = self._rule(view, "up", self._share(view.index, "up"), up.ic)
        without = 1.0 if pick == "mass" else min(1.0, amount / self._blocks(up.ic))
        rule = Rule(*self._neuron_rule(view), self.temp, norms_of(view, "down"))
        chosen = best(up, view.cfg.act, known, view.profile.inputs[view.index], rule)
        if why := chosen.refused(without):
            slots.left["mlp"] = f"kwta guesses no gates: {why}"
        return None if why else chosen

    def _put_keys(self, slots: LayerSlots) -> None:
        slot = _core.KwtaKeys(self.keys, 0, SINKS, RECENT, self.keys_min, self.form == "seed")
        slots.put("attend", slot, self.name, f"{self.keys:.2f} of keys from {self.keys_min} tokens on")

    def _rule(self, view: LayerView, place: str, share: float, n: int) -> tuple[str, float, float]:
        """How winners are picked, the number that goes with it, and where the bound is likely to be."""
        if self.p:
            return "mass", self.p, 0.0
        if self.k_abs:
            return "top", float(min(self._blocks(n), -(-self.k_abs // self._block))), 0.0
        count = float(max(1, round(share * self._blocks(n))))
        known = view.profile.places[view.index, place] if view.profile else None
        if self.form == "seed" or self._block > 1 or (known is None and view.cfg.act not in ZEROS):
            return "top", count, 0.0
        return "near", count, max(known.quantile(1 - share), 1e-6) if known else 1.0

    def _share(self, layer: int, place: str) -> float:
        """An override of k is the share itself; else k is one dial for all places."""
        if self.allotted is None or any("k" in o.values for o in self.where if o.holds(layer, place)):
            return self.at(layer, place).k
        return self.allotted[layer, place]

    def _gate_first(self, view: LayerView) -> bool:
        gate = self.at(view.index, "up").gate
        if gate == "on" and not view.cfg.gated:
            raise RaloError("--kwta-gate=on needs an MLP with a gate, this model's has none")
        if gate == "on" and not view.has_rows():
            raise RaloError("--kwta-gate=on reads neurons row by row, weights from seeds have none: leave it at auto")
        first = (
            view.cfg.gated
            and view.has_rows()
            and (gate == "on" or (gate == "auto" and view.cfg.act in ZEROS and self.form == "best"))
        )
        if self.at(view.index, "up").predict == "on" and not first:
            raise RaloError(self._no_gate_first(view))
        return first

    def _no_gate_first(self, view: LayerView) -> str:
        if not view.cfg.gated:
            return "--kwta-predict=on needs an MLP with a gate, this model's has none"
        if not view.has_rows():
            return "--kwta-predict=on reads gates row by row, weights that stand in for others have no rows"
        return "--kwta-predict=on guesses a gate that is computed first: use --kwta-gate=on"

    def _gate_decides(self, view: LayerView) -> bool:
        """`down` then reads what the gate lets through, less than any share would be."""
        return self._gate_first(view) and view.cfg.act in ZEROS

    def _gate_by_rows(self, view: LayerView) -> bool:
        """All of it is read then, from the cache: that is faster than fewer channels."""
        small = view.weights.up.nbytes < FROM_MEMORY
        return self._gate_decides(view) and small and self.at(view.index, "up").predict == "off"

    @property
    def _block(self) -> int:
        return SEED_BLOCK if self.form == "seed" and self.block == "1" else int(self.block)

    def _blocks(self, n: int) -> int:
        return -(-n // self._block)

    def _describe(self, share: float, pick: str, amount: float, fine: int) -> str:
        what = (
            f"top-p {amount:g}" if pick == "mass" else f"{amount:.0f} {'exactly' if pick == 'top' else 'or a few less'}"
        )
        extras = [f"duty {self.duty}"] * (self.duty > 1) + [f"blocks of {self._block}"] * (self._block > 1)
        extras += ["renorm"] * (self.renorm == "on") + ["seed form"] * (self.form == "seed")
        extras += [f"{fine} of them whole, the others by halves"] * (fine > 0)
        kept = "" if pick == "mass" or self.k_abs else f"{share:.2f}, "
        return ", ".join([f"keep {kept}{what}", *extras])

    @classmethod
    def measure(cls, slot: _core.Slot) -> Mapping[str, float]:
        assert isinstance(slot, _core.KwtaInput | _core.KwtaTiles | _core.KwtaMlp | _core.KwtaKeys | _core.KwtaHead)
        return dict(slot.counts())

    @classmethod
    def totals(cls, counts: Mapping[str, float]) -> dict[str, float]:
        def ratio(a: str, b: str, empty: float) -> float:
            return counts.get(a, 0) / counts[b] if counts.get(b) else empty

        return {
            "keep_ratio": ratio("kept", "channels", 1.0),
            "fine_ratio": ratio("fine", "channels", 0.0),
            "duty_hits": counts.get("held", 0),
            "temp": ratio("temp", "slots", 0.0),
            "flicker": ratio("changed", "compared", 0.0),
            "scores": ratio("likely", "head_steps", 0.0),
            "recall": 1 - ratio("missed", "checked", 0.0),
            "bytes_skipped": counts.get("bytes_skipped", 0),
        }


def few_are_likely(head: Matrix) -> bool:
    """Whether a head that can be read by halves has so many tokens that reading some of them whole costs little."""
    return head.quant == HALVED and head.oc >= MANY
