"""Plans: flags, environment and TOML say the same thing by one declaration, and what is wrong is said in one line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ralo.errors import RaloError
from ralo.guard import GuardOptions
from ralo.modes import KWTA, MODES, TT, Event, Mix, Proc, StatePack
from ralo.modes.base import Override
from ralo.options import Parser, fields, flag_name
from ralo.plan import Setup, add_mode_flags, read_setup, read_toml, write_toml

# Every setting of every mode at a value that is not its default.
OTHER = {
    KWTA: {
        "k": 0.7, "fine": 0.2, "k_abs": 3, "temp": 0.9, "duty": 4, "target": "mlp", "block": "32", "renorm": "on",
        "gate": "off", "predict": "on", "keys": 0.5, "keys_min": 7, "prefill": "on", "form": "seed", "on": "off",
        "p": 0.9, "head": "on",
    },
    Proc: {
        "on": "off", "pack": "somewhere", "target": "both", "bits": 3.0, "deltas": 0.01, "generator": "hash",
        "watermark": 7, "shed_eps": 0.5, "fanout": 8, "block": "16", "base_scale": 0.0, "form": "seed",
    },
    TT: {
        "on": "off", "pack": "somewhere", "target": "mlp", "share": 0.5, "rank": 8, "maxvol_k": 16, "gap": 0.1,
        "rest": "on", "cores": 3, "form": "seed",
    },
    Mix: {"on": "off", "pack": "somewhere", "quant": "int8", "target": "mlp", "head": "on"},
    StatePack: {
        "on": "none", "target": "kv", "eps": "0.5", "popcnt": "kernighan", "rho": 0.3, "keys": 0.1, "p": 0.9,
        "sinks": 0, "recent": 64, "min_ctx": 7, "rest": "off", "check": 0, "gap": 0.2, "mix": 0.5, "form": "seed",
        "predict": "on", "candidates": 0.5, "bits": 4,
    },
    Event: {
        "on": "off", "budget_ms": 25.0, "quorum": 0.5, "topk": 0.3, "delta_theta": 0.2, "gap_tol": 0.1,
        "gap_every": 64, "target": "attn", "conv_eps": 0.01, "conv_j": 4, "stale_beta": 0.5, "stale_lambda": 0.2,
        "age_max": 16, "keys": 64, "hold": 8, "head_gap": 0.2, "query_theta": 0.5, "min_ctx": 7, "block": "16",
        "deltas": "all", "verify": "on", "record": "levels", "replay": "levels", "form": "seed",
    },
}  # fmt: skip
NEEDED = {"record": {"budget_ms": 5.0}, "replay": {"budget_ms": 5.0}}  # settings that are refused alone
CASES = [(mode, name, value) for mode, values in OTHER.items() for name, value in values.items()]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLAN", "PROFILE", *(flag_name(f, m.name) for m in MODES.values() for f in fields(m))):
        monkeypatch.delenv("RALO_" + name.upper().replace("-", "_"), raising=False)


def setup(*args: str) -> Setup:
    parser = Parser(prog="trial")
    add_mode_flags(parser)
    return read_setup(parser.parse_args(args))


def plan_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return str(path)


def test_every_setting_is_tried() -> None:
    for mode in MODES.values():
        assert set(OTHER[mode]) == {f.name for f in fields(mode)}
        assert all(value != getattr(mode(), name) for name, value in OTHER[mode].items())


@pytest.mark.parametrize(("mode", "name", "value"), CASES, ids=lambda v: str(v))
def test_flags_environment_and_plan_agree(mode, name, value, tmp_path, monkeypatch):
    settings = NEEDED.get(name, {}) | {name: value}
    flags = {flag_name(f, mode.name): settings[f.name] for f in fields(mode) if f.name in settings}
    keys = [f"{k.replace('_', '-')} = {v if isinstance(v, int | float) else repr(v)}" for k, v in settings.items()]
    by_flag = setup(*(f"--{flag}={v}" for flag, v in flags.items()))
    by_plan = setup("--plan", plan_file(tmp_path, "\n".join([f"[{mode.name}]", *keys]).replace(chr(39), chr(34))))
    for flag, v in flags.items():
        monkeypatch.setenv("RALO_" + flag.upper().replace("-", "_"), str(v))
    by_environment = setup()
    assert by_flag == by_plan == by_environment
    if name == "on":
        assert by_flag.plan.modes == ()
    else:
        assert by_flag.plan.modes == (mode(**settings),)


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_file(tmp_path, "[kwta]\nk = 0.2\nduty = 3\ntemp = 0.7\n")
    monkeypatch.setenv("RALO_KWTA_K", "0.3")
    monkeypatch.setenv("RALO_KWTA_DUTY", "5")
    assert setup("--plan", plan, "--kwta-k", "0.6").plan.modes == (KWTA(k=0.6, duty=5, temp=0.7),)
    monkeypatch.setenv("RALO_PLAN", plan)
    assert setup("--kwta=off").plan.modes == ()


def test_a_flag_without_its_value() -> None:
    """As the specification writes it: bits are counted in the fastest way, and the mode is on."""
    assert setup("--state-pack-popcnt").plan.modes == (StatePack(popcnt="auto"),)
    assert setup("--state-pack-popcnt", "--state-pack-keys=9").plan.modes == (StatePack(keys=9),)
    with pytest.raises(SystemExit):
        setup("--state-pack-keys")


def test_nothing_set_is_dense() -> None:
    assert setup() == Setup()
    assert setup("--guard-every", "7") == Setup(guard=GuardOptions(every=7))


def test_overrides_by_layer_and_site(tmp_path: Path) -> None:
    text = """
