"""Modes as a user meets them: in run, ppl, bench and explain, from flags, the environment and a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import ralo, refused

from ralo.cli import main


def last_json(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def test_run_says_what_the_modes_did(tiny: Path) -> None:
    done = ralo("run", "-m", tiny, "-n", 40, "--kwta-k", 0.5, "--temperature", 0)
    assert done.code == 0 and done.err == ""
    line = done.out.splitlines()[-1]
    assert "kwta keep 0." in line and "/token skipped" in line and "checks: KL" in line and "dense" not in line


def test_run_without_modes_is_dense(tiny: Path) -> None:
    assert ", dense]" in ralo("run", "-m", tiny, "-n", 4).out.splitlines()[-1]


def test_run_as_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", str(tiny), "-n", "20", "--kwta=on", "--json"]) == 0
    found = last_json(capsys.readouterr().out)
    assert 0 < found["metrics"]["kwta.keep_ratio"] < 1 and found["metrics"]["guard.checks"] >= 1
    assert len(found["layers"]) == 2 and found["events"] == [] and found["notes"] == []


def test_environment_and_plan(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[kwta]\nk = 0.3\n")
    common = ("explain", "-m", tiny, "--json")
    by_flag = ralo(*common, "--kwta-k", 0.3)
    assert by_flag.out == ralo(*common, RALO_KWTA_K="0.3").out == ralo(*common, "--plan", tmp_path / "plan.toml").out
    assert by_flag.out != ralo(*common).out


def test_explain_names_the_mode_at_its_places(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[kwta]\nk = 0.3\n[[kwta.where]]\nlayers = "1"\nsites = "up"\non = false\n')
    done = ralo("explain", "-m", tiny, "--plan", tmp_path / "plan.toml", "--json")
    rows = {(r["layer"], r["matrix"]): r["runs"] for r in last_json(done.out)["rows"]}
    assert rows["0", "down"].startswith("kwta: keep 0.42") and rows["0", "up"].startswith("kwta: keep 0.79")
    assert rows["1", "up"] == rows["-", "head"] == "dense"


def test_ppl_beside_dense(tiny: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["ppl", "-m", str(tiny), "--text", str(text), "--tokens", "200", "--ctx", "100"]
    assert main([*args, "--json"]) == 0
    dense = last_json(capsys.readouterr().out)
    assert main([*args, "--kwta-k", "0.3", "--json"]) == 0
    found = last_json(capsys.readouterr().out)
    assert found["dense_ppl"] == pytest.approx(dense["ppl"], rel=1e-6) and found["ppl"] != found["dense_ppl"]
    assert found["delta_ppl_pct"] == pytest.approx(100 * (found["ppl"] / found["dense_ppl"] - 1), abs=1e-6)
    low, high = found["ci95"]
    assert low < found["delta_ppl_pct"] < high and found["kl"] > 0 and 0 < found["top1_agree"] <= 1
    assert found["tokens"] == 200 and "kwta.keep_ratio" in found["metrics"]


def test_bench_shows_speed_with_its_quality(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "-m", str(tiny), "--rounds", "2", "-n", "4", "--prompt-tokens", "0", "--kwta-k", "0.4"]
    assert main([*args, "--quality-tokens", "64", "--json"]) == 0
    out = capsys.readouterr().out
    assert "speed-up" in out and "Δppl %" in out
    (row,) = last_json(out)["rows"]
    assert row["speedup"] != 1 and row["dense_tok_s"] != row["tok_s"] and len(row["ci95"]) == 2
    assert row["kl"] > 0 and row["quality_tokens"] == 64 and "delta_ppl_pct" in row and row["notes"] == []


def test_bench_without_modes_has_no_quality(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-m", str(tiny), "--rounds", "1", "-n", "2", "--prompt-tokens", "0", "--json"]) == 0
    out = capsys.readouterr().out
    (row,) = last_json(out)["rows"]
    assert row["speedup"] == 1 and "kl" not in row and "speed-up" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kwta-k", "0"), "--kwta-k must be a number from 0.01 to 1, got '0'"),
        (("--kwta-duty", "0"), "--kwta-duty must be a whole number from 1 to 1024, got '0'"),
        (("--kwta-block", "8"), "--kwta-block must be one of 1, 16, 32, 64, got '8'"),
        (("--kwta", "yes"), "--kwta must be one of on, off, got 'yes'"),
        (("--kwtak", "1"), "unrecognized arguments: --kwtak 1; did you mean --kwta-k?"),
        (("--plan", "nowhere.toml"), "nowhere.toml: No such file or directory"),
        (("--kwta=on", "--profile", "nowhere"), "nowhere: cannot be opened: No such file or directory"),
        (("--kwta-gate", "on", "-m", "{opt}"), "--kwta-gate=on needs an MLP with a gate"),
    ],
)
def test_bad_settings(tiny: Path, flags: tuple[str, ...], message: str, capsys, tmp_path) -> None:
    from tiny import write_hf

    flags = tuple(f.format(opt=write_hf(tmp_path / "opt", "opt")) if "{opt}" in f else f for f in flags)
    model = () if "-m" in flags else ("-m", tiny)
    assert message in refused(capsys, "run", *model, "-n", "1", *flags)


def test_chat_takes_modes(chatty: Path) -> None:
    done = ralo("chat", "-m", chatty, "-n", 6, "--kwta-k", 0.5, stdin="hello\n")
    assert done.code == 0 and "kwta keep" in done.err
