"""Packs of factors that are damaged, of another model or made otherwise: one line each that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import refused
from test_pack_proc_refusals import change, flipped, told
from tiny import write_hf

from ralo.formats import packed

PLACE = "layers.1.down"  # factors and a rest
AGAIN = "pack the model again"


@pytest.fixture
def copy(tt_made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tt_made, tmp_path / "copy"))


def said_of(folder: Path, **values: Any) -> None:
    """Writes ralo.json again with something else said of PLACE; None: not said at all."""
    info = json.loads((folder / packed.INFO).read_text())
    record = info["tt"]["matrices"][PLACE] | values
    info["tt"]["matrices"][PLACE] = {k: v for k, v in record.items() if v is not None}
    (folder / packed.INFO).write_text(json.dumps(info))


@pytest.mark.parametrize("part", ["0.data", "0.scales", "1.data", "1.scales"])
def test_one_bit(part: str, copy: Path, tt_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(copy, f"{PLACE}.{part}", flipped)
    for use in (["-m", copy], ["-m", tt_model, "--tt-pack", copy]):
        line = refused(capsys, "run", *use, "-p", "the")
        assert f"{PLACE!r}: is damaged: its weights are not those that were packed; {AGAIN}" in line
        assert str(copy) in line


@pytest.mark.parametrize(
    ("part", "how", "line"),
    [
        ("0.data", lambda a: a[:-1], "is damaged ("),
        ("0.data", lambda a: a[:, :-32].copy(), "is damaged ("),
        ("1.data", lambda a: a.astype(np.float32), "is damaged (factor 1 is of another type)"),
        ("1.data", lambda a: a.reshape(-1), "is damaged (an array of another shape)"),
        ("1.scales", lambda a: a.astype(np.float32), "is damaged (factor 1 is of another type)"),
        ("0.scales", lambda a: a[:, :-1].copy(), "is damaged ("),
        ("0.scales", lambda a: None, "missing; the pack is incomplete"),
        ("1.data", lambda a: None, "missing; the pack is incomplete"),
    ],
)
def test_arrays_that_cannot_be(part: str, how: Any, line: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(copy, f"{PLACE}.{part}", how)
    said = refused(capsys, "run", "-m", copy, "-p", "the")
    assert PLACE in said and line in said and AGAIN in said


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"ranks": None}, "is damaged (what is said of its factors is incomplete)"),
        ({"gap": [1]}, "is damaged (what is said of its factors is incomplete)"),
        ({"ins": [320, 2]}, "is damaged (its factors are of another shape)"),
        ({"outs": [1, 10**13]}, "is damaged (its factors are of another shape)"),  # more than any memory
        ({"quants": ["int4"]}, "is damaged (its factors are of another shape)"),
        ({"quants": ["int4", "proc"]}, "is damaged (its factors are of another shape)"),
        ({"quants": ["int4", "int8"]}, "is damaged ("),
        ({"ranks": [63]}, "is damaged ("),
        ({"ranks": []}, "is damaged (digits and ranks of a tensor train do not fit each other)"),
        ({"backwards": True}, "is damaged ("),
        ({"rest": False}, "is damaged ("),
        ({"digest": "0" * 16}, "is damaged: its weights are not those that were packed"),
    ],
)
def test_what_is_said_of_a_matrix(values: dict[str, Any], line: str, copy: Path, capsys) -> None:
    said_of(copy, **values)
    said = refused(capsys, "run", "-m", copy, "-p", "the")
    assert PLACE in said and line in said and AGAIN in said


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"format": 5}, f"is of pack format 5, this ralo reads 1, 2, 3 and 4; take a newer ralo, or {AGAIN}"),
        ({"tt": None}, f"'tt' is missing: {AGAIN}"),
        ({"tt": {"model": 1}}, f"'tt' is not what ralo writes: {AGAIN}"),
        ({"tt": {"model": "x", "settings": {}, "matrices": {}}}, f"'tt' is not what ralo writes: {AGAIN}"),
        ({"tensors": 5}, f"the pack is incomplete: {AGAIN}"),
    ],
)
def test_what_the_pack_says_of_itself(values: dict[str, Any], line: str, copy: Path, tt_model: Path, capsys) -> None:
    told(copy, **values)
    said = refused(capsys, "run", "-m", copy, "-p", "the")
    assert line in said and str(copy) in said
    if "format" in values:
        assert line in refused(capsys, "run", "-m", tt_model, "--tt-pack", copy, "-p", "the")


def test_a_matrix_that_is_not_said_to_be_one(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = json.loads((copy / packed.INFO).read_text())
    del info["tt"]["matrices"][PLACE]
    told(copy, **info)
    assert f"{PLACE}.data" in refused(capsys, "run", "-m", copy, "-p", "the")


def test_a_pack_of_another_model(tt_made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((tt_made / packed.INFO).read_text())["config"]
    other = write_hf(tmp_path / "other", config.pop("model_type"), seed=1, **config)  # of the same shape
    line = refused(capsys, "run", "-m", other, "--tt-pack", tt_made, "-p", "the")
    assert line == f"ralo run: {tt_made}: is the pack of another model"


def test_packs_of_something_else(tt_model: Path, tt_made: Path, proc_model: Path, proc_made: Path, capsys) -> None:
    line = refused(capsys, "run", "-m", tt_model, "--tt-pack", tt_model, "-p", "the")
    assert line == f"ralo run: {tt_model}: is not a pack; make one with ralo pack --tt=on"
    line = refused(capsys, "run", "-m", proc_model, "--tt-pack", proc_made, "-p", "the")
    assert line == f"ralo run: {proc_made}: has no factors; make some with ralo pack --tt=on"
    line = refused(capsys, "run", "-m", tt_model, "--proc-pack", tt_made, "-p", "the")
    assert line == f"ralo run: {tt_made}: has no procedural weights; make some with ralo pack --proc-sparse=on"


def test_settings_that_a_pack_was_not_made_with(tt_model: Path, tt_made: Path, capsys) -> None:
    for flag, made in (("share=0.5", "0.7"), ("rank=128", "0"), ("gap=0.1", "0.0"), ("rest=on", "auto"),
                       ("maxvol-k=9", "8"), ("cores=3", "2"), ("form=seed", "best")):  # fmt: skip
        name, asked = flag.split("=")
        line = refused(capsys, "run", "-m", tt_model, "--tt-pack", tt_made, f"--tt-{flag}", "-p", "the")
        assert line == f"ralo run: {tt_made}: was made with --tt-{name}={made}, not {asked}: {AGAIN}"


def test_settings_that_do_not_go(
    tt_model: Path, tt_made: Path, tt_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "run", "-m", tt_model, "--tt=on", "-p", "the")
    assert "--tt needs weights that were made for it: ralo pack -m MODEL --tt=on -o DIR, then --tt-pack DIR" in line
    to = tmp_path / "pack"
    line = refused(capsys, "pack", "-m", tt_model, "--tt-pack", tt_made, "-o", to)
    assert line == "ralo pack: --tt-pack is for running; here -o says where the weights go"
    line = refused(capsys, "pack", *tt_flags, "--proc-sparse=on", "-o", to)
    each = "make a pack each: pack twice, and run with --proc-pack and --tt-pack or --mix-pack"
    assert line == f"ralo pack: --proc-sparse, --tt and --mix {each}"
    line = refused(capsys, "pack", *tt_flags, "--order", "x", "-o", to)
    assert line == "ralo pack: --order and --tt do not go together: such weights have no blocks of neurons"
    assert f"{tt_made}: is packed already" in refused(capsys, "pack", *tt_flags, "-m", tt_made, "-o", to)
    assert f"{tt_made}: already there" in refused(capsys, "pack", *tt_flags, "-o", tt_made)
    wrong = ("share=1.1", "rank=-1", "maxvol-k=0", "gap=2", "rest=some", "cores=1", "cores=5", "form=dice")
    for flag in wrong:
        assert f"--tt-{flag.split('=')[0]}" in refused(capsys, "pack", *tt_flags, f"--tt-{flag}", "-o", to)
    (tmp_path / "short.txt").write_text("the house")
    line = refused(capsys, "pack", *tt_flags, "--text", tmp_path / "short.txt", "-o", to)
    assert "tokens; new weights need at least 512, better 16384" in line
    assert [f.name for f in tmp_path.iterdir()] == ["short.txt"]
