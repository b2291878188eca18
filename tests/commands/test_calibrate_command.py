"""ralo calibrate: a plan and its profile, within the budget asked for, that the other commands take."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from commandline import ralo, refused

from ralo.cli import main


@pytest.fixture(scope="module")
def plan(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    done = ralo("calibrate", "-m", tiny, "--tokens", 300, "--often", 64, "--max-dppl", 1, "-o", path, "--json")
    assert done.code == 0 and done.err == "", done.err
    return path, json.loads(done.out.splitlines()[-1])


def test_the_plan_is_within_the_budget(plan) -> None:
    path, found = plan
    assert found["delta_ppl_pct"] <= 1 and 0 < found["k"] <= 1 and found["tokens"] == 300
    tables = tomllib.loads(path.read_text())
    assert tables["profile"] == "plan.profile" and (path.parent / "plan.profile").is_file()
    assert tables["kwta"]["k"] == found["k"] and tables["about"]["quant"] == "int8"


def test_other_commands_take_it(plan, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--plan", str(plan[0]), "--kwta-k", "0.5"]  # the plan's own k may be 1: speed depends on the moment
    assert main(["run", "-m", str(tiny), "-n", "8", *flags]) == 0
    assert "kwta keep" in capsys.readouterr().out


def test_a_plan_of_another_model(plan, chatty: Path, tmp_path: Path, capsys) -> None:
    from tiny import write_hf

    other = write_hf(tmp_path / "other", "llama", seed=3)
    assert "is the plan of another model" in refused(capsys, "run", "-m", other, "--plan", plan[0])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "-o FILE.toml is missing: the plan to write"),
        (("-o", "plan.profile"), "-o must name a .toml file, got 'plan.profile'"),
        (("-o", "x.toml", "--text", "nowhere"), "nowhere: No such file or directory"),
        (("-o", "x.toml", "--max-dppl", "-1"), "--max-dppl must be a number from 0 to 1000, got '-1'"),
        (("-o", "x.toml", "--text", "{short}"), "calibration needs at least 512, better 16384"),
    ],
)
def test_bad_input(tiny: Path, flags: tuple[str, ...], message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "short").write_text("too short")
    flags = tuple(f.format(short=tmp_path / "short") for f in flags)
    assert message in refused(capsys, "calibrate", "-m", tiny, *flags)


def test_where_it_cannot_be_written(tiny: Path, tmp_path: Path, capsys) -> None:
    short = ("calibrate", "-m", tiny, "--tokens", "256", "--often", "64", "-o")
    assert "no: no such directory" in refused(capsys, *short, tmp_path / "no" / "plan.toml")
    (tmp_path / "plan.profile").mkdir()
    assert "cannot be written" in refused(capsys, *short, tmp_path / "plan.toml")
