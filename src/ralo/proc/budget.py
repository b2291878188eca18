"""Shares bits out among layers and places: more of them where an error is felt more, within one budget for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ralo import _core, arch
from ralo.config import ModelConfig
from ralo.formats.checkpoint import Checkpoint
from ralo.matrix import F32, Matrix
from ralo.proc.generator import MOST, bits_of
from ralo.remake.felt import Key, felt
from ralo.weights import FUSED, Weights

ROUGH = "int4"  # the precision whose error is felt out


def sensitivity(
    ckpt: Checkpoint,
    cfg: ModelConfig,
    weights: Weights,
    places: Sequence[Key],
    tokens: Sequence[int],
    tick: Callable[[], None],
) -> dict[Key, float]:
    """KL from the model as it is with one place of one layer at a rougher precision."""

    def trials() -> Iterator[tuple[Key, Matrix]]:
        for i, place in places:
            yield (i, place), _rough(ckpt, cfg, i, place, getattr(weights.layers[i], place).bias)
            tick()

    return felt(cfg, weights, trials(), tokens)


def _rough(ckpt: Checkpoint, cfg: ModelConfig, layer: int, place: str, bias: F32 | None) -> Matrix:
    found = arch.find(ckpt).layer(ckpt, cfg, layer)
    sites = [s for s in FUSED[place] if s in found]
    m = Matrix.empty(ROUGH, found[sites[0]].shape[1], {s: found[s].shape[0] for s in sites}, False)
    for site in sites:
        m.pack(site, found[site])
    return Matrix(ROUGH, m.ic, m.parts, m.data, m.scales, bias)


def allotted(bits: float, loss: Mapping[Key, float], shapes: Mapping[Key, tuple[int, int]]) -> dict[Key, int]:
    """Columns of every place (its shape is ic, oc), so that `bits` a weight are kept to on average.

    An error falls by half with every half bit, so what a column is worth there is known beforehand: one by one they go
    to where they are worth most for their bytes.
    """
    blocks = {key: oc // _core.PAD for key, (_, oc) in shapes.items()}
    columns = {key: -(-n // MOST) for key, n in blocks.items()}
    left = bits * sum(ic * oc for ic, oc in shapes.values())

    def price(key: Key) -> float:  # of one more column, in bits
        return shapes[key][0] * bits_of(1, shapes[key][1]) * shapes[key][1]

    def worth(key: Key) -> float:
        oc = shapes[key][1]
        now, then = (2.0 ** (-2 * bits_of(columns[key] + more, oc)) for more in (0, 1))
        return float(loss[key] * (now - then) / price(key))

    left -= sum(columns[key] * price(key) for key in columns)
    while open_ones := [k for k in columns if columns[k] < blocks[k] and price(k) <= left]:
        best = max(open_ones, key=worth)
        columns[best] += 1
        left -= price(best)
    return columns
