"""The ISA level: which ones this CPU has, which one is used, and what RALO_ISA says about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ralo import _core

CPUINFO = Path("/proc/cpuinfo")
AVX2 = "avx2 fma f16c popcnt bmi2"  # flags as Linux names them
AVX512 = "avx512f avx512bw avx512vl avx512dq avx512cd avx512_vnni"
NEEDS = {"base": set(), "avx2": {*AVX2.split()}, "avx512": {*AVX2.split(), *AVX512.split()}}
NEEDS["avx512vbmi"] = NEEDS["avx512"] | {"avx512vbmi", "avx512_vpopcntdq"}
NEEDS["amx"] = NEEDS["avx512vbmi"] | {"amx_tile", "amx_int8"}


def python(*args: str, isa: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RALO_ISA": isa}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=60, env=env)


SETUP = "from ralo import _core, cpu; cpu.setup(1); print(_core.level())"


@pytest.mark.skipif(not CPUINFO.exists(), reason="reads /proc/cpuinfo")
def test_levels_are_those_of_the_cpu():
    lines = [line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")]
    flags = set(lines[0].split()) if lines else set()
    assert _core.levels() == [name for name in reversed(NEEDS) if flags >= NEEDS[name]]


def test_the_best_level_is_used_unless_forced():
    for isa in ("", "auto"):
        done = python("-c", SETUP, isa=isa)
        assert (done.returncode, done.stdout.strip()) == (0, _core.levels()[0])


@pytest.mark.parametrize("name", NEEDS)
def test_ralo_isa_forces_a_level(name):
    done = python("-c", SETUP, isa=f" {name.upper()} ")
    if name in _core.levels():
        assert (done.returncode, done.stdout.strip()) == (0, name)
    else:
        assert f"RALO_ISA={name}: this CPU lacks it" in done.stderr


def test_a_level_nobody_knows_is_one_clear_line():
    done = python("-m", "ralo", "run", "-p", "hello", "-n", "1", isa="sse9")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "ralo run: RALO_ISA=sse9: unknown level; use one of base, avx2, avx512, avx512vbmi, amx\n"


def test_force_level(level):
    assert _core.level() == level
    for unknown in ("", "AVX2", "neon"):
        with pytest.raises(ValueError, match="unknown ISA level"):
            _core.force_level(unknown)
    assert _core.level() == level
