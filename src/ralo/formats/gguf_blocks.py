"""GGUF tensor types, and tensors stored as quantised blocks: dequantised row by row as they are asked for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ralo.formats.mapped import MappedFile
from ralo.formats.tensor import F32


class BlockType(NamedTuple):
    name: str
    block: int  # values in a block
    nbytes: int  # bytes of a block


TYPES = {  # what ralo reads, by the type's number in the file
    0: BlockType("f32", 1, 4),
    1: BlockType("f16", 1, 2),
    2: BlockType("q4_0", 32, 18),
    3: BlockType("q4_1", 32, 20),
    6: BlockType("q5_0", 32, 22),
    7: BlockType("q5_1", 32, 24),
    8: BlockType("q8_0", 32, 34),
    10: BlockType("q2_k", 256, 84),
    11: BlockType("q3_k", 256, 110),
    12: BlockType("q4_k", 256, 144),
    13: BlockType("q5_k", 256, 176),
    14: BlockType("q6_k", 256, 210),
    30: BlockType("bf16", 1, 2),
}
TYPE_NAMES = {  # what other GGUF files hold, so that a refusal can say it in words
    9: "q8_1",
    15: "q8_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    24: "i8",
    25: "i16",
    26: "i32",
    27: "i64",
    28: "f64",
    29: "iq1_m",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
    40: "nvfp4",
}


class BlockTensor:
    """A quantised tensor inside a mapped file. Its bounds were checked by who made it."""

    def __init__(
        self, file: MappedFile, name: str, dtype: str, shape: tuple[int, ...], start: int, nbytes: int
    ) -> None:
        self.file, self.start, self.nbytes = file, start, nbytes
        self.name, self.dtype, self.shape = name, dtype, shape

    def rows(self, start: int, stop: int) -> F32:
        from gguf.constants import GGMLQuantizationType  # imported here: only quantised files need the package
        from gguf.quants import dequantize

        if start == stop:  # which the package cannot dequantise
            return np.empty((0, *self.shape[1:]), np.float32)
        blocks = np.frombuffer(self.file.data, np.uint8, self.nbytes, self.start)
        blocks = blocks.reshape(self.shape[0], -1)[start:stop]  # (rows, bytes of a row)
        with np.errstate(all="ignore"):  # a damaged scale gives inf or nan, and who reads the weights sees that
            values: F32 = dequantize(blocks, GGMLQuantizationType[self.dtype.upper()])
        return values.reshape(-1, *self.shape[1:])

    def stored(self) -> None:
        return None

    def release(self) -> None:
        self.file.release(self.start, self.start + self.nbytes)
