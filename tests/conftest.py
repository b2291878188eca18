"""Fixtures for everybody: a test that asks for `level` or `threads` runs once for each, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ralo import _core


@pytest.fixture(params=_core.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every ISA level this CPU has, forced for the test."""
    before = _core.level()
    _core.force_level(request.param)
    yield request.param
    _core.force_level(before)


@pytest.fixture(params=(1, 2, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = _core.threads()
    _core.set_threads(request.param)
    yield request.param
    _core.set_threads(before)
