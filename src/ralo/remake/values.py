"""What stored weights are worth, in numpy alone: also where there are no kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]


def values(quant: str, data: NDArray[np.uint8], scales: NDArray[np.uint16] | None) -> F32:
    """What stored weights (ic, row bytes) are worth (ic, oc)."""
    if quant == "f32":
        return data.view(np.float32)
    if quant == "bf16":
        return bf16_values(data.view(np.uint16))
    assert scales is not None
    if quant == "int8":
        whole = data.astype(np.float32) - 128
    else:
        groups = data.reshape(len(data), -1, 16)
        whole = (np.concatenate([groups & 15, groups >> 4], axis=2).astype(np.float32) - 8).reshape(len(data), -1)
    steps = bf16_values(scales)
    return (whole.reshape(len(data), steps.shape[1], -1) * steps[..., None]).reshape(len(data), -1)


def bf16_values(words: U16) -> F32:
    return (words.astype(np.uint32) << 16).view(np.float32)


def bf16_words(values: F32) -> U16:
    """To nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
