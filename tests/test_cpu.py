"""Threads by default and the ISA level, on machines and in containers made of files."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from ralo import _core, cpu
from ralo.errors import RaloError


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with these CPUs allowed, these siblings (cpu -> list) and these control group files."""

    def make(allowed=(0, 1, 2, 3), siblings=None, **limits: str) -> int:
        for number, text in (siblings or {}).items():
            topology = tmp_path / f"cpus/cpu{number}/topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(f"{text}\n")
        (tmp_path / "cgroup/cpu").mkdir(parents=True)
        for name, text in limits.items():
            file = "cpu.max" if name == "max" else f"cpu/cpu.cfs_{name}_us"
            (tmp_path / "cgroup" / file).write_text(f"{text}\n")
        monkeypatch.setattr(cpu, "CPUS", tmp_path / "cpus")
        monkeypatch.setattr(cpu, "CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
        return cpu.default_threads()

    return make


def test_every_allowed_cpu_counts(machine):
    assert machine(allowed=(0, 2, 5)) == 3


def test_hyper_threads_share_a_core(machine):
    assert machine(siblings={0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}) == 2


def test_one_hyper_thread_of_a_core_is_a_core(machine):
    assert machine(allowed=(0, 1), siblings={0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}) == 2


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("max 100000", 4),
        ("200000 100000", 2),
        ("250000 100000", 2),  # whole CPUs: a third thread would wait half its time
        ("50000 100000", 1),
        ("800000 100000", 4),  # no more than there are cores
        ("0 100000", 1),
        ("100000 0", 4),
        ("rubbish", 4),
        ("many few", 4),
        ("", 4),
    ],
)
def test_quota_of_version_2(machine, text, threads):
    assert machine(max=text) == threads


@pytest.mark.parametrize(
    ("limits", "threads"),
    [
        ({"quota": "-1", "period": "100000"}, 4),
        ({"quota": "300000", "period": "100000"}, 3),
        ({"quota": "300000"}, 4),  # no period: no limit that we can read
        ({"quota": "1000", "period": "100000"}, 1),
    ],
)
def test_quota_of_version_1(machine, limits, threads):
    assert machine(**limits) == threads


def test_systems_without_affinity(machine, monkeypatch):
    machine()
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cpu.default_threads() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpu.default_threads() == 1


def test_setup_sets_the_threads(machine, threads, monkeypatch):
    monkeypatch.delenv("RALO_ISA", raising=False)
    assert machine(max="200000 100000") == 2
    for given, want in ((None, 2), (0, 2), (3, 3)):
        cpu.setup(given)
        assert _core.threads() == want


@pytest.fixture
def only_base(monkeypatch):
    """A CPU with the base level alone; what it was told is kept."""
    told = []
    core = SimpleNamespace(levels=lambda: ["base"], force_level=told.append, set_threads=told.append)
    monkeypatch.setattr(cpu, "_core", core)
    return told


def test_a_level_the_cpu_lacks(only_base, monkeypatch):
    monkeypatch.setenv("RALO_ISA", "avx512")
    with pytest.raises(RaloError, match="RALO_ISA=avx512: this CPU lacks it; it has base"):
        cpu.setup(1)
    assert only_base == []


def test_a_level_the_cpu_has(only_base, monkeypatch):
    monkeypatch.setenv("RALO_ISA", "base")
    cpu.setup(2)
    assert only_base == ["base", 2]


def test_the_name_of_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "INFO", tmp_path / "cpuinfo")
    assert cpu.name()  # of a system without such a file: something
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\n\nmodel name\t: Other\n")
    assert cpu.name() == "Fast CPU @ 3 GHz"
