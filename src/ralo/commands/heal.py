"""Let the weights that a pack changed learn from the dense model, and write the healed pack."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ralo import _core, cpu, screen
from ralo.commands.run import read_text
from ralo.errors import RaloError
from ralo.formats import packed
from ralo.heal.job import Job, Result, load_result, save_job
from ralo.heal.pack import Pack, figures
from ralo.heal.settings import Settings, split
from ralo.heal.takeout import ALL, FACTORS, plain_model
from ralo.heal.text import tokens_of
from ralo.options import add_flags, add_json, flag, read_flags

if TYPE_CHECKING:
    from ralo.heal.distil import Distillation

CTX = 512  # where nothing else is said and the model's context is as long


@dataclass(frozen=True)
class HealOptions:
    model: str = flag("", "pack to heal", short="-m", metavar="PACK")
    teacher: str = flag("", "the dense model that it was made from", metavar="MODEL")
    text: str = flag("", "file with ordinary text (UTF-8) to learn on, some million tokens", metavar="FILE")
    tokens: int = flag(0, "tokens of it; 0 = all", low=0, high=1 << 40)
    output: str = flag("", "directory to write; must not exist", short="-o", metavar="DIR")
    minutes: float = flag(10.0, "how long to train", low=0.01, high=1e5)
    steps: int = flag(0, "steps instead of minutes", low=0, high=1 << 30)
    ctx: int = flag(0, f"tokens of a window; 0 = {CTX}, or the model's context", low=0, high=1 << 20)
    batch: int = flag(16, "windows of a step", low=1, high=1 << 16)
    lr: float = flag(3e-4, "size of a step, which rises first and then falls", low=1e-9, high=1)
    mix: float = flag(0.0, "weight of the text itself; the rest is the teacher's scores", low=0, high=1)
    device: str = flag("auto", "where to train; auto = cuda where there is one", choices=("auto", "cpu", "cuda"))
    compile: str = flag("off", "let torch compile the step, on cuda: later, but faster", choices=("on", "off"))
    seed: int = flag(0, "which windows come when", low=0, high=1 << 62)
    train: str = flag(FACTORS, "what learns: factors and deltas, or all of the layers", choices=(FACTORS, ALL))
    kwta_k: float = flag(1.0, "learn as kwta with this k runs; 1 = as dense runs", low=0.01, high=1)
    threads: int = flag(0, "threads; 0 = physical cores this process may use", low=0, high=1024)
    job: str = flag("", "write the training as a file for another machine instead (train_job.py)", metavar="FILE")
    result: str = flag("", "take what another machine made of the job", metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, HealOptions)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = read_flags(HealOptions, args)
    _check(options)
    cpu.setup(options.threads)
    pack = Pack.open(Path(options.model))
    if options.result:
        result = load_result(Path(options.result))
        if result.pack != pack.digest():
            raise RaloError(f"{options.result}: is of another pack than {options.model}")
        said = _write(options, pack, result)
    else:
        said = _train(options, pack)
    if args.json:
        screen.json_line(said)
    return 0


def _check(options: HealOptions) -> None:
    """What can be said before any work."""
    if not options.model:
        raise RaloError("-m PACK is missing: the pack to heal")
    if options.job and options.result:
        raise RaloError("--job and --result are both given: one is written before training, the other read after it")
    if options.job and Path(options.job).exists():
        raise RaloError(f"{options.job}: already there; choose another name or remove it")
    if not options.job:
        if not options.output:
            raise RaloError("-o DIR is missing: the directory to write")
        packed.unfinished(Path(options.output))
    if not options.result:
        if not options.teacher:
            raise RaloError("--teacher MODEL is missing: the dense model that the pack was made from")
        if not options.text:
            raise RaloError("--text FILE is missing: ordinary text to learn on")
        if not options.job:
            _distil().find_device(options.device)


def _distil() -> Any:
    """What needs torch."""
    try:
        from ralo.heal import distil
    except ModuleNotFoundError as error:
        raise RaloError("healing needs torch: install ralo[heal], or train on another machine (--job)") from error
    return distil


def _train(options: HealOptions, pack: Pack) -> dict[str, object]:
    cfg = pack.cfg
    ctx = options.ctx or min(CTX, cfg.max_context)
    if ctx > cfg.max_context:
        raise RaloError(f"--ctx {ctx} must be from 1 to the model's context of {cfg.max_context}")
    student = plain_model(cfg, pack.weights, ctx, options.train, options.kwta_k)
    if not student.trained:
        raise RaloError(f"{pack.path}: has no factors or deltas that could learn; --train all is for every weight")
    tokens = tokens_of(pack.ckpt.tokenizer(), read_text(Path(options.text)), options.tokens)
    split(tokens, ctx)  # too short a text is said before the teacher is opened
    with screen.progress("opening the teacher") as bar:
        teacher = plain_model(*pack.teacher(options.teacher, bar), ctx)
    settings = Settings(ctx, options.batch, options.lr, options.minutes, options.steps, options.seed, options.mix)
    if options.job:
        path = Path(options.job)
        save_job(path, Job(teacher, student, tokens, settings, pack.digest()))
        size = path.stat().st_size
        print(f"{path}: {screen.size(size)}, {len(student.trained)} tensors to learn, {len(tokens)} tokens")
        return {"job": str(path), "bytes": size, "tensors": len(student.trained), "tokens": len(tokens)}
    distil = _distil()
    device = distil.find_device(options.device, _core.threads())
    work: Distillation = distil.Distillation(teacher, student, tokens, settings, device, options.compile == "on")
    kept = Path(options.output + ".healing")
    with screen.progress(f"healing on {device.type}") as bar:
        trained = work.run(kept, bar)
    said = _write(options, pack, Result(trained, work.record, settings, ""), work)
    shutil.rmtree(kept, ignore_errors=True)  # the healed pack is there
    return said


def _write(options: HealOptions, pack: Pack, result: Result, work: Distillation | None = None) -> dict[str, object]:
    """The healed pack, and what is said of it. `work`: to measure it once more as it is stored."""
    to, record = Path(options.output), result.record
    weights = pack.write(to, result)
    said: dict[str, object] = {"path": str(to), **figures(result)}
    line = f"KL {record.kl_before:.4f} -> {record.kl_after:.4f}"
    if work:
        stored = work.measure(work.network(plain_model(pack.cfg, weights, result.settings.ctx, k=options.kwta_k)))
        said |= {"kl_stored": stored, "device": work.device.type}
        line += f" ({stored:.4f} as stored)"
    print(f"{to}: {line}, {record.tokens} tokens in {record.seconds / 60:.1f} minutes")
    return said
