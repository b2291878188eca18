"""Llama 1 to 3.x and all that share its shape (TinyLlama, SmolLM2, ReLU variants by `hidden_act`)."""

from __future__ import annotations

from ralo.arch.slots import lookup
from ralo.config import Fields, ModelConfig
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor
from ralo.rope import read_rope

ACTS = {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "gelu": "gelu"}
ACTS |= {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}

LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
EXTRA = {f"{slot}_bias": LAYER[slot].replace(".weight", ".bias") for slot in ("q", "k", "v", "o", "gate", "up", "down")}
EXTRA |= {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}


def config(fields: Fields) -> ModelConfig:
    d, heads = fields.int("hidden_size"), fields.int("num_attention_heads")
    layers = fields.int("num_hidden_layers", 1, 4096)
    head_dim = fields.int("head_dim", 1, 4096, None) or max(d // heads, 1)
    max_context = fields.int("max_position_embeddings", 1, 1 << 30, 2048)
    rope = read_rope(fields, head_dim, max_context)
    if rope.kind == "dynamic" and rope.params:  # its rule is made for going past the trained length
        max_context = int(max_context * rope.params["factor"])
    kv_heads = fields.int("num_key_value_heads", 1, 1 << 24, heads)
    if heads % kv_heads:
        raise fields.fail(f"'num_attention_heads' {heads} must be a multiple of 'num_key_value_heads' {kv_heads}")
    return ModelConfig(
        arch=str(fields.values["model_type"]),
        d_model=d,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        d_ff=fields.int("intermediate_size"),
        vocab=fields.int("vocab_size"),
        max_context=max_context,
        act=fields.one_of("hidden_act", ACTS, "silu"),
        gated=True,
        norm="rms",
        norm_eps=fields.float("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=rope,
        windows=(0,) * layers,
        tied=fields.bool("tie_word_embeddings", False),
        bos=next(iter(fields.ids("bos_token_id")), None),
        eos=fields.ids("eos_token_id"),
    )


def top(ckpt: Checkpoint, cfg: ModelConfig) -> dict[str, Tensor]:
    names = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
    if not cfg.tied:
        names["head"] = "lm_head.weight"
    return lookup(ckpt, names)


def layer(ckpt: Checkpoint, cfg: ModelConfig, i: int) -> dict[str, Tensor]:
    names = {slot: f"model.layers.{i}.{name}" for slot, name in (LAYER | EXTRA).items()}
    return lookup(ckpt, names, optional=tuple(EXTRA))
