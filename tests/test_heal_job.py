"""A training as a file: it comes back as it was, small, and another machine needs torch and numpy alone for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from heal_models import factored, from_seeds, made, tiny_weights

from ralo.errors import FormatError, RaloError
from ralo.heal.job import Job, Result, load_job, load_result, save_job, save_result
from ralo.heal.settings import Record, Settings
from ralo.heal.takeout import ALL, FACTORS, plain_model

SOURCE = Path(__file__).resolve().parents[1] / "src" / "ralo"
TEXT = np.random.default_rng(0).integers(0, 97, 2000).astype(np.uint32)
SETTINGS = Settings(ctx=24, batch=4, lr=3e-3, steps=6)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    cfg, weights = tiny_weights(tmp_path_factory.mktemp("model"))
    hard = made(made(weights, factored(8), ("qkv", "up")), from_seeds, ("down",))
    student = plain_model(cfg, hard, 24, ALL, 0.5)
    return Job(plain_model(cfg, weights, 24), student, TEXT, SETTINGS, "the pack")


def test_comes_back_as_it_was(job, tmp_path):
    save_job(tmp_path / "job", job)
    back = load_job(tmp_path / "job")
    assert (back.settings, back.pack, back.student.maps.keys()) == (SETTINGS, "the pack", job.student.maps.keys())
    assert np.array_equal(back.tokens, TEXT) and back.tokens.dtype == np.uint16
    assert back.teacher.digest() == job.teacher.digest()
    for name, m in job.student.maps.items():
        other = back.student.maps[name]
        assert replace(other, quants=m.quants) == m
        for k in range(len(m.quants)):
            near = 2.0**-8 if m.kind == "proc" else 0  # float32 that does not learn becomes bf16
            np.testing.assert_allclose(back.student.step(name, k), job.student.step(name, k), rtol=near)
    assert [p.name for p in tmp_path.iterdir()] == ["job"]


def test_what_is_shared_is_written_once(job, tmp_path):
    save_job(tmp_path / "both", job)
    save_job(tmp_path / "same", replace(job, student=job.teacher))
    save_job(tmp_path / "exact", replace(job, teacher=_as_f32(job.teacher), student=_as_f32(job.teacher)))
    own = sum(a.nbytes for a in job.teacher.arrays.values())
    same, both = ((tmp_path / name).stat().st_size for name in ("same", "both"))
    assert own < same < 1.6 * own < 2.2 * own < both + own
    assert (tmp_path / "exact").stat().st_size < 2.2 * same  # bf16 beside int8


def _as_f32(model):
    arrays = dict(model.arrays)
    for name in model.maps:
        arrays[f"{name}.0.data"] = model.step(name, 0).view(np.uint8)
        arrays.pop(f"{name}.0.scales", None)
    maps = {name: replace(m, quants=("f32",)) for name, m in model.maps.items()}
    return replace(model, arrays=arrays, maps=maps)


def test_a_result_comes_back(tmp_path):
    rng = np.random.default_rng(1)
    trained = {"a.0": (rng.standard_normal((5, 64)) * 1e-7).astype(np.float32), "b.deltas": np.float32([3, -2, 0])}
    trained |= {"c": np.zeros((2, 3), np.float32), "d.deltas": np.zeros(0, np.float32)}
    record = Record(3, 300, 1.5, 0.5, 0.25, [(1, 0.5), (3, 0.25)])
    save_result(tmp_path / "result", Result(trained, record, SETTINGS, "the pack"))
    back = load_result(tmp_path / "result")
    assert (back.record, back.settings, back.pack) == (record, SETTINGS, "the pack")
    assert back.trained.keys() == trained.keys()
    for name, values in trained.items():
        most = np.abs(values).max(axis=-1, keepdims=True, initial=0)
        assert back.trained[name].shape == values.shape and back.trained[name].dtype == np.float32
        assert (np.abs(back.trained[name] - values) <= most / 65000).all()


@pytest.mark.parametrize("read", [load_job, load_result])
def test_files_that_are_none(read, job, tmp_path):
    with pytest.raises(RaloError, match="nowhere: no such file"):
        read(tmp_path / "nowhere")
    (tmp_path / "file").write_text("no such thing")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    (tmp_path / "empty").write_bytes(b"")
    for name in ("file", "other.npz", "empty"):
        with pytest.raises(FormatError, match=rf"{name}: is not a (job|result) of ralo heal"):
            read(tmp_path / name)
    save_job(tmp_path / "job", job)
    save_result(tmp_path / "result", Result({}, Record(), SETTINGS, ""))
    wrong = tmp_path / ("result" if read is load_job else "job")
    with pytest.raises(FormatError, match=r"is a (job|result) of format 1, not a (job|result) of 1"):
        read(wrong)


def test_trains_with_torch_and_numpy_alone(job, tmp_path):
    """In a copy of what it needs, without kernels and without the rest of ralo."""
    torch = pytest.importorskip("torch", reason="healing needs torch: pip install ralo[heal]")
    from ralo.heal.distil import Distillation

    for name in ("heal", "remake/__init__.py", "remake/values.py", "remake/settings.py", "errors.py"):
        to = tmp_path / "src" / "ralo" / name
        to.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if name == "heal" else shutil.copy)(SOURCE / name, to)
    student = plain_model(*tiny_weights(tmp_path / "model"), 24)
    cfg, weights = tiny_weights(tmp_path / "model")
    work = replace(job, student=plain_model(cfg, made(weights, factored(8), ("up",)), 24, FACTORS), teacher=student)
    save_job(tmp_path / "job", work)
    script = tmp_path / "src" / "ralo" / "heal" / "train_job.py"
    where = os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "job", "result", "--steps", "5", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=env | {"PYTHONPATH": where}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = load_result(tmp_path / "result")
    assert done.stdout.splitlines()[-1].startswith(f"KL {result.record.kl_before:.4f} -> {result.record.kl_after:.4f}")
    assert result.record.steps == 5 and result.pack == "the pack" and result.settings == replace(SETTINGS, steps=5)
    torch.set_num_threads(1)
    here = Distillation(work.teacher, work.student, TEXT, replace(SETTINGS, steps=5))
    for name, values in here.run().items():
        np.testing.assert_allclose(result.trained[name], values, rtol=0, atol=1e-3 * np.abs(values).max())
    again = subprocess.run([*command[:3], "r2", "--lr", "x"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert again.returncode == 2
    lost = subprocess.run(
        [*command[:2], "no", "r2"], cwd=tmp_path, env=env | {"PYTHONPATH": where}, capture_output=True
    )
    assert (lost.returncode, lost.stderr) == (2, b"train_job: no: no such file\n")
