"""What rounding a prompt costs: perplexity with activations as bytes and attention in words, beside exact.

Leaves out: decoding, which is never rounded. Where the CPU has no VNNI both are the same.
Run: python benches/rounded.py MODEL TEXT [--quant int8,int4] [--ctx 1024] [--tokens 16384]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import ralo
from ralo.quality import losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--quant", default="int8,int4")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16384)
    args = parser.parse_args()
    for quant in args.quant.split(","):
        lm = ralo.load(args.model, quant)
        tokens = lm.encode(args.text.read_text())[: args.tokens + 1]
        exact, rounded = (losses(lm.model, tokens, args.ctx, exact=which) for which in (True, False))
        change = 100 * (np.exp((rounded - exact).mean()) - 1)
        gap = np.abs(rounded - exact).mean()
        ppl = f"exact {np.exp(exact.mean()):.4f}, rounded {np.exp(rounded.mean()):.4f} ({change:+.3f} %)"
        print(f"{quant}: perplexity {ppl}, mean change of a token's loss {gap:.4f}", flush=True)


if __name__ == "__main__":
    main()
