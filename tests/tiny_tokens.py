"""Vocabularies of tiny models: a byte-level BPE, and SentencePiece-style pieces with scores as GGUF files have them."""

from __future__ import annotations

import string
from typing import Any

COMMON = " \n" + string.ascii_letters + string.digits + ".,;:!?'\"-()"
MERGE_TEXT = "Ġ t|h e|Ġ a|i n|r e|o n|Ġt he|e r|Ġ s|a t|Ġ o|e n|i s|Ġ w|o u|i t|Ġ b|in g|Ġa n|Ġan d"
MERGES = MERGE_TEXT.split("|")


def make_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json: 75 common characters first, then 20 merges, from 278 tokens on every byte."""
    tokens, merges = make_bpe(vocab_size)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in range(2)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": model,
    }


def make_bpe(vocab_size: int) -> tuple[list[str], list[str]]:
    """At most vocab_size tokens of a byte-level BPE, <s> and </s> first, and the merges among them."""
    symbols = _byte_symbols()
    common = [symbols[byte] for byte in COMMON.encode()]
    tokens = ["<s>", "</s>", *common, *(merge.replace(" ", "") for merge in MERGES)]
    tokens = (tokens + [symbol for symbol in symbols if symbol not in common])[:vocab_size]
    known = set(tokens)
    return tokens, [merge for merge in MERGES if {*merge.split(" "), merge.replace(" ", "")} <= known]


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte: itself where it has one, else the next from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def make_spm(vocab_size: int) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and token types: <unk> <s> </s>, every byte, then pieces; 260 tokens at least, ids without a
    piece are filled with unused ones."""
    if vocab_size < 260:
        raise ValueError("a vocabulary with byte tokens needs 260 tokens at least")
    letters = ["▁", *(character for character in COMMON if character not in " \n")]
    merged = [merge.replace(" ", "").replace("Ġ", "▁") for merge in MERGES]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    tokens += [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    normal, unknown, control, unused, byte = 1, 2, 3, 5, 6
    kinds = [unknown, control, control] + [byte] * 256 + [normal] * (len(merged) + len(letters))
    kinds += [unused] * (vocab_size - len(kinds))
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]  # earlier merges win, single letters come last
    return tokens[:vocab_size], scores[:vocab_size], kinds[:vocab_size]
