"""How good a model's predictions are: perplexity, and how far one way of running it is from another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo.errors import RaloError
from ralo.model import PREFILL_CHUNK, Model
from ralo.sequence import Sequence as TextState

F32 = NDArray[np.float32]
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


def spans(model: Model, tokens: Sequence[int], ctx: int, first: int = 0) -> list[tuple[int, int]]:
    """Positions [a, b) that are measured of each window of `ctx`: from its `first` on, if it is that long."""
    n = len(tokens) - 1
    if not 1 <= ctx <= model.cfg.max_context:
        raise RaloError(f"--ctx {ctx} must be from 1 to the model's context of {model.cfg.max_context}")
    if not 0 <= first < ctx:
        raise RaloError(f"--first {first} must be from 0 to {ctx - 1}, within a window of --ctx {ctx}")
    if n < 1:
        raise RaloError("the text is too short: perplexity needs at least two tokens")
    if n <= first:
        raise RaloError(f"the text is too short: --first {first} needs at least {first + 2} tokens, it has {n + 1}")
    return [(start + first, min(start + ctx, n)) for start in range(0, n, ctx) if start + first < n]


def scores(
    model: Model, tokens: Sequence[int], ctx: int, kv: str, exact: bool = True, dense: bool = False, first: int = 0
) -> Iterator[tuple[int, int, F32]]:
    """Scores of the tokens after positions [a, b) (b - a, V), in windows of `ctx` that do not overlap.

    `exact`: as decoding predicts; else as a prompt is run, whose activations may be rounded. Modes work as they do
    while decoding, with their state: several tokens at once give what they would give one by one.
    `first`: so many tokens of each window are its prompt, run densely; the scores are of those after it.
    """
    for a, b, (found,) in _along(model, tokens, ctx, kv, exact, first, (dense,)):
        yield a, b, found


def _along(
    model: Model, tokens: Sequence[int], ctx: int, kv: str, exact: bool, first: int, paths: tuple[bool, ...]
) -> Iterator[tuple[int, int, list[F32]]]:
    """Scores along each path, dense or not. They share the prompt, which is run once."""
    for start, stop in spans(model, tokens, ctx, first):
        seq = TextState.empty(model.cfg, kv)
        if first:
            model.prefill(tokens[start - first : start], seq, dense=True)
        each = list(zip([seq, *(seq.clone() for _ in paths[1:])], paths, strict=True))
        for a in range(start, stop, PREFILL_CHUNK):
            b, length = min(a + PREFILL_CHUNK, stop), first + stop - start
            yield a, b, [_scores(model, tokens[a:b], s, length, exact, dense) for s, dense in each]


def _scores(model: Model, tokens: Sequence[int], seq: TextState, length: int, exact: bool, dense: bool) -> F32:
    """Scores of the tokens after these (T, V). Under a time budget they are run one by one, by the clock."""
    if dense or model.verified or not model.pace:
        dense = dense or model.verified
        return model.logits(model.forward(tokens, seq, length, exact, dense), dense)
    out = np.empty((len(tokens), model.cfg.vocab), np.float32)
    for i, token in enumerate(tokens):
        clock = time.perf_counter()
        out[i] = model.step(token, seq)
        model.took(time.perf_counter() - clock)
    return out


def losses(
    model: Model,
    tokens: Sequence[int],
    ctx: int,
    kv: str = "f16",
    progress: Callable[[float], None] | None = None,
    exact: bool = True,
    first: int = 0,
) -> F64:
    """Minus log probability of each token after position `first` of its window of `ctx`, given those before it."""
    end, out = spans(model, tokens, ctx, first)[-1][1], []
    for a, b, logits in scores(model, tokens, ctx, kv, exact, first=first):
        out.append(nll(logits, np.asarray(tokens[a + 1 : b + 1])))
        if progress:
            progress(b / end)
    return np.concatenate(out)


def nll(logits: F32, targets: NDArray[np.int64]) -> F64:
    """Scores (T, V), targets (T) -> minus log probability of each target (T)."""
    loss: F64 = -log_probs(logits)[np.arange(len(targets)), targets].astype(np.float64)
    return loss


def log_probs(logits: F32) -> F32:
    """Scores (T, V) -> logarithms of their probabilities (T, V)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    out: F32 = shifted - np.log(np.exp(shifted).sum(axis=1, dtype=np.float64, keepdims=True)).astype(np.float32)
    return out


def divergence(p: F32, q: F32) -> F64:
    """KL divergence of each row of log probabilities q from p, in nats (T)."""
    kl: F64 = (np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64)
    return kl


def perplexity(
    model: Model,
    tokens: Sequence[int],
    ctx: int,
    kv: str = "f16",
    progress: Callable[[float], None] | None = None,
    exact: bool = True,
    first: int = 0,
) -> Quality:
    """The path that decoding takes beside dense. With no mode on, or drafts verified, they are the same by definition.

    `first`: only positions from this one of each window on are measured; what is before is a prompt, run densely.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # damaged weights overflow; the line below says so
        if not model.has_modes or model.verified:
            loss = dense = losses(model, tokens, ctx, kv, progress, exact, first)
            kl, same = 0.0, 1.0
        else:
            loss, dense, kl, same = _beside_dense(model, tokens, ctx, kv, progress, exact, first)
        ppl, dense_ppl = float(np.exp(loss.mean())), float(np.exp(dense.mean()))
    if not np.isfinite(dense_ppl):
        raise RaloError("perplexity is not a finite number: the model's weights are damaged")
    low, high = paired_interval(loss - dense)
    delta, n = _percent((loss - dense).mean()), len(loss)
    return Quality(ppl, dense_ppl, delta, (_percent(low), _percent(high)), kl, same, n)


def _beside_dense(
    model: Model, tokens: Sequence[int], ctx: int, kv: str, progress: Callable[[float], None] | None, exact: bool,
    first: int,
) -> tuple[F64, F64, float, float]:  # fmt: skip
    """Losses with modes and of dense, mean KL, share of positions where both prefer the same token."""
    end, loss, dense, kl, same = spans(model, tokens, ctx, first)[-1][1], [], [], 0.0, 0
    for a, b, (ours, theirs) in _along(model, tokens, ctx, kv, exact, first, (False, True)):
        q, p = log_probs(ours), log_probs(theirs)
        rows, targets = np.arange(b - a), np.asarray(tokens[a + 1 : b + 1])
        loss.append(-q[rows, targets].astype(np.float64))
        dense.append(-p[rows, targets].astype(np.float64))
        kl += float(divergence(p, q).sum())
        same += int((q.argmax(axis=1) == p.argmax(axis=1)).sum())
        if progress:
            progress(b / end)
    n = sum(map(len, loss))
    return np.concatenate(loss), np.concatenate(dense), kl / n, same / n


def paired_interval(difference: F64, block: int = 64) -> tuple[float, float]:
    """95 % interval of the mean of per-token differences; neighbours resemble each other, so blocks are the samples."""
    if len(difference) < 2 * block:
        block = 1
    blocks = difference[: len(difference) // block * block].reshape(-1, block).mean(axis=1)
    half = 1.96 * float(blocks.std(ddof=1)) / len(blocks) ** 0.5 if len(blocks) > 1 else 0.0
    return float(difference.mean()) - half, float(difference.mean()) + half


def _percent(log_ratio: float) -> float:
    return 100 * float(np.expm1(log_ratio))
