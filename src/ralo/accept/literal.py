"""The documents' own formulas beside the ones that ralo takes: shown, since ordinary models do not bear them."""

from __future__ import annotations

from collections.abc import Sequence

from ralo.accept.rows import Row, shown
from ralo.compose import compose
from ralo.lm import LM
from ralo.modes.base import Mode
from ralo.quality import perplexity

TOKENS = 2048  # enough for errors of this size


def literal(lm: LM, setting: Mode, said: str, tokens: Sequence[int], ctx: int, first: int = 0) -> Row:
    """What the settings, which are named by `said`, cost. All is off afterwards."""
    lm.use(compose([setting]))
    memory = lm.metrics().get(f"{setting.name}.mem_ratio")
    q = perplexity(lm.model, tokens[: max(TOKENS, ctx) + 1], ctx, lm.kv, first=first)
    lm.use(compose([]))
    also = "" if memory is None else f"{float(memory):.2f} of bf16's memory, "
    found = f"{q.delta_ppl_pct:+.4g} ({also}KL {q.kl:.4f}, top-1 {q.top1_agree:.3f}, {q.tokens} tokens)"
    return shown(setting.name, f"the document's own form, {said}: Δppl %", found)
