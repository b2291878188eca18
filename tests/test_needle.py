"""Needles: dense finds names that are in the text and none that are not; a ruinous mode finds fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_hf

import ralo
from ralo import KWTA, RaloError
from ralo.accept.needle import NAMES, ROUNDS, needle
from ralo.modes.base import Override

RUINOUS = KWTA(where=(Override(None, None, {"k": 0.05, "gate": "off"}),))


def test_dense_finds_what_is_there() -> None:
    found = needle(ralo.load("mini"), 600, 2)
    assert found.trials == 2 * ROUNDS and found.dense == sum(found.dense_by_depth)
    assert found.dense >= 0.9 * found.trials and found.guessed <= 0.1 * found.trials
    assert (found.ours, found.ours_by_depth, found.ours_nats) == (found.dense, found.dense_by_depth, found.dense_nats)
    assert found.ours_guessed == found.guessed
    assert min(found.dense_nats) > 15, "a name that was read is millions of times as likely"


def test_a_ruinous_mode_finds_less_and_leaves_dense_alone() -> None:
    dense, found = needle(ralo.load("mini"), 400, 1), needle(ralo.load("mini", modes=[RUINOUS]), 400, 1)
    assert (found.dense, found.dense_nats, found.guessed) == (dense.dense, dense.dense_nats, dense.guessed)
    assert found.ours < found.dense and found.ours_nats[0] < found.dense_nats[0] / 2


def test_a_mode_that_drops_nothing_finds_the_same() -> None:
    found = needle(ralo.load("mini", modes=[KWTA(p=1.0, target="attn")]), 400, 1)
    assert found.ours_by_depth == found.dense_by_depth


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a token for every byte."""
    path = tmp_path_factory.mktemp("needle") / "tiny"
    return write_hf(path, "llama", vocab_size=300, eos_token_id=None, max_position_embeddings=2048, hidden_size=64)


def test_random_weights_find_nothing(tiny: Path) -> None:
    found = needle(ralo.load(tiny, modes=[KWTA(k=0.5)]), 1500, 1)
    assert found.trials == ROUNDS and len(found.ours_nats) == 1
    assert found.dense == found.ours == found.guessed == found.ours_guessed == 0


@pytest.mark.parametrize(
    ("ctx", "depths", "line"),
    [
        (2049, 2, r"needs \d+ to 2048 tokens of context, got 2049"),
        (100, 2, r"needs \d+ to 2048 tokens of context, got 100"),
        (2000, 0, f"has from 1 to {len(NAMES) // 2} depths, got 0"),
        (2000, 11, f"has from 1 to {len(NAMES) // 2} depths, got 11"),
    ],
)
def test_what_cannot_be_tested(tiny: Path, ctx: int, depths: int, line: str) -> None:
    with pytest.raises(RaloError, match=line):
        needle(ralo.load(tiny), ctx, depths)
