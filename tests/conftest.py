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


FEW_OF_THEIR_OWN = ("avx512vbmi", "amx")  # levels whose kernels are mostly avx512's


@pytest.fixture(params=[name for name in _core.levels() if name not in FEW_OF_THEIR_OWN])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every ISA level this CPU has, forced for the test, but those with few kernels of their own."""
    yield from _forced(request.param)


@pytest.fixture(params=_core.levels())
def any_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every ISA level, for tests of the kernels that those have: csrc/kernels_avx512vbmi.def and kernels_amx.def."""
    yield from _forced(request.param)


@pytest.fixture(params=(1, 2, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = _core.threads()
    _core.set_threads(request.param)
    yield request.param
    _core.set_threads(before)
