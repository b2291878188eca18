"""`ralo pack --proc-sparse=on` and the commands that use such a pack, alone or over the model it was made from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from commandline import last_line, ralo, refused

from ralo.cli import main
from ralo.lm import load
from ralo.modes import Proc
from ralo.remake import model as remake_model

RUN = ("-p", "the house", "-n", 12, "--temperature", 0, "--json")


def test_packs_and_says_what_it_made(proc_model: Path, proc_flags: list[str], proc_made: Path, tmp_path: Path) -> None:
    to = tmp_path / "new" / "pack"
    done = ralo("pack", *proc_flags, "-o", to, "--json")
    assert (done.code, done.err) == (0, "")
    values = last_line(done.out)
    assert set(values) == {"path", "quant", "bytes", "bits", "matrices", "seconds", "resumed_layers"}
    assert (values["path"], values["quant"], values["matrices"], values["resumed_layers"]) == (str(to), "int8", 4, 0)
    assert values["bytes"] == sum(f.stat().st_size for f in to.iterdir()) and 4 < values["bits"] < 6
    assert done.out.startswith(f"{to}: 4 matrices at {values['bits']:.2f} bits a weight, ")
    assert os.listdir(to.parent) == ["pack"]
    names = {"ralo.json", "tokenizer.json", "tokenizer_config.json", "weights.safetensors"}
    assert {f.name for f in to.iterdir()} == names
    assert (to / "weights.safetensors").read_bytes() == (proc_made / "weights.safetensors").read_bytes()
    info = json.loads((to / "ralo.json").read_text())
    assert info["format"] == 2 and info["proc"]["settings"]["bits"] == 4.2 and len(info["proc"]["matrices"]) == 4


def test_runs_alone_and_over_its_model(proc_model: Path, proc_made: Path) -> None:
    alone, over = ralo("run", "-m", proc_made, *RUN), ralo("run", "-m", proc_model, "--proc-pack", proc_made, *RUN)
    assert (alone.code, over.code) == (0, 0) and "Traceback" not in alone.err + over.err
    assert len(last_line(alone.out)["text"]) > 0 and last_line(over.out)["quant"] == "int8"
    assert last_line(over.out)["metrics"]["proc.mem_ratio"] < 0.5
    assert last_line(alone.out).get("metrics", {}) == {}  # no mode is on


def test_ppl_beside_dense(
    proc_model: Path, proc_made: Path, proc_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(proc_flags[proc_flags.index("--text") + 1])
    measured = ["--text", str(text), "--ctx", "64", "--tokens", "100", "--json"]
    assert main(["ppl", "-m", str(proc_model), "--proc-pack", str(proc_made), *measured]) == 0
    over = last_line(capsys.readouterr().out)
    assert main(["ppl", "-m", str(proc_made), *measured]) == 0
    alone = last_line(capsys.readouterr().out)
    assert over["ppl"] == alone["ppl"] == alone["dense_ppl"] != over["dense_ppl"] and over["kl"] > 0
    assert over["metrics"]["proc.trims"] == 0 and over["metrics"]["guard.nonfinite"] == 0
    assert main(["ppl", "-m", str(proc_model), "--proc-pack", str(proc_made), "--proc-sparse=off", *measured]) == 0
    assert last_line(capsys.readouterr().out)["ppl"] == over["dense_ppl"]
    expected = load(proc_model, modes=[Proc(pack=str(proc_made))]).perplexity(text.read_text(), ctx=64, tokens=100)
    assert over["ppl"] == pytest.approx(expected.ppl)


def test_explain_a_pack(proc_made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "-m", str(proc_made), "--json"]) == 0
    rows = last_line(capsys.readouterr().out)["rows"]
    assert [r["storage"] for r in rows] == ["int8", "int8", "proc", "proc"] * 2 + ["int8"]
    assert [r["bytes"] for r in rows] == [m.nbytes for m in load(proc_made).model.weights.matrices().values()]


def test_explain_a_pack_over_its_model(proc_model: Path, proc_made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "-m", str(proc_model), "--proc-pack", str(proc_made), "--json"]) == 0
    over = last_line(capsys.readouterr().out)
    assert main(["explain", "-m", str(proc_made), "--json"]) == 0
    alone = last_line(capsys.readouterr().out)
    assert ["bits a weight" in r["runs"] for r in over["rows"]] == [False, False, True, True] * 2 + [False]
    for ours, theirs in zip(over["rows"], alone["rows"], strict=True):
        assert (ours["storage"], ours["bytes"]) == (theirs["storage"], theirs["bytes"])
    assert over["weight_bytes_per_token"] == alone["weight_bytes_per_token"]


# ---------------------------------------------------------------- interrupted, and resumed


def interrupted(monkeypatch: pytest.MonkeyPatch, flags: list[str], to: Path, at: int = 1) -> int:
    """A build that is stopped when it comes to that layer."""
    build_layer = remake_model.build_layer

    def stop(dense: Any, index: int, *rest: Any) -> Any:
        if index == at:
            raise KeyboardInterrupt
        return build_layer(dense, index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(remake_model, "build_layer", stop)
        return main(["pack", *flags, "-o", str(to)])


@pytest.mark.parametrize("at", [0, 1])
def test_goes_on_where_it_was_stopped(
    at: int,
    proc_flags: list[str],
    proc_made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    to = tmp_path / "pack"
    assert interrupted(monkeypatch, proc_flags, to, at) == 130
    assert capsys.readouterr().err.count("\n") == 1
    assert os.listdir(tmp_path) == ["pack.building"]
    assert len(list((tmp_path / "pack.building").glob("layer-*"))) == at
    assert main(["pack", *proc_flags, "-o", str(to), "--json"]) == 0
    assert last_line(capsys.readouterr().out)["resumed_layers"] == at
    assert os.listdir(tmp_path) == ["pack"]
    for name in ("weights.safetensors", "ralo.json"):
        assert (to / name).read_bytes() == (proc_made / name).read_bytes()


def test_a_damaged_part_is_made_again(
    proc_flags: list[str],
    proc_made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    to = tmp_path / "pack"
    interrupted(monkeypatch, proc_flags, to)
    part = next((tmp_path / "pack.building").glob("layer-*"))
    part.write_bytes(part.read_bytes()[:-100])
    assert main(["pack", *proc_flags, "-o", str(to)]) == 0
    assert (to / "weights.safetensors").read_bytes() == (proc_made / "weights.safetensors").read_bytes()


def test_a_part_with_other_bytes_is_made_again(
    proc_flags: list[str],
    proc_made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    to = tmp_path / "pack"
    interrupted(monkeypatch, proc_flags, to)
    part = next((tmp_path / "pack.building").glob("layer-*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert main(["pack", *proc_flags, "-o", str(to)]) == 0
    assert (to / "weights.safetensors").read_bytes() == (proc_made / "weights.safetensors").read_bytes()


def test_a_damaged_budget_is_said(
    proc_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to, folder = tmp_path / "pack", tmp_path / "pack.building"
    interrupted(monkeypatch, proc_flags, to)
    capsys.readouterr()
    for content in ("", "{}x", "[1]", "[[1]]", "7"):
        (folder / "budget.json").write_text(content)
        line = refused(capsys, "pack", *proc_flags, "-o", to)
        assert f"{folder / 'budget.json'}: is damaged; remove {folder} and pack again" in line


def test_other_settings_while_it_is_there(
    proc_model: Path,
    proc_flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    to, folder = tmp_path / "pack", tmp_path / "pack.building"
    interrupted(monkeypatch, proc_flags, to)
    capsys.readouterr()
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    for change, said in (
        (["--proc-bits", "5"], "bits was 4.2"),
        (["--proc-deltas", "0.2"], "deltas was 0.001"),
        (["--proc-target=attn"], "target was 'mlp'"),
        (["--quant", "int4"], "quant was 'int8'"),
        (["--tokens", "601"], "text was '"),
    ):
        line = refused(capsys, "pack", *proc_flags, *change, "-o", to)
        assert line.startswith(f"ralo pack: {folder}: is of a pack with other settings ({said}"), line
        assert line.endswith("); use those, or remove it")
    (folder / "settings.json").write_text("not json")
    assert "is of a pack with other settings (unreadable); use those, or" in refused(
        capsys, "pack", *proc_flags, "-o", to
    )
    assert {f.name: f.read_bytes() for f in folder.iterdir() if f.name in before} == before | {
        "settings.json": b"not json"
    }
