"""`ralo batch --ray`: the same answers from a cluster, whoever of it dies, and nobody else can reach one's own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batches import MANY, answers, started, wait_for, write
from commandline import ralo

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray (pip install 'ralo[ray]')")
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


def test_a_cluster_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    asked = write(tmp_path / "in.jsonl", {"prompt": "a"})
    done = ralo("batch", "-m", tiny, "-i", asked, "-o", tmp_path / "out", "--ray", "127.0.0.1:1")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("ralo batch: no Ray cluster at 127.0.0.1:1: ") and done.err.count("\n") == 1


def test_a_model_that_workers_do_not_find(tmp_path: Path) -> None:
    asked = write(tmp_path / "in.jsonl", {"prompt": "a"})
    done = ralo("batch", "-m", "nowhere", "-i", asked, "-o", tmp_path / "out", "--ray", "local")
    assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1
    assert done.err.startswith("ralo batch: on ") and ": nowhere: no such model; " in done.err


@needs_proc
def test_workers_answer_the_same_and_one_that_dies_is_replaced(
    batch_flags: list[str], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with started(*batch_flags, "-o", out, "--ray", "local", "--workers", 2, "--texts", 4) as process:
        wait_for(process, out, 1)
        workers = until(lambda: [pid for pid in descendants(process.pid) if title(pid).startswith(b"ray::Worker")], 2)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)  # that nothing is answered while they are looked at
        below = descendants(process.pid)
        assert {address for pid in (process.pid, *below) for address in listening(pid)} == {"loopback"}
        os.kill(workers[0], signal.SIGKILL)
        os.kill(workers[1], signal.SIGCONT)
        told, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"ralo batch: a worker died, another takes its place\n")
    assert told.decode().startswith(f"{out}: {MANY} prompts answered, ")
    assert answers(out) == undisturbed
    until(lambda: [pid for pid in below if Path(f"/proc/{pid}").exists()], 0)


def until(look: Callable[[], list[int]], count: int) -> list[int]:
    """What is seen as soon as there are so many."""
    for _ in range(1000):
        if len(found := look()) == count:
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def title(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0 ")
    return b""


def descendants(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            children += map(int, task.read_text().split())
    return [*children, *(pid for child in children for pid in descendants(child))]


def listening(pid: int) -> set[str]:
    """Where a process can be reached: loopback, or the address as the kernel writes it."""
    inodes, tables = set(), []
    with contextlib.suppress(OSError):  # it ended meanwhile
        tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
    loopback = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    found = set()
    for table in tables:
        for row in table.splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and inode in inodes:
                address = local.partition(":")[0]
                found.add("loopback" if address in loopback else address)
    return found
