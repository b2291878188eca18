"""What is promised of every mode: each line holds on a tiny model, and fails where what it is about is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny import write_hf
from tiny_factors import write_pack

import ralo
from ralo.accept import kwta, proc, proc_invariants, statepack, statepack_invariants, statepack_mlp, watched
from ralo.accept.literal import literal
from ralo.accept.rows import Row, needs_context, tried, unmeasured
from ralo.autotune import Tuned
from ralo.compose import compose
from ralo.errors import RaloError
from ralo.guard import Guard
from ralo.lm import LM
from ralo.modes import KWTA, MODES, TT, Event, Mix, Proc, StatePack
from ralo.modes.base import Mode
from ralo.quality import Quality


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_hf(folder / "tiny", "llama", vocab_size=300, eos_token_id=None, max_position_embeddings=512)


@pytest.fixture(scope="module")
def settings(folder: Path, model: Path) -> dict[str, Mode]:
    proc._pack(str(model), folder / "pack")
    factors = write_pack(model, folder / "factors", kinds={"o": "rest"})
    found: list[Mode] = [StatePack(min_ctx=0, keys=64, rho=1.0, eps="0"), KWTA(k=0.5), Event(min_ctx=0, budget_ms=4)]
    found += [Proc(pack=str(folder / "pack")), TT(pack=str(factors), target="attn"), Mix()]
    return {mode.name: mode for mode in found}


@pytest.fixture
def lm(model: Path) -> Iterator[LM]:
    yield ralo.load(model, "int8")


def test_metrics_of_every_mode_are_named() -> None:
    assert set(watched.EXPORTED) == set(MODES)


@pytest.mark.parametrize("name", list(MODES))
def test_guard_and_metrics(lm: LM, settings: dict[str, Mode], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switched, exported = watched.watched(lm, settings[name], 256)
    assert switched.passed and f"{name} off at token 4" in switched.value and f"{name} on at token" in switched.value
    assert exported.passed and exported.mode == name and "guard.*" in exported.line
    assert not lm.model.has_modes and not lm.guard.events, "all is off afterwards"
    word, names = watched.EXPORTED[name]
    monkeypatch.setitem(watched.EXPORTED, name, (word, f"{names} nonsense"))
    monkeypatch.setattr(Guard, "_switch", lambda self, name, on: None)
    switched, exported = watched.watched(lm, settings[name], 256)
    assert not switched.passed and switched.value.startswith("the guard did nothing")
    assert not exported.passed and exported.value == f"missing: {word}.nonsense"


def test_a_mode_that_has_no_place(lm: LM) -> None:
    row = only(tried("kwta", "guard", lambda: watched.watched(lm, KWTA.off())))
    assert (row.target, row.value, row.passed) == ("measured", "no layer of this model has a place for it", False)


@pytest.mark.parametrize("name", ["state-pack", "kwta", "event"])
def test_a_nan(lm: LM, settings: dict[str, Mode], name: str) -> None:
    lm.use(compose([settings[name]]))
    assert watched.caught(lm, name, "a NaN", watched.plant(lm), 256).passed
    lm.use(compose([settings[name]]))
    assert not watched.caught(lm, name, "none was planted", 1, 256).passed


def test_an_infinite_scale(lm: LM, settings: dict[str, Mode], monkeypatch: pytest.MonkeyPatch) -> None:
    pack = settings["proc"].pack
    assert proc_invariants._planted(lm, pack).passed
    monkeypatch.setattr(proc_invariants, "infinite", lambda scales: scales)
    assert not proc_invariants._planted(lm, pack).passed


def test_shedding(lm: LM, settings: dict[str, Mode], monkeypatch: pytest.MonkeyPatch) -> None:
    pack = settings["proc"].pack
    assert proc_invariants._shed(lm, pack).passed
    monkeypatch.setattr(Proc, "_shed", lambda self, matrix: (matrix, 0))
    assert not proc_invariants._shed(lm, pack).passed


def test_ways_of_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert statepack_invariants.refused_counts().passed
    monkeypatch.setattr(statepack_invariants, "counts_by", lambda way: way)
    row = statepack_invariants.refused_counts()
    assert not row.passed and row.value.startswith("taken: ")


def test_rho(lm: LM) -> None:
    assert statepack_mlp._off_by_rho(lm, StatePack(target="mlp", eps="0", rho=1e-6), "low").passed
    assert not statepack_mlp._off_by_rho(lm, StatePack(target="mlp", eps="0", rho=1.0), "high").passed


def test_two_bitmaps(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ralo.texts.held_out(lm, 400)
    ternary, own = statepack._other_codes(lm, tokens, 400)
    assert ternary.target == "≤ 2" and own.target == "shown" and "overlap of raw keys" in own.line
    monkeypatch.setattr(statepack, "DOCUMENT_DPPL", -100.0)
    assert not statepack._other_codes(lm, tokens, 400)[0].passed


def test_autotune() -> None:
    def tuned(k: float, delta: float) -> Tuned:
        tried = ((0.3, quality(9.0)), (0.5, quality(1.0)))
        return Tuned(KWTA(k=k), quality(delta), tried)

    assert kwta._autotuned(tuned(0.5, 1.0), 1.8).passed
    assert not kwta._autotuned(tuned(0.3, 1.0), 1.8).passed, "below one that hurt"
    assert not kwta._autotuned(tuned(0.5, 1.9), 1.8).passed, "above the budget"


def quality(delta: float) -> Quality:
    return Quality(10.0, 10.0, delta, (delta, delta), 0.0, 1.0, 64)


def test_the_documents_own_form_is_shown(lm: LM) -> None:
    row = literal(lm, KWTA(form="seed", k=0.4), "k 0.4", ralo.texts.held_out(lm, 64), 32)
    assert row.passed and row.target == "shown" and row.line == "the document's own form, k 0.4: Δppl %"
    assert "64 tokens" in row.value and not lm.model.has_modes


def test_what_cannot_be_measured_is_not_accepted(lm: LM) -> None:
    assert tried("kwta", "line", lambda: [unmeasured("kwta", "x", "y")]) == [Row("kwta", "x", "measured", "y", False)]
    needs_context(lm, 512)
    with pytest.raises(RaloError, match="needs 513 tokens of context, this model has 512"):
        needs_context(lm, 513)
    row = only(tried("event", "a budget", lambda: raises(lambda: needs_context(lm, 9999))))
    assert row == Row("event", "a budget", "measured", "needs 9999 tokens of context, this model has 512", False)


def raises(what: Callable[[], None]) -> list[Row]:
    what()
    return []


def only(rows: list[Row]) -> Row:
    (row,) = rows
    return row
