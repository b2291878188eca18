"""GPT-2: learned positions, layer norms, one fused q/k/v, linear maps stored input-first."""

from __future__ import annotations

from ralo.arch.llama import ACTS
from ralo.arch.slots import lookup
from ralo.config import Fields, ModelConfig
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.tensor import RowSlice, Tensor, transpose

LINEAR = {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
NORMS = {"attn_norm": "ln_1", "mlp_norm": "ln_2"}


def config(fields: Fields) -> ModelConfig:
    d, heads, layers = fields.int("n_embd"), fields.int("n_head"), fields.int("n_layer", 1, 4096)
    if d % heads:
        raise fields.fail(f"'n_embd' {d} must be a multiple of 'n_head' {heads}")
    if not fields.bool("scale_attn_weights", True) or fields.bool("scale_attn_by_inverse_layer_idx", False):
        raise fields.fail("attention scores scaled otherwise than by the head width are not supported")
    context = fields.int("n_positions", 1, 1 << 24, 1024)
    return ModelConfig(
        arch="gpt2",
        d_model=d,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=d // heads,
        d_ff=fields.int("n_inner", 1, 1 << 24, 4 * d),
        vocab=fields.int("vocab_size"),
        max_context=context,
        act=fields.one_of("activation_function", ACTS, "gelu_new"),
        gated=False,
        norm="layer",
        norm_eps=fields.float("layer_norm_epsilon", 0.0, 1.0, 1e-5),
        rope=None,
        windows=(0,) * layers,
        position_rows=context,
        tied=fields.bool("tie_word_embeddings", True),
        bos=next(iter(fields.ids("bos_token_id")), None),
        eos=fields.ids("eos_token_id"),
    )


def _prefix(ckpt: Checkpoint) -> str:
    """The original GPT-2 files lack the outer `transformer.`."""
    return "transformer." if "transformer.wte.weight" in ckpt.tensors else ""


def top(ckpt: Checkpoint, cfg: ModelConfig) -> dict[str, Tensor]:
    p = _prefix(ckpt)
    names = {"embed": f"{p}wte.weight", "positions": f"{p}wpe.weight"}
    names |= {"final_norm": f"{p}ln_f.weight", "final_norm_bias": f"{p}ln_f.bias"}
    if not cfg.tied:
        names["head"] = "lm_head.weight"
    return lookup(ckpt, names)


def layer(ckpt: Checkpoint, cfg: ModelConfig, i: int) -> dict[str, Tensor]:
    p, d, f = f"{_prefix(ckpt)}h.{i}.", cfg.d_model, cfg.d_ff
    found = lookup(ckpt, {slot: f"{p}{m}.weight" for slot, m in NORMS.items()})
    found |= lookup(ckpt, {f"{slot}_bias": f"{p}{m}.bias" for slot, m in (NORMS | LINEAR).items()})
    shapes = {"o": (d, d), "up": (d, f), "down": (f, d)}
    for slot, module in LINEAR.items():
        found[slot] = transpose(ckpt.tensor(f"{p}{module}.weight", shapes[slot]))
    fused = transpose(ckpt.tensor(f"{p}attn.c_attn.weight", (d, 3 * d)))
    bias = ckpt.tensor(f"{p}attn.c_attn.bias", (3 * d,))
    for n, slot in enumerate(("q", "k", "v")):
        found[slot] = RowSlice(fused, n * d, (n + 1) * d)
        found[f"{slot}_bias"] = RowSlice(bias, n * d, (n + 1) * d)
    return found
