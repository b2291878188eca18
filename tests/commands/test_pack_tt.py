"""`ralo pack --tt=on` and the commands that use such a pack, alone or over the model it was made from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commandline import last_line, ralo, refused
from test_pack_proc import interrupted

from ralo.cli import main
from ralo.lm import load
from ralo.modes import TT
from ralo.tt.build import build
from ralo.tt.pack import NOT_WORTH
from ralo.weights import PLACES

RUN = ("-p", "the house", "-n", 12, "--temperature", 0, "--json")
PLACED = [f"layers.{i}.{place}" for i in range(2) for place in PLACES]


def done(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[str, dict]:
    """What a command shows, and its last line."""
    assert main([str(arg) for arg in (*args, "--json")]) == 0
    out = capsys.readouterr().out
    return out, last_line(out)


def test_packs_and_says_what_it_made(tt_flags, tt_made: Path, tmp_path: Path, capsys, always_faster) -> None:
    to = tmp_path / "new" / "pack"
    out, values = done(capsys, "pack", *tt_flags, "-o", to)
    assert set(values) == {"path", "quant", "bytes", "factored", "refused", "seconds", "resumed_layers"}
    assert (values["path"], values["quant"], values["resumed_layers"]) == (str(to), "int8", 0)
    assert sorted([*values["factored"], *values["refused"]]) == sorted(PLACED)
    factored, dense = len(values["factored"]), len(values["refused"])
    assert f"{to}: {factored} matrices are factors, {dense} stay dense, " in out and factored > 5
    assert values["bytes"] == sum(f.stat().st_size for f in to.iterdir())
    shown = [line.split()[0] for line in out.splitlines() if line.strip().startswith("layers.")]
    assert shown == [f"layers.{i}.{place}" for i in range(2) for place in sorted(PLACES)]
    for name, record in values["factored"].items():
        assert 0 < record["gap"] < 0.3 and record["speedup"] == 1.25 and record["rest"] == name.endswith(("up", "down"))
        assert record["ranks"][0] % 64 == 0 and record["quants"] == [["int8"], ["int4"]][record["rest"]] * 2
    assert os.listdir(to.parent) == ["pack"]
    info = json.loads((to / "ralo.json").read_text())
    assert info["format"] == 3 and info["tt"]["matrices"] == values["factored"]
    assert info["tt"]["refused"] == values["refused"] and info["tt"]["settings"]["share"] == 0.7
    for name in ("weights.safetensors", "ralo.json"):  # the same again is the same bytes
        assert (to / name).read_bytes() == (tt_made / name).read_bytes()


def test_runs_alone_and_over_its_model(tt_model: Path, tt_made: Path) -> None:
    alone, over = ralo("run", "-m", tt_made, *RUN), ralo("run", "-m", tt_model, "--tt-pack", tt_made, *RUN)
    assert (alone.code, over.code) == (0, 0) and "Traceback" not in alone.err + over.err
    assert len(last_line(alone.out)["text"]) > 0 and last_line(alone.out).get("metrics", {}) == {}
    found = last_line(over.out)["metrics"]
    assert found["tt.enabled"] > 5 and found["tt.speedup"] == 1.25 and found["guard.nonfinite"] == 0
    assert 64 <= found["tt.rank"] <= 128 and 0 < found["tt.gap"] < 0.3 and found["tt.mem_saved"] > 0


def test_ppl_beside_dense(tt_model: Path, tt_made: Path, capsys) -> None:
    text = tt_model.with_name("text.txt")
    measured = ["--text", text, "--ctx", 64, "--tokens", 100]
    over = done(capsys, "ppl", "-m", tt_model, "--tt-pack", tt_made, *measured)[1]
    alone = done(capsys, "ppl", "-m", tt_made, *measured)[1]
    assert over["ppl"] == alone["ppl"] == alone["dense_ppl"] != over["dense_ppl"] and over["kl"] > 0
    assert over["metrics"]["tt.enabled"] > 5
    off = done(capsys, "ppl", "-m", tt_model, "--tt-pack", tt_made, "--tt=off", *measured)[1]
    assert off["ppl"] == over["dense_ppl"]
    expected = load(tt_model, modes=[TT(pack=str(tt_made))]).perplexity(text.read_text(), ctx=64, tokens=100)
    assert over["ppl"] == pytest.approx(expected.ppl)


def test_explain_a_pack_alone_and_over_its_model(tt_model: Path, tt_made: Path, capsys) -> None:
    said = json.loads((tt_made / "ralo.json").read_text())["tt"]
    storage = ["tt" if name in said["matrices"] else "int8" for name in PLACED] + ["int8"]
    alone = done(capsys, "explain", "-m", tt_made)[1]
    assert [r["storage"] for r in alone["rows"]] == storage
    assert [r["bytes"] for r in alone["rows"]] == [m.nbytes for m in load(tt_made).model.weights.matrices().values()]
    over = done(capsys, "explain", "-m", tt_model, "--tt-pack", tt_made)[1]
    for ours, theirs in zip(over["rows"], alone["rows"], strict=True):
        assert (ours["storage"], ours["bytes"]) == (theirs["storage"], theirs["bytes"])
    assert over["weight_bytes_per_token"] == alone["weight_bytes_per_token"]
    for name, row in zip(PLACED, over["rows"], strict=False):
        why = f"dense: tt {said['refused'][name]}" if name in said["refused"] else f"tt: rank {_rank(said, name)}"
        assert row["runs"].startswith(why)


def _rank(said: dict, name: str) -> int:
    return max(said["matrices"][name]["ranks"])


@pytest.mark.parametrize("target", ["attn", "mlp"])
def test_a_target(target: str, tt_flags, tmp_path: Path, capsys, always_faster) -> None:
    flags = [*tt_flags, f"--tt-target={target}", "--tt-share", "0.9", "--quant", "int4", "--tt-rest=off"]
    values = done(capsys, "pack", *flags, "-o", tmp_path / "pack")[1]
    places = {"attn": ("qkv", "o"), "mlp": ("up", "down")}[target]
    assert sorted([*values["factored"], *values["refused"]]) == sorted(n for n in PLACED if n.endswith(places))
    assert values["factored"] and not any(r["rest"] for r in values["factored"].values())
    assert {q for r in values["factored"].values() for q in r["quants"]} == {"int4"}


def test_by_layer(tt_flags, tmp_path: Path, capsys, always_faster) -> None:
    plan, where = tmp_path / "plan.toml", "[[tt.where]]\n"
    plan.write_text(
        f'[tt]\ntarget = "attn"\nrank = 64\n{where}layers = "1"\non = false\n{where}sites = "qkv"\ngap = 0.03\n'
    )
    values = done(capsys, "pack", *tt_flags, "--plan", plan, "-o", tmp_path / "pack")[1]
    assert {n: r["ranks"] for n, r in values["factored"].items()} == {"layers.0.qkv": [128], "layers.0.o": [64]}
    plan.write_text(f'[tt]\n{where}layers = "0"\nmaxvol-k = 3\n{where}layers = "1"\ncores = 3\n')
    line = refused(capsys, "pack", *tt_flags, "--plan", plan, "-o", tmp_path / "other")
    assert line == "ralo pack: [[tt.where]] cannot set cores for packing"
    assert not (tmp_path / "other.building").exists()


# ---------------------------------------------------------------- refused, all of them


def test_the_document_s_own_settings_refuse_everything(tt_model: Path, tt_flags, tmp_path: Path, capsys) -> None:
    to, literal = tmp_path / "pack", ["--tt-rank=4", "--tt-maxvol-k=8", "--tt-gap=0.02", "--tt-form=seed"]
    out, values = done(capsys, "pack", *tt_flags, *literal, "-o", to)
    assert values["factored"] == {} and sorted(values["refused"]) == sorted(PLACED)
    for name, why in values["refused"].items():
        assert why.startswith("misses ") and why.endswith(
            ", the most that takes fewer multiplications, and may miss 0.02"
        ), name
        assert why in out
    assert f"{to}: 0 matrices are factors, 8 stay dense, " in out
    over, dense = done(capsys, "run", "-m", tt_model, "--tt-pack", to, *RUN[:-1]), load(tt_model)
    assert over[1]["text"] == dense.generate("the house", 12, temperature=0).text
    assert over[1].get("metrics", {}) == {}
    rows = done(capsys, "explain", "-m", tt_model, "--tt-pack", to)[1]["rows"]
    assert [r["runs"] for r in rows[:8]] == [f"dense: tt {values['refused'][name]}" for name in PLACED]
    alone = done(capsys, "run", "-m", to, *RUN[:-1])[1]
    assert alone["text"] == over[1]["text"] and alone["quant"] == "int8"


def test_what_is_not_faster_is_refused(tt_flags, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("ralo.tt.build.speedup", lambda made, dense: 0.5)
    values = done(capsys, "pack", *tt_flags, "--tt-target=mlp", "-o", tmp_path / "pack")[1]
    assert values["factored"] == {}
    assert set(values["refused"].values()) == {"keeps the gap at rank 64, but is 0.50 times as fast"}


def test_a_share_that_leaves_nothing_to_save(tt_flags, tmp_path: Path, capsys, always_faster) -> None:
    flags = [*tt_flags, "--tt-target=attn", "--tt-share=1"]
    values = done(capsys, "pack", *flags, "-o", tmp_path / "pack")[1]
    assert values["factored"] == {} and set(values["refused"].values()) == {NOT_WORTH}


# ---------------------------------------------------------------- interrupted, and resumed


@pytest.mark.parametrize("at", [0, 1])
def test_goes_on_where_it_was_stopped(
    at: int, tt_flags, tt_made: Path, tmp_path: Path, monkeypatch, capsys, always_faster
) -> None:
    to = tmp_path / "pack"
    assert interrupted(monkeypatch, tt_flags, to, at) == 130
    assert capsys.readouterr().err.count("\n") == 1
    assert os.listdir(tmp_path) == ["pack.building"]
    assert len(list((tmp_path / "pack.building").glob("layer-*"))) == at
    monkeypatch.setattr("ralo.tt.pack._ranks", None)  # they are known
    built: list[object] = []
    monkeypatch.setattr("ralo.tt.pack.build", lambda *args: built.append(args) or build(*args))
    out, values = done(capsys, "pack", *tt_flags, "-o", to)
    assert 4 * (2 - at) - len(values["refused"]) <= len(built) <= 4 * (2 - at)  # what is known is not made again
    assert values["resumed_layers"] == at and (", 1 layers were there already" in out) == (at == 1)
    assert os.listdir(tmp_path) == ["pack"]
    for name in ("weights.safetensors", "ralo.json"):
        assert (to / name).read_bytes() == (tt_made / name).read_bytes()


def test_a_damaged_part_is_made_again(tt_flags, tt_made: Path, tmp_path: Path, monkeypatch, capsys, always_faster):
    to = tmp_path / "pack"
    interrupted(monkeypatch, tt_flags, to)
    part = next((tmp_path / "pack.building").glob("layer-*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    values = done(capsys, "pack", *tt_flags, "-o", to)[1]
    assert values["resumed_layers"] == 0
    assert (to / "weights.safetensors").read_bytes() == (tt_made / "weights.safetensors").read_bytes()


def test_other_settings_while_it_is_there(tt_flags, tmp_path: Path, monkeypatch, capsys, always_faster) -> None:
    to = tmp_path / "pack"
    interrupted(monkeypatch, tt_flags, to)
    capsys.readouterr()
    for change, said in ((["--tt-share", "0.5"], "share was 0.7"), (["--tt-form=svd"], "form was 'best'")):
        line = refused(capsys, "pack", *tt_flags, *change, "-o", to)
        assert f"pack.building: is of a pack with other settings ({said}" in line
