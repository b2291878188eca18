"""llama.cpp as the engine beside ours: the same weights written as GGUF, run through its plain C calls."""

from __future__ import annotations

import ctypes
import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np

from ralo.config import Fields, ModelConfig
from ralo.errors import RaloError
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.gguf_names import LLAMA
from ralo.formats.tensor import Tensor

NAME = "llama.cpp"
QUANTS = {"f32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
KV_TYPES = {"f32": 0, "f16": 1, "int8": 8}  # ggml's numbers for F32, F16 and Q8_0


def check() -> None:
    """Says early, in one line, that the peer cannot be run here."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise RaloError("--peer llama.cpp needs the llama-cpp-python package: pip install 'ralo[peer]'")
    try:
        import llama_cpp  # noqa: F401 (its shared library may not load)
    except Exception as error:
        raise RaloError(f"--peer llama.cpp: llama-cpp-python does not load: {error}") from error


def write_gguf(ckpt: Checkpoint, quant: str, path: Path) -> None:
    """A Llama's weights at the precision that stands beside ralo's, in the peer's format, without a vocabulary."""
    import gguf

    from ralo.arch import llama

    if ckpt.config.get("model_type") != "llama":
        raise RaloError(f"--peer llama.cpp is for Llama models; this is {ckpt.config.get('model_type')!r}")
    cfg = llama.config(Fields(ckpt.config, ckpt.config_path))
    kind = gguf.GGMLQuantizationType[QUANTS[quant]]
    writer = gguf.GGUFWriter(path, "llama")
    _settings(writer, cfg)
    for gguf_name, hf_name in LLAMA.items():
        layers = range(cfg.n_layers) if ".N." in gguf_name else range(1)
        for i in layers:
            name = hf_name.replace(".N.", f".{i}.") + ".weight"
            if name not in ckpt.tensors:
                continue
            tensor = ckpt.tensors[name]
            values = _interleaved(tensor, cfg, gguf_name)
            as_kind = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            block = gguf.GGML_QUANT_SIZES[as_kind][0]
            if values.shape[-1] % block:
                rows = f"rows of {values.shape[-1]} weights do not fill {as_kind.name} blocks of {block}"
                raise RaloError(f"--peer llama.cpp: {rows}; measure at --quant bf16")
            data = gguf.quants.quantize(values, as_kind)
            writer.add_tensor(gguf_name.replace(".N.", f".{i}.") + ".weight", data, raw_dtype=as_kind)
            tensor.release()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _settings(writer: Any, cfg: ModelConfig) -> None:
    if cfg.rope is None or cfg.rope.kind != "default":
        raise RaloError("--peer llama.cpp: scaled rotary embeddings are not written for the peer")
    # The peer's Llama is always SiLU: a ReLU model costs it the same time, only its text would be another.
    writer.add_block_count(cfg.n_layers)
    writer.add_context_length(cfg.max_context)
    writer.add_embedding_length(cfg.d_model)
    writer.add_feed_forward_length(cfg.d_ff)
    writer.add_head_count(cfg.n_heads)
    writer.add_head_count_kv(cfg.n_kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_rope_dimension_count(cfg.rope.dim)
    writer.add_rope_freq_base(cfg.rope.theta)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_vocab_size(cfg.vocab)
    writer.add_tokenizer_model("no_vocab")


def _interleaved(tensor: Tensor, cfg: ModelConfig, gguf_name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    values = np.ascontiguousarray(tensor.rows(0, tensor.shape[0]), np.float32)
    if gguf_name in ("blk.N.attn_q", "blk.N.attn_k"):  # the peer rotates neighbours, not halves
        heads = values.shape[0] // cfg.head_dim
        values = values.reshape(heads, 2, cfg.head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(values)


class LlamaCpp:
    """A GGUF file in llama.cpp, behind the same three calls as ralo's engine."""

    def __init__(self, path: Path, threads: int, kv: str, n_ctx: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise RaloError("llama.cpp could not load the model that was written for it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, 512, 512
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = KV_TYPES[kv]
        self.ctx = llama_cpp.llama_init_from_model(model, params)
        if not self.ctx:
            hint = "; its int8 cache is for heads of a multiple of 32" if kv == "int8" else ""
            raise RaloError(f"llama.cpp could not make a context for the model{hint}")
        self.length = 0

    def start(self, ctx: int) -> None:
        if self.length > ctx:
            self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.ctx), 0, ctx, -1)
            self.length = ctx
        self._run(ctx - self.length)

    def prefill(self, tokens: int) -> float:
        return self._run(tokens)

    def decode(self, tokens: int) -> float:
        self._run(1)
        return sum(self._run(1) for _ in range(tokens))

    def _run(self, tokens: int) -> float:
        clock = time.perf_counter()
        for start in range(0, tokens, 512):
            n = min(512, tokens - start)
            ids = (ctypes.c_int32 * n)(*([0] * n))  # must outlive the call: the batch only points at it
            if self.lib.llama_decode(self.ctx, self.lib.llama_batch_get_one(ids, n)):
                raise RaloError("llama.cpp failed to decode")
            self.lib.llama_synchronize(self.ctx)
        self.length += tokens
        return time.perf_counter() - clock
