"""Gates guessed by factors (--kwta-predict): what they find, read and take, on a model and on large MLPs made for it.

model: decode at 128 tokens of context beside gate first without a guess, as chosen and with all layers forced to guess.
mlp: a relu MLP whose gate is a product of a rank, plus noise; more layers than fit a cache, one token after another.
Leaves out: of mlp the tokens whose guess is looked at, one in 64, which read the whole gate; attention, the head and
Python between layers. The MLP's factors are those it was made of, not calibrated ones.
Run: python benches/predict.py [-m mini] [--profile FILE] [--quant int8] [--tokens 4096] [--rounds 15]
     python benches/predict.py --shape 2048x8192 [--rank 64] [--density 0.05] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ralo import KWTA, _core, load, texts
from ralo import profile as profiles
from ralo.accept import mlp
from ralo.bench import Ralo, measure
from ralo.calibrate import calibrate
from ralo.commands.explain import runs
from ralo.compose import compose
from ralo.cpu import default_threads
from ralo.lm import LM
from ralo.modes import guess
from ralo.modes.guess import Chosen, Rule, best
from ralo.modes.statepack import counts_by
from ralo.quality import perplexity

F32 = NDArray[np.float32]
NOISES = (0.0, 0.3, 1.0)  # times the size of the product
LOOK, FRONT = 8192, 2048  # tokens to calibrate on; of title pages, which are left out
CHECK = 16  # a position whose guess is looked at
WINNERS = (None, 1, "above", 1e-30, 1.0, 1, False, True)


# ---------------------------------------------------------------- a model


def opened(args: argparse.Namespace, profile: profiles.Profile, **settings: str) -> LM:
    lm = load(args.model, args.quant)
    lm.use(compose([KWTA(k=1.0, target="mlp", **settings)]), profile)
    return lm


def of_model(args: argparse.Namespace) -> None:
    dense = load(args.model, args.quant)
    profile = profiles.load(args.profile) if args.profile else None
    profile = profile or calibrate(dense, texts.tokens_of(dense, "calibration", LOOK), often=64)
    ways = {"gate first": opened(args, profile), "as chosen": opened(args, profile, predict="on")}
    guess.WORTH = 1e9  # whatever it takes
    ways["forced"] = opened(args, profile, predict="on")
    for name in ("as chosen", "forced"):
        print(f"{name}:")
        for i in range(len(dense.model.layers)):
            print(f"  {i}: {runs(ways[name], str(i), 'up')}")
    held_out, text = texts.held_out(dense, FRONT + args.tokens)[FRONT:], texts.sample(dense)
    speed = measure({n: Ralo(lm, lm.model, text) for n, lm in ways.items()}, "decode", 128, 48, args.rounds)
    print(f"{'way':>12} {'x gate first':>24} {'gates':>6} {'recall':>6} {'dppl %':>7} {'KL':>7}")
    for name, lm in ways.items():
        ratio, (low, high) = speed.ratio(name, "gate first")
        quality = perplexity(lm.model, held_out, min(1024, lm.model.cfg.max_context), lm.kv)
        found = counted([layer.taken["mlp"].slot for layer in lm.model.slots])
        print(
            f"{name:>12} {ratio:8.2f} ({low:.2f} … {high:.2f}) {found}{quality.delta_ppl_pct:+8.2f} {quality.kl:7.4f}"
        )


def counted(slots: list[_core.Slot]) -> str:
    """Share of gates that were computed, and of winners that were found."""
    counts = [slot.counts() for slot in slots if isinstance(slot, _core.KwtaMlp)]
    guessed, likely, checked, missed = (
        sum(c[name] for c in counts) for name in ("guessed", "candidates", "checked", "missed")
    )
    return f"{likely / guessed if guessed else 1:6.2f} {1 - missed / checked if checked else 1:6.3f} "


# ---------------------------------------------------------------- a large MLP


def layer(args: argparse.Namespace, noise: float, rng: np.random.Generator) -> tuple[mlp.Layer, profiles.Guess]:
    """An MLP whose gates are a product and noise of a size that the same share of them is open, and the factors."""
    d, f = args.shape
    made = mlp.layer(d, f, args.density, rng)
    first = rng.standard_normal((d, args.rank), dtype=np.float32) / d**0.5
    second = rng.standard_normal((args.rank, f), dtype=np.float32) / args.rank**0.5
    gate = (first @ second).T + noise * rng.standard_normal((f, d), dtype=np.float32) / d**0.5
    start = made.up.slices["gate"].start
    _core.pack("int8", np.ascontiguousarray(gate), made.up.oc, start, made.up.data, made.up.scales)
    made.gate_bias[:] = -statistics.NormalDist().inv_cdf(1 - args.density) * (1 + noise**2) ** 0.5
    rows = _core.neuron_rows(made.up.core, start, f)
    known = first.astype(np.float16), second.astype(np.float16)
    return replace(made, gate=rows, codes=_core.gate_codes("int8", d, f, *rows)), known


def chosen(at: mlp.Layer, known: profiles.Guess, tokens: F32) -> Chosen:
    normed = (tokens / np.sqrt(np.square(tokens).mean(axis=1, keepdims=True))).astype(np.float32)
    rule = Rule("above", 1e-30, 1.0, np.ones(at.up.parts["gate"], np.float32))
    return best(at.up, "relu", known, normed, rule)


def of_mlp(args: argparse.Namespace) -> None:
    d, f = args.shape
    _core.set_threads(default_threads())
    seen, tokens = mlp.inputs(d, 128), np.random.default_rng(2).standard_normal((12, d), dtype=np.float32)
    print(f"{d} x {f}, a gate of rank {args.rank} and noise, {args.density:.0%} open, int8, {_core.threads()} threads")
    print(
        f"{'noise':>5} {'way':>14} {'us':>8} {'x dense':>8} {'x gate first':>12} {'MB':>6} {'gates':>6} {'recall':>6}"
    )
    for noise in NOISES:
        rng = np.random.default_rng(0)
        both = [layer(args, noise, rng) for _ in range(1 + mlp.OUT_OF_CACHE // (3 * d * f))]
        made = [at for at, _ in both]
        guesses = [chosen(at, known, seen) for at, known in both]
        slack = mlp.slack_of(made[0], seen[:12])
        ways: dict[str, list[mlp.Slot]] = {"dense": [None for _ in made]}
        ways["gate first"] = [_core.KwtaMlp("int8", d, f, *at.rows, *WINNERS) for at in made]
        ways["factors"] = [
            _core.KwtaMlp("int8", d, f, *at.rows, *WINNERS, g.slot(at.up)) for at, g in zip(made, guesses, strict=True)
        ]
        ways["two bits"] = [mlp.packed(at, slack, counts_by("auto")) for at in made]  # --state-pack-predict
        rounds = [{n: mlp.measure(made, slots, tokens) for n, slots in ways.items()} for _ in range(args.rounds)]
        for at, slot in zip(made, ways["factors"], strict=True):
            at.mlp.use(None, None, slot)
            for x in tokens:
                at.mlp.run(x[None].copy(), CHECK, True, _core.LayerState())
        for name, slots in ways.items():
            took = statistics.median(r[name][0] for r in rounds)
            over = [statistics.median(r[than][0] / r[name][0] for r in rounds) for than in ("dense", "gate first")]
            found = counted(slots) if name == "factors" else ""  # type: ignore[arg-type]
            found = f"{'':6} {mlp.recall_of(slots):6.3f}" if name == "two bits" else found
            shown = f"{took * 1e6:8.1f} {over[0]:8.2f} {over[1]:12.2f} {rounds[0][name][1] / 1e6:6.1f}"
            print(f"{noise:5.1f} {name:>14} {shown} {found}", flush=True)
        print(f"      {guesses[0].refused(1.0) or guesses[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="mini")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shape", type=lambda s: tuple(int(n) for n in s.split("x")), help="DxF: of MLPs instead")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.shape:
        of_mlp(args)
    else:
        of_model(args)


if __name__ == "__main__":
    main()
