"""StatePack: keys and activations as bitmaps. Counting bits tells which keys and neurons matter; only those are read.

Idea: a few bits of a key are enough to guess whether a query will look at it, and a bitmap of the gate says which
neurons are silent. Exact attention runs over the keys that were chosen; the mean of all values stands for the others,
with the weight that their codes promise. Off point: keys = 1 and rho = 0 (bit for bit dense). Cost: a scan of the codes
(a tenth of f16 keys), the chosen keys and values; an MLP reads all of `gate`, of `up` and `down` what is active, and
keeps `gate` and `up` twice. Limits: short texts (below min_ctx) and dense activations gain nothing, and then run dense;
prompts are not faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.errors import RaloError
from ralo.modes.base import SWITCH, ZEROS, LayerSlots, LayerView, Mode
from ralo.options import flag

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]
Rows = tuple[NDArray[np.uint8], NDArray[np.uint16] | None]  # of neurons, and their scales
KINDS = ("binary", "ternary", "none")
POPCOUNTS = ("kernighan", "lut", "popcnt", "vpopcntdq")
# Times the root mean square of a key, where eps is auto: leaves .3 of the bits of a key, .1 in the document's forms.
KEY_EPS = {"best": -1.04, "seed": -1.64}
CODES = {("best", "binary"): "signs", ("best", "ternary"): "ternary"}
CODES |= {("seed", "binary"): "overlap", ("seed", "ternary"): "difference"}
DROPPED = 1e-3  # of the energy of other activations, which auto may drop
RECALL = 0.995  # of open gates, that a guess is to find
TURN = 11  # tokens by which the checks of one layer come after those of the layer before


@dataclass(frozen=True)
class StatePack(Mode):
    """StatePack: bitmaps and popcounts choose the keys and neurons that are read."""

    name: ClassVar[str] = "state-pack"
    metric: ClassVar[str] = "pack"
    metrics: ClassVar[Mapping[str, str]] = {
        "enabled": "share of the work it stands for that ran packed",
        "mode": "1 = one bitmap, 2 = two (pos and neg)",
        "density": "share of neurons that were active, or of keys that were read where it packs only those",
        "active": "neurons that were active, or keys that were read",
        "popcnt": "how bits are counted: " + ", ".join(f"{i + 1} = {name}" for i, name in enumerate(POPCOUNTS)),
        "recall": "share of the most important keys that were read, at checks",
        "mass": "share of the attention weight that the keys read hold, at checks",
        "bytes_skipped": "weights, keys and values not read while decoding",
    }

    on: str = flag("binary", "one bitmap, two (pos and neg), or none: off", choices=KINDS, name="state-pack")
    target: str = flag("both", "where", choices=("kv", "mlp", "both"))
    eps: str = flag("auto", "bits are set where |x| is above this; auto = by calibration and by the key's own size")
    popcnt: str = flag(
        "auto", "how bits are counted; auto = the fastest here", choices=("auto", *POPCOUNTS), bare="auto"
    )
    rho: float = flag(0.15, "density above which an MLP runs dense", low=0, high=1)
    predict: str = flag(
        "off", "guess from two bits a weight which gates may be open, and read only those", choices=SWITCH
    )
    candidates: float = flag(0.0, "share of gates that are read; 0 = as many as open ones need", low=0, high=1)
    keys: float = flag(384.0, "keys that are chosen: how many, or up to 1 a share", low=0.001, high=1 << 20)
    bits: int = flag(
        1, "of a query's numbers beside sign codes: more guess better, and choose about as well", low=1, high=4
    )
    p: float = flag(0.0, "fewer keys where those hold this share of the weight; 0 = always as many", low=0, high=1)
    sinks: int = flag(4, "first keys of a text, always read", low=0, high=4096)
    recent: int = flag(32, "last keys of a text, always read", low=1, high=1 << 20)
    min_ctx: int = flag(2048, "tokens of context below which attention is dense", low=0, high=1 << 30)
    rest: str = flag("on", "the mean of all values stands for those not read", choices=SWITCH)
    check: int = flag(128, "tokens between comparisons with exact attention; 0 = none", low=0, high=1 << 20)
    gap: float = flag(0.5, "error of a head at a comparison above which it runs exactly", low=0, high=100)
    mix: float = flag(1.0, "form seed: share of the exact score in the score of a chosen key", low=0, high=1)
    form: str = flag("best", "best, or seed: the document's formulas, to compare", choices=("best", "seed"))

    def __post_init__(self) -> None:
        try:
            good = self.eps == "auto" or 0 <= float(self.eps) < float("inf")
        except ValueError:
            good = False
        if not good:
            raise RaloError(f"--state-pack-eps must be auto or a number from 0 on, got {self.eps!r:.40}")

    @property
    def enabled(self) -> bool:
        return self.on != "none"

    @classmethod
    def off(cls) -> Self:
        return cls(keys=1.0, rho=0.0)

    def prepare(self, views: list[LayerView]) -> StatePack:
        counts_by(self.popcnt)  # said before any layer is built
        return self

    def build(self, view: LayerView, slots: LayerSlots) -> None:
        cache = self.at(view.index, "qkv")
        if cache.enabled and cache.target != "mlp" and cache.keys != 1:
            cache._put_keys(view, slots)
        mlp = self.at(view.index, "up")
        if mlp.enabled and mlp.target != "kv" and mlp.rho > 0 and view.has_rows():
            mlp._put_neurons(view, slots)

    def _put_keys(self, view: LayerView, slots: LayerSlots) -> None:
        share, count = (self.keys, 0) if self.keys <= 1 else (1.0, round(self.keys))
        eps = KEY_EPS[self.form] if self.eps == "auto" else float(self.eps)
        code, best = CODES[self.form, self.on], self.form == "best"
        slot = _core.PackKeys(
            code=code, eps=eps, popcount=counts_by(self.popcnt), keep=share, keep_abs=count, sinks=self.sinks,
            recent=self.recent, min_ctx=self.min_ctx, p=self.p, mix=1.0 if best else self.mix,
            rest=best and self.rest == "on", check_every=self.check, phase=view.index * TURN, limit=self.gap,
            bits=self.bits,
        )  # fmt: skip
        kept = f"{share:.3g} of keys" if self.keys <= 1 else f"{count} keys"
        slots.put("attend", slot, self.name, f"{kept} by {code} codes from {self.min_ctx} tokens on")

    def _put_neurons(self, view: LayerView, slots: LayerSlots) -> None:
        eps = self._neuron_eps(view)
        if eps is None:
            return  # dense activations, by their profile or by their kind
        up, d, f = view.weights.up, view.weights.up.ic, view.cfg.d_ff
        parts = ("up", "gate") if view.cfg.gated else ()  # without a gate only `down` can be skipped
        rows: dict[str, Rows] = {part: _core.neuron_rows(up.core, up.slices[part].start, f) for part in parts}
        guess = self._guess(view, rows.get("gate")) if self.predict == "on" else None
        (ups, up_scales), (gates, gate_scales) = (rows.get(part, (None, None)) for part in ("up", "gate"))
        slot = _core.PackMlp(up.quant, d, f, ups, up_scales, gates, gate_scales, eps, self.rho, guess)
        copied = sum(a.nbytes for pair in rows.values() for a in pair if a is not None)
        what = "gates guessed, then " if guess else ""
        slots.put("mlp", slot, self.name, f"{what}neurons above {eps:.3g}, dense from density {self.rho:g} on", copied)

    def _neuron_eps(self, view: LayerView) -> float | None:
        """Silent neurons of relu are exactly zero. Of others, auto drops as many as hold next to nothing."""
        if self.eps != "auto":
            return float(self.eps)
        if view.cfg.act in ZEROS:
            return 0.0
        gates = view.profile.gates.get(view.index) if view.profile else None
        if gates is None:
            return None
        energy = np.cumsum(np.square(gates, dtype=np.float64))
        below = energy <= DROPPED * energy[-1]
        return float(gates[below.sum() - 1]) if below.any() and 1 - below.mean() < self.rho else None

    def _guess(self, view: LayerView, gate: Rows | None) -> _core.GateGuess:
        if gate is None:
            raise RaloError("--state-pack-predict=on needs an MLP with a gate, this model's has none")
        inputs = view.profile.inputs.get(view.index) if view.profile else None
        if inputs is None and not self.candidates:
            raise RaloError("--state-pack-predict=on needs a profile: make one with ralo calibrate, or set candidates")
        up, f = view.weights.up, view.cfg.d_ff
        bits, scales = _core.gate_codes(up.quant, up.ic, f, *gate)
        slack = gate_slack(up.quant, gate, (bits, scales), None, inputs) if inputs is not None else 0.0
        return _core.GateGuess(up.ic, f, bits, scales, None, slack, self.candidates, counts_by(self.popcnt))

    @classmethod
    def measure(cls, slot: _core.Slot) -> Mapping[str, float]:
        if isinstance(slot, _core.PackMlp):
            c = slot.counts()
            return {
                "slots": 0,
                "heads": c["steps"],
                **{k: c[k] for k in ("packed", "neurons", "active", "bytes_skipped")},
            }
        assert isinstance(slot, _core.PackKeys)
        about = {"slots": 1, "mode": slot.bitmaps, "popcnt": POPCOUNTS.index(slot.popcount) + 1}
        return about | slot.counts()

    @classmethod
    def totals(cls, counts: Mapping[str, float]) -> dict[str, float]:
        def ratio(a: str, b: str) -> float:
            return counts.get(a, 0) / counts[b] if counts.get(b) else 0.0

        units, active = ("neurons", "active") if counts.get("neurons") else ("keys", "kept")
        return {
            "enabled": ratio("packed", "heads"),
            "mode": ratio("mode", "slots") or float("neurons" in counts),  # an MLP has one bitmap
            "density": ratio(active, units),
            "active": counts.get(active, 0),
            "popcnt": ratio("popcnt", "slots"),
            "recall": ratio("recall", "checks"),
            "mass": ratio("mass", "checks"),
            "bytes_skipped": counts.get("bytes_skipped", 0),
        }


def gate_slack(
    quant: str, gate: Rows, codes: tuple[U64, F32], bias: F32 | None, inputs: F32, recall: float = RECALL
) -> float:
    """How far below zero a guess may be for `recall` of the gates that open for these inputs (T, D) to be found."""
    f, d = len(codes[1]), inputs.shape[1]
    exact, counts = np.empty(f, np.float32), np.empty((-(-f // 8), 8), np.int32)
    planes = np.empty((-(-d // 64), 4), np.uint64)
    shift, guesses = np.float32(0) if bias is None else bias, []
    for x in inputs:
        _core.neurons(quant, *gate, None, x, exact)
        step = _core.gate_counts("lut", codes[0], x, planes, counts)
        guess = step * codes[1] * counts.reshape(-1)[:f] + shift
        guesses.append(guess[exact + shift > 0])
    found = np.concatenate(guesses)
    return float(-np.quantile(found, 1 - recall)) if len(found) else 0.0


def counts_by(popcnt: str) -> str:
    """The way bits are counted, if this CPU has it."""
    here = _core.popcounts()
    if popcnt != "auto" and popcnt not in here:
        raise RaloError(
            f"--state-pack-popcnt={popcnt} is not there at ISA level {_core.level()}: use {', '.join(here)}"
        )
    return here[0] if popcnt == "auto" else popcnt