profile = "near.profile"
[kwta]
k = 0.5
[[kwta.where]]
layers = "0,2-3"
k = 0.9
[[kwta.where]]
layers = 3
sites = ["down", "o"]
k = 0.3
[[kwta.where]]
sites = "qkv, up"
on = false
[guard]
every = 9
"""
    found = setup("--plan", plan_file(tmp_path, text))
    (mode,) = found.plan.modes
    assert isinstance(mode, KWTA)
    assert found.profile == tmp_path / "near.profile" and found.guard.every == 9
    assert mode.where[0] == Override(frozenset({0, 2, 3}), None, {"k": 0.9})
    assert mode.at(1, "down").k == 0.5 and mode.at(2, "down").k == 0.9
    assert mode.at(3, "down").k == mode.at(3, "o").k == 0.3
    assert mode.at(3, "qkv").k == 0.9 and not mode.at(3, "qkv").enabled and mode.at(3, "o").enabled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[kwtaa]\nk = 0.5",
            "unknown key 'kwtaa'; did you mean kwta? (keys: proc, tt, mix, state-pack, kwta, event, guard, profile,",
        ),
        ("[kwta]\ndutty = 2", "[kwta] has no key 'dutty'; did you mean duty? (keys: on, k,"),
        ("[kwta]\nk = 2", "[kwta] k must be a number from 0.01 to 1, got '2'"),
        ('[kwta]\nform = "sed"', "[kwta] form must be one of best, seed, got 'sed'; did you mean seed?"),
        ("[kwta]\nk = [1]", "[kwta] k must be one value"),
        ("[kwta]\nwhere = 3", "where must be a list of tables, [[kwta.where]]"),
        ('[[kwta.where]]\nlayers = "a"\nk = 1', "[[kwta.where]] layers must be layers as in 0,3,5-8, got 'a'"),
        ('[[kwta.where]]\nlayers = "5-3"\nk = 1', "[[kwta.where]] layers must be layers as in 0,3,5-8, got '5-3'"),
        ('[[kwta.where]]\nlayers = "0-99999999"\nk = 1', "layers must be layers as in 0,3,5-8, got '0-99999999'"),
        ('[[kwta.where]]\nsites = "q"\nk = 1', "got 'q': it shares its input with q and k and v, say qkv"),
        ('[[kwta.where]]\nsites = "dwn"\nk = 1', "must be of qkv, o, up, down, got 'dwn'; did you mean down?"),
        ("[[kwta.where]]\nlayers = 1", "[[kwta.where]] sets nothing: say what differs there, as in k = 0.5"),
        ("[[kwta.where]]\nlayer = 1\nk = 1", "[[kwta.where]] has no key 'layer'; did you mean layers?"),
        ("kwta = 3", "kwta must be a table"),
        ("profile = {}", "profile must be a path"),
        ("[kwta", "is not a plan: "),
        ('[state-pack]\npopcnt = "lutt"', "[state-pack] popcnt must be one of auto, kernighan, lut, "),
        ("[guard]\nkll = 3", "[guard] has no key 'kll'; did you mean kl?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = plan_file(tmp_path, text)
    with pytest.raises(RaloError) as error:
        setup("--plan", path)
    assert message in str(error.value) and str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RaloError, match=r"nowhere.toml: No such file"):
        setup("--plan", str(tmp_path / "nowhere.toml"))


def test_two_ways_to_say_how_many_win() -> None:
    with pytest.raises(RaloError, match="--kwta-k-abs and --kwta-p both say how many win"):
        setup("--kwta-k-abs", "3", "--kwta-p", "0.5")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    tables = {
        "profile": 'a "b".profile',
        "about": {"ralo": "1", "kl": 0.5},
        "kwta": {"k": 0.25, "duty": 2, "where": [{"layers": "1-2", "sites": "down", "k": 0.5}]},
    }
    write_toml(tmp_path / "plan.toml", tables)
    assert read_toml(tmp_path / "plan.toml") == tables
    (mode,) = setup("--plan", str(tmp_path / "plan.toml")).plan.modes
    assert mode == KWTA(k=0.25, duty=2, where=(Override(frozenset({1, 2}), frozenset({"down"}), {"k": 0.5}),))
    with pytest.raises(RaloError, match="cannot be written"):
        write_toml(tmp_path / "no" / "plan.toml", tables)


def test_help_lists_every_flag() -> None:
    parser = argparse.ArgumentParser()
    add_mode_flags(parser)
    shown = parser.format_help()
    for mode in MODES.values():
        assert all(f"--{flag_name(f, mode.name)} " in shown for f in fields(mode))
