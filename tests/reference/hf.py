"""Whole models as the transformers library computes them: random ones to save, and the scores of greedy decoding."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="needs torch: pip install ralo[reference]")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install ralo[reference]")

F32 = NDArray[np.float32]
# Residual branches smaller than the stream they add to, as trained models have them.
GAINS = {"embed": 0.7, "wte": 0.7, "wpe": 0.7, "lm_head": 0.5} | dict.fromkeys(("o_proj", "out_proj", "down_proj", "fc2", "c_proj"), 0.15)
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def random_model(model_type: str, *, seed: int = 0, bare: bool = False, **config: Any) -> Any:
    """A model with random weights: matrices that keep activations near 1, norms and biases that are not trivial."""
    settings = transformers.AutoConfig.for_model(model_type, **config)
    model = (transformers.AutoModel if bare else transformers.AutoModelForCausalLM).from_config(settings)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = torch.randn(values.shape, generator=random)
            if values.ndim == 1:
                values.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))
            else:
                fan_in = values.shape[0] if model_type == "gpt2" and ".c_" in name else values.shape[1]
                gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
                values.copy_(noise * gain * fan_in**-0.5)
    return model.eval()


def save(model: Any, path: Path, dtype: str = "f32", **options: Any) -> Path:
    """A Hugging Face directory of the model, whose own weights are rounded to what the directory holds."""
    model.to(DTYPES[dtype]).save_pretrained(path, **options)
    model.float()
    return path


def load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


class HalfCache(transformers.DynamicCache):
    """Keys and values rounded to float16, as ralo keeps them."""

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys.half().float(), values.half().float(), *args, **kwargs)


def greedy(model: Any, prompt: list[int], steps: int, half: bool = False) -> tuple[list[int], F32]:
    """The tokens that follow a prompt, fed one by one through the cache, and the scores after every token (T, V)."""
    tokens, scores = list(prompt), []
    past = (HalfCache if half else transformers.DynamicCache)(config=model.config)
    with torch.inference_mode():
        for step in range(steps + 1):
            new = tokens if step == 0 else tokens[-1:]
            out = model(torch.tensor([new]), past_key_values=past, use_cache=True)
            scores.append(out.logits[0].float().numpy())
            tokens.append(int(scores[-1][-1].argmax()))
    return tokens[:-1], np.concatenate(scores)
