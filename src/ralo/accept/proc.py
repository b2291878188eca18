"""What procedural weights promise: half of bf16's memory, faster, within the quality budget, the same on every CPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ralo import loader, texts
from ralo.accept.literal import literal
from ralo.accept.proc_invariants import accept_invariants
from ralo.accept.proc_kernel import share_of_stream
from ralo.accept.rows import Progress, Row, Task, at_least, at_most, holds, shown
from ralo.bench import Engine, Ralo, measure
from ralo.compose import compose
from ralo.formats import packed
from ralo.lm import LM, load
from ralo.model import Dense
from ralo.modes import Proc
from ralo.proc.matrix import ProcMatrix
from ralo.proc.pack import bits_a_weight, pack_proc
from ralo.quality import Quality, perplexity
from ralo.weights import build

MEMORY, SPEEDUP, KERNEL = 0.5, 1.5, 0.7  # of bf16's memory; over bf16; of the time that its bytes alone would take
STRETCH_BITS, STRETCH_DPPL = 4.5, 1.5
SECONDS = 7.5  # a million weights: base's MLPs, 39.8 M, in five minutes
TOKENS = 16384  # of text that weights are made for
STEPS = 16

mode = Proc.name


def accept(task: Task, open_model: Callable[[str], LM], say: Progress) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="ralo-accept-") as folder:
        at = Path(folder)
        say("packing")
        seconds = _pack(task.model, at / "straight")
        say("packing again, interrupted half way")
        with suppress(_Stopped):
            _pack(task.model, at / "resumed", _half_way)
        _pack(task.model, at / "resumed")
        files = [[at / name / f for f in (packed.WEIGHTS, packed.INFO)] for name in ("straight", "resumed")]
        same = all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))
        pack, lm = str(at / "straight"), open_model("bf16")
        lm.use(compose([Proc(pack=pack)]))
        matrices = [m for m in _matrices(pack) if isinstance(m, ProcMatrix)]
        bits, weights = bits_a_weight(matrices), sum(m.ic * sum(m.parts.values()) for m in matrices)
        say("quality")
        quality = _quality(task, lm)
        bits_said = f"{bits / 16:.3f} ({bits:.2f} bits a weight; int8 has 8.25, int4 4.5)"
        each = 1e6 * seconds / weights
        rows = [
            at_most(mode, "memory of these weights / bf16", bits / 16, MEMORY, bits_said),
            at_most(mode, "Δppl % on held-out text", quality.delta_ppl_pct, task.max_dppl, _said(quality)),
            at_most(mode, "stretch: bits a weight", bits, STRETCH_BITS, f"{bits:.2f}"),
            at_most(mode, "stretch: Δppl %", quality.delta_ppl_pct, STRETCH_DPPL, f"{quality.delta_ppl_pct:+.2f}"),
            at_most(mode, "seconds to pack a million weights", each, SECONDS, f"{each:.2f} ({seconds:.0f} in all)"),
            holds(mode, "interrupted and resumed: the same bytes", same),
        ]
        rows += accept_invariants(lm, matrices, at)
        say("the document's own form")
        rows.append(_literal(task.model, lm, at / "literal"))
        say("speed")
        rows += _speed(task, lm, pack, open_model)
        say("kernel beside the memory's own speed")
        for name, share in share_of_stream(task.rounds).items():
            line = f"matvec's speed / what its bytes allow, {name}"
            rows.append(at_least(mode, line, share, KERNEL, f"{share:.2f} (profile: docs/modes/proc.md)"))
        return rows


class _Stopped(Exception):
    pass


def _half_way(share: float) -> None:
    if share > 0.5:
        raise _Stopped


def _pack(model: str, to: Path, progress: Callable[[float], None] | None = None, settings: Proc | None = None) -> float:
    """Seconds that packing took, with these settings or those that flags default to."""
    ckpt, clock = loader.open_checkpoint(model), time.monotonic()
    cfg, weights = build(ckpt, loader.DEFAULT_QUANT)
    tokens = ckpt.tokenizer().encode(texts.read("calibration"))[:TOKENS]
    pack_proc(ckpt, cfg, weights, settings or Proc(), tokens, to, progress)
    return time.monotonic() - clock


def _matrices(pack: str) -> list[object]:
    _, weights, _ = packed.open_directory(Path(pack), "auto")
    return list(weights.matrices().values())


def _quality(task: Task, lm: LM) -> Quality:
    return perplexity(lm.model, texts.held_out(lm, task.tokens), min(1024, lm.model.cfg.max_context), lm.kv)


def _said(q: Quality) -> str:
    (low, high), kl = q.ci95, f"KL {q.kl:.4f}, top-1 {q.top1_agree:.3f}, {q.tokens} tokens"
    return f"{q.delta_ppl_pct:+.2f} ({low:+.2f} … {high:+.2f}; {kl})"


def _speed(task: Task, lm: LM, pack: str, open_model: Callable[[str], LM]) -> list[Row]:
    """The pack as it is run, beside ralo's dense path at every precision, in turns."""
    lms = {"pack": load(pack), "bf16": lm, "int8": open_model("int8"), "int4": open_model("int4")}
    engines: dict[str, Engine] = {name: Ralo(one, Dense(one.model), texts.sample(one)) for name, one in lms.items()}
    samples = measure(engines, "decode", task.ctx, 64, task.rounds)
    rows = []
    for beside in ("bf16", "int8", "int4"):
        ratio, (low, high) = samples.ratio("pack", beside)
        said = f"{ratio:.2f} ({low:.2f} … {high:.2f})"
        line = f"decode of the pack / dense {beside}, context {task.ctx}"
        rows.append(at_least(mode, line, ratio, SPEEDUP, said) if beside == "bf16" else shown(mode, line, said))
    ppl = {name: _quality(task, lms[name]).ppl for name in ("int8", "int4")}
    line = "beside it: Δppl % of int4 at all sites (4.5 bits) from int8 (8.25 bits)"
    rows.append(shown(mode, line, f"{100 * (ppl['int4'] / ppl['int8'] - 1):+.2f}"))
    return rows


def _literal(model: str, lm: LM, to: Path) -> Row:
    """The hash and the strongest blocks of each channel."""
    settings = Proc(form="seed")
    _pack(model, to, None, settings)
    said = f"fanout {settings.fanout}, base_scale {settings.base_scale:g}"
    setting = replace(settings, pack=str(to))
    return literal(lm, setting, said, texts.held_out(lm, 2048), min(1024, lm.model.cfg.max_context))
