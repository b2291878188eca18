"""A plain model in torch: the scores of every position of a batch of texts, through weights that can learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ralo.heal.linear import linear_map
from ralo.heal.plain import Array, PlainModel

ACTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Norm(nn.Module):
    """RMS or layer norm over the last axis."""

    def __init__(self, model: PlainModel, name: str) -> None:
        super().__init__()
        weight, bias = model.floats(name), model.floats(f"{name}_bias")
        assert weight is not None
        layer = model.norm == "layer"
        self.eps = model.eps
        self.register_buffer("weight", torch.tensor(weight))
        self.register_buffer("bias", torch.tensor(np.zeros_like(weight) if bias is None else bias) if layer else None)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()  # heads come as bf16 on a GPU
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, model: PlainModel, index: int, frozen: torch.dtype) -> None:
        super().__init__()
        at = f"layers.{index}"
        self.norm = Norm(model, f"{at}.attn_norm")
        self.qkv, self.o = linear_map(model, f"{at}.qkv", frozen), linear_map(model, f"{at}.o", frozen)
        self.q_norm = Norm(model, f"{at}.q_norm") if f"{at}.q_norm" in model.arrays else None
        self.k_norm = Norm(model, f"{at}.k_norm") if f"{at}.k_norm" in model.arrays else None
        self.heads = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
        self.width, self.window = model.head_dim, model.windows[index]

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        each = self.qkv(self.norm(x))
        q, k, v = (each[part].unflatten(-1, (n, self.width)) for part, n in self.heads.items())  # (B, T, heads, E)
        q, k = self.q_norm(q) if self.q_norm else q, self.k_norm(k) if self.k_norm else k
        if cos is not None and sin is not None:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        group = self.heads["q"] // self.heads["k"]
        k, v = (a.repeat_interleave(group, dim=2) if group > 1 else a for a in (k, v))
        q, k, v = (a.transpose(1, 2).to(v.dtype) for a in (q, k, v))
        looks_back = 0 < self.window < x.shape[1]
        mask = band(x.shape[1], self.window, x.device) if looks_back else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.o(y.transpose(1, 2).flatten(-2))["o"]


class Mlp(nn.Module):
    def __init__(self, model: PlainModel, index: int, frozen: torch.dtype) -> None:
        super().__init__()
        at = f"layers.{index}"
        self.norm = Norm(model, f"{at}.mlp_norm")
        self.up, self.down = linear_map(model, f"{at}.up", frozen), linear_map(model, f"{at}.down", frozen)
        self.act, self.gated = ACTS[model.act], model.gated

    def forward(self, x: Tensor) -> Tensor:
        each = self.up(self.norm(x))
        y = self.act(each["gate"]) * each["up"] if self.gated else self.act(each["up"])
        return x + self.down(y)["down"]


class Network(nn.Module):
    """`frozen`: in which type weights are held that do not learn. What learns is float32."""

    def __init__(self, model: PlainModel, frozen: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.vocab = model.vocab
        for name in ("embed", "positions", "cos", "sin"):
            values = model.floats(name)
            self.register_buffer(name, None if values is None else torch.tensor(values))
        layers = range(len(model.windows))
        self.attention = nn.ModuleList(Attention(model, i, frozen) for i in layers)
        self.mlp = nn.ModuleList(Mlp(model, i, frozen) for i in layers)
        self.norm = Norm(model, "final_norm")
        self.head = linear_map(model, "head", frozen)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T), which stand at positions 0 to T -> final hidden states (B, T, D)."""
        n = tokens.shape[1]
        x = F.embedding(tokens, self.embed)
        if self.positions is not None:
            x = x + self.positions[:n]
        cos, sin = (None, None) if self.cos is None else (self.cos[:n], self.sin[:n])
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = mlp(attention(x, cos, sin))
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, D) -> scores of the next token (…, V)."""
        return self.head(hidden)["head"]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens))

    def trained(self) -> dict[str, Tensor]:
        """What learns, by the name the plain model gives it."""
        maps = (m for m in self.modules() if hasattr(m, "trained_here"))
        return {name: tensor for m in maps for name, tensor in m.trained_here().items()}

    def trained_arrays(self) -> dict[str, Array]:
        return {name: tensor.detach().float().cpu().numpy() for name, tensor in self.trained().items()}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, T, heads, E) by angles (T, half): pairs are (i, i + half), what is beyond them stays."""
    half = cos.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def band(n: int, window: int, device: torch.device) -> Tensor:
    """Which keys each query sees: itself and what is before it, `window` in all."""
    at = torch.arange(n, device=device)
    back = at[:, None] - at[None, :]
    return (back >= 0) & (back < window)
