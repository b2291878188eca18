"""Modes as a user meets them: in run, ppl, bench and explain, from flags, the environment and a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import ralo, refused
from tiny import write_hf

from ralo.cli import main
from ralo.modes import Event
from ralo.pace import HEADER


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
    assert rows["0", "down"] == "kwta: keep 0.42, 40 exactly, 3 of them whole, the others by halves"
    assert rows["0", "up"] == rows["1", "qkv"] == "kwta: keep all, 2 whole, the others by halves"
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
    flags = tuple(f.format(opt=write_hf(tmp_path / "opt", "opt")) if "{opt}" in f else f for f in flags)
    model = () if "-m" in flags else ("-m", tiny)
    assert message in refused(capsys, "run", *model, "-n", "1", *flags)


def test_chat_takes_modes(chatty: Path) -> None:
    done = ralo("chat", "-m", chatty, "-n", 6, "--kwta-k", 0.5, stdin="hello\n")
    assert done.code == 0 and "kwta keep" in done.err


# ---------------------------------------------------------------- event


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for a text whose keys are held."""
    model = write_hf(tmp_path_factory.mktemp("models") / "longer", "llama", vocab_size=300, eos_token_id=None,
                     max_position_embeddings=512, hidden_size=128)  # fmt: skip
    (model / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return model


HELD = ("--event-keys", "16", "--event-min-ctx", "0", "--event-hold", "8")
BUDGET = ("--event-budget-ms", "0.2", *HELD)


def ran(capsys: pytest.CaptureFixture[str], model: Path, *flags: str, tokens: int = 40) -> dict:
    """What `run` makes of a long prompt, as JSON, and its line on stderr."""
    prompt = "the other is in the house and on it\n" * 10
    args = ("run", "-m", str(model), "-p", prompt, "-n", str(tokens), "--temperature", "0", "--json", *flags)
    assert main([*args]) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    return last_json(out) | {"line": err}


def test_a_recorded_schedule_gives_the_same_text(longer: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "levels"
    first = ran(capsys, longer, *BUDGET, "--event-record", str(file))
    header, *levels = file.read_text().splitlines()
    assert header == HEADER and len(levels) == first["steps"] == 39 and {len(token) for token in levels} == {2}
    assert len(set(levels)) > 10 and first["prompt_tokens"] > 180
    assert first["text"] != ran(capsys, longer)["text"]
    for budget in ("0.2", "0.001", "1e6"):  # whatever the clock says
        again = ran(capsys, longer, *BUDGET, "--event-budget-ms", budget, "--event-replay", str(file))
        assert again["text"] == first["text"] and again["metrics"]["event.level"] == first["metrics"]["event.level"]
    other = file.with_name("other")
    ran(capsys, longer, *BUDGET, "--event-replay", str(file), "--event-record", str(other))
    assert other.read_bytes() == file.read_bytes()


def test_a_schedule_that_is_too_short(longer: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "levels").write_text(HEADER + "\n" + "00\n" * 3)
    flags = ["--event-replay", str(tmp_path / "levels"), "--json"]
    assert main(["run", "-m", str(longer), "-p", "a", "-n", "9", *BUDGET, *flags]) == 2
    said = "ralo run: the recorded schedule ends after 3 tokens: record a longer one\n"
    assert capsys.readouterr().err.lstrip("\n") == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "{file}: No such file or directory"),
        ("", "{file}: is not a schedule of 2 layers and 14 levels (--event-record writes one)"),
        ("00\n", "{file}: is not a schedule of 2 layers and 14 levels (--event-record writes one)"),
        (f"{HEADER}\n000\n", "{file}: is not a schedule of 2 layers and 14 levels (--event-record writes one)"),
        (f"{HEADER}\n0e\n", "{file}: is not a schedule of 2 layers and 14 levels (--event-record writes one)"),
        (f"{HEADER}\n0\xe4\n", "{file}: is not a recorded schedule"),
    ],
)
def test_a_bad_schedule(longer: Path, tmp_path: Path, text: str | None, said: str, capsys) -> None:
    file = tmp_path / "levels"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    message = refused(capsys, "run", "-m", longer, "-n", "9", *BUDGET, "--event-replay", file)
    assert message == "ralo run: " + said.format(file=file)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--event-record", "x"), "--event-record and --event-replay need --event-budget-ms"),
        (("--event-replay", "x"), "--event-record and --event-replay need --event-budget-ms"),
        (("--event-verify=on", "--event-budget-ms=5"), "--event-verify and --event-budget-ms do not go together"),
        (("--event-deltas", "up"), "--event-deltas must be one of o, all, got 'up'"),
    ],
)
def test_event_settings_that_do_not_go_together(longer: Path, flags: tuple[str, ...], said: str, capsys) -> None:
    assert said in refused(capsys, "run", "-m", longer, "-n", "9", *flags)


def test_a_record_that_cannot_be_written(longer: Path, tmp_path: Path, capsys) -> None:
    """It is said before any text is made."""
    flags = [*BUDGET, "--event-record", str(tmp_path / "nowhere" / "levels")]
    assert main(["run", "-m", str(longer), "-p", "the house", "-n", "3", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"ralo run: {tmp_path / 'nowhere' / 'levels'}: cannot be written: No such file or directory\n"


@pytest.mark.parametrize("sampling", [(), ("--temperature", "1", "--seed", "7")], ids=["greedy", "seed"])
@pytest.mark.parametrize("modes", [(), ("--kwta-k", "0.3")], ids=["alone", "kwta"])
def test_verified_text_is_denses(longer: Path, modes: tuple[str, ...], sampling: tuple[str, ...], capsys) -> None:
    dense = ran(capsys, longer, *sampling, tokens=80)
    found = ran(capsys, longer, *HELD, *modes, *sampling, "--event-verify=on", tokens=80)
    assert found["text"] == dense["text"] and found["new_tokens"] == 80 and "verified: " in found["line"]
    m = found["metrics"]
    assert m["verify.drafts"] > 0 and 0 <= m["verify.accept_rate"] <= 1 and 0 < m["verify.passes"] <= 79
    assert ran(capsys, longer, *HELD, *modes, *sampling, tokens=80)["text"] != dense["text"]  # not verified


def test_a_budget_as_json(longer: Path, capsys) -> None:
    found = ran(capsys, longer, "--event-budget-ms", "1e5", *HELD)
    m = found["metrics"]
    assert {name for name in m if name.startswith("event.")} == {f"event.{name}" for name in Event.metrics}
    assert 0 < m["event.budget_ms_used"] <= found["p99_ms"] < 1e5 and 0 < m["event.level"] < 12
    assert "budget 100000 ms: mean " in found["line"] and ", p99 " in found["line"]
    tight = ran(capsys, longer, "--event-budget-ms", "0.001", *HELD)
    assert tight["metrics"]["event.level"] > 10 and "budget 0.001 ms is less than the " in tight["line"]
    assert tight["metrics"]["event.bytes_skipped"] > m["event.bytes_skipped"]
