"""Models for the server's tests: tiny, never ending a text by themselves; and no settings from the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import TEMPLATE, add_template
from tiny import write_hf

pytest.importorskip("fastapi", reason="ralo serve needs ralo[serve]")
pytest.importorskip("httpx", reason="the server is asked with httpx")

from serving import Server, serving

import ralo
from ralo import LM


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RALO_")]:
        monkeypatch.delenv(name)


def endless(directory: Path) -> Path:
    """Every byte in its vocabulary, and a context that is not filled in seconds."""
    write_hf(directory, "llama", vocab_size=300, eos_token_id=None, max_position_embeddings=1 << 15)
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return directory


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless(tmp_path_factory.mktemp("models") / "long")


@pytest.fixture(scope="session")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template."""
    return add_template(endless(tmp_path_factory.mktemp("models") / "chatting"), TEMPLATE)


@pytest.fixture(scope="session")
def lm(chatting: Path) -> LM:
    return ralo.load(chatting, threads=1)


@pytest.fixture(scope="session")
def server(chatting: Path) -> Iterator[Server]:
    """For tests that leave nothing behind in it."""
    with serving("-m", chatting, "--threads", 1, "--max-tokens", 1 << 20) as running:
        yield running
        assert running.said == ""
