"""A gated relu MLP whose gate is mostly shut, by how its zeros are skipped; what a gate costs by columns, by rows, and
guessed by each way to count bits.

Leaves out: attention, the head, Python between layers. The guess's slack is set for the recall asked for on the first
layer.
Run: python benches/mlp.py [--shape 2048x8192] [--density 0.05] [--recall 0.995] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics

from ralo import _core
from ralo.accept.mlp import Layer, Slot, inputs, layers, measure, packed, recall_of, slack_of
from ralo.cpu import default_threads

WAYS = ("vpopcntdq", "popcnt", "lut")  # kernighan is many times slower


def slots(made: list[Layer], slack: float) -> dict[str, list[Slot]]:
    def winners(at: Layer) -> Slot:
        d, f = at.up.ic, len(at.codes[1])
        return _core.KwtaMlp("int8", d, f, *at.rows, None, 1, "above", 1e-30, 1.0, 1, False, True)

    out: dict[str, list[Slot]] = {"dense": [None for _ in made], "kwta, gate first": [winners(at) for at in made]}
    out["packed, gate by columns"] = [packed(at, by_rows=False) for at in made]
    out["packed"] = [packed(at) for at in made]
    here = [way for way in WAYS if way in _core.popcounts()]
    return out | {f"packed, guess by {way}": [packed(at, slack, way) for at in made] for way in here}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="2048x8192", help="DxF")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--recall", type=float, default=0.995)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    d, f = (int(n) for n in args.shape.split("x"))
    made, tokens = layers(d, f, args.density), inputs(d)
    occupants = slots(made, slack_of(made[0], tokens, args.recall))
    print(f"{'way':>26} {'threads':>7} {'us':>8} {'x dense':>8} {'x packed':>8} {'MB':>6} {'recall':>6}")
    for threads in sorted({1, default_threads()}):
        _core.set_threads(threads)
        rounds = [{n: measure(made, o, tokens) for n, o in occupants.items()} for _ in range(args.rounds)]
        for name, here in occupants.items():
            took = statistics.median(r[name][0] for r in rounds)
            over = [statistics.median(r[than][0] / r[name][0] for r in rounds) for than in ("dense", "packed")]
            recall = f"{recall_of(here):.3f}" if "guess" in name else ""
            speed = f"{took * 1e6:8.1f} {over[0]:8.2f} {over[1]:8.2f} {rounds[0][name][1] / 1e6:6.1f} {recall:>6}"
            print(f"{name:>26} {threads:>7} {speed}", flush=True)


if __name__ == "__main__":
    main()
