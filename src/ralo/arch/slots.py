"""The slots every architecture fills: their names and shapes, and how a checkpoint's tensors are looked up for them."""

from __future__ import annotations

from collections.abc import Mapping

from ralo.config import ModelConfig
from ralo.errors import FormatError
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor

Shapes = dict[str, tuple[int, ...]]


def top_shapes(cfg: ModelConfig) -> Shapes:
    v, d = cfg.vocab, cfg.d_model
    return {
        "embed": (v, d),
        "positions": (cfg.position_rows, d),
        "head": (v, d),
        "final_norm": (d,),
        "final_norm_bias": (d,),
    }


def layer_shapes(cfg: ModelConfig) -> Shapes:
    d, f, q, kv, e = cfg.d_model, cfg.d_ff, cfg.q_width, cfg.kv_width, cfg.head_dim
    sites: Shapes = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q), "gate": (f, d), "up": (f, d), "down": (d, f)}
    biases: Shapes = {f"{site}_bias": (shape[0],) for site, shape in sites.items()}
    norms: Shapes = {f"{norm}{part}": (d,) for norm in ("attn_norm", "mlp_norm") for part in ("", "_bias")}
    return sites | biases | norms | {"q_norm": (e,), "k_norm": (e,)}


def lookup(ckpt: Checkpoint, names: Mapping[str, str], optional: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Slot -> tensor, for slot -> name in the checkpoint; a missing one is an error unless optional."""
    return {s: ckpt.find(name) for s, name in names.items() if s not in optional or name in ckpt.tensors}


def check(ckpt: Checkpoint, found: Mapping[str, Tensor], shapes: Shapes) -> None:
    for slot, tensor in found.items():
        if tensor.shape != shapes[slot]:
            reason = f"has shape {tensor.shape}, the config asks for {shapes[slot]}"
            raise FormatError(ckpt.path, reason, tensor.name)
