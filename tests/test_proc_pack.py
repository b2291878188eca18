"""Packs of procedural weights as they are made: what they say of themselves, and models with a short context."""

from __future__ import annotations

import numpy as np
import pytest
from test_proc import MADE, TEXT, pack, write_model
from tiny import write_hf

import ralo
from ralo.formats import packed
from ralo.loader import open_checkpoint
from ralo.modes import Proc
from ralo.modes.base import Override
from ralo.proc.about import AboutProc
from ralo.proc.matrix import ProcMatrix
from ralo.proc.pack import build_proc
from ralo.weights import build


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("made") / "model")


def test_says_what_it_is_made_of(model, tmp_path):
    to = pack(model, tmp_path / "pack")
    about, lm = packed.about(to, AboutProc), ralo.load(to)
    found = {name: m for name, m in lm.model.weights.matrices().items() if isinstance(m, ProcMatrix)}
    assert len(found) == 8 and about.matrices == {name: m.digest() for name, m in found.items()}
    assert {k: about.settings[k] for k in ("bits", "target", "deltas", "generator", "watermark", "shed_eps")} == {
        "bits": 4.2, "target": "both", "deltas": 0.01, "generator": "fitted", "watermark": 4096, "shed_eps": 0.0
    }  # fmt: skip
    assert set(about.settings).isdisjoint({"on", "pack"})
    assert not to.with_name("pack.building").exists() and not to.with_name("pack.partial").exists()


def test_the_same_again_is_the_same_bytes(model, tmp_path):
    one, two = pack(model, tmp_path / "one"), pack(model, tmp_path / "two")
    for name in (packed.INFO, packed.WEIGHTS):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_settings_decide_what_is_made(model, tmp_path):
    where = (Override(frozenset({0}), None, {"on": "off"}),)
    few = ralo.load(pack(model, tmp_path / "few", Proc(target="mlp", bits=4.2, deltas=0.0, where=where)))
    found = {name: m for name, m in few.model.weights.matrices().items() if isinstance(m, ProcMatrix)}
    assert set(found) == {"layers.1.up", "layers.1.down"} and all(m.fanout == 0 for m in found.values())
    hashed = ralo.load(pack(model, tmp_path / "hashed", Proc(target="mlp", bits=4.2, generator="hash", deltas=0.0)))
    fitted = ralo.load(pack(model, tmp_path / "fitted", Proc(target="mlp", bits=4.2, deltas=0.0)))
    a, b = (lm.model.weights.layers[1].up for lm in (hashed, fitted))
    assert not np.array_equal(a.tables, b.tables) and a.data.shape == b.data.shape
    rich = ralo.load(pack(model, tmp_path / "rich", Proc(target="mlp", bits=8.25, deltas=0.0)))
    assert rich.model.weights.layers[1].up.scales.shape[1] == 6 > b.scales.shape[1]


def test_progress_goes_up_to_the_end(model, tmp_path):
    ckpt, shown = open_checkpoint(str(model)), []
    cfg, weights = build(ckpt, "int8")
    build_proc(ckpt, cfg, weights, MADE, TEXT, tmp_path / "pack", shown.append)
    assert shown == sorted(shown) and shown[-1] == pytest.approx(1) and len(shown) == 16


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2"])
def test_a_model_with_a_short_context(kind, tmp_path):
    """Windows of text are no longer than that."""
    to = pack(write_hf(tmp_path / "model", kind), tmp_path / "pack", Proc(bits=8.25))
    lm = ralo.load(to)
    assert lm.model.cfg.max_context == 128 and np.isfinite(lm.model.forward(TEXT[:40], lm.new_sequence())).all()
