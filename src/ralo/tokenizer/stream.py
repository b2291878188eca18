"""Text as it is generated: whole characters only, at a constant cost per token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ralo.tokenizer.text import Tokenizer

BROKEN = "\ufffd"  # what decoders write for bytes that are not, or not yet, a character
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
CONTEXT = 4  # tokens decoded again before the new ones, so that only a text's own start loses its leading space
MOST = 8  # tokens that the context may grow to before it is cut to so many again
PATIENCE = 8  # tokens; a character has at most 4 bytes, so a longer wait means bytes that are no text
WINDOW = 32  # tokens that may wait in all, where each one ends in the middle of a character


class Stream:
    """Feed one token at a time; the pieces joined are what `decode` makes of all the tokens at once.

    Each call decodes a short context and the tokens not yet shown, and returns what the latter add.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []  # tokens not yet shown in full
        self._context: list[int] = []  # tokens shown before them
        self._done = 0  # characters of decode(context + pending) already returned
        self._stalled = 0  # tokens fed since a character was last returned
        self._settle(list(after))

    def feed(self, token_id: int) -> str:
        """The text that this token completes, often but not always its own."""
        if self._tokenizer.piece(token_id) is None:
            return ""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._context + self._pending)
        whole = text.rstrip(BROKEN)
        if len(whole) == len(text) or self._stalled >= PATIENCE:
            new = text[self._done :]
            if len(self._pending) == 1 and len(self._context) < MOST and new and self._is_word(token_id):
                self._context.append(token_id)
                self._pending, self._done, self._stalled = [], len(text), 0
            else:
                self._settle(self._context + self._pending)
            return new
        new = whole[self._done :]
        self._done += len(new)
        self._stalled = 0 if new else self._stalled + 1
        if len(self._pending) > WINDOW:
            self._shorten()
        return new

    def flush(self) -> str:
        """The rest, incomplete characters as U+FFFD; the stream is then as new."""
        rest = self._tokenizer.decode(self._context + self._pending)[self._done :]
        self._settle([])
        return rest

    def _settle(self, shown: list[int]) -> None:
        words = list(islice(filter(self._is_word, reversed(shown)), CONTEXT))[::-1]
        self._context = words or shown[len(self._context) :]
        self._pending = []
        self._done = len(self._tokenizer.decode(self._context))
        self._stalled = 0

    def _is_word(self, token_id: int) -> bool:
        # Byte tokens make poor context: one bad byte after them would change how they decode.
        piece = self._tokenizer.piece(token_id)
        return piece is not None and not BYTE.fullmatch(piece)

    def _shorten(self) -> None:
        self._context = []
        self._pending = self._pending[-PATIENCE:]
        self._done = len(self._tokenizer.decode(self._pending).rstrip(BROKEN))
