"""All weights of a model in their packed form, made from a checkpoint without ever holding it twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ralo import arch
from ralo.arch.slots import check, layer_shapes, top_shapes
from ralo.config import Fields, ModelConfig
from ralo.errors import FormatError, RaloError
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor, read
from ralo.matrix import Matrix
from ralo.memory import Arena
from ralo.neurons import Order, reorder

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
Progress = Callable[[float], None]  # share done, 0 to 1

# Sites that share their input are one matrix: longer rows, fewer passes.
FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "up": ("gate", "up"), "down": ("down",), "head": ("head",)}

# Those of a layer, by what shares an input: the places where a mode can stand in front of a map.
PLACES = {place: sites for place, sites in FUSED.items() if place != "head"}

# The head decides the scores directly: at int4 it alone costs +1.1 % perplexity on base, at int8 nothing.
HEAD_QUANT = {"f32": "f32", "bf16": "bf16", "int8": "int8", "int4": "int8"}


@dataclass(frozen=True)
class Norm:
    weight: F32  # (D)
    bias: F32 | None = None


@dataclass(frozen=True)
class LayerWeights:
    attn_norm: Norm
    qkv: Matrix
    q_norm: Norm | None
    k_norm: Norm | None
    o: Matrix
    mlp_norm: Norm
    up: Matrix  # parts gate and up where the MLP is gated
    down: Matrix

    def using(self, others: Mapping[str, Matrix]) -> LayerWeights:
        """The same with other matrices at some places."""
        matrices = {place: others.get(place, getattr(self, place)) for place in PLACES}
        return LayerWeights(
            self.attn_norm, matrices["qkv"], self.q_norm, self.k_norm, matrices["o"], self.mlp_norm, matrices["up"],
            matrices["down"],
        )  # fmt: skip


@dataclass(frozen=True)
class Embedding:
    """Rows of the embedding as the checkpoint holds them (bf16 as uint16), memory-mapped: only rows in use are read."""

    table: NDArray[np.generic]  # (V, D)

    def rows(self, tokens: Sequence[int]) -> F32:
        """Of some tokens (T, D)."""
        rows = self.table[np.asarray(tokens, np.int64)]
        wide = (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows
        return np.ascontiguousarray(wide, np.float32)

    def words(self) -> tuple[U16, str]:
        """As 16-bit words, and what they are: f32 (two of them), f16 or bf16."""
        kinds = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16", np.dtype(np.uint16): "bf16"}
        return self.table.view(np.uint16), kinds[self.table.dtype]


@dataclass(frozen=True)
class Weights:
    quant: str
    embed: Embedding
    positions: F32 | None  # (position rows, D)
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Matrix

    def matrices(self) -> dict[str, Matrix]:
        named = {f"layers.{i}.{s}": getattr(w, s) for i, w in enumerate(self.layers) for s in PLACES}
        return named | {"head": self.head}

    def norms(self) -> dict[str, F32]:
        """Arrays of all norms, by name."""
        named: dict[str, Norm | None] = {"final_norm": self.final_norm}
        for i, layer in enumerate(self.layers):
            named |= {f"layers.{i}.{n}": getattr(layer, n) for n in ("attn_norm", "mlp_norm", "q_norm", "k_norm")}
        there = {name: norm for name, norm in named.items() if norm is not None}
        biases = {f"{name}_bias": norm.bias for name, norm in there.items() if norm.bias is not None}
        return {name: norm.weight for name, norm in there.items()} | biases

    @property
    def nbytes(self) -> int:
        small = sum(a.nbytes for a in self.norms().values())
        small += 0 if self.positions is None else self.positions.nbytes
        return small + sum(m.nbytes for m in self.matrices().values()) + self.embed.table.nbytes


def build(
    ckpt: Checkpoint, quant: str, progress: Progress | None = None, orders: Mapping[int, Order] | None = None
) -> tuple[ModelConfig, Weights]:
    """Quantise a checkpoint into packed weights, tensor by tensor. `orders`: of the neurons of some layers."""
    family = arch.find(ckpt)
    cfg = family.config(Fields(ckpt.config, ckpt.config_path))
    if orders and (len(orders) != cfg.n_layers or any(len(order) != cfg.d_ff for order in orders.values())):
        raise RaloError("the order of neurons is of another model: its profile must be of this one (ralo calibrate)")
    packer = _Packer(ckpt, cfg, quant, progress)
    top = family.top(ckpt, cfg)
    check(ckpt, top, top_shapes(cfg))
    layers = []
    for i in range(cfg.n_layers):
        found = family.layer(ckpt, cfg, i)
        check(ckpt, found, layer_shapes(cfg))
        layers.append(packer.layer(reorder(found, orders[i]) if orders and i in orders else found))
    head = {"head": top.get("head", top["embed"])}
    return cfg, Weights(
        quant=quant,
        embed=Embedding(packer.table(top["embed"])),
        positions=packer.vector(top["positions"]) if "positions" in top else None,
        layers=tuple(layers),
        final_norm=packer.norm(top, "final_norm"),
        head=packer.matrix(head, FUSED["head"], HEAD_QUANT[quant]),
    )


class _Packer:
    def __init__(self, ckpt: Checkpoint, cfg: ModelConfig, quant: str, progress: Progress | None) -> None:
        self.ckpt, self.cfg, self.quant, self.progress = ckpt, cfg, quant, progress
        self.arena = Arena()
        self.done, self.all = 0, cfg.n_layers * 4 + 1

    def table(self, tensor: Tensor) -> NDArray[np.generic]:
        """The embedding as it lies in the file; what cannot be mapped (quantised, or misaligned) is copied."""
        plain = tensor.dtype in ("f32", "f16", "bf16")
        stored = tensor.stored() if plain else None
        if stored is not None:
            return stored
        table = np.empty(tensor.shape, np.float32 if plain else np.float16)
        for start in range(0, len(table), 1024):
            with np.errstate(over="ignore"):  # what float16 cannot hold becomes infinite, and is refused
                table[start : start + 1024] = tensor.rows(start, min(start + 1024, len(table)))
            if not np.isfinite(table[start : start + 1024]).all():
                raise self._not_finite(tensor)
        tensor.release()
        return table

    def norm(self, found: Mapping[str, Tensor], name: str) -> Norm:
        bias = found.get(f"{name}_bias")
        return Norm(self.vector(found[name]), None if bias is None else self.vector(bias))

    def vector(self, tensor: Tensor) -> F32:
        values = read(tensor)
        if not np.isfinite(values).all():
            raise self._not_finite(tensor)
        return values

    def matrix(self, found: Mapping[str, Tensor], sites: tuple[str, ...], quant: str | None = None) -> Matrix:
        sites = tuple(s for s in sites if s in found)
        parts = {s: found[s].shape[0] for s in sites}
        biased = any(f"{s}_bias" in found for s in sites)
        matrix = Matrix.empty(quant or self.quant, found[sites[0]].shape[1], parts, biased, self.arena)
        for site in sites:
            if not matrix.pack(site, found[site]):
                raise self._not_finite(found[site])
            if matrix.bias is not None and f"{site}_bias" in found:
                matrix.bias[matrix.slices[site]] = self.vector(found[f"{site}_bias"])
        self.done += 1
        if self.progress:
            self.progress(self.done / self.all)
        return matrix

    def layer(self, found: Mapping[str, Tensor]) -> LayerWeights:
        return LayerWeights(
            attn_norm=self.norm(found, "attn_norm"),
            qkv=self.matrix(found, FUSED["qkv"]),
            q_norm=self.norm(found, "q_norm") if "q_norm" in found else None,
            k_norm=self.norm(found, "k_norm") if "k_norm" in found else None,
            o=self.matrix(found, FUSED["o"]),
            mlp_norm=self.norm(found, "mlp_norm"),
            up=self.matrix(found, FUSED["up"]),
            down=self.matrix(found, FUSED["down"]),
        )

    def _not_finite(self, tensor: Tensor) -> FormatError:
        return FormatError(self.ckpt.path, "has values that are not finite (NaN or infinity)", tensor.name)
