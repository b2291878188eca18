"""Event's acceptance on a tiny model: every line is measured, and what must hold of any model holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from tiny import write_hf

import ralo
from ralo.accept import ACCEPT, event_budget, event_verify
from ralo.accept.rows import Row, Task


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Row]]:
    """Few tokens of short texts instead of those that acceptance is about: their speed is not looked at here."""
    model = write_hf(tmp_path_factory.mktemp("accept") / "tiny", "llama", vocab_size=300, eos_token_id=None,
                     max_position_embeddings=1024, hidden_size=128)  # fmt: skip
    (model / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_budget, "TOKENS", 100)
        patch.setattr(event_verify, "PROMPTS", 3)
        patch.setattr(event_verify, "NEW", 60)
        patch.setattr(event_verify, "SAMPLED", 2)
        task = Task(str(model), ("int8",), 1024, 1, 4, {"int8": 1.1}, 2.0)
        found = ACCEPT["event"](task, lambda quant: ralo.load(model, quant), lambda what: None)
    yield {row.line: row for row in found}


ANYWHERE = (
    "a recorded schedule gives the same tokens again",
    "verified drafts: same greedy text as dense, 3 prompts of 956 x 60 tokens",
    "… and the same sampled text by seed",
    "unrelated tokens, deltas everywhere: off within 256 tokens",
    "then dense bit for bit",
    "everything sent, nothing held: dense bit for bit",
    "less sent: not dense",
    "bytes skipped are bytes not read",
    "guard: too far from dense it is off, the text dense bit for bit; near again it is on",
    "metrics: event.enabled .budget_ms_used .quorum_hits .topk_kept .quality_gap .stale_pct, guard.*",
    "a NaN in what it sends and in its attention is caught and counted",
)
MEASURED = (
    "decode speed-up over dense, int8, context 512",
    "Δppl % on positions 512 to 1024",
    "quality_gap % there, exp(KL) - 1",
    "the document's own form, blocks of 32 by age: Δppl %",
    *(
        line.format(part)
        for part in (60, 75, 90)
        for line in (
            "p99 of 100 tokens / budget of {}% of dense, context 384",
            "Δppl % at {}% of dense, for comparison",
        )
    ),
    "verified drafts: speed-up over dense",
    "cost of having tried over 512 tokens, %",
)


def test_what_holds_anywhere(rows: dict[str, Row]) -> None:
    for line in ANYWHERE:
        assert rows[line].passed, rows[line]


def test_every_line_is_measured(rows: dict[str, Row]) -> None:
    assert set(rows) == {*ANYWHERE, *MEASURED}
    assert all(row.mode == "event" for row in rows.values())


def test_rows_are_plain(rows: dict[str, Row]) -> None:
    """As JSON they say the same."""
    for row in rows.values():
        assert type(row.passed) is bool and json.loads(json.dumps(row.to_dict())) == row.to_dict()


def test_what_was_tried(rows: dict[str, Row]) -> None:
    """Held keys and drafts were at work, and the guard said when it had enough."""
    assert re.match(r"event off at token \d+: KL ", rows[ANYWHERE[3]].value)
    levels = re.fullmatch(r"200 tokens, (\d+) levels used", rows[ANYWHERE[0]].value)
    assert levels and int(levels[1]) > 10
    accepted = re.search(r"; ([\d.]+) of ([\d.]+) accepted\)$", rows["verified drafts: speed-up over dense"].value)
    assert accepted and float(accepted[1]) > 0.3 and float(accepted[2]) > 0
    gap = float(rows["quality_gap % there, exp(KL) - 1"].value)
    assert 0 < gap < 10
