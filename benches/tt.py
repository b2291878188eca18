"""Packs with factors beside the dense model they were made from: where they stand, from end to end, and what they cost.

python benches/tt.py MODEL PACK [PACK ...] [--quant int8] [--tokens 16384] [--rounds 15]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ralo import texts
from ralo.accept import halves
from ralo.bench import Ralo, measure
from ralo.compose import compose
from ralo.formats import packed
from ralo.lm import load
from ralo.model import Dense
from ralo.modes import TT
from ralo.quality import perplexity
from ralo.tt.about import AboutTT

HALF = {"qkv": "attention", "o": "attention", "up": "mlp", "down": "mlp"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("packs", nargs="+")
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    lm = load(args.model, args.quant)
    for pack in args.packs:
        lm.use(compose([TT(pack=pack)]))
        names = packed.about(Path(pack), AboutTT).matrices
        print(f"{pack}: {len(names)} matrices are factors")
        for half in sorted({HALF[name.split(".")[2]] for name in names}):
            layers = sorted({int(n.split(".")[1]) for n in names if HALF[n.split(".")[2]] == half})
            ratio, (low, high) = halves.speedup(lm, half, layers, args.rounds)
            print(f"  {half} of {len(layers)} layers / dense: {ratio:.2f} ({low:.2f} … {high:.2f})", flush=True)
        engines = {"made": Ralo(lm, lm.model, texts.sample(lm)), "dense": Ralo(lm, Dense(lm.model), texts.sample(lm))}
        ratio, (low, high) = measure(engines, "decode", 128, 64, args.rounds).ratio("made", "dense")
        print(f"  decode / dense: {ratio:.2f} ({low:.2f} … {high:.2f})", flush=True)
        q = perplexity(lm.model, texts.held_out(lm, args.tokens), min(1024, lm.model.cfg.max_context), lm.kv)
        low, high = q.ci95
        print(
            f"  Δppl % {q.delta_ppl_pct:+.2f} ({low:+.2f} … {high:+.2f}), KL {q.kl:.4f}, {q.tokens} tokens", flush=True
        )


if __name__ == "__main__":
    main()
