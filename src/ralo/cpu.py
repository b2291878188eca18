"""What this CPU and this container allow: threads by default, and the ISA level that RALO_ISA may force."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ralo import _core
from ralo.errors import RaloError

CGROUP = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")
INFO = Path("/proc/cpuinfo")


def name() -> str:
    """What this CPU calls itself, for people."""
    try:
        lines = INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, [*named, platform.processor(), platform.machine()]), "unknown")


def default_threads() -> int:
    """Physical cores this process may run on, no more than its container's CPU limit."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_core_of(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota() or len(cores)))


def _core_of(cpu: int) -> str:
    """Hyper-threads of one core share their list of siblings."""
    try:
        return (CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int | None:
    """Whole CPUs of the control group's limit (version 2, then 1); None without one."""
    try:
        if (CGROUP / "cpu.max").exists():
            quota, period = (CGROUP / "cpu.max").read_text().split()[:2]
        else:
            quota, period = ((CGROUP / "cpu" / f"cpu.cfs_{k}_us").read_text().strip() for k in ("quota", "period"))
        return max(1, int(quota) // int(period)) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def setup(threads: int | None = None) -> None:
    """Chooses the ISA level and the number of threads for this process (0 or None: the default)."""
    wanted = os.environ.get("RALO_ISA", "").strip().lower()
    if wanted and wanted != "auto":
        known = ("base", "avx2", "avx512", "avx512vbmi", "amx")
        if wanted not in known:
            raise RaloError(f"RALO_ISA={wanted}: unknown level; use one of {', '.join(known)}")
        if wanted not in _core.levels():
            raise RaloError(f"RALO_ISA={wanted}: this CPU lacks it; it has {', '.join(_core.levels())}")
        _core.force_level(wanted)
    _core.set_threads(threads or default_threads())
