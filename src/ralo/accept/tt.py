"""What factors promise: faster where they stand, within the quality budget, refused where they would miss too much."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ralo import _core, loader, texts
from ralo.accept import halves
from ralo.accept.rows import Progress, Row, Task, at_least, at_most, holds, shown, tried, unmeasured
from ralo.accept.watched import infinite, watched
from ralo.bench import Engine, Ralo, measure
from ralo.compose import compose
from ralo.lm import LM
from ralo.matrix import Matrix
from ralo.model import Dense
from ralo.modes import TT
from ralo.modes.tt import FactorSlot
from ralo.quality import perplexity
from ralo.tt.about import AboutTT
from ralo.tt.cores import Cores
from ralo.tt.cross import entries_of, tt_cross
from ralo.tt.matrix import FactoredMatrix
from ralo.tt.pack import GAP, pack_tt
from ralo.tt.place import Place
from ralo.tt.svd import tt_svd
from ralo.tt.train import trained
from ralo.weights import build

FASTER = 1.15  # in the layers that are factored
LITERAL = TT(form="seed", rank=4, maxvol_k=8, gap=0.02)  # the document's settings
TOKENS = 16384  # of text that factors are made for
STEPS = 16
HALF = {"attn": "attention", "mlp": "mlp"}

mode = TT.name


def accept(task: Task, open_model: Callable[[str], LM], say: Progress) -> list[Row]:
    rows: list[Row] = []
    checked = False
    with tempfile.TemporaryDirectory(prefix="ralo-accept-") as folder:
        for quant, target in (("int8", "attn"), ("int8", "mlp"), ("int4", "attn")):
            say(f"factors of {target} at {quant}")
            lm, to = open_model(quant), Path(folder) / f"{target}-{quant}"
            about = _pack(task.model, quant, TT(target=target), to)
            lm.use(compose([TT(target=target, pack=str(to))]))
            rows += _lines(task, lm, about, quant, target, say)
            if about.matrices and not checked:
                rows += _invariants(lm, str(to))
                setting = TT(target=target, pack=str(to))
                rows += tried(mode, "guard and metrics", partial(watched, lm, setting))
                checked = True
        if not checked:
            rows.append(unmeasured(mode, "off, on, guard and metrics", "no place is factored"))
        say("the document's settings")
        rows += _literal(task.model, open_model("int8"), Path(folder) / "literal")
    return rows + _constructed()


def _pack(model: str, quant: str, settings: TT, to: Path) -> AboutTT:
    ckpt = loader.open_checkpoint(model)
    cfg, weights = build(ckpt, quant)
    tokens = ckpt.tokenizer().encode(texts.read("calibration"))[:TOKENS]
    return pack_tt(ckpt, cfg, weights, settings, tokens, to, None).about


def _lines(task: Task, lm: LM, about: AboutTT, quant: str, target: str, say: Progress) -> list[Row]:
    """int4 beside int4 is shown: most of what it could save is saved already."""
    what = f"{target} at {quant}"
    if not about.matrices:
        line, why = f"{what}: some place is factored", next(iter(about.refused.values()), "")
        return [holds(mode, line, False, why) if quant == "int8" else shown(mode, line, f"none: {why}")]
    layers = sorted({int(name.split(".")[1]) for name in about.matrices})
    say(f"quality of {what}")
    q = perplexity(lm.model, texts.held_out(lm, task.tokens), min(1024, lm.model.cfg.max_context), lm.kv)
    say(f"speed of {what}")
    faster, (low, high) = halves.speedup(lm, HALF[target], layers, task.rounds)
    engines: dict[str, Engine] = {"made": Ralo(lm, lm.model, texts.sample(lm))}
    engines["dense"] = Ralo(lm, Dense(lm.model), texts.sample(lm))
    whole, (least, top) = measure(engines, "decode", task.ctx, 64, task.rounds).ratio("made", "dense")
    said = f"{faster:.2f} ({low:.2f} … {high:.2f}), {len(layers)} of {lm.model.cfg.n_layers} layers"
    quality = f"{q.delta_ppl_pct:+.2f} ({q.ci95[0]:+.2f} … {q.ci95[1]:+.2f}; KL {q.kl:.4f}, {q.tokens} tokens)"
    line, dppl = f"{what}: factored layers / the same dense", f"{what}: Δppl % on held-out text"
    judged = quant == "int8"
    gap = max(float(m["gap"]) for m in about.matrices.values())
    return [
        at_least(mode, line, faster, FASTER, said) if judged else shown(mode, line, said),
        at_most(mode, dppl, q.delta_ppl_pct, task.max_dppl, quality) if judged else shown(mode, dppl, quality),
        at_most(mode, f"{what}: most that factors miss of typical outputs", gap, GAP, f"{gap:.3f}"),
        shown(mode, f"{what}: decode / dense, context {task.ctx}", f"{whole:.2f} ({least:.2f} … {top:.2f})"),
    ]


def _invariants(lm: LM, pack: str) -> list[Row]:
    """Of the factors that are on; all is off afterwards."""
    text = texts.sample(lm)
    dense, on = _run(lm, text, True), _run(lm, text, False)
    broken = _plant(lm)
    fallen = _run(lm, text, False)
    counted = broken.nonfinite
    lm.use(compose([TT(on="off", pack=pack)]))
    off = _run(lm, text, False)
    return [
        holds(mode, "off: dense bit for bit", bool((dense == off).all())),
        holds(mode, "on: not dense", bool((dense != on).any())),
        holds(
            mode, "a planted Inf falls back to dense and is counted", bool(np.isfinite(fallen).all() and counted),
            f"{counted} times in {STEPS} tokens",
        ),
    ]  # fmt: skip


def _plant(lm: LM) -> FactorSlot:
    """An infinite scale in the first factor there is."""
    name, slots = next((name, slots) for slots in lm.model.slots for name in slots.taken)
    slot = slots.taken[name].slot
    assert isinstance(slot, FactorSlot)
    m, (first, *others) = slot.matrix, slot.matrix.steps
    bad = Matrix(first.quant, first.ic, first.parts, first.data, infinite(first.scales), None)
    broken = FactorSlot(FactoredMatrix(m.ic, m.parts, m.train, [bad, *others], m.bias))
    slots.put(name, broken, mode, "broken")
    lm.model.use(lm.model.slots)
    return broken


def _run(lm: LM, text: list[int], dense: bool) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    seq = lm.new_sequence()
    return np.stack([lm.model.step(token, seq, dense) for token in text[:STEPS]])


def _literal(model: str, lm: LM, to: Path) -> list[Row]:
    about = _pack(model, "int8", LITERAL, to)
    text = texts.sample(lm)
    dense = _run(lm, text, True)
    lm.use(compose([replace(LITERAL, pack=str(to))]))
    same = bool((dense == _run(lm, text, False)).all())
    why = next(iter(about.refused.values()), "")
    line = "the document's rank 4, maxvol_k 8, gap 0.02: every place refused, the model runs dense"
    return [holds(mode, line, not about.matrices and same, f"{len(about.refused)} places, the first {why}")]


def _constructed() -> list[Row]:
    """A matrix that is of low TT rank, found by the same settings; and by cross as by singular values."""
    rng, ins, outs = np.random.default_rng(0), (20, 32), (30, 32)
    cores = Cores((rng.standard_normal((1, 20, 30, 4)), rng.standard_normal((4, 32, 32, 1)))).normalised()
    w = cores.full()
    found = tt_cross(entries_of(w), ins, outs, LITERAL.rank, LITERAL.maxvol_k, LITERAL.gap)
    error = float(np.linalg.norm(found.full() - w) / np.linalg.norm(w))
    noisy = w + 1e-3 * rng.standard_normal(w.shape) * w.std()
    both = tt_cross(entries_of(noisy), ins, outs, 4, 8, 0.02).full() - tt_svd(noisy, ins, outs, 4).full()
    apart = float(np.linalg.norm(both) / np.linalg.norm(noisy))
    place = Place(w.astype(np.float32), None, {"w": w.shape[1]}, w.shape[1], np.eye(len(w)), None)
    matrix, level = trained(place, found, "f32"), _core.level()
    worst = 0.0
    for name in _core.levels():
        _core.force_level(name)
        worst = max(worst, _off(matrix, w))
    _core.force_level(level)
    return [
        at_most(mode, "the same settings on a matrix of TT rank 4: error", error, 1e-5, f"{error:.1e}"),
        at_most(mode, "TT-cross beside TT-SVD on a noisy one: apart by", apart, LITERAL.gap, f"{apart:.1e}"),
        at_most(mode, "contraction at every ISA level beside numpy: error", worst, 1e-5, f"{worst:.1e}"),
    ]


def _off(matrix: FactoredMatrix, w: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> float:
    return float(np.linalg.norm(matrix.unpack() - w) / np.linalg.norm(w))
