"""How good a model's predictions are: perplexity, and how far one way of running it is from another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo.errors import RaloError
from ralo.model import PREFILL_CHUNK, Model
from ralo.sequence import Sequence as TextState

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Quality:
    """Perplexity of the path that was run beside dense; delta with a paired 95 % interval, mean KL, top-1 agreement."""

    ppl: float
    dense_ppl: float
    delta_ppl_pct: float
    ci95: tuple[float, float]
    kl: float
    top1_agree: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def losses(
    model: Model,
    tokens: Sequence[int],
    ctx: int,
    kv: str = "f16",
    progress: Callable[[float], None] | None = None,
    exact: bool = True,
) -> F64:
    """Minus log probability of each token given those before it in its window of `ctx` (windows do not overlap).

    `exact`: as decoding predicts; else as a prompt is run, whose activations may be rounded.
    """
    if not 1 <= ctx <= model.cfg.max_context:
        raise RaloError(f"--ctx {ctx} must be from 1 to the model's context of {model.cfg.max_context}")
    if len(tokens) < 2:
        raise RaloError("the text is too short: perplexity needs at least two tokens")
    out = np.empty(len(tokens) - 1)
    for start in range(0, len(tokens) - 1, ctx):
        stop = min(start + ctx, len(tokens) - 1)
        seq = TextState.empty(model.cfg, kv)
        for a in range(start, stop, PREFILL_CHUNK):
            b = min(a + PREFILL_CHUNK, stop)
            logits = model.logits(model.forward(tokens[a:b], seq, stop - start, exact))
            out[a:b] = nll(logits, np.asarray(tokens[a + 1 : b + 1]))
            if progress:
                progress(b / (len(tokens) - 1))
    return out


def nll(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> F64:
    """Scores (T, V), targets (T) -> minus log probability of each target (T)."""
    high = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - high).sum(axis=1, dtype=np.float64)
    loss: F64 = np.log(total) + (high[:, 0] - logits[np.arange(len(targets)), targets])
    return loss


def perplexity(
    model: Model, tokens: Sequence[int], ctx: int, kv: str = "f16", progress: Callable[[float], None] | None = None
) -> Quality:
    """With no mode on, the path that is run is dense itself: the comparison is exact by definition."""
    with np.errstate(over="ignore", invalid="ignore"):  # damaged weights overflow; the line below says so
        ppl = float(np.exp(losses(model, tokens, ctx, kv, progress).mean()))
    if not np.isfinite(ppl):
        raise RaloError("perplexity is not a finite number: the model's weights are damaged")
    return Quality(ppl, ppl, 0.0, (0.0, 0.0), 0.0, 1.0, len(tokens) - 1)
