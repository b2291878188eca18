"""GGUF files: a bounded parser of the header, and the tensors in it under their Hugging Face names."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ralo.errors import FormatError
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.gguf_blocks import TYPE_NAMES, TYPES, BlockTensor
from ralo.formats.gguf_config import hf_config
from ralo.formats.gguf_names import hf_tensors
from ralo.formats.mapped import MappedFile, StoredTensor
from ralo.formats.tensor import Tensor

if TYPE_CHECKING:
    from ralo.tokenizer import Tokenizer

MOST_DIMS = 4
LONGEST_KEY, LONGEST_NAME = 1024, 128  # bytes; the format itself stops at 65535 and 64
LARGEST_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

SCALARS: dict[int, np.dtype[Any]] = {  # value types of fixed size, by their number in the file
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
STRING, ARRAY = 8, 9
U64 = struct.Struct("<Q")


class Entry(NamedTuple):
    """One tensor as the header announces it."""

    name: str
    shape: tuple[int, ...]  # outermost axis first; the file has it reversed
    dtype: str
    offset: int  # from the start of the data
    nbytes: int


def read_metadata(path: Path) -> dict[str, Any]:
    """The header's key-value pairs: numbers, text, numpy arrays of numbers and lists of text."""
    cursor = Cursor(MappedFile(path))
    _, pairs = _counts(cursor)
    return _pairs(cursor, pairs)


def open_file(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file, with config keys and tensor names as Hugging Face has them."""
    file = MappedFile(path)
    cursor = Cursor(file)
    tensor_count, pair_count = _counts(cursor)
    metadata = _pairs(cursor, pair_count)
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise FormatError(path, f"is one part of {parts}; join them with 'llama-gguf-split --merge'")
    if tensor_count == 0:
        raise FormatError(path, "has no tensors, only a vocabulary or settings")
    stored = _tensors(file, _entries(cursor, tensor_count), _data_start(cursor, metadata))
    config = hf_config(path, metadata, stored)

    def tokenizer() -> Tokenizer:
        from ralo.tokenizer import from_gguf

        return from_gguf(metadata, path)

    return Checkpoint(path, config, hf_tensors(path, config, stored), tokenizer, path)


class Cursor:
    """A position in the file that moves over what is read and never past the end."""

    def __init__(self, file: MappedFile) -> None:
        self.path, self.data, self.position = file.path, file.data, 0

    @property
    def remaining(self) -> int:
        return len(self.data) - self.position

    def take(self, count: int, what: str) -> memoryview:
        """The next count bytes."""
        if count > self.remaining:
            raise FormatError(self.path, f"ends inside {what}: {count - self.remaining} bytes are missing")
        self.position += count
        return self.data[self.position - count : self.position]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def text(self, what: str) -> str:
        return str(self.take(self.u64(what), what), "utf-8", "replace")

    def name(self, what: str, longest: int) -> str:
        """A key or a tensor's name: text that has no reason to be long."""
        length = self.u64(what)
        if length > longest:
            raise FormatError(self.path, f"{what} is {length} bytes long; at most {longest} were expected")
        return str(self.take(length, what), "utf-8", "replace")

    def texts(self, count: int, what: str) -> list[str]:
        """An array of strings. Vocabularies have 10^5 of them, so this loop works on local names only."""
        self.at_least(count, 8, what)
        data, position, size = self.data, self.position, len(self.data)
        read_length = U64.unpack_from
        found = []
        for _ in range(count):
            start = position + 8
            position = start + read_length(data, position)[0] if start <= size else start
            if position > size:
                raise FormatError(self.path, f"ends inside {what}: {position - size} bytes are missing")
            found.append(str(data[start:position], "utf-8", "replace"))
        self.position = position
        return found

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self.array(what)
        if kind not in SCALARS:
            raise FormatError(self.path, f"{what} has unknown value type {kind}")
        dtype = SCALARS[kind]
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def array(self, what: str) -> Any:
        kind, count = self.u32(what), self.u64(what)
        if kind == STRING:
            return self.texts(count, what)
        if kind == ARRAY:
            raise FormatError(self.path, f"{what} is an array of arrays, which ralo does not read")
        if kind not in SCALARS:
            raise FormatError(self.path, f"{what} is an array of unknown value type {kind}")
        dtype = SCALARS[kind]
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).copy()

    def at_least(self, count: int, nbytes: int, what: str) -> None:
        """Refuse a count of things that the rest of the file cannot hold, before anything is made for them."""
        if count * nbytes > self.remaining:
            reason = f"claims {count} entries in {what}; the {self.remaining} bytes that remain cannot hold them"
            raise FormatError(self.path, reason)


