"""GGUF files that are damaged, hostile or of a kind that ralo does not read: one clear line each, and no memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tiny import write_gguf

from ralo.errors import FormatError
from ralo.formats.gguf import open_file, read_metadata


def refusal(path: Path) -> str:
    """The line with which the file is refused."""
    with pytest.raises(FormatError) as caught:
        open_file(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and len(message) < 1000
    return message


def text(value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, axes: int | None = None) -> bytes:
    count = len(dims) if axes is None else axes
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def write_raw(
    path: Path,
    pairs: list[bytes],
    tensors: list[bytes],
    data: bytes = bytes(64),
    counts: tuple[int, int] | None = None,
    version: bytes = struct.pack("<I", 3),
) -> Path:
    """A file with any header, valid or not."""
    head = b"GGUF" + version + struct.pack("<QQ", *(counts or (len(tensors), len(pairs)))) + b"".join(pairs + tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


BAD_METADATA: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, "architecture 'mamba'; ralo reads GGUF files of llama, qwen2, qwen3, gpt2"),
    ({"general.architecture": 7}, "architecture 7"),
    ({"general.alignment": 48}, "general.alignment is 48"),
    ({"general.alignment": 0}, "general.alignment is 0"),
    ({"general.alignment": 1 << 21}, "general.alignment"),
    ({"general.alignment": "32"}, "general.alignment"),
    ({"split.count": 3}, "is one part of 3"),
    ({"llama.embedding_length": None}, "lacks the key llama.embedding_length"),
    ({"llama.embedding_length": 0}, "llama.embedding_length is 0"),
    ({"llama.embedding_length": True}, "llama.embedding_length is True"),
    ({"llama.embedding_length": [64, 64]}, "llama.embedding_length is an array"),
    ({"llama.block_count": 2.0}, "llama.block_count is 2.0"),
    ({"llama.block_count": "2"}, "llama.block_count is '2'"),
    ({"llama.block_count": 2**31}, "llama.block_count"),
    ({"llama.block_count": 1}, "tensor 'blk.1."),
    ({"llama.attention.head_count": 3}, "3 heads, not a multiple of its 2"),
    ({"llama.attention.head_count_kv": 4}, "tensor 'blk.0.attn_k.weight': has 32 rows, the metadata asks for 64"),
    ({"llama.attention.value_length": 32}, "keys of length 16 and values of length 32"),
    ({"llama.attention.key_length": 15, "llama.attention.value_length": 15}, "odd width 15"),
    ({"llama.rope.dimension_count": 8}, "rotates 8 of the 16"),
    ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is nan"),
    ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base is -1.0"),
    ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
    ({"llama.rope.scaling.type": ["yarn"]}, "llama.rope.scaling.type is an array"),
    ({"llama.rope.scaling.factor": float("inf")}, "llama.rope.scaling.factor is inf"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 0.5}, "attn_factor is 0.5"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": [1.0, 2.0]}, "is an array"),
    ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon is 0.0"),
    ({"llama.expert_count": 8}, "llama.expert_count is 8"),
    ({"llama.attention.scale": [0.5, 0.5]}, "llama.attention.scale is an array"),
    ({"tokenizer.ggml.bos_token_id": 323}, "bos_token_id is 323"),
    ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id is '2'"),
]


@pytest.mark.parametrize(("metadata", "reason"), BAD_METADATA)
def test_bad_metadata(tmp_path: Path, metadata: dict[str, Any], reason: str) -> None:
    assert reason in refusal(write_gguf(tmp_path / "a.gguf", "llama", metadata=metadata))


@pytest.mark.parametrize(
    ("factors", "reason"),
    [([1.0] * 7, "has shape (7,)"), ([1.0] * 7 + [0.0], "positive"), ([float("nan")] * 8, "positive")],
)
def test_bad_rope_factors(tmp_path: Path, factors: list[float], reason: str) -> None:
    scaling = {"rope_type": "factors", "factors": factors}
    message = refusal(write_gguf(tmp_path / "a.gguf", "llama", rope_scaling=scaling))
    assert "tensor 'rope_freqs.weight'" in message and reason in message


def test_factors_and_scaling_together(tmp_path: Path) -> None:
    scaling = {"rope_type": "factors", "factors": [1.0] * 8}
    linear = {"llama.rope.scaling.factor": 2.0}
    assert "has both" in refusal(write_gguf(tmp_path / "a.gguf", "llama", rope_scaling=scaling, metadata=linear))


ARCH = pair("general.architecture", 8, text("llama"))
LONG = 2**62
BAD_HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "big-endian": ({"version": struct.pack(">I", 3)}, "big-endian"),
    "old version": ({"version": struct.pack("<I", 1)}, "version 1; ralo reads 2 and 3"),
    "many keys": ({"counts": (1, LONG)}, f"claims {LONG} entries in its metadata"),
    "many tensors": ({"counts": (LONG, 1)}, f"claims {LONG} entries in its list of tensors"),
    "long key": ({"pairs": [struct.pack("<Q", LONG)]}, f"the name of a key is {LONG} bytes long"),
    "repeated key": ({"pairs": [ARCH, ARCH]}, "'general.architecture' appears twice"),
    "unknown value type": ({"pairs": [pair("k", 13, b"")]}, "key 'k' has unknown value type 13"),
    "long text": ({"pairs": [pair("k", 8, struct.pack("<Q", LONG))]}, "ends inside key 'k'"),
    "long array": ({"pairs": [pair("k", 9, struct.pack("<IQ", 4, LONG))]}, "ends inside key 'k'"),
    "many texts": ({"pairs": [pair("k", 9, struct.pack("<IQ", 8, LONG))]}, "entries in key 'k'"),
    "long text in array": ({"pairs": [pair("k", 9, struct.pack("<IQQ", 8, 2, LONG))]}, "ends inside key 'k'"),
    "texts past the end": (
        {"pairs": [pair("k", 9, struct.pack("<IQQ", 8, 3, 35))], "data": b""},
        "ends inside key 'k': 4 bytes are missing",
    ),
    "array of arrays": ({"pairs": [pair("k", 9, struct.pack("<IQ", 9, 1))]}, "array of arrays"),
    "array of unknown": ({"pairs": [pair("k", 9, struct.pack("<IQ", 77, 1))]}, "unknown value type 77"),
    "no axes": ({"tensors": [tensor("w", ())]}, "tensor 'w': has 0 axes"),
    "five axes": ({"tensors": [tensor("w", (1,) * 5)]}, "tensor 'w': has 5 axes"),
    "many axes": ({"tensors": [tensor("w", axes=2**32 - 1)]}, "tensor 'w': has 4294967295 axes"),
    "empty tensor": ({"tensors": [tensor("w", (4, 0))]}, "tensor 'w': has a shape that no file can hold"),
    "huge tensor": ({"tensors": [tensor("w", (LONG, LONG))]}, "tensor 'w': has a shape that no file can hold"),
    "product wraps": ({"tensors": [tensor("w", (2**32, 2**32))]}, "tensor 'w': has a shape that no file can hold"),
    "past the end": ({"tensors": [tensor("w", (32,))]}, "tensor 'w': lies past the end of the file: 64 bytes"),
    "far past the end": ({"tensors": [tensor("w", offset=2**64 - 32)]}, "tensor 'w': lies past the end of the file"),
    "listed twice": ({"tensors": [tensor("w"), tensor("w")]}, "tensor 'w': is listed twice"),
    "type not read": ({"tensors": [tensor("w", kind=16)]}, "tensor 'w': has type 16 (iq2_xxs); ralo reads f32, f16"),
    "unknown type": ({"tensors": [tensor("w", kind=99)]}, "tensor 'w': has type 99 (unknown)"),
    "odd rows": ({"tensors": [tensor("w", (33, 2), kind=8)]}, "tensor 'w': has rows of 33 values; q8_0 blocks hold 32"),
    "quantised vector": ({"tensors": [tensor("w", (32,), kind=8)]}, "tensor 'w': is a vector in q8_0"),
    "long tensor name": ({"tensors": [tensor("w" * 600)]}, "600 bytes long"),
    "no architecture": ({"pairs": []}, "architecture None"),
    "no embedding": ({}, "tensor 'token_embd.weight': missing"),
    "name with newline": ({"tensors": [tensor("a\nb", kind=99)]}, r"tensor 'a\nb'"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_header(tmp_path: Path, case: str) -> None:
    changes, reason = BAD_HEADERS[case]
    parts: dict[str, Any] = {"pairs": [ARCH], "tensors": [tensor("w")]} | changes
    path = write_raw(tmp_path / "a", **parts)
    tracemalloc.start()
    message = refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reason in message and peak < 1_000_000


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.00.ffn_up.weight", "blk.9.ffn_up.weight", "x"])
def test_tensor_that_has_no_place(tmp_path: Path, name: str) -> None:
    settings = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length")
    pairs = [ARCH, *(pair(f"llama.{key}", 4, struct.pack("<I", 2)) for key in settings)]
    pairs += [pair("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))]
    pairs += [pair("llama.attention.key_length", 4, struct.pack("<I", 2))]
    path = write_raw(tmp_path / "a", pairs, [tensor("token_embd.weight", (2, 2)), tensor(name)])
    assert f"tensor {name!r}: is not part of a llama model" in refusal(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole", "llama", num_hidden_layers=1).read_bytes()
    assert len(whole) > 100_000
    for size in [*range(0, 12_000, 97), *range(12_000, len(whole), 4999), len(whole) - 1]:
        (tmp_path / "a").write_bytes(whole[:size])
        message = refusal(tmp_path / "a")
        if size > 20_000:
            assert "bytes are missing" in message
    assert "attn" in message or "ffn" in message or "norm" in message or "output" in message


def test_not_a_gguf_file(tmp_path: Path) -> None:
    assert "is not a GGUF file" in refusal(Path(__file__))
    (tmp_path / "empty").write_bytes(b"")
    assert "is not a GGUF file" in refusal(tmp_path / "empty")
    assert "is a directory" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "absent")


def test_text_that_is_not_utf8_is_replaced(tmp_path: Path) -> None:
    texts = struct.pack("<IQ", 8, 2) + text(b"ok") + text(b"\xff\xfe")
    path = write_raw(tmp_path / "a", [pair("k", 8, text(b"a\xff")), pair("ks", 9, texts), pair("b", 7, b"\x02")], [])
    assert read_metadata(path) == {"k": "a\ufffd", "ks": ["ok", "\ufffd\ufffd"], "b": True}
