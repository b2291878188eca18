"""Fixtures for everybody: a test that asks for `level` or `threads` runs once for each, and leaves no trace."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ralo import _core

# With AMX torch's products of bf16 end the process with an illegal instruction on some virtual machines.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def _forced(name: str) -> Iterator[str]:
    before = _core.level()
    _core.force_level(name)
    yield name
    _core.force_level(before)


@pytest.fixture(params=[name for name in _core.levels() if name != "amx"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every ISA level this CPU has, forced for the test; not amx, whose kernels are avx512's but for those of bytes."""
    yield from _forced(request.param)


@pytest.fixture(params=_core.levels())
def byte_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every ISA level, for tests of many tokens multiplied as bytes."""
    yield from _forced(request.param)


@pytest.fixture(params=(1, 2, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = _core.threads()
    _core.set_threads(request.param)
    yield request.param
    _core.set_threads(before)
