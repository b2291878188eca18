"""ralo beside OpenVINO GenAI: decode and prefill of one Hugging Face model, in turns in one process.

OpenVINO runs as it comes: u8 cache, activations rounded to int8 in groups of 32, the rest in bf16 where the CPU has it
(ralo: --kv, and 16-bit or float activations); weights int8 per channel, or int4 in groups of 32 with an int8 head. Only
its prefix cache is off: it would skip the prompt. Leaves out: tokenizers, sampling, loading, memory.
It needs openvino-genai and optimum-intel, which brings torch and torchvision; where torch is a CPU build and
torchvision is not, importing optimum fails: pip uninstall torchvision.
Run: python benches/beside_openvino.py MODEL [--quant int8,int4] [--ctx 0,4000] [--prompt-tokens 512,4000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
import openvino
import openvino_genai
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

import ralo
from ralo import _core
from ralo.bench import FIRST_TOKEN, Ralo, measure

STORAGE = {"int8": {"bits": 8, "sym": True}, "int4": {"bits": 4, "sym": True, "group_size": 32, "ratio": 1.0}}


class OpenVino:
    """An exported model behind the same three calls as ralo's engine; the times are those that it takes itself."""

    def __init__(self, path: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()  # as by default for one text at a time, but for the prefix cache
        scheduler.max_num_batched_tokens = 1 << 30
        scheduler.enable_prefix_caching = False
        settings = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": threads}
        self.pipeline = openvino_genai.LLMPipeline(path, "CPU", **settings)
        self.ctx = 0

    def start(self, ctx: int) -> None:
        self.ctx = ctx  # the text itself is run before the tokens that are timed

    def prefill(self, tokens: int) -> float:
        return self._run(tokens, 1).m_times_to_first_token[0] / 1e6

    def decode(self, tokens: int) -> float:
        steps = self._run(self.ctx + 1, tokens + 1).m_durations
        assert len(steps) == tokens
        return sum(steps) / 1e6

    def _run(self, prompt: int, new: int) -> openvino_genai.RawPerfMetrics:
        config = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        ids = openvino.Tensor(np.full((1, prompt), FIRST_TOKEN, np.int64))
        return self.pipeline.generate(ids, config).perf_metrics.raw_metrics


def export(model: str, quant: str, to: str) -> None:
    config = OVWeightQuantizationConfig(**STORAGE[quant])
    OVModelForCausalLM.from_pretrained(model, export=True, compile=False, quantization_config=config).save_pretrained(
        to
    )


def numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--quant", default="int8,int4")
    parser.add_argument("--kv", default="f16", help="ralo's cache")
    parser.add_argument("--ctx", type=numbers, default=[0, 4000])
    parser.add_argument("--prompt-tokens", type=numbers, default=[512, 4000])
    parser.add_argument("-n", "--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for quant in args.quant.split(","):
        lm = ralo.load(args.model, quant, args.kv)
        with tempfile.TemporaryDirectory() as scratch:
            export(args.model, quant, scratch)
            engines = {"ralo": Ralo(lm, lm.model, [0]), "openvino": OpenVino(scratch, _core.threads())}
            phases = [("decode", ctx, args.tokens) for ctx in args.ctx]
            for phase, ctx, tokens in phases + [("prefill", 0, tokens) for tokens in args.prompt_tokens]:
                samples = measure(engines, phase, ctx, tokens, args.rounds)
                ratio, (low, high) = samples.ratio("ralo", "openvino")
                what = f"{quant} {phase} of {tokens} tokens" + (f" after {ctx}" if phase == "decode" else "")
                speeds = f"ralo {samples.median('ralo'):8.1f} tok/s, OpenVINO {samples.median('openvino'):8.1f}"
                print(f"{what:<36} {speeds}, ralo / OpenVINO {ratio:.2f}x ({low:.2f} … {high:.2f})", flush=True)
            del engines


if __name__ == "__main__":
    main()
