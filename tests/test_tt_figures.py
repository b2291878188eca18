"""What is said of factors: metrics, bytes, what explain shows, and why a place keeps its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_proc import TOKENS, decoded, opened, write_model
from test_tt import matrices, using
from tiny_factors import KINDS, RANK, SPEEDUP, write_pack

from ralo import RaloError, metrics
from ralo.commands.explain import plan as explained
from ralo.compose import compose
from ralo.modes import TT
from ralo.weights import PLACES


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("tt") / "model")


@pytest.fixture(scope="module")
def made(model: Path) -> Path:
    return write_pack(model, model.with_name("pack"))


def test_metrics(model, made):
    lm = opened(model, using(made, target="attn"))
    found, all_of_them = lm.metrics(), matrices(lm)
    tt = {name: value for name, value in found.items() if name.startswith("tt.")}
    dense = [getattr(w, p) for w in lm.model.weights.layers for p in ("qkv", "o")]
    assert tt == {
        "tt.enabled": 4,
        "tt.rank": pytest.approx(sum(m.rank for m in all_of_them) / 4),
        "tt.gap": pytest.approx(sum(m.gap for m in all_of_them) / 4),
        "tt.speedup": SPEEDUP + 1 / 8,
        "tt.mem_saved": sum(m.nbytes for m in dense) - sum(m.nbytes for m in all_of_them),
    }
    assert 0 < tt["tt.gap"] < 1 and {m.rank for m in all_of_them} == {RANK}
    assert set(tt) == {name for name in metrics.NAMES if name.startswith("tt.")}
    assert [(layer["tt.enabled"], layer["tt.speedup"]) for layer in lm.layer_metrics()] == [(2, 1.5), (2, 1.75)]
    assert found["weight_bytes"] == opened(model).model.nbytes + sum(m.nbytes for m in all_of_them)


def test_nothing_on_has_figures_too():
    none = {"enabled": 0, "rank": 0, "gap": 0, "speedup": 1, "mem_saved": 0}
    assert TT.totals({}) == none and none.keys() == TT.metrics.keys()


def test_bytes_read_are_those_of_the_factors(model, made):
    lm = opened(model, using(made))
    counts = []
    for dense in (False, True):
        before = lm.model.bytes_read
        decoded(lm, dense=dense)
        counts.append(lm.model.bytes_read - before)
    theirs = sum(getattr(w, p).nbytes for w in lm.model.weights.layers for p in PLACES)
    assert counts[1] - counts[0] == len(TOKENS[:-1]) * (theirs - sum(m.nbytes for m in matrices(lm)))


def test_where_all_are_refused_it_is_dense_and_says_so(model, tmp_path):
    why = {f"layers.{i}.{place}": f"is too small, {i}" for i in range(2) for place in PLACES}
    lm = opened(model, using(write_pack(model, tmp_path / "pack", kinds={}, refused=why)))
    assert np.array_equal(decoded(lm), decoded(opened(model))) and not lm.model.has_modes
    rows = [row["runs"] for row in explained(lm)]
    assert rows == ["dense: tt is too small, 0"] * 4 + ["dense: tt is too small, 1"] * 4 + ["dense"]
    lm.use(compose([]))
    assert {row["runs"] for row in explained(lm)} == {"dense"}


def test_explain_says_what_runs_where(model, tmp_path):
    kinds = {"qkv": "two", "up": "rest"}
    lm = opened(model, using(write_pack(model, tmp_path / "pack", kinds=kinds, refused={"layers.0.o": "is slow"})))
    rows, found = explained(lm)[:4], matrices(lm)[:2]
    assert [(r["storage"], r["bytes"]) for r in rows[::2]] == [("tt", m.nbytes) for m in found]
    said = [f"{m.nbytes / m.replaced:.2f} of the bytes, misses {m.gap:.3f}" for m in found]
    assert rows[0]["runs"] == f"tt: rank 40, {said[0]}" and rows[2]["runs"] == f"tt: rank 40 and a rest, {said[1]}"
    assert (rows[1]["runs"], rows[3]["runs"]) == ("dense: tt is slow", "dense")


def test_a_model_without_factors_needs_a_pack(model, made):
    with pytest.raises(RaloError, match="--tt needs weights that were made for it: ralo pack -m MODEL --tt=on -o DIR"):
        opened(model, TT())
    for name, asked in {
        "share": 0.5,
        "rank": 128,
        "maxvol_k": 9,
        "gap": 0.1,
        "rest": "on",
        "cores": 3,
        "form": "svd",
    }.items():
        flag = f"--tt-{name.replace('_', '-')}={getattr(TT(), name)}, not {asked}: pack the model again"
        with pytest.raises(RaloError, match=f"was made with {flag}"):
            opened(model, using(made, **{name: asked}))
    assert KINDS.keys() == PLACES.keys()
