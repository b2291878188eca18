"""Which modes run and how: from a TOML plan, the environment and flags, all by one declaration per mode.

A plan is a TOML file with a table per mode; its keys are the mode's flags without their prefix. `[[kwta.where]]` tables
say what differs in some `layers` (as in "0,3,5-8") and `sites` (qkv, o, up, down).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ralo import _core, cpu
from ralo.compose import Plan, compose
from ralo.errors import RaloError
from ralo.guard import GuardOptions
from ralo.modes import MODES, Mode
from ralo.modes.base import Override, parse_layers, parse_places
from ralo.options import add_flags, fields, flag, given, nearest, parse
from ralo.version import __version__


@dataclass(frozen=True)
class PlanOptions:
    plan: str = flag("", "TOML file that says which modes run and how", metavar="FILE")
    profile: str = flag("", "calibration profile of the model (ralo calibrate)", metavar="FILE")


@dataclass(frozen=True)
class Setup:
    """What beside the model decides how it runs."""

    plan: Plan = field(default_factory=Plan)
    guard: GuardOptions = field(default_factory=GuardOptions)
    profile: Path | None = None
    # What a plan says of itself, and its file: no part of what runs.
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)
    source: str = field(default="", compare=False)


def add_mode_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser.add_argument_group("modes (all off unless set)"), PlanOptions)
    for mode in MODES.values():
        add_flags(parser.add_argument_group(mode.name), mode, prefix=mode.name)
    add_flags(parser.add_argument_group("guard"), GuardOptions, prefix="guard")


def read_setup(args: argparse.Namespace) -> Setup:
    """Defaults, then the plan, then the environment, then flags. Setting anything of a mode switches it on."""
    options = PlanOptions(**given(PlanOptions, args))
    return _setup(Path(options.plan) if options.plan else None, args, options.profile)


def read_plan(path: Path) -> Setup:
    """What a plan says, and nothing else."""
    return _setup(path, None, "")


def _setup(path: Path | None, args: argparse.Namespace | None, profile: str) -> Setup:
    tables = read_toml(path) if path else {}
    modes = [mode(**v) for mode in MODES.values() if (v := settings_of(mode, args, tables, path))]
    guard = _table(GuardOptions, tables.get("guard", {}), "guard", path)
    guard |= given(GuardOptions, args, "guard") if args else {}
    beside = tables.get("profile", "")
    at = Path(profile) if profile else path.parent / str(beside) if path and beside else None
    return Setup(compose(modes), GuardOptions(**guard), at, tables.get("about", {}), str(path or ""))


def settings_of(
    mode: type[Mode], args: argparse.Namespace | None, tables: Mapping[str, Any], path: Path | None
) -> dict[str, Any]:
    """What a plan, the environment and flags say of one mode."""
    flags = given(mode, args, mode.name) if args else {}
    return _table(mode, tables.get(mode.name, {}), mode.name, path) | flags


def read_toml(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RaloError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RaloError(f"{path}: is not a plan: {error}") from error
    known = (*MODES, "guard", "profile", "about")
    for name, value in tables.items():
        if name not in known:
            raise RaloError(f"{path}: unknown key {name!r:.40}{nearest(name, known)} (keys: {', '.join(known)})")
        if isinstance(value, dict) != (name != "profile"):
            raise RaloError(f"{path}: {name} must be {'a path' if name == 'profile' else 'a table'}")
    return tables


def _table(record: type[Any], table: Mapping[str, Any], name: str, path: Path | None) -> dict[str, Any]:
    """The values of one table, checked like flags."""
    values: dict[str, Any] = {}
    where = []
    for key, value in table.items():
        if key == "where" and issubclass(record, Mode):
            where = [_override(record, entry, f"{path}: [[{name}.where]]") for entry in _entries(value, name, path)]
        else:
            values |= _value(record, key, value, f"{path}: [{name}]")
    if path and values.get("pack"):
        beside = path.parent / values["pack"]  # as a profile is; else as it was said
        values["pack"] = str(beside) if beside.exists() else values["pack"]
    return values | ({"where": tuple(where)} if where else {})


def _entries(value: Any, name: str, path: Path | None) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise RaloError(f"{path}: where must be a list of tables, [[{name}.where]]")
    return value


def _override(record: type[Any], entry: Mapping[str, Any], source: str) -> Override:
    layers, places = None, None
    values: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "layers":
            layers = parse_layers(str(value), f"{source} layers")
        elif key == "sites":
            names = value if isinstance(value, list) else str(value).replace(" ", "").split(",")
            places = parse_places([str(n) for n in names], f"{source} sites")
        else:
            values |= _value(record, key, value, source, ("layers", "sites"))
    if not values:
        raise RaloError(f"{source} sets nothing: say what differs there, as in k = 0.5")
    return Override(layers, places, values)


def _value(record: type[Any], key: str, value: Any, source: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    known = {f.name: f for f in fields(record)}
    found = known.get(key.replace("-", "_"))
    if found is None:
        names = [name.replace("_", "-") for name in known]
        raise RaloError(f"{source} has no key {key!r:.40}{nearest(key, [*names, *more])} (keys: {', '.join(names)})")
    text = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else str(value)
    if isinstance(value, dict | list):
        raise RaloError(f"{source} {key} must be one value")
    return {found.name: parse(record, found, str(text), f"{source} {key}")}


def plan_warnings(setup: Setup, model: str, quant: str) -> list[str]:
    """What a plan was measured on must be this model; another CPU, ralo or precision makes its figures a guess."""
    about, source = setup.about, setup.source
    if about.get("model", model) != model:
        raise RaloError(f"{source}: is the plan of another model; make one for this model with ralo tune")
    had = {"cpu": cpu.name(), "isa": _core.level(), "ralo": __version__, "quant": quant}
    differs = [f"{what} {about[what]}, this is {now}" for what, now in had.items() if about.get(what, now) != now]
    again = "; its speed and quality may differ, ralo tune measures again"
    return [f"{source}: was measured with {', '.join(differs)}{again}"] if differs else []


def check_layers(plan: Plan, layers: int) -> None:
    """Overrides may only name layers that the model has."""
    for mode in plan.modes:
        for override in mode.where:
            if override.layers and (beyond := [i for i in override.layers if i >= layers]):
                raise RaloError(f"plan: [[{mode.name}.where]] names layer {min(beyond)}, the model has {layers}")


def tables_of(modes: Iterable[Mode]) -> dict[str, Any]:
    """Modes as the tables of a plan: what differs from their defaults, and where."""
    out: dict[str, Any] = {}
    for mode in modes:
        changed = {f.name: v for f in fields(type(mode)) if (v := getattr(mode, f.name)) != f.default}
        table: dict[str, Any] = {_key(name): value for name, value in changed.items()}
        if mode.where:
            table["where"] = [_entry(override) for override in mode.where]
        out[mode.name] = table or {"on": mode.on}
    return out


def _entry(override: Override) -> dict[str, Any]:
    named: dict[str, Any] = {}
    if override.layers is not None:
        named["layers"] = ",".join(map(str, sorted(override.layers)))
    if override.places is not None:
        named["sites"] = ",".join(sorted(override.places))
    return named | {_key(name): value for name, value in override.values.items()}


def _key(name: str) -> str:
    return name.replace("_", "-")


def write_toml(path: Path, tables: Mapping[str, Any]) -> None:
    """A plan as `read_toml` reads it. Values are numbers, words, tables and lists of tables."""
    lines: list[str] = [f"{k} = {_literal(v)}" for k, v in tables.items() if not isinstance(v, dict)]
    for name, table in tables.items():
        if not isinstance(table, dict):
            continue
        lines += ["", f"[{name}]", *(f"{k} = {_literal(v)}" for k, v in table.items() if not isinstance(v, list))]
        for key, entries in table.items():
            for entry in entries if isinstance(entries, list) else ():
                lines += ["", f"[[{name}.{key}]]", *(f"{k} = {_literal(v)}" for k, v in entry.items())]
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text("\n".join(lines).strip() + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise RaloError(f"{path}: cannot be written: {error.strerror or error}") from error


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def plan_path(output: str) -> Path:
    """Where a plan is to be written, its profile beside it."""
    if not output:
        raise RaloError("-o FILE.toml is missing: the plan to write")
    path = Path(output)
    if path.suffix != ".toml":
        raise RaloError(f"-o must name a .toml file, got {output!r:.60}")
    if not path.parent.is_dir():
        raise RaloError(f"{path.parent}: no such directory")
    return path
