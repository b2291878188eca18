"""Packs of procedural weights that are damaged, of another model or no packs: one line each that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import refused
from tiny import write_hf

from ralo.cli import main
from ralo.formats import packed, safetensors

PLACE = "layers.1.down"


@pytest.fixture
def copy(proc_made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(proc_made, tmp_path / "copy"))


def change(folder: Path, name: str, how: Any) -> None:
    """Writes the weights again with one array changed, or gone where `how` gives None."""
    found = safetensors.open_file(folder / packed.WEIGHTS)
    bf16 = [t.name for t in found.values() if t.dtype == "bf16"]
    arrays = {t.name: np.array(t.stored()) for t in found.values()}
    arrays[name] = how(arrays[name])
    if arrays[name] is None:
        del arrays[name]
    bf16 = [each for each in bf16 if each in arrays and arrays[each].dtype == np.uint16]
    safetensors.write_file(folder / packed.WEIGHTS, arrays, bf16=bf16)


def told(folder: Path, **values: Any) -> None:
    """Writes ralo.json again with other values."""
    path = folder / packed.INFO
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def flipped(array: np.ndarray) -> np.ndarray:
    array.view(np.uint8).reshape(-1)[array.nbytes // 2] ^= 1
    return array


@pytest.mark.parametrize("part", ["data", "scales", "deltas"])
def test_one_bit(part: str, copy: Path, proc_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(copy, f"{PLACE}.{part}", flipped)
    for use in (["-m", copy], ["-m", proc_model, "--proc-pack", copy]):
        line = refused(capsys, "run", *use, "-p", "the")
        assert f"{PLACE!r}: is damaged: its weights are not those that were packed; pack the model again" in line


def test_one_bit_names_the_file(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(copy, f"{PLACE}.data", flipped)
    assert str(copy) in refused(capsys, "run", "-m", copy, "-p", "the")


def test_one_byte_of_the_file_itself(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not written anew: as a disk would damage it."""
    tensor = safetensors.open_file(copy / packed.WEIGHTS)[f"{PLACE}.data"]
    content = bytearray((copy / packed.WEIGHTS).read_bytes())
    content[tensor.start + 100] ^= 0x80
    (copy / packed.WEIGHTS).write_bytes(content)
    assert "is damaged: its weights are not those that were packed" in refused(capsys, "run", "-m", copy, "-p", "the")


