"""`ralo` as a user runs it: in a process of its own without a terminal, or in this one where that shows as much."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ralo.cli import main

COMMAND = (sys.executable, "-W", "error", "-m", "ralo")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class Done(NamedTuple):
    code: int
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without ralo's own variables and with output buffered, as on a build machine."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RALO_") and k != "PYTHONUNBUFFERED"}
    return kept | {"CI": "true"} | changes


def ralo(*args: object, stdin: str | bytes = "", cwd: Path | None = None, **variables: str) -> Done:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    command = [*COMMAND, *map(str, args)]
    done = subprocess.run(command, input=data, capture_output=True, cwd=cwd, env=environment(**variables), timeout=120)
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line with which a command turns its input down: exit 2, and nothing else on either stream."""
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (code, out, err)
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert err.startswith("ralo")
    return err.strip()


def last_line(out: str) -> Any:
    """The JSON object that ends the output under --json."""
    values = json.loads(out.splitlines()[-1])
    assert isinstance(values, dict)
    return values


def add_template(model: Path, template: str) -> Path:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return model
