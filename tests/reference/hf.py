"""Whole models as the transformers library computes them: random ones to save, and the scores of greedy decoding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="needs torch: pip install ralo[reference]")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install ralo[reference]")
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # on models this small more of them only wait for each other

F32 = NDArray[np.float32]
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# What a branch adds is smaller than the stream it is added to, as in trained models.
GAINS = {"lm_head": 0.5, "o_proj": 0.2, "out_proj": 0.2, "down_proj": 0.2, "fc2": 0.2, "c_proj": 0.2}


def random_model(model_type: str, seed: int = 0, **config: Any) -> Any:
    """A model with random weights: matrices that keep activations near 1, norms and biases that are not trivial."""
    settings = transformers.AutoConfig.for_model(model_type, **config)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = torch.randn(values.shape, generator=random)
            if values.ndim == 1:
                values.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))
                continue
            inputs = values.shape[0] if model_type == "gpt2" and ".c_" in name else values.shape[1]
            gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
            values.copy_(noise * gain * inputs**-0.5)
    return model.eval()


def save(model: Any, path: Path, dtype: str = "f32", **options: Any) -> Path:
    """A Hugging Face directory of the model, whose own weights are rounded to what the directory holds."""
    stored = copy.deepcopy(model).to(DTYPES[dtype])
    stored.save_pretrained(path, **options)
    model.load_state_dict(stored.state_dict())
    return path


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(model: Any, prompt: list[int], steps: int) -> tuple[list[int], F32]:
    """The prompt and the likeliest tokens after it, fed one by one through the cache; scores after each (T, V)."""
    tokens, past = list(prompt), transformers.DynamicCache(config=model.config)
    parts = [_forward(model, tokens, past)]
    for _ in range(steps):
        tokens.append(int(parts[-1][-1].argmax()))
        parts.append(_forward(model, tokens[-1:], past))
    return tokens, np.concatenate(parts)


def _forward(model: Any, tokens: list[int], past: Any) -> F32:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), past_key_values=past, use_cache=True).logits[0].numpy()
