"""StatePack's acceptance on a tiny model: every line is measured, and what must hold of any model holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny import write_hf

import ralo
from ralo.accept import ACCEPT, attention, mlp, statepack, statepack_mlp
from ralo.accept.rows import Row, Task

ANYWHERE = (
    "all keys and no neurons packed: dense bit for bit",
    "below min-ctx: dense bit for bit",
    "fewer keys: not dense",
    "bytes skipped are bytes not read",
    "every way of counting bits gives the same",
    "trimmed and cloned texts go on alike",
    "a planted NaN is caught and counted",
    "a NaN in an MLP is caught and counted",
    "guard: too far from dense it is off, the text dense bit for bit; near again it is on",
    "metrics: pack.enabled .mode .density .active .popcnt .recall .mass, guard.*",
    "a way of counting bits that is not there is refused",
)


@pytest.fixture(scope="module", params=["relu", "silu"])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Row]]:
    """Small shapes instead of those that acceptance is about: their speed is not looked at here."""
    model = write_hf(tmp_path_factory.mktemp("accept") / request.param, "llama", vocab_size=300, eos_token_id=None,
                     max_position_embeddings=1024, hidden_size=128, hidden_act=request.param)  # fmt: skip
    (model / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statepack, "ATTENTION", {512: 4.0})
        patch.setattr(statepack, "SHAPES", ((2, 2, 16),))
        patch.setattr(attention, "OUT_OF_CACHE", 0)
        patch.setattr(mlp, "OUT_OF_CACHE", 0)
        patch.setattr(statepack_mlp, "SHAPE", (64, 256))
        task = Task(str(model), ("int8",), 1024, 1, 4, {"int8": 1.1}, 2.0)
        found = ACCEPT["state-pack"](task, lambda quant: ralo.load(model, quant), lambda what: None)
    yield {row.line: row for row in found}


def test_what_holds_anywhere(rows: dict[str, Row]) -> None:
    for line in ANYWHERE:
        assert rows[line].passed, rows[line]


def test_every_line_is_measured(rows: dict[str, Row]) -> None:
    starts = (
        "attention, 2 kv heads x 2 x 16, 512 keys",
        "decode speed-up over dense, int8, context 928",
        "Δppl % on positions 464 to 928",
        "facts found at 10 depths",
        "Δppl % of two bitmaps, ternary, in one window",
        "the document's own form, overlap of raw keys: Δppl %",
        "guessed gates over zero skipping, 64 x 256",
    )
    for start in starts:
        assert any(line.startswith(start) for line in rows), start
    relu = any("zeros alone" in line for line in rows)
    assert relu != any("eps 1e-4" in line for line in rows)


def test_silent_neurons_are_not_heard(rows: dict[str, Row]) -> None:
    if "|Δppl| % of it" in rows:
        assert rows["|Δppl| % of it"].passed and rows["rho below the density: switched off by rho"].passed
        assert "off by rho: 0, 1" in rows["density of the packed layers"].value  # half of a random relu is open
    else:
        assert rows["eps 1e-4: switched off by rho"].passed and rows["eps 1e-4: same greedy text, 64 tokens"].passed
        assert rows["density of the packed layers"].target == "shown"
