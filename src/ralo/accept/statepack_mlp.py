"""What StatePack promises of MLPs: silent neurons cost nothing and their absence is not heard; where most neurons
speak, it is off at once."""

from __future__ import annotations

import statistics
from functools import partial

from ralo import texts
from ralo.accept import mlp
from ralo.accept.rows import Progress, Row, Task, at_least, at_most, holds, shown, tried
from ralo.accept.watched import caught, plant
from ralo.bench import Engine, Ralo, Samples, measure, measure_closely
from ralo.calibrate import calibrate
from ralo.compose import compose
from ralo.lm import LM
from ralo.model import Dense, Runner
from ralo.modes import StatePack
from ralo.modes.base import ZEROS
from ralo.modes.statepack import counts_by
from ralo.quality import perplexity

FASTER, ANY = {"mini": 1.25}, 1.10  # of models by name, and what the document asks of any
LOSSLESS, DENSITY = 0.01, 0.10  # percent of perplexity; share of neurons
SHAPE, ACTIVE, GUESSED = (2048, 8192), 0.05, 1.2  # of a 1 B model; its density; what guessing gates is to gain
TRIED = 0.02  # of a token's time, that a mode that is off may cost
FRONT = 2048  # tokens of title pages, which are not like the rest
LITTLE = 1e-6  # density that the neurons of any layer are above
LOOK, NEW, DECIDED = 2048, 64, 256  # tokens to calibrate a guess on, to generate, and that share a decision

mode = StatePack.name


def accept_mlp(task: Task, lm: LM, say: Progress) -> list[Row]:
    say("MLPs")
    part = partial(_silent, task, lm, say) if lm.model.cfg.act in ZEROS else partial(_busy, task, lm)
    rows = [*tried(mode, "decode and density of MLPs", part), *tried(mode, "MLPs: a NaN", partial(_planted, lm))]
    say("guessed gates at the shape of a 1 B model")
    return [*rows, _guessed_gates(task.rounds)]


