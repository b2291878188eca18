"""Trains a job with torch and numpy alone: `python train_job.py JOB RESULT`, also where ralo is not installed."""

from __future__ import annotations

import argparse
import sys
import types
from dataclasses import replace
from pathlib import Path


def without_kernels() -> None:
    """Makes the modules beside this one importable as ralo's, without what `import ralo` itself would load."""
    package = types.ModuleType("ralo")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["ralo"] = package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    for name, kind in (("minutes", float), ("steps", int), ("batch", int), ("lr", float), ("mix", float)):
        parser.add_argument(f"--{name}", type=kind, help="instead of the job's own")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--compile", action="store_true", help="let torch compile the step: a minute later, faster")
    args = parser.parse_args()

    from ralo.errors import RaloError

    try:
        train(args)
    except RaloError as error:
        print(f"train_job: {error}", file=sys.stderr)
        return 2
    return 0


def train(args: argparse.Namespace) -> None:
    from ralo.heal.distil import Distillation, find_device
    from ralo.heal.job import Result, load_job, save_result

    job = load_job(args.job)
    given = {name: getattr(args, name) for name in ("minutes", "steps", "batch", "lr", "mix")}
    settings = replace(job.settings, **{name: value for name, value in given.items() if value is not None})
    work = Distillation(job.teacher, job.student, job.tokens, settings, find_device(args.device), args.compile)
    shown = 0.0

    def progress(done: float) -> None:
        nonlocal shown
        if done >= shown:
            r = work.record
            step, loss = r.losses[-1]
            print(f"{done:4.0%} step {step} loss {loss:.4f} {r.tokens / r.seconds:.0f} tokens/s", flush=True)
            shown = done + 0.02

    trained = work.run(args.result.with_name(args.result.name + ".healing"), progress)
    r = work.record
    save_result(args.result, Result(trained, r, settings, job.pack))
    print(f"KL {r.kl_before:.4f} -> {r.kl_after:.4f}, {r.tokens} tokens, {r.seconds / 60:.1f} minutes ({work.device})")


if __name__ == "__main__":
    without_kernels()
    raise SystemExit(main())
