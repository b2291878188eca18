"""A training as one file, to be done on another machine, and what comes back as another: numpy alone writes and reads
them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ralo.errors import FormatError, RaloError
from ralo.heal.plain import F32, Array, PlainModel
from ralo.heal.settings import Record, Settings
from ralo.remake.values import bf16_words

FORMAT = 1
ABOUT = "about"  # JSON beside the arrays
MOST = 32767


@dataclass(frozen=True)
class Job:
    """`pack`: stands for the student as it was taken out of its pack; a result must come back to the same."""

    teacher: PlainModel
    student: PlainModel
    tokens: Array
    settings: Settings
    pack: str


@dataclass(frozen=True)
class Result:
    trained: Mapping[str, F32]
    record: Record
    settings: Settings
    pack: str


def save_job(path: Path, job: Job) -> None:
    """Weights that do not learn are written as they are stored, or as bf16; what both models share only once."""
    tokens = job.tokens.astype(np.uint16 if job.student.vocab <= 1 << 16 else np.uint32)
    arrays: dict[str, Array] = {"tokens": tokens}
    models = {}
    for who, model in (("teacher", job.teacher), ("student", job.student)):
        small = _lowered(model)
        names = {name: _once(arrays, array) for name, array in small.arrays.items()}
        models[who] = {"numbers": small.numbers(), "arrays": names}
    _write(path, "job", {**models, "settings": asdict(job.settings), "pack": job.pack}, arrays)


def load_job(path: Path) -> Job:
    about, arrays = _read(path, "job")
    teacher, student = (
        PlainModel.of(about[who]["numbers"], {name: arrays[key] for name, key in about[who]["arrays"].items()})
        for who in ("teacher", "student")
    )
    return Job(teacher, student, arrays["tokens"], Settings(**about["settings"]), about["pack"])


def save_result(path: Path, result: Result) -> None:
    """Values as whole numbers of 16 bits beside the largest of their row: half the bytes, far finer than int8."""
    arrays: dict[str, Array] = {}
    for name, values in result.trained.items():
        most = np.maximum(np.abs(values).max(axis=-1, keepdims=True, initial=0), np.float32(1e-30))
        arrays[f"{name}:values"], arrays[f"{name}:most"] = np.round(values / most * MOST).astype(np.int16), most
    about = {"record": result.record.to_dict(), "settings": asdict(result.settings), "pack": result.pack}
    _write(path, "result", {**about, "trained": list(result.trained)}, arrays)


def load_result(path: Path) -> Result:
    about, arrays = _read(path, "result")
    trained: dict[str, F32] = {}
    for name in about["trained"]:
        steps = arrays[f"{name}:most"] / np.float32(MOST)
        trained[name] = np.asarray(arrays[f"{name}:values"] * steps, np.float32)
    return Result(trained, Record.of(about["record"]), Settings(**about["settings"]), about["pack"])


def _lowered(model: PlainModel) -> PlainModel:
    """Matrices that are float32 and do not learn, as bf16."""
    numbers, arrays = model.numbers(), dict(model.arrays)
    for name, m in model.maps.items():
        for k, quant in enumerate(m.quants):
            if quant == "f32" and str(k) not in m.trained:
                arrays[f"{name}.{k}.data"] = bf16_words(model.step(name, k)).view(np.uint8)
                numbers["maps"][name]["quants"] = [*m.quants[:k], "bf16", *m.quants[k + 1 :]]
    return PlainModel.of(numbers, arrays)


def _once(arrays: dict[str, Array], array: Array) -> str:
    """Puts an array among those of a file, unless it is there; its key."""
    whole = np.ascontiguousarray(array)
    said = f"{whole.dtype} {whole.shape}".encode() + whole.reshape(-1).view(np.uint8).tobytes()
    key = hashlib.blake2b(said, digest_size=12).hexdigest()
    arrays.setdefault(key, whole)
    return key


def _write(path: Path, kind: str, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """It appears under its name only when it is complete."""
    text = np.frombuffer(json.dumps({"ralo heal": kind, "format": FORMAT, **about}).encode(), np.uint8)
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            np.savez(file, **{ABOUT: text}, **arrays)  # type: ignore[arg-type]
        os.replace(partial, path)
    except OSError as error:
        raise RaloError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Array]]:
    try:
        with np.load(path) as file:
            arrays = dict(file)
        about = json.loads(arrays.pop(ABOUT).tobytes())
        if about["ralo heal"] != kind or about["format"] != FORMAT:
            raise FormatError(path, f"is a {about['ralo heal']} of format {about['format']}, not a {kind} of {FORMAT}")
        return about, arrays
    except FileNotFoundError:
        raise RaloError(f"{path}: no such file") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(path, f"is not a {kind} of ralo heal") from error
