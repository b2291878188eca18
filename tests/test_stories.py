"""stories260K, a trained model in llama2.c's format, writes the same story as a plain numpy forward pass."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference.stories import BOS, Stories, Vocabulary
from shared_models import MODELS, scores

import ralo
from ralo.formats import safetensors
from ralo.sequence import Sequence
from ralo.tokenizer import from_gguf

FOLDER = MODELS / "stories260K"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"needs the model in {FOLDER}")
COUNT = 200
PROMPT = "One day, Lily saw a big dog"


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.read(FOLDER / "tok512.bin", 512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("stories")
    stories = Stories(FOLDER / "stories260K.bin")
    safetensors.write_file(path / "model.safetensors", hf_weights(stories), {"format": "pt"})
    (path / "config.json").write_text(json.dumps(hf_config(stories)))
    from_gguf(tokenizer_metadata(), FOLDER / "tok512.bin").save(path)
    return path


def hf_weights(stories: Stories) -> dict[str, NDArray[np.float32]]:
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    names |= {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    w = stories.w
    out = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["final_norm"]}
    for slot, name in names.items():
        for i, values in enumerate(w[slot]):
            out[f"model.layers.{i}.{name}.weight"] = halves(values, stories.width) if slot in ("q", "k") else values
    return out


def halves(rows: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Rows (heads * E, D) of neighbours that turn together, as the two halves of each head that Hugging Face turns."""
    pairs = rows.reshape(-1, width // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def hf_config(stories: Stories) -> dict[str, Any]:
    s = stories.sizes
    return {
        "model_type": "llama",
        "hidden_size": s["dim"],
        "intermediate_size": s["hidden_dim"],
        "num_hidden_layers": s["n_layers"],
        "num_attention_heads": s["n_heads"],
        "num_key_value_heads": s["n_kv_heads"],
        "vocab_size": s["vocab_size"],
        "max_position_embeddings": s["seq_len"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": stories.tied,
    }


def tokenizer_metadata() -> dict[str, Any]:
    pieces = [piece.decode().replace(" ", "\u2581") for piece in vocabulary().pieces]
    pieces[:3] = ["<unk>", "<s>", "</s>"]
    unknown, control, byte, normal = 2, 3, 6, 1
    kinds = [unknown, control, control] + [byte] * 256 + [normal] * (len(pieces) - 259)
    values = {"model": "llama", "tokens": pieces, "scores": np.array(vocabulary().scores, np.float32)}
    values |= {"token_type": np.array(kinds, np.int32), "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("prompt", ["", PROMPT])
def test_same_story(folder: Path, prompt: str) -> None:
    ids = vocabulary().encode(prompt) if prompt else [BOS]
    want = Stories(FOLDER / "stories260K.bin").greedy(ids, COUNT)
    lm = ralo.load(folder, quant="f32")
    found = lm.generate(ids, COUNT, temperature=0)
    assert found.tokens == want and len(want) == COUNT
    story = vocabulary().decode(ids[1:] + want)
    assert lm.tokenizer.decode(ids + found.tokens) == story and story.endswith(found.text)
    assert prompt + found.text == story
    assert story.startswith(prompt or "Once upon a time, there was a little girl named Lily.")


def test_same_prompt_tokens(folder: Path) -> None:
    lm = ralo.load(folder)
    for text in (PROMPT, 'Tom said: "Hi!"\n', "crème brûlée", "x"):
        assert lm.encode(text) == vocabulary().encode(text)


def test_same_scores(folder: Path) -> None:
    stories, ids = Stories(FOLDER / "stories260K.bin"), vocabulary().encode(PROMPT)
    want = np.array([stories.step(token) for token in ids])
    model = ralo.load(folder, quant="f32").model
    got = scores(model, ids, 5, Sequence.empty(model.cfg, "f32"))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
