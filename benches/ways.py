"""Two ways of one build in turns: rows asked for into the first-level cache beside the second (decode), and prompts in
tiles of AMX beside VNNI where the CPU has both.

Leaves out: quality, which is the same, bit for bit.
Run: python benches/ways.py [MODEL] [--quant int8,int4] [--prompt-tokens 512] [-n 64] [--rounds 15]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import ralo
from ralo import _core
from ralo.bench import Ralo, Samples, measure, measure_closely

LEVELS = ("amx", "avx512vbmi")


class Way(Ralo):
    """Ralo after one setting of the process has been made."""

    def __init__(self, lm: ralo.LM, choose: Callable[[], None]) -> None:
        super().__init__(lm, lm.model, list(range(2, 1000)))
        self.choose = choose

    def start(self, ctx: int) -> None:
        self.choose()
        super().start(ctx)

    def decode(self, tokens: int) -> float:
        self.choose()
        return super().decode(tokens)


def show(what: str, samples: Samples, a: str, b: str) -> None:
    ratio, (low, high) = samples.ratio(a, b)
    speeds = f"{samples.median(a):8.1f} and {samples.median(b):8.1f} tokens a second"
    print(f"{what:>16} {a:>7} / {b:<7} {ratio:5.2f} ({low:.2f} … {high:.2f}) {speeds}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="mini")
    parser.add_argument("--quant", default="int8,int4")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    for quant in args.quant.split(","):
        lm = ralo.load(args.model, quant)
        usual = _core.near_rows()
        caches = {name: Way(lm, partial(_core.set_near_rows, name == "first")) for name in ("second", "first")}
        show(f"decode {quant}", measure_closely(dict(caches), 64, args.n, args.rounds), "second", "first")
        _core.set_near_rows(usual)
        if set(LEVELS) <= set(_core.levels()):
            levels = {name: Way(lm, partial(_core.force_level, name)) for name in LEVELS}
            samples = measure(dict(levels), "prefill", 0, args.prompt_tokens, args.rounds)
            show(f"prefill {quant}", samples, *LEVELS)
            _core.force_level(_core.levels()[0])


if __name__ == "__main__":
    main()
