"""The system's browser, for tests that look at a page."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@cache
def browser() -> str:
    """The command of one that starts."""
    for command in filter(None, map(shutil.which, NAMES)):
        done = subprocess.run([command, "--version"], capture_output=True, timeout=60)
        if done.returncode == 0:  # some systems have a command of that name that only says how to install it
            return command
    pytest.skip(f"needs a browser that starts: {', '.join(NAMES)}")
