"""ralo's own directory: packed weights that are memory-mapped as they are, ready to run.

`weights.safetensors` holds the arrays, `ralo.json` the checkpoint's config and how it was packed, and the tokenizer's
files lie beside them. The config is read by the same code as the checkpoint's own, so its checks are the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ralo import _core, arch
from ralo.arch.slots import layer_shapes, top_shapes
from ralo.config import Fields, ModelConfig, short
from ralo.errors import FormatError, RaloError
from ralo.formats import safetensors
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.mapped import StoredTensor, read_small
from ralo.formats.strict_json import parse_object
from ralo.matrix import QUANTS, Matrix, padded
from ralo.mix.about import AboutMix
from ralo.proc.about import AboutProc
from ralo.remake.about import About
from ralo.tt.about import AboutTT
from ralo.weights import FUSED, HEAD_QUANT, Embedding, LayerWeights, Norm, Weights

if TYPE_CHECKING:
    from ralo.tokenizer import Tokenizer

FORMAT = 1  # raised when the layout changes; other numbers are refused
MADE: dict[int, type[About]] = {
    2: AboutProc,
    3: AboutTT,
    4: AboutMix,
}  # formats of packs with weights that were made for them
A = TypeVar("A", bound=About)
INFO, WEIGHTS = "ralo.json", "weights.safetensors"
LONGEST_INFO = 4_000_000  # bytes
PLAIN = (".at", ".blocks")  # arrays of whole numbers of 16 bits


def is_packed(path: Path) -> bool:
    return os.path.exists(path / INFO)


def unfinished(to: Path) -> Path:
    """Where a directory is written before it gets its name; an error if either is taken."""
    if os.path.lexists(to):
        raise RaloError(f"{to}: already there; choose another directory or remove it")
    partial = to.with_name(to.name + ".partial")
    if os.path.lexists(partial):
        raise RaloError(f"{partial}: already there; if no other pack is writing it, remove it")
    return partial


def save(ckpt: Checkpoint, weights: Weights, to: Path, made: About | None = None) -> None:
    """Write a packed directory; it appears under its name only when it is complete."""
    partial = unfinished(to)
    parents = [folder for folder in partial.parents if not os.path.lexists(folder)]  # to be made, innermost first
    try:
        partial.mkdir(parents=True)
        arrays, bf16 = _arrays(weights)
        safetensors.write_file(partial / WEIGHTS, arrays, bf16=bf16)
        info: dict[str, Any] = {"format": FORMAT, "quant": weights.quant, "tensors": len(arrays)}
        if made is not None:
            version = next(number for number, about in MADE.items() if isinstance(made, about))
            info |= {"format": version, made.kind: made.to_dict()}
        info["config"] = dict(ckpt.config)
        (partial / INFO).write_text(json.dumps(info, indent=1))
        ckpt.tokenizer().save(partial)
        partial.rename(to)
    except OSError as error:
        raise RaloError(f"{to}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in parents:
            with contextlib.suppress(OSError):  # after success they are not empty, and stay
                folder.rmdir()


def _arrays(weights: Weights) -> tuple[dict[str, NDArray[Any]], set[str]]:
    """Every array by name, and the names of those that hold bf16 bits."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, matrix in weights.matrices().items():
        arrays |= {f"{name}.{part}": array for part, array in matrix.arrays().items()}
    arrays |= weights.norms()
    arrays["embed"] = weights.embed.table
    if weights.positions is not None:
        arrays["positions"] = weights.positions
    return arrays, {name for name, array in arrays.items() if array.dtype == np.uint16 and not name.endswith(PLAIN)}


def open_directory(path: Path, quant: str) -> tuple[ModelConfig, Weights, Callable[[], Tokenizer]]:
    """Memory-map a packed directory; `quant` must be auto or what it was packed with."""
    info = Fields(parse_object(read_small(path / INFO, LONGEST_INFO), path / INFO), path / INFO)
    if (version := info.int("format", 0, 1 << 30)) not in (FORMAT, *MADE):
        newer = "take a newer ralo, or " if version > max(MADE) else ""
        known = " and ".join(", ".join(map(str, (FORMAT, *MADE))).rsplit(", ", 1))
        raise info.fail(f"is of pack format {version}, this ralo reads {known}; {newer}pack the model again")
    packed_quant = info.one_of("quant", {q: q for q in QUANTS})
    if quant not in ("auto", packed_quant):
        raise RaloError(f"{path}: is packed at {packed_quant}; load the original to run it at {quant}")
    config = info.sub("config")
    if config is None:
        raise info.fail("'config' is missing")

    def tokenizer() -> Tokenizer:
        from ralo.tokenizer import from_directory

        return from_directory(path)

    tensors = safetensors.open_file(path / WEIGHTS)
    ckpt = Checkpoint(path, config.values, tensors, tokenizer, path / INFO)
    cfg = arch.find(ckpt).config(Fields(config.values, path / INFO))
    made = MADE[version].read(info) if version in MADE else None
    weights = _Reader(path / WEIGHTS, tensors, cfg, packed_quant, made).weights()
    if len(tensors) != (packed := info.int("tensors", 1, 1 << 30)):  # a bias that is gone would not be missed otherwise
        reason = f"has {len(tensors)} tensors, {packed} were packed; the pack is incomplete: pack the model again"
        raise FormatError(path / WEIGHTS, reason)
    return cfg, weights, tokenizer


