"""A long text as tokens, piece by piece: the tokenizer holds many times what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ralo.tokenizer import Tokenizer

PIECE = 1 << 20  # characters, and on to the end of the line


def tokens_of(tokenizer: Tokenizer, text: str, most: int = 0) -> NDArray[np.uint32]:
    """The text's first `most` tokens, or all of them where it is 0."""
    found: list[NDArray[np.uint32]] = []
    start = count = 0
    while start < len(text) and (not most or count < most):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        found.append(np.array(tokenizer.encode(text[start:end], special=start == 0), np.uint32))
        count += len(found[-1])
        start = end
    whole = np.concatenate(found) if found else np.zeros(0, np.uint32)
    return whole[:most] if most else whole
