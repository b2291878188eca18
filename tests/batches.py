"""Runs of `ralo batch` that may be disturbed, and what they leave."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commandline import COMMAND, environment

MANY, TOKENS = 240, 100  # some seconds of work, one text at a time


def write(path: Path, *asked: Any) -> Path:
    path.write_text("".join(json.dumps(a) + "\n" for a in asked))
    return path


def answers(path: Path) -> dict[str, Any]:
    """By id; that no id has two lines is part of every comparison."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {str(line["id"]): line for line in lines}
    assert len(found) == len(lines)
    return found


@contextlib.contextmanager
def started(*args: object) -> Iterator[subprocess.Popen[bytes]]:
    """A run that is there until the block ends."""
    command = [*COMMAND, *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[bytes], out: Path, lines: int) -> None:
    until = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.002)