@pytest.mark.parametrize(
    ("part", "how", "line"),
    [
        ("data", lambda a: a[:-1], "is damaged (data must be (ic, columns * PAD))"),
        ("data", lambda a: a[:, :-1].copy(), "is damaged (columns must have 1 to 4 blocks)"),
        ("data", lambda a: a.astype(np.float32), "is damaged (data is float32, not uint8)"),
        ("data", lambda a: a.reshape(-1), "is damaged (an array of another shape)"),
        ("data", lambda a: None, "missing; the pack is incomplete: pack the model again"),
        ("scales", lambda a: a[:, :0].copy(), "is damaged (scales must be (ic, columns))"),
        ("tables", lambda a: a[:3].copy(), "is damaged (an array of another shape)"),
        (
            "tables",
            lambda a: np.arange(a.size).reshape(a.shape).astype(np.int8),
            "the last table must repeat every four",
        ),
        ("starts", lambda a: a[::-1].copy(), "is damaged (starts must be (ic + 1), up to the deltas)"),
        ("starts", lambda a: a.astype(np.int64), "is damaged (starts is int64, not uint32)"),
        ("at", lambda a: np.full_like(a, 65535), "is damaged (a channel's deltas must ascend)"),
        ("deltas", lambda a: a[:-1], "is damaged (every delta has its place)"),
    ],
)
def test_arrays_that_cannot_be(part: str, how: Any, line: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(copy, f"{PLACE}.{part}", how)
    said = refused(capsys, "run", "-m", copy, "-p", "the")
    assert PLACE in said and line in said and "pack the model again" in said


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"format": 5},
            "is of pack format 5, this ralo reads 1, 2, 3 and 4; take a newer ralo, or pack the model again",
        ),
        ({"format": 0}, "is of pack format 0, this ralo reads 1, 2, 3 and 4; pack the model again"),
        ({"proc": None}, "'proc' is missing: pack the model again"),
        ({"proc": {"model": 1}}, "'proc' is not what ralo writes: pack the model again"),
        ({"proc": 7}, "proc"),
        ({"tensors": 5}, "the pack is incomplete: pack the model again"),
    ],
)
def test_what_the_pack_says_of_itself(
    values: dict[str, Any], line: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(copy, **values)
    said = refused(capsys, "run", "-m", copy, "-p", "the")
    assert line in said and str(copy) in said


def test_a_newer_pack_over_its_model(copy: Path, proc_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(copy, format=5)
    assert "is of pack format 5" in refused(capsys, "run", "-m", proc_model, "--proc-pack", copy, "-p", "the")


def test_a_pack_of_another_model(proc_made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 160, "max_position_embeddings": 1024}
    other = write_hf(tmp_path / "other", "llama", seed=1, eos_token_id=None, **sizes)  # of the same shape
    line = refused(capsys, "run", "-m", other, "--proc-pack", proc_made, "-p", "the")
    assert line == f"ralo run: {proc_made}: is the pack of another model"


def test_something_that_is_no_pack(proc_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no pack")
    for path in (proc_model, tmp_path / "nowhere", tmp_path / "file", tmp_path):
        line = refused(capsys, "run", "-m", proc_model, "--proc-pack", path, "-p", "the")
        assert line == f"ralo run: {path}: is not a pack; make one with ralo pack --proc-sparse=on"
    assert main(["pack", "-m", str(proc_model), "-o", str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    line = refused(capsys, "run", "-m", proc_model, "--proc-pack", tmp_path / "plain", "-p", "the")
    assert "plain: has no procedural weights; make some with ralo pack --proc-sparse=on" in line


def test_settings_that_do_not_go(
    proc_model: Path, proc_made: Path, proc_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "run", "-m", proc_model, "--proc-sparse=on", "-p", "the")
    assert "--proc-sparse needs weights that were made for it: ralo pack -m MODEL --proc-sparse=on -o DIR" in line
    line = refused(capsys, "run", "-m", proc_model, "--proc-pack", proc_made, "--proc-target=attn", "-p", "the")
    assert f"{proc_made}: has no procedural weights for --proc-target=attn" in line
    to = tmp_path / "pack"
    line = refused(capsys, "pack", "-m", proc_model, "--proc-pack", proc_made, "-o", to)
    assert line == "ralo pack: --proc-pack is for running; here -o says where the weights go"
    assert "--order and --proc-sparse do not go together" in refused(
        capsys, "pack", *proc_flags, "--order", "x", "-o", to
    )
    assert f"{proc_made}: is packed already" in refused(capsys, "pack", *proc_flags, "-m", proc_made, "-o", to)
    assert f"{proc_made}: already there" in refused(capsys, "pack", *proc_flags, "-o", proc_made)
    for wrong in (
        ("--proc-bits", 2),
        ("--proc-bits", 9),
        ("--proc-deltas", 0.6),
        ("--proc-generator", "dice"),
        ("--tokens", 511),
    ):
        assert wrong[0] in refused(capsys, "pack", *proc_flags, *wrong, "-o", to)
    (tmp_path / "short.txt").write_text("the house")
    line = refused(capsys, "pack", *proc_flags, "--text", tmp_path / "short.txt", "-o", to)
    assert "new weights need at least 512, better 16384" in line
    assert sorted(f.name for f in tmp_path.iterdir()) == ["short.txt"]


def test_a_plan_that_gives_layers_another_form(proc_model: Path, tmp_path: Path, capsys) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[proc]\n[[proc.where]]\nlayers = "0"\nform = "seed"\n')
    line = refused(capsys, "pack", "-m", proc_model, "-o", tmp_path / "made", "--plan", plan)
    assert "[[proc.where]] cannot set form for packing, only on, deltas, generator, watermark, shed-eps, fanout" in line
    assert not (tmp_path / "made.building").exists()


def test_fanout_by_layer(proc_model: Path, tmp_path: Path, capsys) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[proc]\nform = "seed"\nfanout = 2\n[[proc.where]]\nlayers = "1"\nfanout = 1\n')
    assert main(["pack", "-m", str(proc_model), "-o", str(tmp_path / "made"), "--plan", str(plan)]) == 0
    capsys.readouterr()
    assert main(["explain", "-m", str(proc_model), "--proc-pack", str(tmp_path / "made")]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if "proc:" in row]
    assert [("2.0 blocks" in row, "1.0 blocks" in row) for row in rows] == [(True, False)] * 2 + [(False, True)] * 2


def test_settings_that_a_pack_was_not_made_with(proc_model: Path, copy: Path, capsys) -> None:
    line = refused(capsys, "run", "-m", proc_model, "--proc-pack", copy, "--proc-form", "seed", "-p", "the")
    assert "was made with --proc-form=best, not seed: pack the model again" in line


def test_a_pack_by_itself_can_shed(copy: Path, capsys) -> None:
    flags = ["--proc-watermark", "0", "-p", "the", "-n", "2", "--json"]
    assert main(["run", "-m", str(copy), *flags]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]["proc.trims"] > 0
