"""Builds a SentencePiece BPE tokenizer ("llama" in GGUF) from its tokens and scores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

SPACE = "\u2581"  # how SentencePiece spells a space
INNER_SPACE = re.compile(f"[^{SPACE}]{SPACE}")
WORD = f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+"


def build(
    tokens: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool], unk_id: int | None, space_prefix: bool
) -> Any:
    """SentencePiece joins the adjacent pair that makes the best-scored token; so does BPE with merges in that order."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = {token: token_id for token_id, token in enumerate(tokens)}
    pieces = {token: token_id for token, token_id in ids.items() if mergeable[token_id]}
    unk = tokens[unk_id] if unk_id is not None else None
    model = models.BPE(ids, merges(pieces, scores), unk_token=unk, fuse_unk=True, byte_fallback=True)
    inner = Tokenizer(model)
    prefix = [normalizers.Prepend(SPACE)] if space_prefix else []
    inner.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    if not any(INNER_SPACE.search(piece) for piece in pieces):
        # No token reaches over the start of a word, so words can be merged, and cached, one by one: same ids, faster.
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "isolated")
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    inner.decoder = decoders.Sequence(steps)
    return inner


def merges(pieces: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best-scored piece first."""
    ranked = []
    for piece, token_id in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[token_id], token_id, pieces[left], pieces[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
