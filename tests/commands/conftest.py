"""Models for the commands' tests: tiny, written once, and no settings from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import MANY, TOKENS, answers, write
from commandline import TEMPLATE, add_template
from tiny import write_hf

from ralo.cli import main


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RALO_")]:
        monkeypatch.delenv(name)


def endless(directory: Path) -> Path:
    """A Llama with every byte in its vocabulary and a context of 128 tokens, that never ends a text by itself."""
    write_hf(directory, "llama", vocab_size=300, eos_token_id=None)
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template."""
    return add_template(endless(tmp_path_factory.mktemp("models") / "chatty"), TEMPLATE)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("the other is in the house and on it\n" * 20)
    return path


@pytest.fixture(scope="session")
def proc_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a context as long as the windows of text that procedural weights are made for."""
    sizes = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 160, "max_position_embeddings": 1024}
    return write_hf(tmp_path_factory.mktemp("proc") / "model", "llama", eos_token_id=None, **sizes)


@pytest.fixture(scope="session")
def proc_flags(proc_model: Path) -> list[str]:
    text = proc_model.with_name("text.txt")
    text.write_text("the other is in the house and on it\n" * 60)
    return ["-m", str(proc_model), "--proc-sparse=on", "--text", str(text), "--tokens", "600", "--proc-bits", "4.2"]


@pytest.fixture(scope="session")
def proc_made(proc_model: Path, proc_flags: list[str]) -> Path:
    """A pack of its procedural weights."""
    to = proc_model.with_name("pack")
    assert main(["pack", *proc_flags, "-o", str(to)]) == 0
    return to


@pytest.fixture(scope="session")
def tt_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that factors of a whole block of ranks are smaller than its weights."""
    sizes = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 320, "head_dim": 64}
    folder = tmp_path_factory.mktemp("tt")
    letters = np.random.default_rng(0).choice(
        list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,"), 1500
    )
    (folder / "text.txt").write_text("".join(letters))
    return write_hf(folder / "model", "llama", eos_token_id=None, max_position_embeddings=1024, **sizes)


@pytest.fixture(scope="session")
def tt_flags(tt_model: Path) -> list[str]:
    text = ["--text", str(tt_model.with_name("text.txt")), "--tokens", "600"]
    return ["-m", str(tt_model), "--tt=on", *text]


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed does not depend on the clock, nor on what one more step costs matrices as small as these."""
    _make_faster(monkeypatch)


def _make_faster(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ralo.tt.build.speedup", lambda made, dense: 1.25)
    patch.setattr("ralo.tt.ranks.STEP", 0)


@pytest.fixture(scope="session")
def tt_made(tt_model: Path, tt_flags: list[str]) -> Path:
    """A pack of its factors."""
    to = tt_model.with_name("pack")
    with pytest.MonkeyPatch.context() as patch:
        _make_faster(patch)
        assert main(["pack", *tt_flags, "-o", str(to)]) == 0
    return to


@pytest.fixture(scope="session")
def many_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = [{"id": f"q{i}", "prompt": "the house " * (i % 3) + str(i)} for i in range(MANY)]
    return write(tmp_path_factory.mktemp("batch") / "in.jsonl", *asked)


@pytest.fixture(scope="session")
def batch_flags(tiny: Path, many_prompts: Path) -> list[str]:
    return ["batch", "-m", str(tiny), "-i", str(many_prompts), "-n", str(TOKENS), "--threads", "1"]


@pytest.fixture(scope="session")
def undisturbed(batch_flags: list[str], many_prompts: Path) -> dict[str, Any]:
    out = many_prompts.with_name("undisturbed.jsonl")
    assert main([*batch_flags, "-o", str(out)]) == 0
    assert len(answers(out)) == MANY
    return answers(out)
