"""What a search found, as a page: every plan that was tried, what the best one keeps, and how it goes along a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from ralo import peer, screen
from ralo.bench import Engine, measure
from ralo.errors import RaloError
from ralo.lm import LM
from ralo.model import Dense
from ralo.modes.base import LayerSlots
from ralo.quality import divergence, log_probs, scores
from ralo.report import Cell, Point, Report
from ralo.tune.record import Record
from ralo.tune.search import TOGETHER, Found, Search
from ralo.tune.trial import ROUNDS, TOKENS, Gain, Loss, Trials, key_of
from ralo.weights import PLACES, LayerWeights

GAP_TOKENS, GAP_MEAN = 1024, 32  # of a text along which the gap is shown, and of each figure of it
AT = "plan at "  # names of plans in a record, by their budget


def report(search: Search, title: str, about: Mapping[str, str], kind: str) -> Report:
    """Everything; where nothing beat dense, without a plan of its own. `kind`: of plans for other budgets."""
    trials, best = search.trials, search.best
    beside = [_peer_point(gain, trials.lm) for gain in peer_gains(trials)]
    points = [_dense(gain, trials.lm) for gain in _first_gains(search)]
    points += [point for found in _distinct(search) for point in _points(found, best)]
    cells = heat(trials, best) if best else []
    gap = {best.name: gap_along(trials, best)} if best else {}
    columns = [*PLACES, "keys"] if cells else []
    budgets = _budgets(trials.record, kind)
    return Report(title, about, _summary(search, best), [*points, *beside], budgets, columns, cells, gap)


def remember(record: Record, max_dppl: float, kind: str, found: Found) -> None:
    """A plan that was found, so that it is shown beside those of other budgets."""
    said = {"name": found.name, "loss": asdict(found.loss), "gains": [asdict(gain) for gain in found.gains]}
    record.note(f"{AT}{max_dppl:g} %, {kind}", said)


def _budgets(record: Record, kind: str) -> list[tuple[float, Point]]:
    """Plans of one kind by their budgets, at every context."""
    out = []
    for name, entry in record.known.items():
        budget, _, of = name.removeprefix(AT).partition(" %, ")
        if name.startswith(AT) and of == kind:
            told = entry["found"]
            loss, gains = Loss(**told["loss"]), tuple(Gain(**gain) for gain in told["gains"])
            found = Found(f"{budget} %: {told['name']}", (), loss, gains)
            out += [(float(budget), point) for point in _points(found, found)]
    return sorted(out, key=lambda pair: (pair[1].ctx, pair[0]))


def _summary(search: Search, best: Found | None) -> list[tuple[str, str, str]]:
    if best is None:
        return [("faster than dense", "none", f"within {search.max_dppl:g} % of perplexity")]
    loss, gains = best.loss, best.gains
    out = [
        (f"decode at {g.ctx} tokens", f"{g.speedup:.2f}x", f"{g.low:.2f} to {g.high:.2f} times dense") for g in gains
    ]
    interval = f"{loss.low:+.2f} to {loss.high:+.2f}, {loss.tokens} tokens"
    out.append(("perplexity", f"{loss.delta_ppl_pct:+.2f} %", interval))
    out.append(("same first choice", f"{loss.top1_agree:.1%}", f"KL {loss.kl:.4f} nats"))
    out.append(("weights", screen.size(gains[0].nbytes), f"dense {screen.size(gains[0].dense_nbytes)}"))
    return out


def _distinct(search: Search) -> list[Found]:
    """Each plan once: the last one of those that a dial was turned to under one name, and the best one."""
    last = {found.name: found for found in search.tried}
    if search.best:
        last[search.best.name] = search.best
    return list(last.values())


def _first_gains(search: Search) -> tuple[Gain, ...]:
    return search.tried[0].gains if search.tried else ()


def _dense(gain: Gain, lm: LM) -> Point:
    return Point(f"dense {lm.quant}", "dense", gain.ctx, 1.0, (1.0, 1.0), 0.0, (0.0, 0.0), 0.0, gain.dense_tok_s,
                 gain.dense_nbytes, gain.cache_nbytes)  # fmt: skip


def _points(found: Found, best: Found | None) -> list[Point]:
    loss: Loss = found.loss
    kind = "plan" if found is best or found.name == TOGETHER else "mode"
    return [
        Point(found.name, kind, g.ctx, g.speedup, (g.low, g.high), loss.delta_ppl_pct, (loss.low, loss.high), loss.kl,
              g.tok_s, g.nbytes, g.cache_nbytes)
        for g in found.gains
    ]  # fmt: skip


def peer_gains(trials: Trials) -> list[Gain]:
    """llama.cpp at the model's own precision, over dense; none where it is not there or cannot run the model."""

    def found() -> dict[str, Any]:
        trials.use(())
        try:
            peer.check()
            with peer.beside(trials.lm, trials.longest + TOKENS + 2) as engine:
                return {"gains": [_peer_gain(trials, engine, ctx) for ctx in trials.contexts]}
        except RaloError as error:
            return {"gains": [], "why": str(error)}

    return [Gain(**g) for g in trials.record.get("peer", found, must=True)["gains"]]


