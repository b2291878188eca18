"""Loads damaged models, each made from a sound one by a seeded change, and writes one line per case about what came.

python tests/fuzz.py SEED FIRST LAST    runs cases FIRST to LAST - 1; one alone is `SEED N N+1`
"""

from __future__ import annotations

import faulthandler
import json
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import mutations
from tiny import write_gguf, write_hf

import ralo
from ralo.cli import main
from ralo.errors import RaloError

SECONDS = 10  # for one case
MEMORY = 768 << 20  # bytes of address space that all cases together may ask for beyond the start
LONGEST_MESSAGE = 500
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}{{ bos_token }}assistant:"
SMALL = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GGUFS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"quant": "q4_0", **SMALL}),
    ("llama", {"quant": "q8_0", "rope_scaling": {"rope_type": "factors", "factors": [1.0, 2.0, 4.0, 8.0]}, **SMALL}),
    ("qwen2", {"quant": "f16", "rope_scaling": YARN, **SMALL}),
    ("qwen3", {"quant": "q5_1"}),
    ("gpt2", {"quant": "bf16"}),
    ("llama", {"quant": "q4_k", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}),
    ("mistral", {"quant": "q6_k", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}),
)


def sound_models(root: Path) -> list[Path]:
    """Directories, each with one model that loads: Hugging Face, GGUF, packed."""
    models = [
        write_hf(root / "llama", "llama", **SMALL, rope_scaling=LLAMA3),
        write_hf(root / "llama-sharded", "llama", shards=3, dtype="f16", **SMALL),
        write_hf(root / "mistral", "mistral", **SMALL, rope_scaling={"type": "linear", "factor": 2.0}),
        write_hf(root / "qwen2", "qwen2", dtype="f32", **SMALL, use_sliding_window=True, sliding_window=4),
        write_hf(root / "qwen3-sharded", "qwen3", shards=2, rope_parameters=YARN | {"rope_theta": 10000.0}),
        write_hf(root / "opt", "opt"),
        write_hf(root / "gpt2", "gpt2"),
    ]
    for model in models:
        config = json.loads((model / "tokenizer_config.json").read_bytes())
        (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
        (model / "generation_config.json").write_text('{"eos_token_id": [1, 1], "bos_token_id": 0}')
    (models[0] / "chat_template.jinja").write_text(TEMPLATE)
    for source, quant in ((models[0], "int8"), (models[4], "int4"), (models[6], "f32")):
        packed = root / f"packed-{source.name}-{quant}"
        assert main(["pack", "-m", str(source), "--quant", quant, "-o", str(packed)]) == 0
        models.append(packed)
    for i, (model_type, options) in enumerate(GGUFS):
        (root / f"gguf{i}").mkdir()
        write_gguf(
            root / f"gguf{i}" / "model.gguf", model_type, metadata={"tokenizer.chat_template": TEMPLATE}, **options
        )
        models.append(root / f"gguf{i}")
    return models


def damage(models: list[Path], to: Path, rng: Random) -> str:
    """Copies a model, changed in one file (rarely two), and tells which."""
    source = rng.choice(models)
    shutil.copytree(source, to)
    if source.name.startswith("gguf") and rng.random() < 0.4:
        model_type, options = GGUFS[int(source.name[4:])]
        from ralo.formats.gguf import read_metadata

        keys = sorted(read_metadata(source / "model.gguf"))
        changes = mutations.damage_metadata([k for k in keys if k != "general.architecture"], rng)
        write_gguf(to / "model.gguf", model_type, metadata=changes, **options)
        return f"{source.name} {changes!r:.200}"
    files = sorted(path.name for path in to.iterdir())
    chosen = rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2))))
    for name in chosen:
        damage_file(to / name, rng, models)
    return f"{source.name} {' '.join(chosen)}"


def damage_file(path: Path, rng: Random, models: list[Path]) -> None:
    data = path.read_bytes()
    if rng.random() < 0.03:
        path.unlink()
        return
    known = mutations.BY_NAME.get(path.name) or mutations.BY_NAME.get(path.suffix)
    if known and rng.random() < 0.75:
        path.write_bytes(rng.choice(known)(data, rng))
        return
    relatives = [file for model in models for file in sorted(model.iterdir()) if file.suffix == path.suffix]
    path.write_bytes(mutations.damage_bytes(data, rng, rng.choice(relatives).read_bytes()))


def use(path: Path, rng: Random) -> str:
    """Everything that a run or a chat does with a model."""
    gguf = path / "model.gguf"
    packed = (path / "ralo.json").exists()
    quant = "auto" if packed else rng.choice(("auto", "f32", "bf16", "int8", "int4"))
    lm = ralo.load(gguf if gguf.exists() else path, quant, rng.choice(("f16", "int8")), threads=1)
    lm.generate("the in", 2, temperature=rng.choice((0, 0.8)), seed=0, repeat_penalty=1.1)
    lm.perplexity("the in on it", ctx=3)
    if lm.tokenizer.has_chat:
        prompt = lm.tokenizer.chat([{"role": "user", "content": "on it"}])
        if tokens := lm.tokenizer.encode(prompt, special=False):
            lm.generate(tokens[:64], 1, temperature=0)
    return "works"


def case(seed: int, number: int, models: list[Path], scratch: Path) -> str:
    """The outcome in one line: works, refused, or FAILED with the reason."""
    rng = Random(f"{seed}/{number}")
    target = scratch / "model"
    shutil.rmtree(target, ignore_errors=True)
    what = damage(models, target, rng)
    signal.alarm(SECONDS)
    try:
        return use(target, rng)
    except RaloError as error:
        message = str(error)
        if "\n" in message or len(message) > LONGEST_MESSAGE + len(str(target)) or not message.isprintable():
            return f"FAILED {what}: not one clear line: {message!r:.700}"
        return f"refused {what}: {message}"
    except BaseException as error:
        return f"FAILED {what}: {error!r:.500}"
    finally:
        signal.alarm(0)


def run(seed: int, first: int, last: int) -> None:
    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as scratch:
        models = sound_models(Path(root))
        for model in models:
            assert use(model, Random(0)) == "works", model
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(first, last):
            faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
            print(f"case {number} ", end="", flush=True)  # ahead of the work: the last line names a case that crashes
            print(case(seed, number, models, Path(scratch)).encode("ascii", "backslashreplace").decode())
        faulthandler.cancel_dump_traceback_later()
        print(f"memory {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024} MB")


if __name__ == "__main__":
    faulthandler.enable()
    run(*(int(argument) for argument in sys.argv[1:4]))
