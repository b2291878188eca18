"""llama.cpp as the engine beside ours: the same weights written as GGUF, run through its plain C calls."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ralo import _core, loader
from ralo.config import Fields, ModelConfig
from ralo.errors import RaloError
from ralo.formats.checkpoint import Checkpoint
from ralo.formats.gguf_names import LLAMA
from ralo.formats.tensor import Tensor
from ralo.lm import LM
from ralo.quality import nll

NAME = "llama.cpp"
BATCH = 512  # tokens of a prompt that the peer takes at once, as by its own default
HEAD = ("output", "token_embd")  # at int4 it is Q8_0: ralo's head is int8 there, and the peer's own tools keep it finer
QUANTS = {"f32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
KV_TYPES = {"f32": 0, "f16": 1, "int8": 8}  # ggml's numbers for F32, F16 and Q8_0
# What is tried in a process of its own. A build by GCC 12 ends with an illegal instruction where the CPU has AMX: the
# compiler leaves out half of what says how large tiles are.
TRIAL = """
import sys
from pathlib import Path
from ralo import peer
peer.LlamaCpp(Path(sys.argv[1]), 1, "f16", 64).prefill(2)
"""
WITHOUT_AMX = (
    "CMAKE_ARGS='-DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8'"
    " pip install --no-cache-dir --force-reinstall --no-deps llama-cpp-python"
)


def check() -> None:
    """Says early, in one line, that the peer cannot be run here."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise RaloError("--peer llama.cpp needs the llama-cpp-python package: pip install 'ralo[peer]'")
    try:
        import llama_cpp  # noqa: F401 (its shared library may not load)
    except Exception as error:
        raise RaloError(f"--peer llama.cpp: llama-cpp-python does not load: {error}") from error


@contextlib.contextmanager
def beside(lm: LM, n_ctx: int) -> Iterator[LlamaCpp]:
    """The peer with the model that `lm` runs, at the same precision, with as many threads; freed at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "peer.gguf"
        write_gguf(loader.open_checkpoint(str(lm.path)), lm.quant, path)
        _survives(path)
        with contextlib.closing(LlamaCpp(path, _core.threads(), lm.kv, n_ctx)) as engine:
            yield engine


def _survives(path: Path) -> None:
    """A peer whose build does not fit the CPU takes its process with it: not this one."""
    done = subprocess.run([sys.executable, "-c", TRIAL, str(path)], capture_output=True)
    if done.returncode < 0:
        ended = signal.strsignal(-done.returncode)
        raise RaloError(f"--peer llama.cpp ends with {ended!r} here; built without AMX it may not: {WITHOUT_AMX}")


def check_text(cfg: ModelConfig) -> None:
    """Speed is the same whatever the activation; what is predicted is not."""
    if cfg.act != "silu":
        raise RaloError(
            f"--peer llama.cpp: its Llama is always silu, this model is {cfg.act}: it would predict otherwise"
        )


def write_gguf(ckpt: Checkpoint, quant: str, path: Path) -> None:
    """A Llama's weights at the precision that stands beside ralo's, in the peer's format, without a vocabulary."""
    import gguf

    from ralo.arch import llama

    if ckpt.config.get("model_type") != "llama":
        raise RaloError(f"--peer llama.cpp is for Llama models; this is {ckpt.config.get('model_type')!r}")
    if any(name.endswith(".bias") for name in ckpt.tensors):
        raise RaloError("--peer llama.cpp: biases are not written for the peer")
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
            if quant == "int4" and gguf_name in HEAD:
                as_kind = gguf.GGMLQuantizationType.Q8_0
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

        self.lib, self.ctx, self.length = llama_cpp, None, 0
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RaloError("llama.cpp could not load the model that was written for it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, BATCH, BATCH
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = KV_TYPES[kv]
        self.ctx = llama_cpp.llama_init_from_model(self.model, params)
        if not self.ctx:
            self.close()
            hint = "; its int8 cache is for heads of a multiple of 32" if kv == "int8" else ""
            raise RaloError(f"llama.cpp could not make a context for the model{hint}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def close(self) -> None:
        """Gives its memory back; there is no use after it."""
        if self.ctx:
            self.lib.llama_free(self.ctx)
        self.lib.llama_model_free(self.model)

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

    def losses(
        self, tokens: Sequence[int], ctx: int, progress: Callable[[float], None] | None = None
    ) -> NDArray[np.float64]:
        """Minus log probability of each token, over the same windows as `quality.losses`."""
        out = np.empty(len(tokens) - 1)
        for start in range(0, len(out), ctx):
            stop = min(start + ctx, len(out))
            self.start(0)
            for a in range(start, stop, BATCH):
                b = min(a + BATCH, stop)
                out[a:b] = nll(self._scores(tokens[a:b]), np.asarray(tokens[a + 1 : b + 1]))
                if progress:
                    progress(b / len(out))
        return out

    def _run(self, tokens: int) -> float:
        clock = time.perf_counter()
        for start in range(0, tokens, BATCH):
            self._decode([0] * min(BATCH, tokens - start))
        return time.perf_counter() - clock

    def _scores(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """What comes after each of these tokens: (T, V), valid until the next call."""
        self._decode(tokens, every=True)
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.ctx), (len(tokens), self.vocab))

    def _decode(self, tokens: Sequence[int], every: bool = False) -> None:
        n = len(tokens)
        ids = (ctypes.c_int32 * n)(*tokens)  # must outlive the call: the batch only points at it
        wanted = (ctypes.c_int8 * n)(*[1] * n)  # likewise
        batch = self.lib.llama_batch_get_one(ids, n)
        if every:  # otherwise the peer computes scores after the last token only
            batch.logits = wanted
        if self.lib.llama_decode(self.ctx, batch):
            raise RaloError("llama.cpp failed to decode")
        self.lib.llama_synchronize(self.ctx)
        self.length += n
