"""Shapes without weights: `random:D=2048,L=16,F=8192,H=32,K=8,V=32000` is a Llama of that shape, to measure speed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ralo.errors import RaloError
from ralo.formats.checkpoint import Checkpoint

KEYS = {
    "D": 0,
    "L": 0,
    "F": 0,
    "H": 0,
    "K": 0,
    "V": 32000,
    "E": 0,
    "C": 131072,
}  # 0: must be given, or follows from others
MOST_LAYERS = 4096
POOL = 1 << 22  # values; tensors are windows into one pool, so that a billion weights cost no time to draw


@cache
def _pool() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(POOL, dtype=np.float32) * np.float32(0.02)


class RandomTensor:
    dtype = "random"

    def __init__(self, name: str, shape: tuple[int, ...], ones: bool) -> None:
        self.name, self.shape, self.ones = name, shape, ones

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        shape = (stop - start, *self.shape[1:])
        if self.ones:
            return np.ones(shape, np.float32)
        width = int(np.prod(self.shape[1:]))
        # Starts are spread by a large prime and by the tensor's name, so that no two rows are alike nearby.
        first = (np.arange(start, stop) * 1000003 + sum(self.name.encode()) * 7919) % (POOL - width)
        values: NDArray[np.float32] = _pool()[first[:, None] + np.arange(width)]
        return values.reshape(shape)

    def stored(self) -> None:
        return None

    def release(self) -> None:
        return None


def checkpoint(spec: str) -> Checkpoint:
    k = _parse(spec)
    d, layers, f, heads, kv, v, e = (k[key] for key in ("D", "L", "F", "H", "K", "V", "E"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{n}_proj.weight": (w * e, d) for n, w in (("q", heads), ("k", kv), ("v", kv))}
        shapes |= {f"{at}self_attn.o_proj.weight": (d, heads * e), f"{at}mlp.down_proj.weight": (d, f)}
        shapes |= {f"{at}mlp.{n}_proj.weight": (f, d) for n in ("gate", "up")}
        shapes |= {f"{at}{n}_layernorm.weight": (d,) for n in ("input", "post_attention")}
    config = {
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": e,
        "vocab_size": v,
        "max_position_embeddings": k["C"],
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    tensors = {name: RandomTensor(name, shape, ones=len(shape) == 1) for name, shape in shapes.items()}
    return Checkpoint(Path(spec), config, tensors, _no_tokenizer, Path(spec))


def _parse(spec: str) -> dict[str, int]:
    values = dict(KEYS)
    for item in spec.removeprefix("random:").split(","):
        key, _, number = item.partition("=")
        if key not in KEYS or not number.isascii() or not number.isdigit() or not 0 < int(number) <= 1 << 22:
            raise RaloError(f"{spec}: {item!r} is not one of {', '.join(KEYS)} with a whole number, as in D=2048")
        values[key] = int(number)
    values["K"] = values["K"] or values["H"]
    values["E"] = values["E"] or (values["D"] // values["H"] if values["H"] else 0)
    if missing := [key for key, value in values.items() if not value]:
        raise RaloError(f"{spec}: {', '.join(missing)} missing; as in random:D=2048,L=16,F=8192,H=32,K=8,V=32000")
    if values["L"] > MOST_LAYERS:
        raise RaloError(f"{spec}: L is at most {MOST_LAYERS}")
    if max(values["D"], values["F"], values["H"] * values["E"]) >= POOL:
        raise RaloError(f"{spec}: a width of {POOL} or more is not supported")
    return values


def _no_tokenizer() -> NoReturn:
    raise RaloError("a random model has no tokenizer: it is for `ralo bench` and `ralo explain`")