def about(path: Path, kind: type[A]) -> A:
    """What a pack says of weights of one kind."""
    make = f"with ralo pack --{kind.switch}=on"
    if not is_packed(path):
        raise RaloError(f"{path}: is not a pack; make one {make}")
    info = Fields(parse_object(read_small(path / INFO, LONGEST_INFO), path / INFO), path / INFO)
    if info.values.get(kind.kind) is None:
        raise RaloError(f"{path}: has no {kind.words}; make some {make}")
    return kind.read(info)


def reopened(path: Path) -> tuple[Checkpoint, About | None]:
    """What a pack can be written again with, other weights given: its config and tokenizer, and what it says of weights
    that were made for it."""
    if not is_packed(path):
        raise RaloError(f"{path}: is not a pack; make one with ralo pack")
    info = Fields(parse_object(read_small(path / INFO, LONGEST_INFO), path / INFO), path / INFO)
    kind = MADE.get(info.int("format", 0, 1 << 30))

    def tokenizer() -> Tokenizer:
        from ralo.tokenizer import from_directory

        return from_directory(path)

    config = info.sub("config")
    ckpt = Checkpoint(path, config.values if config else {}, {}, tokenizer, path / INFO)
    return ckpt, kind.read(info) if kind else None


class _Reader:
    """Puts the mapped arrays back together, each checked against the shape that the config promises."""

    def __init__(
        self, path: Path, tensors: Mapping[str, StoredTensor], cfg: ModelConfig, quant: str, made: About | None
    ) -> None:
        self.path, self.tensors, self.cfg, self.quant, self.made = path, tensors, cfg, quant, made

    def weights(self) -> Weights:
        top = top_shapes(self.cfg)
        return Weights(
            quant=self.quant,
            embed=Embedding(self.array("embed", top["embed"], ("f32", "f16", "bf16"))),
            positions=self.array("positions", top["positions"], ("f32",)) if self.cfg.position_rows else None,
            layers=tuple(self.layer(i) for i in range(self.cfg.n_layers)),
            final_norm=self.norm("final_norm", top["final_norm"]),
            head=self.matrix("head", HEAD_QUANT[self.quant], {"head": top["head"]}),
        )

    def layer(self, i: int) -> LayerWeights:
        at, shapes = f"layers.{i}.", layer_shapes(self.cfg)

        def matrix(name: str) -> Matrix:
            sites = [s for s in FUSED[name] if s != "gate" or self.cfg.gated]
            return self.matrix(at + name, self.quant, {s: shapes[s] for s in sites})

        def head_norm(name: str) -> Norm | None:
            return self.norm(at + name, shapes[name]) if at + name in self.tensors else None

        return LayerWeights(
            attn_norm=self.norm(f"{at}attn_norm", shapes["attn_norm"]),
            qkv=matrix("qkv"),
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            o=matrix("o"),
            mlp_norm=self.norm(f"{at}mlp_norm", shapes["mlp_norm"]),
            up=matrix("up"),
            down=matrix("down"),
        )

    def norm(self, name: str, shape: tuple[int, ...]) -> Norm:
        bias = self.array(f"{name}_bias", shape, ("f32",)) if f"{name}_bias" in self.tensors else None
        return Norm(self.array(name, shape, ("f32",)), bias)

    def matrix(self, name: str, quant: str, sites: Mapping[str, tuple[int, ...]]) -> Matrix:
        parts, ic = {s: shape[0] for s, shape in sites.items()}, next(iter(sites.values()))[1]
        oc = sum(padded(n) for n in parts.values())
        bias = self.array(f"{name}.bias", (oc,), ("f32",)) if f"{name}.bias" in self.tensors else None
        if self.made and name in self.made.matrices:
            return self.made.matrix(self.path, name, ic, parts, bias, self.stored)
        groups = _core.groups(quant, oc)
        return Matrix(
            quant,
            ic,
            parts,
            data=self.array(f"{name}.data", (ic, _core.row_bytes(quant, oc)), ("u8",)),
            scales=self.array(f"{name}.scales", (ic, groups), ("bf16",)) if groups else None,
            bias=bias,
        )

    def array(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> NDArray[Any]:
        tensor = self.tensor(name)
        if tensor.shape != shape or tensor.dtype not in dtypes:
            have = f"{tensor.dtype} {short(tensor.shape)}"
            raise FormatError(self.path, f"is {have}, the config asks for {' or '.join(dtypes)} {shape}", name)
        return self.stored(name)

    def tensor(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise FormatError(self.path, "missing; the pack is incomplete: pack the model again", name)
        return self.tensors[name]

    def stored(self, name: str) -> NDArray[Any]:
        """An array of whatever shape it is."""
        stored = self.tensor(name).stored()
        if stored is None:
            raise FormatError(self.path, "does not lie at an aligned place; pack the model again", name)
        return stored
