"""Several texts in one pass beside one: tokens per second of Model.steps over those of one text, in turns.

Leaves out: choosing tokens, prompts, HTTP.
Run: python benches/texts.py [-m mini] [--ctx 100] [--rounds 15] [--kwta-k 0.5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import ralo
from ralo.sequence import Sequence

COUNTS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="mini")
    parser.add_argument("--ctx", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kwta-k", type=float, default=0.0, help="with this mode on; 0 = dense")
    args = parser.parse_args()
    lm = ralo.load(args.model, modes=[ralo.KWTA(k=args.kwta_k)] if args.kwta_k else [])
    texts = [lm.new_sequence() for _ in range(max(COUNTS))]
    for i, text in enumerate(texts):
        lm.model.prefill([3 + (7 * i + t) % 200 for t in range(args.ctx)], text)
    rounds = [[seconds(lm, texts[:n], args.ctx) for n in COUNTS] for _ in range(args.rounds)]
    for i, n in enumerate(COUNTS):
        ratios = sorted(n * r[0] / r[i] for r in rounds)
        middle, low, high = statistics.median(ratios), ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
        print(f"{n:3} texts: {middle:.2f}x the tokens of one ({low:.2f} ... {high:.2f})")


def seconds(lm: ralo.LM, texts: list[Sequence], ctx: int) -> float:
    clock = time.perf_counter()
    lm.model.steps([5] * len(texts), texts, [False] * len(texts))
    took = time.perf_counter() - clock
    for text in texts:
        text.trim(ctx)
    return took


if __name__ == "__main__":
    main()