def _peer_gain(trials: Trials, engine: Engine, ctx: int) -> dict[str, Any]:
    named: dict[str, Engine] = {"peer": engine, "dense": trials.engine(Dense(trials.lm.model), ctx)}
    samples = measure(named, "decode", ctx, TOKENS, ROUNDS)
    ratio, (low, high) = samples.ratio("peer", "dense")
    return {"ctx": ctx, "speedup": ratio, "low": low, "high": high, "tok_s": samples.median("peer"),
            "dense_tok_s": samples.median("dense"), "nbytes": 0, "dense_nbytes": 0, "cache_nbytes": 0}  # fmt: skip


def _peer_point(gain: Gain, lm: LM) -> Point:
    name = f"{peer.NAME} {peer.QUANTS.get(lm.quant, '')}"
    return Point(name, "peer", gain.ctx, gain.speedup, (gain.low, gain.high), None, None, None, gain.tok_s)


def gap_along(trials: Trials, best: Found) -> list[tuple[int, float]]:
    """KL from dense along a text, in means over some tokens."""

    def found() -> dict[str, Any]:
        trials.use(best.modes)
        lm, text = trials.lm, trials.texts.check[: GAP_TOKENS + 1]
        ctx = min(GAP_TOKENS, lm.model.cfg.max_context)
        dense, ours = (scores(lm.model, text, ctx, lm.kv, exact=False, dense=dense) for dense in (True, False))
        kl = np.concatenate(
            [divergence(log_probs(p), log_probs(q)) for (_, _, p), (_, _, q) in zip(dense, ours, strict=True)]
        )
        return {"kl": [float(part.mean()) for part in np.array_split(kl, max(1, len(kl) // GAP_MEAN))]}

    kl = trials.record.get(f"gap of {key_of(best.modes)}", found, must=True)["kl"]
    return [((i + 1) * GAP_MEAN, value) for i, value in enumerate(kl)]


def heat(trials: Trials, best: Found) -> list[list[Cell]]:
    """Layer by layer what is read of dense's bytes, and what does it."""
    trials.use(best.modes)
    lm = trials.lm
    for _ in lm.run(lm.request(trials.texts.check[:64], 16, temperature=0)):
        pass  # what the text itself decides is counted on the way
    rows = []
    for i, (layer, slots) in enumerate(zip(lm.model.weights.layers, lm.model.slots, strict=True)):
        counts = lm.layer_metrics()[i]
        rows.append([*(_cell(layer, slots, place, counts) for place in PLACES), _keys(slots)])
    return rows


def _cell(layer: LayerWeights, slots: LayerSlots, place: str, counts: Mapping[str, float]) -> Cell:
    keep, said = 1.0, []
    if weights := slots.taken.get(f"{place}_weights"):
        keep *= weights.nbytes / getattr(layer, place).nbytes
        said.append(weights.runs.split(",")[0])
    if channels := slots.taken.get(place):
        keep *= channels.share if channels.share is not None else 1.0
        said.append(f"{channels.share:.2f}" if channels.share is not None else channels.mode)
    if place in ("up", "down") and (neurons := slots.taken.get("mlp")):
        active = counts.get("pack.density", counts.get("kwta.keep_ratio", 1.0))
        keep *= (1 + active) / 2 if place == "up" else active
        said.append(neurons.mode)
    return Cell(keep, " ".join(said) or "dense")


def _keys(slots: LayerSlots) -> Cell:
    found = slots.taken.get("attend")
    return Cell(1.0, found.runs.split(",")[0] if found else "all")
