"""ralo tune: a plan that the other commands take, found again from its record, whatever happens on the way."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import environment, last_line, refused
from commandline import ralo as command
from tuning import FLAGS, tune, write_tunable, write_words

import ralo
from ralo import RaloError, peer, timing
from ralo.cli import main
from ralo.matrix import Matrix
from ralo.modes import Mix
from ralo.modes.share import KEEP_ALL
from ralo.plan import read_plan
from ralo.profile import Profile
from ralo.tune.trial import UNSEEN, Trials, packed_bytes
from ralo.weights import PLACES, LayerWeights

REAL = Trials._gain


def by_bytes(self: Trials, ctx: int, rounds: int) -> dict[str, Any]:
    """How much less is read, for how much faster: the same on every machine."""
    model, read = self.lm.model, []
    for dense in (False, True):
        seq, before = self.lm.new_sequence(), model.bytes_read
        for token in self.texts.dial[: ctx + 2]:
            model.step(token, seq, dense)
        read.append(model.bytes_read - before)
    speed = read[1] / read[0] * (0.5 if self.lm.plan.verified else 1.0)
    figures = {"ctx": ctx, "speedup": speed, "low": speed, "high": speed, "tok_s": 100 * speed, "dense_tok_s": 100.0}
    return figures | {"nbytes": packed_bytes(model), "dense_nbytes": model.weights.nbytes, "cache_nbytes": seq.nbytes}


def seconds_by_bytes(layers: Sequence[LayerWeights]) -> dict[str, np.ndarray]:
    """Of a layer at some shares of its channels."""
    shares = np.array(timing.TIMED, np.float32)
    return {place: np.stack([shares, shares * getattr(layers[0], place).nbytes * 1e-9]) for place in PLACES}


def places_by_bytes(lm: ralo.LM, profile: Profile, tokens: Sequence[int]) -> timing.Places:
    """Of whole channels, of lists by halves, and of all of them in tiles."""
    layers = lm.model.weights.layers
    whole, halved = seconds_by_bytes(layers), all(layer.up.quant == "int8" for layer in layers)
    if not halved:
        return timing.Places(whole, {}, {})
    tiled = {place: 0.545 * float(found[1, -1]) for place, found in whole.items()}
    return timing.Places(whole, {place: found * [[1], [0.55]] for place, found in whole.items()}, tiled)


def coarse_by_bytes(
    lm: ralo.LM, profile: Profile, tokens: Sequence[int], layers: Sequence[LayerWeights], head: Matrix | None
) -> timing.Coarse:
    own = lm.model.weights.head.nbytes * 1e-9
    return timing.Coarse(seconds_by_bytes(layers), own, own if head is None else head.nbytes * 1e-9)


def bytes_for_clocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trials, "_gain", by_bytes)
    patch.setattr(timing, "seconds", places_by_bytes)
    patch.setattr(timing, "coarse_seconds", coarse_by_bytes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tunable(tmp_path_factory.mktemp("tune") / "model")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("words") / "text.txt")


@pytest.fixture(scope="module", autouse=True)
def plain_clocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        bytes_for_clocks(patch)
        yield


class Tuned:
    """A plan and what was said of it."""

    def __init__(self, model: Path, words: Path, path: Path, *flags: object) -> None:
        self.flags = ("-m", model, "--text", words, *FLAGS, *flags, "-o", path)
        self.model, self.path, self.record = model, path, path.with_suffix(".tune.json")
        done = streams(*self.flags, "--json")
        self.out, self.err, self.said = done[0], done[1], last_line(done[0])
        self.tables = tomllib.loads(path.read_text())

    def names(self) -> list[str]:
        return [row["name"] for row in self.said["rows"]]


def streams(*flags: object) -> tuple[str, str]:
    """What a run in this process says on its two streams."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert tune(*flags) == 0
    return out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def tuned(model: Path, words: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return Tuned(model, words, tmp_path_factory.mktemp("plans") / "plan.toml")


def again(tuned: Tuned, to: Path) -> Path:
    """A copy of the plan and all that lies beside it."""
    shutil.copytree(tuned.path.parent, to)
    return to / tuned.path.name


# ---------------------------------------------------------------- the plan, and who takes it


def test_what_is_said(tuned: Tuned, model: Path) -> None:
    said = tuned.said
    assert set(said) >= {"plan", "quant", "best", "rows", "spent_s"}
    assert said["plan"] == str(tuned.path) and said["quant"] == "int8" and said["spent_s"] > 0
    best = said["best"]
    figures = {"name", "speed", "gains", "delta_ppl_pct", "low", "high", "kl", "top1_agree", "tokens", "kept", "modes"}
    assert all(set(row) >= figures for row in [best, *said["rows"]])
    assert best in said["rows"] and [row["kept"] for row in said["rows"]].count(True) == 1
    assert best["speed"] == max(row["speed"] for row in said["rows"] if row["delta_ppl_pct"] <= 20) > 1
    assert best["delta_ppl_pct"] <= 20 and best["low"] <= best["delta_ppl_pct"] <= best["high"]
    assert [gain["ctx"] for gain in best["gains"]] == [8]
    assert {"event", "all together", "kwta alone", "mix alone"} <= set(tuned.names())
    assert not any("gate" in name for name in tuned.names()), "nothing shuts neurons here"
    assert f"{tuned.path}: {best['name']}, {best['speed']:.2f}x dense" in tuned.out
    assert f"ralo run --plan {tuned.path} runs it" in tuned.out


def test_the_plan_says_what_was_found(tuned: Tuned, model: Path) -> None:
    about, best = tuned.tables["about"], tuned.said["best"]
    assert tuned.tables["profile"] == "plan.profile" and (tuned.path.parent / "plan.profile").is_file()
    assert {k: v for k, v in tuned.tables.items() if k not in ("about", "profile")} == best["modes"]
    assert about["found"] == best["name"] and about["speed"] == round(best["speed"], 4)
    assert about["ralo"] == ralo.__version__ and about["max_dppl"] == 20 and about["profile"] == "latency"
    assert about["delta_ppl_pct"] == round(best["delta_ppl_pct"], 5) and about["quant"] == "int8"
    assert [m["ctx"] for m in about["measured"]] == [8]
    assert sorted(p.name for p in tuned.path.parent.iterdir()) == ["plan.profile", "plan.toml", "plan.tune.json"]


def test_others_take_it(tuned: Tuned, words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("-m", str(tuned.model), "--plan", str(tuned.path), "--threads", "1")
    modes = set(tuned.said["best"]["modes"])
    assert "mix" in modes, "halving what is read is worth it within 20 %"
    assert main(["run", *flags, "-n", "6", "--json"]) == 0
    out, err = capsys.readouterr()
    assert {name.split(".")[0] for name in last_line(out)["metrics"]} - {"guard"} == modes
    assert "measured with" not in err
    assert main(["explain", *flags, "--json"]) == 0
    rows = last_line(capsys.readouterr().out)["rows"]
    assert any("mix: int4" in row["runs"] for row in rows)
    assert main(["ppl", *flags, "--text", str(words), "--tokens", "200", "--json"]) == 0
    assert last_line(capsys.readouterr().out)["kl"] > 0


def test_load_takes_it(tuned: Tuned) -> None:
    lm, dense = ralo.load(tuned.model, plan=tuned.path, threads=1), ralo.load(tuned.model, threads=1)
    assert lm.plan.modes == read_plan(tuned.path).plan.modes and lm.warnings == []
    assert lm.profile is not None and dense.profile is None
    token = 40
    ours, plain = (each.model.step(token, each.new_sequence()) for each in (lm, dense))
    assert np.isfinite(ours).all() and not np.array_equal(ours, plain)
    assert np.array_equal(lm.model.step(token, lm.new_sequence(), dense=True), plain)
    with pytest.raises(ralo.RaloError, match="of modes, plan and setup more than one is given"):
        ralo.load(tuned.model, plan=tuned.path, modes=[Mix()])


def test_the_plan_does_what_was_measured(tuned: Tuned, words: Path) -> None:
    """On the text that it was checked with, which the seed says."""
    from ralo.quality import perplexity
    from ralo.tune.task import split

    lm = ralo.load(tuned.model, plan=tuned.path, threads=1)
    check = split(lm.encode(words.read_text()), 0).check
    found = perplexity(lm.model, check, 512, lm.kv, exact=False)
    assert found.delta_ppl_pct == pytest.approx(tuned.said["best"]["delta_ppl_pct"], abs=1e-6)
    assert found.tokens == tuned.said["best"]["tokens"]


# ---------------------------------------------------------------- once more


def test_running_it_again_measures_nothing_and_writes_the_same(tuned: Tuned, tmp_path: Path) -> None:
    path = again(tuned, tmp_path / "again")
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    path.unlink()
    out, _ = streams(*tuned.flags[:-1], path, "--json")
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    assert " 0 of them new; " in out
    assert last_line(out) == tuned.said | {"plan": str(path)}


def test_the_same_figures_give_the_same_plan(tuned: Tuned, words: Path, tmp_path: Path) -> None:
    """Also where they are measured anew."""
    assert Tuned(tuned.model, words, tmp_path / "plan.toml").path.read_bytes() == tuned.path.read_bytes()


def test_another_budget_uses_the_same_measurements(tuned: Tuned, tmp_path: Path) -> None:
    path = again(tuned, tmp_path / "again")
    known = json.loads(tuned.record.read_text())["measured"]
    streams(*tuned.flags[:-1], path, "--max-dppl", "19")
    now = json.loads(path.with_suffix(".tune.json").read_text())["measured"]
    assert {name: now[name] for name in known} == known
    assert tomllib.loads(path.read_text())["about"]["max_dppl"] == 19


def test_a_record_that_lies_elsewhere(tuned: Tuned, words: Path, tmp_path: Path, capsys) -> None:
    again(tuned, tmp_path / "other")
    (tmp_path / "here").mkdir()
    path, record = tmp_path / "here" / "mine.toml", tmp_path / "other" / "plan.tune.json"
    record = record.rename(record.with_name("plan.json"))
    assert tune(*tuned.flags[:-1], path, "--record", record) == 0
    assert " 0 of them new; " in capsys.readouterr().out
    assert [p.name for p in path.parent.iterdir()] == ["mine.toml"]
    assert read_plan(path).profile.resolve() == tmp_path / "other" / "plan.profile"
    assert main(["run", "-m", str(tuned.model), "--plan", str(path), "-n", "2"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seed", "1"), "plan.tune.json: was measured with seed 0, not 1; choose another --record"),
        (("--ctx", "9"), "was measured with ctx '8', not '9'"),
        (("--kv", "int8"), "was measured with kv 'f16', not 'int8'"),
        (("--threads", "2"), "was measured with threads 1, not 2"),
    ],
)
def test_a_record_of_something_else(tuned: Tuned, flags, message, capsys) -> None:
    before = {file: file.read_bytes() for file in tuned.path.parent.iterdir()}
    assert tune(*tuned.flags, *flags) == 2
    *warnings, error = capsys.readouterr().err.splitlines()
    assert message in error and error.startswith("ralo tune: ") and all("give more text" in line for line in warnings)
    assert {file: file.read_bytes() for file in tuned.path.parent.iterdir()} == before


def test_a_text_that_changed(model: Path, words: Path, tmp_path: Path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text(words.read_text())
    flags = ("-m", model, "--text", text, *FLAGS, "--quant", "int8", "-o", tmp_path / "plan.toml")
    assert tune(*flags) == 0
    text.write_text(words.read_text()[::-1])
    capsys.readouterr()
    assert tune(*flags) == 2
    assert "was measured with text" in capsys.readouterr().err.splitlines()[-1]


def test_a_damaged_record(tuned: Tuned, tmp_path: Path, capsys) -> None:
    path = again(tuned, tmp_path / "again")
    path.with_suffix(".tune.json").write_text("{")
    assert tune(*tuned.flags[:-1], path) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("plan.tune.json: is not a record of measurements; choose another --record")


def test_a_profile_that_is_gone_is_made_again(tuned: Tuned, tmp_path: Path) -> None:
    path = again(tuned, tmp_path / "again")
    path.with_suffix(".profile").unlink()
    out, _ = streams(*tuned.flags[:-1], path)
    assert path.with_suffix(".profile").is_file() and " 0 of them new; " not in out


# ---------------------------------------------------------------- cut short


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import pytest, test_tune
from ralo.cli import main
test_tune.bytes_for_clocks(pytest.MonkeyPatch())
left, replace = {left}, os.replace
def counted(*args):
    global left
    left -= 1
    if left == 0 and {late} == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*args)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = counted
raise SystemExit(main({argv!r}))
"""


def killed(argv: list[str], left: int, late: int) -> int:
    """Runs in a process that ends itself, without a word, when so many files have been put in their place."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = KILLED.format(paths=paths, left=left, late=late, argv=argv)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=120)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done.returncode


def test_a_search_that_is_killed_goes_on(tuned: Tuned, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    argv = ["tune", *map(str, tuned.flags[:-1]), str(path)]
    record, known = path.with_suffix(".tune.json"), {}
    seen = []
    for left, late in ((1, 0), (1, 1), (2, 0), (3, 1), (4, 0), (4, 1)):
        assert killed(argv, left, late) == -signal.SIGKILL
        measured = json.loads(record.read_text())["measured"] if record.exists() else {}
        assert {name: measured[name] for name in known} == known and len(measured) >= len(known)
        known = measured
        seen.append(path.exists())
        if path.exists():
            assert read_plan(path).plan.modes == ralo.load(tuned.model, plan=path, threads=1).plan.modes
    assert len(known) > 5 and not seen[0] and seen[-1], "killed before there was a plan, and after"
    streams(*argv[1:])
    now = json.loads(record.read_text())["measured"]
    assert {name: now[name] for name in known} == known and len(now) > len(known)
    plan = path.read_bytes()
    out, _ = streams(*argv[1:])
    assert path.read_bytes() == plan and " 0 of them new; " in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.profile", "plan.toml", "plan.tune.json"]


class Slow:
    """A clock on which every measurement takes 100 seconds."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 100
        return self.now


@pytest.mark.parametrize("minutes", ["0.01", "9", "25"])
def test_where_the_time_is_up(model: Path, words: Path, tmp_path: Path, minutes: str, monkeypatch) -> None:
    monkeypatch.setattr("ralo.tune.record.time", Slow())
    path = tmp_path / "plan.toml"
    flags = ("-m", model, "--text", words, *FLAGS, "--minutes", minutes, "-o", path)
    out, _ = streams(*flags, "--json")
    said, setup = last_line(out), read_plan(path)
    if minutes == "0.01":
        assert said["best"] is None and said["rows"] == [] and setup.plan.modes == ()
        assert f"{path}: nothing is faster than dense within 20 %; the plan has no mode on" in out
    else:
        assert len(said["rows"]) < 8 and (setup.plan.modes == ()) == (said["best"] is None)
    assert main(["run", "-m", str(model), "--plan", str(path), "-n", "2"]) == 0
    before = path.read_bytes()
    out, _ = streams(*flags)
    assert path.read_bytes() == before and " 0 of them new; " in out


def test_as_a_user_runs_it(model: Path, words: Path, tmp_path: Path) -> None:
    """By the clock, in a process of its own; whether anything is faster is for the machine to say."""
    path = tmp_path / "plan.toml"
    done = command(
        "tune", "-m", model, "--text", words, "--ctx", 4, "--threads", 1, "--minutes", 0.01, "-o", path, "--json"
    )
    assert done.code == 0 and "Traceback" not in done.err
    assert [line.split(":")[0] for line in done.err.splitlines()] == ["ralo tune"] * 2  # a small text
    assert last_line(done.out)["plan"] == str(path)
    assert command("run", "-m", model, "--plan", path, "-n", 4).code == 0


# ---------------------------------------------------------------- what is asked for


def rows(model: Path, words: Path, path: Path, *flags: object) -> list[dict[str, Any]]:
    return Tuned(model, words, path, *flags).said["rows"]


def test_int8_never_mixes(model: Path, words: Path, tmp_path: Path) -> None:
    found = rows(model, words, tmp_path / "plan.toml", "--quant", "int8")
    assert found and not any("mix" in row["modes"] for row in found)
    assert any("kwta" in row["modes"] for row in found)


def test_int4_mixes_everywhere(model: Path, words: Path, tmp_path: Path) -> None:
    found = rows(model, words, tmp_path / "plan.toml", "--quant", "int4", "--max-dppl", "60")
    dialled = [row for row in found if row["name"] == "all together"]
    assert dialled and all(row["modes"]["mix"] == {"on": "on"} for row in dialled)
    lm = ralo.load(model, plan=tmp_path / "plan.toml", threads=1)
    assert all(set(s.taken) >= {f"{p}_weights" for p in ("qkv", "o", "up", "down")} for s in lm.model.slots)


def test_auto_mixes_where_it_pays(tuned: Tuned) -> None:
    assert any("mix" in row["modes"] for row in tuned.said["rows"])
    alone = [row["modes"] for row in tuned.said["rows"] if row["name"] == "mix alone"]
    assert alone and all(set(modes) == {"mix"} for modes in alone)
    alone = [row["modes"] for row in tuned.said["rows"] if row["name"] == "kwta alone"]
    assert alone and all(set(modes) == {"kwta"} for modes in alone)


def test_memory_is_not_saved_by_skipping(model: Path, words: Path, tmp_path: Path) -> None:
    found = rows(model, words, tmp_path / "plan.toml", "--profile", "memory")
    assert any("mix" in row["modes"] for row in found) and not any("kwta" in row["modes"] for row in found)
    assert tomllib.loads((tmp_path / "plan.toml").read_text())["about"]["profile"] == "memory"


def test_requests_are_measured_where_throughput_counts(model: Path, words: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    assert rows(model, words, path, "--profile", "throughput", "--quant", "int8")
    named = json.loads(path.with_suffix(".tune.json").read_text())["measured"]
    assert any(name.startswith("throughput of ") for name in named)
    assert not any(name.startswith("latency of ") for name in named)


def test_without_a_budget_nothing_is_lost(model: Path, words: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    tuned = Tuned(model, words, path, "--max-dppl", "0")
    best = tuned.said["best"]
    assert best is None or (best["delta_ppl_pct"] <= UNSEEN and best["high"] <= 0.5)
    if best is None:
        assert read_plan(path).plan.modes == () and set(tuned.tables) == {"profile", "about"}


def test_seeds_cut_the_text_elsewhere(model: Path, words: Path, tmp_path: Path) -> None:
    found = [
        rows(model, words, tmp_path / f"{seed}.toml", "--seed", seed, "--quant", "int8", "--max-dppl", "1")
        for seed in (1, 2)
    ]
    assert found[0][0]["name"] == found[1][0]["name"] == "event"
    assert found[0][0]["delta_ppl_pct"] != found[1][0]["delta_ppl_pct"]


def test_neurons_that_are_silent(words: Path, tmp_path: Path) -> None:
    relu = write_tunable(tmp_path / "relu", hidden_act="relu")
    found = Tuned(relu, words, tmp_path / "plan.toml")
    assert {"state-pack mlp", "kwta gate", "kwta gate by halves"} <= set(found.names())
    assert found.said["best"] is not None
    kept: dict[str, set[float]] = {place: set() for place in PLACES}
    for row in found.said["rows"]:
        for where in row["modes"].get("kwta", {}).get("where", []):
            for place in where.get("sites", ",".join(PLACES)).split(","):
                kept[place].add(where.get("k", 1.0))
    assert min(kept["up"]) == KEEP_ALL and kept["down"] <= {1.0}, "of the neurons that are open nothing is left out"
    assert min(kept["qkv"] | kept["o"]) < KEEP_ALL
    assert main(["run", "-m", str(relu), "--plan", str(found.path), "-n", "2"]) == 0


def test_a_model_with_a_short_context(tiny: Path, words: Path, tmp_path: Path, capsys) -> None:
    """128 tokens: with what is left for an answer there is no room for a prompt."""
    path = tmp_path / "plan.toml"
    flags = ("--text", words, "--threads", "1", "--quant", "int8", "-o", path)
    assert tune("-m", tiny, *flags) == 0
    assert [m["ctx"] for m in tomllib.loads(path.read_text())["about"]["measured"]] == [0]
    shorter = write_tunable(tmp_path / "shorter", max_position_embeddings=48)
    capsys.readouterr()
    assert "--ctx 0 leaves no room in the model's context of 48" in refused(capsys, "tune", "-m", shorter, *flags)


def test_no_context_at_all_by_the_clock(model: Path, words: Path, tmp_path: Path) -> None:
    """The measurement itself, in as few rounds as there can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trials, "_gain", REAL)
        patch.setattr("ralo.tune.trial.ROUNDS", 1)
        patch.setattr("ralo.bench.STREAM_WORDS", 1 << 12)
        tuned = Tuned(model, words, tmp_path / "plan.toml", "--ctx", "0,4", "--quant", "int8")
    for row in tuned.said["rows"]:
        assert [gain["ctx"] for gain in row["gains"]] == [0, 4]
        assert all(gain["low"] <= gain["speedup"] <= gain["high"] and gain["tok_s"] > 0 for gain in row["gains"])


# ---------------------------------------------------------------- warnings


def test_a_small_text_is_warned_of(tuned: Tuned) -> None:
    lines = tuned.err.splitlines()
    assert len(lines) == 2 and all(line.endswith("is known roughly, give more text") for line in lines)
    assert lines[0].startswith("ralo tune: only ") and "to tune on" in lines[0] and "to check with" in lines[1]


def test_a_long_one_is_not(monkeypatch: pytest.MonkeyPatch, tuned: Tuned, tmp_path: Path) -> None:
    monkeypatch.setattr("ralo.commands.tune.ENOUGH", 1000)
    path = again(tuned, tmp_path / "again")
    assert streams(*tuned.flags[:-1], path)[1] == ""


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({"cpu": "Another CPU"}, (), "cpu Another CPU, this is "),
        ({"ralo": "0.0.1"}, (), f"ralo 0.0.1, this is {ralo.__version__}"),
        ({"isa": "vax"}, (), "isa vax, this is "),
        ({"cpu": "Another CPU", "ralo": "0.0.1"}, (), "cpu Another CPU, this is "),
        ({}, ("--quant", "int4"), "quant int8, this is int4"),
    ],
)
def test_measured_on_something_else(tuned: Tuned, tmp_path: Path, changes, flags, said: str, capsys) -> None:
    path = again(tuned, tmp_path / "again")
    lines = path.read_text().splitlines()
    for name, value in changes.items():
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{name} = ")]
        lines[at] = f'{name} = "{value}"'
    path.write_text("\n".join(lines))
    assert main(["run", "-m", str(tuned.model), "--plan", str(path), "-n", "2", *flags]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ralo: {path}: was measured with ") and said in line
    assert line.endswith("; its speed and quality may differ, ralo tune measures again")
    assert all(f"{name} {value}, this is " in line for name, value in changes.items())
    lm = ralo.load(tuned.model, "int4" if flags else "auto", plan=path, threads=1)
    assert len(lm.warnings) == 1 and said in lm.warnings[0]


# ---------------------------------------------------------------- refused


def test_a_plan_of_another_model(tuned: Tuned, tmp_path: Path, capsys) -> None:
    other = write_tunable(tmp_path / "other", seed=3)
    for verb in ("run", "explain"):
        said = refused(capsys, verb, "-m", other, "--plan", tuned.path)
        assert said.endswith("plan.toml: is the plan of another model; make one for this model with ralo tune")
    with pytest.raises(ralo.RaloError, match="is the plan of another model"):
        ralo.load(other, plan=tuned.path)


def test_a_plan_without_its_profile(tuned: Tuned, tmp_path: Path, capsys) -> None:
    path = again(tuned, tmp_path / "again")
    path.with_suffix(".profile").unlink()
    assert "plan.profile" in refused(capsys, "run", "-m", tuned.model, "--plan", path)


def test_names_that_toml_must_quote(model: Path, words: Path, tmp_path: Path) -> None:
    text = tmp_path / 'a "b"\n\\c\x7f é🦙.txt'
    shutil.copy(words, text)
    path = tmp_path / "plan.toml"
    assert rows(model, text, path, "--quant", "int8")
    assert tomllib.loads(path.read_text(encoding="utf-8"))["about"]["text"] == str(text)
    assert read_plan(path).about["text"] == str(text)


# ---------------------------------------------------------------- the page


def no_peer() -> None:
    raise RaloError("not here")


def test_the_page_shows_what_was_tried_and_plans_for_other_budgets(tuned: Tuned, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(peer, "check", no_peer)
    path, page = again(tuned, tmp_path / "plans"), tmp_path / "page.html"
    flags = list(tuned.flags)
    flags[flags.index("-o") + 1] = path
    streams(*flags, "--html", page)
    first = page.read_text()
    assert all(name in first for name in tuned.names()) and "llama.cpp" not in first
    best = tuned.said["best"]
    assert f"{best['gains'][0]['speedup']:.2f}x" in first and f"{best['delta_ppl_pct']:+.2f}" in first
    assert "20 %: " in first and "40 %: " not in first
    streams(*flags, "--max-dppl", "40", "--html", page)
    assert "20 %: " in page.read_text() and "40 %: " in page.read_text()
    streams(*flags, "--quant", "int8", "--html", page)
    assert "40 %: " not in page.read_text(), "a plan of another kind is not on the same curve"
