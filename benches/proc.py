"""What each part of procedural weights buys: hash, searched seeds, fitted tables, compensation, deltas, the budget.

Quality only, at about the same memory; the MLPs of the model, everything else at int8.
    python benches/proc.py [MODEL] [--bits 4] [--tokens 8192]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial

from ralo import _core, arch, cpu, loader, texts
from ralo.guard import GuardOptions
from ralo.lm import LM
from ralo.model import Model
from ralo.proc.budget import allotted, sensitivity
from ralo.proc.build import Recipe, build_matrix
from ralo.proc.build_hashed import build_hashed
from ralo.proc.generator import SCALE_BITS
from ralo.quality import divergence, log_probs, scores
from ralo.remake.layer import build_layer, moments_of
from ralo.remake.windows import Windows
from ralo.weights import build

PLACES = ("up", "down")


def made_from(found, place: str, recipe: Recipe, inputs):
    return build_matrix(found, place, recipe, moments_of(inputs))[0]


class Trial:
    def __init__(self, model: str, tokens: int) -> None:
        self.ckpt = loader.open_checkpoint(model)
        self.cfg, self.weights = build(self.ckpt, "int8")
        self.lm = LM(model, Model(self.cfg, self.weights), self.ckpt.tokenizer, "f16", GuardOptions())
        self.text = texts.tokens_of(self.lm, "calibration", 16384)
        self.held_out = texts.held_out(self.lm, tokens)
        self.dense = [(t, log_probs(s)) for t, s in self._scores(self.weights)]

    def _scores(self, weights):
        ctx = min(1024, self.cfg.max_context)
        for a, b, s in scores(Model(self.cfg, weights), self.held_out, ctx, "f16"):
            yield self.held_out[a + 1 : b + 1], s

    def seeds(self, columns, **settings):
        family, width = arch.find(self.ckpt), min(512, self.cfg.max_context)
        windows = Windows(self.cfg, self.weights, [self.text[i : i + width] for i in range(0, len(self.text), width)])
        out = []
        for i, layer in enumerate(self.weights.layers):
            found = family.layer(self.ckpt, self.cfg, i)
            recipes = {p: replace(Recipe(columns[i, p], 0.0, 0.0, 1 << 16), **settings) for p in PLACES}
            makers = {p: partial(made_from, found, p, recipe) for p, recipe in recipes.items()}
            out.append(build_layer(layer, i, windows, makers))
        return out

    def hashed(self, bits: float, base_scale: float):
        """The document's form with as many blocks as `bits` leave room for: 16 bits a delta, 48 a block."""
        family, out = arch.find(self.ckpt), []
        for i, layer in enumerate(self.weights.layers):
            found = family.layer(self.ckpt, self.cfg, i)
            made = {}
            for place in PLACES:
                fanout = max(1, int(bits * getattr(layer, place).oc / (16 * 32 + 48)))
                made[place] = build_hashed(found, place, fanout, 32, base_scale, 1e-3, 4096)[0]
            out.append(made)
        return out

    def report(self, name: str, made, seconds: float) -> None:
        layers = tuple(layer.using(m) for layer, m in zip(self.weights.layers, made, strict=True))
        kl, count, loss = 0.0, 0, 0.0
        for (targets, p), (_, s) in zip(self.dense, self._scores(replace(self.weights, layers=layers)), strict=True):
            q = log_probs(s)
            rows = range(len(targets))
            kl, count = kl + float(divergence(p, q).sum()), count + len(targets)
            loss += float((p[rows, targets] - q[rows, targets]).sum())
        every = [m for each in made for m in each.values()]
        bits = 8 * sum(m.nbytes for m in every) / sum(m.ic * sum(m.parts.values()) for m in every)
        rise = 100 * (2.718281828 ** (loss / count) - 1)
        print(f"| {name} | {bits:.2f} | {kl / count:.4f} | {rise:+.2f} | {seconds:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="mini")
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    cpu.setup(0)
    t = Trial(args.model, args.tokens)
    keys = [(i, p) for i in range(t.cfg.n_layers) for p in PLACES]
    shapes = {(i, p): (getattr(t.weights.layers[i], p).ic, getattr(t.weights.layers[i], p).oc) for i, p in keys}
    even = {k: max(1, round(args.bits * oc / (8 * _core.PAD + SCALE_BITS))) for k, (_, oc) in shapes.items()}
    print("| weights | bits | KL | Δppl % | seconds |\n|---|---|---|---|---|")
    ways = {
        "seed form, base_scale 0": lambda: t.hashed(args.bits, 0.0),
        "seed form, base_scale 0.05": lambda: t.hashed(args.bits, 0.05),
        "seed form, base_scale 0, twice the memory": lambda: t.hashed(2 * args.bits, 0.0),
        "searched seeds, tables from the hash": lambda: t.seeds(even, generator="hash", compensate=False),
        "… fitted tables": lambda: t.seeds(even, compensate=False),
        "… compensated": lambda: t.seeds(even),
        "… with deltas": lambda: t.seeds(even, deltas=0.001),
        "… bits by sensitivity": lambda: t.seeds(
            allotted(args.bits, sensitivity(t.ckpt, t.cfg, t.weights, keys, t.text, lambda: None), shapes), deltas=0.001
        ),
    }
    for name, way in ways.items():
        clock = time.monotonic()
        made = way()
        t.report(name, made, time.monotonic() - clock)


if __name__ == "__main__":
    main()
