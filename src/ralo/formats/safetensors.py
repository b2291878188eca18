"""Safetensors files: a strict reader of memory-mapped tensors, and a writer that aligns them for the kernels."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo.errors import FormatError, RaloError
from ralo.formats.mapped import VIEWS, MappedFile, StoredTensor
from ralo.formats.strict_json import parse_object

LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
LONGEST_NAME = 256
MOST_DIMS = 8
ALIGNMENT = 64  # one cache line, one AVX-512 vector

ITEM_BYTES = {name.upper(): view.itemsize for name, view in VIEWS.items()}
ITEM_BYTES |= {"F8_E5M2": 1, "F8_E4M3": 1, "C64": 8}  # listed only: numpy has no F8, weights are not complex
NAMES = {view: name.upper() for name, view in VIEWS.items() if name != "bf16"}


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the file, in the file's order, all over one memory map."""
    file = MappedFile(path)
    header, data_start = _header(file)
    header.pop("__metadata__", None)
    tensors = [_tensor(file, name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    _check_layout(file, tensors, data_start)
    return {tensor.name: tensor for tensor in tensors}


def metadata(path: Path) -> dict[str, str]:
    """The free text pairs that the writer of the file left in its header."""
    header, _ = _header(MappedFile(path))
    return header.get("__metadata__") or {}


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The parsed header, and where the tensor data starts."""
    if file.size < 8:
        raise FormatError(file.path, f"is not a safetensors file: it is {file.size} bytes long, its header needs 8")
    length = int.from_bytes(file.data[:8], "little")
    if length > LONGEST_HEADER:
        raise FormatError(file.path, f"is not a safetensors file: it claims a header of {length} bytes")
    if 8 + length > file.size:
        raise FormatError(file.path, f"is truncated: {8 + length - file.size} bytes of its header are missing")
    header = parse_object(bytes(file.data[8 : 8 + length]), file.path, "the header")
    notes = header.get("__metadata__")
    if notes is not None and not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise FormatError(file.path, "the header's __metadata__ is not a map from text to text")
    return header, 8 + length


def _tensor(file: MappedFile, name: str, entry: Any, data_start: int) -> StoredTensor:
    """One entry of the header as a tensor; where it lies is checked afterwards, for all of them together."""
    if len(name) > LONGEST_NAME:
        raise FormatError(file.path, f"a name in the header is {len(name)} characters long", name[:80])
    if not isinstance(entry, dict):
        raise FormatError(file.path, "its header entry is not a JSON object", name)
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise FormatError(file.path, f"has unknown dtype {dtype!r:.40}", name)
    if not isinstance(shape, list) or len(shape) > MOST_DIMS or not all(_is_size(size) for size in shape):
        raise FormatError(file.path, f"its shape is not a list of at most {MOST_DIMS} sizes", name)
    if not isinstance(span, list) or len(span) != 2 or not all(_is_size(offset) for offset in span):
        raise FormatError(file.path, "its data_offsets are not two byte positions", name)
    # Zeros are left out of the product because numpy, too, refuses (0, 2**62, 2**62).
    if math.prod(size or 1 for size in shape) * ITEM_BYTES[dtype] >= 2**63:
        raise FormatError(file.path, "its shape is larger than any file", name)
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if span[1] - span[0] != nbytes:
        reason = f"its data_offsets span {span[1] - span[0]} bytes, its shape {tuple(shape)} in {dtype} needs {nbytes}"
        raise FormatError(file.path, reason, name)
    return StoredTensor(file, name, dtype.lower(), tuple(shape), data_start + span[0], nbytes)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63  # type() and not isinstance(): True is no size


def _check_layout(file: MappedFile, tensors: list[StoredTensor], data_start: int) -> None:
    """The tensors, sorted by position, fill the file from the end of the header to its end with no gap or overlap."""
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            reason = "overlaps another tensor" if tensor.start < position else "has unused bytes before it"
            raise FormatError(file.path, reason, tensor.name)
        position += tensor.nbytes
        if position > file.size:
            end = max(other.start + other.nbytes for other in tensors)
            raise FormatError(file.path, f"is cut off: the file lacks {end - file.size} bytes", tensor.name)
    if position < file.size:
        raise FormatError(file.path, f"has {file.size - position} bytes after its last tensor")


def write_file(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    bf16: Collection[str] = (),
) -> None:
    """Write the arrays, one at a time; bf16 names those whose uint16 values are bfloat16 bits.

    Each tensor whose bytes are a multiple of 64 starts at a multiple of 64. The format allows no gaps, so these come
    first; the others (in practice few and small) follow by falling item size, which aligns each for its dtype. The
    order is otherwise kept. The file appears under its name only when it is complete.
    """
    names = sorted(arrays, key=lambda name: _place(arrays[name]))
    header = _header_text({name: arrays[name] for name in names}, metadata, bf16)
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name in names:
                file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
        os.replace(partial, path)
    except OSError as error:
        raise RaloError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _place(array: NDArray[Any]) -> tuple[bool, int]:
    odd = array.nbytes % ALIGNMENT != 0
    return odd, -array.itemsize if odd else 0


def _header_text(
    arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None, bf16: Collection[str]
) -> bytes:
    """The header's JSON, padded with spaces so that the data after it starts at a multiple of 64."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, array in arrays.items():
        if name in bf16 and array.dtype != np.uint16:
            raise ValueError(f"{name}: bfloat16 bits come as uint16, not {array.dtype}")
        dtype = "BF16" if name in bf16 else NAMES[array.dtype]
        stop = position + array.nbytes
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-(8 + len(text)) % ALIGNMENT)