def _counts(cursor: Cursor) -> tuple[int, int]:
    """How many tensors and how many key-value pairs the file announces."""
    if bytes(cursor.data[:4]) != b"GGUF":
        raise FormatError(cursor.path, "is not a GGUF file")
    cursor.take(4, "the magic number")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise FormatError(cursor.path, "is a big-endian GGUF file; convert it with 'gguf-convert-endian'")
    if version not in (2, 3):
        raise FormatError(cursor.path, f"has GGUF version {version}; ralo reads 2 and 3")
    tensors, pairs = cursor.u64("the number of tensors"), cursor.u64("the number of keys")
    cursor.at_least(pairs, 8 + 4 + 1, "its metadata")  # name length, value type, the smallest value
    cursor.at_least(tensors, 8 + 4 + 8 + 4 + 8, "its list of tensors")  # name length, axes, one size, type, offset
    return tensors, pairs


def _pairs(cursor: Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.name("the name of a key", LONGEST_KEY)
        if key in found:
            raise FormatError(cursor.path, f"key {key!r:.80} appears twice")
        found[key] = cursor.value(cursor.u32(f"key {key!r:.80}"), f"key {key!r:.80}")
    return found


def _entries(cursor: Cursor, count: int) -> list[Entry]:
    found: dict[str, Entry] = {}
    for _ in range(count):
        entry = _entry(cursor)
        if entry.name in found:
            raise FormatError(cursor.path, "is listed twice", entry.name)
        found[entry.name] = entry
    return list(found.values())


def _entry(cursor: Cursor) -> Entry:
    name = cursor.name("the name of a tensor", LONGEST_NAME)
    what = f"the description of tensor {name!r:.80}"
    axes = cursor.u32(what)
    if not 1 <= axes <= MOST_DIMS:
        raise FormatError(cursor.path, f"has {axes} axes; from 1 to {MOST_DIMS} were expected", name)
    shape = tuple(cursor.u64(what) for _ in range(axes))[::-1]
    number, offset = cursor.u32(what), cursor.u64(what)
    if number not in TYPES:
        known = TYPE_NAMES.get(number, "unknown")
        supported = ", ".join(kind.name for kind in TYPES.values())
        raise FormatError(cursor.path, f"has type {number} ({known}); ralo reads {supported}", name)
    kind = TYPES[number]
    if min(shape) < 1 or math.prod(shape) >= 2**60:
        raise FormatError(cursor.path, "has a shape that no file can hold", name)
    if kind.block > 1 and axes == 1:
        raise FormatError(cursor.path, f"is a vector in {kind.name}; ralo reads quantised matrices only", name)
    if shape[-1] % kind.block:
        raise FormatError(cursor.path, f"has rows of {shape[-1]} values; {kind.name} blocks hold {kind.block}", name)
    return Entry(name, shape, kind.name, offset, math.prod(shape) // kind.block * kind.nbytes)


def _data_start(cursor: Cursor, metadata: dict[str, Any]) -> int:
    """Where tensor data begins: the end of the header, rounded up to the file's alignment."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise FormatError(cursor.path, f"general.alignment is {alignment!r:.40}, not a power of two up to 1048576")
    return cursor.position + -cursor.position % alignment


def _tensors(file: MappedFile, entries: list[Entry], data_start: int) -> dict[str, Tensor]:
    """The announced tensors over the file's bytes, once all of them are known to lie inside it."""
    last = max(entries, key=lambda entry: entry.offset + entry.nbytes)
    missing = data_start + last.offset + last.nbytes - file.size
    if missing > 0:
        raise FormatError(file.path, f"lies past the end of the file: {missing} bytes are missing", last.name)
    found: dict[str, Tensor] = {}
    for name, shape, dtype, offset, nbytes in entries:
        if dtype in ("f32", "f16", "bf16"):
            found[name] = StoredTensor(file, name, dtype, shape, data_start + offset, nbytes)
        else:
            found[name] = BlockTensor(file, name, dtype, shape, data_start + offset, nbytes)
    return found
