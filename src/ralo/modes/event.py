"""Event-driven decode: only what moved is computed anew, as much of it as the time of a token allows.

Idea: what a token needs differs from the token before, but not everywhere: the keys that matter change slowly, and the
output of attention moves less than other activations. So attention holds its keys for some tokens, `o` is brought up to
date by the channels that moved, and under a budget every layer does as much as there is time for, most important
channels first. Off point: topk = 1 and hold = 1 (bit for bit dense). Cost: held keys and values, a choice every `hold`
tokens that reads keys twice; at `o` the channels sent. Limits: short texts gain little; queries, and inputs of other
maps, move as far as they are long from token to token, so deltas pay nowhere but at `o`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ralo import _core
from ralo.errors import RaloError
from ralo.matrix import Matrix
from ralo.modes.base import RECENT, SINKS, SWITCH, TARGETS, LayerSlots, LayerView, Mode, norms_of
from ralo.modes.share import Key, plain_share, shares
from ralo.options import flag
from ralo.pace import Pace, read_schedule

F32 = NDArray[np.float32]
SEED_BLOCK = 32
DELTAS = {"o": ("o",), "all": TARGETS["both"]}
# Under a budget: from all of the work to the least. Dials of `shares`; times the error a head may have; and whether it
# reads half of the keys it holds, which costs less than the last channels.
DIALS = (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.3, 0.2, 0.1)
SLACK = (-1.0, 1.0, 2.0, *[math.inf] * 11)  # first all heads hold their keys, which costs little and saves most
HALF = (*[False] * 11, True, True, True)


@dataclass(frozen=True)
class Event(Mode):
    """Event-driven: held keys, deltas, and a time budget per token."""

    name: ClassVar[str] = "event"
    metrics: ClassVar[Mapping[str, str]] = {
        "enabled": "1 = it has computed something",
        "budget_ms_used": "mean time of a token, in ms, where there is a budget",
        "quorum_hits": "maps that stopped because enough of what moved was sent",
        "topk_kept": "share of channels that were sent, and of keys that were read",
        "quality_gap": "exp(KL from dense) - 1, mean over comparisons",
        "stale_pct": "percent of channels, and of heads' choices of keys, that are of an earlier token",
        "level": "mean level under a budget; 0 = all of the work",
        "bytes_skipped": "weights, keys and values not read while decoding",
    }

    on: str = flag("on", "event-driven decode", choices=SWITCH, name="event-driven")
    budget_ms: float = flag(0.0, "time of a token, in ms; 0 = no budget", low=0, high=1e6)
    quorum: float = flag(0.6, "share of what moved that is sent before a map may stop early", low=0, high=1)
    topk: float = flag(0.4, "how much is sent: 1 = all, 0.4 = half of the channels of `o`", low=0.01, high=1)
    delta_theta: float = flag(
        0.01, "below this part of the mean a channel has not moved, or a head has not", low=0, high=10
    )
    gap_tol: float = flag(0.03, "quality gap above which the mode is switched off", low=0, high=100)
    gap_every: int = flag(256, "tokens between two comparisons with dense", low=1, high=1 << 20)
    target: str = flag("both", "where", choices=tuple(TARGETS))
    conv_eps: float = flag(1e-3, "a map has converged when the last channels move it by less", low=0, high=1)
    conv_j: int = flag(8, "so many channels", low=1, high=1 << 16)
    stale_beta: float = flag(0.9, "weight of an old result, times ...", low=0, high=1)
    stale_lambda: float = flag(0.1, "... exp(-lambda * age)", low=0, high=100)
    age_max: int = flag(64, "tokens after which a map is computed as a whole", low=1, high=1 << 20)
    keys: int = flag(512, "keys that attention holds", low=1, high=1 << 20)
    hold: int = flag(32, "tokens that it holds them for; 1 = never", low=1, high=1 << 20)
    head_gap: float = flag(0.3, "error of a head above which it reads all keys", low=0, high=100)
    query_theta: float = flag(0.0, "a query that moved by this part of itself chooses anew; 0 = no", low=0, high=100)
    min_ctx: int = flag(1024, "tokens of context below which attention is dense", low=0, high=1 << 30)
    deltas: str = flag("o", "maps that are kept up to date by deltas: only `o` bears it well", choices=tuple(DELTAS))
    block: str = flag("1", "channels that are sent together", choices=("1", "16", "32", "64"))
    verify: str = flag(
        "off", "draft with the modes, verify densely: the text is dense's own", choices=SWITCH, bare="on"
    )
    record: str = flag("", "file to write what every layer of every token was allowed to do", metavar="FILE")
    replay: str = flag("", "such a file, to do the same again", metavar="FILE")
    form: str = flag("best", "best, or seed: the document's formulas, to compare", choices=("best", "seed"))
    prepared: _Prepared | None = field(default=None, repr=False)  # by `prepare`

    def __post_init__(self) -> None:
        if self.verify == "on" and self.budget_ms:
            raise RaloError("--event-verify and --event-budget-ms do not go together: a verified token takes its time")
        if (self.record or self.replay) and not self.budget_ms:
            raise RaloError("--event-record and --event-replay need --event-budget-ms")

    @property
    def enabled(self) -> bool:
        return self.on == "on"

    @classmethod
    def off(cls) -> Self:
        return cls(topk=1.0, hold=1)

    @property
    def gap_limit(self) -> float:
        return math.log1p(self.gap_tol)

    @property
    def gap_spacing(self) -> int:
        return self.gap_every

    @property
    def pace(self) -> Pace | None:
        return self.prepared.pace if self.prepared else None

    @property
    def _pacer(self) -> _core.Pacer | None:
        return self.pace.pacer if self.pace else None

    def prepare(self, views: list[LayerView]) -> Event:
        """What each level sends at each layer and place, and the pacer that chooses levels."""
        dials = DIALS if self.budget_ms else (self.topk,)
        sizes = {(v.index, p): int(getattr(v.weights, p).nbytes) for v in views for p in TARGETS["both"]}
        tables = [self._shares(dial, sizes, views) for dial in dials]
        if not self.budget_ms:
            limit = math.inf if self.verify == "on" else self.head_gap  # a draft may be wrong
            return replace(self, prepared=_Prepared(tables, (limit,), None))
        pacer = _core.Pacer(len(dials), len(views), len(dials) // 2)
        pace = Pace(pacer, self.budget_ms / 1e3, Path(self.record) if self.record else None)
        if self.replay:
            pace.replay(read_schedule(Path(self.replay), len(views), len(dials)))
        limits = tuple(slack * max(self.head_gap, 1e-3) if slack >= 0 else -1.0 for slack in SLACK)
        return replace(self, prepared=_Prepared(tables, limits, pace))

    def _shares(self, dial: float, sizes: Mapping[Key, int], views: list[LayerView]) -> dict[Key, float]:
        """The share that may be sent, by layer and place. Without a budget deltas are sent only where they pay."""
        if self.form == "seed":
            return {key: dial for key in sizes if key[1] in TARGETS[self.target]}
        places = [p for p in TARGETS[self.target] if self.budget_ms or p in DELTAS[self.deltas]]
        own = {key: size for key, size in sizes.items() if key[1] in places}
        if self.budget_ms:
            return shares(dial, own, views[0].profile)
        return {key: plain_share(key[1], dial) for key in own}

    def build(self, view: LayerView, slots: LayerSlots) -> None:
        assert self.prepared
        for place in TARGETS[self.target]:
            settings = self.at(view.index, place)
            if settings.enabled and view.has_channels(place) and (view.index, place) in self.prepared.shares[-1]:
                settings._put_input(view, slots, place)
        attention = self.at(view.index, "o")
        if attention.enabled and self.target != "mlp" and attention.hold > 1 and slots.attend is None:
            attention._put_keys(view, slots)

    def _put_input(self, view: LayerView, slots: LayerSlots, place: str) -> None:
        assert self.prepared
        matrix: Matrix = getattr(view.weights, place)
        before = slots.taken.get(place)
        if before and before.share is None:
            return  # it does not say how many it proposes: the place stays its own
        proposed = before.share if before and before.share is not None else 1.0
        said_here = any("topk" in o.values for o in self.where if o.holds(view.index, place))  # the share itself
        tables = self.prepared.shares
        own = [min(self.topk if said_here else table[view.index, place], proposed) for table in tables]
        most = [max(1, round(share * matrix.ic)) for share in own]
        if min(most) >= matrix.ic:
            return  # everything is sent: dense
        said = f"{own[0]:.2f} of channels" if len(own) == 1 else f"{own[0]:.2f} to {own[-1]:.2f} of channels"
        if self.form == "seed":
            self._put_blocks(view, slots, place, most, said)
            return
        track = place in DELTAS[self.deltas]
        slot = _core.EventInput(
            matrix.ic, norms_of(view, place), int(self.block), most, track, self.delta_theta if track else 0.0,
            self.quorum, self.conv_eps, self.conv_j, self.age_max, view.index, self._pacer,
        )  # fmt: skip
        what = "deltas, " if track else ""
        inside = f" of the {proposed:.2f} proposed by {before.mode}" if before and proposed < 1 else ""
        slots.put(place, slot, self.name, f"{what}{said}{inside}", share=own[0])

    def _put_blocks(self, view: LayerView, slots: LayerSlots, place: str, most: list[int], said: str) -> None:
        """The document's form."""
        ic, block = getattr(view.weights, place).ic, int(self.block) if self.block != "1" else SEED_BLOCK
        slot = _core.EventBlocks(
            ic, block, [max(1, m // block) for m in most], self.delta_theta, self.stale_beta, self.stale_lambda,
            self.age_max, view.index, self._pacer,
        )  # fmt: skip
        slots.put(place, slot, self.name, f"{said} in blocks of {block}, old results for the others")

    def _put_keys(self, view: LayerView, slots: LayerSlots) -> None:
        assert self.prepared
        slot = _core.EventKeys(
            self.keys, list(self.prepared.limits), SINKS, RECENT, self.min_ctx, self.hold, view.index,
            view.cfg.n_layers, self.query_theta, self.delta_theta, self.stale_beta, self.stale_lambda, view.index,
            self._pacer, list(HALF) if self._pacer else [],
        )  # fmt: skip
        slots.put("attend", slot, self.name, f"{self.keys} keys held for {self.hold} tokens from {self.min_ctx} on")

    @classmethod
    def measure(cls, slot: _core.Slot) -> Mapping[str, float]:
        assert isinstance(slot, _core.EventInput | _core.EventBlocks | _core.EventKeys)
        return dict(slot.counts())

    @classmethod
    def totals(cls, counts: Mapping[str, float]) -> dict[str, float]:
        def of(*names: str) -> float:
            return sum(counts.get(name, 0) for name in names)

        units, stale = of("channels", "heads"), of("channels") - of("sent") + of("held", "reused")
        return {
            "enabled": 1.0 if units else 0.0,
            "quorum_hits": of("quorum_hits"),
            "topk_kept": of("sent", "kept") / of("channels", "keys") if units else 1.0,
            "stale_pct": 100 * stale / units if units else 0.0,
            "bytes_skipped": of("bytes_skipped"),
        }


@dataclass(frozen=True)
class _Prepared:
    """By level: the share that is sent at each layer and place, and the error that a head may have."""

    shares: list[dict[Key, float]]
    limits: tuple[float, ...]
    pace: Pace | None
