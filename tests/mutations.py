"""Damage for the fuzz test: the ways in which bytes, JSON, safetensors headers and GGUF metadata go wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

INTEGERS = (-1, 0, 1, 2, 3, 7, 64, 255, 4097, 2**24 + 1, 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63, 2**64 - 1, 10**30)
FLOATS = (-1.0, 0.0, 0.5, 1e-300, 1e30, 1e308, float("nan"), float("inf"))
TEXTS = ("", "x", "llama", "gelu", "yarn", "</s>", "\n\n", "é🦙", "../../etc/passwd", "F16", "{{ 1/0 }}", "a" * 3000)
NESTED = ([], {}, [[]], [1, 2], [None], {"content": "</s>"}, {"rope_type": "yarn", "factor": 2}, [[["x"] * 9] * 9])
ODD = (None, True, False, *INTEGERS, *FLOATS, *TEXTS, *NESTED)


def damage_bytes(data: bytes, rng: Random, other: bytes = b"") -> bytes:
    """Flipped bits, a run of one byte, a cut, a piece repeated, dropped, moved or taken from another file."""
    size = len(data)
    at = rng.randrange(min(size, rng.choice((16, 512, 8192, size))) or 1)  # headers come first: aim at them more often
    run = min(rng.choice((1, 2, 4, 8, 64, 1000)), size - at)
    kind = rng.randrange(7)
    if kind == 0:
        out = bytearray(data)
        for _ in range(rng.choice((1, 1, 3, 20))):
            place = rng.randrange(at, size)
            out[place] ^= 1 << rng.randrange(8)
        return bytes(out)
    if kind == 1:
        return data[:at] + bytes([rng.choice((0, 0xFF, 0x7F, 0x20, rng.randrange(256)))]) * run + data[at + run :]
    if kind == 2:
        return data[: rng.choice((at, size - run, size // 2))]
    if kind == 3:
        return data[:at] + data[at : at + run] * rng.choice((2, 3)) + data[at + run :]
    if kind == 4:
        return data[:at] + data[at + run :]
    if kind == 5:
        value = rng.choice(INTEGERS) % 2**64
        return data[:at] + struct.pack("<Q", value)[: rng.choice((4, 8))] + data[at + 8 :]
    source = other or data
    start = rng.randrange(len(source) or 1)
    return data[:at] + source[start : start + run] + data[at + (run if rng.random() < 0.5 else 0) :]


def damage_json(data: bytes, rng: Random) -> bytes:
    """One or a few values, keys or entries of a JSON file changed."""
    kind = rng.randrange(12)
    if kind == 0:  # wrong as text
        bad = (b"", b"null", b"[]", b"{", data + data, b"\xff\xfe" + data, b"[" * 100_000, data.replace(b":", b"", 1))
        return rng.choice(bad)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        damage_tree(value, rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if kind == 1 and "," in text:  # the same entry twice
        first, rest = text[1:].split(",", 1)
        text = text[0] + ",".join((first, first, rest))
    return text.encode("utf-8", "replace")


def damage_tree(value: Any, rng: Random) -> None:
    """Changes one place of a parsed JSON object, shallow places more often than deep ones."""
    spot = value
    while (inner := [v for v in _children(spot) if v and isinstance(v, dict | list)]) and rng.random() < 0.6:
        spot = rng.choice(inner)
    if not spot:
        return
    key = rng.choice(list(spot)) if isinstance(spot, dict) else rng.randrange(len(spot))
    kind = rng.randrange(8)
    if kind == 0:
        del spot[key]
    elif kind == 1 and isinstance(spot, dict):
        spot[key + rng.choice(("x", "", "_proj", "\n"))] = spot.pop(key)
    elif kind == 2 and isinstance(spot, list):
        spot.insert(key, spot[key])
    elif kind == 3:
        other = rng.choice(list(spot)) if isinstance(spot, dict) else rng.randrange(len(spot))
        spot[key], spot[other] = spot[other], spot[key]
    elif kind <= 5 and type(spot[key]) in (int, float):
        spot[key] = rng.choice((spot[key] + 1, spot[key] - 1, spot[key] * 2, -spot[key], str(spot[key]), spot[key] / 2))
    else:
        spot[key] = rng.choice(ODD)


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []


def damage_safetensors(data: bytes, rng: Random) -> bytes:
    """The header's entries changed, or its length, or the bytes as they are."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(8)
    if kind == 0:
        wrong = rng.choice((0, 1, length - 1, length + 1, length * 2, len(data), 10**8, 2**63, 2**64 - 1))
        return wrong.to_bytes(8, "little") + data[8:]
    if kind == 1:  # two tensors change places, or names
        entries = json.loads(header)
        first, second = rng.sample([name for name in entries if name != "__metadata__"], 2)
        entries[first], entries[second] = entries[second], entries[first]
        header = json.dumps(entries).encode()
    elif kind <= 4:
        header = damage_json(header, rng)
    else:
        return damage_bytes(data, rng)
    return len(header).to_bytes(8, "little") + header + body


def damage_metadata(keys: list[str], rng: Random) -> dict[str, Any]:
    """GGUF keys to leave out, or to write with another value of the same or of another type."""
    out: dict[str, Any] = {}
    for key in rng.sample(keys, rng.choice((1, 1, 2, 4))):
        numbers = [v % 2**32 if isinstance(v, int) else v for v in INTEGERS]
        lists = [[1, 2, 3], ["a", "b"], [0.5, float("nan")], ["</s>"] * 2, [2**31 - 1] * 400]
        out[key] = rng.choice((None, True, rng.choice(numbers), rng.choice(FLOATS), rng.choice(TEXTS), rng.choice(lists)))
    return out


BY_SUFFIX: dict[str, Callable[[bytes, Random], bytes]] = {
    ".json": damage_json,
    ".safetensors": damage_safetensors,
}