def _prose(lm: LM, tokens: int) -> list[int]:
    """Text from after its title pages on."""
    found = texts.held_out(lm, FRONT + tokens)
    return found[min(FRONT, len(found) // 2) :]


def _speed(lm: LM, setting: StatePack, task: Task) -> tuple[float, str]:
    lm.use(compose([setting]))
    samples = measure(_engines(lm, lm.guard), "decode", task.ctx, NEW, task.rounds)
    return _ratio(samples)


def _engines(lm: LM, runner: Runner) -> dict[str, Engine]:
    text = _prose(lm, 1024)
    return {"ralo": Ralo(lm, runner, text), "dense": Ralo(lm, Dense(lm.model), text)}


def _ratio(samples: Samples) -> tuple[float, str]:
    ratio, (low, high) = samples.ratio("ralo", "dense")
    return ratio, f"{ratio:.2f} ({low:.2f} … {high:.2f})"


def _silent(task: Task, lm: LM, say: Progress) -> list[Row]:
    """A model whose activations are often zero."""
    setting, name = StatePack(target="mlp"), str(lm.path).rstrip("/").rpartition("/")[2]
    ratio, said = _speed(lm, setting, task)
    wanted = FASTER.get(name, ANY)
    rows = [at_least(mode, f"decode speed-up over dense by zeros alone, {lm.quant}", ratio, wanted, said)]
    lm.use(compose([setting]))
    quality = perplexity(lm.model, _prose(lm, task.tokens), min(1024, lm.model.cfg.max_context), lm.kv)
    said = f"{quality.delta_ppl_pct:+.4f} (KL {quality.kl:.6f}, {quality.tokens} tokens)"
    rows.append(at_most(mode, "|Δppl| % of it", abs(quality.delta_ppl_pct), LOSSLESS, said))
    rows.append(_density(lm))
    rows.append(holds(mode, f"same greedy text, {NEW} tokens", _greedy(lm, setting) == _greedy(lm, None)))
    rows.append(_off_by_rho(lm, StatePack(target="mlp", rho=LITTLE), "rho below the density"))
    say("guessed gates of this model")
    return [*rows, _guessed(task, lm)]


def _density(lm: LM) -> Row:
    """Of the layers that ran packed, as the quality run counted them; the others are named."""
    layers = [m for m in lm.layer_metrics() if m]
    packed = {i: m["pack.density"] for i, m in enumerate(layers) if m["pack.enabled"] > 0.5}
    together = statistics.mean(packed.values()) if packed else 0.0
    off = [i for i in range(len(layers)) if i not in packed]
    each = " ".join(f"{i}: {d:.2f}" for i, d in packed.items())
    said = f"{together:.3f} ({each}; off by rho: {', '.join(map(str, off)) or 'none'})"
    return at_most(mode, "density of the packed layers", together if packed else 1.0, DENSITY, said)


def _greedy(lm: LM, setting: StatePack | None) -> list[int]:
    lm.use(compose([setting] if setting else []))
    return lm.generate(_prompt(lm), NEW, temperature=0.0).tokens


def _prompt(lm: LM) -> list[int]:
    """Prose that leaves room for an answer."""
    most = lm.model.cfg.max_context
    return _prose(lm, 256)[: min(128, max(most - NEW, most // 2))]


def _guessed(task: Task, lm: LM) -> Row:
    """Shown beside zero skipping: on small models reading less is not what limits."""
    line = "decode with guessed gates beside dense, for comparison"
    if not lm.model.cfg.gated:
        return shown(mode, line, "this model's MLPs have no gate")
    profile = lm.profile or calibrate(lm, texts.tokens_of(lm, "calibration", LOOK), often=64)
    lm.use(compose([]), profile)
    ratio, said = _speed(lm, StatePack(target="mlp", predict="on"), task)
    quality = perplexity(lm.model, _prose(lm, 2048), min(1024, lm.model.cfg.max_context), lm.kv)
    said = f"{said} at Δppl {quality.delta_ppl_pct:+.2f} %"
    return holds(mode, line, ratio > 0, said)


def _busy(task: Task, lm: LM) -> list[Row]:
    """A model whose neurons all speak: eps 1e-4 drops next to nothing, and the mode gets out of the way."""
    setting = StatePack(target="mlp", eps="1e-4")
    lm.use(compose([setting]))
    # The model's own: the guard's comparisons are not a cost of this mode. Over as many tokens as share a decision.
    ratio, said = _ratio(measure_closely(_engines(lm, lm.model), task.ctx, DECIDED, 3 * task.rounds))
    rows = [at_least(mode, "eps 1e-4: decode beside dense, off at once, no guard", ratio, 1 - TRIED, said)]
    same = _greedy(lm, setting) == _greedy(lm, None)
    rows.append(holds(mode, f"eps 1e-4: same greedy text, {NEW} tokens", same))
    rows.append(_off_by_rho(lm, setting, "eps 1e-4"))
    return [*rows, shown(mode, "density of the packed layers", "no layer is packed: next to no neuron is silent")]


def _off_by_rho(lm: LM, setting: StatePack, what: str) -> Row:
    lm.use(compose([setting]))
    lm.generate(_prompt(lm), NEW, temperature=0.0)
    found = lm.metrics()
    said = f"density {found['pack.density']:.4f}, {float(found['pack.enabled']):.0%} of tokens and layers packed"
    return holds(mode, f"{what}: switched off by rho", float(found["pack.enabled"]) == 0, said)


def _planted(lm: LM) -> list[Row]:
    """Where all neurons run packed."""
    lm.use(compose([StatePack(target="mlp", eps="0", rho=1.0)]))
    return [caught(lm, mode, "a NaN in an MLP is caught and counted", plant(lm))]


def _guessed_gates(rounds: int) -> Row:
    d, f = SHAPE
    made, tokens = mlp.layers(d, f, ACTIVE), mlp.inputs(d)
    slack = mlp.slack_of(made[0], tokens)
    plain: list[mlp.Slot] = [mlp.packed(at) for at in made]
    guessed: list[mlp.Slot] = [mlp.packed(at, slack, counts_by("auto")) for at in made]
    ratios = []
    for _ in range(rounds + 1):
        (a, _), (b, _) = mlp.measure(made, plain, tokens), mlp.measure(made, guessed, tokens)
        ratios.append(a / b)
    ratio = statistics.median(ratios[1:])
    said = f"{ratio:.2f} (recall {mlp.recall_of(guessed):.3f}, {counts_by('auto')})"
    line = f"guessed gates over zero skipping, {d} x {f}, {ACTIVE:.0%} active, MLPs"
    return at_least(mode, line, ratio, GUESSED, said)
