"""A thousand damaged models: each works or is refused in one clear line, without a crash, a hang or much memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import fuzz
import pytest

from ralo.errors import RaloError

SEED = 6
CASES = 1000
PARTS = 2  # processes, one after the other: a crash costs only its own part
MOST_MEMORY = 300  # MB more than after loading every sound model


@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_models_work_or_are_refused_in_one_clear_line(part: int) -> None:
    first, last = part * CASES // PARTS, (part + 1) * CASES // PARTS
    command = [sys.executable, "-W", "error", fuzz.__file__, str(SEED), str(first), str(last)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("case ", "memory "))]
    replay = f"{Path(fuzz.__file__).name} {SEED} N N+1 runs case N alone"
    assert done.returncode == 0, f"crashed in {lines[-1:]}; {replay}\n{done.stderr[-3000:]}"
    assert not (failed := [line for line in lines if " FAILED " in line]), "\n".join([replay, *failed])
    *cases, memory = lines
    assert len(cases) == last - first
    assert int(memory.split()[1]) <= MOST_MEMORY
    works, refused = (sum(f" {word}" in line for line in cases) for word in ("works", "refused "))
    assert works > 50 and refused > 200, "the damage is too light or too heavy to show anything"


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return fuzz.sound_models(tmp_path / "models")


def test_a_case_can_be_replayed(models: list[Path], tmp_path: Path) -> None:
    outcomes = [fuzz.case(SEED, number, models, tmp_path) for number in (3, 4, 3, 4)]
    assert outcomes[:2] == outcomes[2:]
    assert outcomes[0] != outcomes[1]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("x"), "ValueError('x')"),
        (MemoryError(), "MemoryError()"),
        (TimeoutError("longer than 10 s"), "longer than"),
        (RaloError("two\nlines"), "not one clear line"),
        (RaloError("bell \a"), "not one clear line"),
        (RaloError("x" * 2000), "not one clear line"),
    ],
)
def test_what_is_no_clear_error_counts_as_failed(
    error: Exception, shown: str, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(fuzz, "use", use)
    outcome = fuzz.case(SEED, 0, models, tmp_path)
    assert outcome.startswith("FAILED ") and shown in outcome
