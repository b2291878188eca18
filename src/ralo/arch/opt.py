"""OPT: learned positions, layer norms with biases, a plain ReLU MLP."""

from __future__ import annotations

from ralo.arch.llama import ACTS
from ralo.arch.slots import lookup
from ralo.config import Fields, ModelConfig
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import Tensor

OFFSET = 2  # the position table starts with two rows that no position uses

MODULES = {
    "attn_norm": "self_attn_layer_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}


def config(fields: Fields) -> ModelConfig:
    d, heads = fields.int("hidden_size"), fields.int("num_attention_heads")
    layers = fields.int("num_hidden_layers", 1, 4096)
    if not fields.bool("do_layer_norm_before", True):
        raise fields.fail("norms after the blocks (do_layer_norm_before=false, as in OPT-350M) are not supported")
    if fields.int("word_embed_proj_dim", 1, 1 << 24, d) != d:
        raise fields.fail("an embedding of another width than the model (word_embed_proj_dim) is not supported")
    if d % heads:
        raise fields.fail(f"'hidden_size' {d} must be a multiple of 'num_attention_heads' {heads}")
    context = fields.int("max_position_embeddings", 1, 1 << 24, 2048)
    return ModelConfig(
        arch="opt",
        d_model=d,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=d // heads,
        d_ff=fields.int("ffn_dim"),
        vocab=fields.int("vocab_size"),
        max_context=context,
        act=fields.one_of("activation_function", ACTS, "relu"),
        gated=False,
        norm="layer",
        norm_eps=1e-5,
        rope=None,
        windows=(0,) * layers,
        position_rows=context + OFFSET,
        position_offset=OFFSET,
        tied=fields.bool("tie_word_embeddings", True),
        bos=next(iter(fields.ids("bos_token_id")), None),
        eos=fields.ids("eos_token_id"),
    )


def _prefix(ckpt: Checkpoint) -> str:
    """Checkpoints of the bare decoder lack the outer `model.`."""
    return "model.decoder." if "model.decoder.embed_tokens.weight" in ckpt.tensors else "decoder."


def top(ckpt: Checkpoint, cfg: ModelConfig) -> dict[str, Tensor]:
    p = _prefix(ckpt)
    names = {
        "embed": f"{p}embed_tokens.weight",
        "positions": f"{p}embed_positions.weight",
        "final_norm": f"{p}final_layer_norm.weight",
        "final_norm_bias": f"{p}final_layer_norm.bias",
    }
    if not cfg.tied:
        names["head"] = "lm_head.weight"
    return lookup(ckpt, names)


def layer(ckpt: Checkpoint, cfg: ModelConfig, i: int) -> dict[str, Tensor]:
    p = f"{_prefix(ckpt)}layers.{i}."
    names = {slot: f"{p}{m}.weight" for slot, m in MODULES.items()}
    names |= {f"{slot}_bias": f"{p}{m}.bias" for slot, m in MODULES.items()}
    optional = tuple(f"{slot}_bias" for slot in MODULES if not slot.endswith("norm"))  # enable_bias=false has none
    return lookup(ckpt, names, optional)
